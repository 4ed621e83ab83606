"""Finding what can be restored, and reading it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # type: ignore[import-untyped]
from orbax.checkpoint import type_handlers

from rrfp_jax.checkpoint.arrays import OPTIMIZER, Name, batches, describe, is_key, nested, zeros
from rrfp_jax.checkpoint.record import Commit, PartRecord, Unusable, check_file, step_directory


@dataclass(frozen=True, kw_only=True)
class Found:
    """A committed step."""

    step: int
    path: Path
    layout: Mapping[str, Any]
    """How the run that saved was laid out; for people."""
    host: Mapping[str, Any]
    """What was given to ``save`` beside arrays."""
    parts: Mapping[Path, PartRecord]
    """By the directory of the part."""


def open_step(root: Path, step: int) -> Found:
    """Read the records of a step; raises Unusable, with one sentence, where there is nothing to restore.

    What the files hold is not looked at: see :func:`check_files`.
    """
    directory = step_directory(root, step)
    if not directory.is_dir():
        raise Unusable(f"step {step} cannot be restored from {root}: there is no {directory.name}")
    try:
        commit = Commit.read(directory)
        data = directory / commit.data
        parts = {data / part: PartRecord.read(data / f"{part}.json", sha) for part, sha in commit.parts.items()}
    except Unusable as error:
        raise Unusable(f"step {step} cannot be restored from {directory}: {error}") from None
    return Found(step=step, path=directory, layout=commit.layout, host=commit.host, parts=parts)


def check_files(found: Found, rank: int, num_ranks: int) -> None:
    """Look at a rank's share of a step's files; raises Unusable, with one sentence, where one is not as it was."""
    files = [(path / name, expected) for path, part in found.parts.items() for name, expected in part.files.items()]
    files.sort(key=lambda file: file[1].num_bytes)
    for path, expected in files[rank::num_ranks]:
        problem = check_file(path, expected)
        if problem:
            where = path.relative_to(found.path)
            raise Unusable(f"step {found.step} cannot be restored from {found.path}: {where} {problem}")


def read_layers(found: Found, specs: Mapping[Name, Any], *, as_stored: bool = True) -> dict[Name, jax.Array]:
    """Read arrays in the shardings of ``specs``, a few at a time, and only this process's own share of each.

    Unless they are wanted ``as_stored``, their dtypes may differ from those of ``specs``, which count.

    Beside what was read before, memory holds the arrays being read twice, which are one or together at most 16 MiB.

    Raises Unusable for an array that the step does not have, or has in another shape or dtype.
    """
    part_of_layer = {layer: path for path, part in found.parts.items() for layer in part.layers}
    by_layer: dict[str, dict[Name, Any]] = {}
    arrays: dict[Name, jax.Array] = {}
    for name, spec in specs.items():
        if spec.size:
            by_layer.setdefault(name[0], {})[name] = _data_spec(spec)
        else:
            arrays[name] = zeros(spec)
    for layer, wanted in by_layer.items():
        part = part_of_layer.get(layer)
        if part is None:
            raise Unusable(f"{found.path} has no layer {layer}: {_REMEDY} (it has {', '.join(part_of_layer)})")
        _check_specs(found, found.parts[part], wanted, as_stored=as_stored)
        for names in batches(((name, _own_bytes(spec)) for name, spec in wanted.items()), _BATCH_BYTES):
            arrays |= _read_arrays(part, {name: wanted[name] for name in names})
    return {name: _typed(arrays[name], spec) for name, spec in specs.items()}


def lacking_state(found: Found, names: Iterable[Name]) -> dict[Name, Name | None]:
    """Those of these arrays that are optimizer state of layers which had none, being frozen, when the step was saved.

    With each comes the same array of another layer, where all that train have it in common, such as the number of
    updates; None for what is a layer's own. Of a step without any optimizer state nothing is known.
    """
    saved = sorted(name for part in found.parts.values() for name, _, _ in part.arrays if name[1] == OPTIMIZER)
    trained, common = {name[0] for name in saved}, {name[1:]: name for name in reversed(saved)}
    known = {layer for part in found.parts.values() for layer in part.layers} if trained else set()
    return {
        name: common.get(name[1:])
        for name in names
        if name[1] == OPTIMIZER and name[0] in known and name[0] not in trained
    }


def _own_bytes(spec: Any) -> int:
    shard_bytes = math.prod(spec.sharding.shard_shape(spec.shape)) * np.dtype(spec.dtype).itemsize
    return shard_bytes * len(spec.sharding.addressable_devices)


_BATCH_BYTES = 16 << 20
_REMEDY = "resume with the model and the optimizer that it was saved with"


def _check_specs(found: Found, part: PartRecord, wanted: Mapping[Name, Any], *, as_stored: bool) -> None:
    known = {name: (dtype, shape) for name, dtype, shape in part.arrays}
    for name, spec in wanted.items():
        saved = known.get(name)
        if saved is None:
            raise Unusable(f"{found.path} has no array {describe(name)}: {_REMEDY}")
        here = (np.dtype(spec.dtype).name, tuple(spec.shape))
        if saved[not as_stored :] != here[not as_stored :]:
            raise Unusable(
                f"{describe(name)} is {_text(*saved)} in {found.path} and {_text(*here)} in this run: {_REMEDY}"
            )


def _text(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _data_spec(spec: Any) -> Any:
    """What is stored of an array: of typed random keys, their data."""
    if not is_key(spec):
        return spec
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=spec.sharding)


def _typed(array: jax.Array, spec: Any) -> jax.Array:
    if not is_key(spec):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty(0, spec.dtype)))


def _read_arrays(path: Path, specs: Mapping[Name, jax.ShapeDtypeStruct]) -> dict[Name, jax.Array]:
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
