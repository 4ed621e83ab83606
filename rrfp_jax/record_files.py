"""Read files that may come from anybody: nothing here waits, or grows beyond bounds that the file cannot move.

A file is bounded before it is read, and JSON before it is unfolded: one byte of it may become sixty bytes of Python's
objects. YAML is read as people mean it: ``10:13`` is text, and no number to the base of 60 as YAML 1.1 has it. Depth,
number and size of its values are bounded, and aliases are refused: with them a few lines stand for billions of values,
which any copy, or a sentence that quotes them, would unfold.
"""

import errno
import json
import os
import re
import stat
from functools import cache
from pathlib import Path
from typing import Any

TEXT_BYTES = 1 << 20
"""Largest size of a file that people write: a configuration, a tokenizer's settings."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of ``link`` on a file system without hard links."""
LARGEST_RECORD_BYTES = 1 << 28
_MOST_VALUES = 10_000_000
"""Largest number of values in any JSON that is read: about a gigabyte of Python's objects, the text included."""
_MOST_DEPTH = 100
_MOST_YAML_VALUES, _MOST_YAML_DEPTH = 50_000, 50
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_WHOLE = re.compile(r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_REAL = re.compile(
    r"([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)


def read_record(path: Path, most_bytes: int = LARGEST_RECORD_BYTES) -> tuple[bytes, os.stat_result]:
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
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_DEPTH):
        below = (each for one in level for each in (one.values() if isinstance(one, dict) else one))
        level = [each for each in below if isinstance(each, dict | list)]
        if not level:
            return value
    raise ValueError("it is nested too deep")


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises yaml.YAMLError if the text is no YAML, or YAML without bounds, and ValueError for dates and numbers that do
    not exist.
    """
    import yaml

    if len(text) > TEXT_BYTES:
        raise yaml.YAMLError(f"it has more than {TEXT_BYTES:,} characters")
    return yaml.load(text, _yaml_loader())


@cache
def _yaml_loader() -> Any:
    """Returns YAML's own loader, except for numbers and for values without bounds.

    The library is imported on first use: most who read records read no YAML.
    """
    import yaml

    def refused(why: str, mark: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(None, None, why, mark)

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
            first: [(tag, pattern) for tag, pattern in known if tag not in (_INT, _FLOAT)]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        depth = num_values = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            if self.check_event(yaml.AliasEvent):
                raise refused("an alias (*name) stands here: write the value out", mark)
            self.depth, self.num_values = self.depth + 1, self.num_values + 1
            if self.depth > _MOST_YAML_DEPTH:
                raise refused(f"the value is nested more than {_MOST_YAML_DEPTH} deep", mark)
            if self.num_values > _MOST_YAML_VALUES:
                raise refused(f"there are more than {_MOST_YAML_VALUES} values", mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    Loader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
    Loader.add_implicit_resolver(_FLOAT, _REAL, list("-+0123456789."))
    return Loader
