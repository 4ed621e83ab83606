"""Code of a user's own: where its errors are, and a bound on what it runs, so that a loop without an end is told."""

import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

MOST_LINES = 5_000_000
"""That one call of a description may run: some seconds."""
_OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""How the names of files begin that are this library's, Python's, or none."""

T = TypeVar("T")


class Endless(Exception):
    """A call that has run more lines than it may."""


def is_users(code: CodeType | None) -> bool:
    """Whether a function with this code is neither this library's nor Python's."""
    return code is not None and not code.co_filename.startswith(_OTHERS)


def bounded(call: Callable[[], T], code: CodeType | None) -> T:
    """What the call gives; raises :class:`Endless` once code that is a user's has run so many lines.

    ``code`` is what is called. Nothing bounds this library's own, nor what a debugger follows.
    """
    if not is_users(code) or sys.gettrace() is not None:
        return call()
    left = MOST_LINES

    def follow(_: FrameType, event: str, __: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise Endless(f"it has run {MOST_LINES} lines and goes on: let its loops end")
        return follow

    sys.settrace(lambda frame, *_: None if frame.f_code.co_filename.startswith(_OTHERS) else follow)
    try:
        return call()
    finally:
        sys.settrace(None)


def told(error: BaseException) -> str:
    """What was raised, and in which line of a user's."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    return f"{type(error).__name__}{in_line(error)}: {error}"


def in_line(error: BaseException) -> str:
    """The last line of a user's that an error went through, or nothing."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    return f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
