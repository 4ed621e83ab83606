"""The best fixed order of a setting within a memory, chosen by simulation, and a table with foresight in its place.

Candidates are all named tables, and the orders that bf and bfw come to in that memory where nothing varies. Each is
consumed strictly on several draws; the one whose mean step is the shortest is the best. Left out are tables that keep
two copies of the parameters, which no count of activations shows, and those of slices of sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from experiments.paper import endtoend
from experiments.paper.rows import Cell
from experiments.paper.scene import EQUAL, FORESIGHT, Method, Scene, table_order
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES
from rrfp_jax.core import STRICT, Order
from rrfp_jax.schedules import ScheduleTable, schedule_names
from rrfp_jax.schedules.registry import schedules_of_any_graph
from rrfp_jax.simulation import Costs, Links, Machine, Simulation, peak_memory, simulate

SIZED = ("eager-1f1b", "zb-auto")
"""Names of the tables that are made for a memory."""
FROZEN = ("bf", "bfw")
ROUNDING = 1e-9
Memory = int | str
"""Memory of a stage: a number of microbatches' activations, or :data:`EQUAL`."""


class Run(NamedTuple):
    """Results over the steps of all draws."""

    step_ms: float
    held: tuple[float, ...]
    """Largest memory held on each stage, in activations of a microbatch."""


class Found(NamedTuple):
    """Best orders within a memory."""

    best: str
    """Name of the best fixed order."""
    fixed: Run
    ours: Run
    """Run of the same table with foresight, in that table's memory."""
    roomy: Run
    """Run of the same table with foresight, in all of the memory."""


class Setting:
    """Orders of a pipeline, and draws to run them on."""

    def __init__(
        self,
        num_stages: int,
        tables: Callable[[Memory], Iterator[tuple[str, ScheduleTable]]],
        draws: Sequence[Callable[[Order], Simulation]],
    ) -> None:
        self._num_stages, self._tables, self._draws = num_stages, tables, draws
        self._strict: dict[tuple[object, ...], Run] = {}

    def best(self, memory: Memory) -> Found:
        """Returns the best fixed order that holds no more on any stage, and foresight beside it."""
        limits = range(self._num_stages, 0, -1) if memory == EQUAL else [float(memory)] * self._num_stages
        runs = [(name, table, self._strictly(table)) for name, table in self._tables(memory) if _fits(table, limits)]
        name, table, fixed = min(runs, key=lambda one: one[2].step_ms)
        ours = self._run(table_order(table, FORESIGHT))
        roomy = ours if memory == EQUAL else self._run(table_order(table, FORESIGHT, window=int(memory)))
        return Found(name, fixed, ours, roomy)

    def _strictly(self, table: ScheduleTable) -> Run:
        key = (table.placement, table.orders)
        if key not in self._strict:
            self._strict[key] = self._run(table_order(table, STRICT))
        return self._strict[key]

    def _run(self, order: Order) -> Run:
        makespans_ms, held = [], [0.0] * self._num_stages
        for draw in self._draws:
            timeline = draw(order).timeline
            makespans_ms += [timeline.of_step(step).makespan_s() * 1e3 for step in timeline.steps()]
            held = list(map(max, held, peak_memory(timeline, order.graph, order.placement)))
        return Run(fmean(makespans_ms), tuple(held))


def _has_copies(table: ScheduleTable) -> bool:
    """Returns whether a microbatch passes only some of a stage's chunks, as the others are copies of others."""
    passes = table.graph.passes_per_microbatch
    return any(passes(chunks) < len(chunks) for chunks in table.placement.chunks_of_stage)


def _fits(table: ScheduleTable, limits: Sequence[float]) -> bool:
    peaks = table.peak_activations()
    return all(peak <= limit + ROUNDING for peak, limit in zip(peaks, limits, strict=True))


def of_scene(scene: Scene, seeds: Sequence[int]) -> Setting:
    """Returns the setting of equal stages."""

    def draw(one: Scene) -> Callable[[Order], Simulation]:
        machine = scene.machine("async")
        return lambda order: simulate(order.arbiters(RULES), one.costs(order), machine=machine, num_steps=one.steps)

    return Setting(scene.stages, _Candidates(scene).of, [draw(replace(scene, seed=seed)) for seed in seeds])


class _Candidates:
    """Tables of a scene, without those that do not fit the memory or want other numbers of microbatches."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def of(self, memory: Memory) -> Iterator[tuple[str, ScheduleTable]]:
        yield from self._named.items()
        sized = () if memory == EQUAL else SIZED
        methods = {f"{name}, {memory}": Method({"schedule": name, "consume": STRICT}, memory) for name in sized}
        methods |= {f"{hint}, frozen": Method({"hint": hint}, memory, frozen=STRICT) for hint in FROZEN}
        yield from self._built(methods)

    @cached_property
    def _named(self) -> dict[str, ScheduleTable]:
        methods = {name: Method({"schedule": name, "consume": STRICT}) for name in schedule_names()}
        return {name: table for name, table in self._built(methods) if not (_has_copies(table) or table.graph.passes)}

    def _built(self, methods: dict[str, Method]) -> Iterator[tuple[str, ScheduleTable]]:
        for name, method in methods.items():
            try:
                table = method.order(self._scene).table
            except ValueError:
                continue
            assert table is not None
            yield name, table


def of_model(cell: Cell, seeds: Sequence[int]) -> Setting:
    """Returns the setting of a model with its own cut, as named by a cell of :mod:`experiments.paper.endtoend`."""
    drawn = [endtoend.draw({**cell, "seed": seed}) for seed in seeds]
    machine = Machine(links=Links(latency_ms=float(cell["transfer"]) * endtoend.MEAN_FORWARD_MS))
    stages, microbatches = int(cell["stages"]), int(cell["microbatches"])

    def tables(memory: Memory) -> Iterator[tuple[str, ScheduleTable]]:  # noqa: ARG001
        for name in schedules_of_any_graph():
            words = OrderingOptions(schedule=name, consume=STRICT)
            order = words.resolve(
                num_stages=stages,
                num_microbatches=microbatches,
                placement=drawn[0].placement,
                graph=drawn[0].graph,
            )
            assert order.table is not None
            yield name, order.table

    def draw(one: endtoend.Drawn) -> Callable[[Order], Simulation]:
        costs, steps = Costs(durations_ms=one.durations_ms), len(one.durations_ms)
        return lambda order: simulate(order.arbiters(RULES), costs, machine=machine, num_steps=steps, absent=one.absent)

    return Setting(stages, tables, list(map(draw, drawn)))
