"""Pipelines whose devices call a kernel of attention with their own rows and heads train what the plain loop does.

There are fewer heads of keys and values than devices that share the queries' heads, and rows are packed.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from rrfp_jax.models import attention, language_model
from rrfp_jax.programs.target import Target
from rrfp_jax.schedules import linear
from tests.models.cudnn_on_cpu import HOPPER, cudnn_on_cpu
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training
from tests.test_pipeline_context import CONFIG, OPTIMIZER, make_batches, plain

ONE_KEY_HEAD = replace(CONFIG, num_kv_heads=1)
WAYS: list[dict[str, Any]] = [
    {"mesh": {"tensor": 2}, "remat": "dots", "hint": "bfw"},
    {"mesh": {"tensor": 2, "fsdp": 2}, "hint": "bf"},
]


def train(config: Any, way: dict[str, Any], num_steps: int) -> tuple[list[float], Any]:
    chunks = language_model(config).split(2, packed=True)
    pipeline = make_pipeline(
        chunks, placement=linear(2), optimizer=OPTIMIZER, clip_norm=1.0, progress_deadline_s=60, **way
    )
    with pipeline:
        state, losses = pipeline.init(jax.random.key(1)), []
        for batch in make_batches(num_steps):
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        return losses, jax.tree.map(np.array, pipeline.params(state))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tiles_train_what_the_formula_trains(monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]) -> None:
    wanted = plain(ONE_KEY_HEAD, packed=True, num_steps=2)
    monkeypatch.setattr(attention, "_LONG", 4)
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "formula", None)
    assert_same_training(*train(ONE_KEY_HEAD, way, 2), *wanted)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_calls_of_cudnn_train_what_the_formula_trains(monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]) -> None:
    """As closely as bfloat16 can tell."""
    config = replace(ONE_KEY_HEAD, head_dim=8, compute_dtype="bfloat16")
    wanted, _ = plain(config, packed=True, num_steps=2)
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "formula", None)
    here = replace(HOPPER, platform="cpu")  # all but attention is for the devices that run it
    with cudnn_on_cpu(here), mock.patch.object(Target, "of", staticmethod(lambda _: here)):
        losses, _ = train(config, way, 2)
    np.testing.assert_allclose(losses, wanted, rtol=2e-3)
