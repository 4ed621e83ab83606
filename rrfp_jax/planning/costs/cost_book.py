"""The costs of a model in every way in which its stages may run: an entry for each, and how to find one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, check_fields
from rrfp_jax.planning.costs.layer_costs import LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.planning.costs.noise import Noise

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class CostEntry:
    """What the layer types cost in one way to run a stage."""

    types: Mapping[str, LayerCosts]
    microbatch_size: int = 1
    """Samples of a microbatch."""
    tensor: int = 1
    """Devices that share every layer."""
    remat: str = NONE
    """What backwards recompute: ``none``, ``dots`` or ``full``."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "microbatch_size", "tensor")

    @property
    def words(self) -> str:
        """For messages."""
        return f"microbatch size {self.microbatch_size}, tensor {self.tensor}, remat {self.remat}"


@dataclass(frozen=True, kw_only=True)
class CostBook:
    """All that planning knows about a model and the machine that it is to run on. Raises ValueError where entries lack
    a layer type, or say two things of one way to run."""

    layers: tuple[str, ...]
    """The type of each layer in order, ends included."""
    entries: tuple[CostEntry, ...]
    ends: frozenset[int] = frozenset()
    """Layers behind which a chunk must end."""
    links: LinkCosts = field(default_factory=LinkCosts)
    noise: Noise = field(default_factory=Noise)
    task_ms: float = 0.0
    """Of every task, whatever it holds."""
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By type, how many times its costs each microbatch takes, where microbatches differ."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axes of every stage's mesh beside ``tensor``, with their sizes: those that all entries are for."""
    tokens_per_sample: float = 0.0
    """0: not known, so that no throughput in tokens is told."""
    device: str = ""
    """What it runs on, in words."""
    device_bytes: int | None = None
    """Memory of a device; None: not known."""
    device_flops: float | None = None
    """Peak operations per second of a device in the dtype that computes; None: not known."""
    source: str = ""
    """Where the costs come from, in words."""

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "device_bytes", "device_flops")
        check_fields(self, NOT_NEGATIVE, "task_ms", "tokens_per_sample")
        if not self.entries:
            raise ValueError("the costs have no entry: give those of at least one microbatch size")
        seen: set[str] = set()
        for entry in self.entries:
            if entry.words in seen:
                raise ValueError(f"two entries are for {entry.words}: leave one out")
            seen.add(entry.words)
            costs = self._model(entry)
            if not any(costs.work_ms(layer, split=True) for layer in range(costs.num_layers)):
                raise ValueError(f"no layer takes any time for {entry.words}: give milliseconds above 0 to some")

    def unit_devices(self, tensor: int) -> int:
        """Of one replica of a stage."""
        return tensor * prod(self.mesh.values())

    def at(self, *, microbatch_size: int, tensor: int = 1, remat: str = NONE) -> ModelCosts:
        """The costs of the model run so; raises ValueError, with those that there are, where no entry says so."""
        for entry in self.entries:
            if (entry.microbatch_size, entry.tensor, entry.remat) == (microbatch_size, tensor, remat):
                return self._model(entry)
        wanted = CostEntry(types={}, microbatch_size=microbatch_size, tensor=tensor, remat=remat).words
        known = "; ".join(entry.words for entry in self.entries)
        raise ValueError(f"no costs are known for {wanted}: take one of {known}, or profile it")

    def _model(self, entry: CostEntry) -> ModelCosts:
        return ModelCosts(
            layers=self.layers,
            types=entry.types,
            ends=self.ends,
            factors=self.factors,
            task_ms=self.task_ms,
            links=self.links,
        )
