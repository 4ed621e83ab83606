"""The output of the processes, copied line by line, each line with its process's name."""

import errno
import os
import re
import threading
from collections import deque
from typing import IO, BinaryIO

_MAX_PART_BYTES = 1 << 20
"""Largest part of a line that is copied at a time."""
_KEPT_LINES, _KEPT_BYTES = 40, 400
_TELLING = re.compile(
    r"what\(\)|terminate called|check failed|fatal|error|too many|cannot|unable|failed|incarnation|exhausted",
    re.IGNORECASE,
)
_FRAME = re.compile(r"\s*(@|#\d|\*\*\*|File |Fatal Python error|Thread 0x)")
"""Pattern of the lines of a stack, which say where an error happened and not why."""
_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe that has no reader any more, and of a terminal that has hung up."""


class Output:
    """Copies lines to this process's own streams.

    Args:
        prefix: ``always`` puts ``[rank 2]`` before every line, ``never`` before none, and standard output stays
            standard output, errors stay errors. ``auto`` is as ``always`` on a terminal; elsewhere standard output is
            rank 0's alone, unchanged, so that programs can read it, and what others print goes to the errors.
    """

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, *, prefix: str) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._is_pure = prefix == "auto" and not stdout.isatty()
        self._marks = prefix != "never"
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._last_errors: dict[str, deque[bytes]] = {}
        """The last lines that each process wrote to its standard error, by its name."""

    def follow(self, name: str, stdout: IO[bytes], stderr: IO[bytes], *, is_main: bool) -> None:
        """Copies both pipes of a process until they close; ``is_main`` says that it is rank 0."""
        mark = f"[{name}] ".encode() if self._marks else b""
        if self._is_pure:
            self._copy(stdout, *((self._stdout, b"") if is_main else (self._stderr, mark)))
        else:
            self._copy(stdout, self._stdout, mark)
        kept = self._last_errors[name] = deque(maxlen=_KEPT_LINES)
        self._copy(stderr, self._stderr, mark, kept)

    def last_error(self, name: str) -> str | None:
        """Returns the last line in which a process told of something that went wrong, shortened; None if there is
        none."""
        for line in reversed(self._last_errors.get(name, ())):
            text = "".join(c for c in line.decode(errors="replace").strip() if c.isprintable())
            if _TELLING.search(text) and not _FRAME.match(text):
                return text
        return None

    def say(self, text: str) -> None:
        """Writes lines of the launcher's own, for people."""
        lines = [f"[launcher] {line}\n" for line in text.splitlines()]
        self._write(self._stderr, "".join(lines).encode())

    def tell(self, text: str) -> None:
        """Writes lines of the launcher's own that a program reads."""
        self._write(self._stdout, f"{text}\n".encode())

    def drain(self, timeout_s: float) -> None:
        """Waits until all pipes are closed and copied."""
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _copy(self, source: IO[bytes], target: BinaryIO, mark: bytes, kept: deque[bytes] | None = None) -> None:
        thread = threading.Thread(target=self._run, args=(source, target, mark, kept), name="rrfp-output", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, source: IO[bytes], target: BinaryIO, mark: bytes, kept: deque[bytes] | None) -> None:
        # A line is copied when it ends, so that lines of several processes are not mixed; a very long one in parts.
        goes_on = False
        with source:
            while part := source.readline(_MAX_PART_BYTES):
                self._write(target, part if goes_on else mark + part)
                if kept is not None and not goes_on:
                    kept.append(part[:_KEPT_BYTES])
                goes_on = not part.endswith(b"\n")
        if goes_on and mark:  # a process ended within a line: the next process begins its own
            self._write(target, b"\n")

    def _write(self, target: BinaryIO, data: bytes) -> None:
        # Where nobody reads any longer, lines go nowhere, and a line that cannot be written now is lost: neither a
        # process that prints nor the launcher may stop for that.
        with self._lock:
            try:
                target.write(data)
                target.flush()
            except OSError as error:
                if error.errno in _GONE:
                    with open(os.devnull, "wb") as nowhere:
                        os.dup2(nowhere.fileno(), target.fileno())
