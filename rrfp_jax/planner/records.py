"""The records of a plan: shapes, choices, their forecasts, and the ranking that results."""

from dataclasses import dataclass, replace
from functools import cached_property

from rrfp_jax.core import STRICT, Order, Ordering
from rrfp_jax.core.rebalancing import adopted_owners
from rrfp_jax.core.replicas import StepOwners, block_owners, with_owners
from rrfp_jax.costs import CutModel
from rrfp_jax.costs.forecast import StageForecast, forecast_memory
from rrfp_jax.layout import Axes, num_devices
from rrfp_jax.schedules import Placement, looped, waves

LINEAR, LOOPED, WAVES = "linear", "looped", "waves"
MIXED = "by stage"
"""The rematerialisation of shapes in which it differs from stage to stage."""


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """The number of devices along each kind of parallelism, and the size of a microbatch."""

    num_stages: int
    num_microbatches: int
    """Microbatches of one replica."""
    data: int = 1
    """Replicas of the pipeline."""
    tensor: int = 1
    """Devices that share every layer."""
    mesh: Axes = ()
    """Other axes of a stage's mesh."""
    microbatch_size: int = 1
    """Samples of a microbatch."""
    remat: str = "none"
    replicas: tuple[int, ...] = ()
    """Replicas of each stage where they differ, ``data`` of them at most; microbatches go from one to another."""

    @property
    def num_devices(self) -> int:
        units = sum(self.replicas) or self.num_stages * self.data
        return units * self.tensor * num_devices(self.mesh)

    @property
    def batch_size(self) -> int:
        """Samples of a step, over all replicas."""
        return self.microbatch_size * self.num_microbatches * self.data

    @cached_property
    def owners(self) -> StepOwners:
        """The owners of a step's microbatches where stages have different numbers of replicas: the units that stages
        lack take no part, and their others run more."""
        stages, most = self.num_stages, self.data
        units = range(stages * most)
        living = [unit for unit in units if unit // stages < self.replicas[unit % stages]]
        normal = block_owners(stages, self.num_microbatches * most, most)
        return StepOwners(adopted_owners(normal, living), tuple(unit for unit in units if unit not in living))


@dataclass(frozen=True, kw_only=True)
class Point:
    """A shape with a place for each chunk."""

    shape: PlanShape
    family: str
    """:data:`LINEAR`, :data:`LOOPED` or :data:`WAVES`, of which one wave is the V."""
    chunks: int
    """Chunks per stage."""
    order: tuple[int, ...] = ()
    """The number of each stage's group of devices, where devices differ; where numbers of replicas do too, of each of
    its replicas' group, stage by stage."""

    @property
    def placement(self) -> Placement:
        if self.family == WAVES:
            return waves(self.shape.num_stages, self.chunks // 2)
        return looped(self.shape.num_stages, self.chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanChoice:
    """One way to run a model, as a configuration would say it, with the order and the memory that result.

    Choices are equal only to themselves. Raises ValueError, where the order is asked for, if the ordering does not fit
    the cut.
    """

    shape: PlanShape
    cut: CutModel
    is_even: bool
    """Whether layers are dealt out evenly, the embedding with the first chunk and the head with the last."""
    ordering: Ordering
    """Schedule with its table, consumption, window, footprint and foresight."""
    order_name: str
    """Name for people: ``zb-h1``, ``searched``, ``bfw``."""
    is_searched: bool = False
    """Whether the table is one that no name stands for."""

    @cached_property
    def order(self) -> Order:
        """The order that the stages follow."""
        return self.ordering.resolve(self.cut.placement, self.cut.graph)

    @cached_property
    def memory(self) -> tuple[StageForecast, ...]:
        """The memory of each stage."""
        if self.shape.replicas:
            return self._memory_of_replicas
        return tuple(forecast_memory(self.order, dict(enumerate(self.cut.chunk_bytes)), self.cut.num_microbatches))

    @cached_property
    def replicated(self) -> tuple[Order, StepOwners]:
        """The order of all replicas where stages have different numbers of them, and who runs which microbatch."""
        stages, most, given = self.shape.num_stages, self.shape.data, self.shape.replicas
        order = self.ordering.resolve(self.cut.placement, self.cut.graph, num_replicas=most)
        shares = tuple(-(-most // given[unit % stages]) for unit in range(stages * most))
        return order.with_shares(shares, widens=self.ordering.window is None), self.shape.owners

    @property
    def _memory_of_replicas(self) -> tuple[StageForecast, ...]:
        """The memory of a replica of each stage, as a run with such replicas forecasts it."""
        order, owners = self.replicated
        sizes = dict(enumerate(each for each in self.cut.chunk_bytes for _ in range(self.shape.data)))
        run = replace(order, graph=with_owners(order.graph, order.placement, owners))
        numbers = [order.shares[stage] * self.shape.num_microbatches for stage in range(self.shape.num_stages)]
        return tuple(forecast_memory(run, sizes, number)[stage] for stage, number in enumerate(numbers))

    @property
    def is_strict(self) -> bool:
        """Whether the stages keep to a table."""
        return self.ordering.consume == STRICT

    @property
    def remats(self) -> tuple[str, ...]:
        """The rematerialisation of each stage."""
        given = self.shape.remat.split(",")
        own = tuple(stage.remat for stage in self.cut.costs.stages)
        return own or (tuple(given) if given[1:] else (self.shape.remat,) * self.shape.num_stages)

    @property
    def moved_of_stage(self) -> tuple[int, ...]:
        """The number of activations that go to the host and back on each stage, per step and replica."""
        placement, ordering = self.cut.placement, self.ordering
        ops = ordering.schedule.graph.ops if ordering.schedule is not None and ordering.follows_table else ()
        pairs = {pair for op in ops for pair in op.pairs or ()}
        return tuple(sum(chunk in chunks for chunk, _ in pairs) for chunks in placement.chunks_of_stage)

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage by their numbers in the machine; empty where all are alike."""
        return tuple(stage.devices for stage in self.cut.costs.stages if stage.devices)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest stage."""
        return max(stage.peak for stage in self.memory)

    def fits(self, memory_bytes: int | None) -> bool:
        """Returns whether no stage takes more than its device has, ``memory_bytes`` where stages do not differ."""
        limits = self.cut.limits(memory_bytes)
        if set(limits) == {None}:  # a forecast takes long
            return True
        return all(limit is None or stage.peak <= limit for stage, limit in zip(self.memory, limits, strict=True))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected times of a choice: intervals between the ends of steps, in milliseconds."""

    step_ms: float
    """Mean over the draws; without noise the step of the only one."""
    p95_ms: float
    sd_ms: float
    """Standard deviation from step to step."""
    error_ms: float
    """Standard error of the mean; 0 without noise."""
    nominal_ms: float
    """Step time without noise."""
    bound_ms: float
    """Step time without noise that no order of this cut beats."""
    bubble: float
    """Share of the stages' time in which they are idle, without noise."""
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Operations of the model over those that the devices' peak allows; None: not known."""
    draws_ms: tuple[float, ...] = ()
    """Step times of each draw; those that lost early have few."""

    @property
    def gap(self) -> float:
        """Distance of the step without noise from its bound, in parts of the bound."""
        return self.nominal_ms / self.bound_ms - 1


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A choice in its place."""

    choice: PlanChoice
    forecast: Forecast
    why: str = ""
    """The loss to the best and its reason; empty for the first."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A shape that does not fit, and the reason."""

    shape: PlanShape
    reason: str
    change: str = ""
    """The nearest changes that make it fit, in words."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search."""

    ranking: tuple[Ranked, ...]
    """The best first; empty where nothing fits."""
    is_decided: bool
    """Whether the first is ahead of the second by more than the standard error of their difference."""
    refused: tuple[Refused, ...] = ()
    why: tuple[str, ...] = ()
    """Two sentences on why the first won."""
    alternatives: tuple[Ranked, ...] = ()
    """The nearest choices of other kinds, each with the kind, its loss and the reason."""
    even: Ranked | None = None
    """The best named order on an even cut, for comparison."""
    named: Ranked | None = None
    """The best named order on its best cut."""
    num_judged: int = 1
    """Number of choices that were compared, the ranking among them."""
    evaluations: int = 0
    """Orders that were timed on the way."""
    num_draws: int = 1
    notes: tuple[str, ...] = ()
    """Sentences that a reader of these figures should know."""
