"""Run the launcher as a user does, in a process of its own, and see what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.environment import of_child

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
MARK = "RRFP_TEST_MARK"
PATIENCE_S = 40.0
_PATH = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
_ONE_PROCESS_ONLY = ("JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether the condition holds within the time."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


class Launched:
    """A launcher under test. Every process that it starts, directly or not, is known by a mark in its environment.

    Args:
        arguments: the launcher's.
        module: what is run with them.
        within: a command that becomes the one given behind it, such as ``ip netns exec NAME``.
        variables: of its environment, beside the present ones.
    """

    def __init__(
        self,
        *arguments: object,
        module: str = "experiments.launch",
        within: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env={
                **of_child(*_ONE_PROCESS_ONLY),
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, PROGRAMS, *_PATH))),
                MARK: self._mark,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, lines), daemon=True)
            for pipe, lines in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: IO[str], lines: list[str]) -> None:
        for line in pipe:
            lines.append(line.rstrip("\n"))  # noqa: PERF401 - one by one, as they come

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The launcher's exit code, once it has ended and all it printed is read."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def stop_reading(self) -> None:
        """Close standard output, as ``head`` does; what is under way there is lost."""
        assert self.process.stdout is not None
        os.dup2(os.open(os.devnull, os.O_RDONLY), self.process.stdout.fileno())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def lines(self) -> list[str]:
        """All lines so far, each stream in order."""
        return [*self.stdout, *self.stderr]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def own_lines(self) -> list[str]:
        """What the launcher itself said."""
        return [line.removeprefix("[launcher] ") for line in self.stderr if line.startswith("[launcher] ")]

    def numbers(self, pattern: str, count: int) -> list[int]:
        """The first group of ``count`` lines that match, once there are so many."""

        def found() -> list[int]:
            return [int(match[1]) for line in self.lines if (match := re.search(pattern, line))]

        assert eventually(lambda: len(found()) >= count or self.process.poll() is not None), self.text
        assert len(found()) >= count, self.text
        return found()

    def ready(self, count: int) -> dict[int, int]:
        """The process ids of the ranks, by rank, once ``count`` of them have connected."""
        self.numbers(r"ready (\d+)", count)
        return self.ranks()

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that live, by rank."""
        found = {}
        for pid in self.living():
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((v for v in variables if v.startswith(b"RRFP_RANK=")), None)
                if rank is not None:
                    found[int(rank.partition(b"=")[2])] = pid
                elif (name := Path(f"/proc/{pid}/comm").read_text()).startswith("rrfp-rank-"):  # it was a spare process
                    found[int(name.removeprefix("rrfp-rank-"))] = pid
        return found

    def spares(self, count: int) -> list[int]:
        """The spare processes, ready or not, once there are so many."""

        def found() -> list[int]:
            known, pids = {*self.ranks().values()}, []
            for pid in self.living():
                with suppress(OSError):
                    if b"\0RRFP_SPARE=1" in Path(f"/proc/{pid}/environ").read_bytes() and pid not in known:
                        pids.append(pid)
            return pids

        assert eventually(lambda: len(found()) == count), self.text
        return found()

    def running(self, name: str) -> list[int]:
        """The processes with this in their command line."""
        found = []
        for pid in self.living():
            with suppress(OSError):
                if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def living(self) -> list[int]:
        """All processes of this launcher, itself excluded, that have not ended."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != self.process.pid:
                with suppress(OSError):
                    is_ours = f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                    if is_ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(folder.name))
        return found

    def close(self) -> None:
        """End whatever is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def launched(*arguments: object, within: Sequence[str] = (), **variables: str) -> Iterator[Launched]:
    """A launcher that leaves nothing behind."""
    launcher = Launched(*arguments, within=within, **variables)
    try:
        yield launcher
    finally:
        launcher.close()
