"""The lock of a run directory: one run at a time writes there, on whatever host, and a killed one holds up nobody.

The lock is a file, so that it works on network file systems too.

* ``link`` makes it, in which only one of several takers succeeds, also over a network. It names its holder.
* Its holder touches it every few seconds.
* A taker that finds it there asks whether its holder lives. On the holder's own host the table of processes answers at
  once: a process number counts together with its start time. From another host, or out of another container, the
  lock's age decides, by the clock of the file server: the taker waits until the lock is touched, and is refused, or
  until it is older than a living holder would let it become.
* To take over the lock of a dead holder a taker first makes a claim, a file named after that very lock and made as a
  lock is. If the lock is still the dead one then, the claim is renamed to be the lock.

Why two takers never both succeed: only one of them has the claim at a time. A claim goes away when it is withdrawn or
becomes the lock; in the second case the lock is another one, which whoever makes the claim later sees. A claim whose
maker died is taken over as a lock is.

An object store has neither links nor renames (:class:`BucketLock`). There the lock is the highest of the objects
``run.lock/00000001``, ``run.lock/00000002`` and so on. A taker that finds it given back, or its holder dead, makes the
next number, which only one of several takers can, and holds the lock if no higher one is there afterwards. Only numbers
below the highest are removed, so numbers never come again, and a slow taker, which makes an old one, finds the higher.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from rrfp_jax.record_files import NO_LINKS
from rrfp_jax.storage import BucketPath, read_stored

LOCK = "run.lock"
_TOUCH_S = 5.0
"""Seconds between two touches by a holder."""
_STALE_S = 60.0
"""Age in seconds at which a lock is dead: a holder would have touched it twelve times by then."""
_FREE = "0"
"""Token of a lock in an object store that was given back."""
_LOG = logging.getLogger(__name__)


class LockHeld(ValueError):
    """Another run holds the lock; the message says which, since when, and what to do."""


@dataclass(frozen=True, kw_only=True)
class _Holder:
    """The process that holds a lock, as the lock's file describes it."""

    token: Annotated[str, Field(pattern="^[0-9a-f]+$")]
    """Random text that no other lock has."""
    host: str = "an unknown host"
    pid: int = 0
    process: str | None = None
    """Identity of the process behind the number: the boot of its host, its PID namespace, its start."""
    since: str = "an unknown time"

    def describe(self) -> str:
        """Returns the holder in words."""
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process"

    def lives(self) -> bool | None:
        """Returns whether the process lives; None: that cannot be seen from here."""
        here = _process(os.getpid())
        if not self.process or not here or self.process.split()[:2] != here.split()[:2]:
            return None
        return _process(self.pid) == self.process


class RunLock:
    """The lock of one directory, held from :meth:`take` to :meth:`release`."""

    def __init__(self, directory: Path, *, touch_s: float = _TOUCH_S, stale_s: float = _STALE_S) -> None:
        self._path, self._touch_s, self._stale_s = directory / LOCK, touch_s, stale_s
        pid = os.getpid()
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self._own = _Holder(
            token=secrets.token_hex(8), host=socket.gethostname(), pid=pid, process=_process(pid), since=since
        )
        self._made: list[Path] = []
        self._released = threading.Event()
        self._keeper: threading.Thread | None = None

    def take(self) -> None:
        """Takes the lock, and makes the directory if it is missing.

        Raises LockHeld if another run holds it, and OSError if no file can be made there.
        """
        folder = self._path.parent
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._take(self._path)
        self._start_keeper()

    def _start_keeper(self) -> None:
        self._keeper = threading.Thread(target=self._keep, name="run lock", daemon=True)
        self._keeper.start()

    @property
    def is_held(self) -> bool:
        """Whether this object has taken the lock, and not given it back."""
        return self._keeper is not None and not self._released.is_set()

    def check(self) -> None:
        """Raises LockHeld if the lock was taken over because its holder seemed to be dead."""
        found = _read(self._path)
        if found is not None and found[0].token != self._own.token:
            raise self._taken_over(found[0])

    def release(self) -> None:
        """Gives the lock back, and removes the directory if it was made for nothing. May be called at any time."""
        if self._keeper is None or self._released.is_set():
            return
        self._released.set()
        self._keeper.join(self._touch_s)
        with contextlib.suppress(OSError):
            self._give_back()

    def _give_back(self) -> None:
        if self._is_own(self._path):
            self._path.unlink()
        for folder in self._made:
            folder.rmdir()  # only if it is empty

    def _taken_over(self, holder: _Holder) -> LockHeld:
        """Returns the error of a run whose lock another one holds now."""
        return LockHeld(
            f"{self._path.parent} was taken over by {holder.describe()} on {holder.since}, as this run "
            "seemed to be dead"
        )

    def _take(self, path: Path) -> None:
        """Makes a lock or a claim that is ours, at once or after its holder's death."""
        while not self._make(path):
            found = _read(path)
            if found is None:
                continue
            self._await_death(path, *found)
            # only one taker has the claim, and the lock must still be the dead one once it has it
            claim = self._path.with_name(f"{LOCK}.{found[0].token}")
            self._take(claim)
            now = _read(path)
            if now is not None and now[0].token == found[0].token:
                os.replace(claim, path)
                _LOG.warning("the lock of %s, which is dead, is taken over", found[0].describe())
                return
            claim.unlink(missing_ok=True)

    def _make(self, path: Path) -> bool:
        text = json.dumps(asdict(self._own)).encode()
        temporary = path.with_name(f"{LOCK}.{self._own.token}.tmp")
        try:
            # whole before it has the lock's name, so that every reader finds its holder
            temporary.write_bytes(text)
            os.link(temporary, path)
        except FileExistsError:
            return self._is_own(path)  # where the answer of a file server was lost, and the system asked again
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # A file system without links: the second best way, since the lock exists before it names its holder.
            try:
                with path.open("xb") as file:
                    file.write(text)
            except FileExistsError:
                return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _await_death(self, path: Path, holder: _Holder, touched_s: float) -> None:
        """Blocks until a holder is dead, or its lock has changed hands; raises LockHeld if it lives."""
        lives = holder.lives()
        if lives is False:
            return
        if lives is None:
            # The time by the clock of the file system, which is a file server's own.
            probe = self._path.with_name(f"{LOCK}.{self._own.token}.tmp")
            try:
                now_s = self._time_of_writing(probe)
            finally:
                probe.unlink(missing_ok=True)
            started_s = time.monotonic() - max(0.0, now_s - touched_s)
            left_s = started_s + self._stale_s - time.monotonic()
            if left_s > 0:
                _LOG.warning("waiting up to %.0f s to see whether %s still lives", left_s, holder.describe())
            while time.monotonic() < started_s + self._stale_s:
                time.sleep(min(0.5, self._stale_s / 10))
                found = _read(path)
                if found is None or found[0].token != holder.token:
                    return
                if found[1] != touched_s:
                    break
            else:
                return
        raise LockHeld(
            f"{self._path.parent} is in use: {holder.describe()} holds it since {holder.since}; wait for it to end, "
            "stop it, or name another run directory"
        )

    def _keep(self) -> None:
        while not self._released.wait(self._touch_s):
            try:
                if not self._touch():
                    _LOG.error("the lock of %s was taken over: this run saves nothing more", self._path.parent)
                    return
            except OSError as error:  # perhaps better the next time
                _LOG.warning("the lock %s cannot be touched: %s", self._path, error)

    def _time_of_writing(self, probe: Path) -> float:
        with probe.open("wb") as file:
            return os.fstat(file.fileno()).st_mtime

    def _touch(self) -> bool:
        """Touches the lock; returns False if it was taken over."""
        if not self._is_own(self._path):
            return self._make(self._path)  # which helps where somebody has only removed it
        os.utime(self._path)
        return True

    def _is_own(self, path: Path) -> bool:
        found = _read(path)
        return found is not None and found[0].token == self._own.token


class BucketLock(RunLock):
    """The lock of a folder in an object store."""

    _number = 0
    """The number of its object."""

    def take(self) -> None:
        """Takes the lock. Raises LockHeld if another run holds it, and OSError if the store refuses or fails."""
        while True:
            newest, number = self._newest(), 1
            if newest is not None:
                number, holder, touched_s = newest
                if holder.token != self._own.token:  # else the answer was lost when this object made it
                    number += 1
                    if holder.token != _FREE:
                        self._await_death(self._object(newest[0]), holder, touched_s)
            try:
                self._write(number, create=True)
            except FileExistsError:
                continue
            if (highest := max(self._numbers(), default=0)) == number:
                break
            self._object(number).unlink(missing_ok=True)
        if newest is not None and newest[0] < number and newest[1].token != _FREE:
            _LOG.warning("the lock of %s, which is dead, is taken over", newest[1].describe())
        self._number = highest
        for lower in self._numbers():
            if lower < highest:
                self._object(lower).unlink(missing_ok=True)
        self._start_keeper()

    def check(self) -> None:
        """Raises LockHeld if the lock was taken over because its holder seemed to be dead."""
        newest = self._newest()
        if newest is not None and newest[0] > self._number:
            raise self._taken_over(newest[1])

    def _give_back(self) -> None:
        if max(self._numbers(), default=0) == self._number:
            self._own = replace(self._own, token=_FREE)
            self._write(self._number)

    def _time_of_writing(self, probe: Path) -> float:
        probe.write_bytes(b"now")
        return probe.stat().st_mtime

    def _touch(self) -> bool:
        if max(self._numbers(), default=0) > self._number:
            return False
        self._write(self._number)
        return True

    def _write(self, number: int, *, create: bool = False) -> None:
        self._object(number).put(json.dumps(asdict(self._own)).encode(), create=create)

    def _object(self, number: int) -> BucketPath:
        path = self._path / f"{number:08d}"
        assert isinstance(path, BucketPath)
        return path

    def _numbers(self) -> list[int]:
        try:
            return [int(path.name) for path in self._path.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []

    def _newest(self) -> tuple[int, _Holder, float] | None:
        """Returns number and holder of the highest object, and when it was touched; None: there is none."""
        while numbers := self._numbers():
            if (found := _read(self._object(max(numbers)))) is not None:  # else a higher one has come
                return max(numbers), *found
        return None


def lock_of(directory: Path) -> RunLock:
    """Returns the lock of a directory."""
    return BucketLock(directory) if isinstance(directory, BucketPath) else RunLock(directory)


def _read(path: Path) -> tuple[_Holder, float] | None:
    """Returns a lock's holder, and when it was touched by the file system's clock; None: there is no lock."""
    try:
        text, status = read_stored(path)
    except FileNotFoundError:
        return None
    try:
        holder = TypeAdapter(_Holder).validate_json(text, strict=True)
    except ValueError:  # damaged: only its age is known
        holder = _Holder(token=f"{status.st_ino:x}{status.st_mtime_ns:x}")
    return holder, status.st_mtime


def _process(pid: int) -> str | None:
    """Returns boot, PID namespace and start time of the process of this number; None: none lives, or it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else f"{boot} {os.readlink('/proc/self/ns/pid')} {rest[18]}"
    except OSError:
        return None
