"""What the judge demands of a place that a table guides: its memory, its announcements and its holds.

All of it follows from the row and from what has started, finished and arrived; nothing is asked of the arbiter.

* *Memory*. An activation is held from the start of F to the end of B, or of W where the backward is split. No more are
  held than the footprint, and an F is admitted if that stays so when it starts now and everything before it in the row
  follows in the row's order (:mod:`rrfp_jax.arbitration.footprint`).
* *Announcements*. With a task's start, and only then, each activation and gradient that it will send is announced once,
  to the stage that waits for it. Nothing else ever is.
* *Holds*. A free stage with something to run may hold only for the next entry, where that is admissible and lacks
  nothing but packets (rule 1 of :mod:`rrfp_jax.arbitration.foresight`). As long as it holds, a tick that it has asked
  for is under way, and when that comes it starts a task; it asks for ticks at no other time.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from rrfp_jax.arbitration import Announce, Instruction, Message, MessageKind, RunTask
from rrfp_jax.checking.account import Account, places_of
from rrfp_jax.checking.contract import Contract
from rrfp_jax.checking.setting import Setting
from rrfp_jax.tasks import Task, TaskKind

ANNOUNCED = (MessageKind.ACTIVATION, MessageKind.GRADIENT)


class Guidance:
    """What one place is guided by."""

    def __init__(self, setting: Setting, place: int, contracts: Sequence[Contract]) -> None:
        stage = setting.places[place].stage
        self.graph = setting.graph
        self.limit = setting.footprints[stage] if setting.footprints else None
        self.rules = setting.foresight if setting.has_foresight(place) else None
        row, ranked = setting.row(stage) or (), setting.ranked(stage)
        self._rows = [[c.place[task] for task in row if task in c.place] for c in contracts]
        self._orders = [[c.place[task] for task in (*ranked, *_last(c)) if task in c.place] for c in contracts]
        self._announced = [_announced(contract) for contract in contracts]

    # -- memory ------------------------------------------------------------------------------------------------------

    def held(self, contract: Contract, account: Account) -> int:
        """The activations that the place holds."""
        takes = self._changes(contract, account.started)
        frees = self._changes(contract, account.done)
        return sum(change > 0 for change in takes) - sum(change < 0 for change in frees)

    def admits(self, contract: Contract, account: Account, place: int) -> bool:
        """Whether memory suffices for this F, and then for what is left before it in the row."""
        assert self.limit is not None
        row = self._rows[account.step]
        held = self.held(contract, account) + self._change(contract.tasks[place])
        most = held
        for before in row[: row.index(place)]:
            change = self._change(contract.tasks[before])
            is_left = not (account.started if change > 0 else account.done) >> before & 1
            held += change * is_left
            most = max(most, held)
        return most <= self.limit

    def _change(self, task: Task) -> int:
        if task.microbatch < 0 or not self.graph.has_backward(task.chunk):
            return 0
        return (task.kind is TaskKind.F) - (task.kind is self.graph.accumulating_kind(task.chunk))

    def _changes(self, contract: Contract, tasks: int) -> list[int]:
        return [self._change(contract.tasks[place]) for place in places_of(tasks)]

    # -- announcements and holds -------------------------------------------------------------------------------------

    def entries_left(self, account: Account) -> Iterator[int]:
        """The entries of the row that have not started, the best-ranked first."""
        return (place for place in self._orders[account.step] if not account.started >> place & 1)

    def wrong_announcement(self, account: Account, instructions: Sequence[Instruction]) -> str | None:
        """What is wrong with the announcements of an answer, if anything is."""
        runs = [i.task for i in instructions if isinstance(i, RunTask)]
        made = Counter((i.message, i.stage) for i in instructions if isinstance(i, Announce))
        wanted = Counter(entry for task in runs for entry in self._announced[account.step].get(task, ()))
        if self.rules is None or (self.rules.shortest_s > 0 and not made):
            wanted.clear()
        when = f"as it starts {', '.join(map(str, runs))}" if runs else "and starts nothing"
        for message, stage in (made - wanted) + (wanted - made):
            times = made[message, stage], wanted[message, stage]
            how = f"announces {times[0]} times" if min(times) else "announces" if times[0] else "does not announce"
            return f"{how} {message} to stage {stage} {when}"
        return None


def _last(contract: Contract) -> list[Task]:
    """The tasks of the step's end in the order in which a table's hint ranks them: R from the last chunk, then U."""
    last = [task for task in contract.tasks if task.microbatch < 0]
    return sorted(last, key=lambda task: (1, task.chunk) if task.kind is TaskKind.U else (0, -task.chunk))


def _announced(contract: Contract) -> dict[Task, list[tuple[Message, int]]]:
    """What each task announces when it starts."""
    announced: dict[Task, list[tuple[Message, int]]] = {}
    for (message, stage), promise in contract.sends.items():
        if message.kind in ANNOUNCED:
            (sender,) = places_of(promise.tasks)
            announced.setdefault(contract.tasks[sender], []).append((message, stage))
    return announced
