"""One attempt at saving a step: every process writes its parts, then one commits the step."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.checkpoint.files import canonical_json, sum_tree
from rrfp_jax.checkpoint.host_arrays import HostArray
from rrfp_jax.checkpoint.names import Name
from rrfp_jax.checkpoint.orbax_writing import GroupCheckpointer
from rrfp_jax.checkpoint.owners import Part
from rrfp_jax.checkpoint.record import Commit, PartRecord, step_directory


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is to be saved of a step; ``arrays`` and ``host`` are this process's."""

    step: int
    arrays: Mapping[Name, HostArray]
    host: Mapping[str, Any]
    directory: Path
    """The step's."""
    data: str
    """Name of the directory with the parts, the same on all ranks."""


def new_data_name() -> str:
    """A name for the directory of an attempt that no other attempt has."""
    return f"data-{secrets.token_hex(4)}"


class PartWriter:
    """Writes the parts that this process takes part in.

    Args:
        rank: this process.
        parts: all parts of a step, the same on all ranks.
        processes: ``jax.process_index()`` of every rank.
    """

    def __init__(self, rank: int, parts: Sequence[Part], processes: Sequence[int]) -> None:
        self._checkpointers = {
            part: GroupCheckpointer([processes[r] for r in part.ranks], label=f"checkpoint {part.name}")
            for part in parts
            if rank in part.ranks
        }

    def write(self, attempt: Attempt) -> dict[str, str]:
        """Write all parts; returns the checksums of the records of those that this process is responsible for."""
        written = {}
        folder = attempt.directory / attempt.data
        for part, checkpointer in self._checkpointers.items():
            own = set(part.layers)
            arrays = {name: array for name, array in attempt.arrays.items() if name[0] in own}
            folder.mkdir(parents=True, exist_ok=True)
            checkpointer.save(folder / part.name, arrays)
            if checkpointer.is_primary:
                record = PartRecord(
                    layers=part.layers,
                    arrays={name: (array.dtype.name, array.shape) for name, array in arrays.items()},
                    files=sum_tree(folder / part.name),
                )
                written[part.name] = record.write(folder / f"{part.name}.json")
        return written

    def close(self) -> None:
        """Free the threads."""
        for checkpointer in self._checkpointers.values():
            checkpointer.close()


def commit(attempt: Attempt, parts: Sequence[Part], written: Mapping[str, str], layout: Mapping[str, Any]) -> None:
    """Commit a step whose parts are all written; raises OSError where the disk does not let it."""
    missing = [part.name for part in parts if not (attempt.directory / attempt.data / f"{part.name}.json").exists()]
    if missing or written.keys() != {part.name for part in parts}:
        raise OSError(
            f"{', '.join(missing) or 'a part'} is not in {attempt.directory} as rank 0 sees it: checkpoints need a "
            "directory that all processes share"
        )
    Commit(step=attempt.step, data=attempt.data, parts=written, layout=layout, host=attempt.host).write(
        attempt.directory
    )


def attempt_at(root: Path, step: int, data: str, arrays: Mapping[Name, HostArray], host: Mapping[str, Any]) -> Attempt:
    """An attempt at a step; raises ValueError where ``host`` is not plain data."""
    canonical_json(host)
    return Attempt(step=step, arrays=arrays, host=host, directory=step_directory(root, step), data=data)
