"""The environment in which JAX starts: its plugins, the flags of XLA, and the settings of deterministic runs.

Nothing here imports JAX, so that a rank can be refused before it meets the others, and an environment be checked whose
JAX is broken.

Plugins: the functions return a sentence with the command to run if JAX sees, or would see, only CPU devices on a host
that has others; None if nothing is wrong.

Flags: the compiler reads ``XLA_FLAGS`` once, and that of TPUs reads ``LIBTPU_INIT_ARGS`` for its own flags
(``--xla_tpu_...``). It ends the process, without a traceback, if it does not know a flag. So each flag is looked for in
the libraries that will read it: a name that none of them holds as a string is refused beforehand. The flags of the
user's environment go before those of a configuration. Both are part of the key under which compiled programs are kept
(:mod:`rrfp_jax.runtime.compile_cache`), and processes of a run compare them at the start, like JAX's own settings.

Determinism: order is the core's part: gradients accumulate in microbatch order and losses are summed in it. The rest is
arithmetic: the same program must round alike wherever it runs. On CPU, XLA cuts long float32 sums by the size of its
thread pool, which grows with the number of virtual devices of a process; the environment variable NPROC pins it. On GPU
some kernels add in any order unless XLA is told not to use them, and XLA chooses among kernels by timing them, which
gives other kernels in each process and at each start.
"""

import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rrfp_jax.hardware import (
    CPU,
    CUDA12,
    CUDA13,
    OLDEST_DRIVER,
    PACKAGES,
    TPU,
    Found,
    find_hardware,
    install_command,
    installed_accelerators,
    is_of_image,
    major,
    removal,
    replacement,
    too_old,
)

XLA, LIBTPU = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
"""Environment variables with flags, for all compilers and for that of TPUs."""
_FLAG = re.compile(r"--xla_\w+(=\S+)?")
_OF_TPUS = "--xla_tpu_"
_OF_HOST = ("--xla_force_host_platform_device_count", "--xla_dump_to")
"""Flags that may differ from process to process."""
_LIBRARIES = {
    XLA: (("jaxlib", "libjax_common.so"), ("jax_plugins", "xla_cuda*/xla_cuda_plugin.so")),
    LIBTPU: (("libtpu", "libtpu.so"),),
}
"""By variable, the packages that read it, and the file of each."""
_OF_A_PROCESS = re.compile(
    "log|dump|cache|debug|check_|checks|guard|visible_devices|traceback|locations|explain|pprint|platform|backend|timeout"
    "|address|coordinator|process_id|num_processes|transfer_size|options|default_device|num_cpu_devices|async_dispatch"
    "|captured_constants|url_schema"
)
"""JAX's settings that may differ, because they change neither programs nor numbers, or describe the host of a
process."""
_DETERMINISTIC = "--xla_gpu_deterministic_ops"
"""The flag that leaves out kernels that add in any order, and timing."""
_ORDERED, _TIMING = "--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_autotune_level"
"""Two flags with the same effect: the first leaves timing on, and 0 for the second switches it off."""
_ON = ("", "true", "1")


def check_plugin(platform: str | None) -> None:
    """Raises ValueError, with the command to run, if the installed JAX cannot use the accelerators of this host.

    ``platform`` is that of the run: ``cpu``, or None for any that JAX finds.
    """
    if platform != CPU and (problem := missing_plugin(os.environ)) is not None:
        raise ValueError(problem)


def missing_plugin(environ: Mapping[str, str]) -> str | None:
    """Returns why JAX would see CPU devices only, and the command to run. For use before JAX starts.

    Quick if a plugin is installed: whether it works is known once JAX has started (:func:`idle_plugin`).
    """
    installed = installed_accelerators()
    if _keeps_to_cpu(environ):
        return None
    if (both := two_cudas(installed)) is not None:
        return both
    try:
        has_plugins = importlib.util.find_spec("jax_plugins") is not None
    except (ImportError, ValueError):
        has_plugins = False
    # JAX may find a plugin of another name than ours
    if installed or has_plugins or entry_points(group="jax_plugins"):
        return None
    found = _visible_hardware(environ)
    if found is None:
        return None
    if found.is_too_old:
        return f"this host has {found.why}, which is {too_old()}: update it, or take platform cpu"
    device = "a TPU" if found.accelerator == TPU else "a GPU"
    return (
        f"this host has {device} ({found.why}), but the installed JAX is for CPU only: run "
        f"'{install_command(found.accelerator)}', or take platform cpu"
    )


def idle_plugin(environ: Mapping[str, str], reason: str | None) -> str | None:
    """Returns why JAX, which has started, sees CPU devices only, and the command to run; ``reason`` is JAX's own."""
    if (missing := missing_plugin(environ)) is not None or _keeps_to_cpu(environ):
        return missing
    found, installed = _visible_hardware(environ), installed_accelerators()
    if found is None:
        return None
    kinds = (TPU,) if found.accelerator == TPU else (CUDA13, CUDA12)
    own = next((name for name in kinds if name in installed), None)
    if own is None:
        return (
            f"this host has {found.why}, but none of the installed JAX plugins uses it: run "
            f"'{install_command(found.accelerator)}', or take platform cpu"
        )
    plugin = f"{PACKAGES[own][0]} {installed[own]}"
    if found.driver is not None and major(found.driver) < OLDEST_DRIVER[own]:
        again = f"run '{replacement(found.accelerator, own)}'"
        if is_of_image():
            again = f"take an image for this driver, or {again}"
        remedy = "update the driver" if found.is_too_old else again
        return f"{plugin} needs NVIDIA driver {OLDEST_DRIVER[own]}, and this host has {found.driver}: {remedy}"
    said = "JAX's messages above say why" if reason is None else f"JAX says: {reason}"
    again = f"install it again by '{replacement(own, own)}'"
    if is_of_image():
        again = (
            "it is the image's own, so let the container see the driver's libraries and devices, leave LD_LIBRARY_PATH "
            f"as the image has it, or take JAX's own packages by '{replacement(own, own)}'"
        )
    return (
        f"this host has {found.why} and {plugin} is installed, but it fails to load, so JAX sees CPU devices only "
        f"({said}): {again}, or take platform cpu"
    )


def two_cudas(installed: Mapping[str, str]) -> str | None:
    """Returns the fault of an environment that holds both CUDA plugins, and the command that mends it."""
    if CUDA12 not in installed or CUDA13 not in installed:
        return None
    found = find_hardware()
    keep = CUDA12 if found.driver is not None and found.accelerator == CUDA12 else CUDA13
    other = CUDA12 if keep == CUDA13 else CUDA13
    return (
        f"jax-cuda12-plugin {installed[CUDA12]} and jax-cuda13-plugin {installed[CUDA13]} are both installed, and JAX "
        f"works with one: keep {keep} by '{replacement(keep, other) if is_of_image() else removal(other)}'"
    )


def _keeps_to_cpu(environ: Mapping[str, str]) -> bool:
    """Returns whether the user keeps JAX to CPU devices by ``JAX_PLATFORMS=cpu``."""
    platforms = {name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",")} - {""}
    return bool(platforms) and not platforms & {"cuda", "gpu", "tpu"}


def _visible_hardware(environ: Mapping[str, str]) -> Found | None:
    """Returns the accelerators of this host, unless the user hides them from JAX."""
    found = find_hardware()
    is_hidden = found.driver is not None and environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return None if found.accelerator == CPU or is_hidden else found


def check_flags(flags: Sequence[str]) -> None:
    """Raises ValueError for a text that is no flag of XLA, or a flag that is given twice."""
    names = set[str]()
    for flag in flags:
        name = flag.partition("=")[0]
        if not _FLAG.fullmatch(flag):
            raise ValueError(f"xla_flags has {flag!r}: write each as --xla_name=value")
        if name in names:
            raise ValueError(f"xla_flags has {name} twice: leave one out")
        names.add(name)


def use_xla_flags(flags: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """Puts the flags into the environment, except those that it has; returns whether there were any. XLA must not have
    started.

    Raises ValueError for a flag that a library which is here, and would read it, does not know.
    """
    missing: dict[str, list[str]] = {XLA: [], LIBTPU: []}
    for flag in flags:
        variable = LIBTPU if flag.startswith(_OF_TPUS) else XLA
        if flag.partition("=")[0] not in _flags_in(environ, variable):
            missing[variable].append(flag)
    for variable, added in missing.items():
        _check_known(added, variable)
    for variable, added in missing.items():
        if added:
            environ[variable] = " ".join([*added, *environ.get(variable, "").split()])
    return any(missing.values())


def _flags_in(environ: Mapping[str, str], variable: str) -> dict[str, str]:
    """Returns the values of the flags in a variable by name; the last one of a name counts."""
    parts = (word.partition("=") for word in environ.get(variable, "").split())
    return {name: value for name, _, value in parts}


def flags_agreed(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags of XLA in this process, which must be the same in all processes of a run, except the number of
    virtual devices and the folder for dumps.

    The names are those of a refusal, which so tells the flags that differ.
    """
    told = {
        f"XLA's flag {name} (of {variable} or run.xla_flags)": value
        for variable in (XLA, LIBTPU)
        for name, value in _flags_in(environ, variable).items()
        if name not in _OF_HOST
    }
    return dict(sorted(told.items()))


def settings_agreed(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns JAX's settings, from its variables or ``jax.config``, that must be the same in all processes of a run.

    Ranks whose settings differ draw other initial values from the same key, or compile other programs for one
    collective. All settings count but those that are known to be harmless, so that new ones of JAX do too. If JAX is
    not loaded yet, they are the variables that it will read.
    """
    jax = sys.modules.get("jax")
    read = {name.lower(): value for name, value in environ.items() if name.startswith("JAX_")}
    return {
        f"JAX's setting {name} ({name.upper()})": value if isinstance(value, bool | float | None) else str(value)
        for name, value in sorted((read if jax is None else jax.config.values).items())
        if not _OF_A_PROCESS.search(name)
    }


def _check_known(flags: Iterable[str], variable: str) -> None:
    names = {flag: flag.partition("=")[0].removeprefix("--").encode() for flag in flags}
    for package, pattern in _LIBRARIES[variable] if names else ():
        spec = importlib.util.find_spec(package)
        folders = () if spec is None else spec.submodule_search_locations or ()
        for library in (path for folder in folders for path in sorted(Path(folder).glob(pattern))):
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                unknown = [flag for flag, name in names.items() if content.find(name + b"\0") < 0]
            if unknown:
                raise ValueError(
                    f"xla_flags has {unknown[0]}, which {library.name} of this installation does not know, and XLA "
                    "would end the process: take it out, or install the version that knows it"
                )


def require_determinism(devices: Sequence[Any]) -> None:
    """Raises ValueError, with the remedy, unless these devices give the same bits every time."""
    platforms = {device.platform for device in devices}
    if "cpu" in platforms:
        pinned, num_devices = os.environ.get("NPROC", ""), len(devices[0].client.local_devices())
        if not pinned.isdecimal():
            raise ValueError(
                "deterministic training on CPU needs thread pools of a fixed size: set the environment variable NPROC "
                "to the same number for every run that is to be compared (for example NPROC=8), before JAX starts"
            )
        if int(pinned) < num_devices:
            raise ValueError(
                f"NPROC is {pinned}, but the process has {num_devices} CPU devices and as many threads: set NPROC to "
                f"at least {num_devices}"
            )
    given = _flags_in({XLA: os.environ.get(XLA, "").lower()}, XLA)
    is_ordered = given.get(_ORDERED) in _ON and given.get(_TIMING) == "0"
    if platforms & {"gpu", "cuda", "rocm"} and given.get(_DETERMINISTIC) not in _ON and not is_ordered:
        raise ValueError(
            "deterministic training on GPU needs kernels with a fixed order of sums, which are not chosen by timing "
            f"them: add {_DETERMINISTIC}=true to XLA_FLAGS (or {_ORDERED}=true and {_TIMING}=0)"
        )
