"""Gradients of the split equal those of `jax.vjp` on every kind of chunk."""

from __future__ import annotations

import jax
import pytest

from tests.programs.splitting.checks import check_split
from tests.programs.splitting.zoo import ZOO


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_exact_in_float64(name: str) -> None:
    with jax.enable_x64(True):
        check_split(ZOO[name](jax.random.key(0)), 1e-3 if "low_precision" in name else 1e-12)
