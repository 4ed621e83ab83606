"""What a check finds, and how checks are run: none can raise or hang."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How it stands."""

    OK = "ok"
    WARNING = "warning"
    """Some runs will suffer."""
    PROBLEM = "problem"
    """Runs will fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check has found."""

    status: Status
    text: str
    remedy: str = ""
    """What to do; empty where all is well."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same as plain data."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def ok(text: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding(status=Status.OK, text=text, figures=figures)


def warning(text: str, remedy: str, **figures: Any) -> Finding:
    """Some runs will suffer."""
    return Finding(status=Status.WARNING, text=text, remedy=remedy, figures=figures)


def problem(text: str, remedy: str, **figures: Any) -> Finding:
    """Runs will fail."""
    return Finding(status=Status.PROBLEM, text=text, remedy=remedy, figures=figures)


def guarded(check: Callable[[], Finding]) -> Finding:
    """Run a check; one that raises is a problem itself."""
    try:
        return check()
    except Exception as error:
        return problem(f"cannot be told: {type(error).__name__}: {error}", "please report this")


def within(deadline_s: float, check: Callable[[], Finding]) -> Finding:
    """The same on a thread of its own; one that is not done in time is a problem too.

    File systems and name servers that are gone may keep a thread for ever: it is left behind.
    """
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(guarded(check)), name="rrfp-doctor", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if found:
        return found[0]
    return problem(f"no answer within {deadline_s:g} s", "see which file system, name server or device hangs")
