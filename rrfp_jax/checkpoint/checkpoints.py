"""The checkpoints of a run: saved in the background, committed as a whole, restored into any layout."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.checkpoint.attempt import Attempt, PartWriter, attempt_at, commit, new_data_name
from rrfp_jax.checkpoint.coordinator import Alone, Coordinator, Gatherings
from rrfp_jax.checkpoint.files import remove_tree
from rrfp_jax.checkpoint.host_arrays import HostArray, copy_to_host
from rrfp_jax.checkpoint.layers import ChunkLayers
from rrfp_jax.checkpoint.names import Name
from rrfp_jax.checkpoint.owners import Owner, parts_of_step
from rrfp_jax.checkpoint.reader import Found, check_files, open_step, read_layers, steps_in
from rrfp_jax.checkpoint.record import Unusable
from rrfp_jax.checkpoint.retention import keep_last, remove_leftovers
from rrfp_jax.programs.initial import ChunkState
from rrfp_jax.waiting import result_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended."""

    step: int
    failure: str | None
    """Why the step was not committed; None: it was."""
    duration_s: float


class Checkpoints:
    """Saves and restores the state of a run. Every method is called by all ranks, in the same order.

    Args:
        directory: shared by all ranks; made where it is missing.
        owners: by layer, in the model's order; see :func:`rrfp_jax.checkpoint.layer_owners`.
        keep: how many committed steps stay.
        coordinator: None for a run of one process.
        processes: ``jax.process_index()`` of every rank; None: the rank itself, or 0 where each rank runs a JAX of its
            own.
        layout: written down with every step, for people.
        timeout_s: how long ranks wait for each other before a save counts as failed.

    What earlier saves left that did not come to an end is removed at once.
    """

    def __init__(
        self,
        directory: Path,
        owners: Mapping[str, Owner],
        *,
        keep: int = 3,
        coordinator: Coordinator | None = None,
        processes: Sequence[int] | None = None,
        layout: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: give 1 or more checkpoints")
        self.directory, self._owners, self._keep = Path(directory).absolute(), owners, keep
        self._layout = dict(layout or {})
        self._parts = parts_of_step(owners)
        self._gatherings = Gatherings(coordinator or Alone(), deadline_s=timeout_s)
        self._rank = self._gatherings.rank
        num_ranks = 1 + max(rank for part in self._parts for rank in part.ranks)
        if processes is None:
            processes = range(num_ranks) if jax.process_count() > 1 else [0] * num_ranks
        self._writer = PartWriter(self._rank, self._parts, processes)
        self._under_way: Future[Saved] | None = None
        self._first_rank_does("leftovers", lambda: remove_leftovers(self.directory))

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, states: Iterable[tuple[ChunkLayers, ChunkState]], host: Mapping[str, Any]) -> None:
        """Copy the state and write it in the background; waits for the save before, if that is still under way.

        A save that fails ends with a warning; what was committed before stays.

        Args:
            step: how many steps the state has been trained; a step that is committed already is replaced.
            states: of this process's chunks, copies of chunks included. Their arrays may be given away (donated) once
                this returns.
            host: plain data to be kept with the step; rank 0's counts.

        Raises ValueError where ``host`` is not plain data, or states lack a layer that this rank is to write.
        """
        self.wait()
        arrays = self._copy(states)
        attempt = attempt_at(self.directory, step, new_data_name(), arrays, host)
        self._under_way = _in_background(lambda: self._save(attempt))

    def wait(self) -> Saved | None:
        """Wait for the save under way; returns how the last one ended."""
        return None if self._under_way is None else result_of(self._under_way)

    def close(self) -> None:
        """Wait for the save under way and free the threads."""
        self.wait()
        self._writer.close()

    def _copy(self, states: Iterable[tuple[ChunkLayers, ChunkState]]) -> dict[Name, HostArray]:
        arrays: dict[Name, jax.Array] = {}
        writes: dict[Name, bool] = {}
        for layers, state in states:
            for name, array in layers.split(state).items():
                owner = self._owners[name[0]]
                has_device = owner.device in array.sharding.device_set
                if self._rank in owner.ranks and (name not in arrays or (has_device and not writes[name])):
                    arrays[name], writes[name] = array, has_device
        given = {name[0] for name in arrays}
        missing = [n for n, owner in self._owners.items() if self._rank in owner.ranks and n not in given]
        if missing:
            raise ValueError(f"rank {self._rank} is to write {', '.join(missing)}: give the states of their chunks")
        return copy_to_host(arrays, writes)

    def _save(self, attempt: Attempt) -> Saved:
        start_s = time.monotonic()
        try:
            failure = self._save_together(attempt)
        except Exception as error:
            failure = _sentence(error)
        if failure is not None:
            _LOG.warning("step %d was not saved: %s", attempt.step, failure)
        return Saved(step=attempt.step, failure=failure, duration_s=time.monotonic() - start_s)

    def _save_together(self, attempt: Attempt) -> str | None:
        attempt = _with_data(attempt, self._gatherings.from_first("data", attempt.data))
        written, failure = {}, None
        try:
            written = self._writer.write(attempt)
        except Exception as error:  # whatever Orbax, TensorStore or the file system may raise
            failure = f"rank {self._rank}: {_sentence(error)}"
        reports = self._gatherings.gather("written", {"parts": written, "failure": failure})
        if self._rank:
            return self._gatherings.from_first("committed")
        failure = self._conclude(attempt, reports)
        with suppress(ConnectionError):  # the step is committed all the same, or is not
            self._gatherings.gather("committed", failure)
        return failure

    def _conclude(self, attempt: Attempt, reports: Sequence[Mapping[str, Any]]) -> str | None:
        """On rank 0, once all have written: commit, or clear away."""
        failure = next((report["failure"] for report in reports if report["failure"]), None)
        if failure is None:
            try:
                written = {part: sha for report in reports for part, sha in report["parts"].items()}
                commit(attempt, self._parts, written, self._layout)
            except OSError as error:
                failure = _sentence(error)
        if failure is None:
            with suppress(OSError):  # the step is committed; what stays too long is removed after the next one
                keep_last(self.directory, attempt.step, self._keep)
            return None
        remove_tree(attempt.directory / attempt.data)
        with suppress(OSError):
            attempt.directory.rmdir()  # only if it is empty
        return failure

    # -- restoring ---------------------------------------------------------------------------------------------------

    def newest(self) -> Found | None:
        """The newest step that can be restored, or None; those that cannot are named in a warning each."""
        self.wait()
        for step in self._gatherings.from_first("steps", steps_in(self.directory)):
            found, problem = self._examine(step)
            if found is not None:
                return found
            _LOG.warning("%s", problem)
        return None

    def find(self, step: int) -> Found:
        """A step that can be restored; raises Unusable, a ValueError, where this one cannot."""
        self.wait()
        found, problem = self._examine(step)
        if found is None:
            raise Unusable(problem)
        return found

    def restore(self, found: Found, targets: Sequence[tuple[ChunkLayers, ChunkState]]) -> list[ChunkState]:
        """The states of chunks, as ``targets`` say: arrays or specs (``jax.ShapeDtypeStruct``) with shardings.

        Every process reads its own share only. Cuts, shardings and degrees may differ from those at saving. Raises
        ValueError where model or optimizer do.
        """
        return [layers.join(read_layers(found, layers.split(target)), target) for layers, target in targets]

    def _examine(self, step: int) -> tuple[Found | None, str | None]:
        found, problem = None, None
        try:
            found = open_step(self.directory, step)
        except Unusable as error:
            problem = str(error)
        problems = self._gatherings.gather("records", problem)
        if any(problems) or found is None:
            return None, next(filter(None, problems))
        problems = self._gatherings.gather("files", check_files(found, self._rank, len(problems)))
        return (None, next(filter(None, problems))) if any(problems) else (found, None)

    def _first_rank_does(self, what: str, action: Callable[[], None]) -> None:
        if self._rank == 0:
            action()
        self._gatherings.gather(what)


def _with_data(attempt: Attempt, data: str) -> Attempt:
    return Attempt(step=attempt.step, arrays=attempt.arrays, host=attempt.host, directory=attempt.directory, data=data)


def _sentence(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    short = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
    return f"{type(error).__name__}: {short}"


def _in_background(work: Callable[[], Saved]) -> "Future[Saved]":
    """On a thread that does not keep the process from ending: what is not committed does not count anyway."""
    future: Future[Saved] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
