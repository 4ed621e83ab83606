"""The costs of every possible chunk of a model, and the memory that a cut has to keep to.

Arrays over ``[first layer, layer behind the last]`` are made once for a model and a placement, for each *kind* of stage
of a machine whose stages differ. A cut is a row of bounds
``0 = b0 < b1 < ... = n``, so that the costs of many cuts are looked up together with a few array accesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import Order
from rrfp_jax.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.costs.forecast import Reach, reaches
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE
from rrfp_jax.schedules import Placement

Floats = NDArray[np.float64]
Cuts = NDArray[np.int64]
"""Bounds of cuts [cuts, chunks + 1]."""
ADDED, ADDED_FIRST = "added_bytes", "added_first_bytes"
"""Keys of :attr:`ChunkArrays.per_layer`: bytes that each layer adds to the temporaries of its chunk, and of the first
chunk of a model."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory of each stage and the activations that it has to hold: give either ``held`` or ``footprints``.

    Raises ValueError for numbers that no stage has.
    """

    limits: tuple[int | None, ...]
    """Bytes of a device of each stage; None: unlimited."""
    held: tuple[float, ...] = ()
    """The most activations of each chunk that its stage holds, such as ``p - s`` on stage s of 1F1B."""
    footprints: tuple[int, ...] = ()
    """The most activations of one chunk and microbatch that each stage holds, of whichever of its chunks. The largest
    ones count first."""
    reaches: tuple[tuple[Reach, ...], ...] = ()
    """The activations that each stage has at its chunks at a time, held or waiting; empty: those of a whole step."""

    def __post_init__(self) -> None:
        if bool(self.held) == bool(self.footprints):
            raise ValueError("memory is for activations of each chunk or of each stage: give held or footprints")
        for name, rule in (("limits", AT_LEAST_1), ("held", NOT_NEGATIVE), ("footprints", NOT_NEGATIVE)):
            wrong = [each for each in getattr(self, name) if each is not None and not rule.holds(each)]
            if wrong:
                raise ValueError(f"memory has {name} {wrong[0]}: give {rule.words}")

    @classmethod
    def of_order(cls, order: Order, limits: Sequence[int | None]) -> "MemoryBudget":
        """Returns the budget of the activations that an order holds, counted as its memory forecast counts them."""
        here = tuple(reaches(order, stage) for stage in range(order.placement.num_stages))
        if order.footprints is not None:
            unit = order.graph.memory_unit
            footprints = tuple(-(-limit // unit) for limit in order.footprints)
            return cls(limits=tuple(limits), footprints=footprints, reaches=here)
        most = [max(reach.number for reach in of_stage) for of_stage in here]
        held = tuple(float(min(order.windows[stage], most[stage])) for stage in order.placement.stage_of_chunk)
        return cls(limits=tuple(limits), held=held, reaches=here)

    def check(self, placement: Placement) -> None:
        """Raises ValueError unless the numbers fit the stages and chunks of the placement."""
        stages, chunks = placement.num_stages, placement.num_chunks
        for name, wanted in (("limits", stages), ("held", chunks), ("footprints", stages), ("reaches", stages)):
            given = len(getattr(self, name))
            if given not in {wanted, 0} or (name == "limits" and given != wanted):
                raise ValueError(f"memory has {given} {name} for {stages} stages and {chunks} chunks: give {wanted}")

    def waiting(self, placement: Placement, stage: int, num_microbatches: int) -> list[list[tuple[float, ...]]]:
        """Returns how many microbatches there may be at each chunk of the stage, in parts that add up.

        Memory must suffice for any allocation of each part; a part has 0 for the chunks of the other parts.
        """
        chunks = len(placement.chunks_of_stage[stage])
        if not self.reaches:
            return [[(num_microbatches,) * chunks]]
        if self.held:
            most = max(reach.number for reach in self.reaches[stage])
            return [[(min(most, num_microbatches),) * chunks]]
        all_of_each = [num_microbatches] * chunks
        return [_allocations(reach.number, reach.chunks, all_of_each) for reach in self.reaches[stage]]

    def allocations(self, placement: Placement, stage: int, num_microbatches: int) -> list[tuple[float, ...]]:
        """Returns the numbers of activations of each chunk of the stage that memory must suffice for, any of them."""
        chunks = placement.chunks_of_stage[stage]
        if self.held:
            return [tuple(min(self.held[chunk], num_microbatches) for chunk in chunks)]
        most = [num_microbatches] * len(chunks)
        for reach in self.reaches[stage] if self.reaches else ():
            for place in reach.chunks:  # no more are held than may be there
                most[place] = min(num_microbatches, reach.number)
        return _allocations(self.footprints[stage], range(len(chunks)), most)


def _allocations(number: int, places: Sequence[int], most: Sequence[int]) -> list[tuple[float, ...]]:
    """Returns the ways to fill chunks in turn with ``number`` activations, of each at most ``most``, in every order."""
    found: dict[tuple[float, ...], None] = {}
    for order in permutations(places):
        dealt, left = [0.0] * len(most), number
        for chunk in order:
            dealt[chunk] = min(left, most[chunk])
            left -= min(left, most[chunk])
        found[tuple(dealt)] = None
    return list(found)


@dataclass(frozen=True, kw_only=True)
class LayerCutProblem:
    """A model to be cut for a placement. Raises ValueError, with the remedy, where there is no cut at all."""

    costs: ModelCosts
    placement: Placement
    num_microbatches: int
    split: bool
    memory: MemoryBudget | None = None
    replicas: int | tuple[int, ...] = 1

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
        if self.memory is not None:
            self.memory.check(self.placement)

    def model(self, counts: Sequence[int]) -> CutModel:
        """Returns the cut with these numbers of layers in the chunks."""
        return CutModel(
            costs=self.costs,
            counts=tuple(counts),
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            split=self.split,
            replicas=self.replicas,
        )

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """First layer and layer behind the last of each row of layers of one type that no end cuts."""
        layers, ends = self.costs.layers, self.costs.ends
        changes = [at + 1 for at in range(len(layers) - 1) if layers[at] != layers[at + 1] or at in ends]
        return list(pairwise([0, *changes, len(layers)]))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each stage the first one with the same costs, counted among these."""
        types = [stage.types for stage in self.costs.stages] or [self.costs.types] * self.placement.num_stages
        distinct = [each for at, each in enumerate(types) if types.index(each) == at]
        return tuple(map(distinct.index, types))

    @cached_property
    def kind_of_chunk(self) -> tuple[int, ...]:
        """The kind of each chunk's stage."""
        return tuple(self.kinds[stage] for stage in self.placement.stage_of_chunk)

    @cached_property
    def _layers(self) -> list[list[LayerCosts]]:
        """The costs of every layer on a stage of each kind."""
        stages = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        return [[self.costs.of(layer, stage) for layer in range(self.costs.num_layers)] for stage in stages]

    @cached_property
    def layer_work_ms(self) -> Floats:
        """Milliseconds of all tasks of a microbatch [kinds, layers]."""
        return np.array([[each.work_ms(split=self.split) for each in of_kind] for of_kind in self._layers])

    @cached_property
    def layer_forward_ms(self) -> Floats:
        """Milliseconds of a microbatch's forward [kinds, layers]."""
        return np.array([[each.forward_ms for each in of_kind] for of_kind in self._layers])

    @property
    def overhead_ms(self) -> float:
        """Milliseconds that a chunk's tasks of a microbatch take beside its layers."""
        return self.costs.task_ms * (3 if self.split else 2)

    @cached_property
    def work_ms(self) -> Floats:
        """Milliseconds of a chunk's layers [kinds, first, behind last]; infinite where no chunk can be."""
        # Rounded, so that equal layers are equal wherever they stand.
        work_ms = np.stack([np.round(_sums(of_kind), 9) for of_kind in self.layer_work_ms])
        first, stop = np.indices(work_ms.shape[1:])
        work_ms[:, first >= stop] = np.inf
        for end in self.costs.ends:
            work_ms[:, (first <= end) & (stop > end + 1)] = np.inf
        return work_ms

    @property
    def work_of_chunks_ms(self) -> Floats:
        """The same, with the chunks' tasks [chunks, first, behind last]."""
        work_ms: Floats = self.work_ms[list(self.kind_of_chunk)] + self.overhead_ms
        return work_ms

    def chunk_ms(self, cuts: Cuts) -> Floats:
        """Returns the milliseconds of each chunk for a microbatch [cuts, chunks]."""
        chunk_ms: Floats = self.work_ms[self.kind_of_chunk, cuts[:, :-1], cuts[:, 1:]] + self.overhead_ms
        return chunk_ms

    def stage_ms(self, chunk_ms: Floats) -> Floats:
        """Returns the milliseconds of each stage [cuts, stages]."""
        found = np.empty((len(chunk_ms), self.placement.num_stages))
        for stage, chunks in enumerate(self.placement.chunks_of_stage):
            found[:, stage] = chunk_ms[:, list(chunks)].sum(axis=1)
        return found

    @cached_property
    def limits(self) -> Floats:
        """Bytes of each stage; infinite where there is no limit."""
        limits = self.memory.limits if self.memory else (None,) * self.placement.num_stages
        return np.array([np.inf if limit is None else float(limit) for limit in limits])

    @cached_property
    def has_limits(self) -> bool:
        """Whether memory limits the cut at all."""
        return bool(np.isfinite(self.limits).any())

    @cached_property
    def bytes_of_chunks(self) -> "list[ChunkArrays]":
        """The bytes of every possible chunk on a stage of each kind."""
        return [self._bytes_of_chunks(layers) for layers in self._layers]

    def _bytes_of_chunks(self, layers: list[LayerCosts]) -> "ChunkArrays":
        of = {name: np.array([float(getattr(each, name)) for each in layers]) for name in _FIELDS}
        for name, is_first in ((ADDED, False), (ADDED_FIRST, True)):
            of[name] = np.array([float(each.added_bytes(split=self.split, is_first=is_first)) for each in layers])
        behind = np.concatenate([[0.0], of["output_bytes"][:-1], [0.0]])  # nothing crosses the ends of the model
        stash = np.append(of["kept_bytes"], 0.0)[:, None] + _sums(of["stash_bytes"])
        owed = _sums(of["owed_bytes"])
        # The first chunk of a model leaves its whole backward to W, so that W needs the stash and the output's
        # gradient.
        owed[0, 1:-1] = stash[0, 1:-1] + behind[1:-1]
        in_flight = np.maximum(stash, owed if self.split else 0.0) + behind[None, :]
        added = _sums(of[ADDED])
        added[0] = _sums(of[ADDED_FIRST])[0]
        largest = np.zeros_like(added)
        for first, _ in enumerate(layers):
            largest[first, first + 1 :] = np.maximum.accumulate(of["temporaries_bytes"][first:])
        return ChunkArrays(
            fixed=_sums(of["fixed_bytes"]),
            inputs=behind,
            more=np.maximum(0.0, in_flight - behind[:, None]),
            peak=largest + added + np.maximum(behind[:, None], behind[None, :]),
            per_layer=of,
        )

    def stage_bytes(self, cuts: Cuts) -> Floats:
        """Returns the most bytes that each stage needs [cuts, stages], as the forecast of an order counts them."""
        assert self.memory is not None
        first, stop = cuts[:, :-1], cuts[:, 1:]
        found = np.empty((len(cuts), self.placement.num_stages))
        for stage, own in enumerate(self.placement.chunks_of_stage):
            chunks, sizes = list(own), self.bytes_of_chunks[self.kinds[stage]]
            places = first[:, chunks], stop[:, chunks]
            held = np.array(self.memory.allocations(self.placement, stage, self.num_microbatches))
            lasting = sizes.fixed[places].sum(axis=1)
            for part in self.memory.waiting(self.placement, stage, self.num_microbatches):
                lasting += (sizes.inputs[places[0]] @ np.array(part).T).max(axis=1)
            found[:, stage] = lasting + (sizes.more[places] @ held.T).max(axis=1) + sizes.peak[places].max(axis=1)
        return found

    def excess(self, cuts: Cuts) -> Floats:
        """Returns the largest share of its limit that a stage needs [cuts]; 1 for all cuts that fit."""
        if not self.has_limits:
            return np.ones(len(cuts))
        shares: Floats = (self.stage_bytes(cuts) / self.limits).max(axis=1)
        return np.maximum(1.0, shares)


@dataclass(frozen=True, kw_only=True)
class ChunkArrays:
    """Bytes of a chunk, all but ``inputs`` over [first layer, layer behind the last]."""

    fixed: Floats
    inputs: Floats
    """Bytes of a microbatch that waits, by first layer."""
    more: Floats
    """Bytes that a microbatch takes in flight beyond those that it takes while it waits."""
    peak: Floats
    """Temporaries, and one output on its way out."""
    per_layer: dict[str, Floats]
    """Bytes of each layer by field of its costs."""


_FIELDS = ("stash_bytes", "owed_bytes", "kept_bytes", "fixed_bytes", "temporaries_bytes", "output_bytes")


def _sums(values: Floats) -> Floats:
    """Returns the sums of values[first:stop], by both."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = total[None, :] - total[:, None]
    return sums
