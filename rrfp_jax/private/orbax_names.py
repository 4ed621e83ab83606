"""Private names of Orbax, as in 0.12.8."""

from typing import Any

from rrfp_jax.private.naming import Private, naming

NAMES = {
    "build_array_write_spec": Private(
        "where Orbax puts an array inside a checkpoint, for its merging of what several processes wrote",
        "the same in orbax.checkpoint.type_handlers, or a handler there for arrays of some processes only",
    ),
    "_BASE_TS_CONTEXT": Private(
        "settings of TensorStore, whose locks not every file system has",
        "an option of PyTreeCheckpointHandler for TensorStore's context, or file_io_locking",
    ),
    "_DEFAULT_OCDBT_TS_CONTEXT": Private("the same for checkpoints in the format OCDBT", "the same"),
}

with naming("orbax-checkpoint", NAMES):
    from orbax.checkpoint._src.serialization.tensorstore_utils import (
        _BASE_TS_CONTEXT,
        _DEFAULT_OCDBT_TS_CONTEXT,
        build_array_write_spec,
    )

CONTEXTS: tuple[dict[str, Any], ...] = (_BASE_TS_CONTEXT, _DEFAULT_OCDBT_TS_CONTEXT)
"""What Orbax makes each of its contexts of, from then on."""
__all__ = ["CONTEXTS", "NAMES", "build_array_write_spec"]
