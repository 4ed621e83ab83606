"""A process that tries one composition after another; compiled programs are kept in a folder for all of them."""

import faulthandler
import gc
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_MAPPINGS = 20_000
"""Largest number of memory mappings before programs are dropped: Linux lets a process map 65,530 pieces of memory, and
each compiled program takes several."""
COMPILED_BYTES = 4 << 30

MOST_S = 60.0
"""Seconds that shrinking goes on; the simplest composition until then is the result."""


def prepare() -> None:
    """Get ready: JAX with its virtual devices and the folder of compiled programs. The environment is set already."""
    from rrfp_jax.runtime.compile_cache import use_compile_cache

    use_compile_cache(max_bytes=COMPILED_BYTES)


def serve(connection: Any, stacks: str, hang_s: float) -> None:
    """Answer every composition that comes with its outcome; None ends the process.

    A moment before the parent gives a composition up, the stacks of all threads are written to the file ``stacks``.
    """
    prepare()
    from tests.fuzz.shrinking import shrunk
    from tests.fuzz.trial import FOUND, tried

    # If the parent has gone, this process ends too.
    with Path(stacks).open("w") as file, suppress(EOFError, BrokenPipeError):
        while (composition := connection.recv()) is not None:
            file.seek(0)
            file.truncate()
            faulthandler.dump_traceback_later(0.9 * hang_s, file=file)
            begun = time.perf_counter()
            outcome = tried(composition)
            took_s = time.perf_counter() - begun
            faulthandler.cancel_dump_traceback_later()
            connection.send((outcome, took_s))
            if outcome.kind == FOUND and connection.recv():  # the parent wants this one shrunk
                connection.send(shrunk(composition, outcome, most_s=MOST_S))
            drop_programs()


def drop_programs() -> None:
    """Forget the compiled programs if this process holds many of them."""
    mappings = Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") < MOST_MAPPINGS:
        return
    from tests.fuzz import building, models, plain

    building.forget()
    plain.programs_of.cache_clear()
    models.model_of.cache_clear()
    sys.modules["jax"].clear_caches()
    gc.collect()


def environment_of_workers(folder: Path) -> None:
    """Set the variables that JAX reads when it is imported, for this process and those that it starts."""
    from tests import environment

    os.environ["JAX_PLATFORMS"] = "cpu"
    environment.prepare()
    os.environ.setdefault("RRFP_COMPILE_CACHE", str(folder.absolute() / "compiled"))
