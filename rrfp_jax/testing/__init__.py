"""The kit that our own tests use, for users' tests as well: emulated stages, and a model without a pipeline."""

from rrfp_jax.testing.accelerator import AcceleratedStage as AcceleratedStage
from rrfp_jax.testing.accelerator import EmulatedAccelerator as EmulatedAccelerator
from rrfp_jax.testing.comparing import DelayedStage as DelayedStage
from rrfp_jax.testing.comparing import run_unpipelined as run_unpipelined
from rrfp_jax.testing.emulated_stage import EmulatedStage as EmulatedStage
from rrfp_jax.testing.emulation import Emulation as Emulation
from rrfp_jax.testing.emulation import dispatch_overhead_ms as dispatch_overhead_ms
from rrfp_jax.testing.emulation import emulate as emulate
from rrfp_jax.testing.emulation import idle_shares as idle_shares
