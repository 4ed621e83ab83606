"""What planning chooses, what it forecasts of a choice, and the ranking that results."""

from dataclasses import dataclass, field

from rrfp_jax.arbitration import Ordering
from rrfp_jax.costs import CutModel
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.layout import Axes, num_devices


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many devices do what, and what a microbatch is."""

    num_stages: int
    num_microbatches: int
    """Of one replica."""
    data: int = 1
    tensor: int = 1
    mesh: Axes = ()
    """Other axes of a stage's mesh."""
    microbatch_size: int = 1
    """Samples of a microbatch."""
    remat: str = "none"

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.data * self.tensor * num_devices(self.mesh)

    @property
    def batch_size(self) -> int:
        """Samples of a step, over all replicas."""
        return self.microbatch_size * self.num_microbatches * self.data


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a model, as a configuration would say it."""

    shape: Shape
    cut: CutModel
    is_even: bool
    """Whether layers are dealt out evenly, the embedding with the first chunk and the head with the last."""
    ordering: Ordering
    """Schedule (its table, also where it was searched for), consumption, window, footprint, foresight."""
    order_name: str
    """For people: ``zb-h1``, ``searched``, ``bfw``."""
    is_searched: bool = False
    """Whether the table is one that no name stands for."""
    offload: int | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a choice is expected to do. Times are intervals between the ends of steps, in milliseconds."""

    step_ms: float
    """Mean over the draws; without noise that of the only one."""
    p95_ms: float
    sd_ms: float
    """From step to step."""
    error_ms: float
    """Standard error of the mean; 0 without noise."""
    nominal_ms: float
    """Without noise."""
    bound_ms: float
    """What no order of this cut can beat without noise."""
    bubble: float
    """Share of the stages' time in which they are idle, without noise."""
    memory: tuple[StageForecast, ...]
    """Of each stage."""
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Operations of the model over what the devices' peak allows; None: not known."""
    draws_ms: tuple[float, ...] = ()
    """Step times of each draw: of those that nothing was chosen by for the first of a ranking, and a second that came
    close; of those by which they lost for all others."""

    @property
    def gap(self) -> float:
        """How far the step without noise lies above its bound, in parts of the bound."""
        return self.nominal_ms / self.bound_ms - 1

    @property
    def peak_bytes(self) -> int:
        """Of the fullest stage."""
        return max(stage.peak for stage in self.memory)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A choice in its place."""

    choice: Choice
    forecast: Forecast
    why: str = ""
    """Why it lost to the one before it, in words; nothing for the first."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """What does not fit, and the reason."""

    shape: Shape
    reason: str
    change: str = ""
    """The nearest change that makes it fit, in words."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What a change of the machine would give the best choice."""

    change: str
    """``stage 3 10% faster``."""
    step_ms: float
    gain: float
    """In parts of the step time."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search."""

    ranking: tuple[Ranked, ...]
    """The best first; empty where nothing fits."""
    is_decided: bool
    """Whether the first is ahead of the second by more than the standard error of their difference."""
    refused: tuple[Refused, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    bottleneck: str = ""
    """What limits the best choice, in words."""
    even: Ranked | None = None
    """The best named order on an even cut, for comparison."""
    named: Ranked | None = None
    """The best named order on its best cut."""
    judged: tuple[Ranked, ...] = ()
    """All whose step time was forecast, the ranking among them: what a picture of step time against memory shows. Fewer
    draws may stand behind those that lost early."""
    objective: str = "mean"
    """``mean``, ``p95``, or ``mean+Ksd``."""
    evaluations: int = 0
    """Orders whose time was worked out on the way."""
    num_draws: int = 1
    seed: int = 0
    is_complete: bool = True
    """Whether the search came to its end, and was not interrupted."""
    notes: tuple[str, ...] = field(default=())
    """What the reader should know about these figures."""
