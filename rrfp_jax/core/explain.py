"""Reports on a stage to people, as functions over its arbiter's state, and the invariants of that state.

Events and instructions in words, the missing inputs of each task, the story of a microbatch, why a stage idles, and
illegal transitions. :func:`check_invariants` checks the state from first principles: for tests, since it is slow.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from rrfp_jax.core.dispatch import AHEAD, HELD
from rrfp_jax.core.events import (
    Announce,
    ClockTick,
    DecideNow,
    Event,
    GroupHeard,
    InputArrived,
    InputPromised,
    Instruction,
    MemberReceived,
    Message,
    MessageKind,
    Note,
    RunPair,
    RunTask,
    Send,
    StepStarted,
    TaskAnnounced,
    TaskChosen,
    TaskProposed,
    TellGroup,
    WakeAt,
)
from rrfp_jax.core.foresight import NEVER_S
from rrfp_jax.core.memory import Footprint, ReadAhead, holding_turns
from rrfp_jax.core.plan import DUE, FINISHED, RUNNING, end_followers
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.schedules.timeline import IdleReason

if TYPE_CHECKING:
    from rrfp_jax.core.arbiter import StageArbiter


class IllegalTransition(RuntimeError):
    """An event that cannot happen in the arbiter's state; its text tells the story of the microbatch concerned."""


class Waiting(NamedTuple):
    """A task or gate that has not run, and the inputs that it lacks (none: it is ready)."""

    what: str
    microbatch: int
    missing_messages: tuple[Message, ...]
    missing_local: tuple[str, ...]

    def __str__(self) -> str:
        missing = [*map(str, self.missing_messages), *self.missing_local]
        return f"{self.what} waits for {', '.join(missing)}" if missing else f"{self.what} is ready"


def waiting_tasks(arbiter: "StageArbiter") -> list[Waiting]:
    """Returns every task and gate of the present step that has not begun, with its missing inputs, in the plan's order.

    A ready F that only its chunk's read-ahead restrains counts as waiting for the receipts of its readers.
    """
    if not arbiter.is_active:
        return []
    plan, waiting = arbiter._ranked.plan, arbiter._waiting
    receipts: dict[int, tuple[Message, ...]] = {}
    if arbiter._ahead is not None:
        missing = [m for m, n in plan.arrivals.items() if m.kind is MessageKind.TAKEN and n not in arbiter._arrived]
        for chunk, number in arbiter._ahead.number.items():
            window = arbiter._ahead.windows[number]
            awaited = tuple(m for m in missing if m.target == chunk and m.microbatch in window.held)
            for m in arbiter.graph.microbatches(chunk):
                node = plan.index[Task(TaskKind.F, chunk, m)]
                if not waiting[node] and not window.admits(m):
                    receipts[node] = awaited
    handed_over = [_waiting_of(arbiter, node) for node in arbiter._pending.awaiting]
    left = [(node, _waiting_of(arbiter, node)) for node in range(plan.num_nodes) if waiting[node] >= 0]
    return handed_over + [
        one._replace(missing_messages=receipts[node]) if node in receipts else one for node, one in left
    ]


def _waiting_of(arbiter: "StageArbiter", node: int) -> Waiting:
    plan = arbiter._ranked.plan
    messages, local = [], []
    for prerequisite in plan.prerequisites[node]:
        if isinstance(prerequisite, Message):
            if plan.arrivals[prerequisite] not in arbiter._arrived:
                messages.append(prerequisite)
        else:
            # A task may follow one that is about to end; a gate waits for the real end.
            left = arbiter._waiting[prerequisite]
            follows = node < len(plan.tasks) and plan.lanes[node] >= 0
            if left != FINISHED and not (left == DUE and follows):
                local.append(plan.name(prerequisite))
    microbatch = plan.tasks[node].microbatch if node < len(plan.tasks) else -1
    if arbiter._end_waits and node < len(plan.tasks) and microbatch < 0:
        local.append("the end of the step before")
    return Waiting(plan.name(node), microbatch, tuple(messages), tuple(local))


def microbatch_story(arbiter: "StageArbiter", microbatch: int) -> str:
    """Returns the story of one microbatch on a stage, one line per task; -1 stands for the tasks of the step's end."""
    words = {FINISHED: "has finished", RUNNING: "is running", DUE: "is about to end"}
    lines = []
    for node, task in arbiter._ranked.plan.present():
        if task.microbatch == microbatch:
            state = words.get(arbiter._waiting[node])
            lines.append(f"  {task} {state}" if state else f"  {_waiting_of(arbiter, node)}")
    return "\n".join(lines) or "  this stage has no task with it"


def illegal_transition(arbiter: "StageArbiter", what: str, subject: Task | Message) -> IllegalTransition:
    """Returns the error for an event that cannot happen, with the story of its task or message."""
    return IllegalTransition(
        f"stage {arbiter.stage}, step {arbiter.step}: {what}; the story of {subject} so far:\n"
        f"{microbatch_story(arbiter, subject.microbatch)}"
    )


def why_idle(arbiter: "StageArbiter") -> IdleReason | None:
    """Returns why the stage runs nothing; None while it runs a task."""
    if arbiter._running:
        return IdleReason.INPUT if arbiter._running[0] in arbiter._pending.awaiting else None
    if not arbiter.is_active or not arbiter._tasks_left:
        return IdleReason.DRAIN
    if arbiter._engines is not None and _waits_for_engine(arbiter):
        return IdleReason.ENGINE
    if arbiter.is_holding:
        return IdleReason.HOLD
    if any(arbiter._ready.lanes):
        return IdleReason.ORDER if arbiter.consumption.is_strict else IdleReason.WINDOW
    return IdleReason.INPUT if arbiter._num_started else IdleReason.FILL


def _waits_for_engine(arbiter: "StageArbiter") -> bool:
    """Returns whether the stage could compute now if the engines beside it were done."""
    engines, plan, waiting = arbiter._engines, arbiter._ranked.plan, arbiter._waiting
    assert engines is not None
    if not engines.nodes():
        return False
    if any(arbiter._ready.lanes):
        return arbiter._choose()[0] is None and arbiter._footprint is not None
    coming = engines.nodes()
    for node in coming:  # grows by operations that wait for nothing else
        for follower in plan.dependents[node]:
            if waiting[follower] == 1 and follower < len(plan.tasks):
                if plan.lanes[follower] >= 0:
                    return True
                coming.append(follower)
    return False


def event_text(event: Event) -> str:
    if isinstance(event, StepStarted):
        lost = event.owners.lost if event.owners else ()
        without = f", without unit{'s'[: len(lost) - 1]} {', '.join(map(str, lost))}" if lost else ""
        others = f" with other owners{without}" if event.owners else ""
        return f"step {event.step} started{' to evaluate' if event.evaluates else ''}{others}"
    if isinstance(event, InputArrived):
        return f"the {event.message} arrived"
    if isinstance(event, GroupHeard):
        return f"member {event.member} said: {_note_text(event.note)}"
    if isinstance(event, TaskAnnounced | InputPromised):
        return f"the {event.message} was {'promised' if isinstance(event, InputPromised) else 'announced'}"
    if isinstance(event, ClockTick):
        return "the clock ticked"
    return f"{event.task} was about to end" if isinstance(event, DecideNow) else f"{event.task} finished"


def instruction_text(instruction: Instruction) -> str:
    if isinstance(instruction, RunTask | RunPair):
        return f"{instruction.task} was dispatched"
    if isinstance(instruction, Send):
        return f"the {instruction.message} was sent"
    if isinstance(instruction, Announce):
        return f"the {instruction.message} was announced"
    if isinstance(instruction, WakeAt):
        return f"a tick was asked for at {instruction.time_s} s"
    if isinstance(instruction, TellGroup):
        return f"member {instruction.member} was told: {_note_text(instruction.note)}"
    return f"step {instruction.step} ended"


def _note_text(note: Note) -> str:
    if isinstance(note, TaskChosen):
        return f"task {note.number} is {note.task}" + (f" with {note.partner}" if note.partner else "")
    if isinstance(note, TaskProposed):
        return f"round {note.round}, {note.task or 'nothing'}"
    if isinstance(note, MemberReceived):
        return f"the {note.message} is here"
    return "the step has started here"


# -- invariants --------------------------------------------------------------------------------------------------------


def check_invariants(arbiter: "StageArbiter") -> None:
    """Raise AssertionError where the state breaks an invariant."""
    ranked, plan, waiting = arbiter._ranked, arbiter._ranked.plan, arbiter._waiting
    if not arbiter.is_active:
        assert not arbiter._running
        return
    _check_counts(arbiter)
    assert all(waiting[node] == FINISHED and not plan.prerequisites[node] for node in plan.absent)
    unfinished = [(node, left) for node, left in enumerate(waiting) if left != FINISHED]
    engines = arbiter._engines
    beside = [] if engines is None else engines.nodes()
    waiting_beside = set() if engines is None else {p for lane in engines.ready for p in lane}
    # Ready tasks lie in the lists of their lanes, each once, in ascending order.
    ready = {ranked.position[n] for n, left in unfinished if not left}
    assert ready == {p for lane in arbiter._ready.lanes for p in lane} | waiting_beside
    assert all(plan.lanes[node] < 0 for node in (*beside, *(ranked.at[p] for p in waiting_beside)))
    assert all(sorted(set(lane)) == lane for lane in arbiter._ready.lanes)
    forwards = [(p, is_held) for is_held in (0, 1) for p in arbiter._ready.lanes[is_held * HELD]]
    assert all((ranked.microbatch_at[p] in arbiter._window.held) == is_held for p, is_held in forwards)
    # At most one task is due, and beside it one more may run.
    due = [n for n, left in unfinished if left == DUE]
    firsts, running = arbiter._firsts, arbiter._running
    partners = {running[running.index(first) + 1] for first in firsts}
    # The first of a pair is due with its partner, or as the I that its own W follows.
    assert set(due) - firsts == ({arbiter._due} - {None})
    assert all(arbiter._due in partners or plan.tasks[n].kind is TaskKind.I for n in firsts.intersection(due))
    assert not arbiter._is_told or arbiter._running[-1] == arbiter._due
    assert {*arbiter._running, *beside} == {n for n, left in unfinished if left in (RUNNING, DUE)}
    assert len(running) <= arbiter._capacity == 1 + (arbiter._due is not None) + len(firsts)
    assert arbiter._left == len(unfinished) + arbiter._end_waits
    _check_window(arbiter, unfinished)
    if arbiter._footprint is not None:
        _check_footprint(arbiter, arbiter._footprint)
    if arbiter._ahead is not None:
        _check_read_ahead(arbiter, arbiter._ahead)
    if arbiter._foresight is not None:
        # Nothing is in sight that is here, no position is skipped that is left; only a free stage with work holds.
        foresight = arbiter._foresight
        assert all(foresight.heard_s[number] == NEVER_S for number in arbiter._arrived)
        assert all(waiting[node] < 0 for node in ranked.at[: foresight.next])
        if foresight.held_since_s is not None:
            assert set(running) - firsts == {arbiter._due} - {None}
            assert arbiter._choose()[0] is not None


def _check_counts(arbiter: "StageArbiter") -> None:
    """Each node lacks the nodes and messages that it waits for and that are not done."""
    plan, waiting = arbiter._ranked.plan, arbiter._waiting
    missing = [0] * plan.num_nodes
    for node, left in enumerate(waiting):
        if left != FINISHED:
            for dependent in plan.dependents[node] if left != DUE else end_followers(plan, plan.dependents[node]):
                missing[dependent] += 1
    if arbiter._end_waits:
        for node, task in plan.present():
            missing[node] += task.microbatch < 0
    awaiting = dict.fromkeys(arbiter._pending.awaiting, 0)
    for number in plan.arrivals.values():
        node = plan.awaited_by[number]
        (awaiting if node in awaiting else missing)[node] += number not in arbiter._arrived
    assert awaiting == arbiter._pending.awaiting
    assert all(lacks and waiting[node] in (RUNNING, DUE) for node, lacks in awaiting.items())
    assert arbiter._pending.promised <= {*plan.arrivals.values()} - arbiter._arrived
    counted = [max(left, 0) for left in waiting]
    assert counted == missing, [plan.name(n) for n in range(plan.num_nodes) if counted[n] != missing[n]]


def _check_window(arbiter: "StageArbiter", unfinished: list[tuple[int, int]]) -> None:
    """The window holds what has started and not finished, within the limit, and the oldest microbatch finds its
    place."""
    plan, window, first = arbiter._ranked.plan, arbiter._window, arbiter._ranked.plan.first_microbatch
    of_microbatch = [0] * len(plan.tasks_per_microbatch)
    num_left = 0
    for node, left in unfinished:
        microbatch = plan.tasks[node].microbatch if node < len(plan.tasks) else -1
        if microbatch >= 0:
            num_left += 1
            of_microbatch[microbatch - first] += left != DUE
    started = {
        task.microbatch for node, task in plan.present() if task.kind is TaskKind.F and arbiter._waiting[node] < 0
    }
    held = {first + place for place, left in enumerate(of_microbatch) if left and first + place in started}
    assert window.held == held
    assert window.left == of_microbatch
    assert arbiter._tasks_left == num_left
    limit = arbiter._mode.capacity if arbiter._weights else arbiter._mode.limit
    if limit is not None:
        weights = arbiter._weights or (1,) * len(of_microbatch)
        weight = {first + place: weight for place, weight in enumerate(weights)}
        assert sum(weight[m] for m in held) <= limit
        # Every other microbatch that is left will fit once all older ones have gone.
        ages = window.ages()
        for place, left in enumerate(of_microbatch):
            m = first + place
            if left and m not in held:
                assert weight[m] + sum(weight[other] for other in held if ages[other] > ages[m]) <= limit


def _check_read_ahead(arbiter: "StageArbiter", ahead: ReadAhead) -> None:
    """Each bounded chunk holds the outputs that it has started and its readers have not all taken, and the rest
    fits."""
    plan, waiting, graph = arbiter._ranked.plan, arbiter._waiting, arbiter.graph

    def is_taken(reader: int, chunk: int, m: int) -> bool:
        node = plan.index.get(Task(TaskKind.F, reader, m))
        if node is not None:
            return node in plan.absent or waiting[node] in (FINISHED, DUE)
        message = Message(MessageKind.TAKEN, reader, chunk, m)
        return message not in plan.arrivals or plan.arrivals[message] in arbiter._arrived

    for bound in arbiter._mode.read_ahead:
        chunk, number = bound.chunk, ahead.number[bound.chunk]
        of_chunk = {m: plan.index[Task(TaskKind.F, chunk, m)] for m in graph.microbatches(chunk)}
        present = {m: waiting[node] for m, node in of_chunk.items() if node not in plan.absent}
        started = {m for m, left in present.items() if left < 0}
        let_go = {
            m for m in started if present[m] != RUNNING and all(is_taken(s, chunk, m) for s in graph.successors(chunk))
        }
        window = ahead.windows[number]
        assert window.held == started - let_go
        left = [
            (m, starts)
            for m, starts in holding_turns(graph.range_of(chunk), bound.turns)
            if m in present and m not in (started if starts else let_go)
        ]
        assert max(accumulate((1 if starts else -1 for _, starts in left), initial=len(window.held))) <= bound.limit
        ready = {arbiter._ranked.position[of_chunk[m]] for m, waits in present.items() if not waits}
        assert ready == set(arbiter._ready.lanes[AHEAD + number])


def _check_footprint(arbiter: "StageArbiter", footprint: Footprint) -> None:
    """The memory held is within the limit, and stays so if the rest runs in the row's order."""
    plan, waiting, graph = arbiter._ranked.plan, arbiter._waiting, arbiter.graph
    changes = []
    held = 0
    for task in arbiter._mode.row_tasks:
        node = plan.index.get(task)
        if node is None or node in plan.absent:
            continue
        takes, frees = graph.memory_units(task)
        held += takes if waiting[node] < 0 else 0
        changes.append(0 if waiting[node] < 0 else takes)
        held -= frees if waiting[node] in (FINISHED, DUE) else 0
        changes.append(0 if waiting[node] in (FINISHED, DUE) else -frees)
    assert footprint.held == held
    assert max(accumulate(changes, initial=held)) <= footprint.limit
