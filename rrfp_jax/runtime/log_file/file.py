"""Event logs as files: gzipped JSON with a name and a version, so that any program can read them; never a pickle."""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from rrfp_jax.observe.replacing import replacing
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.log_file.records import RunLog

FORMAT, VERSION = "rrfp-jax event log", 2
PATTERN = "events*.json.gz"
"""The names of a run directory's logs."""


def log_name(rank: int = 0, num_ranks: int = 1) -> str:
    """The name of a process's log in the run directory."""
    return "events.json.gz" if num_ranks == 1 else f"events-rank{rank}.json.gz"


def write_log(log: RunLog, path: str | os.PathLike[str]) -> None:
    """Write a log in one piece; raises OSError where that cannot be done, and leaves what stood there before."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "log": to_plain(log)}, separators=(",", ":"))
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))


def read_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a log; raises ValueError, in one sentence, for a file that is missing, damaged or none of ours."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"event log {path} cannot be read ({error.strerror}): give the path of a log") from None
    return _decode(path, data)


def _decode(path: str | os.PathLike[str], data: bytes) -> RunLog:
    if data[:2] != b"\x1f\x8b":
        raise ValueError(f"{path} is no event log, for it is not compressed: give a file named like {log_name()}")
    try:
        content: Any = json.loads(gzip.decompress(data))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"event log {path} is damaged or cut short: take the file from the run once more") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no event log: give a file named like {log_name()} from a run directory")
    if content.get("version") != VERSION:
        raise ValueError(
            f"event log {path} has version {content.get('version')!r:.20}, and this program reads version {VERSION}: "
            "replay it with the program that wrote it"
        )
    try:
        log: RunLog = from_plain(RunLog, content.get("log"))
    except MalformedRecord as error:
        raise ValueError(f"event log {path} does not hold what it should: {error}") from None
    return log
