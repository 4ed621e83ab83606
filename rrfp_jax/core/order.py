"""What the stages' arbiters are made of, in one record."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.consumption import Consumption
from rrfp_jax.core.evaluation import CONSUMPTION, outputs_ahead
from rrfp_jax.core.footprint import memory_unit
from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.group import GroupProtocol, group_arbiter
from rrfp_jax.core.plan import StepRules
from rrfp_jax.core.read_ahead import AheadBound, turns_of_table
from rrfp_jax.core.stage_setup import StageSetup
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleTable, Task
from rrfp_jax.schedules.validation import execution_order


@dataclass(frozen=True, kw_only=True)
class Order:
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
    capacities: tuple[int, ...] | None = None
    """One per stage: what the microbatches that it holds may weigh, in steps that say what each weighs; None: they are
    counted in all steps. Not with strict consumption or footprints."""
    is_bf: bool
    """Whether the stages follow the paper's Algorithm 1, on whatever backward."""
    foresight: ForesightRules | None = None
    footprints: tuple[int, ...] | None = None
    """One per stage, in activations of one chunk and microbatch (where operations move parts of one, in units:
    :func:`rrfp_jax.core.footprint.memory_unit`); they take the place of the windows."""
    read_ahead: tuple[tuple[int, int], ...] = ()
    """(chunk, microbatches) for each chunk that runs F only for others: how many of its outputs may not have been taken
    by all of them. None under strict consumption."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """How many microbatches each stage may hold, as people write it: with a footprint counted by their chunks."""
        if self.footprints is None:
            return tuple(map(str, self.windows))
        chunks_of_stage = self.placement.chunks_of_stage
        passes = [self.graph.passes_per_microbatch(chunks) for chunks in chunks_of_stage]
        unit = memory_unit(self.graph)
        return tuple(f"{limit / unit / each:g}" for limit, each in zip(self.footprints, passes, strict=True))

    def ahead_bounds(self) -> tuple[AheadBound, ...]:
        """The bounds of read-ahead, with the turns that the rows give where these bound memory."""
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
        members: Mapping[int, tuple[int, int]] | None = None,
        protocol: GroupProtocol = GroupProtocol.LEADER,
        shortest_s: float = 0.0,
        evaluation_batches: int = 0,
    ) -> list[StageArbiter]:
        """Fresh arbiters of some stages, in the order given.

        Args:
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
        ahead = self.ahead_bounds()
        setups = {
            stage: StageSetup(
                self.graph,
                self.placement,
                stage,
                consumption=self.consumptions[stage],
                window=self.windows[stage],
                capacity=None if self.capacities is None else self.capacities[stage],
                rules=rules,
                certain_ahead=certain_ahead,
                foresight=foresight,
                footprint=None if self.footprints is None else self.footprints[stage],
                read_ahead=tuple(b for b in ahead if self.placement.stage_of_chunk[b.chunk] == stage),
                evaluation_batches=evaluation_batches,
            )
            for stage in wanted
        }
        return [group_arbiter(protocol, setups[stage], *of_group) for stage, of_group in wanted.items()]

    def evaluating(self, num_batches: int = 1) -> "Order":
        """What the stages follow in steps that evaluate so many batches (:mod:`rrfp_jax.core.evaluation`), as an
        order by itself: for simulations and memory forecasts."""
        graph = self.graph.evaluating(num_batches)
        return Order(
            label="evaluation",
            table=None,
            placement=self.placement,
            graph=graph,
            consumptions=(CONSUMPTION,) * self.placement.num_stages,
            windows=(graph.num_microbatches,) * self.placement.num_stages,
            is_bf=False,
            read_ahead=tuple((bound.chunk, bound.limit) for bound in outputs_ahead(graph)),
        )


def read_ahead_of(order: Order, asked: int | None = None) -> tuple[tuple[int, int], ...]:
    """How far each chunk may run ahead that runs F only for others; None: twice what those hold that read it, and never
    less than its turns need.

    Raises ValueError where ``asked`` is less than these need.
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
    """Microbatches that the stage of a chunk may hold, at least 1."""
    stage = order.placement.stage_of_chunk[chunk]
    if order.footprints is None:
        return order.windows[stage]
    passes = memory_unit(order.graph) * order.graph.passes_per_microbatch(order.placement.chunks_of_stage[stage])
    return max(1, order.footprints[stage] // passes)


def present_rows(rows: Iterable[Iterable[Task]], graph: PipelineGraph) -> list[list[Task]]:
    """The rows of a table, less what this pipeline lacks."""
    wanted = set(graph.tasks())
    return [[task for task in row if task in wanted] for row in rows]
