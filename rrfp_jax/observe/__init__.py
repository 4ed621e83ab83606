"""What a run shows of itself: timeline pictures and pages, traces for Perfetto, and the metrics file.

Import the module that you need (``picture``, ``page``, ``chrome_trace``, ``metrics``): matplotlib and plotly are
loaded only where something is drawn with them.
"""
