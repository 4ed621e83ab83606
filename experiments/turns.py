"""Processes that take turns in a measurement: each reads a line, does the work of it, and answers with a line.

They live through the whole measurement and are idle until they are told, so that both sides of a comparison run within
seconds of each other. The processes of torch run in an interpreter that has it, for torch is no dependency of this
project.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rrfp_jax.cluster import child_script
from rrfp_jax.cluster.child_processes import rank_cores

_ROOT = Path(__file__).parents[1]
_LAST_WORDS = 20_000
_FAREWELL_S = 20.0


class LineProcess:
    """Process that takes turns.

    Args:
        said: the file that takes its stderr.
        hears: the file of the lines that it is told; None: its standard input.
    """

    def __init__(self, command: Sequence[str], said: IO[str], hears: IO[str] | None = None) -> None:
        self._said = said
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self._hears = hears or self._process.stdin

    def tell(self, line: str) -> None:
        """Sends it a line. Where it has ended, :meth:`answer` will say so."""
        assert self._hears is not None
        with suppress(BrokenPipeError):
            self._hears.write(line + "\n")
            self._hears.flush()

    def answer(self) -> str:
        """Returns its next line; raises RuntimeError with its last words on stderr where it has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        self._said.seek(0)
        raise RuntimeError(f"a measured process ended: {self._said.read().strip()[-_LAST_WORDS:]}")

    def wait(self) -> None:
        """Waits until it has ended by itself, for a while."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_S)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        with suppress(BrokenPipeError):  # what it was told last was never read
            self._process.communicate()


def printed_by(python: str, program: str) -> str | None:
    """Returns the output of a short program; None where there is no such interpreter, or the program fails."""
    if shutil.which(python) is None:
        return None
    ended = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return None if ended.returncode else ended.stdout.strip()


@contextmanager
def torch_processes(
    python: str, program: Sequence[str], num_ranks: int, *, bind: str = "cores"
) -> Iterator[list[LineProcess]]:
    """Starts ``program`` once for each rank, with rank, number of ranks and a free port as its last arguments.

    They keep to cores as the launcher's ranks do with this ``bind``, and end with this process, however that ends.
    """
    tie = (sys.executable, "-I", "-S", child_script.__file__, str(os.getpid()))
    path = shutil.which(python) or python
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    members: list[LineProcess] = []
    with _stderr() as said:
        try:
            for rank, cores in enumerate(rank_cores(bind, num_ranks)):
                keeps_to = ",".join(map(str, cores)) or child_script.UNBOUND
                numbers = (str(rank), str(num_ranks), str(port))
                members.append(LineProcess((*tie, keeps_to, path, *program, *numbers), said))
            yield members
        finally:
            for member in members:
                member.kill()


@contextmanager
def our_ranks(module: str, num_ranks: int, *arguments: str, bind: str = "cores") -> Iterator[LineProcess]:
    """Starts a run of ours through the launcher: rank 0 hears lines from the file ``--turns`` and answers for all.

    It ends when that file does.
    """
    with tempfile.TemporaryDirectory() as folder, _stderr() as said:
        turns = os.path.join(folder, "turns")
        os.mkfifo(turns)
        launcher = (sys.executable, "-m", "experiments.launch", "--processes", str(num_ranks), "--bind", bind, "--")
        # open for reading too, since otherwise this process would wait here for the other end
        with os.fdopen(os.open(turns, os.O_RDWR), "w") as hears:
            ranks = LineProcess((*launcher, module, "--turns", turns, *arguments), said, hears)
            try:
                yield ranks
                hears.close()
                ranks.wait()
            finally:
                ranks.kill()


def _stderr() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
