"""Compile a program ahead of time, once.

Nothing may be traced or compiled while a step runs: a stage that compiles while its peers wait can hang them all. So
every program is lowered and compiled for the shapes it will see, and a second trace is an error.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import chex
import jax
from jax.stages import Compiled

CompileProgress = Callable[[int, int], None]
"""Told how many programs are compiled, and of how many."""

_serial = itertools.count()
_done: ContextVar[Callable[[], None] | None] = ContextVar("done", default=None)


class ProgramCount:
    """Counts compiled programs over several threads, and tells each new number, one call at a time, in order."""

    def __init__(self, total: int, progress: CompileProgress) -> None:
        self._total, self._progress = total, progress
        self._num_done, self._lock = 0, threading.Lock()
        progress(0, total)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What this thread compiles within the block counts."""
        token = _done.set(self._one_more)
        try:
            yield
        finally:
            _done.reset(token)

    def _one_more(self) -> None:
        with self._lock:
            self._num_done += 1
            self._progress(self._num_done, self._total)


def compile_program(
    name: str,
    function: Callable[..., Any],
    *specs: Any,
    in_shardings: Any,
    out_shardings: Any,
    donate: tuple[int, ...] = (),
) -> Compiled:
    """Compile ``function`` for arguments of these shapes, placed by ``in_shardings``, and results by ``out_shardings``.

    Both are a sharding, or a tree of them that is a prefix of the arguments or of the results; None in place of a
    result's lets the compiler choose (see ``Compiled.output_shardings``). ``name`` appears in profiles. ``donate``
    lists the positions of arguments whose memory the results may take over. The compiled program takes JAX arrays that
    lie as it was compiled for and NumPy arrays alike, also where its devices belong to several processes; each then
    passes the same. Arguments of another shape, dtype or tree raise TypeError.
    """

    def program(*args: Any) -> Any:
        return function(*args)

    # chex counts traces by name and call stack, so every program needs a name of its own
    program.__name__ = f"{name}_{next(_serial)}"
    once = chex.assert_max_traces(program, n=1)
    once.__name__ = name
    jitted = jax.jit(once, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate)
    compiled = jitted.lower(*specs).compile()
    if (done := _done.get()) is not None:
        done()
    return compiled
