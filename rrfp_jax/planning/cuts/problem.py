"""What a chunk would cost, for every place where it could begin and end: the numbers that all ways to cut share.

Arrays over ``[first layer, layer behind the last]`` are made once; a cut is a row of bounds ``0 = b0 < b1 < ... = n``,
and looking it up costs a few array accesses, however many cuts are asked for at a time.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.planning.costs import ModelCosts
from rrfp_jax.planning.cuts.room import Room
from rrfp_jax.schedules import Placement

Floats = NDArray[np.float64]
Cuts = NDArray[np.int64]
"""Bounds of cuts [cuts, chunks + 1]."""


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A model to be cut for a placement. Raises ValueError, with the remedy, where there is no cut at all."""

    costs: ModelCosts
    placement: Placement
    num_microbatches: int
    split: bool
    stage_factors: tuple[float, ...] = ()
    room: Room | None = None

    def __post_init__(self) -> None:
        layers, chunks, stages = self.costs.num_layers, self.placement.num_chunks, self.placement.num_stages
        if chunks > layers:
            raise ValueError(
                f"{layers} layers, ends included, do not fill {chunks} chunks on {stages} stages: give fewer stages or "
                "chunks"
            )
        parts = len({end for end in self.costs.ends if end < layers - 1}) + 1
        if chunks < parts:
            raise ValueError(f"the model has {parts} parts that share no chunk, and {chunks} chunks: give more chunks")
        if self.stage_factors and (len(self.stage_factors) != stages or not min(self.stage_factors) > 0):
            raise ValueError(f"stage factors {self.stage_factors} for {stages} stages: give each a positive number")
        if self.room is not None:
            self.room.check(self.placement)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """First layer and the one behind the last of each row of layers of one type that no end cuts."""
        layers, ends = self.costs.layers, self.costs.ends
        changes = [at + 1 for at in range(len(layers) - 1) if layers[at] != layers[at + 1] or at in ends]
        return list(pairwise([0, *changes, len(layers)]))

    @cached_property
    def layer_work_ms(self) -> Floats:
        """All tasks of an average microbatch, by layer, on a stage of factor 1."""
        work_ms = [self.costs.of(layer).work_ms(split=self.split) for layer in range(self.costs.num_layers)]
        return np.array(work_ms) * self._mean_factors

    @cached_property
    def layer_forward_ms(self) -> Floats:
        """The forward of an average microbatch, likewise."""
        forward_ms = [self.costs.of(layer).forward_ms for layer in range(self.costs.num_layers)]
        return np.array(forward_ms) * self._mean_factors

    @cached_property
    def _mean_factors(self) -> Floats:
        """How many times a layer's costs an average microbatch takes, by layer."""
        given = [self.costs.factors.get(name, (1.0,))[: self.num_microbatches] for name in self.costs.layers]
        return np.array([sum(factors) / len(factors) for factors in given])

    @cached_property
    def chunk_factors(self) -> Floats:
        """How many times as long each chunk's stage takes."""
        factors = self.stage_factors or (1.0,) * self.placement.num_stages
        return np.array([factors[stage] for stage in self.placement.stage_of_chunk])

    @property
    def overhead_ms(self) -> float:
        """Of a chunk's tasks for a microbatch, whatever they hold."""
        return self.costs.task_ms * (3 if self.split else 2)

    @cached_property
    def work_ms(self) -> Floats:
        """A chunk's layers [first, behind last]; infinite where no chunk can be."""
        work_ms = np.round(_sums(self.layer_work_ms), 9)  # so that equal layers are equal wherever they stand
        first, stop = np.indices(work_ms.shape)
        work_ms[first >= stop] = np.inf
        for end in self.costs.ends:
            work_ms[(first <= end) & (stop > end + 1)] = np.inf
        return work_ms

    @cached_property
    def stage_of(self) -> Floats:
        """[chunks, stages], 1 where the stage owns the chunk."""
        return np.eye(self.placement.num_stages)[list(self.placement.stage_of_chunk)]

    def chunk_ms(self, cuts: Cuts) -> Floats:
        """What each chunk takes for an average microbatch [cuts, chunks]."""
        chunk_ms: Floats = self.work_ms[cuts[:, :-1], cuts[:, 1:]] * self.chunk_factors + self.overhead_ms
        return chunk_ms

    def stage_ms(self, chunk_ms: Floats) -> Floats:
        """What each stage takes [cuts, stages]."""
        found = np.empty((len(chunk_ms), self.placement.num_stages))
        for stage, chunks in enumerate(self.placement.chunks_of_stage):
            found[:, stage] = chunk_ms[:, list(chunks)].sum(axis=1)
        return found

    @cached_property
    def limits(self) -> Floats:
        """Bytes of each stage; infinite where there is no limit."""
        limits = self.room.limits if self.room else (None,) * self.placement.num_stages
        return np.array([np.inf if limit is None else float(limit) for limit in limits])

    @cached_property
    def has_limits(self) -> bool:
        """Whether memory is asked for at all."""
        return bool(np.isfinite(self.limits).any())

    @cached_property
    def bytes_of_chunks(self) -> "ChunkArrays":
        """What chunks hold."""
        return _chunk_arrays(self.costs, self.num_microbatches, split=self.split)

    def stage_bytes(self, cuts: Cuts) -> Floats:
        """What each stage needs at most [cuts, stages], as the forecast of an order's memory counts it."""
        assert self.room is not None
        first, stop, sizes = cuts[:, :-1], cuts[:, 1:], self.bytes_of_chunks
        fixed, inputs = sizes.fixed[first, stop], sizes.inputs[first]
        more, peak = sizes.more[first, stop], sizes.peak[first, stop]
        found = np.empty((len(cuts), self.placement.num_stages))
        for stage, own in enumerate(self.placement.chunks_of_stage):
            chunks = list(own)
            held = np.array(self.room.allocations(self.placement, stage, self.num_microbatches))
            lasting = fixed[:, chunks].sum(axis=1)
            for part in self.room.waiting(self.placement, stage, self.num_microbatches):
                lasting += (inputs[:, chunks] @ np.array(part).T).max(axis=1)
            found[:, stage] = lasting + (more[:, chunks] @ held.T).max(axis=1) + peak[:, chunks].max(axis=1)
        return found

    def excess(self, cuts: Cuts) -> Floats:
        """The largest share of its limit that a stage needs [cuts], at least 1: what fits, fits alike."""
        if not self.has_limits:
            return np.ones(len(cuts))
        shares: Floats = (self.stage_bytes(cuts) / self.limits).max(axis=1)
        return np.maximum(1.0, shares)


@dataclass(frozen=True, kw_only=True)
class ChunkArrays:
    """Bytes of a chunk, all but ``inputs`` over [first layer, layer behind the last]."""

    fixed: Floats
    inputs: Floats
    """[first layer], per microbatch that waits."""
    more: Floats
    """How much more a microbatch takes in flight than while it waits."""
    peak: Floats
    """Temporaries, and one output on its way out."""
    per_layer: dict[str, Floats]
    """By field of the layers' costs, times the largest factor of a microbatch where it is per microbatch."""


_PER_MICROBATCH = ("stash_bytes", "owed_bytes", "kept_bytes")
_OTHERS = ("fixed_bytes", "temporaries_bytes", "output_bytes")
ROOM, FIRST_ROOM = "room_bytes", "first_room_bytes"
"""What each layer adds to the temporaries of its chunk, and in the first chunk."""


def _chunk_arrays(costs: ModelCosts, num_microbatches: int, *, split: bool) -> ChunkArrays:
    factors = np.array([max(costs.factors.get(name, (1.0,))[:num_microbatches]) for name in costs.layers])
    layers = [costs.of(layer) for layer in range(costs.num_layers)]
    of = {name: np.array([float(getattr(each, name)) for each in layers]) for name in (*_PER_MICROBATCH, *_OTHERS)}
    of |= {name: of[name] * factors for name in _PER_MICROBATCH}
    for name, is_first in ((ROOM, False), (FIRST_ROOM, True)):
        of[name] = np.array([float(each.room_bytes(split=split, is_first=is_first)) for each in layers])
    behind = np.concatenate([[0.0], of["output_bytes"][:-1], [0.0]])  # crosses each bound; nothing at the model's ends
    stash = np.rint(np.append(of["kept_bytes"], 0.0)[:, None] + _sums(of["stash_bytes"]))
    owed = np.rint(_sums(of["owed_bytes"]))
    owed[0, 1:-1] = stash[0, 1:-1] + behind[1:-1]  # see CutModel.chunk_bytes
    in_flight = np.maximum(stash, owed if split else 0.0) + behind[None, :]
    room = _sums(of[ROOM])
    room[0] = _sums(of[FIRST_ROOM])[0]
    return ChunkArrays(
        fixed=_sums(of["fixed_bytes"]),
        inputs=behind,
        more=np.maximum(0.0, in_flight - behind[:, None]),
        peak=_largest(of["temporaries_bytes"]) + room + np.maximum(behind[:, None], behind[None, :]),
        per_layer=of,
    )


def _sums(values: Floats) -> Floats:
    """Of values[first:stop], by both."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = total[None, :] - total[:, None]
    return sums


def _largest(values: Floats) -> Floats:
    """Of values[first:stop], by both; 0 of none."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        found[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return found
