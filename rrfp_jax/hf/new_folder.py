"""Makes a folder that is there as a whole or not at all."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rrfp_jax.data._files import check_inside
from rrfp_jax.observe.output_files import check_folder


def check_new(path: Path, what: str) -> None:
    """Raises ValueError unless the folder can be made: it is not there yet, or is empty."""
    check_folder(path, what)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{what} {path} is not empty: name a new folder, or remove this one")


def copy_file(source: Path, target: Path) -> None:
    """Copies a file with its permissions: nobody may read the copy who may not read the source.

    Raises ValueError if the source is a link that leads out of its folder, and OSError if the target is there.
    """
    check_inside(source, source.parent)
    with source.open("rb") as file:
        rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        # Private from the first byte on: the rights come only once the file is known to be new.
        with open(target, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as copy:
            os.fchmod(copy.fileno(), rights)
            shutil.copyfileobj(file, copy)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes a folder beside ``path`` that becomes ``path`` when the block succeeds, and is removed when it raises.

    A killed process leaves a folder behind whose name begins with a dot and ends in ``.part``.
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
