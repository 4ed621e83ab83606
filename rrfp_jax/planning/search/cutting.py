"""The cuts of a point that are worth a try: best, best for memory that is short, and even."""

from collections.abc import Iterator

from rrfp_jax.costs import CostBook, CutModel, ModelCosts
from rrfp_jax.planning.cuts import Room, best_cut, even_cut
from rrfp_jax.planning.search.candidates import largest_windows
from rrfp_jax.planning.search.points import Point


def costs_of(point: Point, book: CostBook) -> ModelCosts:
    """What the layers cost there."""
    shape = point.shape
    return book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor, remat=shape.remat)


def best_cut_of(point: Point, book: CostBook, *, split: bool) -> CutModel:
    """Where memory does not matter."""
    shape = point.shape
    return best_cut(costs_of(point, book), point.placement, shape.num_microbatches, split=split, replicas=shape.data)


def cuts_of(best: CutModel, memory_bytes: int | None) -> list[tuple[CutModel, bool]]:
    """The best cut first, and whether each is even; the same one comes once.

    Where memory is short for as many activations as schedules usually hold, the best cut for these comes too, or for
    half as many, or for as few as can be. Raises ValueError where not even one microbatch fits.
    """
    found = [best]
    if memory_bytes is not None and not _has_room(best, memory_bytes):
        found.append(next(_in_room(best, memory_bytes)))
    even = even_cut(best.costs, best.placement, best.num_microbatches, split=best.split, replicas=best.replicas)
    distinct = {cut.counts: cut for cut in (*found, even)}
    return [(cut, counts == even.counts) for counts, cut in distinct.items()]


def lacks_memory(point: Point, book: CostBook, memory_bytes: int | None) -> bool:
    """Whether what all stages hold with one microbatch each is more than all of them have, however the model is
    cut."""
    if memory_bytes is None:
        return False
    costs, stages = costs_of(point, book), point.shape.num_stages
    held = sum(costs.of(layer).fixed_bytes + costs.of(layer).stash_bytes for layer in range(costs.num_layers))
    return held > stages * memory_bytes


def _has_room(cut: CutModel, memory_bytes: int) -> bool:
    """Whether every stage has room for a microbatch for each stage there is."""
    usual = min(cut.placement.num_stages, cut.num_microbatches)
    windows = largest_windows(cut, memory_bytes, usual)
    return windows is not None and min(windows) >= usual


def _in_room(best: CutModel, memory_bytes: int) -> Iterator[CutModel]:
    """The best cuts that fit for fewer and fewer activations; the last one raises ValueError where it has no room."""
    placement, m = best.placement, best.num_microbatches
    stages = placement.num_stages
    limits, passes = (memory_bytes,) * stages, placement.num_chunks // stages
    windows = sorted({min(each, m) for each in (stages, -(-stages // 2), 1)}, reverse=True)
    for window in windows:
        room = Room(limits=limits, footprints=(window * passes,) * stages)
        try:
            yield best_cut(best.costs, placement, m, split=best.split, room=room, replicas=best.replicas)
        except ValueError:
            if window == windows[-1]:
                raise
