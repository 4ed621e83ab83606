"""1F1B and interleaved 1F1B with a split backward, within the memory of the whole one.

A stage may hold as many chunk passes, each from the start of its F to the end of its W, as the fused table makes it
hold. Splitting pays all the same, because I hands the gradient on without waiting for W.

The plain way is to keep the order and to run each W right behind its I. With one chunk per stage there is no better: a
stage whose memory is full must run a W before the next F, and in the drain the next gradient comes no sooner than the W
has ended. The last stage, which holds one microbatch, then never pauses from its first F to its last W.

With several chunks a gradient often arrives while the row wants something else, so W may *wait* for the places where
the stage would idle. Where those are depends on the lengths of the tasks and on the time between stages; the order is
made by list scheduling with those of the request. A free stage starts

1. what comes first in its row of the fused table (I in the place of B) among its next F, if the memory has room for it,
   and every I whose gradient is there;
2. else its oldest W that has not run; else nothing.

It cannot get stuck. Take any order in which the fused table can run, and the first F or I in it that has not run. Its
inputs are there, and all that precedes it in its row has run; so it is the row's next F, or an I that may start. If it
is an F without room, the stage holds more passes than in the fused table at that place, although at least as many I
have run as there B: so a W is left to be run.

Of the plain way and this one the quicker is taken. So the result is never slower than the fused table.

Where the table ranks what is ready and a stage has room for more, the times of the run itself say where it would idle:
then F and I rank as in the fused table, and W behind them. A stage without more room keeps each W in its place: W alone
makes room for the next F, so that an I which goes before it for once holds up every stage behind.
"""

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from rrfp_jax.schedules.linear import one_f_one_b
from rrfp_jax.schedules.list_schedule import list_orders
from rrfp_jax.schedules.looped import interleaved_one_f_one_b
from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.slots import SlotLengths, execute, per_stage
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import PipelineGraph, Task, TaskKind

F, I, W = TaskKind.F, TaskKind.I, TaskKind.W  # noqa: E741 - the field's letters

_SOURCE = "our construction: {}, split as in Zero Bubble, arXiv 2401.10241"


@schedule(
    "1f1b-split",
    placement="one chunk per stage",
    source=_SOURCE.format("1F1B"),
    split_backward=True,
    any_graph=True,
)
def one_f_one_b_split(request: ScheduleRequest) -> ScheduleTable:
    """1F1B's memory, p-s microbatches on stage s, without the weight gradients in its fill and drain."""
    return _split("1f1b-split", one_f_one_b(request))


@schedule(
    "interleaved-1f1b-split",
    placement="looped: chunk c on stage c mod p",
    source=_SOURCE.format("interleaved 1F1B"),
    split_backward=True,
    chunks_per_stage=2,
    fixed_chunks=False,
    constraints="as interleaved-1f1b; give the profiled durations_ms and comm_ms",
)
def interleaved_one_f_one_b_split(request: ScheduleRequest) -> ScheduleTable:
    """Interleaved 1F1B's memory on every stage, W deferred where that is quicker.

    The quicker one is found with ``durations_ms`` (of a whole stage) and ``comm_ms``. Raises ValueError for what
    interleaved 1F1B cannot have either.
    """
    fused = interleaved_one_f_one_b(request)
    plain = _split("interleaved-1f1b-split", fused)
    length = per_stage(plain, SlotLengths(*request.durations_ms))
    rule = _DeferredWeights([[task for task in row if task.kind is not W] for row in plain.orders])
    orders = list_orders(plain.placement, plain.graph, rule, length=length, hop=request.comm_ms)
    deferred = replace(plain, rows=tuple(map(tuple, orders)), hint=plain)
    return min(plain, deferred, key=lambda table: execute(table, length, hop=request.comm_ms).makespan)


def _split(name: str, fused: ScheduleTable) -> ScheduleTable:
    """The same order with each B as I and its W right behind it."""
    graph = replace(fused.graph, split=frozenset(range(fused.graph.num_chunks)))
    orders = [[half for task in order for half in _halves(task, graph)] for order in fused.orders]
    return replace(ScheduleTable.from_orders(name, fused.placement, graph, orders), weights_fill=True)


def _halves(task: Task, graph: PipelineGraph) -> Iterable[Task]:
    return (task,) if task.kind is F else (task._replace(kind=kind) for kind in graph.kinds(task.chunk)[1:])


class _DeferredWeights:
    """The rule at the head of this file; ``rows`` are those of the fused table, I for B."""

    def __init__(self, rows: Sequence[Sequence[Task]]) -> None:
        self.place = {task: place for row in rows for place, task in enumerate(row)}
        self.forwards = [deque(task for task in row if task.kind is F) for row in rows]
        self.weights: list[deque[Task]] = [deque() for _ in rows]
        self.held = [0] * len(rows)
        self.limit = [max(accumulate(1 if task.kind is F else -1 for task in row)) for row in rows]

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        heads = [task for task in ready if task.kind is I]
        forwards = self.forwards[stage]
        if forwards and forwards[0] in ready and self.held[stage] < self.limit[stage]:
            heads.append(forwards[0])
        if heads:
            return self._take(stage, min(heads, key=self.place.__getitem__))
        if not self.weights[stage]:
            return None
        self.held[stage] -= 1
        return self.weights[stage].popleft()

    def finished(self, task: Task) -> None:
        """Nothing to do: what a stage holds is counted where it starts a task."""

    def _take(self, stage: int, task: Task) -> Task:
        if task.kind is F:
            self.forwards[stage].popleft()
            self.held[stage] += 1
        else:
            self.weights[stage].append(task._replace(kind=W))
        return task
