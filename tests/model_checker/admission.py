"""What a place may start, from the definitions of window, capacity, read-ahead and footprint.

It looks at the account alone and knows nothing of how the arbiter keeps count.
"""

from collections.abc import Callable, Iterator

from rrfp_jax.schedules import Task, TaskKind
from tests.model_checker.account import Account, places_of
from tests.model_checker.contract import Contract
from tests.model_checker.guidance import Guidance
from tests.model_checker.setting import Setting


class Admission:
    """The limits of one place of a setting, and what they admit."""

    def __init__(self, setting: Setting, place: int, guidance: Guidance) -> None:
        stage = setting.places[place].stage
        is_strict = isinstance(setting.policies[stage], tuple)
        self.window = None if is_strict or setting.footprints else setting.windows[stage]
        self.read_ahead = {} if is_strict else {bound.chunk: bound for bound in setting.ahead(stage)}
        self.most_weight = setting.capacities[stage] if setting.capacities else 0
        self.is_member = len(setting.group_of(place)) > 1
        """Of a group, in which others may lack what is here."""
        self.guidance = guidance
        self._age: Callable[[int], int] = setting.sequence.index if setting.sequence else int

    def ready_task(self, contract: Contract, account: Account, lane: int) -> Task | None:
        """One of these tasks that is ready and admissible, if there is one."""
        return next((contract.tasks[place] for place in self.startable(contract, account, lane)), None)

    def startable(self, contract: Contract, account: Account, lane: int) -> Iterator[int]:
        """Those of some tasks that are ready and admissible."""
        for place in places_of(lane & ~account.started):
            if account.has(contract.needs[place]) and self.admits(contract, account, place):
                yield place

    def admits(self, contract: Contract, account: Account, place: int) -> bool:
        """Whether footprint or window admits a task, from their definitions."""
        kind, _, microbatch = contract.tasks[place]
        if self.guidance.limit is not None and not self.guidance.admits(contract, account, place):
            return False
        if kind is not TaskKind.F:
            return True
        if not self.may_run_ahead(contract, account, contract.tasks[place]):
            return False
        if self.window is None:
            return True
        held = self.held(contract, account)
        after = held | {microbatch}
        if contract.weights:
            return microbatch in held or self._fits(contract, account, after)
        left = [m for m, tasks in enumerate(contract.of_microbatch) if tasks & ~account.done]
        oldest = min(left, key=self._age)
        return microbatch in held or len(after) < self.window or (len(after) == self.window and oldest in after)

    def _fits(self, contract: Contract, account: Account, held: set[int]) -> bool:
        """Whether these may be held: the capacity suffices, also for each that is left once all older ones are gone."""
        weights = contract.weights
        left = {m for m, tasks in enumerate(contract.of_microbatch) if tasks & ~account.done}
        age = self._age
        later = [sum(weights[m] for m in held if age(m) > age(other)) + weights[other] for other in left - held]
        return max([sum(weights[m] for m in held), *later]) <= self.most_weight

    def may_hold(self, contract: Contract, account: Account) -> bool:
        """Whether the row's next entry, those apart that read-ahead restrains, lacks nothing but packets."""
        place = self.next_entry(contract, account)
        if place is None or account.missing(contract.needs[place]) or not self.admits(contract, account, place):
            return False
        lacks_packets = bool(contract.needs[place].packets & ~account.delivered)
        return lacks_packets or (self.is_member and bool(contract.needs[place].packets))

    def next_entry(self, contract: Contract, account: Account) -> int | None:
        """The first of the row that has not started and that read-ahead does not restrain."""
        entries = self.guidance.entries_left(contract, account)
        return next((p for p in entries if self.may_run_ahead(contract, account, contract.tasks[p])), None)

    def held(self, contract: Contract, account: Account) -> set[int]:
        """The microbatches that have started here and not ended."""
        return {
            m
            for m, tasks in enumerate(contract.of_microbatch)
            if tasks & contract.forwards & account.started and tasks & ~account.done
        }

    def untaken(self, contract: Contract, account: Account, chunk: int) -> set[int]:
        """What a chunk that runs F only has begun to produce, and not everyone has taken."""
        taken = contract.taken[chunk]
        return {
            m
            for m, needs in taken.items()
            if account.started >> contract.place[Task(TaskKind.F, chunk, m)] & 1 and not account.has(needs)
        }

    def may_run_ahead(self, contract: Contract, account: Account, task: Task) -> bool:
        """Whether the bound has room for an F, and then for each start before its turn, in the order of turns."""
        bound = self.read_ahead.get(task.chunk)
        if bound is None:
            return True
        taken = contract.taken[task.chunk]
        untaken = self.untaken(contract, account, task.chunk) | {task.microbatch}
        turns = bound.turns or [m for m in sorted(taken) for _ in range(2)]
        has_started = {m for m in taken if account.started >> contract.place[Task(TaskKind.F, task.chunk, m)] & 1}
        seen: set[int] = set()
        room = len(untaken) <= bound.limit
        for m in turns:
            if m == task.microbatch:
                return room
            if m in seen:
                untaken.discard(m)
            elif m in taken and m not in has_started:
                untaken.add(m)
                room = room and len(untaken) <= bound.limit
            seen.add(m)
        return room
