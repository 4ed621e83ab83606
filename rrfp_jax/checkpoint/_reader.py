"""Finds the steps that can be restored, and reads their arrays: in any shardings, or whole on one device.

A layer may be saved whole or in shards, and be read whole or in others. A step of a run that trains adapters may lack
all other layers, which never change: its plain data then name the step that has them (:data:`BASE`), and whoever opens
it finds the layers of both.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath  # type: ignore[import-untyped]
from orbax.checkpoint import type_handlers

from rrfp_jax.checkpoint._arrays import (
    OPTIMIZER,
    PARAMS,
    ArrayName,
    is_random_key,
    layer_of_replica,
    nested,
    sharded_zeros,
    shown_name,
    size_batches,
    whole_array,
)
from rrfp_jax.checkpoint._records import (
    Commit,
    PartRecord,
    Unusable,
    canonical_json,
    file_fault,
    last_committed,
    step_directory,
)
from rrfp_jax.programs.chunk import ADAPTERS, LayerShard, shard_named, whole_name
from rrfp_jax.programs.shapes import accumulator_spec
from rrfp_jax.storage import BucketPath, located, temporary_folder

AVERAGE = "parameter_average"
"""The third text of the name of a parameter's average: the field of the optimizer's state that has it."""
BASE = "base of adapters"
"""The key of a step's plain data that names the step with the layers that it lacks: folder, number and digest."""
APART = "replicas apart"
"""The key of a step's plain data that tells how replicas with parameters of their own average them, and how many there
are."""
LACKS_BASE = "it holds adapters alone"
"""Words of every message about a step whose base is not there as it was."""
_BATCH_BYTES = 16 << 20
_REMEDY = "resume with the model and the optimizer that it was saved with"


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """A committed step."""

    step: int
    path: Path
    layout: Mapping[str, Any]
    """Layout of the run that saved, for people."""
    host: Mapping[str, Any]
    """Plain data that was given to ``save`` beside arrays."""
    parts: Mapping[Path, PartRecord]
    """Records by the directory of the part."""
    copies: dict[Path, Path] = field(default_factory=dict, compare=False, repr=False)
    """Local folders of the parts that were read from an object store. They go with this object."""


def open_step(root: Path, step: int) -> StoredStep:
    """Returns a step by its records; raises Unusable, with one sentence, if there is nothing to restore.

    The content of its files is checked by :func:`check_files`.
    """
    directory = step_directory(root, step)
    if not directory.is_dir():
        raise Unusable(f"step {step} cannot be restored from {root}: there is no {directory.name}")
    try:
        commit = Commit.read(directory)
        data = directory / commit.data
        parts = {data / part: PartRecord.read(data / f"{part}.json", sha) for part, sha in commit.parts.items()}
        if (base := commit.host.get(BASE)) is not None:
            parts |= _parts_of_base(**base)
    except Unusable as error:
        raise Unusable(f"step {step} cannot be restored from {directory}: {error}") from None
    return StoredStep(step=step, path=directory, layout=commit.layout, host=commit.host, parts=parts)


def base_of(stored: StoredStep) -> dict[str, Any]:
    """Returns the words that name the step which has the layers of this one that no adapter changes."""
    known = stored.host.get(BASE)
    root = stored.path.parent
    return known or {"folder": str(root), "step": stored.step, "digest": _digest(Commit.read(stored.path))}


def _digest(commit: Commit) -> str:
    return hashlib.sha256(canonical_json(commit.parts)).hexdigest()


def _parts_of_base(folder: str, step: int, digest: str) -> dict[Path, PartRecord]:
    """Returns the parts of a base with their parameters alone, and without adapters of its own."""
    directory = step_directory(Path(folder), step)
    needs = f"{LACKS_BASE}, and {directory} with the other layers"
    try:
        commit = Commit.read(directory)
        data = directory / commit.data
        parts = {data / part: PartRecord.read(data / f"{part}.json", sha) for part, sha in commit.parts.items()}
    except Unusable as error:
        raise Unusable(f"{needs} cannot be read, as {error}: put that folder back") from None
    if _digest(commit) != digest:
        raise Unusable(f"{needs} is another than these were trained on: put that one back")

    def of_model(part: PartRecord) -> PartRecord:
        own = [a for a in part.arrays if a[0][1] == PARAMS or a[0][1:3] == (OPTIMIZER, AVERAGE)]
        arrays = tuple(a for a in own if not a[0][0].startswith(ADAPTERS))
        layers = tuple(layer for layer in part.layers if not layer.startswith(ADAPTERS))
        return part.model_copy(update={"arrays": arrays, "layers": layers})

    return {path: of_model(part) for path, part in parts.items()}


def check_files(stored: StoredStep, rank: int, num_ranks: int) -> None:
    """Checks a rank's share of a step's files; raises Unusable, with one sentence, if one is damaged or missing."""
    files = [(path / name, expected) for path, part in stored.parts.items() for name, expected in part.files.items()]
    # In the order of their sizes, so that every rank reads about as many bytes.
    files.sort(key=lambda file: file[1].num_bytes)
    for path, expected in files[rank::num_ranks]:
        fault = file_fault(path, expected)
        if fault:
            where = path.relative_to(stored.path) if path.is_relative_to(stored.path) else path
            raise Unusable(f"step {stored.step} cannot be restored from {stored.path}: {where} {fault}")


def check_layers(stored: StoredStep, layers: Iterable[str]) -> None:
    """Raises Unusable for a step with layers that a model of these does not have, such as a head that is not tied."""
    known = set(map(whole_name, layers))
    for part in stored.parts.values():
        if extra := [layer for layer in map(whole_name, part.layers) if layer not in known]:
            raise Unusable(f"{stored.path} has layer {extra[0]}, which this run's model does not have: {_REMEDY}")


def _other_delay(stored: StoredStep, layer: str, saved: Iterable[ArrayName], wanted: Iterable[ArrayName]) -> str | None:
    """Returns in words that a step was saved by a run whose updates of a layer had another delay; None where it was
    not."""
    was, now = (
        int(any(whole_name(name[0]) == layer and "older" in name[1:] for name in names)) for names in (saved, wanted)
    )
    if was == now:
        return None
    return (
        f"{stored.path} was saved with pipeline.delay {was} for {layer} and is read with {now}: give the delay and the "
        "layout of that run, or start another run from it with init_from"
    )


def read_arrays(
    stored: StoredStep, specs: Mapping[ArrayName, Any], *, as_stored: bool = True
) -> dict[ArrayName, jax.Array]:
    """Returns arrays in the shardings of ``specs``, of which only this process's own share is read.

    Unless they are wanted ``as_stored``, their dtypes may differ from those of ``specs``, which count; those of a base
    may in any case. Arrays are read
    a few at a time: memory holds twice those being read, which are one or together at most 16 MiB.

    Raises Unusable for an array that the step does not have, or has in another shape or dtype.
    """
    saved = _saved_arrays(stored)
    known_layers = dict.fromkeys(whole_name(layer) for part in stored.parts.values() for layer in part.layers)
    arrays: dict[ArrayName, jax.Array] = {}
    sizes: dict[Path, dict[ArrayName, int]] = {}
    wanted: dict[ArrayName, Any] = {}
    for name, spec in specs.items():
        if not spec.size:
            arrays[name] = sharded_zeros(spec)
            continue
        wanted[name] = spec
        if is_random_key(spec):  # the step holds the data of typed random keys
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
            wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=spec.sharding)
    for name, spec in wanted.items():
        whole = whole_array(name)
        if whole[0] not in known_layers:
            raise Unusable(f"{stored.path} has no layer {whole[0]}: {_REMEDY} (it has {', '.join(known_layers)})")
        if (found := saved.get(whole)) is None:
            raise Unusable(
                _other_delay(stored, whole[0], saved, wanted)
                or f"{stored.path} has no array {shown_name(whole)}: {_REMEDY}"
            )
        axis, start, shape = found.taken(shard_named(name[0]))
        here = (np.dtype(spec.dtype).name, tuple(spec.shape))
        is_own = found.pieces[0].path.is_relative_to(stored.path)
        is_other = as_stored and is_own and found.dtype != here[0]
        if shape != here[1] or (len(found.pieces) > 1 and axis != found.axis) or is_other:
            was, now = (f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in ((found.dtype, shape), here))
            raise Unusable(f"{shown_name(name)} is {was} in {stored.path} and {now} in this run: {_REMEDY}")
        piece = next((piece for piece in found.pieces if (piece.start, piece.shape) == (start, shape)), None)
        if piece is None:
            arrays[name] = _read_across(stored, found, spec, axis, start)
        elif piece.name != name:  # an array that all shards have, such as the number of updates
            arrays[name] = _read_batch(_folder_of(stored, piece.path), {piece.name: spec})[piece.name]
        else:
            shard_bytes = math.prod(spec.sharding.shard_shape(spec.shape)) * np.dtype(spec.dtype).itemsize
            sizes.setdefault(piece.path, {})[name] = shard_bytes * len(spec.sharding.addressable_devices)
    for path, of_part in sizes.items():
        for names in size_batches(of_part.items(), _BATCH_BYTES):
            arrays |= _read_batch(_folder_of(stored, path), {name: wanted[name] for name in names})
    return {
        name: jax.random.wrap_key_data(arrays[name], impl=jax.random.key_impl(jnp.empty(0, spec.dtype)))
        if is_random_key(spec)
        else arrays[name]
        for name, spec in specs.items()
    }


def read_weights(stored: StoredStep, specs: Mapping[ArrayName, Any]) -> dict[ArrayName, jax.Array]:
    """Returns parameters for all uses but going on: their averages, where the step has these, else as they were, or
    their means over replicas that have their own.

    The shapes and dtypes are those of ``specs``. Raises Unusable as :func:`read_arrays` does.
    """
    saved = _saved_arrays(stored)
    averages = {name: (name[0], OPTIMIZER, AVERAGE, whole_name(name[0]), *name[2:]) for name in specs}
    sources = {name: average if whole_array(average) in saved else name for name, average in averages.items()}
    found = read_arrays(stored, {sources[name]: spec for name, spec in specs.items()}, as_stored=False)
    weights = {name: found[source] for name, source in sources.items()}
    num_replicas = stored.host.get(APART, {}).get("replicas", 1)
    if num_replicas > 1:
        sums = {name: array.astype(accumulator_spec(specs[name]).dtype) for name, array in weights.items()}
        for replica in range(1, num_replicas):
            own = {name: (layer_of_replica(name[0], replica), *name[1:]) for name in specs}
            found = read_arrays(stored, {own[name]: spec for name, spec in specs.items()}, as_stored=False)
            sums = {name: total + found[own[name]].astype(total.dtype) for name, total in sums.items()}
        weights = {name: (total / num_replicas).astype(specs[name].dtype) for name, total in sums.items()}
    return weights


class _Piece(NamedTuple):
    """An array as a part of a step holds it: whole, or a shard."""

    path: Path
    """The directory of the part."""
    name: ArrayName
    start: int
    """Its first place in the whole array, along the dimension of the cut."""
    shape: tuple[int, ...]


class _SavedArray(NamedTuple):
    """A whole array of a step."""

    dtype: str
    shape: tuple[int, ...]
    axis: int
    """The dimension along which shards cut it."""
    is_cut: bool
    """Whether shards of its layer cut it; otherwise they all have it."""
    pieces: tuple[_Piece, ...]
    """Its pieces in order; all of them the same where nothing is cut."""

    def taken(self, shard: LayerShard | None) -> tuple[int, int, tuple[int, ...]]:
        """Returns the dimension along which a shard, or the whole layer, takes a part, its start, and its shape."""
        if shard is None or not self.is_cut:
            return self.axis, 0, self.shape
        start, stop = shard.bounds(self.shape[shard.axis])
        sizes = list(self.shape)
        sizes[shard.axis] = stop - start
        return shard.axis, start, tuple(sizes)


def _saved_arrays(stored: StoredStep) -> dict[ArrayName, _SavedArray]:
    """Returns all arrays of a step by their names in whole layers."""
    found: dict[ArrayName, list[tuple[str, _Piece]]] = {}
    params: dict[str, dict[ArrayName, tuple[int, ...]]] = {}
    for path, part in stored.parts.items():
        for name, dtype, shape in part.arrays:
            found.setdefault(whole_array(name), []).append((dtype, _Piece(path, name, 0, shape)))
            if name[1] == PARAMS:
                params.setdefault(name[0], {})[name[2:]] = shape
    saved = {}
    for whole, of_array in found.items():
        dtype, first = of_array[-1]
        # moments have the shape of their parameter, and a path that ends in its path
        own, shard, whole_shape = params.get(first.name[0], {}), shard_named(first.name[0]), list(first.shape)
        is_cut = bool(whole_shape) and any(own.get(first.name[k:]) == first.shape for k in range(2, len(first.name)))
        axis, pieces = 0 if shard is None else shard.axis, [first]
        if shard is not None and is_cut:
            by_shard = {shard_named(piece.name[0]) or shard: piece for _, piece in of_array}
            pieces, whole_shape[axis] = [], 0
            for _, piece in sorted(by_shard.items()):
                pieces.append(piece._replace(start=whole_shape[axis]))
                whole_shape[axis] += piece.shape[axis]
        saved[whole] = _SavedArray(dtype, tuple(whole_shape), axis, is_cut, tuple(pieces))
    return saved


def _folder_of(stored: StoredStep, path: Path) -> Path:
    """Returns the local folder of a part; one in an object store is copied, whole, by the first who reads it."""
    if not isinstance(path, BucketPath):
        return path
    if path not in stored.copies:
        folder, files = temporary_folder(stored), stored.parts[path].files
        path.download(folder, files)
        for name, expected in files.items():
            if fault := file_fault(folder / name, expected):
                raise Unusable(f"step {stored.step} cannot be restored from {stored.path}: {path.name}/{name} {fault}")
        stored.copies[path] = folder
    return stored.copies[path]


def _read_across(stored: StoredStep, saved: _SavedArray, spec: Any, axis: int, start: int) -> jax.Array:
    """Returns an array that begins at ``start`` of a saved one along ``axis``, from the pieces that have some of it."""

    def read(index: Any) -> np.ndarray:
        dim, own = axis % len(spec.shape), list(index)
        first, stop, _ = own[dim].indices(spec.shape[dim])
        found = []
        for piece in saved.pieces:
            begin = max(first + start - piece.start, 0)
            end = min(stop + start - piece.start, piece.shape[axis])
            if begin < end:
                own[dim] = slice(begin, end)
                array = _open_array(_folder_of(stored, piece.path), piece.name)
                found.append(array[tuple(own)].read().result())
        return np.concatenate(found, axis=dim).astype(spec.dtype)

    return jax.make_array_from_callback(spec.shape, spec.sharding, read)


def _open_array(folder: Path, name: ArrayName) -> ts.TensorStore:
    store = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{folder}/"},
        "path": f"{'.'.join(name)}/",
    }
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


def frozen_state(stored: StoredStep, names: Iterable[ArrayName]) -> dict[ArrayName, ArrayName | None]:
    """Returns those names that are optimizer state of layers which had none, being frozen, when the step was saved.

    Beside each stands the same array of another layer, if all layers that train have it in common, such as the number
    of updates; None for an array of the layer alone. Empty for a step without any optimizer state.
    """
    saved = sorted(name for part in stored.parts.values() for name, _, _ in part.arrays if name[1] == OPTIMIZER)
    trained, common = {whole_name(name[0]) for name in saved}, {name[1:]: name for name in reversed(saved)}
    known = {whole_name(layer) for part in stored.parts.values() for layer in part.layers} if trained else set()
    return {
        name: common.get(name[1:]) for name in names if name[1] == OPTIMIZER and whole_name(name[0]) in known - trained
    }


def newest_step(directory: Path) -> StoredStep:
    """Returns the newest committed step after a check of its files; raises Unusable, with one sentence, without one."""
    directory = located(directory).absolute()  # Orbax takes no other
    step = last_committed(directory)
    if step is None:
        raise Unusable(f"{directory} holds no checkpoint: train first, or give the folder of another run")
    stored = open_step(directory, step)
    check_files(stored, 0, 1)
    return stored


def read_params(stored: StoredStep) -> dict[str, Any]:
    """Returns the parameters of a step by layer name, on JAX's first device, whatever layout saved them, or their
    averages where it has these.

    Memory must hold all of them. Raises Unusable if a file is damaged.
    """
    arrays = read_weights(stored, stored_param_specs(stored))
    return nested({(name[0], *name[2:]): array for name, array in arrays.items()})


def read_layer_params(stored: StoredStep, layer: str) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the parameters of one layer, or their averages, by their path inside it; raises Unusable if a file is
    damaged."""
    specs = {name: spec for name, spec in stored_param_specs(stored).items() if name[0] == layer}
    return {name[2:]: np.asarray(array) for name, array in read_weights(stored, specs).items()}


def stored_param_specs(stored: StoredStep) -> dict[ArrayName, Any]:
    """Returns the parameters of a step by name, as specs on JAX's first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    is_apart = APART in stored.host
    return {
        name: jax.ShapeDtypeStruct(saved.shape, jnp.dtype(saved.dtype), sharding=sharding)
        for name, saved in _saved_arrays(stored).items()
        if name[1] == PARAMS and not (is_apart and "@" in name[0])
    }


def _read_batch(path: Path, specs: Mapping[ArrayName, jax.ShapeDtypeStruct]) -> dict[ArrayName, jax.Array]:
    """Returns arrays of a part in the given shapes, dtypes and shardings, without waiting for any other process."""
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
    arrays = {}
    for name in specs:
        array = tree
        for key in name:
            array = array[key]
        arrays[name] = array
    return arrays
