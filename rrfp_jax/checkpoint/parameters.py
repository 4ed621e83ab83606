"""The parameters of a run's newest checkpoint on one device, whole or layer by layer, after its training."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint.arrays import PARAMS, Name, nested
from rrfp_jax.checkpoint.reader import Found, check_files, open_step, read_layers
from rrfp_jax.checkpoint.record import Unusable, last_committed


def newest_step(directory: Path) -> Found:
    """The newest committed step, its files looked at; raises Unusable, with one sentence, where there is none."""
    directory = directory.absolute()  # Orbax takes no other
    step = last_committed(directory)
    if step is None:
        raise Unusable(f"{directory} holds no checkpoint: train first, or give the folder of another run")
    found = open_step(directory, step)
    check_files(found, 0, 1)
    return found


def read_params(found: Found) -> dict[str, Any]:
    """The parameters of a step by layer name, on JAX's first device; memory must hold all of them.

    Whatever layout saved them. Raises Unusable where a file is damaged.
    """
    arrays = read_layers(found, param_specs_of(found))
    return nested({(name[0], *name[2:]): array for name, array in arrays.items()})


def read_layer(found: Found, layer: str) -> dict[tuple[str, ...], np.ndarray]:
    """The parameters of one layer, by their way inside it; raises Unusable where a file is damaged."""
    specs = {name: spec for name, spec in param_specs_of(found).items() if name[0] == layer}
    return {name[2:]: np.asarray(array) for name, array in read_layers(found, specs).items()}


def param_specs_of(found: Found) -> dict[Name, Any]:
    """The parameters of a step by name, as specs on JAX's first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
        for part in found.parts.values()
        for name, dtype, shape in part.arrays
        if name[1] == PARAMS
    }
