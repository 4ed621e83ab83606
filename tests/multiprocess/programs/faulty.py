"""Ranks of a real command, one of which goes wrong in some way: ``faulty FAULT RANK emulate ...`` (or ``train``).

Every rank says ``running PID`` when its first task of the second step begins; faults of tasks happen then.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rrfp_jax.cluster import RunKey
from rrfp_jax.commands.common.errors import run_command

OWN = int(os.environ["RRFP_RANK"])
FOREVER_S, SLOW_S, HELD_S = 600.0, 0.05, 12


def no_fault() -> None:
    """All is well."""


def raise_error() -> None:
    raise ArithmeticError("an injected error")


def raise_long_error() -> None:
    """With more text than any message between processes may hold."""
    raise RuntimeError("x" * 5_000_000)


def exhaust_memory() -> None:
    """More than any machine has: XLA says RESOURCE_EXHAUSTED, as it does on a device that is full."""
    import jax.numpy as jnp

    jnp.zeros(1 << 46, jnp.uint8).block_until_ready()


def hang() -> None:
    """In a thread for which the interpreter would wait before it ends."""
    hung = threading.Thread(target=threading.Event().wait, daemon=False)
    hung.start()
    hung.join()


def hold_up_python() -> None:
    """As one long call does, such as a garbage collection: no other Python runs meanwhile, so no heartbeat leaves."""
    ctypes.PyDLL(None).sleep(HELD_S)


def slow_down() -> None:
    """Every task takes longer."""
    time.sleep(SLOW_S)


IN_A_TASK: dict[str, Callable[[], None]] = {
    "none": no_fault,
    "raise": raise_error,
    "raise-long": raise_long_error,
    "oom": exhaust_memory,
    "hang": hang,
    "hold": hold_up_python,
    "slow": slow_down,
}


class FaultyStage:
    """Passes everything on, and does one thing before its first task of step 1."""

    def __init__(self, stage: Any, fault: Callable[[], None]) -> None:
        self._stage, self._fault, self._has_run = stage, fault, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def launch(self, step: int, task: Any) -> Any:
        if self._fault is slow_down:
            self._fault()
        elif step == 1 and not self._has_run:
            self._has_run = True
            print("running", os.getpid(), flush=True)
            self._fault()
        return self._stage.launch(step, task)


def make_stages_faulty(fault: Callable[[], None]) -> None:
    from rrfp_jax.runtime.process import Process

    start = Process.start

    def start_faulty(self: Process, arbiters: Any, make_stage: Any, options: Any, **more: Any) -> Any:
        return start(self, arbiters, lambda unit, send: FaultyStage(make_stage(unit, send), fault), options, **more)

    Process.start = start_faulty  # type: ignore[method-assign]


def main() -> None:
    fault, rank, command, *arguments = sys.argv[1:]
    is_faulty = int(rank) == OWN
    if is_faulty and fault == "absent":
        time.sleep(FOREVER_S)
    if is_faulty and fault == "configuration":
        arguments += ["--window", "3"]
    if is_faulty and fault == "home":
        os.environ["HOME"] += "/other"
    if is_faulty and fault == "key":
        os.environ |= RunKey.generate().environment()
    make_stages_faulty(IN_A_TASK.get(fault, no_fault) if is_faulty else no_fault)
    module = "experiments.emulate" if command == "emulate" else f"rrfp_jax.commands.{command}"
    run_command(lambda: import_module(module).main(arguments))


if __name__ == "__main__":
    main()
