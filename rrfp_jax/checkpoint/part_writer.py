"""Writing a step with Orbax: one checkpoint per part, by a group of processes, of arrays copied to host before.

Orbax's own handlers do not fit: that for ``jax.Array`` refuses arrays whose devices all belong to one process as soon
as the run has several, that for NumPy arrays writes on process 0 only. A handler of one's own is Orbax's public way
out; what it writes is what Orbax itself would, and plain Orbax reads it.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath  # type: ignore[import-untyped]
from orbax.checkpoint import future, type_handlers

from rrfp_jax.checkpoint.arrays import HostArray, Name, batches, nested
from rrfp_jax.checkpoint.durable_files import sum_tree
from rrfp_jax.checkpoint.ownership import Part
from rrfp_jax.checkpoint.record import PartRecord
from rrfp_jax.private.orbax_names import TENSORSTORE_SETTINGS, build_array_write_spec

_CHUNK_BYTES = 16 << 20
"""What is read at once, at least: small enough to read a share of a large array, large enough for a disk."""
_BATCH_BYTES = 256 << 20
_LOCKING = "file_io_locking"
_TYPE = type_handlers.NumpyHandler().typestr()
"""So that whoever reads with plain Orbax and names no sharding gets NumPy arrays."""


class _HostArrayHandler(type_handlers.TypeHandler):
    """Writes this process's pieces of arrays; ``primary`` also writes what is known of each array as a whole."""

    def __init__(self, *, primary: bool, batch_bytes: int) -> None:
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
        """In transactions, which save a third of the time where arrays are small, but hold what they write."""
        store = await _open_store(values[0], infos[0], args[0])
        named = [(value, info.name) for value, info in zip(values, infos, strict=True)]
        for batch in batches(((each, each[0].nbytes) for each in named), self._batch_bytes):
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
        raise NotImplementedError("see reader")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("see reader")


async def _open_store(value: HostArray, info: Any, arg: ocp.SaveArgs) -> ts.KvStore:
    """Where this process writes; asked for an array, but the same for all of a checkpoint."""
    spec = build_array_write_spec(
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


class PartWriter:
    """Writes the parts that this process takes part in, side by side with the other processes of each.

    Args:
        rank: this process.
        parts: all parts of a step, the same on all ranks.
        processes: ``jax.process_index()`` of every rank.
        batch_bytes: how much is written at a time, which memory holds once more.

    Nobody waits for anybody here: the caller sees to it that all ranks have written before any of them finishes.
    """

    def __init__(
        self, rank: int, parts: Sequence[Part], processes: Sequence[int], *, batch_bytes: int = _BATCH_BYTES
    ) -> None:
        self._rank = rank
        self._handlers = {
            part: _handler(
                [processes[other] for other in part.ranks], is_first=rank == part.ranks[0], batch_bytes=batch_bytes
            )
            for part in parts
            if rank in part.ranks
        }

    def write(self, folder: Path, arrays: Mapping[Name, HostArray]) -> None:
        """Write this process's share of every part into a folder of its own below ``folder``.

        Raises whatever Orbax, TensorStore or the file system raise.
        """
        for part, handler in self._handlers.items():
            path = folder / part.name
            path.mkdir(parents=True, exist_ok=True)
            if not _of(part, arrays):  # Orbax refuses to save layers that have no arrays
                continue
            with _raised_is_not_logged(), _without_locks():
                handler.save(epath.Path(path), args=ocp.args.PyTreeSave(nested(_of(part, arrays))))

    def finish(self, folder: Path, arrays: Mapping[Name, HostArray]) -> dict[str, str]:
        """Put together the parts whose first process this is, once all processes have written their shares.

        Returns the checksums of the parts' records.
        """
        written = {}
        for part, handler in self._handlers.items():
            if self._rank == part.ranks[0]:
                path, own = folder / part.name, _of(part, arrays)
                if own:
                    with _raised_is_not_logged(), _without_locks():
                        handler.finalize(epath.Path(path))
                shapes = tuple((name, array.dtype.name, array.shape) for name, array in own.items())
                record = PartRecord(layers=part.layers, arrays=shapes, files=sum_tree(path))
                written[part.name] = record.write(folder / f"{part.name}.json")
        return written

    def close(self) -> None:
        """Free the threads."""
        for handler in self._handlers.values():
            handler.close()


def _of(part: Part, arrays: Mapping[Name, HostArray]) -> dict[Name, HostArray]:
    own = set(part.layers)
    return {name: array for name, array in arrays.items() if name[0] in own}


def _handler(processes: Sequence[int], *, is_first: bool, batch_bytes: int) -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler, without its Checkpointer: that brings processes together by barriers with a deadline of their
    own, in which the others are left waiting when one of them fails.

    Args:
        processes: ``jax.process_index()`` of all that write the part, the first of them first.
        is_first: whether this process is that one, which also writes what is known of the part as a whole.
    """
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_compression=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=processes[0], active_processes=set(processes)
        ),
        type_handler_registry=type_handlers.create_type_handler_registry(
            (HostArray, _HostArrayHandler(primary=is_first, batch_bytes=batch_bytes)),
            (jax.Array, type_handlers.ArrayHandler()),  # none is saved, but Orbax warns if nobody could
        ),
    )


@contextmanager
def _raised_is_not_logged() -> Iterator[None]:
    """Orbax's threads log the traceback of every error that they also hand on: it is told once, by who saves."""

    def is_new(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised" not in str(record.msg)

    log = logging.getLogger("absl")
    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


@contextmanager
def _without_locks() -> Iterator[None]:
    """Turn off TensorStore's locks on its files, which not every file system has (Lustre without ``flock``).

    No two processes write the same file here: each has a folder of its own, and one process alone merges them.
    """
    TENSORSTORE_SETTINGS[_LOCKING] = {"mode": "none"}
    try:
        yield
    finally:
        TENSORSTORE_SETTINGS.pop(_LOCKING, None)
