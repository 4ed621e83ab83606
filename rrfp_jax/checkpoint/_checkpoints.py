"""The checkpoints of a run: saved in the background, committed as a whole, restored into any layout.

The ranks of a run save and restore together, by joint calls, without losing each other. A joint call goes through
phases, and at the end of each all ranks gather. A gathering is named by (call, number, phase). The number advances once
per call, before anything can fail, and a rank that could not do its share of a phase says so in that phase's gathering.
So every rank comes to the same gatherings, whoever is slow and whatever fails, and leaves them with the same outcome.
There is no deadline: a rank that lives is waited for. One that is lost ends the gathering on all others, or, where
these go on without it, is missing in the result. Then the call fails on all of them, since nobody has done the lost
rank's share, and the next one shares out anew.
"""

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import jax

from rrfp_jax.checkpoint._arrays import OPTIMIZER, PARAMS, ArrayName, HostArray, copy_to_host, stored_name
from rrfp_jax.checkpoint._chunk_layers import ChunkLayers
from rrfp_jax.checkpoint._part_writer import Owner, PartWriter, parts_of_step
from rrfp_jax.checkpoint._reader import (
    BASE,
    LACKS_BASE,
    StoredStep,
    base_of,
    check_files,
    check_layers,
    frozen_state,
    open_step,
    read_arrays,
    read_weights,
)
from rrfp_jax.checkpoint._records import (
    Commit,
    Unusable,
    canonical_json,
    is_committed,
    keep_last,
    last_committed,
    remove_leftovers,
    remove_tree,
    step_directory,
    steps_in,
)
from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.programs.chunk import ADAPTERS, whole_name
from rrfp_jax.programs.shardings import spread
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.storage import STORE_FAILED, located
from rrfp_jax.waiting import result_of

_LOG = logging.getLogger(__name__)


# -- joint calls -------------------------------------------------------------------------------------------------------


class Coordinator(Protocol):
    """Brings the ranks of a run together; all make the same calls."""

    rank: int

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that live, ascending."""

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:
        """Blocks until every living rank has brought plain data, and returns the data of all by rank, the same on all.

        ``name`` is new for every gathering, and the same on all ranks. Raises ConnectionError if a rank is lost without
        which the others cannot go on.
        """


class NotDone(ValueError):
    """Raised if a rank could not do its share; the message is one sentence, and the same on all ranks."""


class _RanksLost(NotDone):
    """Raised if ranks were lost during a call, and the others go on."""


def one_line(error: BaseException) -> str:
    """Returns an error in one line of at most 400 characters."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not isinstance(error, OSError | ValueError | RuntimeError):
            text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-195:]}"


# -- checkpoints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """How a save ended."""

    step: int
    failure: str | None
    """Why the step was not committed. None: it was."""
    met_loss: bool = False
    """Whether ranks were lost meanwhile, so that the others should save again."""


class Checkpoints:
    """Saves and restores the state of a run. Every method is called by all ranks, in the same order.

    Args:
        directory: shared by all ranks; made if it is missing.
        owners: owners by layer, in the model's order; see :func:`rrfp_jax.checkpoint.layer_owners`.
        keep: the number of committed steps that stay.
        coordinator: None for a run of one process.
        layout: written down with every step, for people.
        before_commit: called on the first rank before a step is committed or old ones are removed; an error that it
            raises prevents that.

    Leftovers of saves that did not come to an end are removed at once. Ranks wait for each other for as long as all of
    them live. An error of one rank reaches all of them: :class:`NotDone`, a ValueError, with the same sentence.
    """

    def __init__(
        self,
        directory: Path,
        owners: Mapping[str, Owner],
        *,
        keep: int = 3,
        coordinator: Coordinator | None = None,
        layout: Mapping[str, Any] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: give 1 or more checkpoints")
        self.directory, self._keep = located(directory).absolute(), keep
        self._layout = dict(layout or {})
        self._coordinator = coordinator or SimpleNamespace(
            rank=0, living=(0,), gather=lambda name, data=None: {0: data}
        )
        self._rank, self._before_commit, self._num_calls = self._coordinator.rank, before_commit, Counter[str]()
        self.living = tuple(self._coordinator.living)
        """The ranks that share out the next call."""
        self._base: dict[str, Any] | None = None  # the step whose layers saves leave out, by base_of
        self._share_out(owners)
        self._under_way: Future[SaveOutcome] | None = None
        self._on_first(self._next("leftovers"), "removed", lambda: remove_leftovers(self.directory))

    def _share_out(self, owners: Mapping[str, Owner]) -> None:
        self._owners, self._parts = owners, parts_of_step(owners)
        num_ranks = 1 + max(rank for part in self._parts for rank in part.ranks)
        # ``jax.process_index()`` of every rank: the rank itself, or 0 if each rank runs a JAX of its own.
        processes = range(num_ranks) if jax.process_count() > 1 else [0] * num_ranks
        self._writer = PartWriter(self._rank, self._parts, processes)

    def follow(self, living: tuple[int, ...], owners: Mapping[str, Owner]) -> None:
        """Goes on with the ranks that live from now on, and these owners of the layers. Blocks until the save under way
        has ended."""
        self.close()
        self.living = living
        self._share_out(owners)

    @property
    def _is_first(self) -> bool:
        return self._rank == self.living[0]

    @property
    def _level(self) -> int:
        return logging.WARNING if self._is_first else logging.DEBUG  # a warning of all ranks is logged once

    def _next(self, kind: str) -> str:
        """Returns the name of the next joint call of its kind."""
        self._num_calls[kind] += 1
        return f"{kind} {self._num_calls[kind]}"

    def _on_all(self, call: str, phase: str, action: Callable[[], Any]) -> list[Any]:
        """Returns the results of all ranks, which are plain data, by rank.

        Raises NotDone on all ranks if the action of one of them failed.
        """
        result, failure, cause = None, None, None
        try:
            result = action()
        except Exception as error:  # whatever it is, the others must hear of it
            failure, cause = one_line(error), error
            if not isinstance(error, Unusable):  # which is the same on all ranks
                failure = f"rank {self._rank}: {failure}"
        told = [result, failure, list(self.living)]
        gathered = self._coordinator.gather(f"checkpoint {call} {phase}", told)
        # Some may have heard of a loss before the call, and shared out otherwise than the rest.
        ranks = sorted(gathered)
        missing = {rank for *_, living in gathered.values() for rank in living} - gathered.keys()
        if missing or any(sorted(living) != ranks for *_, living in gathered.values()):
            raise _RanksLost(f"{name_ranks(sorted(missing)) if missing else 'a rank'} was lost meanwhile")
        failures = [gathered[rank][1] for rank in ranks if gathered[rank][1] is not None]
        if failures:
            raise NotDone(failures[0]) from cause
        return [gathered[rank][0] for rank in ranks]

    def _on_first(self, call: str, phase: str, action: Callable[[], Any]) -> Any:
        """Returns the first rank's result of an action that only the first rank does."""
        results = self._on_all(call, phase, action if self._is_first else lambda: None)
        return results[sorted(self.living).index(self.living[0])]

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        states: Iterable[tuple[ChunkLayers, ChunkState]],
        host: Mapping[str, Any],
        *,
        keep_also: Iterable[int] = (),
    ) -> None:
        """Copies the state and writes it in the background; blocks until the save before has ended.

        A save that fails ends with a warning; steps that were committed before stay.

        Args:
            step: the number of steps that the state has been trained; a step that is committed already is replaced.
            states: states of this process's chunks, copies of chunks included. Their arrays may be given away (donated)
                once this returns.
            host: plain data to be kept with the step; that of the first rank counts.
            keep_also: committed steps that stay beside the newest ones.

        Raises ValueError if ``host`` is not plain data, or if states lack a layer that this rank is to write; the step
        is then saved by no rank.
        """
        self.wait()
        call = self._next("save")
        problem: str | None = "it was interrupted"
        arrays: dict[ArrayName, HostArray] = {}
        try:
            canonical_json(host)
            arrays = self._copy(states)
            problem = None
        except Exception as error:
            problem = one_line(error)
            raise
        finally:
            # A rank with a problem still takes part in the call, or the others would wait for it.
            host = host if self._base is None else {**host, BASE: self._base}
            rest: dict[str, Any] = {"keep_also": frozenset(keep_also), "problem": problem}
            self._under_way = _in_background(lambda: self._save(call, step, arrays, host, **rest))

    def wait(self) -> SaveOutcome | None:
        """Blocks until the save under way has ended; returns how the last one ended."""
        return None if self._under_way is None else result_of(self._under_way)

    @property
    def has_failed(self) -> bool:
        """Whether the last save is known to have ended without a checkpoint."""
        save = self._under_way
        return save is not None and save.done() and (save.exception() or save.result().failure) is not None

    @property
    def has_met_loss(self) -> bool:
        """Whether the last save is known to have failed because ranks were lost meanwhile."""
        save = self._under_way
        return save is not None and save.done() and save.exception() is None and save.result().met_loss

    def close(self) -> SaveOutcome | None:
        """Blocks until the save under way has ended, and frees the threads; returns how the last save ended."""
        last = self.wait()
        self._writer.close()
        return last

    def _copy(self, states: Iterable[tuple[ChunkLayers, ChunkState]]) -> dict[ArrayName, HostArray]:
        arrays: dict[ArrayName, jax.Array] = {}
        writes: dict[ArrayName, bool] = {}
        given: set[str] = set()  # a layer may have no arrays
        for layers, state in states:
            given.update(layers.names)
            for name, array in layers.split(state).items():
                if self._base is not None and not name[0].startswith(ADAPTERS):
                    continue
                owner = self._owners[name[0]]
                has_device = owner.device in array.sharding.device_set
                if self._rank not in owner.ranks or (owner.apart and not has_device and name[1] == PARAMS):
                    continue
                # Of several copies the one on the owner's device counts, in whatever order they come.
                if name not in arrays or (has_device and not writes[name]):
                    arrays[name], writes[name] = array, has_device or owner.apart
        missing = [n for n, owner in self._owners.items() if self._rank in owner.ranks and n not in given]
        if missing:
            raise ValueError(f"rank {self._rank} is to write {', '.join(missing)}: give the states of their chunks")
        return copy_to_host(arrays, writes)

    def _save(
        self,
        call: str,
        step: int,
        arrays: Mapping[ArrayName, HostArray],
        host: Mapping[str, Any],
        *,
        keep_also: frozenset[int],
        problem: str | None,
    ) -> SaveOutcome:
        """Saves a step, on all ranks, in the background; returns failures, which it logs.

        ``problem``: why this rank cannot take part.
        """
        directory = step_directory(self.directory, step)

        def start() -> str:
            if problem is not None:
                raise ValueError(problem)
            if directory.is_symlink():
                raise ValueError(f"{directory} is a symbolic link, through which nothing is written: remove it")
            return f"data-{secrets.token_hex(4)}"

        try:
            # Every attempt writes to a directory of its own, whose name the first rank chooses.
            data = self._on_all(call, "start", start)[0]
            try:
                self._on_all(call, "written", lambda: self._writer.write(directory / data, arrays))
                finished = self._on_all(call, "finished", lambda: self._writer.finish(directory / data, arrays))
                parts = {part: checksum for own in finished for part, checksum in own.items()}
                commit = {"step": step, "data": data, "parts": parts, "layout": self._layout, "host": dict(host)}
                self._on_first(call, "committed", lambda: self._commit(Commit(**commit), directory))
            except _RanksLost:
                raise  # The lost rank may have committed the step, so its data stay.
            except NotDone as failed:
                if self._is_first and STORE_FAILED not in str(failed):  # which may have committed it
                    remove_tree(directory / data)
                    with suppress(OSError):
                        directory.rmdir()  # only if it is empty
                raise
            except ConnectionError:
                # Rank 0 may have committed the step before it was lost: the record says so.
                if not is_committed(self.directory, step, data):
                    raise
            if self._is_first:
                # The step is committed. Files that stay too long are removed after the next one.
                with suppress(OSError, ValueError):
                    keep_last(self.directory, step, self._keep, keep_also=keep_also, before_removal=self._before_commit)
        except Exception as error:
            failure = one_line(error)
            _LOG.log(self._level, "step %d was not saved: %s", step, failure)
            return SaveOutcome(step=step, failure=failure, met_loss=isinstance(error, _RanksLost))
        return SaveOutcome(step=step, failure=None)

    def _commit(self, commit: Commit, directory: Path) -> None:
        """Commits a step on the first rank, once all have written. Raises OSError if the disk does not let it."""
        missing = [part.name for part in self._parts if not (directory / commit.data / f"{part.name}.json").exists()]
        if missing:
            raise OSError(
                f"{', '.join(missing)} is not in {directory} as rank {self._rank} sees it: checkpoints need a "
                "directory that all processes share"
            )
        self._before_commit()
        try:
            try:
                commit.write(directory)
            except FileExistsError:
                # A process that was stopped after the check may continue when others have committed the step.
                self._before_commit()
                commit.write(directory, replaces=True)
        except OSError:
            # The error may have come after the record was in its place.
            if not is_committed(self.directory, commit.step, commit.data):
                raise

    # -- restoring ---------------------------------------------------------------------------------------------------

    def newest(self) -> StoredStep | None:
        """Returns the newest step that can be restored, or None; a warning names each newer one that cannot.

        Raises ValueError where it is the base that is missing, or the object store does not answer: whoever starts over
        would replace the adapters, or the steps.
        """
        self.wait()
        call = self._next("newest")
        for step in self._on_first(call, "steps", lambda: steps_in(self.directory)):
            try:
                return self._examine(call, step)
            except NotDone as problem:
                if LACKS_BASE in str(problem) or STORE_FAILED in str(problem):
                    raise
                _LOG.log(self._level, "%s", problem)
        return None

    def find(self, step: int) -> StoredStep:
        """Returns a step that can be restored; raises Unusable, a ValueError, if this one cannot."""
        self.wait()
        try:
            return self._examine(self._next("find"), step)
        except NotDone as problem:
            raise Unusable(str(problem)) from None

    def restore(self, stored: StoredStep, targets: Sequence[tuple[ChunkLayers, ChunkState]]) -> list[ChunkState]:
        """Returns the states of chunks, as ``targets`` say: arrays or specs (``jax.ShapeDtypeStruct``) with shardings.

        Every process reads its own share only; an optimizer state that is one and the same object in several targets is
        read once. Cuts, shardings and degrees may differ from those at saving, and so may frozen layers: the optimizer
        state of a layer that was frozen, and is not any more, comes as specs for the caller to fill in, except arrays
        that other layers have in common with it, such as the number of updates. Raises ValueError, on all ranks, if
        model or optimizer differ.
        """
        states: list[ChunkState] = []
        shared: dict[int, dict[ArrayName, jax.Array]] = {}

        def read() -> None:
            check_layers(stored, self._owners)
            for layers, target in targets:
                specs, known = layers.split(target), shared.get(id(target.optimizer_state), {})
                leaves = known | _read_state(stored, {name: spec for name, spec in specs.items() if name not in known})
                shared[id(target.optimizer_state)] = {n: leaf for n, leaf in leaves.items() if n[1] == OPTIMIZER}
                states.append(layers.join(leaves, target))

        self._on_all(self._next("restore"), "read", read)
        self._base = stored.host.get(BASE)
        return states

    def start_from(self, directory: Path, targets: Sequence[tuple[ChunkLayers, ChunkState]]) -> list[ChunkState]:
        """Returns the states of chunks, as ``targets`` say, with the parameters of another directory's newest step, or
        their averages.

        Every process reads its own share only. Optimizer states come as specs for the caller to fill in, and so do
        adapters that the step lacks. Where there are adapters, saves leave out all other layers from now on. Raises
        ValueError, on all ranks, if there is no such step, or if the model is another one.
        """
        call = self._next("start from")
        step = self._on_first(call, "newest", lambda: last_committed(directory))
        if step is None:
            raise Unusable(f"{directory} holds no checkpoint: give the folder of an import, or of a run that saved")
        stored, states = self._examine(call, step, directory), []
        there = {whole_name(layer) for part in stored.parts.values() for layer in part.layers}

        def is_fresh(layer: str) -> bool:
            return layer.startswith(ADAPTERS) and whole_name(layer) not in there

        def read() -> None:
            for layers, target in targets:
                specs = layers.split(target)
                own = {name: spec for name, spec in specs.items() if name[1] == PARAMS and not is_fresh(name[0])}
                leaves = {name: spread(spec, spec.sharding) for name, spec in specs.items() if name not in own}
                found = read_weights(stored, {stored_name(n): spec for n, spec in own.items()})
                states.append(layers.join(leaves | {name: found[stored_name(name)] for name in own}, target))

        self._on_all(call, "read", read)
        if any(layer.startswith(ADAPTERS) for layer in self._owners):
            self._base = base_of(stored)
        return states

    def _examine(self, call: str, step: int, directory: Path | None = None) -> StoredStep:
        """Returns a step once its records are read on every rank, and its files are checked, a share on each."""
        stored: list[StoredStep] = []
        root = self.directory if directory is None else directory
        ranks = self._on_all(call, f"step {step} opened", lambda: stored.append(open_step(root, step)))
        self._on_all(call, f"step {step} checked", lambda: check_files(stored[0], self._rank, len(ranks)))
        return stored[0]


def _read_state(stored: StoredStep, wanted: Mapping[ArrayName, Any]) -> dict[ArrayName, Any]:
    """Returns the arrays of a step, and specs in place of those that it lacks because their layers were frozen."""
    specs = {stored_name(name): spec for name, spec in wanted.items()}
    lacking = frozen_state(stored, specs)
    instead = {other: specs[name] for name, other in lacking.items() if other is not None}
    # Adapters were trained beside the weights that the run started from, of which the base may have averages.
    is_base = stored.host.get(BASE) is not None
    base = {name: spec for name, spec in specs.items() if is_base and not name[0].startswith(ADAPTERS)}
    own = {name: spec for name, spec in specs.items() if name not in lacking and name not in base}
    arrays = read_arrays(stored, own | instead) | (read_weights(stored, base) if base else {})
    if lacking:
        layers = ", ".join(dict.fromkeys(name[0] for name in lacking))
        _LOG.info("%s were frozen when step %d was saved: their optimizer state starts anew", layers, stored.step)
    fresh = {
        name: spread(specs[name], specs[name].sharding) if other is None else arrays[other]
        for name, other in lacking.items()
    }
    found = arrays | fresh
    return {name: found[stored_name(name)] for name in wanted}


def _in_background(work: Callable[[], SaveOutcome]) -> "Future[SaveOutcome]":
    """Runs work on a thread that does not keep the process from ending: only a committed step counts anyway."""
    future: Future[SaveOutcome] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
