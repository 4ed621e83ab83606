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

from rrfp_jax.schedules.language.list_schedule import list_orders
from rrfp_jax.schedules.language.order import Order
from rrfp_jax.schedules.language.stage import Described, Mistake, Stage
from rrfp_jax.schedules.language.streams import Stream
from rrfp_jax.tasks import Task, TaskKind

Key = Callable[[Task], tuple[int, ...]]
WORDS: dict[str, Callable[[Task], int]] = {
    "chunk": lambda task: task.chunk,
    "-chunk": lambda task: -task.chunk,
    "microbatch": lambda task: task.microbatch,
    "-microbatch": lambda task: -task.microbatch,
}


@dataclass(frozen=True)
class Lanes:
    """One lane, or two that take turns."""

    kinds: tuple[tuple[str, ...], ...]
    row: tuple[Task, ...] = ()
    """The order that ranks the tasks of the lane, if one does."""


def turns(first: Stream, second: Stream) -> Lanes:
    """One of the first, if any is ready, then one of the second, if any is, and so on."""
    return Lanes((_whole(first), _whole(second)))


def like(order: Order, stage: Stage) -> Lanes:
    """A lane with the tasks of an order by their places in it, the forwards one after another."""
    row = tuple(order.on(stage))
    return Lanes((tuple(dict.fromkeys(task.kind for task in row)),), row)


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

    def by_turn(self) -> tuple[tuple[tuple[tuple[str, ...], int], ...], ...]:
        """For turn 0 and turn 1 the lanes, the best first, each with the turn that follows when it is chosen."""
        plain = [(kinds, int(number == self.pair)) for number, kinds in enumerate(self.lanes)]
        if self.pair is None:
            return tuple(plain), tuple(plain)
        at, after = self.pair, self.pair + 2
        return tuple(plain), (*plain[:at], *plain[at:after][::-1], *plain[after:])

    def frozen(
        self,
        *,
        lengths: Callable[[Task], float] = lambda _: 1.0,
        hop: float = 0.0,
        under_way: int | None = None,
        holding: float | None = None,
    ) -> "Frozen":
        """The order in which stages start their tasks in virtual time.

        Args:
            lengths: how long a task lasts.
            hop: from the end of a task to the start of one on another stage that waits for it.
            under_way: how many microbatches may be between their first task and their last, over the whole pipeline.
            holding: how many activations the stage may hold, each of a chunk from its F to the end of its backward.
        """
        return Frozen(self, lengths, hop, under_way, holding)


def rule(*lanes: Stream | Lanes, key: object = None, **keys: object) -> Rule:
    """Lanes, the best first; ``key`` for all kinds, or one by its letter: ``F=("chunk", "microbatch")``."""
    made = [each if isinstance(each, Lanes) else Lanes((_whole(each),)) for each in lanes]
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
    keys = dict.fromkeys(kinds, key) | keys
    if TaskKind.B in keys:
        keys[TaskKind.I] = keys[TaskKind.B]
    row = next((each.row for each in made if each.row), ())
    places = {task: place for place, task in enumerate(row)}
    return Rule(
        tuple(lane for each in made for lane in each.kinds),
        pairs[0] if pairs else None,
        {kind: _key(words) for kind, words in keys.items() if words is not None}
        | dict.fromkeys({task.kind for task in row}, lambda task: (places[task],)),
        row,
    )


def _whole(stream: Stream) -> tuple[str, ...]:
    """The kinds of a lane; I goes where B does."""
    return (stream.kind, TaskKind.I) if stream.kind == TaskKind.B else (stream.kind,)


def _key(words: object) -> Key:
    if callable(words):
        return words
    names = (words,) if isinstance(words, str) else tuple(words)  # type: ignore[arg-type]
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
    """A rule to be run in virtual time, which only all stages together can do."""

    rule: Rule
    lengths: Callable[[Task], float]
    hop: float
    under_way: int | None
    holding: float | None

    def orders(self, stages: Sequence[Stage], made: Sequence["Frozen"]) -> list[list[Task]]:
        """The rules of all stages run together; times and ``under_way`` are those of the first."""
        choice = _Stages(stages, made)
        return list_orders(stages[0].placement, stages[0].graph, choice, length=self.lengths, hop=self.hop)


class _Stages:
    """What each stage starts as its rule says."""

    def __init__(self, stages: Sequence[Stage], made: Sequence[Frozen]) -> None:
        self.stages, self.made = stages, made
        self.keeper = [_Keeper(stage, frozen) for stage, frozen in zip(stages, made, strict=True)]
        self.unfinished = Counter(task.microbatch for task in stages[0].graph.tasks())
        self.entered: set[int] = set()

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        limit = self.made[0].under_way
        if limit is not None and len(self.entered) >= limit:
            ready = {task: None for task in ready if task.microbatch in self.entered}.keys()
        task = self.keeper[stage].choose(ready)
        if task is not None:
            self.entered.add(task.microbatch)
        return task

    def finished(self, task: Task) -> None:
        self.unfinished[task.microbatch] -= 1
        if self.unfinished[task.microbatch] == 0:
            self.entered.remove(task.microbatch)


class _Keeper:
    """One stage: whose turn it is, and what it holds."""

    def __init__(self, stage: Stage, frozen: Frozen) -> None:
        self.graph, self.frozen, self.turn, self.held = stage.graph, frozen, 0, 0.0
        self.forwards = deque(task for task in frozen.rule.row if task.kind is TaskKind.F)
        named = {kind for lane in frozen.rule.lanes for kind in lane}
        rest = tuple(sorted({kind for chunk in stage.chunks for kind in stage.graph.kinds(chunk)} - named))
        self.by_turn = [(*lanes, (rest, 0)) for lanes in frozen.rule.by_turn()]

    def choose(self, ready: Set[Task]) -> Task | None:
        for kinds, turn in self.by_turn[self.turn]:
            candidates = [task for task in ready if task.kind in kinds and self._admits(task)]
            if candidates:
                self.turn = turn
                return self._start(min(candidates, key=self.frozen.rule.key))
        return None

    def _admits(self, task: Task) -> bool:
        if task.kind is not TaskKind.F:
            return True
        is_next = not self.forwards or self.forwards[0] == task
        return is_next and (self.frozen.holding is None or self.held < self.frozen.holding)

    def _start(self, task: Task) -> Task:
        takes, frees = self.graph.memory_effect(task)
        self.held += takes - frees
        if self.forwards and task.kind is TaskKind.F:
            self.forwards.popleft()
        return task
