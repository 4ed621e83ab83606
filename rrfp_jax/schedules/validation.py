"""Checks of the orders of a table: is every task there once, on its stage, and can strict execution finish?

Strict execution is monotone: a stage runs its next entry once everything it waits for has finished, and finishing a
task never blocks another. So one execution decides the question for all, and where it stops, each blocked stage's next
entry waits for a task that lies behind the next entry of another blocked stage. Following these waits leads into a
cycle, which is the reason named.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.tasks import BUILT_IN_KINDS, Placement, Task, TaskKind

Orders = Sequence[Sequence[Task]]


def check_orders(name: str, placement: Placement, graph: PipelineGraph, orders: Orders) -> tuple[Task, ...]:
    """Returns all tasks in an order in which they can finish. Raises ValueError, naming the table, at the first defect
    that keeps these orders from running."""
    expected = all_needed(graph)
    for stage, order in enumerate(orders):
        for task in order:
            if task not in expected:
                raise ValueError(f"table {name!r}, stage {stage}: {why_unknown(task, graph)}")
            if placement.stage_of_chunk[task.chunk] != stage:
                raise ValueError(
                    f"table {name!r}, stage {stage}: {task} belongs to stage {placement.stage_of_chunk[task.chunk]}, "
                    f"which owns chunk {task.chunk}: move it to that row"
                )
    # Sets and counts tell whether anything is wrong; only then is it worth searching for the tasks to name.
    there = {task for order in orders for task in order}
    if len(there) < sum(map(len, orders)):
        counts = Counter(task for order in orders for task in order)
        duplicated = [task for task, count in counts.items() if count > 1]
        raise ValueError(f"table {name!r} runs {some(duplicated)} more than once: keep one entry each")
    if len(there) < len(expected):
        missing = [task for task in graph.tasks() if task not in there]
        stages = sorted({placement.stage_of_chunk[task.chunk] for task in missing})
        raise ValueError(f"table {name!r} misses {some(missing)}: add what is missing to the rows of stages {stages}")
    return _check_execution(name, placement, graph, orders)


def some(tasks: Sequence[Task]) -> str:
    """Returns the first five tasks, and the number of further ones, as text."""
    shown = ", ".join(map(str, tasks[:5]))
    return shown if len(tasks) <= 5 else f"{shown} and {len(tasks) - 5} more"


def peak_in_flight(order: Sequence[Task]) -> int:
    """Returns the most microbatches that are between their first and last task at one place of this order."""
    last = {task.microbatch: position for position, task in enumerate(order)}
    held: set[int] = set()
    peak = 0
    for position, task in enumerate(order):
        held.add(task.microbatch)
        peak = max(peak, len(held))
        if last[task.microbatch] == position:
            held.remove(task.microbatch)
    return peak


def out_of_order(graph: PipelineGraph, orders: Orders) -> tuple[Task, Task] | None:
    """Returns two tasks of one chunk that add to its gradients, the later microbatch first; None if there are none."""
    for order in orders:
        latest: dict[int, Task] = {}
        for task in order:
            if graph.has_backward(task.chunk) and task.kind is graph.accumulating_kind(task.chunk):
                before = latest.setdefault(task.chunk, task)
                if before.microbatch > task.microbatch:
                    return before, task
                latest[task.chunk] = task
    return None


def _needed_tasks(graph: PipelineGraph, task: Task) -> tuple[Task, ...]:
    """Returns the dependencies of a task that appear in a table. An operation that runs once per step is replaced by
    its own dependencies."""
    needed = graph.dependencies(task)
    if graph.ops and any(one.microbatch < 0 for one in needed):
        return tuple(d for one in needed for d in ((one,) if one.microbatch >= 0 else _needed_tasks(graph, one)))
    return needed


@lru_cache(maxsize=2)
def all_needed(graph: PipelineGraph) -> Mapping[Task, tuple[Task, ...]]:
    """Returns :func:`_needed_tasks` of each task, kept for the next table of the graph: a search makes many of them."""
    if graph.ops:
        return {task: _needed_tasks(graph, task) for task in graph.tasks()}
    # Without operations the same is put together chunk by chunk, in a third of the time: a table of 98,304 tasks waits
    # for little else. The tests compare it with `graph.dependencies`.
    chunks = range(graph.num_chunks)
    forwards = [{m: Task(TaskKind.F, c, m) for m in graph.microbatches(c)} for c in chunks]
    gradients = [
        {m: Task(graph.input_gradient_kind(c), c, m) for m in forwards[c]} if graph.has_backward(c) else {}
        for c in chunks
    ]
    needed: dict[Task, tuple[Task, ...]] = {}
    for chunk in chunks:
        inputs = [forwards[p] for p in graph.predecessors(chunk)]
        returned = [gradients[s] for s in graph.gradient_successors(chunk)]
        has_weights = graph.accumulating_kind(chunk) is TaskKind.W
        for m, forward in forwards[chunk].items():
            needed[forward] = tuple([each[m] for each in inputs if m in each])
            if gradients[chunk]:
                gradient = gradients[chunk][m]
                needed[gradient] = (forward, *[each[m] for each in returned if m in each])
                if has_weights:
                    needed[Task(TaskKind.W, chunk, m)] = (gradient,)
    return needed


def dependants(graph: PipelineGraph) -> dict[Task, list[Task]]:
    """Returns the tasks that wait for each task that has any."""
    after: dict[Task, list[Task]] = {}
    for task, all_of_them in all_needed(graph).items():
        for needed in all_of_them:
            after.setdefault(needed, []).append(task)
    return after


def execution_order(graph: PipelineGraph, orders: Orders) -> tuple[list[Task], list[int]]:
    """Runs the orders strictly. Returns the tasks in an order in which they can finish, and each stage's position."""
    finished: list[Task] = []
    done: set[Task] = set()
    waiting: dict[Task, list[int]] = {}
    position = [0] * len(orders)
    runnable = list(range(len(orders)))
    needed = all_needed(graph)
    # A stage runs until its next entry is blocked, and is looked at again only once the blocker has finished: so every
    # entry is tried at most once per dependency, however many stages there are.
    while runnable:
        stage = runnable.pop()
        order = orders[stage]
        while position[stage] < len(order):
            task = order[position[stage]]
            for blocker in needed[task]:
                if blocker not in done:
                    waiting.setdefault(blocker, []).append(stage)
                    break
            else:
                done.add(task)
                finished.append(task)
                position[stage] += 1
                if task in waiting:
                    runnable.extend(waiting.pop(task))
                continue
            break
    return finished, position


def _check_execution(name: str, placement: Placement, graph: PipelineGraph, orders: Orders) -> tuple[Task, ...]:
    finished, position = execution_order(graph, orders)
    blocked = [stage for stage, order in enumerate(orders) if position[stage] < len(order)]
    if blocked:
        done = set(finished)
        heads = {stage: orders[stage][position[stage]] for stage in blocked}
        cycle = _cycle(placement, graph, heads, done)
        if len(cycle) == 1:
            task, needed = cycle[0]
            raise ValueError(
                f"table {name!r} breaks a dependency: stage {placement.stage_of_chunk[task.chunk]} runs {task} before "
                f"{needed}, for which it waits; exchange them"
            )
        raise ValueError(
            f"table {name!r} deadlocks: {_chain(placement, cycle)}; reorder one of these stages to break the cycle"
        )
    return tuple(finished)


def _cycle(
    placement: Placement, graph: PipelineGraph, heads: dict[int, Task], done: set[Task]
) -> list[tuple[Task, Task]]:
    """Returns the cycle of blocked entries as pairs of an entry and the task that it waits for."""
    stage = min(heads)
    path: dict[int, tuple[Task, Task]] = {}
    while stage not in path:
        task = heads[stage]
        needed = next(d for d in _needed_tasks(graph, task) if d not in done)
        path[stage] = (task, needed)
        stage = placement.stage_of_chunk[needed.chunk]
    stages = list(path)
    return [path[s] for s in stages[stages.index(stage) :]]


def _chain(placement: Placement, cycle: list[tuple[Task, Task]]) -> str:
    links = []
    for (task, needed), (head, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        waits = f"{task} on stage {placement.stage_of_chunk[task.chunk]} waits for {needed}"
        if needed != head:
            waits += f", which stage {placement.stage_of_chunk[head.chunk]} runs only after {head}"
        links.append(waits)
    return "; ".join(links)


def why_unknown(task: Task, graph: PipelineGraph) -> str:
    if task.microbatch < 0:
        return f"{task} runs once per step and is not part of a table: remove it"
    return _why_no_place(task, graph) or _why_no_kind(task, graph)


def _why_no_place(task: Task, graph: PipelineGraph) -> str | None:
    if task.chunk >= graph.num_chunks:
        return f"{task} names chunk {task.chunk}, but there are {graph.num_chunks}: use 0..{graph.num_chunks - 1}"
    if task.microbatch >= graph.num_microbatches:
        return (
            f"{task} names microbatch {task.microbatch}, but there are {graph.num_microbatches}: "
            f"use 0..{graph.num_microbatches - 1}"
        )
    if not graph.exists(task.chunk, task.microbatch):
        return f"{task} does not exist, because microbatch {task.microbatch} skips chunk {task.chunk}: remove it"
    return None


def _why_no_kind(task: Task, graph: PipelineGraph) -> str:
    if task.kind not in BUILT_IN_KINDS:
        known = ", ".join(graph.kinds(task.chunk))
        return (
            f"{task} is an operation that chunk {task.chunk} does not have there: use {known}, or add it to the graph"
        )
    if not graph.has_backward(task.chunk):
        return f"{task} does not exist, because no gradient reaches chunk {task.chunk}: remove it"
    kinds = "I and W" if task.chunk in graph.split else "B"
    return f"{task} does not exist, because the backward of chunk {task.chunk} runs as {kinds}: write {kinds}"
