"""A training run: its loop, its optimizer, and the directory that it writes."""
