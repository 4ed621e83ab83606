"""The memory that a cut has to keep to: what each stage has, and how many activations it will hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from rrfp_jax.arbitration import Order
from rrfp_jax.arbitration.footprint import memory_unit
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE
from rrfp_jax.planning.order_memory import reached
from rrfp_jax.tasks import Placement


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
    reached: tuple[int, ...] = ()
    """Microbatches that each stage has at a time, held or waiting; empty: those of a whole step."""

    def __post_init__(self) -> None:
        if bool(self.held) == bool(self.footprints):
            raise ValueError("room is for activations of each chunk or of each stage: give held or footprints")
        for name, rule in (
            ("limits", AT_LEAST_1),
            ("held", NOT_NEGATIVE),
            ("footprints", NOT_NEGATIVE),
            ("reached", NOT_NEGATIVE),
        ):
            wrong = [each for each in getattr(self, name) if each is not None and not rule.holds(each)]
            if wrong:
                raise ValueError(f"room has {name} {wrong[0]}: give {rule.words}")

    @classmethod
    def of_order(cls, order: Order, limits: Sequence[int | None]) -> "Room":
        """For what an order holds, counted as the forecast of its memory does."""
        number, placement = order.graph.num_microbatches, order.placement
        here = tuple(max(reached(order, chunk, number) for chunk in chunks) for chunks in placement.chunks_of_stage)
        if order.footprints is not None:
            unit = memory_unit(order.graph)
            footprints = tuple(-(-limit // unit) for limit in order.footprints)
            return cls(limits=tuple(limits), footprints=footprints, reached=here)
        held = tuple(float(min(order.windows[stage], here[stage])) for stage in placement.stage_of_chunk)
        return cls(limits=tuple(limits), held=held, reached=here)

    def check(self, placement: Placement) -> None:
        """Raise ValueError unless it is for stages and chunks as many as there are."""
        stages, chunks = placement.num_stages, placement.num_chunks
        for name, wanted in (("limits", stages), ("held", chunks), ("footprints", stages), ("reached", stages)):
            given = len(getattr(self, name))
            if given not in {wanted, 0} or (name == "limits" and given != wanted):
                raise ValueError(f"room has {given} {name} for {stages} stages and {chunks} chunks: give {wanted}")

    def reached_by(self, stage: int, num_microbatches: int) -> int:
        """Microbatches that are at the stage at a time."""
        return min(self.reached[stage], num_microbatches) if self.reached else num_microbatches

    def allocations(self, placement: Placement, stage: int, num_microbatches: int) -> list[tuple[float, ...]]:
        """How many activations of each chunk of the stage there may be; memory must suffice for any of these."""
        chunks = placement.chunks_of_stage[stage]
        if self.held:
            return [tuple(min(self.held[chunk], num_microbatches) for chunk in chunks)]
        found = dict.fromkeys(
            _filled(self.footprints[stage], order, num_microbatches) for order in permutations(range(len(chunks)))
        )
        return list(found)


def _filled(number: int, chunks: Sequence[int], num_microbatches: int) -> tuple[float, ...]:
    """So many activations dealt to chunks, of each one for every microbatch before the next chunk gets any."""
    dealt = [0.0] * len(chunks)
    for chunk in chunks:
        dealt[chunk] = min(number, num_microbatches)
        number -= min(number, num_microbatches)
    return tuple(dealt)
