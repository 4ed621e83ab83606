"""The environment of tests, and of the processes that they start; JAX reads it when it is imported."""

import os
from importlib.metadata import version

NUM_VIRTUAL_DEVICES = 8
_DEVICES = "--xla_force_host_platform_device_count"
_QUICK = ["--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib") < "0.11":  # newer ones know no such flag, and end where they meet one
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")


def prepare() -> None:
    """Set eight CPU devices with thread pools of as many threads, and programs that are quick to compile, not to run.

    Tests spend most of their time on compiling, and would spend half of that on making small programs fast. A sixth of
    the time that JAX takes to trace and lower goes into the lines of source of each operation, which no test reads.
    Where the environment says how to optimize, programs are compiled as users compile them.
    """
    flags = [flag for flag in _flags_without_devices() if flag not in _QUICK]
    if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
        flags += _QUICK
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_DEVICES}={NUM_VIRTUAL_DEVICES}"])
    # XLA sizes its CPU thread pools by this; with the default, long float32 sums change with the number of devices.
    os.environ["NPROC"] = str(NUM_VIRTUAL_DEVICES)


def of_child(*left_out: str) -> dict[str, str]:
    """The environment of a process that chooses its own devices, without these variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NPROC", *left_out)}
    return kept | {"XLA_FLAGS": " ".join(_flags_without_devices())}


def _flags_without_devices() -> list[str]:
    return [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(f"{_DEVICES}=")]
