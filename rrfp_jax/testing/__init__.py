"""The kit that our own tests use, for users' tests as well: emulated stages for the real runtime."""

from rrfp_jax.testing.emulated import EmulatedStage
from rrfp_jax.testing.emulation import Emulation, emulate

__all__ = ["EmulatedStage", "Emulation", "emulate"]
