"""One stage's share of a step, compiled into small tables of integers.

A plan numbers the stage's tasks and *gates* and counts, for each, what it waits for. A gate is a condition that fires
by itself and may send messages; it is never dispatched. The gates of a step are

* *gradients complete* of a chunk that shares parameters with a chunk of another stage: all its B (or W) are done; sends
  its share of the gradients;
* *complete here* and *complete in all replicas*, of a chunk with copies in other replicas: they tell each other along a
  tree of the replicas, up and then down, and R follows;
* *report*: the stage has done what the step's agreement needs from it, and the reports of the stages below it in the
  tree of stages (:mod:`rrfp_jax.tree`) are in; sends one report for all of them to the stage above;
* *taken*, of a chunk that reads ahead (:mod:`rrfp_jax.core.read_ahead`): all its readers on other stages have
  said that they have taken its outputs; so the chunk's step ends no sooner;
* *verdict*: on stage 0, the root, its report is complete; elsewhere, the verdict has arrived from above. Sends it to
  the stages below.

Plans are immutable and shared; an arbiter's own state is a copy of ``needs`` that it counts down. The plan of a step in
which some pairs are absent is the full one with their tasks taken out (:mod:`rrfp_jax.core.step_plan`).
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rrfp_jax.core.events import Message
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.tree import CONTROL_DEGREE

LANE = {TaskKind.F: 0, TaskKind.B: 1, TaskKind.I: 1, TaskKind.W: 2, TaskKind.R: 3, TaskKind.U: 3}
"""Ready tasks queue in four lanes: forwards, input gradients, weight gradients, and the tasks of the step's end."""
NUM_LANES = 4
FINISHED = -2
"""In place of what a node waits for, once it has finished, or where it is absent."""


class Agreement(StrEnum):
    """What the stages agree on once per step before any optimizer update."""

    NONE = "none"
    """Nothing: a stage ends its step on its own."""
    LOSS = "loss"
    """The total weight of the loss: a stage reports once its losses are computed, without any as the step begins."""
    ALL = "all"
    """Also the gradient norm and whether everything is finite: every stage reports after its last R."""


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What a step consists of beyond the graph's own tasks. Raises ValueError for a tree that cannot be."""

    ordered: bool = False
    """Accumulate each chunk's gradients in microbatch order (deterministic mode)."""
    updates: bool = True
    """End the step with R and U of every chunk that has a backward."""
    agreement: Agreement = Agreement.ALL
    """What the stages agree on between R and U."""
    lockstep: bool = False
    """End the step in one fixed order on each stage, as collectives between replicas of a stage need it: all R from the
    last chunk to the first, as backwards complete them, and then all U from the first to the last."""
    tree_degree: int = CONTROL_DEGREE
    """How many stages report to the same one at most."""

    def __post_init__(self) -> None:
        if self.tree_degree < 1:
            raise ValueError(f"tree_degree is {self.tree_degree}: at least 1 stage must report to another")


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The tables of one stage; see the module's description. Nodes below ``len(tasks)`` are tasks, the rest gates."""

    stage: int
    tasks: tuple[Task, ...]
    gate_names: tuple[str, ...]
    needs: tuple[int, ...]
    """How many finished nodes and arrived messages each node waits for."""
    dependents: tuple[tuple[int, ...], ...]
    """The nodes of this stage that wait for each node."""
    sends: tuple[tuple[tuple[Message, int], ...], ...]
    """What each node sends when it finishes, and to which stages."""
    arrivals: dict[Message, int]
    """The number of each message that comes from elsewhere."""
    messages: tuple[Message, ...]
    """The message of each number, also those that the step lacks."""
    awaited_by: tuple[int, ...]
    """The node that waits for each message, by its number."""
    index: dict[Task, int]
    lanes: tuple[int, ...]
    """The ready lane of each task; below 0 for those of an engine beside compute (:func:`engine_of`)."""
    first_microbatch: int
    tasks_per_microbatch: tuple[int, ...]
    """How many F, B, I and W tasks this stage has for each microbatch, from ``first_microbatch`` on."""
    holds: dict[int, tuple[int, ...]]
    """For each chunk that reads ahead, and each microbatch of its range, how many ends let go of what it holds: that of
    its own F, and those of its readers' F; 0 where it is absent."""
    lets_go: dict[int, tuple[int, ...]]
    """The chunks for which a node's end is one of these."""
    engines: tuple[str, ...] = ()
    """The lanes beside compute that this stage's operations keep busy."""
    once: range = range(0)
    """The operations that run once per step."""
    absent: frozenset[int] = frozenset()
    """The nodes that this step lacks: nothing waits for them, and they wait for nothing."""

    @property
    def num_nodes(self) -> int:
        return len(self.needs)

    def present(self) -> list[tuple[int, Task]]:
        """The tasks of the step with their nodes."""
        return [(node, task) for node, task in enumerate(self.tasks) if node not in self.absent]

    def name(self, node: int) -> str:
        """A node's name in messages to people."""
        return str(self.tasks[node]) if node < len(self.tasks) else self.gate_names[node - len(self.tasks)]

    def prerequisites(self, node: int) -> tuple[int | Message, ...]:
        """The nodes and messages that ``node`` waits for."""
        return self._prerequisites[node]

    @cached_property
    def _prerequisites(self) -> tuple[tuple[int | Message, ...], ...]:
        """``dependents`` and ``arrivals`` the other way round, for reports to people and to take absent tasks out."""
        before: list[list[int | Message]] = [[] for _ in self.needs]
        for other, nodes in enumerate(self.dependents):
            for node in nodes:
                before[node].append(other)
        for message, number in self.arrivals.items():
            before[self.awaited_by[number]].append(message)
        return tuple(map(tuple, before))


def follows_in_queue(plan: StagePlan, node: int) -> bool:
    """Whether a node is a task of the compute lane, which may be handed over behind one that is about to end."""
    return node < len(plan.tasks) and plan.lanes[node] >= 0


def followers(plan: StagePlan, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of some nodes that follow in the queue of the compute lane."""
    lanes, num_tasks = plan.lanes, len(plan.tasks)
    return tuple([node for node in nodes if node < num_tasks and lanes[node] >= 0])


def others(plan: StagePlan, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Those that wait for real ends: gates, and the tasks of engines beside compute."""
    lanes, num_tasks = plan.lanes, len(plan.tasks)
    return tuple([node for node in nodes if node >= num_tasks or lanes[node] < 0])
