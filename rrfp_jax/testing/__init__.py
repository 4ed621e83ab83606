"""The kit that our own tests use, for users' tests as well: emulated stages for the real runtime."""

from rrfp_jax.testing.delayed import DelayedStage
from rrfp_jax.testing.emulated_stage import EmulatedStage
from rrfp_jax.testing.emulation import Emulation, dispatch_overhead_ms, emulate

__all__ = ["DelayedStage", "EmulatedStage", "Emulation", "dispatch_overhead_ms", "emulate"]
