"""Proofs about the core by exhaustive and random exploration of its real arbiters."""

from rrfp_jax.checking.explore import Explorer as Explorer
from rrfp_jax.checking.explore import Report as Report
from rrfp_jax.checking.explore import explore as explore
from rrfp_jax.checking.packets import Stimulus as Stimulus
from rrfp_jax.checking.setting import Policy as Policy
from rrfp_jax.checking.setting import Setting as Setting
from rrfp_jax.checking.trace import CheckError as CheckError
from rrfp_jax.checking.trace import Trace as Trace
from rrfp_jax.checking.trace import replay as replay
