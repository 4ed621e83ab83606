"""Rules: which of the ready tasks a free stage starts.

A rule has *lanes*, the best first: the tasks of a kind, those of an order (:func:`like`), or of two kinds that take
``turns``; kinds in no lane come last. Within a lane the smallest key goes first: words such as ``-chunk``, or a
function of the task; without a key the task that has been ready for longest. Where the backward is split, B is I.

A rule is used in two ways. A running stage asks it which task to start (:meth:`rrfp_jax.core.Hint.of`). And
:meth:`Rule.frozen` runs it in virtual time, which gives a table: it cannot deadlock, as it has been run.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rrfp_jax.schedules.graph import PipelineGraph
from rrfp_jax.schedules.language.orders import Stream, TaskOrder
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, check_number, is_number
from rrfp_jax.schedules.table import all_needed
from rrfp_jax.schedules.tasks import Placement, Task, TaskKind

RuleKey = Callable[[Task], tuple[int, ...]]
WORDS: dict[str, Callable[[Task], int]] = {
    "chunk": lambda task: task.chunk,
    "-chunk": lambda task: -task.chunk,
    "microbatch": lambda task: task.microbatch,
    "-microbatch": lambda task: -task.microbatch,
}


@dataclass(frozen=True)
class RuleLanes:
    """One lane, or two that take turns: the kinds of each."""

    kinds: tuple[tuple[str, ...], ...]
    row: tuple[Task, ...] = ()
    """The order that ranks the tasks of the lane, if one does."""


def turns(first: Stream, second: Stream) -> RuleLanes:
    """Returns a pair of lanes that take turns: one task of the first, if any is ready, then one of the second."""
    return RuleLanes((_kinds(first), _kinds(second)))


def like(order: Any, stage: Stage) -> RuleLanes:
    """Returns a lane with the tasks of an order by their places in it, the forwards one after another."""
    if not isinstance(order, TaskOrder):
        raise Mistake(f"like takes an order, not {order!r}: add streams, rounds or slots")
    row = tuple(order.on(stage))
    return RuleLanes((tuple(dict.fromkeys(task.kind for task in row)),), row)


def _kinds(stream: Any) -> tuple[str, ...]:
    """Returns the kinds of a lane; I goes where B does."""
    if not isinstance(stream, Stream) or stream != Stream(stream.kind):
        raise Mistake(
            f"a lane of a rule is a kind on all chunks, such as F, not {str(stream)!r}: say which go first by a key"
        )
    return (stream.kind, TaskKind.I) if stream.kind == TaskKind.B else (stream.kind,)


@dataclass(frozen=True, eq=False)
class Rule:
    """A ranking of ready tasks: it says which one a free stage starts."""

    lanes: tuple[tuple[str, ...], ...]
    """The kinds of each lane, the best first."""
    pair: int | None
    """The lane that takes turns with the next one, if any."""
    keys: dict[str, RuleKey]
    row: tuple[Task, ...] = ()
    """The order that ranks its own tasks, if there is one; its forwards start one after another."""

    def key(self, task: Task) -> tuple[int, ...]:
        """Returns the rank of a task within its lane, of which the smallest goes first."""
        key = self.keys.get(task.kind)
        return () if key is None else key(task)

    def by_turn(self) -> tuple[list[tuple[tuple[str, ...], int]], ...]:
        """Returns for turns 0 and 1 the lanes, the best first, each with the turn that follows when it is chosen."""
        plain = [(kinds, int(number == self.pair)) for number, kinds in enumerate(self.lanes)]
        at = len(plain) if self.pair is None else self.pair
        return plain, [*plain[:at], *plain[at : at + 2][::-1], *plain[at + 2 :]]

    def frozen(
        self,
        *,
        lengths: Callable[[Task], float] = lambda _: 1.0,
        hop: float = 0.0,
        under_way: int | None = None,
        holding: float | None = None,
    ) -> "Frozen":
        """Returns the order in which stages start their tasks in virtual time; see :class:`Frozen`."""
        check_number("hop", hop)
        for name, limit in (("under_way", under_way), ("holding", holding)):
            if limit is not None:
                check_number(name, limit)
        if not callable(lengths):
            raise Mistake(f"lengths is {lengths!r}: give a function of a task, such as EQUAL or s.lengths")
        return Frozen(self, lengths, hop, under_way, holding)


def rule(*lanes: Stream | RuleLanes, key: object = None, **keys: object) -> Rule:
    """Returns a rule of lanes, the best first. ``key`` is for all kinds, a key by its letter for one:
    ``F=("chunk", "microbatch")``."""
    made = [each if isinstance(each, RuleLanes) else RuleLanes((_kinds(each),)) for each in lanes]
    kinds = [kind for each in made for lane in each.kinds for kind in lane]
    twice = next((kind for kind, count in Counter(kinds).items() if count > 1), None)
    if twice is not None:
        raise Mistake(f"the rule has {twice} in two lanes: keep one of them")
    strangers = sorted(set(keys) - set(kinds))
    if strangers:
        raise Mistake(
            f"the rule has a key for {strangers[0]}, but its lanes hold {', '.join(kinds)}: add a lane for it"
        )
    pairs = [number for number, each in enumerate(made) if len(each.kinds) > 1]
    if len(pairs) > 1:
        raise Mistake("the rule has two pairs that take turns: keep one of them")
    words = dict.fromkeys(kinds, key) | keys
    words |= {TaskKind.I: words[TaskKind.B]} if TaskKind.B in words else {}
    found = {kind: _key(given) for kind, given in words.items() if given is not None}
    rows = [each.row for each in made if each.row]
    if len(rows) > 1:
        raise Mistake("the rule is like two orders: keep one of them, or add them with +")
    row = rows[0] if rows else ()
    places = {task: place for place, task in enumerate(row)}
    found |= dict.fromkeys({task.kind for task in row}, lambda task: (places[task],))
    return Rule(tuple(lane for each in made for lane in each.kinds), pairs[0] if pairs else None, found, row)


def _key(words: object) -> RuleKey:
    if callable(words):
        return words
    if not isinstance(words, str | Sequence):
        raise Mistake(f"the key is {words!r}: write {', '.join(WORDS)}, or a function of the task")
    names = (words,) if isinstance(words, str) else tuple(words)
    unknown = next((word for word in names if word not in WORDS), None)
    if unknown is not None:
        raise Mistake(f"the key has the word {unknown!r}: write {', '.join(WORDS)}, or a function of the task")
    parts = tuple(WORDS[word] for word in names)
    if len(parts) == 2:  # as in every rule of the library: the generator below takes twice as long for each task
        first, second = parts
        return lambda task: (first(task), second(task))
    return lambda task: tuple(part(task) for part in parts)


@dataclass(frozen=True, eq=False)
class Frozen(Described):
    """A rule that is run in virtual time, for all stages together. Times and ``under_way`` are the first stage's."""

    rule: Rule
    lengths: Callable[[Task], float]
    """The length of each task."""
    hop: float
    """The time from the end of a task to the earliest start of a dependent one on another stage."""
    under_way: int | None
    """The most microbatches that may be between their first and last task, over the whole pipeline."""
    holding: float | None
    """The most activations that the stage may hold, each of a chunk from its F to the end of its backward."""

    def orders(self, stages: Sequence[Stage], made: Sequence["Frozen"]) -> list[list[Task]]:
        """Returns the orders of all stages, whose rules run together."""
        run = _RuleChoice(stages[0].graph, made)
        return list_orders(stages[0].placement, stages[0].graph, run, length=self.lengths, hop=self.hop)

    def check(self, stage: Stage, first: "Frozen") -> None:
        """Raises :class:`Mistake` for a lane that can hold no task, for limits that differ between stages, for lengths
        that are no numbers, and for keys that cannot be compared."""
        if (self.hop, self.under_way) != (first.hop, first.under_way):
            raise Mistake("hop and under_way are of the whole pipeline: give all stages the same", stage.i)
        for kinds in self.rule.lanes:
            if kinds != (TaskKind.W,):  # which is there where I is
                for chunk in stage.chunks:
                    stage.parts(kinds[0], chunk)
        tasks = list(stage.graph.tasks(stage.chunks))
        for task in tasks:
            length = self.lengths(task)
            if not (is_number(length) and length >= 0):
                raise Mistake(f"{task} would last {length!r}: let lengths give 0 or more")
        for kinds in self.rule.lanes:
            keys = [self.rule.key(task) for task in tasks if task.kind in kinds]
            try:
                min(keys, default=())
            except TypeError as error:
                raise Mistake(f"the keys of {kinds[0]} cannot be compared ({error}): give tuples of numbers") from error

    def remedy(self, missing: Sequence[Task]) -> str:  # noqa: ARG002 - whatever they are
        """Returns the remedy for missing tasks: only its limits keep a rule from running all of them."""
        return "add them, with a larger limit"


class _RuleChoice:
    """Chooses for each stage by its rule, within the limits."""

    def __init__(self, graph: PipelineGraph, made: Sequence[Frozen]) -> None:
        self.graph, self.made, self.limit = graph, made, made[0].under_way
        self.by_turn = [frozen.rule.by_turn() for frozen in made]
        self.turn, self.held = [0] * len(made), [0.0] * len(made)
        self.forwards = [deque(t for t in frozen.rule.row if t.kind is TaskKind.F) for frozen in made]
        self.unfinished = Counter(task.microbatch for task in graph.tasks())
        self.entered: set[int] = set()

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        """Returns the task that a free stage starts next, among ``ready`` ones with the oldest first. None leaves the
        stage idle until a task ends."""
        rule, forwards = self.made[stage].rule, self.forwards[stage]
        admitted = [task for task in ready if self._admits(stage, task)]
        # Kinds without a lane come last, so that no task is left over for want of one.
        named = {kind for lane in rule.lanes for kind in lane}
        rest = (tuple({task.kind for task in admitted} - named), 0)
        for kinds, turn in (*self.by_turn[stage][self.turn[stage]], rest):
            lane = [task for task in admitted if task.kind in kinds]
            if lane:
                self.turn[stage] = turn
                task = min(lane, key=rule.key)
                takes, frees = self.graph.memory_effect(task)
                self.held[stage] += takes - frees
                self.entered.add(task.microbatch)
                if forwards and task.kind is TaskKind.F:
                    forwards.popleft()
                return task
        return None

    def finished(self, task: Task) -> None:
        """Hears that a task has ended."""
        self.unfinished[task.microbatch] -= 1
        if self.unfinished[task.microbatch] == 0:
            self.entered.remove(task.microbatch)

    def _admits(self, stage: int, task: Task) -> bool:
        if self.limit is not None and len(self.entered) >= self.limit and task.microbatch not in self.entered:
            return False
        if task.kind is not TaskKind.F:
            return True
        holding, forwards = self.made[stage].holding, self.forwards[stage]
        takes, _ = self.graph.memory_effect(task)
        # Rounded as times are: sums of parts of an activation differ in their last bits.
        fits = holding is None or self.held[stage] + takes <= holding + _ROUNDING
        return fits and (not forwards or forwards[0] == task)


_ROUNDING = 1e-9
"""Ends that lie no further apart are one moment: sums of lengths differ in their last bits."""


def list_orders(
    placement: Placement, graph: PipelineGraph, rule: _RuleChoice, *, length: Callable[[Task], float], hop: float = 0.0
) -> list[list[Task]]:
    """Returns the orders of the stages, up to the moment when nothing runs and the rule starts nothing.

    ``length`` gives the time of a task, ``hop`` the time between the end of a task and the start of a dependent one on
    another stage, both in any unit.
    """
    run = _Run(placement, graph, hop)
    orders: list[list[Task]] = [[] for _ in range(placement.num_stages)]
    while True:
        # All stages choose before time goes on, in ascending order, so that a run is a function of its inputs.
        for stage in range(placement.num_stages):
            task = None if run.busy[stage] else rule.choose(stage, run.ready[stage].keys())
            if task is not None:
                del run.ready[stage][task]
                run.busy[stage] = True
                heapq.heappush(run.coming, (run.now + length(task), True, task))
                orders[stage].append(task)
        if not run.coming:
            return orders
        for task in run.advance():
            rule.finished(task)


class _Run:
    """The pipeline at one moment: the tasks that are ready, those that run, and the inputs on their way."""

    def __init__(self, placement: Placement, graph: PipelineGraph, hop: float) -> None:
        self.stage_of, self.hop = placement.stage_of_chunk, hop
        self.after: dict[Task, list[Task]] = {}
        """The tasks that wait for each task that has any."""
        self.missing: dict[Task, int] = {}
        self.ready: list[dict[Task, None]] = [{} for _ in range(placement.num_stages)]
        """Ready tasks of each stage, the one that has been ready for longest first."""
        for task, needed in all_needed(graph).items():
            self.missing[task] = len(needed)
            for before in needed:
                self.after.setdefault(before, []).append(task)
            if not needed:
                self.ready[self.stage_of[task.chunk]][task] = None
        self.busy = [False] * placement.num_stages
        self.now = 0.0
        self.coming: list[tuple[float, bool, Task]] = []
        """A heap of (time, whether the task ends then; else one of its inputs arrives, task)."""

    def advance(self) -> list[Task]:
        """Goes on to the next moment. Returns the tasks that end then."""
        self.now = self.coming[0][0]
        ended = []
        while self.coming and self.coming[0][0] <= self.now + _ROUNDING:
            _, is_end, task = heapq.heappop(self.coming)
            if not is_end:
                self._arrive(task)
                continue
            ended.append(task)
            stage = self.stage_of[task.chunk]
            self.busy[stage] = False
            for follower in self.after.get(task, ()):
                if self.hop and self.stage_of[follower.chunk] != stage:
                    heapq.heappush(self.coming, (self.now + self.hop, False, follower))
                else:
                    self._arrive(follower)
        return ended

    def _arrive(self, task: Task) -> None:
        """Counts one more input of a task, which is ready after its last one."""
        self.missing[task] -= 1
        if self.missing[task] == 0:
            self.ready[self.stage_of[task.chunk]][task] = None
