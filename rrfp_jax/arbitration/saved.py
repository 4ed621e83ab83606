"""An arbiter as plain records, from which it can be rebuilt anywhere: what it was made of, and where it stands.

A state is told by names: which tasks and gates have finished, which tasks run, which messages have arrived. All else
that an arbiter keeps (countdowns, ready tasks, held microbatches) follows from these and the stage's plan, so a state
stays readable, and one that contradicts itself is found.
"""

from dataclasses import dataclass

from rrfp_jax.arbitration.arbiter import StageArbiter
from rrfp_jax.arbitration.consumption import Consumption, ready, strict
from rrfp_jax.arbitration.events import Event, Message
from rrfp_jax.arbitration.group import group_arbiter
from rrfp_jax.arbitration.hints import SCHEDULE, hint_by_name, schedule_hint
from rrfp_jax.arbitration.plan import StagePlan, StepRules
from rrfp_jax.arbitration.ready_set import HELD, ReadySet
from rrfp_jax.arbitration.saved_group import SavedMembership, SavedNotes, put_notes, save_membership, save_notes
from rrfp_jax.arbitration.story import FINISHED, RUNNING
from rrfp_jax.tasks import PipelineGraph, Placement, Task


@dataclass(frozen=True, kw_only=True)
class SavedArbiter:
    """What an arbiter was made of, beside graph and placement."""

    stage: int
    membership: SavedMembership
    is_strict: bool
    hint: str
    """The hint's name."""
    row: tuple[Task, ...] | None
    """The stage's row of the table that the hint ranks by, or that is consumed strictly."""
    window: int | None
    """Microbatches; None under strict consumption."""
    rules: StepRules
    dispatch_ahead: int


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Where an arbiter stands between two events."""

    step: int | None
    """The present step, or the last one if none is active; None before the first."""
    is_active: bool
    absent: frozenset[tuple[int, int]]
    """The (chunk, microbatch) pairs that this step lacks beyond those of the graph."""
    finished: tuple[str, ...]
    """Tasks and gates, by name."""
    running: tuple[Task, ...]
    """In the order of their dispatch."""
    arrived: tuple[Message, ...]
    hint_state: int
    early: tuple[Event, ...]
    """What has come for later steps, in order."""
    notes: SavedNotes


def save_arbiter(arbiter: StageArbiter) -> SavedArbiter:
    """What ``arbiter`` was made of."""
    hint = arbiter.consumption.hint
    return SavedArbiter(
        stage=arbiter.stage,
        membership=save_membership(arbiter),
        is_strict=arbiter.consumption.is_strict,
        hint=hint.name,
        row=hint.row,
        window=arbiter.limit,
        rules=arbiter.rules,
        dispatch_ahead=arbiter.dispatch_ahead,
    )


def save_state(arbiter: StageArbiter) -> SavedState:
    """Where ``arbiter`` stands."""
    plan = arbiter._ranked.plan
    return SavedState(
        step=arbiter.step,
        is_active=arbiter.is_active,
        absent=arbiter._absent,
        finished=tuple(plan.name(node) for node, left in enumerate(arbiter._waiting) if left == FINISHED),
        running=arbiter.running(),
        arrived=tuple(sorted(arbiter._arrived)),
        hint_state=arbiter._hint_state,
        early=tuple(event for step in sorted(arbiter._early) for event in arbiter._early[step]),
        notes=save_notes(arbiter),
    )


def rebuild(saved: SavedArbiter, graph: PipelineGraph, placement: Placement) -> StageArbiter:
    """A fresh arbiter; raises ValueError where its parts do not fit together, or the hint is unknown here."""
    if not 0 <= saved.stage < placement.num_stages:
        raise ValueError(f"stage {saved.stage} is none of the {placement.num_stages} stages")
    if (saved.window is None) != saved.is_strict or (saved.window is not None and saved.window < 1):
        raise ValueError(f"stage {saved.stage} has window {saved.window}, which its consumption does not allow")
    return group_arbiter(
        saved.membership.protocol,
        graph,
        placement,
        saved.stage,
        member=saved.membership.member,
        num_members=saved.membership.num_members,
        consumption=_consumption(saved),
        window=1 if saved.window is None else saved.window,  # strict consumption ignores it
        rules=saved.rules,
        dispatch_ahead=saved.dispatch_ahead,
    )


def _consumption(saved: SavedArbiter) -> Consumption:
    needs_row = saved.is_strict or saved.hint == SCHEDULE
    if not needs_row:
        return ready(hint_by_name(saved.hint))
    if saved.row is None:
        raise ValueError(f"stage {saved.stage} lacks the row of the table that it follows")
    return strict(saved.row) if saved.is_strict else ready(schedule_hint(saved.row))


def in_state(arbiter: StageArbiter, state: SavedState) -> StageArbiter:
    """A copy of ``arbiter`` in another state; raises ValueError if the state is none of this arbiter's."""
    twin = arbiter.copy()
    twin.step, twin.is_active = state.step, state.is_active
    twin._begin(state.absent)
    twin._arrived = set(state.arrived)
    twin._hint_state = state.hint_state
    twin._early = {}
    for event in state.early:
        twin._early[event.step] = (*twin._early.get(event.step, ()), event)
    _put_tasks(twin, state)
    put_notes(twin, state.notes)
    try:
        twin.validate()
    except AssertionError as error:
        raise ValueError(f"the state of stage {arbiter.stage} in step {state.step} contradicts itself") from error
    return twin


def _put_tasks(arbiter: StageArbiter, state: SavedState) -> None:
    """Set what follows from the tasks that have finished and that run."""
    plan = arbiter._ranked.plan
    nodes = {plan.name(node): node for node in range(plan.num_nodes)}
    unknown = [name for name in (*state.finished, *map(str, state.running)) if name not in nodes]
    if unknown:
        raise ValueError(f"stage {arbiter.stage} has no {unknown[0]} in step {state.step}")
    finished = [nodes[name] for name in state.finished]
    arbiter._running = [nodes[str(task)] for task in state.running]
    arbiter._waiting = _waiting(plan, set(finished), set(arbiter._running), arbiter._arrived)
    started = [plan.tasks[node] for node in (*finished, *arbiter._running) if node < len(plan.tasks)]
    arbiter._num_started = len(started)
    arbiter._left -= len(finished)
    for task in started:
        if task.microbatch >= 0:
            arbiter._window.start_forward(task.microbatch)
    for node in finished:
        if node < len(plan.tasks) and plan.tasks[node].microbatch >= 0:
            arbiter._tasks_left -= 1
            arbiter._window.finish(plan.tasks[node].microbatch)
    arbiter._ready = ReadySet()
    if state.is_active:
        for node, lane in enumerate(plan.lanes):
            if not arbiter._waiting[node]:
                is_held = not lane and plan.tasks[node].microbatch in arbiter._window.held
                arbiter._ready.add(HELD if is_held else lane, arbiter._ranked.position[node])


def _waiting(plan: StagePlan, finished: set[int], running: set[int], arrived: set[Message]) -> list[int]:
    """How many inputs each task and gate lacks, or that it runs or has finished."""
    waiting = [
        sum(p not in arrived if isinstance(p, Message) else p not in finished for p in plan.prerequisites(node))
        for node in range(plan.num_nodes)
    ]
    for node in running:
        waiting[node] = RUNNING
    for node in finished:
        waiting[node] = FINISHED
    return waiting
