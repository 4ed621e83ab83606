"""Forecasts before a run starts: what fits into memory, and which window does."""
