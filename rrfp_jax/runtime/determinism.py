"""What bit-identical results need of the machine, checked before a deterministic run starts.

Order is the core's part: gradients accumulate in microbatch order and losses are summed in it. The rest is arithmetic:
the same program must round alike wherever it runs. On CPU, XLA cuts long float32 sums by the size of its thread pool,
which grows with the number of virtual devices of a process; the environment variable NPROC pins it. On GPU some
kernels add in any order unless XLA is told not to use them.
"""

import os
from collections.abc import Sequence
from typing import Any

_GPU_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def require_determinism(devices: Sequence[Any]) -> None:
    """Raise ValueError, with the remedy, unless these devices give the same bits every time."""
    platforms = {device.platform for device in devices}
    if "cpu" in platforms:
        _require_pinned_threads(len(devices[0].client.local_devices()))
    given = os.environ.get("XLA_FLAGS", "").lower().split()
    if platforms & {"gpu", "cuda", "rocm"} and not any(
        flag + value in given for flag in _GPU_FLAGS for value in ("", "=true", "=1")
    ):
        raise ValueError(
            f"deterministic training on GPU needs kernels with a fixed order of sums: add {_GPU_FLAGS[0]}=true to "
            "XLA_FLAGS"
        )


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
