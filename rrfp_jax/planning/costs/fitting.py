"""From what chunks were measured to take, the costs of a layer of each type, by least squares.

A task of a chunk takes what its layers take, and the same small time more whatever they are: launching, waiting, the
way to the next task. So with chunks of one and of several layers the time of a layer comes from differences, and what
is left is of every task. Numbers that a fit would make negative are 0 (non-negative least squares). Errors in
milliseconds count: a chunk of several layers says more about each of them than one of a single layer does.

A chunk that returns no gradient, the first of a model, leaves its whole backward to W. Of it only the sum of I and W
counts, and of types that stand in no other chunk, such as an embedding, all of it is W.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from scipy.optimize import nnls

KINDS = ("F", "I", "W", "B")
"""Tasks of a microbatch; B is the whole backward."""
Row = tuple[dict[tuple[str, str], float], float]
"""How often each unknown counts, and what they add up to."""


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """What the tasks of one chunk took."""

    layers: tuple[str, ...]
    """The types of its layers."""
    runs_ms: Mapping[str, Sequence[float]]
    """By kind every run of F, I, W or B; and of U, the sum and the update of gradients, once per step."""
    returns_gradient: bool = True
    """Whether it has an input gradient."""

    @property
    def medians_ms(self) -> dict[str, float]:
        """Of each kind that ran."""
        return {kind: median(runs) for kind, runs in self.runs_ms.items() if runs}


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """What a fit has found."""

    types: Mapping[str, Mapping[str, float]]
    """By type milliseconds by kind."""
    task_ms: float = 0.0
    """Of every task, whatever it holds."""
    off: Mapping[str, float] = field(default_factory=dict)
    """By kind how far the fit is from the medians, as a share: the mean over chunks, each weighed by its time."""


def fit_times(chunks: Sequence[ChunkTimes]) -> LayerTimes:
    """The times of each type; raises ValueError where some type ran no forward. A frozen one may have no backward."""
    names = list(dict.fromkeys(name for chunk in chunks for name in chunk.layers))
    inner = {name for chunk in chunks if chunk.returns_gradient for name in chunk.layers}
    rows = [row for chunk in chunks for row in _rows(chunk, inner)]
    found = _solved(rows)
    task_ms = found.get(_TASK, 0.0)
    updates = _solved(
        [
            ({("U", name): chunk.layers.count(name) for name in chunk.layers}, chunk.medians_ms["U"])
            for chunk in chunks
            if "U" in chunk.medians_ms
        ]
    )
    types = {name: {kind: found[kind, name] for kind in KINDS if (kind, name) in found} for name in names}
    for name, times in types.items():
        if "F" not in times:
            raise ValueError(f"layer type {name!r} was seen to run no forward: record whole steps")
        times["U"] = updates.get(("U", name), 0.0)
    return LayerTimes(types=types, task_ms=task_ms, off=_off(chunks, types, task_ms))


_TASK = ("", "task")


def _rows(chunk: ChunkTimes, inner: Iterable[str]) -> Iterable[Row]:
    """The equations of one chunk."""
    known = chunk.medians_ms
    groups = [("F",), ("B",)] + ([("I",), ("W",)] if chunk.returns_gradient else [("I", "W")])
    for kinds in groups:
        if not any(kind in known for kind in kinds):
            continue
        row: dict[tuple[str, str], float] = {_TASK: float(sum(kind in known for kind in kinds))}
        for name in chunk.layers:
            for kind in kinds:
                if kind != "I" or name in inner:
                    row[kind, name] = row.get((kind, name), 0.0) + 1
        yield row, sum(known.get(kind, 0.0) for kind in kinds)


def _solved(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    if not rows:
        return {}
    unknowns = list(dict.fromkeys(key for row, _ in rows for key in row))
    sums = np.array([total for _, total in rows])
    matrix = np.array([[row.get(key, 0.0) for key in unknowns] for row, _ in rows])
    solution, _ = nnls(matrix, sums)
    return dict(zip(unknowns, map(float, solution), strict=True))


def _off(chunks: Sequence[ChunkTimes], types: Mapping[str, Mapping[str, float]], task_ms: float) -> dict[str, float]:
    off: dict[str, float] = {}
    for kind in KINDS:
        known = [chunk for chunk in chunks if kind in chunk.medians_ms and (chunk.returns_gradient or kind in "FB")]
        seen = [chunk.medians_ms[kind] for chunk in known]
        fitted = [task_ms + sum(types[name].get(kind, 0.0) for name in chunk.layers) for chunk in known]
        if sum(seen):
            off[kind] = sum(abs(a - b) for a, b in zip(seen, fitted, strict=True)) / sum(seen)
    return off
