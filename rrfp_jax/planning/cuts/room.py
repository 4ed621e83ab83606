"""The memory that a cut has to keep to: what each stage has, and how many activations it will hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from rrfp_jax.arbitration import Order
from rrfp_jax.arbitration.footprint import memory_unit
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE
from rrfp_jax.planning.forecast import Reach
from rrfp_jax.planning.order_memory import reaches
from rrfp_jax.schedules import Placement


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory and what it is to hold; either ``held`` or ``footprints``. Raises ValueError for what no stage has."""

    limits: tuple[int | None, ...]
    """Bytes of a device of each stage; None: as many as it takes."""
    held: tuple[float, ...] = ()
    """Activations of each chunk that its stage holds at most, such as ``p - s`` on stage s of 1F1B."""
    footprints: tuple[int, ...] = ()
    """Activations of one chunk and microbatch that each stage holds at most, of whichever of its chunks they are; the
    largest ones count first."""
    reaches: tuple[tuple[Reach, ...], ...] = ()
    """What each stage has at its chunks at a time, held or waiting; empty: all of a whole step."""

    def __post_init__(self) -> None:
        if bool(self.held) == bool(self.footprints):
            raise ValueError("room is for activations of each chunk or of each stage: give held or footprints")
        for name, rule in (
            ("limits", AT_LEAST_1),
            ("held", NOT_NEGATIVE),
            ("footprints", NOT_NEGATIVE),
        ):
            wrong = [each for each in getattr(self, name) if each is not None and not rule.holds(each)]
            if wrong:
                raise ValueError(f"room has {name} {wrong[0]}: give {rule.words}")

    @classmethod
    def of_order(cls, order: Order, limits: Sequence[int | None]) -> "Room":
        """For what an order holds, counted as the forecast of its memory does."""
        here = tuple(reaches(order, stage) for stage in range(order.placement.num_stages))
        if order.footprints is not None:
            unit = memory_unit(order.graph)
            footprints = tuple(-(-limit // unit) for limit in order.footprints)
            return cls(limits=tuple(limits), footprints=footprints, reaches=here)
        most = [max(reach.number for reach in of_stage) for of_stage in here]
        held = tuple(float(min(order.windows[stage], most[stage])) for stage in order.placement.stage_of_chunk)
        return cls(limits=tuple(limits), held=held, reaches=here)

    def check(self, placement: Placement) -> None:
        """Raise ValueError unless it is for stages and chunks as many as there are."""
        stages, chunks = placement.num_stages, placement.num_chunks
        for name, wanted in (("limits", stages), ("held", chunks), ("footprints", stages), ("reaches", stages)):
            given = len(getattr(self, name))
            if given not in {wanted, 0} or (name == "limits" and given != wanted):
                raise ValueError(f"room has {given} {name} for {stages} stages and {chunks} chunks: give {wanted}")

    def waiting(self, placement: Placement, stage: int, num_microbatches: int) -> list[list[tuple[float, ...]]]:
        """How many microbatches there may be at each chunk of the stage, in parts that add up: memory must suffice for
        any allocation of each part, 0 for the chunks of the others."""
        chunks = len(placement.chunks_of_stage[stage])
        if not self.reaches:
            return [[(num_microbatches,) * chunks]]
        if self.held:
            most = max(reach.number for reach in self.reaches[stage])
            return [[(min(most, num_microbatches),) * chunks]]
        return [_allocations(reach.number, reach.chunks, chunks, num_microbatches) for reach in self.reaches[stage]]

    def allocations(self, placement: Placement, stage: int, num_microbatches: int) -> list[tuple[float, ...]]:
        """How many activations of each chunk of the stage there may be; memory must suffice for any of these."""
        chunks = placement.chunks_of_stage[stage]
        if self.held:
            return [tuple(min(self.held[chunk], num_microbatches) for chunk in chunks)]
        return _allocations(self.footprints[stage], range(len(chunks)), len(chunks), num_microbatches)


def _allocations(number: int, places: Sequence[int], num_chunks: int, num_microbatches: int) -> list[tuple[float, ...]]:
    """The ways to deal so many activations to some of a stage's chunks, the largest ones first, whichever these are."""
    found = dict.fromkeys(_filled(number, order, num_chunks, num_microbatches) for order in permutations(places))
    return list(found)


def _filled(number: int, chunks: Sequence[int], num_chunks: int, num_microbatches: int) -> tuple[float, ...]:
    """So many activations dealt to chunks, of each one for every microbatch before the next chunk gets any."""
    dealt = [0.0] * num_chunks
    for chunk in chunks:
        dealt[chunk] = min(number, num_microbatches)
        number -= min(number, num_microbatches)
    return tuple(dealt)
