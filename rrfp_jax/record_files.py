"""Read files that may come from anybody: nothing here waits, or grows beyond bounds that the file cannot move.

A file is bounded before it is read, and JSON before it is unfolded: one byte of it may become sixty bytes of Python's
objects. (:mod:`rrfp_jax.yaml_text` does the same for YAML.)
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

TEXT_BYTES = 1 << 20
"""Largest size of a file that people write: a configuration, a tokenizer's settings."""
_LARGEST_BYTES = 1 << 28
_MOST_VALUES = 10_000_000
"""Largest number of values in any JSON that is read: about a gigabyte of Python's objects, the text included."""
_MOST_DEPTH = 100


def read_record(path: Path, most_bytes: int = _LARGEST_BYTES) -> tuple[bytes, os.stat_result]:
    """Returns the bytes of a record's file and its status; raises OSError also for pipes, devices and too large files.

    The file is opened, which asks a file server where a mere look might find an old answer. Opening never waits.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is no file", str(path))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"{path.name} is too large for a record", str(path))
        return file.read(most_bytes), status


def read_bounded(path: str | os.PathLike[str], most_bytes: int = TEXT_BYTES) -> bytes:
    """Returns the contents of a file that a user has named, which may be a pipe; raises OSError if the file is
    larger."""
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", os.fspath(path))
    return data


def parse_json(data: bytes | str) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises ValueError also if the text is nested deeper, or has more values, than any file of use here.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    if sum(map(text.count, ",[{")) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [value] if _has_more(value) else []
    for _ in range(_MOST_DEPTH):
        level = [each for one in level for each in (one.values() if isinstance(one, dict) else one) if _has_more(each)]
        if not level:
            return value
    raise ValueError("it is nested too deep")


def _has_more(value: Any) -> bool:
    return isinstance(value, dict | list)
