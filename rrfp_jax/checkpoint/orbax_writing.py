"""Writing with Orbax: one checkpoint per group of processes, of arrays that were copied to host before.

Orbax's own handlers do not fit: that for ``jax.Array`` refuses arrays whose devices all belong to one process as soon
as the run has several, that for NumPy arrays writes on process 0 only. A handler of one's own is Orbax's public way
out; what it writes is what Orbax itself would, and plain Orbax reads it.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future, type_handlers

# Where Orbax puts an array inside a checkpoint, for its merging of what several processes wrote, has no public name.
from orbax.checkpoint._src.serialization import tensorstore_utils

from rrfp_jax.checkpoint.host_arrays import HostArray
from rrfp_jax.checkpoint.names import Name, nested

_CHUNK_BYTES = 16 << 20
"""What is read at once, at least: small enough to read a share of a large array, large enough for a disk."""
_BATCH_BYTES = 256 << 20
_TYPE = type_handlers.NumpyHandler().typestr()
"""So that whoever reads with plain Orbax and names no sharding gets NumPy arrays."""


class _HostArrayHandler(type_handlers.TypeHandler):
    """Writes this process's pieces of arrays; ``primary`` also writes what is known of each array as a whole."""

    def __init__(self, *, primary: bool) -> None:
        self._primary = primary

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
        """In transactions, which save a third of the time where arrays are small, but hold what they write."""
        store = await _open_store(values[0], infos[0], args[0])
        batch: list[tuple[HostArray, str]] = []
        held_bytes = 0
        for number, (value, info) in enumerate(zip(values, infos, strict=True), start=1):
            batch.append((value, info.name))
            held_bytes += value.nbytes
            if held_bytes > _BATCH_BYTES or number == len(values):
                transaction = ts.Transaction()
                await asyncio.gather(*(self._write(value, store / f"{name}/", transaction) for value, name in batch))
                await transaction.commit_async()
                batch, held_bytes = [], 0

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
        raise NotImplementedError("see orbax_reading")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("see orbax_reading")


async def _open_store(value: HostArray, info: Any, arg: ocp.SaveArgs) -> ts.KvStore:
    """Where this process writes; asked for an array, but the same for all of a checkpoint."""
    spec = tensorstore_utils.build_array_write_spec(
        info,
        arg,
        global_shape=value.shape,
        local_shape=value.piece_shape,
        dtype=value.dtype,
        use_ocdbt=True,
        process_index=jax.process_index(),
    ).json["kvstore"]
    return await ts.KvStore.open({**spec, "path": ""}, context=info.ts_context)


def chunk_shape(shape: Sequence[int], item_bytes: int, limit_bytes: int) -> list[int]:
    """Cut a piece of an array into equal chunks of at most ``limit_bytes``, as far as its sizes have divisors."""
    chunks = list(shape)
    while math.prod(chunks) * item_bytes > limit_bytes:
        largest = max(range(len(chunks)), key=chunks.__getitem__)
        chunks[largest] //= next(n for n in range(2, chunks[largest] + 1) if chunks[largest] % n == 0)
    return chunks


class _PatientHandler(ocp.CheckpointHandler):
    """Keeps an error until every member has passed all barriers: nobody waits for a member whose disk is full."""

    def __init__(self, inner: ocp.PyTreeCheckpointHandler) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def save(self, directory: Any, args: "_Arrays") -> None:
        self.error = None
        try:
            self._inner.save(directory, args=ocp.args.PyTreeSave(args.tree))
        except Exception as error:
            self.error = error

    def finalize(self, directory: Any) -> None:
        try:
            if self.error is None:
                self._inner.finalize(directory)
        except Exception as error:
            self.error = error

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError("see orbax_reading")

    def close(self) -> None:
        self._inner.close()


@ocp.args.register_with_handler(_PatientHandler, for_save=True, for_restore=True)
@dataclass
class _Arrays(ocp.args.CheckpointArgs):
    tree: Any


class GroupCheckpointer:
    """Saves arrays that are spread over the processes of a group, which all take part in every save.

    Args:
        processes: ``jax.process_index()`` of the group's members, this process among them.
        label: the same on all members, and no other group's; tells their barriers apart.

    Members wait for each other for five minutes at most, which is Orbax's own limit.
    """

    def __init__(self, processes: Sequence[int], *, label: str) -> None:
        primary = min(processes)
        self.is_primary = jax.process_index() == primary
        options = ocp.options.MultiprocessingOptions(
            primary_host=primary, active_processes=set(processes), barrier_sync_key_prefix=label
        )
        self._handler = _PatientHandler(
            ocp.PyTreeCheckpointHandler(
                use_ocdbt=True,
                use_compression=False,
                multiprocessing_options=options,
                type_handler_registry=type_handlers.create_type_handler_registry(
                    (HostArray, _HostArrayHandler(primary=self.is_primary)),
                    (jax.Array, type_handlers.ArrayHandler()),  # none is saved, but Orbax warns if nobody could
                ),
            )
        )
        # Not its AsyncCheckpointer: that would keep the process from ending while members wait for each other, logs
        # every failure itself, and hands errors of one save to the next.
        self._checkpointer = ocp.Checkpointer(self._handler, multiprocessing_options=options)

    def save(self, path: Path, arrays: Mapping[Name, HostArray]) -> None:
        """Write the arrays to a new directory; returns once all members have.

        Raises whatever Orbax, TensorStore or the file system raise, on the member where it happens; the directory is
        complete only where none does.
        """
        self._checkpointer.save(path, args=_Arrays(nested(arrays)))
        if self._handler.error is not None:
            raise self._handler.error

    def close(self) -> None:
        """Free the threads."""
        self._checkpointer.close()
