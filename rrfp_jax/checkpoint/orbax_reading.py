"""Reading arrays with Orbax, each process for itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # type: ignore[import-untyped]
from orbax.checkpoint import type_handlers

from rrfp_jax.checkpoint.names import Name, nested


def read_arrays(path: Path, specs: Mapping[Name, jax.ShapeDtypeStruct]) -> dict[Name, jax.Array]:
    """Read arrays of a checkpoint in the shapes, dtypes and shardings given, only what lies on this process's devices.

    Waits for no other process.
    """
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        ),
        type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, type_handlers.ArrayHandler())),
    )
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=spec.sharding, global_shape=spec.shape, dtype=spec.dtype
        )
        for name, spec in specs.items()
    }
    args = ocp.args.PyTreeRestore(nested(specs), restore_args=nested(restore_args), partial_restore=True)
    tree = handler.restore(epath.Path(path), args=args)
    return {name: _pick(tree, name) for name in specs}


def _pick(tree: Any, name: Name) -> Any:
    for key in name:
        tree = tree[key]
    return tree
