"""What all stages agree on once per step: plain host arithmetic on one small report per stage.

The gradients that stages hold at the end of a step are gradients of the *summed* loss. The verdict turns them into
gradients of the mean loss, clipped by their global norm as ``optax.clip_by_global_norm`` would, or tells everybody to
leave the step out. Sums run in float64 and in ascending order of chunk or microbatch, so that every stage that adds
up the same reports reaches the same bits, whatever order they came in.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What one stage contributes to the agreement of a step."""

    squared_norms: tuple[tuple[int, float], ...] = ()
    """(chunk, sum of its squared gradients), as ``reduce`` returns it: shared parameters are counted by their owner."""
    losses: tuple[tuple[int, int, float, float], ...] = ()
    """(microbatch, chunk, loss sum, weight) of every loss that was computed here."""

    def as_plain(self) -> dict[str, Any]:
        """The report as plain data, for another process."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "StageReport":
        """What :meth:`as_plain` wrote, lists standing for tuples."""
        return cls(
            squared_norms=tuple(map(tuple, plain["squared_norms"])),
            losses=tuple(map(tuple, plain["losses"])),
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What every stage does with the step."""

    weight: float
    """Total weight, for example the number of tokens of the step."""
    loss: float
    """Summed loss over total weight."""
    grad_norm: float
    """Global norm of the gradient of the mean loss, before clipping."""
    scale: float
    """Factor that turns the accumulated gradients into the ones to apply: clip factor over total weight."""
    finite: bool
    """Whether loss and gradient norm are finite numbers."""
    apply: bool
    """Whether the update happens; if not, parameters and optimizer state stay as they are."""
    stop: bool = False
    """Whether a process has asked to end the run; all see it in the same verdict, and so stop after the same step."""
    save: bool = False
    """Whether it is time to save the state."""

    def as_plain(self) -> dict[str, Any]:
        """The verdict as plain data, for another process; ``Verdict(**plain)`` is the way back."""
        return asdict(self)


def merged(reports: Iterable[StageReport]) -> StageReport:
    """Several stages' reports as one: what each says, and no sum yet, whose bits would depend on who added first."""
    reports = tuple(reports)
    return StageReport(
        squared_norms=tuple(entry for report in reports for entry in report.squared_norms),
        losses=tuple(entry for report in reports for entry in report.losses),
    )


def agree(
    reports: Iterable[StageReport],
    *,
    clip_norm: float | None = None,
    skip_nonfinite: bool = True,
    stop: bool = False,
    save: bool = False,
) -> Verdict:
    """Combine the reports of all stages, given in any order.

    ``clip_norm`` limits the norm of the mean gradient. With ``skip_nonfinite`` a step whose loss or gradients are not
    finite is left out; without it the update happens regardless. A total weight of zero counts as not finite.
    ``stop`` and ``save`` are passed on to all.
    """
    check_clip_norm(clip_norm)
    reports = tuple(reports)
    losses = sorted((m, c, loss, weight) for report in reports for m, c, loss, weight in report.losses)
    norms = sorted(entry for report in reports for entry in report.squared_norms)
    weight = _ordered_sum(entry[3] for entry in losses)
    loss = _divide(_ordered_sum(entry[2] for entry in losses), weight)
    squared_norm = _ordered_sum(value for _, value in norms)
    grad_norm = _divide(math.sqrt(squared_norm) if squared_norm >= 0 else math.nan, weight)
    factor = 1.0 if clip_norm is None or grad_norm < clip_norm else clip_norm / grad_norm
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return Verdict(
        weight=weight,
        loss=loss,
        grad_norm=grad_norm,
        scale=_divide(factor, weight),
        finite=finite,
        apply=finite or not skip_nonfinite,
        stop=stop,
        save=save,
    )


def check_clip_norm(clip_norm: float | None) -> None:
    """Raise ValueError unless ``clip_norm`` is None or a positive number."""
    if clip_norm is not None and not (clip_norm > 0 and math.isfinite(clip_norm)):
        raise ValueError(f"clip_norm is {clip_norm}: give a positive number, or None to leave gradients as they are")


def _ordered_sum(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:  # not sum(): since Python 3.12 it compensates, and versions would disagree
        total += value
    return total


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
