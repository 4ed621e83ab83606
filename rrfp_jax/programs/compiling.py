"""Compiles a program ahead of time, once, also for several chunks that need the same.

Nothing may be traced or compiled while a step runs: a stage that compiles while its peers wait can hang them all. So
every program is lowered and compiled for the shapes it will see; a compiled program refuses others and is never traced
again.

One compilation at a time on each GPU
-------------------------------------
XLA chooses kernels by timing them on the GPU. A second compilation on the same GPU would disturb these times and take
memory for its own trials. Processes may share a GPU, also processes of different runs, so a lock file for each GPU is
held while XLA compiles. The lock ends with its process.

A program that spans several processes takes no lock: these processes wait for each other while they compile it, and
would wait in a circle if one of them held the lock of another's GPU.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Sharding
from jax.stages import Compiled, Lowered

from rrfp_jax.programs.sameness import ProgramStore, program_identity

_LOG = logging.getLogger(__name__)
CompileProgress = Callable[[int, int], None]
"""``progress(done, total)``: hears how many programs are compiled, and of how many."""

_count: ContextVar["ProgramCount | None"] = ContextVar("count", default=None)


class ProgramCount:
    """Counts compiled programs over several threads, and reports each new number, one call at a time, in order."""

    def __init__(self, total: int, progress: CompileProgress) -> None:
        self.seconds: dict[int, float] = {}
        """How long each program took to trace, lower and compile, by the ``id`` of the compiled program."""
        self._total, self._progress = total, progress
        self._num_done, self._lock = 0, threading.Lock()
        progress(0, total)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the programs that this thread compiles within the block, or finds compiled."""
        token = _count.set(self)
        try:
            yield
        finally:
            _count.reset(token)

    def more(self, number: int) -> None:
        """Adds programs to the count."""
        with self._lock:
            for _ in range(number):
                self._num_done += 1
                self._progress(self._num_done, self._total)


def require_jit() -> None:
    """Raises ValueError if JAX is told to compile nothing."""
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
    options: Mapping[str, str] = MappingProxyType({}),
) -> Compiled:
    """Compiles ``function`` for arguments of these shapes, laid out by ``in_shardings``, results by ``out_shardings``.

    Both are a sharding, or a tree of them that is a prefix of the arguments or of the results; None in place of a
    result's lets the compiler choose (see ``Compiled.output_shardings``). ``name`` appears in profiles. ``donate``
    lists the positions of arguments whose memory the results may take over. The compiled program takes JAX arrays that
    lie as it was compiled for and NumPy arrays alike, also where its devices belong to several processes; each then
    passes the same. Arguments of another shape, dtype or tree raise TypeError. ``options`` are the compiler's own; one
    that does not know them compiles without, and the log says so.
    """

    def program(*args: Any) -> Any:
        return function(*args)

    program.__name__ = name
    jitted = jax.jit(program, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate)
    begin_s = time.perf_counter()
    lowered = jitted.lower(*specs)
    places: list[Sharding] = jax.tree.leaves((in_shardings, out_shardings))
    with timing_alone(device for place in places for device in place.device_set):
        compiled = _compiled(name, lowered, dict(options))
    if (count := _count.get()) is not None:
        count.seconds[id(compiled)] = time.perf_counter() - begin_s
    count_programs(1)
    return compiled


def _compiled(name: str, lowered: Lowered, options: dict[str, str]) -> Compiled:
    if options:
        try:
            return lowered.compile(compiler_options=options)  # type: ignore[arg-type]
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            _LOG.warning("%s is compiled without %s: %s", name, ", ".join(options), str(error).partition("\n")[0])
    return lowered.compile()


def count_programs(number: int) -> None:
    """Adds programs to the count of this thread, no matter which thread compiled them."""
    if (count := _count.get()) is not None:
        count.more(number)


class FlatProgram:
    """A compiled program over the leaves of its arguments, whose trees may have other names for each caller."""

    def __init__(self, compiled: Compiled, arguments: Any, results: Any) -> None:
        self.compiled = compiled
        self._arguments, self._results = arguments, results

    def __call__(self, *args: Any) -> Any:
        """Runs the program; raises TypeError for trees of another structure than it was traced for."""
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
    """Compiles as :func:`compile_program` does; a function is traced for every caller, and compiled once for equal
    traces.

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
    places_out = tuple(
        jax.tree.leaves(jax.tree.broadcast(out_shardings, jax.tree.unflatten(results[0], range(results[0].num_leaves))))
    )
    owners = [position for position, spec in enumerate(specs) for _ in jax.tree.leaves(spec)]
    donated = tuple([leaf for leaf, position in enumerate(owners) if position in donate])
    compiled, is_new = store.get(
        (name, program_identity(traced), places_in, places_out, donated),
        lambda: compile_program(
            name,
            jex.jaxpr_as_fun(traced),
            *leaves,
            in_shardings=places_in,
            out_shardings=list(places_out),
            donate=donated,
        ),
    )
    if not is_new:
        count_programs(1)
    return FlatProgram(compiled, structure, results[0])


# -- timing of kernels -------------------------------------------------------------------------------------------------


def times_kernels(device: jax.Device) -> bool:
    """Whether XLA compiles for a device by trying programs on it; it does not for a GPU that is not here."""
    return device.platform == "gpu" and device in jax.local_devices()


@contextlib.contextmanager
def timing_alone(devices: Iterable[jax.Device]) -> Iterator[None]:
    """Blocks until no other process of this user compiles for these devices, and keeps others out within the block."""
    devices = set(devices)
    cards = {card_of(device) for device in devices if times_kernels(device)}
    with contextlib.ExitStack() as held:
        if len({device.process_index for device in devices}) == 1:
            for card in sorted(cards - {None}, key=str):  # in one order, so that nobody waits in a circle
                with contextlib.suppress(OSError):  # without a lock the choice of kernels is only less sure
                    fcntl.flock(held.enter_context(lock_file(str(card)).open("a")), fcntl.LOCK_EX)
        yield


def lock_file(card: str) -> Path:
    """Returns the lock of a GPU: a file for each user, since the system's folder keeps users from each other's."""
    return Path(tempfile.gettempdir(), f"rrfp-{os.getuid()}-{card}.lock")


@cache
def card_of(device: jax.Device) -> str | None:
    """Returns the UUID of a GPU's card, which every process on the host sees alike; None where CUDA does not tell.

    JAX numbers the GPUs that a process sees, and a scheduler may call each of them number 0.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        ask = cuda.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return None
    handle, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    ordinal = device.local_hardware_id
    is_known = not (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), ordinal) or ask(found, handle))
    return str(uuid.UUID(bytes=bytes(found))) if is_known else None
