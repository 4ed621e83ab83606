"""The rows of a panel: one for each stage, and right under it a thin one for each engine that ran beside it."""

from collections.abc import Iterable
from typing import NamedTuple

from rrfp_jax.schedules import COMPUTE
from rrfp_jax.schedules.timeline import Span

THIN = 0.45
"""Height of an engine's row, in those of a stage's."""


class Row(NamedTuple):
    """One row; lengths are in heights of a stage's row, from the top of the panel."""

    stage: int
    lane: str
    top: float
    height: float

    @property
    def is_beside(self) -> bool:
        """Whether it shows an engine beside what the stage computes."""
        return self.lane != COMPUTE

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    @property
    def bottom(self) -> float:
        return self.top + self.height


def rows_of(num_stages: int, spans: Iterable[Span]) -> tuple[Row, ...]:
    """The rows from top to bottom; a stage's engines in the order of their names."""
    engines = sorted({(span.stage, span.lane) for span in spans if span.is_beside})
    rows: list[Row] = []
    for stage in range(num_stages):
        for lane in (COMPUTE, *(lane for of, lane in engines if of == stage)):
            top = rows[-1].bottom if rows else 0.0
            rows.append(Row(stage, lane, top, 1.0 if lane == COMPUTE else THIN))
    return tuple(rows)
