"""Reading what ranks have said at the end of a run, and waiting for that end."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.multiprocess.launching import PATIENCE_S, Launched


def rank_text(launcher: Launched, rank: int) -> str:
    """What a rank wrote to its errors."""
    mark = f"[rank {rank}] "
    return "\n".join(line.removeprefix(mark) for line in launcher.stderr if line.startswith(mark))


def assert_report(launcher: Launched, rank: int, *sayings: str, num_stages: int) -> None:
    """A rank's last words name these, and tell of so many stages, each once."""
    text = rank_text(launcher, rank)
    for saying in sayings:
        assert saying in text, text
    assert "Traceback" not in text
    stages = [line for line in text.splitlines() if line.startswith("  rank ")]
    assert len(stages) == num_stages, text
    assert len({line.partition(" has ")[0] for line in stages}) == num_stages, text


def survivors_end(pids: Iterable[int], started_s: float) -> float:
    """Seconds from ``started_s`` until the last of these processes has ended."""
    left = set(pids)
    until_s = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < until_s:
        left = {pid for pid in left if _lives(pid)}
        time.sleep(0.01)
    assert not left, f"these have not ended: {left}"
    return time.monotonic() - started_s


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
