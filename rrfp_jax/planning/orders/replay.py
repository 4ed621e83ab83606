"""Time and memory of rows that stages keep to."""

from itertools import pairwise
from typing import NamedTuple

from rrfp_jax.planning.orders.problem import NOTHING, Problem, Rows


class Replayed(NamedTuple):
    """When things happen; in nanoseconds."""

    makespan: int
    """From first start to last end."""
    starts: list[int]
    """By task."""
    order: list[int]
    """All tasks, each behind those that it waits for."""


def replay(problem: Problem, rows: Rows) -> Replayed | None:
    """Every task as soon as its row and its input allow; None where the rows deadlock."""
    durations, followers, delays, stages = problem.durations, problem.followers, problem.delays, problem.stages
    ways, last = problem.num_ways, problem.num_ways * (2 if problem.is_split else 1)
    arrived = [NOTHING] * problem.num_tasks
    for task in problem.first_tasks():
        arrived[task] = 0
    starts, order = [0] * problem.num_tasks, list[int]()
    free, place = [0] * len(rows), [0] * len(rows)
    wanted = [row[0] for row in rows]
    todo = list(range(len(rows)))[::-1]
    while todo:
        stage = todo.pop()
        row, n, now = rows[stage], place[stage], free[stage]
        while n < len(row):
            task = row[n]
            at = arrived[task]
            if at < 0:
                wanted[stage] = task
                break
            now = max(now, at)
            starts[task] = now
            order.append(task)
            now += durations[task]
            n += 1
            follower = followers[task]
            if follower >= 0:
                arrived[follower] = now + delays[task]
                other = stages[follower]
                if other != stage and wanted[other] == follower:
                    todo.append(other)
            if ways <= task < last:
                arrived[task + ways] = now
        place[stage], free[stage] = n, now
    if len(order) < problem.num_tasks:
        return None
    return Replayed(max(free) - problem.host, starts, order)


def peaks(problem: Problem, rows: Rows) -> tuple[int, ...]:
    """The most that activations take on each stage."""
    weights, freed, found = problem.weights, problem.freed, []
    for row in rows:
        held = most = 0
        for task in row:
            taken = weights[task]
            if taken:
                held += taken
                most = max(most, held)
            held -= freed[task]
        found.append(most)
    return tuple(found)


def held_by_chunk(problem: Problem, rows: Rows) -> list[int]:
    """The most microbatches that each chunk holds, from F to its end."""
    ways, ends_from, m = problem.num_ways, problem.num_tasks - problem.num_ways, problem.num_microbatches
    held, most = [0] * problem.num_chunks, [0] * problem.num_chunks
    for row in rows:
        for task in row:
            if task < ways:
                held[task // m] += 1
                most[task // m] = max(most[task // m], held[task // m])
            elif task >= ends_from:
                held[(task - ends_from) // m] -= 1
    return most


def latest_starts(problem: Problem, rows: Rows, run: Replayed) -> list[int]:
    """When each task must start at the latest so that the step ends as it does and the rows are kept."""
    durations, followers, delays = problem.durations, problem.followers, problem.delays
    ways, last = problem.num_ways, problem.num_ways * (2 if problem.is_split else 1)
    after = [NOTHING] * problem.num_tasks
    for row in rows:
        for task, behind in pairwise(row):
            after[task] = behind
    end = run.makespan + problem.host
    found = [end] * (problem.num_tasks + 1)  # the last is that of NOTHING
    for task in reversed(run.order):
        follower = followers[task]
        latest = min(found[after[task]], found[follower] - delays[task] if follower >= 0 else end)
        if ways <= task < last and found[task + ways] < latest:
            latest = found[task + ways]
        found[task] = latest - durations[task]
    return found[:-1]
