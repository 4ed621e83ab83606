"""The kit that our own tests use, for users' tests as well: emulated stages for the real runtime."""

from rrfp_jax.testing.emulated import Durations, EmulatedStage

__all__ = ["Durations", "EmulatedStage"]
