"""When a run evaluates, and on what: a validated record, pure data."""

from dataclasses import dataclass
from typing import Any

from rrfp_jax.field_rules import AT_LEAST_1, check_fields

HELD_OUT_SET = "held_out"
"""The only set where none is named: the part of the run's data that is held out."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation during training, on data that is not trained on."""

    every: int | None = None
    """Training steps from one evaluation to the next. None: only after the last step."""
    batches: int = 8
    """Batches of each set, always the same ones, from the first on."""
    sets: dict[str, dict[str, Any]] | None = None
    """By name, what is different from the section of the run's data, for example
    ``{validation: {path: val.txt}}``. A set with a path of its own takes all that is there, others the part of the
    run's data that is held out (``held_out``). None: that part alone."""
    at_start: bool = False
    """Whether to evaluate before the first step too."""
    keep_best: bool = False
    """Whether the checkpoint with the least loss of the first set is saved at once and stays, beside the newest
    ones."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "every", "batches")
        if self.sets is not None and not self.sets:
            raise ValueError("sets is empty, so there is nothing to evaluate on: name one, or leave sets out")

    @property
    def named_sets(self) -> dict[str, dict[str, Any]]:
        """By name, what is different from the section of the run's data."""
        return self.sets or {HELD_OUT_SET: {}}

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after so many steps of a run."""
        if not step:
            return self.at_start
        return step == num_steps or (self.every is not None and step % self.every == 0)
