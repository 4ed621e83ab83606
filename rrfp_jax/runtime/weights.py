"""What the microbatches of a step weigh, where a window in bytes bounds what a stage holds of them together."""

from collections.abc import Mapping, Sequence

from rrfp_jax.core import Order
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.runtime.memory_meter import chunk_bytes


class Weights:
    """Of the units hosted here: a microbatch weighs the bytes that it holds in flight there, nothing where it skips all
    chunks of the unit.

    Args:
        order: of all replicas; without capacities nothing is weighed.
        programs: of the hosted chunks, by number in the pipeline of all replicas.
    """

    def __init__(self, order: Order, programs: Mapping[int, CompiledChunk], units: Sequence[int]) -> None:
        self._of_bucket: dict[int, list[int]] = {}
        self._range = {}
        for unit in units if order.capacities is not None else ():
            chunks = order.placement.chunks_of_stage[unit]
            columns = [_weights_of_buckets(programs[chunk]) for chunk in chunks]
            self._of_bucket[unit] = [sum(of_chunks) for of_chunks in zip(*columns, strict=True)]
            ranges = [order.graph.range_of(chunk) for chunk in chunks]
            self._range[unit] = range(min(r.start for r in ranges), max(r.stop for r in ranges))

    def of(self, buckets: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """By unit; ``buckets`` are those of all microbatches of the step."""
        return {
            unit: tuple([of_bucket[buckets[microbatch]] for microbatch in self._range[unit]])
            for unit, of_bucket in self._of_bucket.items()
        }


def _weights_of_buckets(programs: CompiledChunk) -> list[int]:
    held = [chunk_bytes(sizes).per_microbatch for sizes in programs.sizes_of_variants]
    return [0 if variant is None else held[variant] for variant in programs.variant_of]
