"""Copies of a stash between device and pinned host memory, as functions that an operation runs.

Only what the stash alone holds is moved: values that the forward made for the backward, and what the chunk's only
predecessor sent from another stage. Parameters and what is derived from them are no part of a stash. Batch leaves,
outputs that others still read, and inputs that a chunk of the same stage keeps as well stay where they are: moving
them would free nothing. Nobody else refers to what is moved, so the devices' memory is free once the copy has ended.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Sharding
from rrfp_jax.runtime.operating import OperationContext

from rrfp_jax.programs.residuals import Residuals

HOST = "pinned_host"
"""JAX's name for host memory that devices copy from and to by themselves."""


def stash_to_host(context: OperationContext) -> Any:
    """Replace the arrays of the stash by copies in host memory."""
    return _moved(context, to_host=True)


def stash_to_device(context: OperationContext) -> Any:
    """Replace copies in host memory by arrays that lie as the backward's program wants them."""
    return _moved(context, to_host=False)


def check_devices(devices: Iterable[jax.Device]) -> None:
    """Raise ValueError where some device has no pinned host memory."""
    for device in devices:
        if HOST not in {memory.kind for memory in device.addressable_memories()}:
            raise ValueError(
                f"offload needs memory of kind {HOST}, which JAX does not have for {device.device_kind}: leave offload "
                "out, or rematerialise more"
            )


def _moved(context: OperationContext, *, to_host: bool) -> Any:
    assert context.programs is not None
    plan, stash = context.programs.plan, context.stash
    arrays, specs = (
        [array for part in stash for array in part],
        [spec for part in plan.residuals.specs for spec in part],
    )
    num_made = len(stash.donated) + len(stash.saved)
    inputs = plan.aliased_inputs if context.owns_inputs else ()
    moving = [*range(num_made), *(num_made + place for place, is_input in enumerate(inputs) if is_input)]
    shardings = [_on_host(specs[place].sharding) if to_host else specs[place].sharding for place in moving]
    copies = jax.device_put([arrays[place] for place in moving], shardings)
    for place, copy in zip(moving, copies, strict=True):
        arrays[place] = copy
    num_donated = len(stash.donated)
    context.stash = Residuals(
        tuple(arrays[:num_donated]), tuple(arrays[num_donated:num_made]), tuple(arrays[num_made:])
    )
    return copies


@lru_cache(maxsize=1024)
def _on_host(sharding: Sharding) -> Sharding:
    return sharding.with_memory_kind(HOST)
