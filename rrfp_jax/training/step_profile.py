"""A trace of some steps of a run, for Perfetto and XProf, in which every task has its name."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)
PROFILE_FOLDER = "profile"
"""Name of the folder in the run directory."""
_STOP_AFTER_FAILURE_S = 3.0
"""How long a trace may take to be written once a run has failed: a hang must not keep the run from ending."""


class StepProfile:
    """Starts and stops :mod:`jax.profiler` between steps, while none is under way in this process.

    A context manager around the loop: a run that ends within the steps leaves the trace of those that it has trained.
    A trace that fails is named in a warning: it is not worth a run.

    Args:
        steps: the steps to be traced.
        folder: the folder of this process; the trace is in a folder of it that is named by the time.
        name_tasks: makes the stages name their tasks, or stop doing so.
    """

    def __init__(self, steps: range, folder: Path, name_tasks: Callable[[bool], None]) -> None:
        self._steps, self._name_tasks, self.folder = steps, name_tasks, folder
        self._is_tracing = self._is_over = False
        self.is_written = False

    def is_boundary(self, step: int) -> bool:
        """Returns whether the trace starts or stops before this step; no step may be under way then."""
        if self._is_over:
            return False
        return step >= self._steps.stop if self._is_tracing else step in self._steps

    def turn(self) -> None:
        """Starts the trace, or stops it."""
        if self._is_tracing:
            self._stop()
        else:
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._is_tracing:
            return
        if kind is None:
            self._stop()
            return
        # writing may hang on what failed, so the run waits only a while for it
        thread = threading.Thread(target=self._stop, name="profile", daemon=True)
        thread.start()
        thread.join(_STOP_AFTER_FAILURE_S)

    def _start(self) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would be an event, and cost as much as it takes
        try:
            jax.profiler.start_trace(self.folder, profiler_options=options)
        except Exception as error:  # whatever the library raises
            self._leave_out(error)
            return
        self._is_tracing = True
        self._name_tasks(True)

    def _stop(self) -> None:
        import jax

        self._is_tracing, self._is_over = False, True
        self._name_tasks(False)
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            self._leave_out(error)
        else:
            self.is_written = True

    def _leave_out(self, error: Exception) -> None:
        self._is_over = True
        _log.warning("the profile in %s is left out: %s", self.folder, " ".join(str(error).split()) or repr(error))


def profile_folder(run: Path, rank: int) -> Path:
    """Returns the folder in which a rank of a run writes its trace."""
    return run / PROFILE_FOLDER / f"rank-{rank}"


def parse_steps(text: str) -> range:
    """Returns ``a:b`` as the steps from a on up to but not including b; raises ValueError for anything else."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"profile_steps is {text!r}: give the first step and the one behind the last, such as 10:13")
    return range(int(first), int(last))
