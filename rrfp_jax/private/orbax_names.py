"""Private names of Orbax, as in 0.12.8."""

from typing import Any

from rrfp_jax.private import Private, naming

ORBAX_NAMES = {
    "build_array_write_spec": Private(
        "where Orbax puts an array inside a checkpoint, for its merging of what several processes wrote",
        "the same in orbax.checkpoint.type_handlers, or a handler there for arrays of some processes only",
    ),
    "_DEFAULT_OCDBT_TS_CONTEXT": Private(
        "the settings of TensorStore, whose locks not every file system has",
        "an option of PyTreeCheckpointHandler for TensorStore's context, or file_io_locking",
    ),
}

with naming("orbax-checkpoint", ORBAX_NAMES):
    from orbax.checkpoint._src.serialization.tensorstore_utils import _DEFAULT_OCDBT_TS_CONTEXT, build_array_write_spec

TENSORSTORE_SETTINGS: dict[str, Any] = _DEFAULT_OCDBT_TS_CONTEXT
"""The settings from which Orbax makes every context that it writes with."""

__all__ = [
    "ORBAX_NAMES",
    "TENSORSTORE_SETTINGS",
    "build_array_write_spec",
]
