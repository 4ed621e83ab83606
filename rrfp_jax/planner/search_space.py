"""The outer choices of a plan: how many devices along which axis, which microbatches, and where the chunks lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from rrfp_jax.core import READY, STRICT
from rrfp_jax.costs import CostBook
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields
from rrfp_jax.planner.records import LINEAR, LOOPED, WAVES, PlanShape, Point, Refused

CONSUMPTIONS = (STRICT, READY)
_CHUNKS = (1, 2, 4)
"""Chunks per stage, where the user does not say."""
_SIZES = ("microbatch_sizes", "microbatches", "stages", "data", "tensor", "chunks")


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The devices, the memory, and the ways to run that a search may choose from.

    Raises ValueError for fields that contradict each other.
    """

    devices: int
    """Number of devices, all of which are used."""
    batch_size: int | None = None
    """Samples of a step over all replicas; None: ``microbatches`` says how many microbatches there are."""
    microbatch_sizes: tuple[int, ...] | None = None
    """Samples of a microbatch; None: all for which there are costs."""
    microbatches: tuple[int, ...] | None = None
    """Microbatches of one replica; None: as many as the batch makes."""
    memory_bytes: int | None = None
    """Bytes of a device; None: the number in the costs, and without that no limit."""
    stages: tuple[int, ...] | None = None
    """Numbers of stages; None, here and below: all that divide the devices."""
    data: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    """Chunks per stage; None: 1, 2 and 4."""
    schedules: tuple[str, ...] | None = None
    """Names of schedules and hints; None: all, and a search for orders without a name."""
    consumptions: tuple[str, ...] = CONSUMPTIONS
    remats: tuple[str, ...] | None = None
    """Names of rematerialisation; None: all for which there are costs."""
    top: int = 5
    """Length of the ranking at most."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "devices", "batch_size", "top")
        check_fields(self, NOT_NEGATIVE, "memory_bytes")
        if self.memory_bytes == 0:
            raise ValueError("devices have no memory: give more than 0 bytes, or leave memory out for no limit")
        for name in _SIZES:
            numbers = getattr(self, name)
            if numbers is not None and (not numbers or min(numbers) < 1):
                raise ValueError(f"{name} is {list(numbers)}: give numbers of at least 1, or leave it out")
        wrong = [word for word in self.consumptions if word not in CONSUMPTIONS]
        if wrong or not self.consumptions:
            raise ValueError(f"consumption {', '.join(wrong) or 'of no kind'} is unknown: give strict, ready or both")
        if self.batch_size is None and self.microbatches is None:
            raise ValueError("neither the batch nor the number of microbatches is given: give one of them")
        if self.batch_size is not None and self.microbatches is not None and self.microbatch_sizes is not None:
            made = {size * count for size in self.microbatch_sizes for count in self.microbatches}
            if not any(self.batch_size % each == 0 for each in made):
                raise ValueError(
                    f"no batch of {self.batch_size} samples comes of microbatches of {list(self.microbatch_sizes)} "
                    f"samples, {list(self.microbatches)} of them: leave one of the three out"
                )
        for name in ("stages", "data", "tensor"):
            numbers = getattr(self, name)
            if numbers is not None and not any(self.devices % number == 0 for number in numbers):
                raise ValueError(
                    f"{self.devices} devices cannot be divided by {name} {', '.join(map(str, numbers))}: give a divisor"
                )


def shapes_of(book: CostBook, space: SearchSpace) -> list[PlanShape]:
    """Returns all shapes that use every device and for which there are costs; raises ValueError where there is none."""
    found = []
    for entry in book.entries:
        is_allowed = (
            _allows(space.microbatch_sizes, entry.microbatch_size)
            and _allows(space.tensor, entry.tensor)
            and _allows(space.remats, entry.remat)
        )
        unit = entry.tensor * prod(book.mesh.values())  # devices of one replica of a stage
        if not is_allowed or space.devices % unit:
            continue
        units = space.devices // unit
        for stages in (number for number in range(1, units + 1) if units % number == 0):
            data = units // stages
            if not (_allows(space.stages, stages) and _allows(space.data, data)):
                continue
            counts, samples = list(space.microbatches or ()), entry.microbatch_size * data
            if space.batch_size is not None:
                count = space.batch_size // samples
                counts = [count] if not space.batch_size % samples and _allows(space.microbatches, count) else []
            found += [
                PlanShape(
                    num_stages=stages,
                    num_microbatches=count,
                    data=data,
                    tensor=entry.tensor,
                    mesh=tuple(book.mesh.items()),
                    microbatch_size=entry.microbatch_size,
                    remat=entry.remat,
                )
                for count in counts
            ]
    if not found:
        known = "; ".join(entry.setting.words for entry in book.entries)
        names = ("stages", "data", "tensor", "microbatch_sizes", "microbatches", "remats")
        asked = {name: getattr(space, name) for name in names}
        said = ", ".join(f"{name} {list(value)}" for name, value in asked.items() if value is not None)
        batch = "" if space.batch_size is None else f" and a batch of {space.batch_size}"
        ways = "stages x data x tensor" + "".join(f" x {axis} {size}" for axis, size in book.mesh.items())
        raise ValueError(
            f"no {ways} make {space.devices} devices{batch} with {said or 'nothing else'} allowed, and costs for "
            f"{known}: allow more, or give costs of other microbatch sizes or tensor"
        )
    return found


def points_of(shape: PlanShape, book: CostBook, space: SearchSpace) -> Iterator[Point]:
    """Yields the placements for which the model has layers enough."""
    if shape.num_stages == 1:
        choices = [(LINEAR, 1)] if _allows(space.chunks, 1) else []
    else:
        choices = [
            (family, chunks)
            for chunks in space.chunks or _CHUNKS
            for family in ([LINEAR] if chunks == 1 else [LOOPED] if chunks % 2 else [WAVES, LOOPED])
        ]
    for family, chunks in choices:
        num_chunks = chunks * shape.num_stages
        if len(book.ends) < num_chunks <= len(book.layers):
            yield Point(shape=shape, family=family, chunks=chunks)


def refused_without_points(shape: PlanShape, book: CostBook) -> Refused:
    """Returns the refusal of a shape that has no placement."""
    if shape.num_stages > len(book.layers):
        reason = f"{shape.num_stages} stages are more than the {len(book.layers)} layers there are"
        return Refused(shape=shape, reason=reason, change=f"at most {len(book.layers)} stages")
    if shape.num_stages <= len(book.ends):
        reason = f"{len(book.ends) + 1} chunks at least, as cuts must lie behind {len(book.ends)} layers"
        return Refused(shape=shape, reason=reason, change=f"at least {len(book.ends) + 1} stages, or chunks per stage")
    return Refused(shape=shape, reason="no number of chunks per stage that is allowed fits the layers")


def _allows(numbers: tuple[int, ...] | tuple[str, ...] | None, number: int | str) -> bool:
    return numbers is None or number in numbers
