"""Simulated or emulated settings, and the methods that are compared in them: an order, and the memory it may hold."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from experiments.paper.rows import Cell, Value
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES, parse_jitter
from rrfp_jax.core import READY, STRICT, Order, Ordering
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import (
    Communication,
    Costs,
    Links,
    Machine,
    both_directions,
    constant,
    for_steps,
    peak_memory,
    simulate,
)

NO_JITTER, SLOW_LINK, SLOW_STAGE = "none", "slow link", "slow stage"
FORESIGHT = "foresight"
SLOW_LINK_PARTS = 3.0
"""Time that the link in the middle adds, in forwards."""
SLOW_STAGE_FACTOR = 1.3
"""Factor on the duration of every task of the stage in the middle."""
EQUAL = "equal"
"""Memory of strict 1F1B: ``p - s`` microbatches on stage s."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Stages, work, links and noise. Durations are those of a whole stage, in milliseconds."""

    stages: int
    microbatches: int
    jitter: str = NO_JITTER
    """Noise: ``none``, ``slow link``, ``slow stage``, or a value as for ``--jitter`` of simulate."""
    comm_ms: float = 1.0
    forward_ms: float = 10.0
    input_ms: float = 10.0
    weight_ms: float = 10.0
    steps: int = 8
    seed: int = 1

    @classmethod
    def of(cls, cell: Cell) -> "Scene":
        """Returns the scene whose fields are among the settings of a cell."""
        return cls(**{name: cell[name] for name in cls.__dataclass_fields__ if name in cell})  # type: ignore[arg-type]

    def as_cell(self) -> dict[str, Value]:
        return asdict(self)

    def machine(self, communication: str) -> Machine:
        middle = (self.stages // 2 - 1, self.stages // 2)
        slow = self.jitter == SLOW_LINK
        extra = both_directions({middle: SLOW_LINK_PARTS * self.forward_ms}, self.stages) if slow else {}
        return Machine(links=Links(latency_ms=self.comm_ms, extra_ms=extra), communication=Communication(communication))

    def costs(self, order: Order) -> Costs:
        """Returns the same draws for every order with so many chunks."""
        per_chunk = self.stages / order.placement.num_chunks
        whole = (self.forward_ms, self.input_ms, self.weight_ms)
        quiet_ms = constant((whole[0] * per_chunk, whole[1] * per_chunk, whole[2] * per_chunk), order.graph)
        text = None if self.jitter in (NO_JITTER, SLOW_LINK) else self.jitter
        if text == SLOW_STAGE:
            text = f"straggler:{self.stages // 2},{SLOW_STAGE_FACTOR}"
        rng = np.random.default_rng((self.seed, *map(ord, self.jitter)))
        durations_ms, sleeps = parse_jitter(text)(for_steps(quiet_ms, self.steps), order.placement, rng)
        return Costs(durations_ms=durations_ms, sleeps=sleeps)


class Method(NamedTuple):
    """An order, the memory it may hold, and how tensors travel."""

    words: Mapping[str, Any]
    """Fields of :class:`rrfp_jax.commands.common.ordering.OrderingOptions`, without the window."""
    holds: int | str | None = None
    """Memory: a window, or :data:`EQUAL`; None: as much as the order itself says."""
    communication: str = "async"
    frozen: str | None = None
    """Use of the table that the words' order becomes where nothing varies: consumed ``strict``, or as a hint within its
    memory with ``foresight``. None: the order runs as it is."""

    def order(self, scene: Scene) -> Order:
        words = dict(self.words)
        if self.holds is not None:
            equal = tuple(range(scene.stages, 0, -1))
            words["window"] = equal if self.holds == EQUAL else min(int(self.holds), scene.microbatches)
        resolved = OrderingOptions(**words).resolve(
            num_stages=scene.stages,
            num_microbatches=scene.microbatches,
            durations_ms=(scene.forward_ms, scene.input_ms, scene.weight_ms),
            comm_ms=scene.comm_ms,
        )
        return resolved if self.frozen is None else table_order(_quiet_table(resolved, scene), self.frozen)


class Simulated(NamedTuple):
    """Means over the simulated steps."""

    step_ms: float
    peak: float
    """Most microbatches' activations that a stage held."""
    above_1f1b: float
    """Most activations by which a stage exceeded strict 1F1B; 0 or less: within its memory."""


def simulated(scene: Scene, method: Method) -> Simulated:
    """Runs a method in virtual time; the first step, in which averages are learnt, counts too."""
    order = method.order(scene)
    costs, machine = scene.costs(order), scene.machine(method.communication)
    run = simulate(order.arbiters(RULES), costs, machine=machine, num_steps=scene.steps)
    makespans_ms = [run.timeline.of_step(step).makespan_s() * 1e3 for step in range(scene.steps)]
    held = peak_memory(run.timeline, order.graph, order.placement)
    return Simulated(fmean(makespans_ms), max(held), peaks_above_1f1b(run.timeline, order))


def peaks_above_1f1b(timeline: Timeline, order: Order) -> float:
    """Returns the most activations by which a stage exceeded strict 1F1B; 0 or less: none did."""
    held = peak_memory(timeline, order.graph, order.placement)
    return max(each - (len(held) - stage) for stage, each in enumerate(held))


def _quiet_table(order: Order, scene: Scene) -> ScheduleTable:
    """Returns the table of an order that a hint makes where nothing varies."""
    quiet = Scene(**(asdict(scene) | {"jitter": NO_JITTER, "steps": 1}))
    run = simulate(order.arbiters(RULES), quiet.costs(order), machine=quiet.machine("async"))
    orders = run.timeline.order()
    return ScheduleTable.from_orders(f"{order.label}, frozen", order.placement, order.graph, orders).validate()


def table_order(table: ScheduleTable, use: str, *, window: int | None = None) -> Order:
    """Returns a table consumed ``strict``, or as a hint with ``foresight``, in its own memory or in a window."""
    consume = STRICT if use == STRICT else READY
    ordering = Ordering(schedule=table, consume=consume, window=window)
    return ordering.resolve(table.placement, table.graph)
