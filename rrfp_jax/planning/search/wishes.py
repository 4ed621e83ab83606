"""What a user asks planning for: devices, memory, and which ways to run are allowed."""

from dataclasses import dataclass

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, check_fields
from rrfp_jax.planning.search.objective import Objective

STRICT, READY = "strict", "ready"
CONSUMPTIONS = (STRICT, READY)
_SIZES = ("microbatch_sizes", "microbatches", "stages", "data", "tensor", "chunks")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the search may choose from. Raises ValueError for what contradicts itself."""

    devices: int
    """All of them are used."""
    batch_size: int | None = None
    """Samples of a step over all replicas; None: ``microbatches`` says how many microbatches there are."""
    microbatch_sizes: tuple[int, ...] | None = None
    """Samples of a microbatch; None: all for which there are costs."""
    microbatches: tuple[int, ...] | None = None
    """Of one replica; None: as many as the batch makes."""
    memory_bytes: int | None = None
    """Of a device; None: what the costs say of it, and without that no limit."""
    stages: tuple[int, ...] | None = None
    """None, here and below: all that divide the devices."""
    data: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    """Per stage; None: 1, 2 and 4."""
    schedules: tuple[str, ...] | None = None
    """By their names, hints too; None: all. With some named no other order is searched for."""
    consumptions: tuple[str, ...] = CONSUMPTIONS
    window: int | None = None
    """Microbatches that a stage may hold at most; None: what memory has room for."""
    remats: tuple[str, ...] | None = None
    """None: all for which there are costs."""
    objective: str = "mean"
    """``mean``, ``p95``, or ``mean+Ksd`` for a number K."""
    draws: int | None = None
    """Of the noise, on which the last ones are judged; None: 64, for large pipelines fewer, at least 16."""
    orders: bool = True
    """Whether orders are searched for that no name stands for."""
    sensitivities: bool = True
    """Whether to work out what changes of the machine would give."""
    effort: float = 1.0
    """How long to search: twice as much may take twice as long."""
    top: int = 5
    """How long the ranking is at most."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "devices", "batch_size", "draws", "top", "window")
        check_fields(self, POSITIVE, "effort")
        check_fields(self, NOT_NEGATIVE, "memory_bytes")
        if self.memory_bytes == 0:
            raise ValueError("devices have no memory: give more than 0 bytes, or leave memory out for no limit")
        for name in _SIZES:
            numbers = getattr(self, name)
            if numbers is not None and (not numbers or min(numbers) < 1):
                raise ValueError(f"{name} is {list(numbers)}: give numbers of at least 1, or leave it out")
        self._check_words()
        self._check_batch()
        self._check_devices()

    @property
    def objectives(self) -> Objective:
        """What is made small."""
        return Objective.parse(self.objective)

    def _check_words(self) -> None:
        Objective.parse(self.objective)
        wrong = [word for word in self.consumptions if word not in CONSUMPTIONS]
        if wrong or not self.consumptions:
            raise ValueError(f"consumption {', '.join(wrong) or 'of no kind'} is unknown: give strict, ready or both")

    def _check_batch(self) -> None:
        if self.batch_size is None and self.microbatches is None:
            raise ValueError("neither the batch nor the number of microbatches is given: give one of them")
        if self.batch_size is not None and self.microbatches is not None and self.microbatch_sizes is not None:
            made = {size * count for size in self.microbatch_sizes for count in self.microbatches}
            if not any(self.batch_size % each == 0 for each in made):
                raise ValueError(
                    f"no batch of {self.batch_size} samples comes of microbatches of {list(self.microbatch_sizes)} "
                    f"samples, {list(self.microbatches)} of them: leave one of the three out"
                )

    def _check_devices(self) -> None:
        for name in ("stages", "data", "tensor"):
            numbers = getattr(self, name)
            if numbers is not None and not any(self.devices % number == 0 for number in numbers):
                raise ValueError(
                    f"{self.devices} devices cannot be divided by {name} {', '.join(map(str, numbers))}: give a divisor"
                )
