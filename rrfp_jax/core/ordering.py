"""The order of a pipeline: :class:`Ordering` in the user's words, and :class:`Order`, resolved for one pipeline.

``schedule`` is a table of tasks; ``consume`` says whether a stage waits for its table's next entry (``strict``) or runs
the best ready task (``ready``); ``hint`` ranks the ready tasks; ``window`` bounds the microbatches that a stage may
hold; ``backward`` runs as one task (``fused``) or as two (``split``). Where a table ranks the ready tasks,
``footprint`` bounds memory by the table's own peak, and ``foresight`` waits for the table's next entry once that is in
sight; both are on unless they are switched off, which leaves readiness alone, as the RRFP paper has it. ``read_ahead``
bounds how far chunks that run F only, such as frozen encoders, may run ahead of those that read them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import cast

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.groups import GroupProtocol, group_arbiter
from rrfp_jax.core.hints import BFW, HINTS, SCHEDULE, Consumption, hint_by_name, ready, schedule_hint, strict
from rrfp_jax.core.memory import AheadBound, check_windows, memory_changes, turns_of_table
from rrfp_jax.core.overlap import OverlappedArbiter
from rrfp_jax.core.plan import StepRules
from rrfp_jax.core.replicas import replicated_graph, replicated_placement, replicated_table
from rrfp_jax.core.stage_setup import EVALUATION, OtherRows, StageSetup, outputs_ahead
from rrfp_jax.field_rules import check_types
from rrfp_jax.readable import parse_bytes
from rrfp_jax.schedules import Op, PipelineGraph, Placement, ScheduleTable, Task, chain, linear
from rrfp_jax.schedules.table import check_orders, execution_order

READY = "ready"
STRICT = "strict"
SPLIT = "split"
FUSED = "fused"
DEFAULT_WINDOW = 32
BY_STAGE = "by-stage"
"""The word for the delays of PipeDream (1806.03377): stage s of p lacks ceil((p - 1 - s) / m) updates, with m
microbatches. That is 1 on all stages but the last, which lacks none, where m is at least p - 1."""


def hint_names() -> tuple[str, ...]:
    return (*HINTS, SCHEDULE)


def check_delay(delay: int | str) -> None:
    """Raise ValueError for a delay that no stage can have."""
    if delay not in (0, 1, BY_STAGE):
        raise ValueError(f"delay is {delay}: give 0, or 1 for steps that overlap, or {BY_STAGE}")


def _check_read_ahead(read_ahead: int | None, consume: str) -> None:
    """Raise ValueError for a bound that admits nothing, or where nothing heeds it."""
    if read_ahead is not None and read_ahead < 1:
        raise ValueError(f"read_ahead is {read_ahead}: a chunk must be allowed at least 1 microbatch, or it never runs")
    if read_ahead is not None and consume == STRICT:
        raise ValueError(
            "read_ahead has no meaning under strict consumption, which goes as far ahead as its table does"
        )


def check_words(consume: str, hint: str | None, backward: str | None, *, has_schedule: bool) -> None:
    """Raise ValueError on words that mean nothing or contradict each other."""
    if consume not in (READY, STRICT):
        raise ValueError(f"consume {consume!r} is unknown: choose {READY} or {STRICT}")
    if backward not in (None, SPLIT, FUSED):
        raise ValueError(f"backward {backward!r} is unknown: choose {SPLIT} or {FUSED}")
    if hint not in (None, SCHEDULE):
        hint_by_name(hint)
    if consume == STRICT and not has_schedule:
        raise ValueError("consume strict needs a schedule to wait for: give one, for example 1f1b")
    if hint == SCHEDULE and not has_schedule:
        raise ValueError("hint schedule needs a schedule to rank by: give one, for example 1f1b")
    if hint == BFW.name and consume == READY and backward == FUSED:
        raise ValueError(f"hint {BFW.name} needs a split backward: leave backward out, or take hint bf")


def _check_guidance(footprint: bool | None, foresight: ForesightRules | bool | None, *, is_guided: bool) -> None:
    """Raise ValueError where footprint or foresight are asked for and cannot mean anything."""
    for name, asked in (("footprint", footprint), ("foresight", foresight)):
        if asked and not is_guided:
            raise ValueError(
                f"{name} needs a schedule that ranks what is ready: give one, for example zb-h1, with consume {READY} "
                f"and no other hint, or leave {name} out"
            )


@dataclass(frozen=True, kw_only=True)
class Order:
    """The parts of all stages' arbiters on one pipeline."""

    label: str
    """For tables and captions, for example ``1f1b strict``."""
    table: ScheduleTable | None
    placement: Placement
    graph: PipelineGraph
    consumptions: tuple[Consumption, ...]
    """One per stage."""
    windows: tuple[int, ...]
    """One per stage; under ``strict`` without an explicit window the peak of the table, which nothing restrains."""
    capacities: tuple[int, ...] | None = None
    """One per stage: the most that the microbatches that it holds may weigh, in steps with weights; None: they are
    counted in all steps. Not with strict consumption or footprints."""
    is_bf: bool
    """Whether the stages follow the paper's Algorithm 1, on whatever backward."""
    foresight: ForesightRules | None = None
    footprints: tuple[int, ...] | None = None
    """One per stage, in activations of one chunk and microbatch (where operations move parts of one, in units:
    :attr:`rrfp_jax.schedules.PipelineGraph.memory_unit`); they take the place of the windows."""
    read_ahead: tuple[tuple[int, int], ...] = ()
    """(chunk, microbatches) for each chunk that runs F only for others: how many of its outputs may not have been taken
    by all of them. None under strict consumption."""
    shares: tuple[int, ...] = ()
    """One per stage: the number of replicas whose microbatches it runs, where some lack the stage; empty: one each."""
    delays: tuple[int, ...] = ()
    """One per stage: how many updates the weights of a step lack; with 1, the stage has two steps under way. Empty: no
    stage's lack any."""
    table_for: Callable[[int], ScheduleTable | None] = field(default=lambda _: None, compare=False)
    """Returns one replica's table for another number of microbatches, for steps in which owners change; None: there is
    none, or no table ranks the tasks."""

    @property
    def delay(self) -> int:
        """The largest delay of a stage."""
        return max(self.delays, default=0)

    @property
    def bounds(self) -> tuple[str, ...]:
        """The number of microbatches that each stage may hold, as text; with a footprint counted by their chunks."""
        if self.footprints is None:
            return tuple(map(str, self.windows))
        kept = map(self.graph.kept_per_microbatch, self.placement.chunks_of_stage)
        return tuple(f"{limit / each:g}" for limit, each in zip(self.footprints, kept, strict=True))

    def with_shares(self, shares: tuple[int, ...], *, widens: bool, read_ahead: int | None = None) -> "Order":
        """Returns the order of stages that run the microbatches of so many replicas each. Where it ``widens`` they may
        hold as many times as much: what follows them would else run dry."""
        times = shares if widens else (1,) * len(shares)
        order = replace(
            self,
            shares=shares,
            windows=tuple(each * number for each, number in zip(self.windows, times, strict=True)),
            footprints=self.footprints
            and tuple(each * number for each, number in zip(self.footprints, times, strict=True)),
        )
        return replace(order, read_ahead=read_ahead_of(order, read_ahead))

    def ahead_bounds(self) -> tuple[AheadBound, ...]:
        """Returns the bounds of read-ahead, with the turns of the rows where these bound memory."""
        found: dict[int, tuple[int, ...]] = {}
        if self.read_ahead and self.footprints is not None:
            rows = [one.hint.row or () for one in self.consumptions]
            found = turns_of_table(self.graph, execution_order(self.graph, present_rows(rows, self.graph))[0])
        return tuple(AheadBound(chunk=c, limit=limit, turns=found.get(c, ())) for c, limit in self.read_ahead)

    def arbiters(
        self,
        rules: StepRules,
        *,
        certain_ahead: bool = False,
        pairs: bool = False,
        members: Mapping[int, tuple[int, int]] | None = None,
        protocol: GroupProtocol = GroupProtocol.LEADER,
        shortest_s: float = 0.0,
        evaluation_batches: int = 0,
    ) -> list[StageArbiter]:
        """Returns fresh arbiters of some stages, in the order given.

        Args:
            certain_ahead, pairs: how stages hand over tasks (:class:`rrfp_jax.core.dispatch.Dispatch`).
            members: for each wanted stage, which member of how many of its group this arbiter is; None: every stage,
                by itself.
            protocol: how the members of a group agree.
            shortest_s: how long tasks must usually take at least for foresight, where its rules do not ask for more.
            evaluation_batches: how many batches a step runs that evaluates; 0: no step does.

        Raises ValueError where gradients are added up in order and a table that must be kept to has another one.
        """
        if rules.ordered and self.table is not None and (self.footprints or self.consumptions[0].is_strict):
            self.table.check_accumulation()
        foresight = self.foresight
        if foresight is not None:
            foresight = replace(foresight, shortest_s=max(foresight.shortest_s, shortest_s))
        wanted = dict.fromkeys(range(self.placement.num_stages), (0, 1)) if members is None else members
        ahead, share = self.ahead_bounds(), self.graph.num_microbatches // self.graph.num_replicas
        delays = self.delays or (0,) * self.placement.num_stages
        setups = {
            stage: StageSetup(
                self.graph,
                self.placement,
                stage,
                consumption=self.consumptions[stage],
                # A step in which a unit owns more than its share holds no more than the others.
                window=min(
                    self.windows[stage], share * (1 + delays[stage]) * (self.shares[stage] if self.shares else 1)
                ),
                capacity=None if self.capacities is None else self.capacities[stage],
                rules=rules,
                certain_ahead=certain_ahead,
                foresight=foresight,
                footprint=None if self.footprints is None else self.footprints[stage],
                read_ahead=tuple(b for b in ahead if self.placement.stage_of_chunk[b.chunk] == stage),
                evaluation_batches=evaluation_batches,
                other_rows=OtherRows(partial(self._other_row, stage)),
                delay=delays[stage],
                pairs=pairs,
            )
            for stage in wanted
        }
        if self.delay and any(number > 1 for _, number in wanted.values()):
            raise ValueError("steps that overlap are for stages of one process: give every stage one process")
        return [
            # They are used alike, and have no state in common that a class could hold.
            cast(StageArbiter, OverlappedArbiter(setups[stage]))
            if delays[stage]
            else group_arbiter(protocol, setups[stage], *of_group)
            for stage, of_group in wanted.items()
        ]

    def _other_row(self, unit: int, number: int) -> tuple[Task, ...] | None:
        """Returns the row of a stage of one replica for another number of microbatches, with the chunks of a unit."""
        table = self.table_for(number) if number else None
        if table is None:
            return None
        replica, stage = divmod(unit, table.num_stages)
        copies = self.graph.num_replicas
        return tuple(task._replace(chunk=task.chunk * copies + replica) for task in table.orders[stage])

    def evaluating(self, num_batches: int = 1) -> "Order":
        """Returns the order of steps that evaluate this many batches (:mod:`rrfp_jax.core.stage_setup`), as an order by
        itself: for simulations and memory forecasts."""
        graph = self.graph.evaluating(num_batches)
        return Order(
            label="evaluation",
            table=None,
            placement=self.placement,
            graph=graph,
            consumptions=(EVALUATION,) * self.placement.num_stages,
            windows=(graph.num_microbatches,) * self.placement.num_stages,
            is_bf=False,
            read_ahead=tuple((bound.chunk, bound.limit) for bound in outputs_ahead(graph)),
        )


def read_ahead_of(order: Order, asked: int | None = None) -> tuple[tuple[int, int], ...]:
    """Returns how far each chunk may run ahead that runs F only for others: twice as many as its readers hold, and
    never less than its turns need, unless ``asked`` is given.

    Raises ValueError where ``asked`` is less than the turns need.
    """
    graph = order.graph
    if asked is not None:
        limits = {chunk: asked for chunk in range(graph.num_chunks) if graph.reads_ahead(chunk)}
    else:
        held: dict[int, int] = {}
        for chunk in reversed(range(graph.num_chunks)):
            readers = graph.successors(chunk) if graph.reads_ahead(chunk) else ()
            held[chunk] = max((held[s] for s in readers), default=0) or _held_at_most(order, chunk)
        twice = {chunk: 2 * of_chunk for chunk, of_chunk in held.items() if graph.reads_ahead(chunk)}
        bounds = replace(order, read_ahead=tuple(twice.items())).ahead_bounds()
        limits = {bound.chunk: max(bound.limit, bound.needed(graph)) for bound in bounds}
    found = replace(order, read_ahead=tuple(sorted(limits.items())))
    for bound in found.ahead_bounds():
        bound.check(graph)
    return found.read_ahead


def _held_at_most(order: Order, chunk: int) -> int:
    """Returns how many microbatches the stage of a chunk may hold, at least 1."""
    stage = order.placement.stage_of_chunk[chunk]
    if order.footprints is None:
        return order.windows[stage]
    kept = order.graph.kept_per_microbatch(order.placement.chunks_of_stage[stage])
    return max(1, order.footprints[stage] // kept)


def present_rows(rows: Iterable[Iterable[Task]], graph: PipelineGraph) -> list[list[Task]]:
    """Returns the rows of a table without the tasks that this pipeline lacks."""
    wanted = set(graph.tasks())
    return [[task for task in row if task in wanted] for row in rows]


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """The order that a user asks for. Raises ValueError on words that mean nothing or contradict each other."""

    schedule: ScheduleTable | None = None
    """A table, for example of :func:`rrfp_jax.schedules.build_schedule`."""
    consume: str = READY
    """``ready`` or ``strict``."""
    hint: str | None = None
    """One of :func:`hint_names`, or ``FILE.py:NAME`` of a rule. None: ``schedule`` if there is one; otherwise ``bf``,
    or ``bf-deep`` with several chunks per stage.

    Strict consumption follows its schedule whatever the hint is.
    """
    window: int | tuple[int, ...] | str | None = None
    """Microbatches that a stage may hold, one number or one per stage; or, as text, the memory that they may take on
    every stage, for example ``512MiB``. None: the schedule's own peak, if it ranks the ready tasks (footprint);
    no limit under strict; else 32."""
    backward: str | None = None
    """``split`` or ``fused``; None: as the table or hint has it, otherwise fused."""
    footprint: bool | None = None
    """Whether a table that ranks the ready tasks also bounds the activations held, by its own peak or, where one is
    given, by the window; None: yes."""
    foresight: ForesightRules | bool | None = None
    """Whether, and how far, a stage waits for the next entry of such a table; None: yes."""
    read_ahead: int | None = None
    """How many microbatches a chunk that runs F only may have produced that others have not taken yet. None: twice as
    many as the stages that read it may hold. Strict consumption goes as far ahead as its table does."""
    delay: int | str = 0
    """How many updates the weights of a step lack. With 1, the tasks of the next step fill the end of a step
    (:mod:`rrfp_jax.core.overlap`); a table then ranks without footprint and foresight, and the window is its peak. With
    :data:`BY_STAGE` the last stage has none."""
    ops: tuple[Op, ...] = ()
    """Operations of a pipeline that no table orders; a table brings its own
    (:func:`rrfp_jax.schedules.table`)."""

    def __post_init__(self) -> None:
        check_types(self)
        check_words(self.consume, self.hint, self.backward, has_schedule=self.schedule is not None)
        _check_guidance(self.footprint, self.foresight, is_guided=self.is_guided)
        _check_read_ahead(self.read_ahead, self.consume)
        check_delay(self.delay)
        if self.delay and (self.consume == STRICT or self.footprint or self.foresight):
            raise ValueError(
                f"steps that overlap (delay {self.delay}) go by readiness within a window: leave out consume {STRICT}, "
                "footprint and foresight"
            )
        if self.ops and self.follows_table:
            raise ValueError("ops are for pipelines that no table orders: put them into the table, with_operations")
        if any(op.waits for op in self.ops):
            raise ValueError("ops that wait for tasks of a row need that row: take the table that they were made with")
        if self.schedule is not None and self.schedule.graph.ops and not self.follows_table:
            raise ValueError(
                f"schedule {self.schedule.name!r} has operations, and hint {self.hint} does not follow it: "
                f"give hint {SCHEDULE}, or consume {STRICT}"
            )
        if isinstance(self.window, str):
            parse_bytes(self.window, "window")

    @property
    def window_bytes(self) -> int | None:
        """The window where it is given as memory."""
        return parse_bytes(self.window, "window") if isinstance(self.window, str) else None

    @property
    def follows_table(self) -> bool:
        """Whether the order comes from the table; otherwise the table only says which stage owns which chunk."""
        return self.schedule is not None and (self.consume == STRICT or self.hint in (None, SCHEDULE))

    @property
    def is_guided(self) -> bool:
        """Whether a table ranks the ready tasks, so that footprint and foresight have a meaning."""
        return self.follows_table and self.consume == READY

    def check_deterministic(self) -> None:
        """Raise ValueError for a schedule that deterministic runs cannot keep to, strictly or within its memory."""
        if self._table is not None and self._keeps_to_table:
            self._table.check_accumulation()

    def fitted(self, placement: Placement, graph: PipelineGraph) -> PipelineGraph:
        """Returns the graph with the chunks whose backward is split, for a pipeline that this ordering fits.

        Raises ValueError, in one sentence with the remedy, where schedule, window and pipeline do not fit together.
        """
        if self.schedule is not None and self.schedule.placement != placement:
            raise ValueError(
                f"schedule {self.schedule.name!r} puts chunks on stages as {self.schedule.placement.stage_of_chunk}, "
                f"the model as {placement.stage_of_chunk}: give the model the schedule's placement"
            )
        is_chain = placement == linear(placement.num_stages) and graph.edges == chain(placement.num_chunks, 1).edges
        if self.delay == BY_STAGE and not is_chain:
            raise ValueError(f"delay {BY_STAGE} is for a chain with one chunk on each stage: give delay 1")
        ops = self.schedule.graph.ops if self.schedule is not None and self.follows_table else self.ops
        graph = replace(graph, split=self._split(placement), ops=ops)
        if self.schedule is not None and self.follows_table:
            unnamed = set(graph.tasks()).difference(*self.schedule.orders)
            if unnamed:
                some = ", ".join(map(str, islice(sorted(unnamed), 3)))
                raise ValueError(
                    f"schedule {self.schedule.name!r} does not name {len(unnamed)} tasks of this pipeline ({some}): "
                    "take a schedule with its chunks, microbatches and backward"
                )
            # The table, without the tasks that this pipeline lacks, must be able to run entry by entry.
            if self._keeps_to_table and self.schedule.graph == graph:
                self.schedule.validate()
            elif self._keeps_to_table:
                rows = present_rows(self.schedule.orders, graph)
                check_orders(self.schedule.name, self.schedule.placement, graph, rows)
        if not isinstance(self.window, str):
            self._windows(placement.num_stages)
            self._footprints(placement, graph, 1)
        return graph

    def resolve(self, placement: Placement, graph: PipelineGraph, *, num_replicas: int = 1) -> Order:
        """Returns the order on this pipeline, or on this many replicas of it; the graph's ``split`` is set here.

        Raises ValueError as :meth:`fitted`, and for a window in bytes: its number of microbatches is known to compiled
        programs only."""
        graph, delays = self.fitted(placement, graph), self._delays(placement.num_stages, graph.num_microbatches)
        hint = self.hint or SCHEDULE
        if self.hint is None and self.schedule is None:
            hint = "bf-deep" if placement.num_chunks > placement.num_stages else "bf"
        if self.schedule is None:
            label = hint
        elif self.consume == STRICT:
            label = f"{self.schedule.name} strict"
        elif hint != SCHEDULE:
            label = f"{hint} on {self.schedule.name}"
        else:
            label = f"{self.schedule.name} {'as hint' if self._foresight() is None else 'with foresight'}"
        if self.delay:
            label += " without a flush"
        table = None if self._table is None else replicated_table(self._table, num_replicas)
        footprints = self._footprints(placement, graph, num_replicas)
        order = Order(
            label=label,
            table=table,
            placement=replicated_placement(placement, num_replicas),
            graph=replicated_graph(graph, num_replicas),
            consumptions=self._consumptions(hint, table, placement.num_stages * num_replicas, footprints),
            windows=self._windows(placement.num_stages) * num_replicas,
            is_bf=self.consume == READY and hint in ("bf", BFW.name),
            foresight=self._foresight(),
            footprints=footprints,
            delays=delays * num_replicas,
            table_for=lru_cache(maxsize=8)(self._table_for),
        )
        return order if self.consume == STRICT else replace(order, read_ahead=read_ahead_of(order, self.read_ahead))

    def _delays(self, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
        """Returns the delay of each stage of one replica; raises ValueError for stages that would need more than 1."""
        if self.delay != BY_STAGE:
            return (int(self.delay),) * num_stages
        if num_microbatches < num_stages - 1:
            raise ValueError(
                f"with {num_microbatches} microbatches for {num_stages} stages the first stage's weights would lack "
                f"more than one update: give at least {num_stages - 1}, or delay 1"
            )
        return (1,) * (num_stages - 1) + (0,)

    @property
    def _table(self) -> ScheduleTable | None:
        """The schedule, or its hint where it only ranks the ready tasks."""
        if self.schedule is None or not self.is_guided:
            return self.schedule
        return self.schedule.hint or self.schedule

    def _table_for(self, num_microbatches: int) -> ScheduleTable | None:
        """Returns the table that ranks the ready tasks of one replica with another number of microbatches, if there is
        one."""
        schedule = self.schedule
        if schedule is None or not self.is_guided or schedule.for_microbatches is None or schedule.graph.absent:
            return None
        try:
            table = schedule.for_microbatches(num_microbatches)
        except ValueError:  # many schedules are for multiples of some number
            return None
        return table.hint or table

    @property
    def has_footprint(self) -> bool:
        """Whether the table's own activations bound the stage's memory, in place of the window."""
        return self.is_guided and self.footprint is not False and not self.delay

    @property
    def _keeps_to_table(self) -> bool:
        """Whether stages may wait for the table's next entry, so that it must be able to run."""
        return self.follows_table and (self.consume == STRICT or self.has_footprint)

    def _foresight(self) -> ForesightRules | None:
        if not self.is_guided or self.foresight is False or self.delay:
            return None
        return self.foresight if isinstance(self.foresight, ForesightRules) else ForesightRules()

    def _footprints(self, placement: Placement, graph: PipelineGraph, num_replicas: int) -> tuple[int, ...] | None:
        """Returns the activations that each stage may hold, in units; raises ValueError below the table's own.

        Where operations move memory, footprints bound it whatever the stages follow.
        """
        moves_memory = bool(graph.ops) and graph.operations.moves_memory
        if not (self.has_footprint or moves_memory):
            return None
        kept = [graph.kept_per_microbatch(chunks) for chunks in placement.chunks_of_stage]
        table = self._table if self.follows_table else None
        if table is None:
            return (
                tuple(w * each for w, each in zip(self._windows(placement.num_stages), kept, strict=True))
                * num_replicas
            )
        peaks = [round(peak * each) for peak, each in zip(table.peak_activations(), kept, strict=True)]
        if self.window is None:
            return tuple(peaks) * num_replicas
        limits = [window * each for window, each in zip(self._windows(placement.num_stages), kept, strict=True)]
        for stage, (peak, limit, each) in enumerate(zip(peaks, limits, kept, strict=True)):
            if limit < peak:
                ways = "or leave window out" if moves_memory else "leave window out, or switch footprint off"
                raise ValueError(
                    f"window {limit // each} of stage {stage} is less than the {peak / each:g} microbatches that "
                    f"schedule {table.name!r} holds there: give at least {-(-peak // each)}, {ways}"
                )
        return tuple(limits) * num_replicas

    def _split(self, placement: Placement) -> frozenset[int]:
        """Returns the chunks whose backward runs as I and W."""
        every = frozenset(range(placement.num_chunks))
        by_table = self.schedule.graph.split if self.schedule else frozenset()
        if self.schedule is not None and self.follows_table:
            wanted = {SPLIT: every, FUSED: frozenset(), None: by_table}[self.backward]
            if wanted != by_table:
                kind = "a split" if by_table else "a fused"
                raise ValueError(
                    f"schedule {self.schedule.name!r} orders {kind} backward, not a {self.backward} one: "
                    "leave backward out, or take another schedule"
                )
            return by_table
        if self.backward == SPLIT or self.hint == BFW.name:
            return every
        return frozenset() if self.backward == FUSED else by_table

    def _consumptions(
        self, hint: str, table: ScheduleTable | None, num_stages: int, footprints: tuple[int, ...] | None
    ) -> tuple[Consumption, ...]:
        if table is not None and self.consume == STRICT:
            return tuple(strict(order, table.pairs) for order in table.orders)
        if table is not None and hint == SCHEDULE:
            limits = footprints or (None,) * num_stages
            consumptions = []
            for order, limit in zip(table.orders, limits, strict=True):
                # W wait for idle places only where the stage may hold more activations than its row does.
                weights_last = table.weights_fill and (
                    limit is None or limit > max(accumulate(memory_changes(order, table.graph)), default=0)
                )
                consumptions.append(ready(schedule_hint(order, weights_last=weights_last)))
            return tuple(consumptions)
        return (ready(hint_by_name(hint)),) * num_stages

    def _windows(self, num_stages: int) -> tuple[int, ...]:
        if isinstance(self.window, str):
            raise ValueError(
                f"window is {self.window}: how many microbatches that is, only compiled programs tell; give a number"
            )
        if self.schedule is not None and self.consume == STRICT:
            if self.window is None:
                return self.schedule.peak_in_flight()
            if not self.schedule.graph.ops:  # a footprint heeds what these move
                self.schedule.check_window(self.window)
        if self.delay and self.window is None and self.is_guided and self.schedule is not None:
            return self.schedule.peak_in_flight()
        return check_windows(DEFAULT_WINDOW if self.window is None else self.window, num_stages)
