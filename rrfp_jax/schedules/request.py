"""A request for a table: sizes, profiled times and the graph; and the shapes of schedules that make their own graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from rrfp_jax.field_rules import AT_LEAST_1, POSITIVE, check_fields, check_types
from rrfp_jax.schedules.graph import PipelineGraph, chain, opposite_chains, vocabulary_sharded
from rrfp_jax.schedules.tasks import Placement, bidirectional, linear, looped, v_shaped, waves


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """The sizes and times that a table is built for. Raises ValueError on numbers that no schedule accepts."""

    num_stages: int
    num_microbatches: int
    chunks_per_stage: int | None = None
    """None: the schedule's own choice (its ``chunks_per_stage`` entry)."""
    group_size: int | None = None
    """Microbatches that go through a chunk before the stage's next one; only for schedules with such groups. None: the
    schedule's own choice."""
    slices: int | None = None
    """Slices in which a sequence runs through each chunk, one after the other; 1: whole sequences. None: as many as
    stages for schedules of slices, 1 for others."""
    window: int | tuple[int, ...] | None = None
    """In-flight microbatches, at most or per stage; read by eager 1F1B."""
    durations_ms: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Profiled F, I and W of one stage (all its chunks), in milliseconds; read by schedules made from such times."""
    comm_ms: float = 0.0
    """Profiled time from one stage to the next, in milliseconds; read by the same schedules."""
    memory_limit: float | None = None
    """Activations that a stage may hold, in those of one microbatch; read by the automatic schedule (None: 2 p)."""
    input_gradient_frees: float = 0.0
    """The part of a microbatch's activations that I frees already; W frees the rest. Read by the automatic schedule."""
    graph: PipelineGraph | None = None
    """Which chunks feed which, for the schedules of any graph, for example encoders and a decoder. None: a chain. How
    the backward is cut is the schedule's choice."""
    placement: Placement | None = None
    """Which stage owns which chunk of that graph. None: one chunk per stage."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "num_stages", "num_microbatches", "chunks_per_stage", "group_size", "slices")
        windows = (self.window,) if isinstance(self.window, int) else self.window or ()
        if any(window < 1 for window in windows):
            raise ValueError(f"window {self.window} holds no microbatch on some stage: give at least 1 per stage")
        if isinstance(self.window, tuple) and len(self.window) != self.num_stages:
            raise ValueError(f"{len(self.window)} windows for {self.num_stages} stages: give one, or one per stage")
        check_fields(self, POSITIVE, "memory_limit")
        if not all(0 <= each < inf for each in (*self.durations_ms, self.comm_ms)):
            raise ValueError(f"durations_ms {self.durations_ms} and comm_ms {self.comm_ms} must not be negative")
        if not 0 <= self.input_gradient_frees <= 1:
            raise ValueError(f"input_gradient_frees is {self.input_gradient_frees}: give a part between 0 and 1")
        if self.graph is not None and self.slices is not None:
            raise ValueError(
                "slices cut the sequences of a schedule's own chain: leave them out, or graph and placement"
            )
        if self.graph is None and self.placement is not None:
            raise ValueError("a placement is for the chunks of a graph: give the graph too")
        if self.graph is not None:
            self._check_graph(self.graph, self.placement or linear(self.graph.num_chunks))

    def _check_graph(self, graph: PipelineGraph, placement: Placement) -> None:
        if graph.num_chunks != placement.num_chunks:
            raise ValueError(
                f"the graph has {graph.num_chunks} chunks, the placement {placement.num_chunks}: give each chunk a "
                "stage"
            )
        if placement.num_stages != self.num_stages:
            raise ValueError(
                f"the chunks lie on {placement.num_stages} stages, not on {self.num_stages}: give both the same number"
            )
        if graph.num_microbatches != self.num_microbatches:
            raise ValueError(f"the graph has {graph.num_microbatches} microbatches, not {self.num_microbatches}")


@dataclass(frozen=True)
class ScheduleShape:
    """Placement and graph of a schedule, as functions of its sizes."""

    words: str
    placement: Callable[[int, int], Placement]
    """Makes the placement for numbers of stages and of chunks per stage."""
    graph: Callable[[int, int, int], PipelineGraph] = lambda p, v, m: chain(p * v, m)
    """Makes the graph, with a whole backward, for numbers of stages, chunks per stage and microbatches."""
    chunks_per_stage: int = 2
    """The number of chunks per stage that is taken unless the user gives one."""
    fixed_chunks: bool = True
    """Whether :attr:`chunks_per_stage` is the only possible number."""
    is_sliced: bool = False
    """Whether sequences run in slices."""
    is_sharded: bool = False
    """Whether embedding and head lie on all stages, in shards of words."""

    @property
    def has_copies(self) -> bool:
        """Whether the model lies on the stages twice, with the same parameters."""
        return bool(self.graph(2, self.chunks_per_stage, 2).shared)


def _waves(p: int, v: int) -> Placement:
    if v % 2:
        raise ValueError(f"waves need 2 chunks per stage each, not {v} in all: give chunks_per_stage={v + 1}")
    return waves(p, v // 2)


def place_in_unit(p: int, m: int, microbatch: int) -> tuple[int, bool, int]:
    """Returns a microbatch's unit of p microbatches, whether it goes up, and its number within that direction.

    Half of a unit goes each way. The last unit of m microbatches may be smaller.
    """
    unit, place = divmod(microbatch, p)
    half = min(p, m - unit * p) // 2
    return unit, place >= half, place % half


def _opposite(p: int, m: int, down: Callable[[int], bool]) -> PipelineGraph:
    """Returns two opposite chains of p chunks; ``down`` says of a microbatch whether it goes down the stages."""
    _check_even("num_stages", p)
    _check_even("num_microbatches", m)
    return opposite_chains(p, filter(down, range(m)), m)


def _two_vs(p: int) -> Placement:
    _check_even("num_stages", p)
    down = v_shaped(p).stage_of_chunk
    return Placement((*down, *(p - 1 - stage for stage in down)))


def _check_even(what: str, number: int) -> None:
    if number % 2:
        raise ValueError(
            f"two directions through the same stages get half of the microbatches each, so {what} ({number}) must be "
            f"even: give {what}={number + 1}" + (f" or {number - 1}" if number > 1 else "")
        )


def sharded(fan_out: int | None = None) -> ScheduleShape:
    """Returns the shape of a decoder whose vocabulary lies on all stages, each of which sends the stream to so many
    others (:func:`vocabulary_sharded`)."""
    return ScheduleShape(
        "one chunk per stage, and shards of embedding and head",
        lambda p, v: vocabulary_sharded(p, 1, fan_out=fan_out)[1],
        lambda p, v, m: vocabulary_sharded(p, m, fan_out=fan_out)[0],
        chunks_per_stage=1,
        is_sharded=True,
    )


ONE_EACH = ScheduleShape("one chunk per stage", lambda p, v: linear(p), chunks_per_stage=1)
LOOPED = ScheduleShape("looped: chunk c on stage c mod p", looped, fixed_chunks=False)
V = ScheduleShape("V: stage s owns chunks s and 2p-1-s", lambda p, v: v_shaped(p))
WAVES = ScheduleShape("waves: down and up the stages, chunks_per_stage / 2 times", _waves, fixed_chunks=False)
TWO_WAYS = ScheduleShape(
    "two copies of p chunks in opposite directions",
    lambda p, v: bidirectional(p),
    lambda p, v, m: _opposite(p, m, lambda i: not place_in_unit(p, m, i)[1]),
)
ALTERNATING = replace(TWO_WAYS, graph=lambda p, v, m: _opposite(p, m, lambda i: i % 2 == 0))
"""Two copies in opposite directions, between which the microbatches alternate."""
TWO_VS = ScheduleShape(
    "two copies of a V of 2p chunks in opposite directions",
    lambda p, v: _two_vs(p),
    lambda p, v, m: opposite_chains(2 * p, range(0, m, 2), m),
    chunks_per_stage=4,
)
SLICED = replace(ONE_EACH, words="one chunk per stage, in slices of a sequence", is_sliced=True)
LOOPED_SLICES = replace(LOOPED, words=f"{LOOPED.words}, in slices of a sequence", is_sliced=True)
ANY = ScheduleShape("looped, one chunk per stage", looped, chunks_per_stage=1, fixed_chunks=False)
"""The shape of a description that is registered without one."""
