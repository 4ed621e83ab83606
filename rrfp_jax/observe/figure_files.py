"""Matplotlib's figures as files: one look whatever the user's settings are, and the same bytes for the same figure."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from rrfp_jax.observe.measure import FONT
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.rows import DPI

_FORMATS: Mapping[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Format -> metadata; what changes from run to run is left out."""


@contextmanager
def plain_look() -> Iterator[None]:
    """Within the block figures look the same on every machine."""
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context({**defaults, "font.family": FONT, "hatch.linewidth": 0.6, "svg.hashsalt": "rrfp"}):
        yield


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the name says that it is a picture."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"a picture cannot be written to {os.fspath(path)!r}: let the name end in .png or .svg")


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure, within :func:`plain_look`; raises ValueError as :func:`check_format`."""
    check_format(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, metadata=_FORMATS[Path(path).suffix.lower()])
