"""The metrics file of a run: one strict JSON object per line, whole after every line.

Numbers that are not finite (NaN, infinities) are written as ``null``, because JSON has no literals for them and strict
readers refuse the ones that Python would write.
"""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rrfp_jax.observe.output_files import replacing

_log = logging.getLogger(__name__)


class MetricsFile:
    """Appends one object per line and flushes each, so that a killed run loses no finished line.

    A run that continues opens the same file again. Where the run before was killed within a line, that partial line is
    dropped, a warning is logged, and :attr:`dropped` holds it. A power cut may cost the last lines, since nothing is
    forced to the disk. If the disk takes no more, lines are left out with one warning: they are not worth a run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+", buffering=0)
        self._is_full = False
        self.dropped: bytes = self._repair()
        """The partial last line that was removed on opening; empty where the file was whole."""

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one object and returns it as it stands in the file, in JSON's own types.

        Values are what JSON knows, NumPy or JAX scalars and arrays, or nested dicts and lists of them; everything else
        raises ValueError, and then the file is unchanged.
        """
        row: dict[str, Any] = _strict(values, "metrics")
        line = json.dumps(row, allow_nan=False, ensure_ascii=False)
        data, start = line.encode() + b"\n", self._file.seek(0, os.SEEK_END)
        try:
            if (self._file.write(data) or 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(start)
            if not self._is_full:
                _log.warning("%s takes no more lines (%s): some are left out", self.path, error.strerror)
            self._is_full = True
        return row

    def close(self) -> None:
        self._file.close()

    def _repair(self) -> bytes:
        # The last line is read from the end, because the file of a long run is long. Without its own line end, it
        # starts after the last of the others.
        size, length, newline = self._file.seek(0, os.SEEK_END), 4096, -1
        start = size
        while newline < 0 and start > 0:
            start = max(0, size - length)
            self._file.seek(start)
            newline = self._file.read(max(0, size - start - 1)).rfind(b"\n")
            length *= 2
        start += newline + 1
        self._file.seek(start)
        last = self._file.read()
        if not last or _is_object(last):
            # A whole object can lack only its line end.
            if last and not last.endswith(b"\n"):
                self._file.write(b"\n")
            return b""
        self._file.truncate(start)
        _log.warning("%s: dropped a partial last line of %d bytes, left by a run that was killed", self.path, len(last))
        return last


def cut_metrics(path: Path, from_step: int) -> None:
    """Drops the rows from a step on, so that these steps can be trained again.

    Lines that are no rows with a step are moved to a file beside, ``<name>.damaged``, and named in a warning.
    """
    if not path.exists():
        return
    if path.is_symlink():  # the file behind the link belongs to somebody else
        with replacing(path) as own:
            shutil.copyfile(path, own)
    MetricsFile(path).close()  # drops a line that was not finished
    kept, damaged, numbers = [], [], []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        step = json.loads(line).get("step") if _is_object(line) else None
        if not isinstance(step, int):
            damaged.append(line)
            numbers.append(str(number))
        elif step < from_step:
            kept.append(line)
    if damaged:
        beside = path.with_name(f"{path.name}.damaged")
        _log.warning("%s: line %s is damaged, and set aside in %s", path, ", ".join(numbers), beside.name)
        with beside.open("ab") as file:
            file.writelines(damaged)
    with replacing(path) as new:
        new.write_bytes(b"".join(kept))


def last_rows(path: Path, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Returns the rows that lie whole within the last bytes of a metrics file; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if _is_object(line)]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _strict(value: Any, name: str) -> Any:
    """Returns ``value`` in strict JSON types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return _strict(value.tolist(), name)
    raise ValueError(
        f"{name} is a {type(value).__name__}: give numbers, strings, booleans, None, or lists and dicts of them"
    )
