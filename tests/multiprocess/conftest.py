"""What is compared with ranks, bit for bit, is compiled as ranks compile."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def compiled_as_by_users() -> Iterator[None]:
    """With all optimizations, which the fast tests do without elsewhere."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
