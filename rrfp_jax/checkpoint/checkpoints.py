"""The checkpoints of a run: saved in the background, committed as a whole, restored into any layout."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.checkpoint.arrays import OPTIMIZER, PARAMS, HostArray, Name, copy_to_host
from rrfp_jax.checkpoint.chunk_layers import ChunkLayers
from rrfp_jax.checkpoint.coordinator import Alone, Calls, Coordinator, NotDone, Together, sentence
from rrfp_jax.checkpoint.durable_files import canonical_json, remove_tree
from rrfp_jax.checkpoint.ownership import Owner, parts_of_step
from rrfp_jax.checkpoint.part_writer import PartWriter
from rrfp_jax.checkpoint.reader import Found, check_files, lacking_state, open_step, read_layers
from rrfp_jax.checkpoint.record import Commit, Unusable, is_committed, last_committed, step_directory, steps_in
from rrfp_jax.checkpoint.retention import keep_last, remove_leftovers
from rrfp_jax.programs.shardings import spread
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.waiting import result_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended."""

    step: int
    failure: str | None
    """Why the step was not committed; None: it was."""
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """What is to be saved of a step; ``arrays`` and ``host`` are this process's."""

    step: int
    arrays: Mapping[Name, HostArray]
    host: Mapping[str, Any]
    keep_also: frozenset[int]
    """Steps that stay beside the newest ones."""


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
        before_commit: called on rank 0 before a step is committed; an error that it raises is why it is not.

    What earlier saves left that did not come to an end is removed at once. Ranks wait for each other for as long as all
    of them live. An error of one rank reaches all of them: :class:`NotDone`, a ValueError, with the same sentence.
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
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: give 1 or more checkpoints")
        self.directory, self._owners, self._keep = Path(directory).absolute(), owners, keep
        self._layout = dict(layout or {})
        self._parts = parts_of_step(owners)
        coordinator = coordinator or Alone()
        self._rank, self._calls, self._before_commit = coordinator.rank, Calls(coordinator), before_commit
        num_ranks = 1 + max(rank for part in self._parts for rank in part.ranks)
        if processes is None:
            processes = range(num_ranks) if jax.process_count() > 1 else [0] * num_ranks
        self._writer = PartWriter(self._rank, self._parts, processes)
        self._under_way: Future[Saved] | None = None
        self._calls.next("leftovers").first("removed", lambda: remove_leftovers(self.directory))

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        states: Iterable[tuple[ChunkLayers, ChunkState]],
        host: Mapping[str, Any],
        *,
        keep_also: Iterable[int] = (),
    ) -> None:
        """Copy the state and write it in the background; waits for the save before, if that is still under way.

        A save that fails ends with a warning; what was committed before stays.

        Args:
            step: how many steps the state has been trained; a step that is committed already is replaced.
            states: of this process's chunks, copies of chunks included. Their arrays may be given away (donated) once
                this returns.
            host: plain data to be kept with the step; rank 0's counts.
            keep_also: committed steps that stay beside the newest ones.

        Raises ValueError where ``host`` is not plain data, or states lack a layer that this rank is to write; the step
        is then saved by no rank.
        """
        self.wait()
        together = self._calls.next("save")
        attempt = _Attempt(step=step, arrays={}, host=host, keep_also=frozenset(keep_also))
        try:
            canonical_json(host)
            attempt = replace(attempt, arrays=self._copy(states), host=host)
        except Exception as error:
            problem = sentence(error)
            self._under_way = _in_background(lambda: self._save(together, attempt, problem))
            raise
        self._under_way = _in_background(lambda: self._save(together, attempt, None))

    def wait(self) -> Saved | None:
        """Wait for the save under way; returns how the last one ended."""
        return None if self._under_way is None else result_of(self._under_way)

    @property
    def has_failed(self) -> bool:
        """Whether the last save is known to have ended without a checkpoint."""
        save = self._under_way
        return save is not None and save.done() and (save.exception() or save.result().failure) is not None

    def close(self) -> Saved | None:
        """Wait for the save under way and free the threads; returns how the last save ended."""
        last = self.wait()
        self._writer.close()
        return last

    def _copy(self, states: Iterable[tuple[ChunkLayers, ChunkState]]) -> dict[Name, HostArray]:
        arrays: dict[Name, jax.Array] = {}
        writes: dict[Name, bool] = {}
        given: set[str] = set()  # a layer may have no arrays
        for layers, state in states:
            given.update(layers.names)
            for name, array in layers.split(state).items():
                owner = self._owners[name[0]]
                has_device = owner.device in array.sharding.device_set
                if self._rank in owner.ranks and (name not in arrays or (has_device and not writes[name])):
                    arrays[name], writes[name] = array, has_device
        missing = [n for n, owner in self._owners.items() if self._rank in owner.ranks and n not in given]
        if missing:
            raise ValueError(f"rank {self._rank} is to write {', '.join(missing)}: give the states of their chunks")
        return copy_to_host(arrays, writes)

    def _save(self, together: Together, attempt: _Attempt, problem: str | None) -> Saved:
        """On all ranks, in the background; ``problem``: why this rank cannot take part."""
        start_s = time.monotonic()
        try:
            self._save_together(together, attempt, problem)
            failure = None
        except Exception as error:
            failure = sentence(error)
            self._warn(f"step {attempt.step} was not saved: {failure}")
        return Saved(step=attempt.step, failure=failure, duration_s=time.monotonic() - start_s)

    def _save_together(self, together: Together, attempt: _Attempt, problem: str | None) -> None:
        directory = step_directory(self.directory, attempt.step)
        # Every attempt writes to a directory of its own, whose name rank 0 chooses.
        data = together.each("start", lambda: _start(directory, problem))[0]
        try:
            together.each("written", lambda: self._writer.write(directory / data, attempt.arrays))
            finished = together.each("finished", lambda: self._writer.finish(directory / data, attempt.arrays))
            parts = {part: checksum for own in finished for part, checksum in own.items()}
            together.first("committed", lambda: self._commit(attempt, data, parts))
        except NotDone:
            if self._rank == 0:
                remove_tree(directory / data)
                with suppress(OSError):
                    directory.rmdir()  # only if it is empty
            raise
        except ConnectionError:
            # Rank 0 may have committed the step, and not been heard: the record says it.
            if not is_committed(self.directory, attempt.step, data):
                raise
        if self._rank == 0:
            with suppress(OSError):  # the step is committed; what stays too long is removed after the next one
                keep_last(self.directory, attempt.step, self._keep, keep_also=attempt.keep_also)

    def _commit(self, attempt: _Attempt, data: str, parts: Mapping[str, str]) -> None:
        """On rank 0, once all have written. Raises OSError where the disk does not let it."""
        directory = step_directory(self.directory, attempt.step)
        missing = [part.name for part in self._parts if not (directory / data / f"{part.name}.json").exists()]
        if missing:
            raise OSError(
                f"{', '.join(missing)} is not in {directory} as rank 0 sees it: checkpoints need a directory that all "
                "processes share"
            )
        self._before_commit()
        commit = Commit(step=attempt.step, data=data, parts=dict(parts), layout=self._layout, host=dict(attempt.host))
        try:
            commit.write(directory)
        except OSError:
            if not is_committed(self.directory, attempt.step, data):
                raise

    # -- restoring ---------------------------------------------------------------------------------------------------

    def newest(self) -> Found | None:
        """The newest step that can be restored, or None; those that cannot are named in a warning each."""
        self.wait()
        together = self._calls.next("newest")
        for step in together.first("steps", lambda: steps_in(self.directory)):
            try:
                return self._examine(together, step)
            except NotDone as problem:
                self._warn(str(problem))
        return None

    def find(self, step: int) -> Found:
        """A step that can be restored; raises Unusable, a ValueError, where this one cannot."""
        self.wait()
        try:
            return self._examine(self._calls.next("find"), step)
        except NotDone as problem:
            raise Unusable(str(problem)) from None

    def restore(self, found: Found, targets: Sequence[tuple[ChunkLayers, ChunkState]]) -> list[ChunkState]:
        """The states of chunks, as ``targets`` say: arrays or specs (``jax.ShapeDtypeStruct``) with shardings.

        Every process reads its own share only; an optimizer state that is one and the same object in several targets is
        read once. Cuts, shardings and degrees may differ from those at saving, and so may frozen layers: the optimizer
        state of one that was, and is not any more, comes as specs for the caller to fill in, but for what other layers
        have in common with it, such as the number of updates. Raises ValueError, on all ranks, where model or
        optimizer differ.
        """
        states: list[ChunkState] = []
        shared: dict[int, dict[Name, jax.Array]] = {}

        def read() -> None:
            for layers, target in targets:
                specs, known = layers.split(target), shared.get(id(target.optimizer_state), {})
                leaves = known | _read(found, {name: spec for name, spec in specs.items() if name not in known})
                shared[id(target.optimizer_state)] = {n: leaf for n, leaf in leaves.items() if n[1] == OPTIMIZER}
                states.append(layers.join(leaves, target))

        self._calls.next("restore").each("read", read)
        return states

    def start_from(self, directory: Path, targets: Sequence[tuple[ChunkLayers, ChunkState]]) -> list[ChunkState]:
        """The states of chunks, as ``targets`` say, with the parameters of the newest step of another directory.

        Every process reads its own share only. Optimizer states come as specs for the caller to fill in. Raises
        ValueError, on all ranks, where there is no such step, or the model is another one.
        """
        together = self._calls.next("start from")
        step = together.first("newest", lambda: last_committed(directory))
        if step is None:
            raise Unusable(f"{directory} holds no checkpoint: give the folder of an import, or of a run that saved")
        found, states = self._examine(together, step, directory), []

        def read() -> None:
            for layers, target in targets:
                specs = layers.split(target)
                own = {name: spec for name, spec in specs.items() if name[1] == PARAMS}
                leaves = {name: spread(spec, spec.sharding) for name, spec in specs.items() if name not in own}
                states.append(layers.join(leaves | read_layers(found, own, as_stored=False), target))

        together.each("read", read)
        return states

    def _examine(self, together: Together, step: int, directory: Path | None = None) -> Found:
        found: list[Found] = []
        root = self.directory if directory is None else directory
        ranks = together.each(f"step {step} opened", lambda: found.append(open_step(root, step)))
        together.each(f"step {step} checked", lambda: check_files(found[0], self._rank, len(ranks)))
        return found[0]

    def _warn(self, what: str) -> None:
        """Once, not on every rank."""
        _LOG.log(logging.DEBUG if self._rank else logging.WARNING, "%s", what)


def _read(found: Found, specs: Mapping[Name, Any]) -> dict[Name, Any]:
    """The arrays of a step, and specs in place of those that it lacks because their layers were frozen."""
    lacking = lacking_state(found, specs)
    instead = {other: specs[name] for name, other in lacking.items() if other is not None}
    arrays = read_layers(found, {name: spec for name, spec in specs.items() if name not in lacking} | instead)
    if lacking:
        layers = ", ".join(dict.fromkeys(name[0] for name in lacking))
        _LOG.info("%s were frozen when step %d was saved: their optimizer state starts anew", layers, found.step)
    fresh = {
        name: spread(specs[name], specs[name].sharding) if other is None else arrays[other]
        for name, other in lacking.items()
    }
    return {name: arrays[name] for name in specs if name not in lacking} | fresh


def _start(directory: Path, problem: str | None) -> str:
    """Raise ValueError where an attempt cannot be begun, else return a name for it that no other attempt has."""
    if problem is not None:
        raise ValueError(problem)
    if directory.is_symlink():
        raise ValueError(f"{directory} is a symbolic link, through which nothing is written: remove it")
    return f"data-{secrets.token_hex(4)}"


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
