"""Rules: which of the ready tasks a free stage starts.

A rule has *lanes*, the best first: the tasks of a kind, those of an order (:func:`like`), or of two kinds that take
``turns``; kinds in no lane come last. Within a lane the smallest key goes first: words such as ``-chunk``, or a
function of the task; without a key the task that has been ready for longest. Where the backward is split, B is I.

A rule is used in two ways. A running stage asks it what to start (:meth:`rrfp_jax.arbitration.Hint.of`). And
:meth:`Rule.frozen` runs it in virtual time, which gives a table: it cannot deadlock, as it has been run.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rrfp_jax.schedules.language.list_schedule import list_orders
from rrfp_jax.schedules.language.order import Order
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage, check_number, is_number
from rrfp_jax.schedules.language.streams import Stream
from rrfp_jax.tasks import PipelineGraph, Task, TaskKind

Key = Callable[[Task], tuple[int, ...]]
WORDS: dict[str, Callable[[Task], int]] = {
    "chunk": lambda task: task.chunk,
    "-chunk": lambda task: -task.chunk,
    "microbatch": lambda task: task.microbatch,
    "-microbatch": lambda task: -task.microbatch,
}


@dataclass(frozen=True)
class Lanes:
    """One lane, or two that take turns: the kinds of each."""

    kinds: tuple[tuple[str, ...], ...]
    row: tuple[Task, ...] = ()
    """The order that ranks the tasks of the lane, if one does."""


def turns(first: Stream, second: Stream) -> Lanes:
    """One of the first, if any is ready, then one of the second, if any is, and so on."""
    return Lanes((_kinds(first), _kinds(second)))


def like(order: Any, stage: Stage) -> Lanes:
    """A lane with the tasks of an order by their places in it, the forwards one after another."""
    if not isinstance(order, Order):
        raise Mistake(f"like takes an order, not {order!r}: add streams, rounds or slots")
    row = tuple(order.on(stage))
    return Lanes((tuple(dict.fromkeys(task.kind for task in row)),), row)


def _kinds(stream: Any) -> tuple[str, ...]:
    """I goes where B does."""
    if not isinstance(stream, Stream) or stream != Stream(stream.kind):
        raise Mistake(
            f"a lane of a rule is a kind on all chunks, such as F, not {str(stream)!r}: say which go first by a key"
        )
    return (stream.kind, TaskKind.I) if stream.kind == TaskKind.B else (stream.kind,)


@dataclass(frozen=True, eq=False)
class Rule:
    """What a free stage starts."""

    lanes: tuple[tuple[str, ...], ...]
    """The kinds of each, the best first."""
    pair: int | None
    """The lane that takes turns with the next one, if any."""
    keys: dict[str, Key]
    row: tuple[Task, ...] = ()
    """The order that ranks what it holds, if one does; its forwards start one after another."""

    def key(self, task: Task) -> tuple[int, ...]:
        """The smallest goes first within a lane."""
        key = self.keys.get(task.kind)
        return () if key is None else key(task)

    def by_turn(self) -> tuple[list[tuple[tuple[str, ...], int]], ...]:
        """For turn 0 and turn 1 the lanes, the best first, each with the turn that follows when it is chosen."""
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
        """The order in which stages start their tasks in virtual time; see :class:`Frozen`."""
        check_number("hop", hop)
        for name, limit in (("under_way", under_way), ("holding", holding)):
            if limit is not None:
                check_number(name, limit)
        if not callable(lengths):
            raise Mistake(f"lengths is {lengths!r}: give a function of a task, such as EQUAL or s.lengths")
        return Frozen(self, lengths, hop, under_way, holding)


def rule(*lanes: Stream | Lanes, key: object = None, **keys: object) -> Rule:
    """Lanes, the best first; ``key`` for all kinds, or one by its letter: ``F=("chunk", "microbatch")``."""
    made = [each if isinstance(each, Lanes) else Lanes((_kinds(each),)) for each in lanes]
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


def _key(words: object) -> Key:
    if callable(words):
        return words
    if not isinstance(words, str | Sequence):
        raise Mistake(f"the key is {words!r}: write {', '.join(WORDS)}, or a function of the task")
    names = (words,) if isinstance(words, str) else tuple(words)
    unknown = next((word for word in names if word not in WORDS), None)
    if unknown is not None:
        raise Mistake(f"the key has the word {unknown!r}: write {', '.join(WORDS)}, or a function of the task")
    parts = tuple(WORDS[word] for word in names)
    if len(parts) == 2:  # as in every rule here, and read for every task of a step
        first, second = parts
        return lambda task: (first(task), second(task))
    return lambda task: tuple(part(task) for part in parts)


@dataclass(frozen=True, eq=False)
class Frozen(Described):
    """A rule to be run in virtual time, which only all stages together can do; times and ``under_way`` are those of the
    first stage."""

    rule: Rule
    lengths: Callable[[Task], float]
    """How long a task lasts."""
    hop: float
    """From the end of a task to the start of one on another stage that waits for it."""
    under_way: int | None
    """How many microbatches may be between their first task and their last, over the whole pipeline."""
    holding: float | None
    """How many activations the stage may hold, each of a chunk from its F to the end of its backward."""

    def orders(self, stages: Sequence[Stage], made: Sequence["Frozen"]) -> list[list[Task]]:
        """The rules of all stages run together."""
        run = _Run(stages[0].graph, made)
        return list_orders(stages[0].placement, stages[0].graph, run, length=self.lengths, hop=self.hop)

    def check(self, stage: Stage, first: "Frozen") -> None:
        """Raise :class:`Mistake` for a lane that can hold nothing, for limits that are not those of all stages, for
        lengths that are no numbers, and for keys of which none is the smallest."""
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
        """Only its limits keep a rule from all tasks."""
        return "add them, with a larger limit"


class _Run:
    """What each stage starts as its rule says."""

    def __init__(self, graph: PipelineGraph, made: Sequence[Frozen]) -> None:
        self.graph, self.made, self.limit = graph, made, made[0].under_way
        self.by_turn = [frozen.rule.by_turn() for frozen in made]
        self.turn, self.held = [0] * len(made), [0.0] * len(made)
        self.forwards = [deque(t for t in frozen.rule.row if t.kind is TaskKind.F) for frozen in made]
        self.unfinished = Counter(task.microbatch for task in graph.tasks())
        self.entered: set[int] = set()

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        rule = self.made[stage].rule
        admitted = [task for task in ready if self._admits(stage, task)]
        named = {kind for lane in rule.lanes for kind in lane}
        rest = (tuple({task.kind for task in admitted} - named), 0)
        for kinds, turn in (*self.by_turn[stage][self.turn[stage]], rest):
            lane = [task for task in admitted if task.kind in kinds]
            if lane:
                self.turn[stage] = turn
                return self._start(stage, min(lane, key=rule.key))
        return None

    def finished(self, task: Task) -> None:
        self.unfinished[task.microbatch] -= 1
        if self.unfinished[task.microbatch] == 0:
            self.entered.remove(task.microbatch)

    def _admits(self, stage: int, task: Task) -> bool:
        if self.limit is not None and len(self.entered) >= self.limit and task.microbatch not in self.entered:
            return False
        if task.kind is not TaskKind.F:
            return True
        holding, forwards = self.made[stage].holding, self.forwards[stage]
        return (holding is None or self.held[stage] < holding) and (not forwards or forwards[0] == task)

    def _start(self, stage: int, task: Task) -> Task:
        takes, frees = self.graph.memory_effect(task)
        self.held[stage] += takes - frees
        self.entered.add(task.microbatch)
        if self.forwards[stage] and task.kind is TaskKind.F:
            self.forwards[stage].popleft()
        return task
