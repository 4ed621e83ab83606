"""The outer choices of a plan: how many devices along which axis, which microbatches, where the chunks lie, and which
devices a stage has where these differ.

Devices that share a layer follow each other in the machine. So do those of a stage's replicas, unless stages are
quicker with them dealt out from fast to slow, or sum gradients more quickly with neighbours along quick links.
All orders of the stages' devices are compared where they are few. Otherwise paths along the quickest links, joined end
to end from the quickest one on, are improved by exchanges and reversals. An order is as good as a step of 1F1B on its
best cut, in virtual time.

Where stages have different numbers of replicas, each number of stages has few of them: all where devices are few, else
those with the least work on the fullest stage. A formula then compares the orders of devices (:class:`_Deals`), and the
search simulates the best.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, pairwise
from math import inf, isfinite, prod

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import READY, STRICT
from rrfp_jax.costs import CostBook, DeviceCosts, MachineCosts, ModelCosts
from rrfp_jax.costs.layer_costs import LinkCosts, StageCosts
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.cut_problem import LayerCutProblem, MemoryBudget
from rrfp_jax.planner.judging import WalkEntry, strict_times_ms, walk_of
from rrfp_jax.planner.order_search import built_table
from rrfp_jax.planner.records import LINEAR, LOOPED, MIXED, WAVES, PlanShape, Point, Refused
from rrfp_jax.readable import format_bytes
from rrfp_jax.schedules import ScheduleRequest, linear

CONSUMPTIONS = (STRICT, READY)
_CHUNKS = (1, 2, 4)
"""Chunks per stage, where the user does not say."""
_FEW_ORDERS = 720
"""Orders of devices up to which all are compared."""
_MOST_TASKS = 400_000
"""Tasks that comparing orders of devices may time."""
_MOST_UNITS = 16
"""Replicas of all stages up to which different numbers of them are looked for."""
_FEW_UNITS = 5
"""The same on devices that differ, up to which all numbers are looked at."""
_FEW_DEALT = 120
"""Orders of devices up to which all are compared where stages have different numbers of replicas."""
_MOST_DEALT = 1_000
"""Orders of devices that are compared for a shape at most where they are more."""
_DEALT = 2
"""Orders of devices of such a shape that are judged."""
_SIZES = ("microbatch_sizes", "microbatches", "stages", "data", "tensor", "chunks")


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The devices, the memory, and the ways to run that a search may choose from.

    Raises ValueError for fields that contradict each other.
    """

    devices: int
    """Number of devices, all of which are used."""
    batch_size: int | None = None
    """Samples of a step over all replicas; None: ``microbatches`` says how many microbatches there are."""
    microbatch_sizes: tuple[int, ...] | None = None
    """Samples of a microbatch; None: all for which there are costs."""
    microbatches: tuple[int, ...] | None = None
    """Microbatches of one replica; None: as many as the batch makes."""
    memory_bytes: int | None = None
    """Bytes of a device; None: the number in the costs, and without that no limit."""
    stages: tuple[int, ...] | None = None
    """Numbers of stages; None, here and below: all that divide the devices."""
    data: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    """Chunks per stage; None: 1, 2 and 4."""
    schedules: tuple[str, ...] | None = None
    """Names of schedules and hints; None: all, and a search for orders without a name."""
    consumptions: tuple[str, ...] = CONSUMPTIONS
    remats: tuple[str, ...] | None = None
    """Names of rematerialisation; None: all for which there are costs."""
    unequal: bool = False
    """Whether stages may have different numbers of replicas too."""
    top: int = 5
    """Length of the ranking at most."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "devices", "batch_size", "top")
        check_fields(self, NOT_NEGATIVE, "memory_bytes")
        if self.memory_bytes == 0:
            raise ValueError("devices have no memory: give more than 0 bytes, or leave memory out for no limit")
        for name in _SIZES:
            numbers = getattr(self, name)
            if numbers is not None and (not numbers or min(numbers) < 1):
                raise ValueError(f"{name} is {list(numbers)}: give numbers of at least 1, or leave it out")
        wrong = [word for word in self.consumptions if word not in CONSUMPTIONS]
        if wrong or not self.consumptions:
            raise ValueError(f"consumption {', '.join(wrong) or 'of no kind'} is unknown: give strict, ready or both")
        if self.batch_size is None and self.microbatches is None:
            raise ValueError("neither the batch nor the number of microbatches is given: give one of them")
        if self.batch_size is not None and self.microbatches is not None and self.microbatch_sizes is not None:
            made = {size * count for size in self.microbatch_sizes for count in self.microbatches}
            if not any(self.batch_size % each == 0 for each in made):
                raise ValueError(
                    f"no batch of {self.batch_size} samples comes of microbatches of {list(self.microbatch_sizes)} "
                    f"samples, {list(self.microbatches)} of them: leave one of the three out"
                )
        for name in ("stages", "data", "tensor"):
            numbers = getattr(self, name)
            if self.unequal or numbers is None:
                continue
            if not any(self.devices % number == 0 for number in numbers):
                raise ValueError(
                    f"{self.devices} devices cannot be divided by {name} {', '.join(map(str, numbers))}: give a divisor"
                )


def shapes_of(book: CostBook, space: SearchSpace) -> list[PlanShape]:
    """Returns all shapes that use every device and for which there are costs; raises ValueError where there is none."""
    found = []
    for entry in book.entries:
        is_allowed = (
            _allows(space.microbatch_sizes, entry.microbatch_size)
            and _allows(space.tensor, entry.tensor)
            and _allows(space.remats, entry.remat)
        )
        unit = entry.tensor * prod(book.mesh.values())  # devices of one replica of a stage
        if not is_allowed or space.devices % unit:
            continue
        units = space.devices // unit
        ways: list[tuple[int, int, tuple[int, ...]]] = [
            (number, units // number, ()) for number in range(1, units + 1) if units % number == 0
        ]
        if space.unequal and units <= _MOST_UNITS:
            works_ms = np.array([entry.types[name].work_ms(split=True) for name in book.layers])
            ways += [
                (len(each), max(each), each)
                for each in _unequal_replicas(works_ms, book.machine, units)
                if min(each) < max(each)
            ]
        for stages, data, replicas in ways:
            if not (_allows(space.stages, stages) and _allows(space.data, data)):
                continue
            counts, samples = list(space.microbatches or ()), entry.microbatch_size * data
            if space.batch_size is not None:
                count = space.batch_size // samples
                counts = [count] if not space.batch_size % samples and _allows(space.microbatches, count) else []
            found += [
                PlanShape(
                    num_stages=stages,
                    num_microbatches=count,
                    data=data,
                    tensor=entry.tensor,
                    mesh=tuple(book.mesh.items()),
                    microbatch_size=entry.microbatch_size,
                    remat=entry.remat,
                    replicas=replicas,
                )
                for count in counts
            ]
    if not found:
        known = "; ".join(entry.setting.words for entry in book.entries)
        names = ("stages", "data", "tensor", "microbatch_sizes", "microbatches", "remats")
        asked = {name: getattr(space, name) for name in names}
        said = ", ".join(f"{name} {list(value)}" for name, value in asked.items() if value is not None)
        batch = "" if space.batch_size is None else f" and a batch of {space.batch_size}"
        axes = "stages x data x tensor" + "".join(f" x {axis} {size}" for axis, size in book.mesh.items())
        raise ValueError(
            f"no {axes} make {space.devices} devices{batch} with {said or 'nothing else'} allowed, and costs for "
            f"{known}: allow more, or give costs of other microbatch sizes or tensor"
        )
    return found


def _unequal_replicas(
    work_ms: NDArray[np.float64], machine: MachineCosts | None, units: int
) -> Iterator[tuple[int, ...]]:
    """Yields numbers of replicas of each stage: all where devices differ and are few, else those with which the
    fullest stage has least work, with the devices in turn, from the quickest one on, and from the slowest one on."""
    if machine is None:
        yield from _replica_counts(work_ms, [1.0] * units)
    elif units <= _FEW_UNITS:
        most = min(units - 1, len(work_ms))
        for ends in (ends for number in range(1, most) for ends in combinations(range(1, units), number)):
            yield tuple(stop - start for start, stop in pairwise((0, *ends, units)))
    else:
        speeds = _speeds(machine, units)
        orders = (speeds, sorted(speeds), sorted(speeds, reverse=True), [1.0] * units)
        yield from dict.fromkeys(each for order in orders for each in _replica_counts(work_ms, order))


def _speeds(machine: MachineCosts, units: int) -> list[float]:
    """Returns the speeds of so many groups of devices that follow each other, each that of its slowest."""
    size = len(machine.devices) // units
    return [min(device.speed for device in machine.devices[at : at + size]) for at in range(0, units * size, size)]


def _replica_counts(work_ms: NDArray[np.float64], speeds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Yields for each number of stages the replicas of each with which the fullest one has least work, where stages
    take devices of these speeds in turn and the slowest counts: a dynamic programme over layers and devices, as
    PipeDream's (arXiv 1806.03377)."""
    units = len(speeds)
    ends = np.concatenate([[0.0], work_ms.cumsum()])
    own_ms = ends[None, :] - ends[:, None]
    own_ms[np.tril_indices(len(ends))] = inf
    best = {(0, 0): np.where(np.arange(len(ends)) == 0, -inf, inf)}
    last = dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]]()
    for stages in range(1, min(units, len(work_ms) + 1)):
        for used in range(stages, units + 1):
            before = [
                (number, best[stages - 1, used - number])
                for number in range(1, used + 1)
                if (stages - 1, used - number) in best
            ]
            if not before:
                continue
            ways = np.stack(
                [
                    np.maximum(ms[:, None], own_ms / (number * min(speeds[used - number : used])))
                    for number, ms in before
                ]
            )
            flat = ways.reshape(-1, len(ends))
            chosen = flat.argmin(axis=0)
            best[stages, used] = flat.min(axis=0)
            last[stages, used] = (np.array([number for number, _ in before])[chosen // len(ends)], chosen % len(ends))
        if (stages, units) in best and isfinite(best[stages, units][-1]):
            replicas, used, at = [], units, len(ends) - 1
            for left in range(stages, 0, -1):
                numbers, starts = last[left, used]
                replicas.append(int(numbers[at]))
                used, at = used - int(numbers[at]), int(starts[at])
            yield tuple(reversed(replicas))


def points_of(shape: PlanShape, book: CostBook, space: SearchSpace) -> Iterator[Point]:
    """Yields the placements for which the model has layers enough."""
    if shape.num_stages == 1:
        choices = [(LINEAR, 1)] if _allows(space.chunks, 1) else []
    else:
        choices = [
            (family, chunks)
            for chunks in space.chunks or _CHUNKS
            for family in ([LINEAR] if chunks == 1 else [LOOPED] if chunks % 2 else [WAVES, LOOPED])
        ]
    for family, chunks in choices:
        num_chunks = chunks * shape.num_stages
        if len(book.ends) < num_chunks <= len(book.layers):
            yield Point(shape=shape, family=family, chunks=chunks)


def refused_without_points(shape: PlanShape, book: CostBook) -> Refused:
    """Returns the refusal of a shape that has no placement."""
    if shape.num_stages > len(book.layers):
        reason = f"{shape.num_stages} stages are more than the {len(book.layers)} layers there are"
        return Refused(shape=shape, reason=reason, change=f"at most {len(book.layers)} stages")
    if shape.num_stages <= len(book.ends):
        reason = f"{len(book.ends) + 1} chunks at least, as cuts must lie behind {len(book.ends)} layers"
        return Refused(shape=shape, reason=reason, change=f"at least {len(book.ends) + 1} stages, or chunks per stage")
    return Refused(shape=shape, reason="no number of chunks per stage that is allowed fits the layers")


def _allows(numbers: tuple[int, ...] | tuple[str, ...] | None, number: int | str) -> bool:
    return numbers is None or number in numbers


# -- devices -----------------------------------------------------------------------------------------------------------


def check_machine(book: CostBook, space: SearchSpace) -> None:
    """Raises ValueError where the machine has another number of devices, or a device has no room for any layer."""
    if book.machine is None:
        return
    devices = book.machine.devices
    if len(devices) != space.devices:
        raise ValueError(
            f"the machine has {len(devices)} devices, and {space.devices} are asked for: give --devices {len(devices)},"
            " or a machine of as many"
        )
    least = min(
        each.fixed_bytes + each.stash_bytes + each.temporaries_bytes
        for entry in book.entries
        for each in (entry.types[name] for name in book.layers)
    )
    for number, device in enumerate(devices):
        limit = _limit(device, book, space)
        if limit is not None and limit < least:
            name = f" ({device.name})" if device.name else ""
            raise ValueError(
                f"device {number}{name} has {format_bytes(limit)}, and one layer needs {format_bytes(least)} at least: "
                "leave it out, or make microbatches smaller"
            )


def _limit(device: DeviceCosts, book: CostBook, space: SearchSpace) -> int | None:
    """Returns the bytes of a device that may be used: its own, and no more than the space allows."""
    if device.bytes is None:
        return space.memory_bytes or book.device_bytes
    return min(device.bytes, space.memory_bytes or device.bytes)


@dataclass
class PointCosts:
    """The costs of points, on the devices that their stages have."""

    book: CostBook
    space: SearchSpace
    _groups: dict[PlanShape, tuple[StageCosts, ...]] = field(default_factory=dict)
    _orders: dict[PlanShape, list[tuple[int, ...]]] = field(default_factory=dict)
    _deals: dict[PlanShape, "_Deals"] = field(default_factory=dict)

    def of(self, point: Point) -> ModelCosts:
        """Returns the costs of a point's layers; where stages may recompute differently, those of the quickest way."""
        return self._placed(point, self.remats(point.shape)[0])

    def others(self, point: Point) -> list[ModelCosts]:
        """Returns the costs of the other ways to recompute, of which stages may take some; none where all are alike."""
        return [self._placed(point, remat) for remat in self.remats(point.shape)[1:]]

    def remats(self, shape: PlanShape) -> list[str]:
        """Returns the ways to recompute that a stage of the shape may take, the quickest first."""
        if shape.remat != MIXED:
            return [shape.remat]
        work_ms = {
            entry.remat: sum(entry.types[name].work_ms(split=True) for name in self.book.layers)
            for entry in self.book.entries
            if (entry.microbatch_size, entry.tensor) == (shape.microbatch_size, shape.tensor)
            and _allows(self.space.remats, entry.remat)
        }
        return sorted(work_ms, key=work_ms.__getitem__)

    def orders(self, shape: PlanShape) -> list[tuple[int, ...]]:
        """Returns the best order of the stages' devices, and the order in which they are given."""
        if self.book.machine is None:
            return [()]
        if shape not in self._orders:
            given = tuple(range(sum(shape.replicas) or shape.num_stages))
            if shape.replicas:
                best = self.deals(shape).best_orders()
            else:
                best = [given if shape.num_stages == 1 else self._best_order(shape)]
            self._orders[shape] = list(dict.fromkeys((*best, given)))
        return self._orders[shape]

    def deals(self, shape: PlanShape) -> "_Deals":
        """Returns the ways to deal out devices that differ to stages with different numbers of replicas; raises
        ValueError where no cut has so many chunks."""
        assert self.book.machine is not None
        if shape not in self._deals:
            limits = [_limit(device, self.book, self.space) for device in self.book.machine.devices]
            costs = self.book.at(
                microbatch_size=shape.microbatch_size, tensor=shape.tensor, remat=self.remats(shape)[0]
            )
            self._deals[shape] = _Deals(shape, costs, self.book.machine, limits)
        return self._deals[shape]

    def _placed(self, point: Point, remat: str) -> ModelCosts:
        shape, book = point.shape, self.book
        costs = book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor, remat=remat)
        if book.machine is None and shape.remat != MIXED:
            return costs
        order = tuple(range(shape.num_stages))
        if shape.replicas and book.machine is not None:
            groups = self.deals(shape).stages(point.order)
        else:
            groups, order = self._groups_of(shape), point.order or order
        scaled = {
            speed: {name: each.at_speed(speed) for name, each in costs.types.items()}
            for speed in {group.speed for group in groups}
        }
        stages = tuple(
            replace(
                groups[group],
                types=scaled[groups[group].speed],
                links=tuple(groups[group].links[other] for other in order),
                remat=remat,
            )
            for group in order
        )
        return replace(costs, stages=stages)

    def _groups_of(self, shape: PlanShape) -> tuple[StageCosts, ...]:
        """Returns the devices of the stages, in the order in which they are given, without the costs of layers."""
        if shape not in self._groups:
            machine, p = self.book.machine, shape.num_stages
            if machine is None:
                alike = StageCosts(
                    types={}, links=(self.book.links,) * p, limit=_limit(DeviceCosts(), self.book, self.space)
                )
                self._groups[shape] = (alike,) * p
                return self._groups[shape]
            limits = [_limit(device, self.book, self.space) for device in machine.devices]
            speeds, devices = [device.speed for device in machine.devices], self._dealt(shape, machine)
            self._groups[shape] = tuple(
                StageCosts(
                    types={},
                    links=tuple(machine.link(here, there, self.book.links) for there in devices),
                    limit=min((limit for n in here if (limit := limits[n]) is not None), default=None),
                    speed=min(speeds[n] for n in here),
                    devices=here,
                )
                for here in devices
            )
        return self._groups[shape]

    def _dealt(self, shape: PlanShape, machine: MachineCosts) -> list[tuple[int, ...]]:
        """Returns the devices of each stage: of ways to deal them the one whose slowest devices are quickest together,
        and among such the one whose replicas sum gradients most quickly."""
        links, size = self.book.links, shape.num_devices // (shape.num_stages * shape.data)
        units = [tuple(range(first, first + size)) for first in range(0, shape.num_devices, size)]
        speeds = [min(machine.devices[number].speed for number in unit) for unit in units]
        ways = [list(range(len(units))), sorted(range(len(units)), key=lambda unit: -speeds[unit])]
        layers = [self.book.entries[0].types[name] for name in self.book.layers]
        num_bytes = sum(layer.gradient_bytes for layer in layers) / shape.num_stages
        if shape.data > 1:
            ways.append(_joined([[machine.link(a, b, links).transfer_ms(num_bytes) for b in units] for a in units]))

        def in_groups(way: list[int]) -> list[list[int]]:
            return [way[first : first + shape.data] for first in range(0, len(way), shape.data)]

        def worth(way: list[int]) -> tuple[float, float]:
            groups = in_groups(way)
            devices = [sum((units[unit] for unit in group), ()) for group in groups]
            sums_ms = [machine.link(here, here, links).sum_ms(num_bytes, shape.data) for here in devices]
            return round(sum(min(speeds[unit] for unit in group) for group in groups), 9), -round(sum(sums_ms), 9)

        return [sum((units[unit] for unit in group), ()) for group in in_groups(max(ways, key=worth))]

    # -- orders of devices ---------------------------------------------------------------------------------------------

    def _best_order(self, shape: PlanShape) -> tuple[int, ...]:
        groups, p = self._groups_of(shape), shape.num_stages
        entry = self.book.entries[0]
        num_bytes = max(entry.types[name].output_bytes for name in self.book.layers)
        sent = num_bytes * shape.microbatch_size / entry.microbatch_size
        far = [
            [here.links[b].transfer_ms(sent) + groups[b].links[a].transfer_ms(sent) for b in range(p)]
            for a, here in enumerate(groups)
        ]

        def are_alike(a: int, b: int) -> bool:
            same = (groups[a].speed, groups[a].limit) == (groups[b].speed, groups[b].limit)
            return same and all(far[a][c] == far[b][c] for c in range(p) if c not in (a, b))

        kinds = [next(b for b in range(p) if are_alike(a, b)) for a in range(p)]
        few_microbatches = replace(shape, num_microbatches=min(shape.num_microbatches, 2 * p))
        further = shape.num_microbatches - few_microbatches.num_microbatches
        walk = walk_of(
            built_table("1f1b", ScheduleRequest(num_stages=p, num_microbatches=few_microbatches.num_microbatches))
        )
        known = dict[tuple[int, ...], tuple[float, float]]()

        def worth(order: tuple[int, ...]) -> tuple[float, float]:
            """The step, and of equal steps all messages along the line."""
            if order not in known:
                groups_of_stages = numbered(order)
                step_ms = self._step_ms(few_microbatches, groups_of_stages, walk, further)
                known[order] = round(step_ms, 9), round(sum(far[a][b] for a, b in pairwise(groups_of_stages)), 9)
            return known[order]

        def numbered(order: tuple[int, ...]) -> tuple[int, ...]:
            left = {kind: iter([group for group in range(p) if kinds[group] == kind]) for kind in kinds}
            return tuple(next(left[kind]) for kind in order)

        few = list(islice(_arrangements(Counter(kinds)), _FEW_ORDERS + 1))
        if len(few) <= _FEW_ORDERS:
            return numbered(min((tuple(kinds), *few), key=worth))
        path = [kinds[group] for group in _joined(far)]
        turned = [(*each[at:], *each[:at]) for each in (path, path[::-1]) for at in range(p)]
        starts = sorted({tuple(kinds), *turned}, key=worth)
        found = [_exchanged(start, worth, lambda: len(known) * len(walk) < _MOST_TASKS) for start in starts]
        return numbered(min(found, key=worth))

    def _step_ms(self, shape: PlanShape, order: tuple[int, ...], walk: Sequence[WalkEntry], further: int) -> float:
        """Returns a step of 1F1B on the best cut for an order of devices, with so many further microbatches at the pace
        of the fullest stage; infinite where nothing fits."""
        point = Point(shape=shape, family=LINEAR, chunks=1, order=order)
        costs, p, m = self.of(point), shape.num_stages, shape.num_microbatches
        limits = tuple(stage.limit for stage in costs.stages)
        held = tuple(float(min(p - stage, m)) for stage in range(p))
        memory = None if limits == (None,) * p else MemoryBudget(limits=limits, held=held)
        try:
            cut = best_cut(
                costs, point.placement, m, split=False, memory=memory, replicas=shape.data, others=self.others(point)
            )
        except ValueError:
            return inf
        step_ms = float(strict_times_ms(cut, walk, cut.durations_ms)[0])
        return step_ms + max(cut.stage_work_ms) / m * further


class _Deals:
    """The ways to deal out the devices of a machine to stages with different numbers of replicas.

    A stage's pace is that of the replica that has most to do for its speed: microbatches are dealt out evenly, as a run
    does. A way to deal them is as good as the least step of any cut in a line of whole backwards, where a stage waits
    for one microbatch in the stages before it, works on all of its own, sums up gradients and updates.
    """

    def __init__(
        self, shape: PlanShape, costs: ModelCosts, machine: MachineCosts, limits: Sequence[int | None]
    ) -> None:
        self.shape, self.costs, self.machine = shape, costs, machine
        number, size = sum(shape.replicas), shape.num_devices // sum(shape.replicas)
        self.units = [tuple(range(first, first + size)) for first in range(0, number * size, size)]
        self.speeds = _speeds(machine, number)
        self.limits = [
            min((each for n in unit if (each := limits[n]) is not None), default=None) for unit in self.units
        ]
        self.links = [[machine.link(a, b, costs.links) for b in self.units] for a in self.units]
        rows = shape.owners.owners
        self.met = [sorted(set(zip(*pair, strict=True))) for pair in pairwise(rows)]
        """The replicas of each stage and the next one that exchange microbatches."""
        self.numbers = [[row.count(r) for r in range(each)] for row, each in zip(rows, shape.replicas, strict=True)]
        """The microbatches of each replica of each stage."""
        problem = LayerCutProblem(
            costs=costs, placement=linear(shape.num_stages), num_microbatches=shape.num_microbatches, split=False
        )
        self._work_ms = problem.work_ms[0] + problem.overhead_ms
        layers = [costs.of(layer) for layer in range(costs.num_layers)]
        self._update_ms, self._gradient_bytes = (
            ends[None, :] - ends[:, None]
            for ends in (
                np.concatenate([[0.0], np.cumsum([getattr(layer, name) for layer in layers])])
                for name in ("update_ms", "gradient_bytes")
            )
        )
        self._sent_bytes = np.array([0.0, *(layer.output_bytes for layer in layers)])
        self._sizes = problem.bytes_of_chunks[0] if any(limit is not None for limit in self.limits) else None
        self.held = 1
        """Microbatches for which a stage needs memory, for each replica that it stands for."""
        self._known = dict[tuple[int, ...], tuple[float, float, tuple[int, ...]]]()

    def dealt(self, order: Sequence[int]) -> list[list[int]]:
        """Returns the units of each stage."""
        turn = iter(order)
        return [list(islice(turn, number)) for number in self.shape.replicas]

    def stages(self, order: Sequence[int]) -> tuple[StageCosts, ...]:
        """Returns the devices of the stages without the costs of layers."""
        dealt, found = self.dealt(order), list[StageCosts]()
        for stage, units in enumerate(dealt):
            pairs = tuple(
                tuple(tuple(self.links[a][b] for b in others) for a in units) if abs(stage - other) == 1 else ()
                for other, others in enumerate(dealt)
            )
            limits = [limit for unit in units if (limit := self.limits[unit]) is not None]
            found.append(
                StageCosts(
                    types={},
                    links=tuple(self._link(dealt, stage, other) for other in range(len(dealt))),
                    limit=min(limits, default=None),
                    speed=min(self.speeds[unit] for unit in units),
                    devices=sum((self.units[unit] for unit in units), ()),
                    speeds=tuple(self.speeds[unit] for unit in units),
                    pairs=pairs,
                )
            )
        return tuple(found)

    def _link(self, dealt: list[list[int]], stage: int, other: int) -> LinkCosts:
        """Returns the slowest link of the pairs that exchange: of neighbours those whose microbatches pass, of a stage
        all its replicas."""
        here, there = dealt[stage], dealt[other]
        if abs(stage - other) == 1:
            met = self.met[min(stage, other)]
            used = [self.links[here[r]][there[q]] for r, q in (met if stage < other else [pair[::-1] for pair in met])]
        else:
            used = [self.links[a][b] for a in here for b in there if a != b]
        if not used:
            return self.costs.links
        rates = [link.gb_per_s for link in used if link.gb_per_s is not None]
        latency_ms = max(link.latency_ms for link in used)
        return replace(used[0], latency_ms=latency_ms, gb_per_s=min(rates, default=None))

    def step_ms(self, order: tuple[int, ...]) -> float:
        """Returns the least step of any cut, roughly; infinite where none fits."""
        return self._found(order)[0]

    def counts(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the layers of each chunk of that cut."""
        return self._found(order)[2]

    def _found(self, order: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        """Returns the step, the time of one microbatch, and the layers of each chunk of the cut of the least step."""
        if order not in self._known:
            self._known[order] = self._least(self.dealt(order))
        return self._known[order]

    def _least(self, dealt: list[list[int]]) -> tuple[float, float, tuple[int, ...]]:
        places = np.arange(len(self._sent_bytes))
        best_ms, before_ms = np.where(places == 0, 0.0, inf), np.zeros(len(places))
        firsts = list[NDArray[np.int64]]()
        for stage, units in enumerate(dealt):
            speeds = [self.speeds[unit] for unit in units]
            pace = max(number / speed for number, speed in zip(self.numbers[stage], speeds, strict=True))
            if stage:
                for way in ((stage - 1, stage), (stage, stage - 1)):
                    link = self._link(dealt, *way)
                    before_ms = before_ms + link.latency_ms + self._sent_bytes * (link.transfer_ms(1) - link.latency_ms)
            own_ms = before_ms[:, None] + self._work_ms * pace + self._update_ms / min(speeds)
            if len(units) > 1:
                within = self._link(dealt, stage, stage)
                least_ms = 2 * (len(units) - 1) * within.latency_ms
                own_ms += np.where(self._gradient_bytes > 0, least_ms, 0.0)
                own_ms += self._gradient_bytes * (within.sum_ms(1, len(units)) - least_ms)
            if self._sizes is not None:
                own_ms[self._needed_bytes(stage) > self._limit(units)] = inf
            ends_ms = np.maximum(best_ms[:, None], own_ms)
            firsts.append(ends_ms.argmin(axis=0))
            best_ms = ends_ms[firsts[-1], places]
            before_ms = before_ms[firsts[-1]] + self._work_ms[firsts[-1], places] / min(speeds)
        counts, stop = list[int](), len(places) - 1
        for first in reversed(firsts):
            counts.append(stop - int(first[stop]))
            stop = int(first[stop])
        return round(float(best_ms[-1]), 9), round(float(before_ms[-1]), 9), tuple(reversed(counts))

    def _limit(self, units: Sequence[int]) -> float:
        return min(inf if (limit := self.limits[unit]) is None else limit for unit in units)

    def _needed_bytes(self, stage: int) -> NDArray[np.float64]:
        """Returns the bytes of every chunk with the microbatches that are held [first, behind last]."""
        sizes, shape = self._sizes, self.shape
        assert sizes is not None
        held = self.held * -(-shape.data // shape.replicas[stage])
        needed: NDArray[np.float64] = sizes.fixed + held * (sizes.inputs[:, None] + sizes.more) + sizes.peak
        return needed

    def quick_ms(self) -> float:
        """Returns the step in the best of a few orders of the devices."""
        return min(map(self.step_ms, self._starts()))

    def _starts(self) -> list[tuple[int, ...]]:
        """Returns orders to begin with: as given, from the slowest or quickest device on, and along quick links."""
        sent, units = float(self._sent_bytes.max()), range(len(self.units))
        path = _joined([[link.transfer_ms(sent) for link in row] for row in self.links])
        by_speed = sorted(units, key=lambda unit: self.speeds[unit])
        return [tuple(units), *(tuple(each[::turn]) for each in (by_speed, path) for turn in (1, -1))]

    def best_orders(self) -> list[tuple[int, ...]]:
        """Returns the best orders of the devices."""
        number = len(self.units)

        def are_alike(a: int, b: int) -> bool:
            same = (self.speeds[a], self.limits[a]) == (self.speeds[b], self.limits[b])
            return same and all(
                self.links[a][c] == self.links[b][c] and self.links[c][a] == self.links[c][b]
                for c in range(number)
                if c not in (a, b)
            )

        kinds = [next(b for b in range(number) if are_alike(a, b)) for a in range(number)]

        def numbered(order: tuple[int, ...]) -> tuple[int, ...]:
            left = {kind: iter([unit for unit in range(number) if kinds[unit] == kind]) for kind in kinds}
            return tuple(next(left[kind]) for kind in order)

        def worth(order: tuple[int, ...]) -> tuple[float, float]:
            return self._found(numbered(order))[:2]

        for held in sorted({1, min(self.shape.num_stages, self.shape.num_microbatches)}, reverse=True):
            self.held = held
            self._known.clear()
            few = list(islice(_arrangements(Counter(kinds)), _FEW_DEALT + 1))
            if len(few) > _FEW_DEALT:
                starts = dict.fromkeys(tuple(kinds[unit] for unit in start) for start in self._starts())
                few = [_exchanged(start, worth, lambda: len(self._known) < _MOST_DEALT) for start in starts]
            found = sorted(dict.fromkeys(few), key=worth)
            if worth(found[0])[0] < inf:
                break
        return [numbered(order) for order in found[:_DEALT]]


def _exchanged(
    best: tuple[int, ...], worth: Callable[[tuple[int, ...]], tuple[float, float]], goes_on: Callable[[], bool]
) -> tuple[int, ...]:
    """Returns the order to which exchanges, reversals and shifts of a part lead, as long as one helps."""
    is_better = True
    while is_better:
        is_better = False
        for first, last in combinations(range(len(best)), 2):
            before, part, behind = best[:first], best[first : last + 1], best[last + 1 :]
            swapped = (*part[-1:], *part[1:-1], *part[:1])
            for other in (swapped, part[::-1], (*part[1:], *part[:1]), (*part[-1:], *part[:-1])):
                order = (*before, *other, *behind)
                if goes_on() and worth(order) < worth(best):
                    best, is_better = order, True
    return best


def _arrangements(left: "Counter[int]") -> Iterator[tuple[int, ...]]:
    """Yields all distinct orders of some numbers."""
    if not left.total():
        yield ()
    for number in [number for number in left if left[number]]:
        for rest in _arrangements(left - Counter([number])):
            yield number, *rest


def _joined(far: Sequence[Sequence[float]]) -> list[int]:
    """Returns all places as one path, joined from its pieces by the shortest ways between their ends."""
    pieces = [[place] for place in range(len(far))]
    while len(pieces) > 1:
        ends = [
            (far[a][b], one, a, other, b)
            for (one, x), (other, y) in combinations(enumerate(pieces), 2)
            for a in {x[0], x[-1]}
            for b in {y[0], y[-1]}
        ]
        _, one, a, other, b = min(ends)
        left = pieces[one] if pieces[one][-1] == a else pieces[one][::-1]
        right = pieces[other] if pieces[other][0] == b else pieces[other][::-1]
        pieces = [piece for place, piece in enumerate(pieces) if place not in (one, other)] + [left + right]
    return pieces[0]
