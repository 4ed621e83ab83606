"""What the judge demands of a place that a table guides, or whose memory is bounded: memory, announcements and holds.

All of it follows from the row and from what has started, finished and arrived; nothing is asked of the arbiter.

* *Memory*. An activation is held from the start of F to the end of B, or of W where the backward is split; operations
  take and free parts of one. No more is held than the footprint, and what takes memory is admitted if that stays so
  when it starts now and everything before it in the row follows in the row's order
  (:mod:`rrfp_jax.core.memory`). For a task of the stage's own lane, one that is about to end has freed its
  memory already, since it starts behind that one; for those of engines it has not.
* *Announcements*. With a task's start, and only then, each activation and gradient that it will send is announced once,
  to the stage that waits for it. Nothing else ever is.
* *Holds*. A free stage with something to run may hold only for the next entry, where that is admissible and lacks
  nothing but packets (rule 1 of :mod:`rrfp_jax.core.foresight`). As long as it holds, a tick that it has asked
  for is under way, and when that comes it starts a task; it asks for ticks at no other time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rrfp_jax.core import Announce, Instruction, Message, MessageKind
from rrfp_jax.schedules import COMPUTE, Task, TaskKind
from tests.model_checker.account import Account, places_of
from tests.model_checker.contract import Contract
from tests.model_checker.operations import Operations
from tests.model_checker.setting import Setting

ANNOUNCED = (MessageKind.ACTIVATION, MessageKind.GRADIENT)


class Guidance:
    """What one place is guided by."""

    def __init__(self, setting: Setting, place: int, contracts: Sequence[Contract]) -> None:
        stage = setting.places[place].stage
        self.operations = Operations(setting.graph)
        self.limit = setting.footprints[stage] if setting.footprints else None
        self.rules = setting.foresight if setting.has_foresight(place) else None
        row, ranked = setting.memory_row(stage) if setting.footprints else (), setting.ranked(stage)
        self._rows = [[c.place[task] for task in row if task in c.place] for c in contracts]
        named = ranked or (setting.memory_row(stage) if setting.has_row(stage) else ())
        self._named = [[c.place[task] for task in named if task in c.place] for c in contracts]
        self._orders = [self._order(c, ranked) for c in contracts]
        self._announced = [_announced(contract) for contract in contracts]

    # -- memory ------------------------------------------------------------------------------------------------------

    def held(self, contract: Contract, account: Account, *, ended: bool = False) -> int:
        """The units that the place holds; ``ended``: what is about to end holds its own still."""
        takes = sum(self.takes(contract.tasks[place]) for place in places_of(account.started))
        freed = account.finished if ended else account.done
        return takes - sum(self._frees(contract.tasks[place]) for place in places_of(freed))

    def admits(self, contract: Contract, account: Account, place: int) -> bool:
        """Whether memory suffices for this task, and then for what is left before it in the row.

        For an engine's task, one that is about to end is one that runs: it frees its memory at its place in the row.
        """
        assert self.limit is not None
        task = contract.tasks[place]
        if not self.takes(task):
            return True
        row, is_beside = self._rows[account.step], self.operations.lane(task) != COMPUTE
        over = account.finished if is_beside else account.done
        held = self.held(contract, account, ended=is_beside) + self.takes(task)
        most = held
        for before in row[: row.index(place)]:
            if not account.started >> before & 1:
                held += self.takes(contract.tasks[before])
                most = max(most, held)
            if not over >> before & 1:
                held -= self._frees(contract.tasks[before])
        return most <= self.limit

    def takes(self, task: Task) -> int:
        """What a task takes as it starts, in units."""
        return self.operations.effect(task)[0]

    def _frees(self, task: Task) -> int:
        return self.operations.effect(task)[1]

    def _order(self, contract: Contract, ranked: Iterable[Task]) -> list[int]:
        """All entries: those of the row as the hint ranks them, R and U; and operations that run once, which no row
        names, right before the first one that waits for them, or else last."""
        named = [contract.place[task] for task in (*ranked, *_last(contract)) if task in contract.place]
        keys = {place: (number, 0) for number, place in enumerate(named)}
        once = [contract.place[task] for task in self.operations.once if task in contract.place]

        def key(place: int) -> tuple[int, int]:
            if place not in once:
                return keys.get(place, (len(named), 0))
            after = [key(p) for p, needs in enumerate(contract.needs) if needs.tasks >> place & 1]
            return (min(after)[0], min(after)[1] - 1) if after else (len(named), 1)

        return sorted([*named, *once], key=key)

    def first_of_engine(self, account: Account, places: Iterable[int]) -> int | None:
        """The one of these that the table's row has first; None where it names none."""
        rank = {place: number for number, place in enumerate(self._named[account.step])}
        return min((place for place in places if place in rank), key=rank.__getitem__, default=None)

    # -- announcements and holds -------------------------------------------------------------------------------------

    def entries_left(self, contract: Contract, account: Account) -> Iterator[int]:
        """The entries of the row for the stage's own lane that have not started, the best-ranked first."""
        left = contract.compute & ~account.started
        return (place for place in self._orders[account.step] if left >> place & 1)

    def wrong_announcement(
        self, account: Account, instructions: Sequence[Instruction], runs: Sequence[Task]
    ) -> str | None:
        """What is wrong with the announcements of an answer by which the device begins these tasks, if anything is."""
        told = [(i.message, i.stage) for i in instructions if isinstance(i, Announce)]
        if not told and (self.rules is None or self.rules.shortest_s > 0):
            return None
        due = [entry for task in runs for entry in self._announced[account.step].get(task, ())]
        if told == due and self.rules is not None:
            return None
        made, wanted = Counter(told), Counter(due if self.rules is not None else ())
        when = f"as it starts {', '.join(map(str, runs))}" if runs else "and starts nothing"
        for message, stage in (made - wanted) + (wanted - made):
            times = made[message, stage], wanted[message, stage]
            how = f"announces {times[0]} times" if min(times) else "announces" if times[0] else "does not announce"
            return f"{how} {message} to stage {stage} {when}"
        return None


def _last(contract: Contract) -> list[Task]:
    """R and U in the order in which a table's hint ranks them: R from the last chunk, then U."""
    last = [task for task in contract.tasks if task.kind in (TaskKind.R, TaskKind.U)]
    return sorted(last, key=lambda task: (1, task.chunk) if task.kind is TaskKind.U else (0, -task.chunk))


def _announced(contract: Contract) -> dict[Task, list[tuple[Message, int]]]:
    """What each task announces when it starts."""
    announced: dict[Task, list[tuple[Message, int]]] = {}
    for (message, stage), promise in contract.sends.items():
        if message.kind in ANNOUNCED:
            (sender,) = places_of(promise.tasks)
            announced.setdefault(contract.tasks[sender], []).append((message, stage))
    return announced
