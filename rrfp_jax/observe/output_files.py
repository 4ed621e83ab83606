"""Files written in one piece, so that no reader sees half of one, and checks that they can be written at all.

Figures have one look whatever the user's settings are, and the same bytes for the same figure. Their functions alone
load matplotlib.
"""

import os
import secrets
from bisect import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"
"""The font of all pictures. It comes with matplotlib, so they look the same on every machine."""
DPI = 160
_FORMATS: Mapping[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Metadata by format. Entries that change from run to run are left out."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the same folder (created if missing), moved to ``path`` when the block succeeds.

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
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(target)  # a full disk does not say which file it was
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: Path, what: str) -> None:
    """Raises ValueError unless files can be written into ``path``, which may be missing. Nothing is left behind."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{what} {path} is a file: name a folder")
    nearest = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise ValueError(f"{what} {path} cannot be made, because {nearest} is no folder: name another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{what} {path}: nothing can be written into {nearest}, so name another folder")
    probe = nearest / f".{secrets.token_hex(8)}.tmp"
    try:  # access rights tell too little: some file systems take nothing
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ValueError(
            f"{what} {path}: nothing can be made in {nearest} ({error.strerror}), so name another folder"
        ) from None


def check_file(path: Path, what: str) -> None:
    """Raises ValueError unless ``path`` can be written. It and its folders may be missing."""
    if path.is_dir():
        raise ValueError(f"{what} {path} is a folder: name a file, or move the folder away")
    if path.exists() and not path.is_file():
        raise ValueError(f"{what} {path} is a pipe or a device: name a file, or move that away")
    check_folder(path.parent, f"the folder of {what}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{what} {path} is write-protected: name another file, or make it writable")


# -- figures -----------------------------------------------------------------------------------------------------------


@contextmanager
def plain_look() -> Iterator[None]:
    """Within the block figures look the same on every machine."""
    import matplotlib

    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context({**defaults, "font.family": FONT, "hatch.linewidth": 0.6, "svg.hashsalt": "rrfp"}):
        yield


def check_format(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless the name has the suffix of a picture."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"a picture cannot be written to {os.fspath(path)!r}: let the name end in .png or .svg")


def write_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Writes a figure, within :func:`plain_look`. Raises ValueError as :func:`check_format`."""
    check_format(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, metadata=_FORMATS[Path(path).suffix.lower()])


@lru_cache(maxsize=4096)
def text_width(text: str, points: float, *, bold: bool = False) -> float:
    """Returns the width in inches of one line of ``text`` at a font size in points, without drawing it."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=FONT, size=points, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def shortened(text: str, points: float, most: float, *, bold: bool = False) -> str:
    """Returns ``text``, cut and ended with an ellipsis if it is wider than ``most`` inches."""
    if text_width(text, points, bold=bold) <= most:
        return text
    lengths = range(1, len(text) + 1)
    fitting = bisect(lengths, most, key=lambda length: text_width(text[:length] + "…", points, bold=bold))
    return text[:fitting].rstrip() + "…"
