"""All questions, in the order of the report."""

from experiments.paper import endtoend, hints, jitter, ladder, real, windows

QUESTIONS = {module.QUESTION.name: module.QUESTION for module in (ladder, real, endtoend, jitter, hints, windows)}
"""By name."""
