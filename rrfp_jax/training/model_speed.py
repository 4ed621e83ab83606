"""How fast a run is for its devices: operations of the model per second, and which part of the peak that is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from rrfp_jax.costs.devices import peak_flops
from rrfp_jax.data.contents import BatchContents

if TYPE_CHECKING:
    import jax


class StepSpeed(NamedTuple):
    """Of one step; None where it is not known."""

    tokens_per_s_per_device: float | None = None
    model_flops: float | None = None
    model_tflops_per_device: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpeed:
    """What the speed of a run is measured by."""

    flops: Callable[[BatchContents], float]
    """What the model needs for a step (:mod:`rrfp_jax.costs.flops`)."""
    num_devices: int
    """Of the whole run; each counts once, however many stages share it."""
    peak_flops: float | None
    """Operations per second of all of them in bfloat16; None where that of some kind is not known, as of CPUs."""

    @classmethod
    def on(cls, devices: "Iterable[jax.Device]", flops: Callable[[BatchContents], float]) -> Self:
        """On these devices, those that are named twice counted once."""
        kinds = [device.device_kind for device in {*devices}]
        peaks = [peak for kind in kinds if (peak := peak_flops(kind)) is not None]
        return cls(flops=flops, num_devices=len(kinds), peak_flops=sum(peaks) if len(peaks) == len(kinds) else None)

    def of_step(self, contents: BatchContents, *, weight: float, step_time_s: float) -> StepSpeed:
        """Of a step whose loss has this weight."""
        flops = self.flops(contents)
        return StepSpeed(
            tokens_per_s_per_device=weight / step_time_s / self.num_devices,
            model_flops=flops,
            model_tflops_per_device=flops / step_time_s / self.num_devices / 1e12,
            mfu=None if self.peak_flops is None else flops / (step_time_s * self.peak_flops),
        )
