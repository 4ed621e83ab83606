"""What bit-identical results need of the machine, checked before a deterministic run starts.

Order is the core's part: gradients accumulate in microbatch order and losses are summed in it. The rest is arithmetic:
the same program must round alike wherever it runs. On CPU, XLA cuts long float32 sums by the size of its thread pool,
which grows with the number of virtual devices of a process; the environment variable NPROC pins it. On GPU some
kernels add in any order unless XLA is told not to use them, and XLA chooses among kernels by timing them, which gives
other kernels in each process and at each start.
"""

import os
from collections.abc import Sequence
from typing import Any

_DETERMINISTIC = "--xla_gpu_deterministic_ops"
"""Leaves out kernels that add in any order, and timing."""
_ORDERED, _TIMING = "--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_autotune_level"
"""The first leaves timing on; 0 for the second switches it off."""
_ON = ("", "true", "1")


def require_determinism(devices: Sequence[Any]) -> None:
    """Raise ValueError, with the remedy, unless these devices give the same bits every time."""
    platforms = {device.platform for device in devices}
    if "cpu" in platforms:
        _require_pinned_threads(len(devices[0].client.local_devices()))
    given = dict(_flag(word) for word in os.environ.get("XLA_FLAGS", "").lower().split())  # the last of a name counts
    is_ordered = given.get(_ORDERED) in _ON and given.get(_TIMING) == "0"
    if platforms & {"gpu", "cuda", "rocm"} and given.get(_DETERMINISTIC) not in _ON and not is_ordered:
        raise ValueError(
            "deterministic training on GPU needs kernels with a fixed order of sums, which are not chosen by timing "
            f"them: add {_DETERMINISTIC}=true to XLA_FLAGS (or {_ORDERED}=true and {_TIMING}=0)"
        )


def _flag(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _require_pinned_threads(num_devices: int) -> None:
    pinned = os.environ.get("NPROC", "")
    if not pinned.isdecimal():
        raise ValueError(
            "deterministic training on CPU needs thread pools of a fixed size: set the environment variable NPROC to "
            "the same number for every run that is to be compared (for example NPROC=8), before JAX starts"
        )
    if int(pinned) < num_devices:
        raise ValueError(
            f"NPROC is {pinned}, but the process has {num_devices} CPU devices and as many threads: set NPROC to at "
            f"least {num_devices}"
        )
