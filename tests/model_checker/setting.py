"""What is checked: one small pipeline with its windows, hints and steps, and the processes that each stage spans.

A *place* is where an arbiter runs: a stage, or each member of the group of a stage that spans processes. Places are
numbered stage after stage, so without groups they are the stages.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from rrfp_jax.core import (
    HINTS,
    Agreement,
    AheadBound,
    Consumption,
    ForesightRules,
    GroupProtocol,
    Hint,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    check_windows,
    group_arbiter,
    ready,
    strict,
)
from rrfp_jax.core.hints import schedule_hint
from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.core.stage_setup import OtherRows
from rrfp_jax.schedules import Absences, Edge, Pair, PipelineGraph, Placement, Task, absences, bits
from tests.model_checker.operations import Operations

Policy = Hint | tuple[Task, ...]
"""How a stage picks its tasks: a hint, consumed by readiness, or a row of tasks, consumed strictly."""


class Place(NamedTuple):
    """Where an arbiter runs."""

    stage: int
    member: int
    """Its number in the stage's group; 0 if it is alone."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One pipeline to check. Raises ValueError if the numbers of stages do not agree."""

    graph: PipelineGraph
    placement: Placement
    windows: tuple[int, ...]
    """Per stage, in microbatches; strict consumption ignores it."""
    policies: tuple[Policy, ...]
    """Per stage."""
    rules: StepRules = field(default_factory=StepRules)
    absences: tuple[Absences, ...] = ((),)
    """For each step that is run, the (chunk, microbatch) pairs that it lacks beyond the graph's."""
    evaluates: frozenset[int] = frozenset()
    """The steps, of those that are run, that evaluate: forwards alone, of :attr:`evaluation_batches` batches."""
    evaluation_batches: int = 1
    decides_early: bool = False
    """Whether stages are told, at any moment, that the last task is about to end; devices then keep to their order."""
    certain_ahead: bool = False
    """Whether stages hand over certain choices early; devices keep to their order then, too."""
    awaits_inputs: bool = False
    """Whether what is announced is promised, and devices, which keep to their order, wait for inputs by themselves."""
    footprints: tuple[int, ...] = ()
    """Per stage how many activations it may hold, in place of the windows; empty: these count. Where operations move
    parts of one, in units (:attr:`tests.model_checker.operations.Operations.unit`)."""
    capacities: tuple[int, ...] = ()
    """Per stage what the microbatches that it holds may weigh; empty: they are counted."""
    weights: tuple[tuple[int, ...], ...] = ()
    """Per step what each microbatch weighs, on every stage the same; empty: they are counted."""
    read_ahead: tuple[AheadBound, ...] = ()
    """How far chunks that run F only may run ahead of those that read them."""
    foresight: ForesightRules | None = None
    """How the stages wait for their tables' next entries; exhaustive exploration puts free choice in its place."""
    pairs: frozenset[Pair] | None = None
    """Where stages join tasks, the entries of strict rows that run as one program; None: no task has a partner."""
    arbiter: type[StageArbiter] = StageArbiter
    """The class under test; tests of the checks put broken ones here."""
    delays: tuple[int, ...] = ()
    """Per stage how many updates the weights of a step lack (:mod:`tests.model_checker.overlapped`); empty: none."""
    groups: tuple[int, ...] = ()
    """Per stage how many processes it spans; empty: one each."""
    protocol: GroupProtocol = GroupProtocol.LEADER
    """How the members of each group agree."""
    collective: bool = True
    """Whether a task of a group ends on no member before all have started it, as where it communicates; one of an
    engine beside compute ends on each member by itself."""
    make_member: Callable[..., StageArbiter] = group_arbiter
    """What makes the members of groups; tests of the checks put here what makes broken ones."""
    owners: tuple[StepOwners | None, ...] = ()
    """Per step the owners of its microbatches; None, or empty: the blocks of replicas."""
    lost: tuple[int, ...] = ()
    """The stages that take no part in any step."""
    other_rows: Mapping[tuple[int, int], tuple[Task, ...]] = field(default_factory=dict)
    """By stage and number of microbatches that it owns, the row that ranks then, of microbatches from 0 on."""
    sequence: tuple[int, ...] = ()
    """The order of microbatches in which memory is reserved, whatever ranks the tasks; empty: by number, or by rows."""

    def __post_init__(self) -> None:
        check_windows(self.windows, self.num_stages)
        if self.groups and (len(self.groups) != self.num_stages or min(self.groups) < 1):
            raise ValueError(f"groups is {self.groups} for {self.num_stages} stages: give each at least 1 process")
        if len(self.policies) != self.num_stages:
            raise ValueError(f"{len(self.policies)} policies for {self.num_stages} stages: give one for each stage")
        if self.footprints and len(self.footprints) != self.num_stages:
            raise ValueError(f"{len(self.footprints)} footprints for {self.num_stages} stages: give one for each stage")
        if self.foresight is not None or (self.footprints and not self.graph.ops and not self.sequence):
            self._check_rows()
        if self.awaits_inputs and (self.groups or self.foresight is None):
            raise ValueError("promised inputs are of use to foresight alone, and groups are promised none")
        if self.weights and (len(self.weights) != self.num_steps or len(self.capacities) != self.num_stages):
            raise ValueError("weights need an entry for each step, and capacities one for each stage")
        if self.owners and len(self.owners) != self.num_steps:
            raise ValueError("owners need an entry for each step")
        if self.lost and any(given is None or given.lost != self.lost for given in self.owners):
            raise ValueError("every step of a setting with lost stages has owners that lack these")
        if not self.absences:
            raise ValueError("absences has no entry, so no step would run: give one set of pairs for each step")

    def _check_rows(self) -> None:
        for stage, chunks in enumerate(self.placement.chunks_of_stage):
            if not set(self.graph.tasks(chunks)) <= set(self.row(stage) or ()):
                raise ValueError(f"the row of stage {stage} lacks tasks, which footprint and foresight need: name all")

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_steps(self) -> int:
        return len(self.absences)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        return tuple(Place(s, member) for s in range(self.num_stages) for member in range(self.group_size(s)))

    @property
    def num_places(self) -> int:
        return len(self.places)

    def group_size(self, stage: int) -> int:
        if stage in self.lost:
            return 0
        return self.groups[stage] if self.groups else 1

    def place(self, stage: int, member: int) -> int:
        """The number of a place."""
        return sum(self.group_size(earlier) for earlier in range(stage)) + member

    def group_of(self, place: int) -> tuple[int, ...]:
        """All places of a place's stage, itself included."""
        stage = self.places[place].stage
        return tuple(self.place(stage, member) for member in range(self.group_size(stage)))

    def row(self, stage: int) -> tuple[Task, ...] | None:
        """The row of the table by which a stage ranks what is ready, if there is one."""
        policy = self.policies[stage]
        return None if isinstance(policy, tuple) else policy.row

    def has_row(self, stage: int) -> bool:
        """Whether a table names the tasks of a stage, to be waited for or to rank what is ready."""
        return isinstance(self.policies[stage], tuple) or self.row(stage) is not None

    def memory_row(self, stage: int) -> Sequence[Task]:
        """The order in which a stage reserves memory: the table's, or else microbatch by microbatch."""
        policy = self.policies[stage]
        row = policy if isinstance(policy, tuple) else policy.row
        if row is None or self.sequence:
            return Operations(self.graph).canonical_row(self.placement.chunks_of_stage[stage], self.sequence)
        return row

    def ranked(self, stage: int) -> tuple[Task, ...]:
        """The tasks of that row as the hint ranks them."""
        policy = self.policies[stage]
        return () if isinstance(policy, tuple) else tuple(sorted(policy.row or (), key=policy.rank))

    def ahead(self, stage: int) -> tuple[AheadBound, ...]:
        """The bounds of the chunks of a stage."""
        return tuple(b for b in self.read_ahead if b.chunk in self.placement.chunks_of_stage[stage])

    def has_foresight(self, place: int) -> bool:
        """Whether a place looks ahead: of a group only a leader does."""
        is_leading = self.protocol is GroupProtocol.LEADER and self.places[place].member == 0
        is_alone = self.group_size(self.places[place].stage) == 1
        return self.foresight is not None and (is_alone or is_leading)

    def name(self, place: int) -> str:
        """A place in messages to people."""
        stage, member = self.places[place]
        return f"stage {stage}" if self.group_size(stage) == 1 else f"member {member} of stage {stage}"

    def graph_of_step(self, step: int) -> PipelineGraph:
        graph = self.forward_graph if step in self.evaluates else self.graph
        given = self.owners[step] if self.owners else None
        if given is not None:
            graph = self.graph_of_owners(given)
        return graph.skipping(self.absences[step])

    @cached_property
    def forward_graph(self) -> PipelineGraph:
        """Of steps that evaluate, written out anew: every edge without a gradient, and chunks that do not train."""
        graph, number = self.graph, self.evaluation_batches
        size = graph.num_microbatches // graph.num_replicas
        missing = [(c, divmod(m, size)) for c, mask in graph.absent for m in bits(mask)]
        return PipelineGraph(
            graph.num_chunks,
            graph.num_microbatches * number,
            tuple(Edge(edge.source, edge.target, False, edge.is_optional) for edge in graph.edges),
            absent=absences(
                (c, (block * number + batch) * size + m) for c, (block, m) in missing for batch in range(number)
            ),
            frozen=frozenset(range(graph.num_chunks)),
            num_replicas=graph.num_replicas,
            losses=graph.losses,
            passes=graph.passes,
        )

    def graph_of_owners(self, given: StepOwners) -> PipelineGraph:
        """The graph of a step with other owners, from its definition: of the copies of a chunk the owner runs a
        microbatch, unless its block's own copy lacks it, and copies with a microbatch in common have an edge."""
        graph, copies, stage_of = self.graph, self.graph.num_replicas, self.placement.stage_of_chunk
        size, num_stages = graph.num_microbatches // copies, self.num_stages // copies
        exists = {
            (c, m)
            for c in range(graph.num_chunks)
            for m in range(graph.num_microbatches)
            if graph.exists(c - c % copies + m // size, m)
            and given.owners[stage_of[c] % num_stages][m] == stage_of[c] // num_stages
        }
        ways = {(edge[0] // copies, edge[1] // copies): Edge(*edge) for edge in graph.edges}
        owned = {
            c: {m for m, r in enumerate(given.owners[stage_of[c] % num_stages]) if r == c % copies}
            for c in range(graph.num_chunks)
        }
        edges = [
            ways[s // copies, t // copies]._replace(source=s, target=t)
            for s in range(graph.num_chunks)
            for t in range(graph.num_chunks)
            if (s // copies, t // copies) in ways and owned[s] & owned[t]
        ]
        every = {(c, m) for c in range(graph.num_chunks) for m in range(graph.num_microbatches)}
        lost = frozenset(c for c, unit in enumerate(stage_of) if unit in given.lost)
        return replace(graph, edges=tuple(edges), absent=absences(every - exists), lost=lost)

    def with_owners(self, given: StepOwners) -> "Setting":
        """What holds in the steps with these owners, as a setting of which all steps have them.

        Memory is reserved microbatch by microbatch, in the sequence of their places in the blocks of replicas; the row
        for as many microbatches ranks, if there is one.
        """
        graph, number = self.graph_of_owners(given), self.graph.num_microbatches
        size = number // self.graph.num_replicas
        sequence = tuple(block * size + place for place in range(size) for block in range(number // size))
        if self.rules.ordered and not self.rules.by_messages:
            sequence = tuple(range(number))
        policies: list[Policy] = []
        for stage, policy in enumerate(self.policies):
            here = {m for c in self.placement.chunks_of_stage[stage] for m in graph.microbatches(c)}
            own = [m for m in sequence if m in here]
            row = self.other_rows.get((stage, len(own)))
            if isinstance(policy, tuple) or policy.row is None:
                policies.append(policy)
            elif row is None:
                policies.append(HINTS["bf"])
            else:
                policies.append(schedule_hint([t._replace(microbatch=own[t.microbatch]) for t in row]))
        bounds = tuple(
            replace(b, turns=tuple(m for m in sequence for _ in range(2)))
            for b in self.read_ahead
            if graph.successors(b.chunk)
        )
        guided = any(not isinstance(policy, tuple) and policy.row is not None for policy in policies)
        return replace(
            self,
            graph=graph,
            policies=tuple(policies),
            owners=(),
            sequence=sequence,
            read_ahead=bounds,
            foresight=self.foresight if guided else None,
        )

    def rules_of_step(self, step: int) -> StepRules:
        """What a step consists of beyond its graph's tasks."""
        if step not in self.evaluates:
            return self.rules
        return StepRules(updates=False, agreement=Agreement.LOSS, tree_degree=self.rules.tree_degree)

    @cached_property
    def evaluation(self) -> "Setting | None":
        """What holds in the steps that evaluate, as a setting of which all steps do; None: none does.

        Forwards by readiness, of the larger chunk first, however training goes; at most four outputs of a chunk are
        there that have not been taken.
        """
        if not self.evaluates:
            return None
        graph = self.forward_graph
        read = [c for c in range(graph.num_chunks) if graph.successors(c)]
        return replace(
            self,
            graph=graph,
            windows=(graph.num_microbatches,) * self.num_stages,
            policies=(HINTS["bf-deep"],) * self.num_stages,
            rules=self.rules_of_step(min(self.evaluates)),
            evaluates=frozenset(),
            footprints=(),
            capacities=(),
            weights=(),
            read_ahead=tuple(AheadBound(chunk=c, limit=4) for c in read),
            foresight=None,
        )

    def make_arbiter(self, place: int) -> StageArbiter:
        """A fresh arbiter of one place."""
        stage, member = self.places[place]
        setup = StageSetup(
            self.graph,
            self.placement,
            stage,
            consumption=_consumption(self.policies[stage], self.pairs or frozenset()),
            window=self.windows[stage],
            capacity=self.capacities[stage] if self.capacities else None,
            rules=self.rules,
            certain_ahead=self.certain_ahead,
            foresight=self.foresight,
            footprint=self.footprints[stage] if self.footprints else None,
            read_ahead=self.ahead(stage),
            evaluation_batches=self.evaluation_batches if self.evaluates else 0,
            other_rows=OtherRows(made={number: row for (of, number), row in self.other_rows.items() if of == stage}),
            delay=self.delays[stage] if self.delays else 0,
            pairs=self.pairs is not None,
        )
        num_members = self.group_size(stage)
        if num_members > 1:
            return self.make_member(self.protocol, setup, member, num_members)
        return StageArbiter(setup) if self.delays and not setup.delay else self.arbiter(setup)

    @property
    def keeps_order(self) -> bool:
        """Whether devices run tasks in the order in which these were handed over."""
        return self.decides_early or self.certain_ahead or self.awaits_inputs or self.pairs is not None

    def wiring_key(self) -> Hashable:
        """Equal for settings whose places exchange the same messages in the same steps."""
        has_rows = tuple(map(self.has_row, range(self.num_stages))) if self.graph.ops else ()
        steps = (self.absences, self.weights, self.evaluates, self.evaluation_batches, self.owners)
        return (self.graph, self.placement, self.rules, *steps, self.groups, has_rows, self.awaits_inputs)

    def start_of(self, step: int) -> StepStarted:
        """The event that starts a step, on every place alike."""
        weights = self.weights[step] if self.weights else ()
        owners = self.owners[step] if self.owners else None
        return StepStarted(step, 0.0, self.absences[step], weights, step in self.evaluates, owners)

    def place_key(self, place: int) -> Hashable:
        """Equal for settings of equal wiring in which this place's arbiter is the same."""
        stage = self.places[place].stage
        memory = self.footprints[stage] if self.footprints else None, self.windows[stage]
        ways = (
            self.capacities[stage] if self.capacities else None,
            self.policies[stage],
            self.decides_early,
            self.certain_ahead,
            self.foresight,
            self.pairs,
            tuple(self.other_rows.items()),
        )
        own = (place, memory, self.ahead(stage), *ways)
        if self.group_size(stage) == 1:
            return (*own, self.arbiter)
        return (*own, self.protocol, self.collective, self.make_member)

    def __str__(self) -> str:
        policies = ["strict" if isinstance(policy, tuple) else policy.name for policy in self.policies]
        shown = policies[0] if len(set(policies)) == 1 else ", ".join(policies)
        edges = " ".join(f"{e.source}{'->' if e.carries_gradient else '=>'}{e.target}" for e in self.graph.edges)
        return (
            f"{self.num_stages} stages, chunks on stages {self.placement.stage_of_chunk}, "
            f"{self.graph.num_microbatches} microbatches, edges {edges or 'none'}, windows {self.windows}, "
            f"hint {shown}, {'ordered' if self.rules.ordered else 'free'} accumulation, "
            f"agreement {self.rules.agreement}, {self.num_steps} step{'s' if self.num_steps > 1 else ''}"
            f"{f', of which {sorted(self.evaluates)} evaluate' if self.evaluates else ''}"
            f"{', early decisions' if self.decides_early else ''}{', foresight' if self.foresight else ''}"
            f"{', certain choices early' if self.certain_ahead else ''}"
            f"{', promised inputs' if self.awaits_inputs else ''}{', in pairs' if self.pairs is not None else ''}"
            f"{f', owners {self.owners}' if self.owners else ''}"
            f"{f', footprints {self.footprints}' if self.footprints else ''}"
            f"{f', weights {self.weights} of {self.capacities}' if self.weights else ''}"
            f"{f', read-ahead {[(b.chunk, b.limit) for b in self.read_ahead]}' if self.read_ahead else ''}"
            f"{self._describe_operations()}{self._describe_groups()}"
        )

    def _describe_operations(self) -> str:
        told = [f"{op.letter} on {op.lane}" for op in self.graph.ops]
        return f", operations {', '.join(told)}" if told else ""

    def _describe_groups(self) -> str:
        if not self.groups:
            return ""
        ends = "collectives" if self.collective else "separate ends"
        return f", processes per stage {self.groups}, protocol {self.protocol}, {ends}"


def _consumption(policy: Policy, pairs: frozenset[Pair]) -> Consumption:
    return strict(policy, pairs) if isinstance(policy, tuple) else ready(policy)
