"""Compile a program ahead of time, once; and once for all who need the same.

Nothing may be traced or compiled while a step runs: a stage that compiles while its peers wait can hang them all. So
every program is lowered and compiled for the shapes it will see; a compiled program refuses others and is never traced
again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Sharding
from jax.stages import Compiled

from rrfp_jax.programs.kernel_timing import timing_alone
from rrfp_jax.programs.sameness import program_identity
from rrfp_jax.programs.store import ProgramStore

CompileProgress = Callable[[int, int], None]
"""Told how many programs are compiled, and of how many."""

_count: ContextVar["ProgramCount | None"] = ContextVar("count", default=None)


class ProgramCount:
    """Counts compiled programs over several threads, and tells each new number, one call at a time, in order."""

    def __init__(self, total: int, progress: CompileProgress) -> None:
        self.seconds: dict[int, float] = {}
        """How long each program took to trace, lower and compile, by the ``id`` of the compiled program."""
        self._total, self._progress = total, progress
        self._num_done, self._lock = 0, threading.Lock()
        progress(0, total)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What this thread compiles within the block counts, and what it finds compiled."""
        token = _count.set(self)
        try:
            yield
        finally:
            _count.reset(token)

    def more(self, number: int) -> None:
        """So many more programs are there."""
        with self._lock:
            for _ in range(number):
                self._num_done += 1
                self._progress(self._num_done, self._total)


def require_jit() -> None:
    """Raise ValueError if JAX is told to compile nothing."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "jax_disable_jit is on, and a pipeline runs compiled programs: switch it off (unset JAX_DISABLE_JIT, or "
            "leave jax.disable_jit()); rrfp_jax.testing.run_unpipelined runs chunks one after the other for debugging"
        )


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

    program.__name__ = name
    jitted = jax.jit(program, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate)
    begin_s = time.perf_counter()
    lowered = jitted.lower(*specs)
    places: list[Sharding] = jax.tree.leaves((in_shardings, out_shardings))
    with timing_alone(device for place in places for device in place.device_set):
        compiled = lowered.compile()
    if (count := _count.get()) is not None:
        count.seconds[id(compiled)] = time.perf_counter() - begin_s
    count_programs(1)
    return compiled


def count_programs(number: int) -> None:
    """So many more programs are there, whoever compiled them."""
    if (count := _count.get()) is not None:
        count.more(number)


class FlatProgram:
    """A compiled program over the leaves of its arguments, whose trees may have other names for each caller."""

    def __init__(self, compiled: Compiled, arguments: Any, results: Any) -> None:
        self.compiled = compiled
        self._arguments, self._results = arguments, results

    def __call__(self, *args: Any) -> Any:
        """With trees as it was traced for; raises TypeError for others."""
        leaves, structure = jax.tree.flatten(args)
        if structure != self._arguments:
            raise TypeError(f"the program was compiled for arguments {self._arguments}, not {structure}")
        return jax.tree.unflatten(self._results, self.compiled(*leaves))


def shared_program(
    store: ProgramStore,
    name: str,
    function: Callable[..., Any],
    *specs: Any,
    in_shardings: Any,
    out_shardings: Any,
    donate: tuple[int, ...] = (),
) -> FlatProgram:
    """As :func:`compile_program`, for a function that is traced for every caller, and compiled once for equal traces.

    ``in_shardings`` and ``out_shardings`` are trees of which ``specs`` and the results are no deeper than their leaves.
    """
    leaves, structure = jax.tree.flatten(specs)
    results: list[Any] = []

    def flat(*args: Any) -> list[Any]:
        returned, shape = jax.tree.flatten(function(*jax.tree.unflatten(structure, args)))
        results.append(shape)
        return returned

    traced = jax.make_jaxpr(flat)(*leaves)
    places_in = tuple(jax.tree.leaves(jax.tree.broadcast(in_shardings, specs)))
    places_out = tuple(jax.tree.leaves(jax.tree.broadcast(out_shardings, _tree(results[0]))))
    owners = [position for position, spec in enumerate(specs) for _ in jax.tree.leaves(spec)]
    donated = tuple([leaf for leaf, position in enumerate(owners) if position in donate])
    is_mine = False

    def compile_it() -> Compiled:
        nonlocal is_mine
        is_mine = True
        run = jex.jaxpr_as_fun(traced)
        return compile_program(
            name, run, *leaves, in_shardings=places_in, out_shardings=list(places_out), donate=donated
        )

    compiled = store.get((name, program_identity(traced), places_in, places_out, donated), compile_it)
    if not is_mine:
        count_programs(1)
    return FlatProgram(compiled, structure, results[0])


def _tree(structure: Any) -> Any:
    return jax.tree.unflatten(structure, range(structure.num_leaves))
