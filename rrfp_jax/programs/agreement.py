"""The agreement of all stages on a step: plain host arithmetic on one small report per stage.

The gradients that stages hold at the end of a step are gradients of the *summed* loss. The verdict turns them into
gradients of the mean loss, clipped by their global norm as ``optax.clip_by_global_norm`` would, or tells everybody to
leave the step out. Sums run in float64 and in ascending order of chunk or microbatch, so that every stage that adds
up the same reports reaches the same bits, whatever order they came in.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from struct import Struct
from typing import Any

import numpy as np

MAX_NAME_BYTES = 40
"""Bytes of the longest name of a named sum."""
_NORM, _LOSS, _SUM = Struct("<Id"), Struct("<IIdd"), Struct(f"<II{MAX_NAME_BYTES}sd")
# a chunk and a microbatch behind it are, read together, the number by which entries are put in order
_NORMS = np.dtype([("place", "<u4"), ("value", "<f8")])
_LOSSES = np.dtype([("place", "<u8"), ("loss", "<f8"), ("weight", "<f8")])
_SUMS = np.dtype([("place", "<u8"), ("name", f"S{MAX_NAME_BYTES}"), ("value", "<f8")])


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """The contribution of one stage to the agreement of a step; no two stages report the same chunk."""

    squared_norms: tuple[tuple[int, float], ...] = ()
    """Tuples (chunk, sum of its squared gradients) as ``reduce`` returns the sum, with the chunk's number within its
    replica (among all replicas where each takes its own gradients), one for each piece where replicas add up pieces:
    the owner of shared parameters counts them. A negative sign, of a zero too, says that the chunk's next update cannot
    be finite."""
    losses: tuple[tuple[int, int, float, float], ...] = ()
    """Tuples (microbatch, chunk, loss sum, weight), one for every loss that was computed here."""
    named_sums: tuple[tuple[int, int, str, float], ...] = ()
    """Tuples (microbatch, chunk, name, value), one for every named sum beside a loss."""

    def as_plain(self) -> dict[str, bytes]:
        """Returns the report as plain data, for another process: bytes that ranks join without looking inside."""
        return {
            "squared_norms": b"".join(starmap(_NORM.pack, self.squared_norms)),
            "losses": b"".join(_LOSS.pack(chunk, m, loss, weight) for m, chunk, loss, weight in self.losses),
            "named_sums": b"".join(_SUM.pack(chunk, m, name.encode(), v) for m, chunk, name, v in self.named_sums),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, bytes]) -> "StageReport":
        """Returns the report that :meth:`as_plain` or :func:`merged` made plain."""
        return cls(
            squared_norms=tuple(_NORM.iter_unpack(plain["squared_norms"])),
            losses=tuple((m, chunk, loss, weight) for chunk, m, loss, weight in _LOSS.iter_unpack(plain["losses"])),
            named_sums=tuple(
                (m, chunk, name.rstrip(b"\0").decode(), value)
                for chunk, m, name, value in _SUM.iter_unpack(plain["named_sums"])
            ),
        )


def merged(reports: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Joins several stages' reports, each as plain data, to one.

    Nothing is summed yet, since the bits of a sum would depend on the order in which reports meet. So the report grows
    by one number per chunk: the norm of its gradients.
    """
    reports = tuple(reports)
    return {name: b"".join(report[name] for report in reports) for name in ("squared_norms", "losses", "named_sums")}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision of all stages on a step, with its loss and norm."""

    weight: float
    """The total weight, for example the number of tokens of the step."""
    loss_sum: float
    """The loss, summed over all microbatches."""
    loss: float
    """The summed loss over the total weight."""
    grad_norm: float
    """Global norm of the gradient of the mean loss, before clipping; never negative. Where replicas take their own
    gradients, the root mean square of their norms."""
    scale: float
    """Factor that turns the accumulated gradients into the ones to apply: clip factor over total weight."""
    finite: bool
    """Whether loss and gradient norm are finite numbers, and nothing else is wrong with the step."""
    apply: bool
    """Whether the update happens; if not, parameters and optimizer state stay as they are."""
    fault: str | None = None
    """A sentence on the fault of the step, or its spike; None if it has none. Without ``skip_nonfinite`` a step with a
    fault is applied all the same."""
    stop: bool = False
    """Whether a process has asked to end the run; all see it in the same verdict, and so stop after the same step."""
    save: bool = False
    """Whether it is time to save the state."""
    scales: Sequence[float] = field(default=(), hash=False)
    """The factor of each replica in place of ``scale``, where replicas take their own gradients."""
    means: dict[str, float] = field(default_factory=dict, hash=False)
    """Every named sum over the total weight, by name."""

    def as_plain(self) -> dict[str, Any]:
        """Returns the verdict as plain data, for another process; ``Verdict(**plain)`` is the way back."""
        return {**vars(self)}


class NormHistory:
    """Norms of the last steps' gradients, which tell a spike, by the rule of OLMo 2 (arXiv 2501.00656; the class
    ``SkipStepOptimizer`` of its code).

    A step is left out if its norm is more than some standard deviations above the mean of a window of norms before it.
    Those of steps left out count as well, so that a run goes on whose norms rise for good; what is no positive finite
    number does not. Nothing is judged before the norms fill half the window. The units of a process share one history,
    to which all of them add the same.
    """

    def __init__(self) -> None:
        self._of_step: dict[int, float] = {}

    def go_on(self, norms: Sequence[float]) -> None:
        """Takes the :attr:`norms` of steps before those to come."""
        self._of_step = {place - len(norms): norm for place, norm in enumerate(norms)}

    def add(self, step: int, norm: float, window: int) -> None:
        """Adds the norm of a step, once, and forgets those before a window."""
        if 0 < norm < math.inf:
            self._of_step.setdefault(step, norm)
        for old in sorted(self._of_step)[:-window]:
            self._of_step.pop(old, None)

    @property
    def norms(self) -> tuple[float, ...]:
        """The norms in the order of their steps."""
        return tuple(norm for _, norm in sorted(self._of_step.items()))

    def limit(self, deviations: float | None, window: int) -> float:
        """Returns the largest norm of the next step that is no spike; without ``deviations`` none is one."""
        norms = self.norms
        if deviations is None or len(norms) < max(2, window // 2):
            return math.inf
        mean = math.fsum(norms) / len(norms)
        variance = math.fsum((norm - mean) ** 2 for norm in norms) / (len(norms) - 1)
        return mean + deviations * math.sqrt(variance)


def agree(
    reports: Iterable[StageReport | Mapping[str, bytes]],
    *,
    clip_norm: float | None = None,
    largest_norm: float = math.inf,
    skip_nonfinite: bool = True,
    stop: bool = False,
    save: bool = False,
    num_replicas: int | None = None,
) -> Verdict:
    """Combines the reports of all stages, given in any order, some or all of them as plain data.

    ``clip_norm`` limits the norm of the mean gradient. With ``skip_nonfinite`` a step whose loss or gradients are not
    finite is left out, and so is one without any weight, or with a microbatch of negative weight; without it the update
    happens regardless. A step whose norm is above ``largest_norm`` is left out as a spike. ``stop`` and ``save`` are
    passed on to all.

    ``num_replicas`` is the number of replicas that take their own gradients, None elsewhere. All of them divide by the
    mean of their weights, so that the mean of their gradients is that of the mean loss. Each is clipped by its own
    norm. All leave a step out in which the loss or the gradients of one are not finite.
    """
    check_clip_norm(clip_norm)
    plain = merged(report.as_plain() if isinstance(report, StageReport) else report for report in reports)
    losses, order = _in_order(plain["losses"], _LOSSES)
    weight = _sum(losses["weight"], order)
    loss_sum = _sum(losses["loss"], order)
    loss = _divide(loss_sum, weight)
    norms = np.frombuffer(plain["squared_norms"], _NORMS)
    # Norms of several pieces of a chunk in an order that no one who reports can change.
    order = np.lexsort((np.abs(norms["value"]), norms["place"]))
    values, number = np.abs(norms["value"])[order], num_replicas or 1
    replicas = norms["place"][order] % number
    # Squared norms are of sums: over the mean weight they are those of mean gradients.
    own_norms = [_divide(math.sqrt(_sum(values[replicas == r])) * number, abs(weight)) for r in range(number)]
    grad_norm = own_norms[0] if number == 1 else math.sqrt(sum(norm * norm for norm in own_norms) / number)
    factors = [1.0 if clip_norm is None or norm < clip_norm else clip_norm / norm for norm in own_norms]
    fault = _fault(losses["weight"], weight, loss, grad_norm) or _fault_of_update(norms, number)
    spike = None
    if fault is None and grad_norm > largest_norm:
        spike = f"the gradient's norm {grad_norm:.4g} is a spike: the last steps' norms allow {largest_norm:.4g}"
    return Verdict(
        weight=weight,
        loss_sum=loss_sum,
        loss=loss,
        grad_norm=grad_norm,
        scale=_divide(factors[0], weight),
        scales=() if num_replicas is None else tuple(_divide(factor * number, weight) for factor in factors),
        finite=fault is None,
        apply=(fault is None or not skip_nonfinite) and spike is None,
        fault=fault or spike,
        stop=stop,
        save=save,
        means=_means(plain["named_sums"], weight),
    )


def _fault(weights: np.ndarray, weight: float, loss: float, grad_norm: float) -> str | None:
    """Returns the fault of a step with these weights, in words that follow upon "because"; None if it has none."""
    if weights.size and weights.min() < 0:
        return f"a microbatch has the negative weight {weights.min():.6g}"
    if weight == 0:
        return "there is nothing to predict: all weights are 0"
    return None if math.isfinite(loss) and math.isfinite(grad_norm) else "loss or gradients were not finite"


def _fault_of_update(norms: np.ndarray, num_replicas: int) -> str | None:
    # the sign of a NaN says nothing
    spoilt = norms["place"][np.signbit(norms["value"]) & ~np.isnan(norms["value"])]
    if not spoilt.size:
        return None
    chunk = spoilt.min() // num_replicas
    return f"the optimizer's update of chunk {chunk} cannot be finite: look at its learning rate at this step"


def check_clip_norm(clip_norm: float | None) -> None:
    """Raises ValueError unless ``clip_norm`` is None or a positive number."""
    if clip_norm is not None and not (clip_norm > 0 and math.isfinite(clip_norm)):
        raise ValueError(f"clip_norm is {clip_norm}: give a positive number, or None to leave gradients as they are")


def _means(named_sums: bytes, weight: float) -> dict[str, float]:
    """Returns every named sum over the weight; like losses they are added up by microbatch, then by chunk."""
    if not named_sums:
        return {}
    sums, order = _in_order(named_sums, _SUMS)
    names, values = sums["name"][order], sums["value"][order]
    return {name.decode(): _divide(_sum(values[names == name]), weight) for name in np.unique(names)}


def _in_order(packed: bytes, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the entries as they came, and their order by place."""
    entries = np.frombuffer(packed, dtype)
    return entries, entries["place"].argsort(kind="stable")


def _sum(values: np.ndarray, order: np.ndarray | slice = slice(None)) -> float:
    # one after another: ``np.sum`` adds in pairs, and ``sum`` compensates since Python 3.12
    return float(values[order].cumsum()[-1]) if len(values) else 0.0


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
