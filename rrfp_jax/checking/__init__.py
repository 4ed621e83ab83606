"""Proofs about the core by exhaustive and random exploration of its real arbiters."""

from rrfp_jax.checking.explore import Explorer, Report, explore
from rrfp_jax.checking.packets import Stimulus
from rrfp_jax.checking.setting import Policy, Setting
from rrfp_jax.checking.trace import CheckError, Trace, replay

__all__ = ["CheckError", "Explorer", "Policy", "Report", "Setting", "Stimulus", "Trace", "explore", "replay"]
