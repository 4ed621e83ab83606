"""All questions, in the order of the report."""

from experiments.paper import (
    breakdown,
    correctness,
    devices,
    encoders,
    endtoend,
    hints,
    jitter,
    jitter_real,
    ladder,
    never_slower,
    others,
    plan,
    prediction,
    real,
    small_models,
    windows,
)

_IN_ORDER = (
    ladder,
    plan,
    real,
    never_slower,
    endtoend,
    breakdown,
    others,
    small_models,
    jitter,
    jitter_real,
    hints,
    windows,
    encoders,
    devices,
    correctness,
    prediction,
)
QUESTIONS = {module.QUESTION.name: module.QUESTION for module in _IN_ORDER}
"""All questions of the evaluation by name, in the order of the report."""
