"""Writing a file in one piece: a reader, or a later run, never sees half of it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path in the same folder (created if missing), moved to ``path`` when the block succeeds.

    When the block raises, the temporary file is removed and whatever stood at ``path`` before is untouched. Protects
    from a killed process, not from a power cut: nothing is forced to the disk.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays, because libraries choose the format by it.
    temporary = target.with_name(f".{target.stem}.{secrets.token_hex(4)}.part{target.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
