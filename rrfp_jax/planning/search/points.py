"""The outer choices: how many devices do what, which microbatches, and where the chunks lie."""

from collections.abc import Iterator
from dataclasses import dataclass

from rrfp_jax.planning.costs import CostBook
from rrfp_jax.planning.search.records import Refused, Shape
from rrfp_jax.planning.search.wishes import Wishes
from rrfp_jax.schedules import Placement, looped, waves

LINEAR, LOOPED, WAVES = "linear", "looped", "waves"
CHUNKS = (1, 2, 4)
"""Per stage, where the user does not say."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A shape with a place for each chunk."""

    shape: Shape
    family: str
    """:data:`LINEAR`, :data:`LOOPED` or :data:`WAVES`, of which one wave is the V."""
    chunks: int
    """Per stage."""

    @property
    def placement(self) -> Placement:
        if self.family == WAVES:
            return waves(self.shape.num_stages, self.chunks // 2)
        return looped(self.shape.num_stages, self.chunks)

    @property
    def words(self) -> str:
        """For messages."""
        if self.chunks == 1:
            return "one chunk per stage"
        name = "V" if (self.family, self.chunks) == (WAVES, 2) else self.family
        return f"{name}, {self.chunks} chunks per stage"


def shapes_of(book: CostBook, wishes: Wishes) -> list[Shape]:
    """All that use every device and for which there are costs. Raises ValueError where there is none."""
    found = []
    for entry in book.entries:
        is_allowed = (
            _allows(wishes.microbatch_sizes, entry.microbatch_size)
            and _allows(wishes.tensor, entry.tensor)
            and _allows(wishes.remats, entry.remat)
        )
        if not is_allowed or wishes.devices % book.unit_devices(entry.tensor):
            continue
        units = wishes.devices // book.unit_devices(entry.tensor)
        for stages in (number for number in range(1, units + 1) if units % number == 0):
            data = units // stages
            if not (_allows(wishes.stages, stages) and _allows(wishes.data, data)):
                continue
            found += [
                Shape(
                    num_stages=stages,
                    num_microbatches=count,
                    data=data,
                    tensor=entry.tensor,
                    mesh=tuple(book.mesh.items()),
                    microbatch_size=entry.microbatch_size,
                    remat=entry.remat,
                )
                for count in _counts(wishes, entry.microbatch_size * data)
            ]
    if not found:
        raise ValueError(_why_none(book, wishes))
    return found


def points_of(shape: Shape, book: CostBook, wishes: Wishes) -> Iterator[Point]:
    """The placements for which the model has layers enough."""
    if shape.num_stages == 1:
        choices = [(LINEAR, 1)] if _allows(wishes.chunks, 1) else []
    else:
        choices = [
            (family, chunks)
            for chunks in wishes.chunks or CHUNKS
            for family in ([LINEAR] if chunks == 1 else [LOOPED] if chunks % 2 else [WAVES, LOOPED])
        ]
    for family, chunks in choices:
        num_chunks = chunks * shape.num_stages
        if len(book.ends) < num_chunks <= len(book.layers):
            yield Point(shape=shape, family=family, chunks=chunks)


def refused_without_points(shape: Shape, book: CostBook) -> Refused:
    """Why a shape has no placement."""
    if shape.num_stages > len(book.layers):
        reason = f"{shape.num_stages} stages are more than the {len(book.layers)} layers there are"
        return Refused(shape=shape, reason=reason, change=f"at most {len(book.layers)} stages")
    if shape.num_stages <= len(book.ends):
        reason = f"{len(book.ends) + 1} chunks at least, as cuts must lie behind {len(book.ends)} layers"
        return Refused(shape=shape, reason=reason, change=f"at least {len(book.ends) + 1} stages, or chunks per stage")
    return Refused(shape=shape, reason="no number of chunks per stage that is allowed fits the layers")


def _allows(numbers: tuple[int, ...] | tuple[str, ...] | None, number: int | str) -> bool:
    return numbers is None or number in numbers


def _counts(wishes: Wishes, samples: int) -> list[int]:
    """Microbatches of a replica, ``samples`` being what one in each replica makes."""
    if wishes.batch_size is None:
        return list(wishes.microbatches or ())
    if wishes.batch_size % samples:
        return []
    count = wishes.batch_size // samples
    return [count] if _allows(wishes.microbatches, count) else []


def _why_none(book: CostBook, wishes: Wishes) -> str:
    known = "; ".join(entry.words for entry in book.entries)
    asked = {
        "stages": wishes.stages,
        "data": wishes.data,
        "tensor": wishes.tensor,
        "microbatch_sizes": wishes.microbatch_sizes,
        "microbatches": wishes.microbatches,
        "remats": wishes.remats,
    }
    said = ", ".join(f"{name} {list(value)}" for name, value in asked.items() if value is not None) or "nothing else"
    batch = "" if wishes.batch_size is None else f" and a batch of {wishes.batch_size}"
    ways = "stages x data x tensor" + "".join(f" x {axis} {size}" for axis, size in book.mesh.items())
    return (
        f"no {ways} make {wishes.devices} devices{batch} with {said} allowed, and costs for {known}: "
        "allow more, or give costs of other microbatch sizes or tensor"
    )
