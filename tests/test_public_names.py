"""Every public name is there; names load on first use, so a missing one would only show in a user's hands."""

import importlib

import pytest


@pytest.mark.parametrize("module", ["rrfp_jax", "rrfp_jax.models", "rrfp_jax.runtime"])
def test_every_public_name_loads(module: str) -> None:
    room = importlib.import_module(module)
    assert [name for name in room.__all__ if not hasattr(room, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        _ = room.Pipelines
