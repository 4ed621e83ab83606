"""Which order the stages follow: the options that simulate and emulate share, and schedules by name or file.

The same words mean the same everywhere; :mod:`rrfp_jax.core.ordering` explains and checks each of them. Here a schedule
is still a name, because its table needs the sizes of a pipeline.
"""

import logging
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax import core
from rrfp_jax.commands.common.options import offer
from rrfp_jax.core import (
    BY_STAGE,
    DEFAULT_WINDOW,
    FUSED,
    READY,
    SCHEDULE,
    SPLIT,
    STRICT,
    Order,
    check_windows,
    hint_names,
)
from rrfp_jax.core.dispatch import parse_dispatch
from rrfp_jax.runtime.operations import device_slots, host_copies, moves_activations, offload, recomputed
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
    sliced_chain,
)
from rrfp_jax.schedules.registry import chunks_per_stage as chunks_of_schedule
from rrfp_jax.schedules.slots import SlotLengths

_log = logging.getLogger(__name__)

ON, OFF = "on", "off"
_OWN = ("schedule", "group_size", "offload", "copy_ms", "recompute")
_WORDS = ("consume", "hint", "window", "backward", "footprint", "foresight", "read_ahead", "delay")
"""Fields that :class:`rrfp_jax.core.Ordering` has as well."""
_PART_REMADE = 0.9
"""Share of a chunk's activations that recompute makes again. It serves the bound of activations, not forecasts."""


@dataclass(frozen=True, kw_only=True)
class OrderingOptions:
    """The words of :class:`rrfp_jax.core.Ordering`, and a schedule by name; None: the user has not said.

    ``window`` may also be a text such as ``8`` or ``8,6,4,2``, and switches ``on`` or ``off``. Raises ValueError for
    other texts, and for options that need a schedule and have none.
    """

    schedule: str | None = None
    """A schedule's name, ``FILE.py:NAME``, or the path of a table (``*.csv``); None: no table."""
    group_size: int | None = None
    """Microbatches that go through a chunk before the stage's next one, where the schedule has such groups."""
    consume: str | None = None
    hint: str | None = None
    window: Any = None
    backward: str | None = None
    footprint: str | bool | None = None
    foresight: str | bool | None = None
    read_ahead: int | None = None
    delay: int | str | None = None
    offload: int | None = None
    """Microbatches whose activations a stage holds on its devices. The activations that a schedule holds beyond these
    go to the host."""
    copy_ms: float | None = None
    """How long moving one activation takes, one way; None: half as long as its forward and backward."""
    recompute: int | None = None
    """Number of tasks between the recomputation of activations, a task of its own, and their backward; None: they are
    kept."""

    def __post_init__(self) -> None:
        if isinstance(self.window, str):
            object.__setattr__(self, "window", parse_window(self.window))
        elif isinstance(self.window, list):
            object.__setattr__(self, "window", tuple(self.window))
        for name in ("footprint", "foresight"):
            object.__setattr__(self, name, parse_switch(getattr(self, name), name))
        if self.group_size is not None and (self.schedule is None or self.schedule.endswith(".csv")):
            raise ValueError("group_size is for schedules with groups of microbatches: take gis, or leave it out")
        if self.copy_ms is not None and self.offload is None and not (self.schedule or "").endswith(".csv"):
            raise ValueError("copy_ms is what offload's copies take: give offload too, or leave it out")
        if self.offload is not None:
            self._check_follows_table("offload moves what a schedule holds for long")
            if self.window is not None or self.footprint is False:
                raise ValueError("offload says what stages hold on their devices: leave window and footprint out")
        if self.recompute is not None:
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
        if self.consume != STRICT and self.hint not in (None, SCHEDULE):
            raise ValueError(
                f"{why}, and stages follow hint {self.hint} in place of {self.schedule}: give --hint {SCHEDULE} or "
                f"--consume {STRICT}"
            )

    def on(self, table: ScheduleTable | None) -> core.Ordering:
        """Returns the same wishes with their table built. Raises ValueError on words that contradict each other."""
        said = {name: value for name in _WORDS if (value := getattr(self, name)) is not None}
        return core.Ordering(schedule=table, **said)

    def resolve(
        self,
        *,
        num_stages: int,
        num_microbatches: int,
        chunks_per_stage: int | None = None,
        slices: int | None = None,
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
            slices: slices of a sequence, which run through each chunk one after the other; None leaves the choice to
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
        windows = None if self.window is None else check_windows(self.window, num_stages)
        if slices is not None and graph is None and (self.schedule is None or self.schedule.endswith(".csv")):
            whole = looped(num_stages, chunks_per_stage or 1)
            graph, placement = sliced_chain(chain(whole.num_chunks, num_microbatches), slices), whole.repeated(slices)
            chunks_per_stage = slices = None
        request = ScheduleRequest(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            chunks_per_stage=chunks_per_stage,
            group_size=self.group_size,
            slices=slices,
            window=self.window,
            durations_ms=durations_ms,
            comm_ms=comm_ms,
            memory_limit=None if windows is None else float(min(windows)),
            graph=graph,
            placement=None if graph is None else placement,
        )
        table = None if self.schedule is None else schedule_table(self.schedule, request, copy_ms=self.copy_ms)
        if table is not None and moves_activations(table.graph) and (self.offload, self.recompute) != (None, None):
            raise ValueError(
                f"schedule {self.schedule} has copies to the host of its own: leave offload and recompute out"
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
            moved = offload(table, self.offload, copy_ms=self.copy_ms, lengths=lengths, consume=ordering.consume)
            slots = device_slots(table, self.offload)
            if moved is not table:
                # An order that holds less than the slots without copies bounds memory by itself.
                ordering = replace(ordering, schedule=moved, window=slots if moved.graph.ops else None)
                letters = {op.letter for op in moved.graph.ops}
                before, now = (
                    [[task for task in row if task.kind not in letters] for row in made.orders]
                    for made in (table, moved)
                )
                if now != before:
                    text = "offload %d: stages follow another order than %s, chosen together with its copies"
                    _log.info(text, self.offload, table.name)
            else:
                text = "offload %d moves nothing: no stage of %s holds more than %d"
                _log.info(text, self.offload, table.name, max(slots))
        return ordering.resolve(placement, graph, num_replicas=num_replicas)


def schedule_table(schedule: str, request: ScheduleRequest, *, copy_ms: float | None = None) -> ScheduleTable:
    """Returns the table of a schedule, by its name or from its CSV file, for durations of one chunk; ``copy_ms`` as for
    :func:`rrfp_jax.runtime.operations.host_copies`, for a file with copies to the host.

    Raises ValueError, with the remedy, where it does not fit the request.
    """
    if not schedule.endswith(".csv"):
        if request.graph is not None and schedule_entry(schedule).any_graph:
            return build_schedule(schedule, request)
        # Schedules made from profiled times take those of a whole stage, and make their own chain.
        forward, input_gradient, weight_gradient = request.durations_ms
        times = chunks_of_schedule(schedule, request)
        of_stage = (times * forward, times * input_gradient, times * weight_gradient)
        return build_schedule(schedule, replace(request, durations_ms=of_stage, graph=None, placement=None))
    copies = host_copies(copy_ms, lengths=SlotLengths(*request.durations_ms))
    table = read_csv(schedule, placement=request.placement, graph=request.graph, ops=copies)
    sizes = (table.num_stages, table.graph.num_microbatches)
    if sizes != (request.num_stages, request.num_microbatches):
        raise ValueError(
            f"table {schedule} has {sizes[0]} stages and {sizes[1]} microbatches, but {request.num_stages} "
            f"and {request.num_microbatches} were asked for: give the numbers of the table"
        )
    chunks = table.placement.num_chunks
    if request.chunks_per_stage is not None and chunks != request.chunks_per_stage * table.num_stages:
        raise ValueError(
            f"table {schedule} has {chunks} chunks on {table.num_stages} stages, which is not "
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


def parse_switch(value: str | bool | None, name: str) -> bool | None:
    """Returns whether a text says ``on``; other values of a configuration pass unchanged. Raises ValueError for other
    texts."""
    if not isinstance(value, str):
        return value
    if value not in (ON, OFF):
        raise ValueError(f"{name} is {value!r}: write {ON} or {OFF}")
    return value == ON


def given_order(arguments: Namespace) -> dict[str, Any]:
    """Returns the values of the options that :func:`add_ordering_arguments` adds, for :class:`OrderingOptions`."""
    return {name: getattr(arguments, name) for name in (*_OWN, *_WORDS)}


def add_ordering_arguments(parser: ArgumentParser) -> None:
    """Add an option for each field of :class:`OrderingOptions`, None where it is not given."""
    add = parser.add_argument_group("order of the tasks").add_argument
    schedule = add(
        "--schedule",
        metavar="NAME|FILE.py:NAME|FILE.csv",
        help=f"a table: {', '.join(schedule_names())}; one that your file describes; or a CSV file",
    )
    offer(schedule, schedule_names())
    add(
        "--group-size",
        type=int,
        metavar="N",
        help="microbatches that go through a chunk before the stage's next one, for schedules with such groups: "
        f"{', '.join(name for name in schedule_names() if schedule_entry(name).has_groups)} (default: the fewest)",
    )
    add(
        "--consume",
        metavar=f"{READY}|{STRICT}",
        help="run the best of what is ready (default), or wait for the table's next entry",
    )
    hint = add(
        "--hint",
        metavar="NAME|FILE.py:NAME",
        help=f"rank what is ready by: {', '.join(hint_names())}, or a rule in your file (default: the schedule if "
        "there is one, else bf, or bf-deep with several chunks per stage); strict consumption follows its table",
    )
    offer(hint, hint_names())
    add(
        "--window",
        metavar="N|N,N,...",
        help="microbatches that a stage may hold, one number or one per stage (default: what a schedule that ranks "
        f"what is ready holds itself, else {DEFAULT_WINDOW}); footprint and strict consumption refuse a table that "
        "holds more; where operations move memory, what it may hold on the device",
    )
    add(
        "--backward",
        metavar=f"{SPLIT}|{FUSED}",
        help="run the backward as input and weight gradient, or as one task (default: as the schedule or hint has it)",
    )
    add(
        "--footprint",
        metavar=f"{ON}|{OFF}",
        help="where a schedule ranks what is ready, hold no more activations than it does itself, or than --window has "
        f"room for (default {ON}); {OFF}: bound the microbatches held, by --window",
    )
    add(
        "--foresight",
        metavar=f"{ON}|{OFF}",
        help="where a schedule ranks what is ready, wait for its next entry once that is in sight, and fill the wait "
        f"(default {ON}); {OFF}: start whatever is ready",
    )
    add(
        "--delay",
        type=parse_dispatch,
        metavar=f"N|{BY_STAGE}",
        help="updates that the weights of a step lack: with 1 the tasks of the next step fill the end of each, and no "
        f"step flushes, which changes what is learnt; {BY_STAGE}: 1, but 0 on the last stage (default 0)",
    )
    add(
        "--read-ahead",
        type=int,
        metavar="N",
        help="microbatches that a chunk without a backward, such as a frozen encoder, may have produced that others "
        "have not taken yet (default: twice what the stages that read it may hold)",
    )
    add(
        "--offload",
        type=int,
        metavar="N",
        help="microbatches whose activations a stage holds on its devices; what its schedule holds beyond that waits "
        "for its backward in host memory (default: nothing is moved)",
    )
    add(
        "--copy-ms",
        type=float,
        metavar="MS",
        help="with --offload, or a file with copies, how long it takes to move what a chunk keeps of one microbatch, "
        "one way, on an engine beside compute (default: half as long as its forward and backward)",
    )
    add(
        "--recompute",
        type=int,
        metavar="N",
        help="keep of a microbatch only what forwards read, and compute the rest again in a task of its own, N tasks "
        "ahead of its backward, 0 for right before it (default: it is kept)",
    )
