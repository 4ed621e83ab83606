"""What is copied when a save begins."""

import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint._arrays import copy_to_host, own_copy

NAME = ("layers.0", "params", "kernel")


def test_a_save_copies_each_byte_once() -> None:
    array = jnp.arange(1 << 20, dtype=jnp.float32)
    copy_to_host({NAME: array[:16]}, {NAME: True})
    tracemalloc.start()
    try:
        held = copy_to_host({NAME: array}, {NAME: True})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held[NAME].nbytes == array.nbytes
    assert array.nbytes <= peak < 1.1 * array.nbytes


def test_what_is_copied_outlives_a_donated_array() -> None:
    array = jnp.ones((4, 8))
    held = copy_to_host({NAME: array}, {NAME: True})
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    ((_, piece),) = held[NAME].pieces
    np.testing.assert_array_equal(piece, np.ones((4, 8)))


class OnAccelerator:
    """An array as JAX shows it to NumPy: as the one host copy that it keeps."""

    host = np.ones(4)
    sharding = SimpleNamespace(memory_kind="device")

    def devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(platform="gpu")]

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return self.host


def test_the_host_copy_of_an_accelerators_array_is_not_copied_again() -> None:
    assert own_copy(OnAccelerator()) is OnAccelerator.host  # type: ignore[arg-type]


def test_an_array_in_host_memory_is_copied_as_its_buffer_is_shown() -> None:
    array = OnAccelerator()
    array.sharding = SimpleNamespace(memory_kind="pinned_host")
    assert own_copy(array) is not OnAccelerator.host  # type: ignore[arg-type]
