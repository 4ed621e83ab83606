"""Why JAX would see, or sees, CPU devices only on a host that has more, and the command to run.

Nothing here imports JAX, so that a rank can be refused before it meets the others, and an environment be looked at
whose JAX is broken. Functions return a sentence, or None where nothing is wrong.
"""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec

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


def check_plugin(platform: str | None) -> None:
    """Raise ValueError, with the command to run, where the installed JAX cannot use the accelerators of this host.

    ``platform`` is what the run asks for: ``cpu``, or None for what JAX finds.
    """
    if platform != CPU and (problem := missing_plugin(os.environ)) is not None:
        raise ValueError(problem)


def missing_plugin(environ: Mapping[str, str]) -> str | None:
    """Why JAX would see CPU devices only, and the command to run; to be asked before JAX starts.

    Quick where a plugin is installed: whether it works is known once JAX has started (:func:`idle_plugin`).
    """
    installed = installed_accelerators()
    if _keeps_to_cpu(environ):
        return None
    if (both := two_cudas(installed)) is not None:
        return both
    if installed or jax_knows_plugins():
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
    """The same once JAX has started and sees CPU devices only; ``reason`` is what JAX says of it."""
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
    """What is wrong with an environment that holds both CUDA plugins, and the command that mends it."""
    if CUDA12 not in installed or CUDA13 not in installed:
        return None
    found = find_hardware()
    keep = CUDA12 if found.driver is not None and found.accelerator == CUDA12 else CUDA13
    other = CUDA12 if keep == CUDA13 else CUDA13
    return (
        f"jax-cuda12-plugin {installed[CUDA12]} and jax-cuda13-plugin {installed[CUDA13]} are both installed, and JAX "
        f"works with one: keep {keep} by '{replacement(keep, other) if is_of_image() else removal(other)}'"
    )


def jax_knows_plugins() -> bool:
    """Whether JAX would find a plugin of any kind, also one of another name than ours."""
    try:
        spec = find_spec("jax_plugins")
    except (ImportError, ValueError):
        spec = None
    return spec is not None or bool(entry_points(group="jax_plugins"))


def _keeps_to_cpu(environ: Mapping[str, str]) -> bool:
    """Whether the user has said so: ``JAX_PLATFORMS=cpu``."""
    platforms = {name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",")} - {""}
    return bool(platforms) and not platforms & {"cuda", "gpu", "tpu"}


def _visible_hardware(environ: Mapping[str, str]) -> Found | None:
    """What is here, unless the user hides it from JAX."""
    found = find_hardware()
    is_hidden = found.driver is not None and environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return None if found.accelerator == CPU or is_hidden else found
