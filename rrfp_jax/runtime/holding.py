"""A hold closes a running pipeline that nobody has closed, once nobody uses it any more.

The threads of a runtime refer to it, so it is never collected by itself. The pipeline, its states and the results of
its steps share a :class:`Hold`, to which nothing of the runtime refers: once the last of them is gone, the runtime is
closed. A runtime that is open when the process ends is closed then, before JAX takes its clients down: a thread that
comes back from a program while the interpreter goes away would abort the process. Closing waits for a limited time, so
a program that hangs keeps no process alive.

A child made by ``fork`` has all these objects and none of the threads, so it would wait for ever. Such a child gets an
error, and closes nothing.
"""

import atexit
import os
import weakref
from typing import TYPE_CHECKING

import jax  # noqa: F401 - Registers its clean-up at exit, which runs after the one registered below.

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime

_open: "weakref.WeakSet[PipelineRuntime]" = weakref.WeakSet()
_makers: set[int] = set()
"""Ids of the process that has made pipelines, and of those that it was forked from and that had made some."""


class Hold:
    """One start of a pipeline, by ``init`` or ``restore``, whose states it identifies.

    Raises RuntimeError in the child of a process that has made others.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        _makers.add(self._pid)
        if len(_makers) > 1:
            raise RuntimeError(
                f"process {self._pid} was forked from one that had made a pipeline, and JAX does not work in such a "
                "child: start it with multiprocessing's spawn method, or make pipelines in the parent alone"
            )

    def keep_open(self, runtime: "PipelineRuntime") -> None:
        """Has the runtime closed when the hold is gone, or when the process ends."""
        _open.add(runtime)
        # The finalizer's own hook at the exit may come after JAX's clean-up.
        weakref.finalize(self, _close_unused, runtime).atexit = False

    def check_process(self) -> None:
        """Raises RuntimeError in any process other than the one that made this object."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the pipeline was made in process {self._pid}, and process {os.getpid()} was forked from it, without "
                "the threads that run it: use it in the process that made it"
            )


def _close_unused(runtime: "PipelineRuntime") -> None:
    if runtime in _open:
        runtime.close_soon()


def _close_all() -> None:
    for runtime in list(_open):
        runtime.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)
