"""Which order the stages follow: from the flags that train, emulate and simulate share to what the core needs.

The same words mean the same everywhere. ``schedule`` is a table, by name or as a CSV file; ``consume`` says whether a
stage waits for its table's next entry (``strict``) or runs the best of what is ready (``ready``); ``hint`` ranks what
is ready; ``window`` bounds the microbatches that a stage may hold; ``backward`` runs as one task or as two.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rrfp_jax.arbitration import (
    HINTS,
    SCHEDULE,
    Consumption,
    StageArbiter,
    StepRules,
    check_windows,
    hint_by_name,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, read_csv, schedule_names
from rrfp_jax.tasks import PipelineGraph, Placement, chain, looped

READY = "ready"
STRICT = "strict"
SPLIT = "split"
FUSED = "fused"
BF = "bf"
BFW = "bfw"
"""The paper's name for ``bf`` on a split backward."""
DEFAULT_WINDOW = 32


def hint_names() -> tuple[str, ...]:
    """Everything that ``hint`` accepts."""
    return (*HINTS, BFW, SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class ResolvedOrdering:
    """What the stages' arbiters are made of."""

    label: str
    """For tables and captions, for example ``1f1b strict``."""
    table: ScheduleTable | None
    placement: Placement
    graph: PipelineGraph
    consumptions: tuple[Consumption, ...]
    """One per stage."""
    windows: tuple[int, ...]
    """One per stage; under ``strict`` without an explicit window the peak of the table, which nothing restrains."""
    is_bf: bool
    """Whether the stages follow the hint bf, the paper's Algorithm 1 (on whatever backward)."""

    def arbiters(self, rules: StepRules, *, dispatch_ahead: int = 0) -> list[StageArbiter]:
        """Fresh arbiters, one per stage."""
        return [
            StageArbiter(
                self.graph,
                self.placement,
                stage,
                consumption=self.consumptions[stage],
                window=self.windows[stage],
                rules=rules,
                dispatch_ahead=dispatch_ahead,
            )
            for stage in range(self.placement.num_stages)
        ]


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """What the user asked for. Raises ValueError on words that mean nothing or contradict each other."""

    schedule: str | None = None
    """A registered schedule, or the path of a table (``*.csv``); None: no table."""
    consume: str = READY
    hint: str | None = None
    """None: ``schedule`` if there is one; otherwise ``bf``, or ``bf-deep`` with several chunks per stage.

    Strict consumption follows its table whatever the hint is.
    """
    window: int | tuple[int, ...] | None = None
    """None: 32, or no limit under strict consumption."""
    backward: str | None = None
    """``split`` or ``fused``; None: what the schedule or hint calls for, otherwise fused."""

    def __post_init__(self) -> None:
        if self.consume not in (READY, STRICT):
            raise ValueError(f"consume {self.consume!r} is unknown: choose {READY} or {STRICT}")
        if self.backward not in (None, SPLIT, FUSED):
            raise ValueError(f"backward {self.backward!r} is unknown: choose {SPLIT} or {FUSED}")
        if self.hint is not None and self.hint not in hint_names():
            raise ValueError(f"hint {self.hint!r} is unknown: choose one of {', '.join(hint_names())}")
        if self.consume == STRICT and self.schedule is None:
            raise ValueError("consume strict needs a schedule to wait for: give one, for example 1f1b")
        if self.hint == SCHEDULE and self.schedule is None:
            raise ValueError("hint schedule needs a schedule to rank by: give one, for example 1f1b")
        if self.hint == BFW and self.consume == READY and self.backward == FUSED:
            raise ValueError(f"hint {BFW} needs a split backward: leave backward out, or take hint bf")

    @property
    def follows_table(self) -> bool:
        """Whether the order comes from the table; otherwise the table only says which stage owns which chunk."""
        return self.schedule is not None and (self.consume == STRICT or self.hint in (None, SCHEDULE))

    @property
    def label(self) -> str:
        if self.consume == STRICT:
            return f"{self.schedule} strict"
        if self.follows_table:
            return f"{self.schedule} as hint"
        return f"{self.hint or 'default hint'}" + (f" on {self.schedule}" if self.schedule else "")

    def resolve(
        self,
        *,
        num_stages: int,
        num_microbatches: int,
        chunks_per_stage: int | None = None,
        durations_ms: tuple[float, float, float] = (1.0, 1.0, 1.0),
        comm_ms: float = 0.0,
        placement: Placement | None = None,
        graph: PipelineGraph | None = None,
    ) -> ResolvedOrdering:
        """Build the table, the placement and the graph, and one consumption per stage.

        Args:
            num_stages, num_microbatches, chunks_per_stage: the sizes; ``chunks_per_stage`` None leaves the choice to
                the schedule, and is 1 without one.
            durations_ms, comm_ms: F, I and W of one stage and a transfer, for schedules made from profiled times.
            placement, graph: those of a model that brings its own; the schedule must fit them. The graph's ``split``
                is set here. None: the schedule's, or a chain of looped chunks.

        Raises ValueError, in one sentence with the remedy, where these do not fit together.
        """
        if num_stages < 1 or num_microbatches < 1:
            raise ValueError(
                f"num_stages ({num_stages}) and num_microbatches ({num_microbatches}) must both be at least 1"
            )
        if self.window is not None:
            check_windows(self.window, num_stages)
        table = self._table(
            ScheduleRequest(
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                chunks_per_stage=chunks_per_stage,
                window=self.window,
                durations_ms=durations_ms,
                comm_ms=comm_ms,
                memory_limit=None if self.window is None else float(min(check_windows(self.window, num_stages))),
            )
        )
        placement = _placement(table, placement, num_stages, chunks_per_stage)
        graph = self._graph(table, graph, placement, num_microbatches)
        resolved = replace(self, hint=self._hint(placement))
        return ResolvedOrdering(
            label=resolved.label,
            table=table,
            placement=placement,
            graph=graph,
            consumptions=resolved._consumptions(table, num_stages),
            windows=self._windows(table, num_stages),
            is_bf=self.consume == READY and resolved.hint in (BF, BFW),
        )

    def _table(self, request: ScheduleRequest) -> ScheduleTable | None:
        if self.schedule is None:
            return None
        if not self.schedule.endswith(".csv"):
            return build_schedule(self.schedule, request)
        table = read_csv(self.schedule)
        sizes = (table.num_stages, table.graph.num_microbatches)
        if sizes != (request.num_stages, request.num_microbatches):
            raise ValueError(
                f"table {self.schedule} has {sizes[0]} stages and {sizes[1]} microbatches, but {request.num_stages} "
                f"and {request.num_microbatches} were asked for: give the numbers of the table"
            )
        chunks = table.placement.num_chunks
        if request.chunks_per_stage is not None and chunks != request.chunks_per_stage * table.num_stages:
            raise ValueError(
                f"table {self.schedule} has {chunks} chunks on {table.num_stages} stages, which is not "
                f"{request.chunks_per_stage} per stage: leave chunks_per_stage out"
            )
        return table

    def _graph(
        self, table: ScheduleTable | None, given: PipelineGraph | None, placement: Placement, num_microbatches: int
    ) -> PipelineGraph:
        graph = given or (table.graph if table else chain(placement.num_chunks, num_microbatches))
        if graph.num_microbatches != num_microbatches:
            raise ValueError(f"the graph has {graph.num_microbatches} microbatches, not {num_microbatches}")
        graph = replace(graph, split=self._split(table, placement))
        if table is not None and self.follows_table:
            unnamed = set(graph.tasks()).difference(*table.orders)
            if unnamed:
                some = ", ".join(map(str, islice(sorted(unnamed), 3)))
                raise ValueError(
                    f"schedule {self.schedule!r} does not name {len(unnamed)} tasks of this pipeline ({some}): "
                    "take a schedule with its chunks, microbatches and backward"
                )
        return graph

    def _split(self, table: ScheduleTable | None, placement: Placement) -> frozenset[int]:
        """The chunks whose backward runs as I and W."""
        every = frozenset(range(placement.num_chunks))
        by_table = table.graph.split if table else frozenset()
        if table is not None and self.follows_table:
            wanted = {SPLIT: every, FUSED: frozenset(), None: by_table}[self.backward]
            if wanted != by_table:
                kind = "a split" if by_table else "a fused"
                raise ValueError(
                    f"schedule {self.schedule!r} orders {kind} backward, not a {self.backward} one: "
                    "leave backward out, or take another schedule"
                )
            return by_table
        if self.backward == SPLIT or self.hint == BFW:
            return every
        return frozenset() if self.backward == FUSED else by_table

    def _hint(self, placement: Placement) -> str:
        if self.hint is not None:
            return self.hint
        if self.schedule is not None:
            return SCHEDULE
        return "bf-deep" if placement.num_chunks > placement.num_stages else BF

    def _consumptions(self, table: ScheduleTable | None, num_stages: int) -> tuple[Consumption, ...]:
        if self.consume == STRICT:
            assert table is not None
            return tuple(strict(order) for order in table.orders)
        if self.hint == SCHEDULE:
            assert table is not None
            return tuple(ready(schedule_hint(order)) for order in table.orders)
        assert self.hint is not None
        return (ready(hint_by_name(BF if self.hint == BFW else self.hint)),) * num_stages

    def _windows(self, table: ScheduleTable | None, num_stages: int) -> tuple[int, ...]:
        if self.consume == STRICT:
            assert table is not None
            if self.window is None:
                return table.peak_in_flight()
            table.check_window(self.window)
        return check_windows(DEFAULT_WINDOW if self.window is None else self.window, num_stages)


def _placement(
    table: ScheduleTable | None, given: Placement | None, num_stages: int, chunks_per_stage: int | None
) -> Placement:
    if table is None:
        return given or looped(num_stages, 1 if chunks_per_stage is None else chunks_per_stage)
    if given is not None and given != table.placement:
        raise ValueError(
            f"schedule {table.name!r} puts chunks on stages as {table.placement.stage_of_chunk}, the model as "
            f"{given.stage_of_chunk}: give the model the schedule's placement"
        )
    return table.placement


def parse_window(text: str) -> int | tuple[int, ...]:
    """``8`` or ``8,6,4,2`` (one number per stage); raises ValueError on anything else."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"window {text!r} is not a number: write 8, or 8,6,4,2 for one number per stage") from None
    if min(numbers) < 1:
        raise ValueError(f"window {text} holds no microbatch somewhere: give every stage at least 1")
    return numbers[0] if len(numbers) == 1 else numbers


def parse_ordering(
    *,
    schedule: str | None = None,
    consume: str | None = None,
    hint: str | None = None,
    window: str | int | Sequence[int] | None = None,
    backward: str | None = None,
) -> Ordering:
    """An :class:`Ordering` from flags or configuration values; None means that the user did not say."""
    if isinstance(window, str):
        window = parse_window(window)
    elif window is not None and not isinstance(window, int):
        window = tuple(window)
    return Ordering(schedule=schedule, consume=consume or READY, hint=hint, window=window, backward=backward)


def add_ordering_arguments(parser: ArgumentParser) -> None:
    """Add ``--schedule``, ``--consume``, ``--hint``, ``--window`` and ``--backward``, all None where not given."""
    group = parser.add_argument_group("order of the tasks")
    group.add_argument(
        "--schedule", metavar="NAME|FILE.csv", help=f"a table: {', '.join(schedule_names())}; or a CSV file"
    )
    group.add_argument(
        "--consume",
        metavar=f"{READY}|{STRICT}",
        help="run the best of what is ready (default), or wait for the table's next entry",
    )
    group.add_argument(
        "--hint",
        metavar="NAME",
        help=f"rank what is ready by: {', '.join(hint_names())} (default: the schedule if there is one, else bf, or "
        "bf-deep with several chunks per stage); strict consumption follows its table instead",
    )
    group.add_argument(
        "--window",
        metavar="N|N,N,...",
        help=f"microbatches that a stage may hold, one number or one per stage (default {DEFAULT_WINDOW}); strict "
        "consumption refuses a table that holds more",
    )
    group.add_argument(
        "--backward",
        metavar=f"{SPLIT}|{FUSED}",
        help="run the backward as input and weight gradient, or as one task (default: as the schedule or hint has it)",
    )
