"""Schedules over systems of fast and slow devices and networks, at all three levels: ``rrfp levels --systems 3x3``."""
