"""What a run shows of itself: timeline pictures and pages, traces for Perfetto, and the metrics file.

Import the module that you need (``picture``, ``page``, ``chrome_trace``, ``metrics``): matplotlib is
loaded only where a picture is drawn.
"""
