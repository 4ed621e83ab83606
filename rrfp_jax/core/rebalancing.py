"""Choosing owners: who runs the microbatches of a lost unit, and how many a slow unit keeps.

An owner table says, for every stage and microbatch, which replica runs the microbatch there. The *normal* table gives
each replica its block of consecutive microbatches. Everything here is a function from numbers to numbers, so that a
table can be planned on one rank, logged and replayed. A table holds for a whole step; nothing moves within one.

After a loss
------------
The lost unit's microbatches go to the living replicas of its stage, one after another to the one with the fewest
(:func:`adopted_owners`); all others stay. The table follows from the normal one and the living units alone, so a unit
that comes back finds its own microbatches again. In a deterministic run one replica takes them all, since the bits of
a sum depend on how it is cut.

No table with these counts can do better, and with the right order none does worse. With F and B the same for all
microbatches, a stage needs its *fill* (one F of each stage before it), the work of its *busiest* unit, and its *drain*:
one B of each stage before it, where the backward is one task. Where it is split the drain costs nothing, since W waits
until the stages before have their gradients, so that the busiest unit's last W is the end. There readiness attains this
bound at 8 stages x 4 replicas x 16 microbatches whatever two units are lost, and with B as one task it comes within one
microbatch's F and B of it, as a test shows for all pairs. It does so because :mod:`rrfp_jax.core.stage_setup` ranks
adopted microbatches *by age*: by their place within the block to which they belong. Microbatches of one age reach a
stage at about the same time in all replicas, which begin together and go at one pace. If numbers decided, a unit would
prefer every microbatch of an earlier block to its own, and its own to those of all later blocks. One of the two kinds
would starve until the other has run, and the stages behind it would idle: 850 ms in place of 710 where stage 0 loses a
unit and B is one task.
Memory matters as much: with windows of S - s + k microbatches it is 890 ms for k = 0, with which an unharmed 1F1B has
all that it needs, 850 for k = 1, 760 for k = 4 and 720 for k = 8.

Slow units
----------
A step that takes longer is no evidence: its microbatches may be longer. So the measure of a unit is its *ratio*, busy
time to the cost that was predicted of the very tasks that it ran, relative to the same ratio of its stage's replicas.
The amount of work cancels, and all that their programs have in common; the device stays. The reference is the lower
median, so that of two replicas the faster one is the measure. A program's time follows from the shapes of its
microbatch, so the prediction is the mean time of all tasks so far of the same chunk, kind and bucket of shapes, in all
replicas (:class:`OwnerPlanner`). A slow replica raises it for all alike.

:class:`SpeedWatch` keeps for each unit a *factor in force*, 1 at first. It changes when the median of the last nine
steps, of which there must be five, departs from it by a tenth or more. So no change comes without five steps that
agree, and four outliers, such as pauses while a checkpoint is written, change nothing. The departure must also be three
times the median deviation from that median: where steps differ much by themselves, less than that says nothing. A
median within a twentieth of 1 sets the factor back to 1. Between the limits it stays as it is, so that noise at one of
them cannot send owners to and fro.

The stages are watched against each other in the same way. A stage that is slow in all its replicas cannot be helped by
owners, as its microbatches have nowhere else to go: it is named, and nothing moves.

Planning
--------
:func:`planned_owners` starts anew from the normal table, or the one after a loss, for each step. While it helps the
unit that ends last, one of its microbatches moves: the one, and to the replica, with which the later end of the two is
soonest. Every move lowers the end of the unit that ends last, so this stops. With equal costs it divides by speed: if a
better division existed, some unit would have at least one microbatch more in it than here, and would still end before
the unit that ends last here, so that one more move would have helped. A move that gains less than a tenth of the
microbatch's time is not worth another path through the pipeline. Of equal microbatches the one goes that lies furthest
from those that have gone and from both ends of the block: the rest keeps its rhythm, and the first and the last, which
fill and drain the pipeline, stay. At least half of a unit's microbatches stay with it: a unit without any would never
be measured again, and a wrong measurement cannot move all work. A stage in which all factors are 1 keeps its row,
whatever the costs are.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import median, median_low
from types import MappingProxyType
from typing import NamedTuple

from rrfp_jax.core.replicas import Owners

_DEPARTURE = 0.10
"""The smallest relative departure from the factor in force that changes it (FALCON, 2410.12588, takes the same)."""
_LEAST_DEVIATIONS = 3
"""The same in median absolute deviations of the recent steps."""
_RETURN = 0.05
"""How near to 1 a median sets the factor back to 1."""
_FEWEST_STEPS = 5
_NUM_RECENT = 2 * _FEWEST_STEPS - 1
"""The steps of which the median is taken: the fewest that agree are more than half of them."""
_LEAST_GAIN = 0.1
"""The least gain of a move, as a share of the microbatch's own time."""
_MOST_LEAVING = 0.5
"""The largest share of a unit's microbatches that may go to other replicas."""


# -- after a loss ------------------------------------------------------------------------------------------------------


def adopted_owners(normal: Owners, living: Collection[int], *, in_blocks: bool = False) -> Owners:
    """Returns the table in which living replicas of the same stage run the microbatches of lost units.

    Args:
        normal: the table without losses.
        living: numbers of the units that live, each ``replica * num_stages + stage``.
        in_blocks: whether one replica runs all that an owner of the normal table ran.

    Raises ValueError naming the first stage that has no living replica among its owners.
    """
    return tuple(_adopted_row(stage, row, living, len(normal), in_blocks) for stage, row in enumerate(normal))


def _adopted_row(
    stage: int, row: tuple[int, ...], living: Collection[int], num_stages: int, in_blocks: bool
) -> tuple[int, ...]:
    counts = {r: row.count(r) for r in sorted(set(row)) if r * num_stages + stage in living}
    if not counts:
        raise ValueError(f"stage {stage} has lost all its replicas: restart the run in a layout that fits")
    # Each stage begins with another replica, so that one replica does not get the odd microbatch of every stage.
    replicas, new = len(set(row)), []
    adopters: dict[int, int] = {}
    for owner in row:
        adopter = owner if owner in counts else min(counts, key=lambda r: (counts[r], (r + stage) % replicas))
        if in_blocks:
            adopter = adopters.setdefault(owner, adopter)
        counts[adopter] += adopter != owner
        new.append(adopter)
    return tuple(new)


# -- slow units --------------------------------------------------------------------------------------------------------


class UnitWork(NamedTuple):
    """A unit's step as the watch sees it."""

    cost: float
    """The sum of the costs that were predicted of the tasks that it ran, in any unit that all units share. A unit that
    ran none has 0, and the step says nothing of it."""
    busy_s: float
    """The sum of their measured durations."""


class SpeedChange(NamedTuple):
    """A change of the factor in force of a unit, or of a whole stage."""

    step: int
    stage: int
    replica: int | None
    """The unit's replica; None: the stage as a whole, in all its replicas."""
    factor: float
    """How many times as long as its peers it takes for the same predicted cost, from now on."""
    before: float
    num_steps: int
    """The number of steps behind the factor, which is the median of their ratios."""

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        if self.replica is None:
            name, peers = f"stage {self.stage} in all its replicas", "the other stages"
            remedy = "" if self.factor == 1 else "; owners cannot help, another cut of the layers can"
        else:
            name, peers, remedy = f"stage {self.stage}, replica {self.replica}", "its stage's replicas", ""
        if self.factor == 1:
            found = f"takes as long as {peers} again, after {self.before:.2f} times as long,"
        else:
            found = f"takes {self.factor:.2f} times as long as {peers}"
        return f"{name} {found} for the same predicted work, over {self.num_steps} steps up to step {self.step}{remedy}"


@dataclass(kw_only=True)
class _Watched:
    """The recent ratios of a unit or a stage, relative to its peers, and its factor in force."""

    recent: deque[float]
    factor: float = 1.0

    def changed(self, ratio: float) -> bool:
        """Takes in one more step, and returns whether it changes the factor."""
        self.recent.append(ratio)
        if len(self.recent) < _FEWEST_STEPS:
            return False
        found, before = median(self.recent), self.factor
        if abs(found - 1) < _RETURN:
            self.factor = 1.0
        else:
            deviation = median(abs(ratio - found) for ratio in self.recent)
            if abs(found - before) >= max(_DEPARTURE * before, _LEAST_DEVIATIONS * deviation):
                self.factor = found
        return self.factor != before


class SpeedWatch:
    """Finds slow units from what each of them reports of its steps."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._watched: dict[tuple[int, int | None], _Watched] = {}
        """By stage and replica; None stands for the stage itself."""

    @property
    def factors(self) -> dict[int, float]:
        """The factors in force that are not 1, by unit."""
        return {
            replica * self._num_stages + stage: each.factor
            for (stage, replica), each in sorted(self._watched.items(), key=lambda item: item[1].factor)
            if replica is not None and each.factor != 1
        }

    def observe(self, step: int, work: Mapping[int, UnitWork]) -> list[SpeedChange]:
        """Takes in a step's work of all living units, by unit number, and returns the factors that it changes.

        Units that are not in ``work`` are forgotten, so that one that comes back is measured anew.
        """
        ratios: dict[int, dict[int, float]] = {}
        for unit, (cost, busy_s) in sorted(work.items()):
            if cost > 0 and busy_s > 0:
                replica, stage = divmod(unit, self._num_stages)
                ratios.setdefault(stage, {})[replica] = busy_s / cost
        of_stage = {stage: median_low(found.values()) for stage, found in ratios.items()}
        of_run = median_low(of_stage.values()) if of_stage else 1.0
        relative: dict[tuple[int, int | None], float] = {(s, None): each / of_run for s, each in of_stage.items()}
        relative |= {(s, r): each / of_stage[s] for s, found in ratios.items() for r, each in found.items()}
        self._watched = {
            key: each
            for key, each in self._watched.items()
            if key[1] is None or key[1] * self._num_stages + key[0] in work
        }
        changes = []
        for key, ratio in relative.items():
            watched = self._watched.setdefault(key, _Watched(recent=deque(maxlen=_NUM_RECENT)))
            before = watched.factor
            if watched.changed(ratio):
                changes.append(SpeedChange(step, *key, watched.factor, before, len(watched.recent)))
        return changes


# -- planning ----------------------------------------------------------------------------------------------------------


class AlikeTasks(NamedTuple):
    """Tasks that take the same time on equal devices: of one kind, on one chunk, for microbatches of equal shapes."""

    chunk: int
    """The chunk's number within its replica."""
    kind: str
    bucket: int


class TaskTimes(NamedTuple):
    """Number and time of some tasks."""

    num_tasks: int
    busy_s: float

    @property
    def mean_s(self) -> float:
        return self.busy_s / self.num_tasks


class OwnerPlan(NamedTuple):
    """All that the owners of one step follow from, beside the living units."""

    factors: Mapping[int, float] = MappingProxyType({})
    """How many times as long as its peers a unit takes, of the slow ones, by unit."""
    costs: Sequence[Sequence[float]] = ()
    """[stages][microbatches], the predicted costs of the step."""

    def owners(self, owners: Owners) -> Owners:
        """Returns the step's table, planned from the normal one, or the one after a loss."""
        return planned_owners(owners, self.factors, self.costs) if self.factors else owners


class OwnerPlanner:
    """Finds slow units by the times of their tasks, and plans the owners of coming steps.

    Args:
        stage_of_chunk: the stage of every chunk of one replica.
    """

    def __init__(self, stage_of_chunk: Sequence[int]) -> None:
        self._stage_of_chunk = tuple(stage_of_chunk)
        self._watch = SpeedWatch(1 + max(stage_of_chunk))
        self._known: dict[AlikeTasks, TaskTimes] = {}
        """The tasks of all replicas so far."""

    def observe(self, step: int, times: Mapping[int, Mapping[AlikeTasks, TaskTimes]]) -> list[SpeedChange]:
        """Takes in the tasks of a step, by unit, of all living units; returns what it finds."""
        for of_unit in times.values():
            for alike, (num_tasks, busy_s) in of_unit.items():
                before = self._known.get(alike, TaskTimes(0, 0.0))
                self._known[alike] = TaskTimes(before.num_tasks + num_tasks, before.busy_s + busy_s)
        work = {
            unit: UnitWork(
                cost=fsum(self._known[alike].mean_s * each.num_tasks for alike, each in of_unit.items()),
                busy_s=fsum(each.busy_s for each in of_unit.values()),
            )
            for unit, of_unit in times.items()
        }
        return self._watch.observe(step, work)

    def plan(self, buckets: Sequence[int]) -> OwnerPlan:
        """Returns the plan for a step whose microbatches have these buckets."""
        if not self._watch.factors:
            return OwnerPlan()
        costs: list[dict[int, float]] = [dict.fromkeys(buckets, 0.0) for _ in range(1 + max(self._stage_of_chunk))]
        for (chunk, _, bucket), known in self._known.items():
            of_stage = costs[self._stage_of_chunk[chunk]]
            if bucket in of_stage:
                of_stage[bucket] += known.mean_s
        return OwnerPlan(self._watch.factors, [[of_stage[each] for each in buckets] for of_stage in costs])


def planned_owners(owners: Owners, factors: Mapping[int, float], costs: Sequence[Sequence[float]] = ()) -> Owners:
    """Returns the table in which slow units have fewer microbatches, so that each stage's last unit ends soonest.

    Args:
        owners: the normal table, or the one after a loss; the replicas in a stage's row are those that live.
        factors: by unit, how many times as long as its peers it takes; units that are not named take as long.
        costs: [stages][microbatches], the predicted costs of the coming step; empty: all microbatches cost the same.
    """
    rows = []
    for stage, row in enumerate(owners):
        speeds = {r: factors.get(r * len(owners) + stage, 1.0) for r in sorted(set(row))}
        is_even = all(factor == 1 for factor in speeds.values())
        rows.append(row if is_even else _planned_row(row, speeds, costs[stage] if costs else [1.0] * len(row)))
    return tuple(rows)


def _planned_row(row: tuple[int, ...], factors: Mapping[int, float], costs: Sequence[float]) -> tuple[int, ...]:
    new = list(row)
    ends = {r: factor * fsum(costs[m] for m, owner in enumerate(row) if owner == r) for r, factor in factors.items()}
    may_leave = {r: int(_MOST_LEAVING * row.count(r)) for r in factors}
    gone: list[int] = []
    while len(ends) > 1:
        last = max(ends, key=lambda r: (ends[r], -r))
        # One that came from another unit stays, so that no microbatch moves twice.
        mine = [m for m, owner in enumerate(new) if owner == last == row[m] and costs[m] > 0]
        if not may_leave[last] or not mine:
            break
        away = (*gone, mine[0] - 1, mine[-1] + 1)
        # Sums are rounded, so that microbatches of equal cost are equal here.
        *_, microbatch, replica = min(
            (
                round(max(ends[last] - factors[last] * costs[m], ends[r] + factors[r] * costs[m]) / ends[last], 9),
                round((ends[r] + factors[r] * costs[m]) / ends[last], 9),
                -min(abs(m - other) for other in away),
                m,
                r,
            )
            for m in mine
            for r in ends
            if r != last
        )
        cost = costs[microbatch]
        sooner, later = ends[last] - factors[last] * cost, ends[replica] + factors[replica] * cost
        if ends[last] - max(sooner, later) < _LEAST_GAIN * factors[last] * cost:
            break
        new[microbatch], ends[last], ends[replica] = replica, sooner, later
        may_leave[last] -= 1
        gone.append(microbatch)
    return tuple(new)


def owners_in_words(normal: Owners, owners: Owners) -> list[str]:
    """Returns one sentence for each stage on which replicas run other numbers of microbatches than normally."""
    sentences = []
    for stage, (before, now) in enumerate(zip(normal, owners, strict=True)):
        replicas = sorted({*before, *now})
        counts, usual = ([row.count(r) for r in replicas] for row in (now, before))
        if counts != usual:
            sentences.append(
                f"stage {stage}: replicas {', '.join(map(str, replicas))} run {', '.join(map(str, counts))} "
                f"microbatches instead of {', '.join(map(str, usual))}"
            )
    return sentences
