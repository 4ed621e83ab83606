"""The device for which programs are made, whether it is here or not.

Some layers have one implementation for each kind of device (attention, experts), and choose among them while they are
traced. The running backend cannot tell them for which device: a host without any GPU can compile programs for a GPU.
So the code that traces or compiles says it, by :func:`tracing_for`, and layers ask :func:`current_target`. Outside of
``tracing_for`` the target is the running backend.

A target that is not here is an accelerator by name. JAX has *compile-only* devices for these (:func:`devices_for`):
programs are traced, lowered and compiled for them as for real ones, but no array can lie there. XLA must know the card
that it compiles for; :data:`rrfp_jax.costs.devices.DEVICES` has the numbers of each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.experimental import topologies
from jax.extend.backend import get_backend

from rrfp_jax.costs.devices import CUDA, DEVICES, Device, device_like, device_of
from rrfp_jax.hardware import CPU, CUDA12, TPU, install_command
from rrfp_jax.private.jax_names import answer_cudnn

_GPU = "gpu"
_CHIPS = {  # for each kind of TPU the shapes of slices, smallest first, as JAX names topologies
    "tpu-v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "tpu-v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "tpu-v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "tpu-v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of device that programs are made for."""

    platform: str
    """The platform as JAX calls it: ``cpu``, ``gpu`` or ``tpu``."""
    kind: str
    """The kind of device as JAX calls it, for example ``NVIDIA H100 80GB HBM3``."""
    is_nvidia: bool = False
    capability: tuple[int, int] | None = None
    """The compute capability of an NVIDIA GPU; None where it is unknown, and on all other devices."""
    memory_bytes: int | None = None
    """The bytes that JAX takes of the device's memory; None where that is unknown."""

    @staticmethod
    def of(device: jax.Device) -> "Target":
        """Returns the target that a device is, which may be compile-only."""
        version = device.client.platform_version.lower()
        # a backend's version begins with "PJRT C API", that of compile-only devices is the kind of device alone
        is_cuda = "cuda" in version or device.device_kind.startswith("NVIDIA")
        is_nvidia = device.platform == _GPU and is_cuda
        told = getattr(device, "compute_capability", None) if is_nvidia else None
        return Target(
            platform=device.platform,
            kind=device.device_kind,
            is_nvidia=is_nvidia,
            capability=None if told is None else _capability(str(told)),
            memory_bytes=memory_bytes_of(device),
        )

    @staticmethod
    def like(record: Device) -> "Target":
        """Returns the target that a device is by its record, which asks no backend; one of no kind is a CPU."""
        return Target(
            platform={CUDA: _GPU, TPU: TPU}.get(record.kind, CPU),
            kind=record.title,
            is_nvidia=record.kind == CUDA,
            capability=None if record.card is None else record.card.capability,
            memory_bytes=record.num_bytes,
        )


_SETTINGS = (
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "threefry_partitionable",
)
"""Settings of JAX that change what is traced, and that code may make for one thread."""
_current: ContextVar[Target | None] = ContextVar("target", default=None)


def current_target() -> Target:
    """Returns the target of the present trace."""
    target = _current.get()
    return Target.of(get_backend().local_devices()[0]) if target is None else target


@contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Makes this thread trace programs for a target within the block."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)


def settings_here() -> Callable[[], AbstractContextManager[Any]]:
    """Returns blocks in which any thread traces by the settings of JAX that hold here and now.

    A setting made by ``with jax.default_matmul_precision("highest")`` or the like holds on one thread alone.
    """
    settings = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}

    def block() -> ExitStack:
        stack = ExitStack()
        for name, value in settings.items():
            stack.enter_context(getattr(jax, name)(value))
        return stack

    return block


def devices_for(name: str, num_devices: int) -> list[jax.Device]:
    """Returns compile-only devices of an accelerator by name, in the order in which hosts have them.

    Raises ValueError for a name that is none, for one that JAX compiles for nowhere, and where the environment lacks
    the compiler, with the command that installs it.
    """
    record = _record(name)
    if record.card is not None:
        per_host = min(num_devices, record.per_host)
        hosts = -(-num_devices // per_host)
        options = {"target_config": record.card.described(record.title), "topology": f"1 x {hosts} x {per_host}"}
        found = _topology(record, platform="cuda", topology_name="", **options)
    else:
        shapes = _CHIPS[record.name]
        shape = next((s for s in shapes if _size(s) >= num_devices), None)
        if shape is None:
            raise ValueError(
                f"a stage has {num_devices} devices, and the largest slice of {record.title} that is known here has "
                f"{_size(shapes[-1])}: give the stage a smaller mesh"
            )
        found = _topology(record, platform="tpu", topology_name=f"{record.name.removeprefix('tpu-')}:{shape}")
    return sorted(found, key=lambda device: (device.process_index, device.id))[:num_devices]


def memory_bytes_of(device: jax.Device) -> int | None:
    """Returns the bytes that JAX takes of a device's memory, from the device or from its record; None if neither says.

    Compile-only devices refuse to tell.
    """
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        record = device_like(device.device_kind)
        return None if record is None else record.num_bytes
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit)


def _record(name: str) -> Device:
    record = device_of(name)
    if record.card is None and record.name not in _CHIPS:
        known = [each.name for each in DEVICES.values() if each.card is not None or each.name in _CHIPS]
        raise ValueError(f"programs cannot be compiled for {record.name}: choose among {', '.join(known)}")
    return record


def _topology(record: Device, **options: Any) -> Sequence[jax.Device]:
    try:
        return topologies.get_topology_desc(**options).devices
    except Exception as error:  # JAX raises one class for a missing plugin, others for one that does not load
        accelerator = CUDA12 if record.kind == CUDA else TPU
        said = (str(error) or type(error).__name__).partition("\n")[0]
        raise ValueError(
            f"this environment cannot compile for {record.title}: {said}; '{install_command(accelerator)}' installs "
            "the compiler, which needs no such device"
        ) from error


def _size(shape: str) -> int:
    return prod(map(int, shape.split("x")))


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


answer_cudnn(lambda: None if (target := _current.get()) is None else target.capability)
