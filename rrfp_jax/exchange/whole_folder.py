"""A folder that is there as a whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rrfp_jax.observe.output_files import check_folder


def check_new(path: Path, what: str) -> None:
    """Raise ValueError unless the folder can be made: it is not there yet, or is empty."""
    check_folder(path, what)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{what} {path} is not empty: name a new folder, or remove this one")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path``, which becomes ``path`` when the block succeeds and is removed when it raises.

    What a killed process leaves has a name that begins with a dot and ends in ``.part``.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    temporary.mkdir()
    try:
        yield temporary
        if path.is_dir():
            path.rmdir()  # it was empty
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
