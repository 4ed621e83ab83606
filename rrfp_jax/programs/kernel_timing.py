"""One compilation at a time on each GPU of this host, since XLA chooses kernels by timing them on the GPU.

A second compilation on the same GPU would disturb these times and take memory for its own trials. Processes may share a
GPU, also processes of different runs, so a lock file for each GPU is held while XLA compiles. It ends with its process.

A program that spans several processes takes no lock: these processes wait for each other while they compile it, and
would wait in a circle if one of them held the lock of another's GPU.
"""

import contextlib
import ctypes
import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import jax


def times_kernels(device: jax.Device) -> bool:
    """Whether XLA compiles for a device by trying programs on it; it does not for a GPU that is not here."""
    return device.platform == "gpu" and device in jax.local_devices()


@contextlib.contextmanager
def timing_alone(devices: Iterable[jax.Device]) -> Iterator[None]:
    """Within the block no other process of this user compiles for these devices; waits until that is so."""
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
