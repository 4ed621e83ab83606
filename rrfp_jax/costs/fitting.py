"""Costs of a layer of each type, of links and of noise, fitted to measurements of chunks.

*Times of layers* come from least squares. A task of a chunk takes the time of its layers, and the same small time more
whatever they are: launching, waiting, the way to the next task. So with chunks of one and of several layers the time of
a layer comes from differences, and the rest belongs to every task. Numbers that a fit would make negative are 0
(non-negative least squares). Errors in milliseconds count: a chunk of several layers says more about each of them than
one of a single layer does.

A chunk that returns no gradient, the first of a model, leaves its whole backward to W. Of it only the sum of I and W
counts, and of types that stand in no other chunk, such as an embedding, all of it is W.

*Bytes of layers* come from differences between chunks of one type of layers, and are never less than was seen. Most
bytes of a chunk are the sum of its layers' bytes. Two things are not. A chunk that computes its forward again keeps its
input, once, however many layers follow. And programs use memory again from layer to layer, so that temporaries are some
bytes and some more for each layer. A layer that was seen in one number only does not tell these apart. Where the
backward computes layers again, the others' share is taken, since a layer's values may live on beside the next one's.

*Latency and bandwidth* of links come from how long messages of several sizes took.

*Noise* is fitted to repeated runs: the sigma of a log-normal body for each kind, and a common tail. Runs of one task
are taken relative to their median. The body's sigma comes from the middle half of the logarithms, which no tail
reaches. Runs that lie further out than a normal distribution of that sigma would come in a thousand runs, and by at
least a fifth of the median, is the tail: its share, and how many times the median it takes."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median

import numpy as np
from scipy.optimize import nnls

from rrfp_jax.costs.layer_costs import LinkCosts, Noise

_TASK_KINDS = ("F", "I", "W", "B")
"""Tasks of a microbatch; B is the whole backward."""
_Equation = tuple[dict[tuple[str, str], float], float]
"""Number of times that each unknown counts, and their sum."""


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Times of the tasks of one chunk."""

    layers: tuple[str, ...]
    """The types of its layers."""
    runs_ms: Mapping[str, Sequence[float]]
    """By kind every run of F, I, W or B; and of U, the sum and the update of gradients, once per step."""
    returns_gradient: bool = True
    """Whether it has an input gradient."""

    @property
    def medians_ms(self) -> dict[str, float]:
        """Median of each kind that ran."""
        return {kind: median(runs) for kind, runs in self.runs_ms.items() if runs}


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Times of the layers, as a fit has found them."""

    types: Mapping[str, Mapping[str, float]]
    """Milliseconds by kind of task, for each type."""
    task_ms: float = 0.0
    """Milliseconds that every task takes beside its layers."""
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
    types = {name: {kind: found[kind, name] for kind in _TASK_KINDS if (kind, name) in found} for name in names}
    for name, times in types.items():
        if "F" not in times:
            raise ValueError(f"layer type {name!r} was seen to run no forward: record whole steps")
        times["U"] = updates.get(("U", name), 0.0)
    off: dict[str, float] = {}
    for kind in _TASK_KINDS:
        known = [chunk for chunk in chunks if kind in chunk.medians_ms and (chunk.returns_gradient or kind in "FB")]
        seen = [chunk.medians_ms[kind] for chunk in known]
        fitted = [task_ms + sum(types[name].get(kind, 0.0) for name in chunk.layers) for chunk in known]
        if sum(seen):
            off[kind] = sum(abs(a - b) for a, b in zip(seen, fitted, strict=True)) / sum(seen)
    return LayerTimes(types=types, task_ms=task_ms, off=off)


_TASK = ("", "task")


def _rows(chunk: ChunkTimes, inner: Iterable[str]) -> Iterable[_Equation]:
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


def _solved(rows: Sequence[_Equation]) -> dict[tuple[str, str], float]:
    if not rows:
        return {}
    unknowns = list(dict.fromkeys(key for row, _ in rows for key in row))
    sums = np.array([total for _, total in rows])
    matrix = np.array([[row.get(key, 0.0) for key in unknowns] for row, _ in rows])
    solution, _ = nnls(matrix, sums)
    return dict(zip(unknowns, map(float, solution), strict=True))


_HALVES = {"input_gradient", "weight_gradient"}


@dataclass(frozen=True, kw_only=True)
class ChunkParts:
    """The bytes of a chunk of layers of one type."""

    layer: str
    """The type of the layers."""
    count: int
    fixed: int
    """Parameters, accumulators, optimizer state and the like."""
    gradient: int
    stash: int
    """Per microbatch from F to B or I, inputs that are kept included."""
    kept_inputs: int
    """The inputs among these."""
    owed: int
    """Per microbatch from I to W; 0 where the backward is whole."""
    outputs: int
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each program of a microbatch while it runs."""
    step_temporaries: int = 0
    """Bytes of the largest program that runs once per step, such as the update."""


def fit_bytes(chunks: Sequence[ChunkParts], *, recomputes: bool = False) -> dict[str, dict[str, int]]:
    """Returns for each type the fields of :class:`rrfp_jax.costs.LayerCosts` that are bytes; ``recomputes``: the chunks
    are rematerialised."""
    alike: dict[str, dict[int, list[ChunkParts]]] = {}
    for chunk in chunks:
        alike.setdefault(chunk.layer, {}).setdefault(chunk.count, []).append(chunk)
    # Chunks of as many layers ran with split and with whole backwards: the most bytes of each part count.
    by_type = {name: [_merged(some) for _, some in sorted(counts.items())] for name, counts in alike.items()}
    stashes = {name: _stash(some) for name, some in by_type.items()}
    temporaries = {name: _temporaries(some) for name, some in by_type.items()}
    if recomputes:
        lasting = max((_lasting(each) for each in temporaries.values()), default=0.0)
        for name, some in by_type.items():
            if len(some) == 1:
                alone = temporaries[name]["temporaries_bytes"]
                more = round(lasting * alone)
                temporaries[name] |= {"temporaries_bytes": alone - more, "more_temporaries_bytes": more}
    keeps_input, found = any(kept for _, kept in stashes.values()), {}
    for name, some in by_type.items():
        stash, kept = stashes[name]
        if keeps_input and len(some) == 1:
            # Where chunks of other types keep their input once, one whose layers were seen in one number does so too.
            kept = max(each.kept_inputs for each in some)
            stash = max(0, stash - kept // some[0].count)
        found[name] = {
            "fixed_bytes": _share(some, "fixed"),
            "gradient_bytes": _share(some, "gradient"),
            "owed_bytes": _share(some, "owed"),
            "output_bytes": max(each.outputs for each in some),
            "stash_bytes": stash,
            "kept_bytes": kept,
            "step_temporaries_bytes": _share(some, "step_temporaries"),
            **temporaries[name],
        }
    return found


def _merged(some: Sequence[ChunkParts]) -> ChunkParts:
    sizes = {each.name: max(getattr(one, each.name) for one in some) for each in fields(ChunkParts) if each.type is int}
    names = dict.fromkeys(name for one in some for name in one.temporaries)
    temporaries = {name: max(one.temporaries.get(name, 0) for one in some) for name in names}
    return ChunkParts(layer=some[0].layer, temporaries=temporaries, **sizes)


def _share(some: Sequence[ChunkParts], part: str) -> int:
    """Returns a layer's share of a part in which layers add up, rounded up; it has a share of the bytes that a chunk
    has once."""
    return max(-(-int(getattr(each, part)) // each.count) for each in some)


def _stash(some: Sequence[ChunkParts]) -> tuple[int, int]:
    """Returns the stash of a layer, and of a chunk beside its layers."""
    few, many = some[0], some[-1]
    if few.count == many.count:
        return _share(some, "stash"), 0
    more = max(0, -(-(many.stash - few.stash) // (many.count - few.count)))
    return more, max([0, *(each.stash - each.count * more for each in some)])


def _temporaries(some: Sequence[ChunkParts]) -> dict[str, int]:
    """Returns the temporaries of the largest program, and those that each layer adds, with whole and with split
    backwards; an upper bound of every program."""
    few, many = some[0], some[-1]

    def grown(names: Collection[str]) -> tuple[int, int]:
        """Returns the bytes of the largest of these programs beside its layers, and those of each layer."""
        more = 0
        if few.count < many.count:
            grown = (many.temporaries.get(name, 0) - few.temporaries.get(name, 0) for name in names)
            more = max([0, *(-(-each // (many.count - few.count)) for each in grown)])
        return max([0, *(one.temporaries.get(name, 0) - one.count * more for one in some for name in names)]), more

    names = {name for each in some for name in each.temporaries}
    base, more = grown(names - _HALVES if "backward" in names else names)
    split_base, split_more = grown(names - {"backward"})
    found = {"temporaries_bytes": max(base, split_base), "more_temporaries_bytes": more}
    return found if split_more == more else found | {"split_temporaries_bytes": split_more}


def _lasting(temporaries: Mapping[str, int]) -> float:
    """Returns the share of a layer's temporaries that the next layer cannot use again."""
    more = temporaries["more_temporaries_bytes"]
    return more / max(1, more + temporaries["temporaries_bytes"])


def fit_links(seen: Iterable[tuple[float, float]], control_ms: float | None = None) -> LinkCosts:
    """Returns the links of tensors that are given as (bytes, milliseconds), and of a message without tensors, if known.

    With a single size and no such message all of the time is latency. A fit in which size does not matter says so.
    """
    points = [(num_bytes / 1e6, ms) for num_bytes, ms in seen]
    if not points:
        return LinkCosts(latency_ms=control_ms or 0.0, control_ms=control_ms or 0.0)
    if control_ms is not None:
        points.append((0.0, control_ms))
    matrix = np.array([[1.0, megabytes] for megabytes, _ in points])
    times = np.array([ms for _, ms in points])
    weights = 1 / np.maximum(times, 1e-6)
    (latency_ms, ms_per_megabyte), _ = nnls(matrix * weights[:, None], times * weights)
    return LinkCosts(
        latency_ms=float(latency_ms),
        gb_per_s=1 / float(ms_per_megabyte) if ms_per_megabyte > 0 else None,
        control_ms=min(control_ms or 0.0, float(latency_ms)),
    )


_QUARTILES_APART = 1.34898
"""Distance of the quartiles of a standard normal distribution."""
_FAR = 3.2905
"""Sigmas within which a normal distribution has 999 of 1000 draws."""
_LEAST_FACTOR = 1.2
_LEAST_RUNS = 8
"""Runs of a task from which on its median means much."""
_SHORT_MS = 0.2
"""Shorter tasks vary with the clock and the host, and are left out where there are longer ones."""
_SLOTS = {"F": "F", "I": "I", "W": "W", "B": "I"}
"""As which kind of :class:`Noise` each counts: a whole backward like an input gradient, and like a weight gradient."""


def fit_noise(chunks: Sequence[ChunkTimes]) -> Noise:
    """Returns the noise of these runs; none where too few were made."""
    logs: dict[str, list[float]] = defaultdict(list)
    for least_ms in (_SHORT_MS, 0.0):
        for chunk in chunks:
            for kind, slot in _SLOTS.items():
                runs = np.array(chunk.runs_ms.get(kind, ()))
                if len(runs) >= _LEAST_RUNS and (middle := float(np.median(runs))) > least_ms:
                    logs[slot] += np.log(np.maximum(runs, 1e-6) / middle).tolist()
        if logs:
            break
    if "W" not in logs and "I" in logs:
        logs["W"] = logs["I"]
    quartiles = {slot: np.quantile(np.array(each), [0.25, 0.75]) for slot, each in sorted(logs.items())}
    sigma = {slot: round(float(high - low) / _QUARTILES_APART, 4) for slot, (low, high) in quartiles.items()}
    least = float(np.log(_LEAST_FACTOR))
    far = [float(log) for slot, each in logs.items() for log in each if log > max(_FAR * sigma[slot], least)]
    total = sum(map(len, logs.values()))
    if not far:
        return Noise(sigma=sigma)
    return Noise(sigma=sigma, tail=len(far) / total, tail_factor=float(np.mean(np.exp(far))))
