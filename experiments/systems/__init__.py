"""Schedules over fast and slow devices and networks, at all three levels: ``experiments.levels --systems 3x3``."""
