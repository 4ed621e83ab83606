"""The checks of ``rrfp doctor``: what a check finds, and how a check is run so that it can neither raise nor hang."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How well the host serves a run: all is well, some runs will suffer, or runs will fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    status: Status
    text: str
    remedy: str = ""
    """The action to take; empty where all is well."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same facts as plain data, for JSON."""


def ok(text: str, **figures: Any) -> Finding:
    """Returns a finding that asks for nothing."""
    return Finding(status=Status.OK, text=text, figures=figures)


def warning(text: str, remedy: str, **figures: Any) -> Finding:
    """Returns a finding for a host on which some runs will suffer."""
    return Finding(status=Status.WARNING, text=text, remedy=remedy, figures=figures)


def problem(text: str, remedy: str, **figures: Any) -> Finding:
    """Returns a finding for a host on which runs will fail."""
    return Finding(status=Status.PROBLEM, text=text, remedy=remedy, figures=figures)


def guarded(check: Callable[[], Finding], *, deadline_s: float | None = None) -> Finding:
    """Run a check, on a thread of its own if there is a deadline. A check that raises, or is late, is a problem itself.

    File systems and name servers that are gone may block a thread for ever, so a late thread is left behind.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(check())
        except Exception as error:
            found.append(problem(f"cannot be told: {type(error).__name__}: {error}", "please report this"))

    if deadline_s is None:
        run()
        return found[0]
    thread = threading.Thread(target=run, name="rrfp-doctor", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if found:
        return found[0]
    return problem(f"no answer within {deadline_s:g} s", "see which file system, name server or device hangs")
