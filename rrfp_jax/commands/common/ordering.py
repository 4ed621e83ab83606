"""Which order the stages follow: the flags that train, emulate and simulate share, and schedules by name or file.

The same words mean the same everywhere; :mod:`rrfp_jax.core.ordering` explains each of them.
"""

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax import core
from rrfp_jax.commands.common.options import offer
from rrfp_jax.core import (
    DEFAULT_WINDOW,
    FUSED,
    READY,
    SCHEDULE,
    SPLIT,
    STRICT,
    Order,
    check_guidance,
    check_read_ahead,
    check_windows,
    check_words,
    hint_names,
)
from rrfp_jax.runtime.operations import device_slots, offload, recomputed
from rrfp_jax.schedules import (
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    build_schedule,
    chain,
    looped,
    read_csv,
    schedule_entry,
    schedule_names,
)
from rrfp_jax.schedules.registry import chunks_per_stage as chunks_of_schedule
from rrfp_jax.schedules.slots import SlotLengths

_log = logging.getLogger(__name__)

ON, OFF = "on", "off"
_NAMES = (
    *("schedule", "group_size", "consume", "hint", "window", "backward"),
    *("footprint", "foresight", "read_ahead", "offload", "copy_ms", "recompute"),
)

_PART_REMADE = 0.9
"""Share of a chunk's activations that recompute makes again. It serves the bound of activations, not forecasts."""


@dataclass(frozen=True, kw_only=True)
class OrderingOptions:
    """The order that the user asks for, with schedules by name. Raises ValueError on words that contradict each
    other."""

    schedule: str | None = None
    """A schedule's name, ``FILE.py:NAME``, or the path of a table (``*.csv``); None: no table."""
    group_size: int | None = None
    """Microbatches that go through a chunk before the stage's next one, where the schedule has such groups."""
    consume: str = READY
    hint: str | None = None
    window: int | tuple[int, ...] | None = None
    backward: str | None = None
    footprint: bool | None = None
    foresight: bool | None = None
    read_ahead: int | None = None
    offload: int | None = None
    """Microbatches whose activations a stage holds on its devices. The activations that a schedule holds beyond these
    go to the host."""
    copy_ms: float | None = None
    """How long moving one activation takes, one way; None: half as long as its forward and backward."""
    recompute: int | None = None
    """Number of tasks between the recomputation of activations, a task of its own, and their backward; None: they are
    kept."""

    def __post_init__(self) -> None:
        check_words(self.consume, self.hint, self.backward, has_schedule=self.schedule is not None)
        is_guided = self.schedule is not None and self.consume == READY and self.hint in (None, SCHEDULE)
        check_read_ahead(self.read_ahead, self.consume)
        check_guidance(self.footprint, self.foresight, is_guided=is_guided)
        if self.group_size is not None and (self.schedule is None or self.schedule.endswith(".csv")):
            raise ValueError("group_size is for schedules with groups of microbatches: take gis, or leave it out")
        self._check_offload()
        self._check_recompute()

    def _check_offload(self) -> None:
        if self.offload is None:
            if self.copy_ms is not None:
                raise ValueError("copy_ms is what offload's copies take: give offload too, or leave it out")
            return
        self._check_follows_table("offload moves what a schedule holds for long")
        if self.window is not None or self.footprint is False:
            raise ValueError("offload says what stages hold on their devices: leave window and footprint out")

    def _check_recompute(self) -> None:
        if self.recompute is None:
            return
        if self.recompute < 0:
            raise ValueError(f"recompute is {self.recompute}: give 0 or more tasks ahead of the backward")
        self._check_follows_table("recompute puts a task ahead of a schedule's backwards")
        if self.offload is not None:
            raise ValueError("recompute makes again what offload would move: leave one of them out")

    def _check_follows_table(self, why: str) -> None:
        """Raise ValueError, with the options to give, unless there is a schedule that the stages follow."""
        if self.schedule is None:
            hint = "" if self.hint is None else f" --hint {SCHEDULE}"
            raise ValueError(f"{why}: give one, for example --schedule 1f1b{hint}")
        if self.consume == READY and self.hint not in (None, SCHEDULE):
            raise ValueError(
                f"{why}, and stages follow hint {self.hint} in place of {self.schedule}: give --hint {SCHEDULE} or "
                f"--consume {STRICT}"
            )

    def resolve(
        self,
        *,
        num_stages: int,
        num_microbatches: int,
        chunks_per_stage: int | None = None,
        durations_ms: tuple[float, float, float] = (1.0, 1.0, 1.0),
        comm_ms: float = 0.0,
        lengths_ms: tuple[float, float, float] | None = None,
        placement: Placement | None = None,
        graph: PipelineGraph | None = None,
        num_replicas: int = 1,
    ) -> Order:
        """Build the table, the placement and the graph, and one consumption per stage.

        Args:
            num_stages, num_microbatches, chunks_per_stage: the sizes; ``chunks_per_stage`` None leaves the choice to
                the schedule, and is 1 without one.
            durations_ms, comm_ms: F, I and W of one chunk and a transfer, for schedules made from profiled times.
            lengths_ms: F, I and W of one chunk as they really are, for ``offload`` and ``recompute``; None: as above.
            placement, graph: those of a model that brings its own; the schedule must fit them. The graph's ``split``
                is set here. None: the schedule's, or a chain of looped chunks.
            num_replicas: data-parallel replicas of all that is said above, each with its own ``num_microbatches``.

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
                group_size=self.group_size,
                window=self.window,
                durations_ms=durations_ms,
                comm_ms=comm_ms,
                memory_limit=None if self.window is None else float(min(check_windows(self.window, num_stages))),
                graph=graph,
                placement=None if graph is None else placement,
            )
        )
        if placement is None:
            placement = table.placement if table else looped(num_stages, chunks_per_stage or 1)
        if graph is None:
            graph = table.graph if table else chain(placement.num_chunks, num_microbatches)
        if graph.num_microbatches != num_microbatches:
            raise ValueError(f"the graph has {graph.num_microbatches} microbatches, not {num_microbatches}")
        if table is not None and self.recompute is not None:
            forward_ms = (lengths_ms or durations_ms)[0]
            table = recomputed(table, _PART_REMADE, lead=self.recompute, ms=forward_ms)
        ordering = self.on(table)
        if table is not None and self.offload is not None:
            lengths = SlotLengths(*(lengths_ms or durations_ms))
            moved = offload(table, self.offload, copy_ms=self.copy_ms, lengths=lengths, consume=self.consume)
            if moved is not table:
                ordering = replace(ordering, schedule=moved, window=device_slots(table, self.offload))
            else:
                most = max(device_slots(table, self.offload))
                _log.info("offload %d moves nothing: no stage of %s holds more than %d", self.offload, table.name, most)
        return ordering.resolve(placement, graph, num_replicas=num_replicas)

    def on(self, table: ScheduleTable | None) -> core.Ordering:
        """The same wishes with their table built."""
        return core.Ordering(
            schedule=table,
            consume=self.consume,
            hint=self.hint,
            window=self.window,
            backward=self.backward,
            footprint=self.footprint,
            foresight=self.foresight,
            read_ahead=self.read_ahead,
        )

    def _table(self, request: ScheduleRequest) -> ScheduleTable | None:
        if self.schedule is None:
            return None
        if not self.schedule.endswith(".csv"):
            if request.graph is not None and schedule_entry(self.schedule).any_graph:
                return build_schedule(self.schedule, request)
            forward, input_gradient, weight_gradient = request.durations_ms
            times = chunks_of_schedule(self.schedule, request)
            of_stage = (times * forward, times * input_gradient, times * weight_gradient)
            return build_schedule(self.schedule, replace(request, durations_ms=of_stage, graph=None, placement=None))
        table = read_csv(self.schedule, placement=request.placement, graph=request.graph)
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
    group_size: int | None = None,
    consume: str | None = None,
    hint: str | None = None,
    window: str | int | Sequence[int] | None = None,
    backward: str | None = None,
    footprint: str | bool | None = None,
    foresight: str | bool | None = None,
    read_ahead: int | None = None,
    offload: int | None = None,
    copy_ms: float | None = None,
    recompute: int | None = None,
) -> OrderingOptions:
    """An :class:`OrderingOptions` from flags or configuration values; None means that the user did not say."""
    if isinstance(window, str):
        window = parse_window(window)
    elif window is not None and not isinstance(window, int):
        window = tuple(window)
    return OrderingOptions(
        schedule=schedule,
        group_size=group_size,
        consume=consume or READY,
        hint=hint,
        window=window,
        backward=backward,
        footprint=parse_switch(footprint, "footprint"),
        foresight=parse_switch(foresight, "foresight"),
        read_ahead=read_ahead,
        offload=offload,
        copy_ms=copy_ms,
        recompute=recompute,
    )


def parse_switch(value: str | bool | None, name: str) -> bool | None:
    """Returns whether a text says ``on``; other values of a configuration pass unchanged. Raises ValueError for other
    texts."""
    if not isinstance(value, str):
        return value
    if value not in (ON, OFF):
        raise ValueError(f"{name} is {value!r}: write {ON} or {OFF}")
    return value == ON


def given_order(arguments: Namespace) -> dict[str, Any]:
    """Returns the values of the options that :func:`add_ordering_arguments` adds, for :func:`parse_ordering`."""
    return {name: getattr(arguments, name) for name in _NAMES}


def add_ordering_arguments(parser: ArgumentParser) -> None:
    """Add an option for each of :func:`parse_ordering`'s arguments, all None where not given."""
    group = parser.add_argument_group("order of the tasks")
    schedule = group.add_argument(
        "--schedule",
        metavar="NAME|FILE.py:NAME|FILE.csv",
        help=f"a table: {', '.join(schedule_names())}; one that your file describes; or a CSV file",
    )
    offer(schedule, schedule_names())
    group.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="microbatches that go through a chunk before the stage's next one, for schedules with such groups: "
        f"{', '.join(name for name in schedule_names() if schedule_entry(name).has_groups)} (default: the fewest)",
    )
    group.add_argument(
        "--consume",
        metavar=f"{READY}|{STRICT}",
        help="run the best of what is ready (default), or wait for the table's next entry",
    )
    hint = group.add_argument(
        "--hint",
        metavar="NAME|FILE.py:NAME",
        help=f"rank what is ready by: {', '.join(hint_names())}, or a rule in your file (default: the schedule if "
        "there is one, else bf, or bf-deep with several chunks per stage); strict consumption follows its table",
    )
    offer(hint, hint_names())
    group.add_argument(
        "--window",
        metavar="N|N,N,...",
        help="microbatches that a stage may hold, one number or one per stage (default: what a schedule that ranks "
        f"what is ready holds itself, else {DEFAULT_WINDOW}); footprint and strict consumption refuse a table that "
        "holds more; where operations move memory, what it may hold on the device",
    )
    group.add_argument(
        "--backward",
        metavar=f"{SPLIT}|{FUSED}",
        help="run the backward as input and weight gradient, or as one task (default: as the schedule or hint has it)",
    )
    group.add_argument(
        "--footprint",
        metavar=f"{ON}|{OFF}",
        help="where a schedule ranks what is ready, hold no more activations than it does itself, or than --window has "
        f"room for (default {ON}); {OFF}: bound the microbatches held, by --window",
    )
    group.add_argument(
        "--foresight",
        metavar=f"{ON}|{OFF}",
        help="where a schedule ranks what is ready, wait for its next entry once that is in sight, and fill the wait "
        f"(default {ON}); {OFF}: start whatever is ready",
    )
    group.add_argument(
        "--read-ahead",
        type=int,
        metavar="N",
        help="microbatches that a chunk without a backward, such as a frozen encoder, may have produced that others "
        "have not taken yet (default: twice what the stages that read it may hold)",
    )
    group.add_argument(
        "--offload",
        type=int,
        metavar="N",
        help="microbatches whose activations a stage holds on its devices; what its schedule holds beyond that waits "
        "for its backward in host memory (default: nothing is moved)",
    )
    group.add_argument(
        "--copy-ms",
        type=float,
        metavar="MS",
        help="with --offload, how long it takes to move what a chunk keeps of one microbatch, one way, on an engine "
        "beside compute (default: half as long as its forward and backward)",
    )
    group.add_argument(
        "--recompute",
        type=int,
        metavar="N",
        help="keep of a microbatch only what forwards read, and compute the rest again in a task of its own, N tasks "
        "ahead of its backward, 0 for right before it (default: it is kept)",
    )
