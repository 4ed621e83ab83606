"""A run as it is seen: timeline pictures and pages, traces for Perfetto, metrics and trackers.

Import the module that you need (``picture``, ``page``, ``chrome_trace``, ``metrics``): matplotlib is
loaded only where a picture is drawn.
"""
