"""The invariants of an arbiter's state, checked from first principles: for tests, since it is slow."""

from itertools import accumulate
from typing import TYPE_CHECKING

from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.footprint import Footprint, memory_effect
from rrfp_jax.core.foresight import NEVER_S, Foresight
from rrfp_jax.core.plan import FINISHED, others
from rrfp_jax.core.read_ahead import ReadAhead
from rrfp_jax.core.ready_set import AHEAD, HELD
from rrfp_jax.core.reserve import turns
from rrfp_jax.core.story import DUE, RUNNING
from rrfp_jax.schedules import Task, TaskKind

if TYPE_CHECKING:
    from rrfp_jax.core.arbiter import StageArbiter


def check(arbiter: "StageArbiter") -> None:
    """Raise AssertionError where the state breaks an invariant."""
    plan, waiting = arbiter._ranked.plan, arbiter._waiting
    if not arbiter.is_active:
        assert not arbiter._running
        return
    _check_counts(arbiter)
    assert all(waiting[node] == FINISHED and not plan.prerequisites(node) for node in plan.absent)
    unfinished = [(node, left) for node, left in enumerate(waiting) if left != FINISHED]
    ready = {arbiter._ranked.position[n] for n, left in unfinished if not left}
    engines = arbiter._engines
    beside = [] if engines is None else engines.nodes()
    waiting_beside = set() if engines is None else {p for lane in engines.ready for p in lane}
    assert ready == {p for lane in arbiter._ready.lanes for p in lane} | waiting_beside
    assert all(plan.lanes[node] < 0 for node in (*beside, *(arbiter._ranked.at[p] for p in waiting_beside)))
    assert all(sorted(set(lane)) == lane for lane in arbiter._ready.lanes)
    forwards = [(p, is_held) for is_held in (0, 1) for p in arbiter._ready.lanes[is_held * HELD]]
    assert all((arbiter._ranked.microbatch_at[p] in arbiter._window.held) == is_held for p, is_held in forwards)
    due = [n for n, left in unfinished if left == DUE]
    assert due == ([] if arbiter._due is None else [arbiter._due])
    assert not arbiter._is_told or arbiter._running[-1] == arbiter._due
    assert {*arbiter._running, *beside} == {n for n, left in unfinished if left in (RUNNING, DUE)}
    assert len(arbiter._running) <= arbiter._capacity == 1 + len(due)
    assert arbiter._left == len(unfinished)
    _check_window(arbiter, unfinished)
    if arbiter._footprint is not None:
        _check_footprint(arbiter, arbiter._footprint)
    if arbiter._ahead is not None:
        _check_read_ahead(arbiter, arbiter._ahead)
    if arbiter._foresight is not None:
        _check_foresight(arbiter, arbiter._foresight)


def _check_counts(arbiter: "StageArbiter") -> None:
    """Each node lacks the nodes and messages that it waits for and that are not done."""
    plan, waiting = arbiter._ranked.plan, arbiter._waiting
    missing = [0] * plan.num_nodes
    for node, left in enumerate(waiting):
        if left != FINISHED:
            for dependent in plan.dependents[node] if left != DUE else others(plan, plan.dependents[node]):
                missing[dependent] += 1
    awaiting = dict.fromkeys(arbiter._promises.awaiting, 0)
    for number in plan.arrivals.values():
        node = plan.awaited_by[number]
        (awaiting if node in awaiting else missing)[node] += number not in arbiter._arrived
    assert awaiting == arbiter._promises.awaiting
    assert all(lacks and waiting[node] in (RUNNING, DUE) for node, lacks in awaiting.items())
    assert arbiter._promises.made <= {*plan.arrivals.values()} - arbiter._arrived
    counted = [max(left, 0) for left in waiting]
    assert counted == missing, [plan.name(n) for n in range(plan.num_nodes) if counted[n] != missing[n]]


def _check_window(arbiter: "StageArbiter", unfinished: list[tuple[int, int]]) -> None:
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
    if arbiter._weights:
        _check_weights(arbiter, held, of_microbatch)
    elif arbiter.limit is not None:
        assert len(held) <= arbiter.limit
        oldest = next((first + place for place, num_left in enumerate(of_microbatch) if num_left), None)
        assert oldest is None or oldest in held or len(held) < arbiter.limit


def _check_weights(arbiter: "StageArbiter", held: set[int], num_left: list[int]) -> None:
    """What is held fits, and every other one that is left will, once all older ones have gone."""
    first, capacity = arbiter._ranked.plan.first_microbatch, arbiter.capacity
    assert capacity is not None
    weights = {first + place: weight for place, weight in enumerate(arbiter._weights)}
    assert sum(weights[m] for m in held) <= capacity
    for place, left in enumerate(num_left):
        if left and first + place not in held:
            younger = [m for m in held if m > first + place]
            assert sum(map(weights.__getitem__, [*younger, first + place])) <= capacity


def _check_read_ahead(arbiter: "StageArbiter", ahead: ReadAhead) -> None:
    """Each bounded chunk holds what it has started and its readers have not all taken, and what is left finds room."""
    plan, waiting, graph = arbiter._ranked.plan, arbiter._waiting, arbiter.graph

    def is_taken(reader: int, chunk: int, m: int) -> bool:
        node = plan.index.get(Task(TaskKind.F, reader, m))
        if node is not None:
            return node in plan.absent or waiting[node] in (FINISHED, DUE)
        message = Message(MessageKind.TAKEN, reader, chunk, m)
        return message not in plan.arrivals or plan.arrivals[message] in arbiter._arrived

    for bound in arbiter.read_ahead:
        chunk, number = bound.chunk, ahead.number[bound.chunk]
        of_chunk = {m: plan.index[Task(TaskKind.F, chunk, m)] for m in graph.microbatches(chunk)}
        present = {m: waiting[node] for m, node in of_chunk.items() if node not in plan.absent}
        started = {m for m, left in present.items() if left < 0}
        let_go = {
            m for m in started if present[m] != RUNNING and all(is_taken(s, chunk, m) for s in graph.successors(chunk))
        }
        reserve = ahead.reserves[number]
        assert reserve.held == started - let_go
        left = [
            (m, starts)
            for m, starts in turns(graph.range_of(chunk), bound.turns)
            if m in present and m not in (started if starts else let_go)
        ]
        assert max(accumulate((1 if starts else -1 for _, starts in left), initial=len(reserve.held))) <= bound.limit
        ready = {arbiter._ranked.position[of_chunk[m]] for m, waits in present.items() if not waits}
        assert ready == set(arbiter._ready.lanes[AHEAD + number])


def _check_footprint(arbiter: "StageArbiter", footprint: Footprint) -> None:
    """What is held is within the limit, and stays so if what is left runs in the row's order."""
    plan, waiting, graph = arbiter._ranked.plan, arbiter._waiting, arbiter.graph
    changes = []
    held = 0
    for task in arbiter._row_tasks:
        node = plan.index.get(task)
        if node is None or node in plan.absent:
            continue
        takes, frees = memory_effect(task, graph)
        held += takes if waiting[node] < 0 else 0
        changes.append(0 if waiting[node] < 0 else takes)
        held -= frees if waiting[node] in (FINISHED, DUE) else 0
        changes.append(0 if waiting[node] in (FINISHED, DUE) else -frees)
    assert footprint.held == held
    assert max(accumulate(changes, initial=held)) <= footprint.limit


def _check_foresight(arbiter: "StageArbiter", foresight: Foresight) -> None:
    """Nothing is in sight that is here, no position is skipped that is left; only a free stage with work holds."""
    waiting = arbiter._waiting
    assert all(foresight.heard_s[number] == NEVER_S for number in arbiter._arrived)
    assert all(waiting[node] < 0 for node in arbiter._ranked.at[: foresight.next])
    if foresight.is_holding:
        assert arbiter._running == ([] if arbiter._due is None else [arbiter._due])
        assert arbiter._choose()[0] is not None
