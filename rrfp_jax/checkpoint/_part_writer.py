"""Writes a step with Orbax: one checkpoint for each part, by the processes that own its layers, from host memory.

A model whose parameters come from elsewhere is written layer by layer instead, so that no model is ever held.

Layers of the same processes are saved together, as one part. Orbax's own handlers do not fit: that for ``jax.Array``
refuses arrays whose devices all belong to one process as soon as the run has several, that for NumPy arrays writes on
process 0 only. A handler of one's own is Orbax's public way out; its files are those that Orbax itself would write, and
plain Orbax reads them.
"""

import asyncio
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath  # type: ignore[import-untyped]
from orbax.checkpoint import future, type_handlers

from rrfp_jax.checkpoint._arrays import (
    PARAMS,
    ArrayName,
    HostArray,
    layer_of_replica,
    nested,
    size_batches,
    stored_name,
)
from rrfp_jax.checkpoint._records import Commit, PartRecord, step_directory, sum_tree, sync_directory
from rrfp_jax.layout import Layout
from rrfp_jax.private.orbax_names import TENSORSTORE_SETTINGS, build_array_write_spec
from rrfp_jax.storage import BucketPath, move_up, working_folder

# A chunk is read at once, at least: small enough for a share of a large array, large enough for a disk.
_CHUNK_BYTES = 16 << 20
_BATCH_BYTES = 256 << 20
# Layer by layer, one array at a time, but for small ones: memory counts more there than speed.
_LAYER_BATCH_BYTES = 1 << 20
# With this type, plain Orbax gives NumPy arrays to a reader who names no sharding.
_TYPE = type_handlers.NumpyHandler().typestr()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The processes that write a layer; all of them take part in saving it."""

    ranks: tuple[int, ...]
    """The ranks, ascending."""
    device: jax.Device
    """If several copies of an array exist, the one that this device has a share of is written."""
    apart: bool = False
    """Whether each of these ranks writes other arrays of the layer, as a part of its own: parameters the one with the
    device, optimizer state whoever has it."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """Layers, or parts of layers, that are saved together; named after the first of them."""

    name: str
    """The name as a file name."""
    layers: tuple[str, ...]
    ranks: tuple[int, ...]


def layer_owners(
    layers_of_chunk: Sequence[Iterable[str]],
    stage_of_chunk: Sequence[int],
    layout: Layout,
    devices: Sequence[jax.Device],
    *,
    shard_optimizer: bool = False,
    whole_arrays: bool = False,
    by_replica: bool = False,
    living: Collection[int] | None = None,
) -> dict[str, Owner]:
    """Returns the owner of every layer, in the model's order, known without a look at any array.

    A layer belongs to the lowest chunk that holds it, and there to the first replica that lives, or to all that live if
    they share out the optimizer state.

    Args:
        layers_of_chunk: names of the layers of every chunk of one replica.
        stage_of_chunk: stage of every chunk of one replica.
        layout: how devices are dealt out to stages and replicas.
        devices: devices by global number.
        shard_optimizer: whether replicas share out the optimizer state.
        whole_arrays: whether each of them has whole arrays of it then.
        by_replica: whether each replica has layers of its own, with an owner each.
        living: the ranks that live; None: all.
    """
    owners: dict[str, Owner] = {}
    for layers, stage in zip(layers_of_chunk, stage_of_chunk, strict=True):
        every = [unit for unit in layout.units_of_stage(stage) if unit not in layout.absent]
        units = [each for each in every if living is None or {*layout.ranks_of(each)} <= {*living}]
        ranks = sorted({rank for unit in units for rank in layout.ranks_of(unit)})
        for replica, unit in enumerate(units if by_replica else units[:1]):
            owner = Owner(
                ranks=tuple(ranks) if shard_optimizer else layout.ranks_of(unit),
                device=devices[layout.devices_of(unit)[0]],
                apart=shard_optimizer and whole_arrays,
            )
            names = [layer_of_replica(layer, replica) for layer in layers]
            owners |= {layer: owner for layer in names if layer not in owners}
    return owners


def parts_of_step(owners: Mapping[str, Owner]) -> tuple[StepPart, ...]:
    """Returns the parts of a step, which are the same on all ranks: the layers of the same processes together.

    Where these write apart, each has a part. The names of all but the first have a number behind a sign that no name
    of a layer becomes.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for layer, owner in owners.items():
        groups.setdefault((owner.ranks, owner.apart), []).append(layer)
    parts = []
    for (ranks, apart), layers in groups.items():
        for number, own in enumerate([(rank,) for rank in ranks] if apart else [ranks]):
            name = part_file_name(layers[0]) + (f"+{number}" if number else "")
            parts.append(StepPart(name=name, layers=tuple(layers), ranks=own))
    return tuple(parts)


def part_file_name(layer: str) -> str:
    """Returns the file name of a part whose first layer this is."""
    name = quote(layer, safe=" ")
    return name if name.strip(".") else name.replace(".", "%2E")  # "." and ".." are other folders


class PartWriter:
    """Writes the parts that this process takes part in, side by side with the other processes of each.

    Args:
        rank: this process.
        parts: all parts of a step, the same on all ranks.
        processes: ``jax.process_index()`` of every rank.
        batch_bytes: bytes that are written at a time, which memory holds once more. None: 256 MiB.

    No process waits for another one here: the caller must see to it that all ranks have written before any of them
    finishes.
    """

    def __init__(
        self, rank: int, parts: Sequence[StepPart], processes: Sequence[int], *, batch_bytes: int | None = None
    ) -> None:
        self._rank, self._handlers = rank, dict[StepPart, ocp.PyTreeCheckpointHandler]()
        for part in parts:
            if rank not in part.ranks:
                continue
            active = [processes[other] for other in part.ranks]
            # Orbax's Checkpointer around the handler would bring processes together by barriers with a deadline of
            # their own, in which the others are left waiting when one of them fails.
            self._handlers[part] = ocp.PyTreeCheckpointHandler(
                use_ocdbt=True,
                use_compression=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=active[0], active_processes=set(active)
                ),
                type_handler_registry=type_handlers.create_type_handler_registry(
                    (HostArray, _HostArrayHandler(rank == part.ranks[0], batch_bytes or _BATCH_BYTES)),
                    (jax.Array, type_handlers.ArrayHandler()),  # none is saved, but Orbax warns if nobody could
                ),
            )

    def write(self, folder: Path, arrays: Mapping[ArrayName, HostArray]) -> None:
        """Writes this process's share of every part into a folder of its own below ``folder``.

        Raises the errors of Orbax, TensorStore and the file system.
        """
        here = self._here(folder)
        if here != folder:
            shutil.rmtree(here, ignore_errors=True)
        for part, handler in self._handlers.items():
            path = here / part.name
            path.mkdir(parents=True, exist_ok=True)
            own = _stored(part, arrays)
            if not own:  # Orbax refuses to save layers that have no arrays
                continue
            with _around_orbax():
                handler.save(epath.Path(path), args=ocp.args.PyTreeSave(nested(own)))
            if isinstance(folder, BucketPath) and self._rank != part.ranks[0]:
                move_up(path, folder / part.name)

    def finish(self, folder: Path, arrays: Mapping[ArrayName, HostArray]) -> dict[str, str]:
        """Puts together the parts whose first process this is, once all processes have written their shares.

        Returns the checksums of the parts' records.
        """
        written = {}
        for part, handler in self._handlers.items():
            if self._rank == part.ranks[0]:
                path, place = self._here(folder) / part.name, folder / part.name
                own = _stored(part, arrays)
                if isinstance(place, BucketPath) and len(part.ranks) > 1:
                    # The shares of the others: Orbax puts them together where all of them are.
                    place.download(path, place.files())
                if own:
                    with _around_orbax():
                        handler.finalize(epath.Path(path))
                shapes = tuple((name, array.dtype.name, array.shape) for name, array in own.items())
                layers = tuple(dict.fromkeys(stored_name((layer,))[0] for layer in part.layers))
                record = PartRecord(layers=layers, arrays=shapes, files=sum_tree(path))
                if isinstance(place, BucketPath):
                    move_up(path, place)
                written[part.name] = record.write(folder / f"{part.name}.json")
        if isinstance(folder, BucketPath):
            shutil.rmtree(self._here(folder), ignore_errors=True)
            with suppress(OSError):
                self._here(folder).parent.rmdir()  # only if no other rank of this host writes there
        return written

    def _here(self, folder: Path) -> Path:
        """Returns where this process writes what is for ``folder``: on a disk, from which files go to an object store
        one by one, for Orbax merges files and TensorStore knows two kinds of stores."""
        return working_folder(folder.parents[1]) / f"rank-{self._rank}" if isinstance(folder, BucketPath) else folder

    def close(self) -> None:
        """Frees the threads."""
        for handler in self._handlers.values():
            handler.close()


def _stored(part: StepPart, arrays: Mapping[ArrayName, HostArray]) -> dict[ArrayName, HostArray]:
    """Returns the arrays of a part by their names in files; what two parts of a layer have in common comes once."""
    return {stored_name(name): arrays[name] for name in sorted(arrays) if name[0] in part.layers}


class _HostArrayHandler(type_handlers.TypeHandler):
    """Writes this process's pieces of arrays; ``primary`` also writes the metadata of each array as a whole."""

    def __init__(self, primary: bool, batch_bytes: int) -> None:
        self._primary, self._batch_bytes = primary, batch_bytes

    def typestr(self) -> str:
        return _TYPE

    async def serialize(
        self,
        values: Sequence[HostArray],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        assert args is not None
        return [future.CommitFutureAwaitingContractedSignals(self._write_all(values, infos, args), name="host_arrays")]

    async def _write_all(self, values: Sequence[HostArray], infos: Sequence[Any], args: Sequence[Any]) -> None:
        # The store is asked for with one array, but it is the same for all arrays of a checkpoint.
        spec = build_array_write_spec(
            infos[0],
            args[0],
            global_shape=values[0].shape,
            local_shape=values[0].piece_shape,
            dtype=values[0].dtype,
            use_ocdbt=True,
            process_index=jax.process_index(),
        ).json["kvstore"]
        store = await ts.KvStore.open({**spec, "path": ""}, context=infos[0].ts_context)
        named = [(value, info.name) for value, info in zip(values, infos, strict=True)]
        # Transactions save a third of the time if arrays are small, but hold the bytes that they write.
        for batch in size_batches(((each, each[0].nbytes) for each in named), self._batch_bytes):
            transaction = ts.Transaction()
            await asyncio.gather(*(self._write(value, store / f"{name}/", transaction) for value, name in batch))
            await transaction.commit_async()

    async def _write(self, value: HostArray, store: ts.KvStore, transaction: ts.Transaction) -> None:
        if not (self._primary or value.pieces):
            return
        chunks = chunk_shape(value.piece_shape, value.dtype.itemsize, _CHUNK_BYTES)
        array = await ts.open(
            {
                "driver": "zarr",
                "dtype": value.dtype.name,
                "metadata": {"shape": value.shape, "chunks": chunks, "compressor": None},
                "store_data_equal_to_fill_value": True,
            },
            kvstore=store,
            open=True,
            create=self._primary,
            assume_metadata=not self._primary,
            transaction=transaction,
        )
        for index, piece in value.pieces:
            await array[index].write(piece, can_reference_source_data_indefinitely=True).copy

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("see _reader")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("see _reader")


def chunk_shape(shape: Sequence[int], item_bytes: int, limit_bytes: int) -> list[int]:
    """Returns the shape of equal chunks of a piece, of at most ``limit_bytes`` as far as its sizes have divisors."""
    chunks = list(shape)
    while math.prod(chunks) * item_bytes > limit_bytes:
        largest = max(range(len(chunks)), key=chunks.__getitem__)
        chunks[largest] //= next(n for n in range(2, chunks[largest] + 1) if chunks[largest] % n == 0)
    return chunks


@contextmanager
def _around_orbax() -> Iterator[None]:
    """Silences the tracebacks of errors that Orbax's threads also raise, as the caller of save reports them once, and
    turns off TensorStore's locks on its files, which not every file system has (Lustre without ``flock``).

    No two processes write the same file here: each has a folder of its own, and one process alone merges them.
    """

    def is_new(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised" not in str(record.msg)

    log = logging.getLogger("absl")
    log.addFilter(is_new)
    TENSORSTORE_SETTINGS["file_io_locking"] = {"mode": "none"}
    try:
        yield
    finally:
        TENSORSTORE_SETTINGS.pop("file_io_locking", None)
        log.removeFilter(is_new)


# -- layer by layer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadLater:
    """An array that is read when it is written, and not held before or after."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        elements = self.read()
        return elements if dtype is None else elements.astype(dtype, copy=False)


class LayerWriter:
    """Writes the parameters of a model as a step without optimizer state; every layer is a part of its own.

    Args:
        root: the folder of the checkpoints; made if it is missing.
        step: the number of steps that the parameters have been trained here.

    Nothing counts before :meth:`commit`.
    """

    def __init__(self, root: Path, step: int = 0) -> None:
        self._step, self._directory = step, step_directory(root.absolute(), step)
        self._data = f"data-{secrets.token_hex(4)}"
        (self._directory / self._data).mkdir(parents=True)
        self._checksums: dict[str, str] = {}

    def write(self, layer: str, arrays: Mapping[tuple[str, ...], ReadLater]) -> None:
        """Writes a layer, whose arrays come by their path inside it; memory holds one of them at a time.

        Raises the errors of reading the arrays, and OSError.
        """
        part = StepPart(name=part_file_name(layer), layers=(layer,), ranks=(0,))
        folder = self._directory / self._data
        held = {}
        for path, array in arrays.items():
            everything = (slice(None),) * len(array.shape)
            held[layer, PARAMS, *path] = HostArray(array.shape, array.dtype, array.shape, ((everything, array),))
        writer = PartWriter(0, [part], [0], batch_bytes=_LAYER_BATCH_BYTES)
        try:
            writer.write(folder, held)
            self._checksums |= writer.finish(folder, held)
        except ValueError as error:
            if (code := re.search(r"os_error_code='(\d+)'", str(error))) is None:
                raise
            # TensorStore reports a refusal by the file system as a ValueError, like every other error.
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(folder)) from error
        finally:
            writer.close()

    def commit(self, host: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
        """Makes the step count, with plain data beside the arrays."""
        sync_directory(self._directory / self._data)
        Commit(step=self._step, data=self._data, parts=self._checksums, layout=dict(layout), host=dict(host)).write(
            self._directory
        )
