"""Which implementation of attention runs where."""

import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import load_train_config
from rrfp_jax.models import attention
from rrfp_jax.models.attention import causal_attention, implementation
from tests.experiments.commands import ROOT

CUDA = "cuda 12080"
GPU_PRESETS = sorted((ROOT / "tpu_gpu_configs" / "gpu").glob("*.yaml"))


@pytest.mark.parametrize("preset", GPU_PRESETS, ids=lambda preset: preset.stem)
def test_presets_for_gpus_take_the_fused_one(preset: Path):
    model = load_train_config(preset, {}).model
    assert implementation(CUDA, jnp.dtype(model.compute_dtype), model.size_per_head) == "cudnn"


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim"),
    [
        (CUDA, jnp.float32, 64),
        (CUDA, jnp.bfloat16, 60),
        (CUDA, jnp.bfloat16, 256),
        ("rocm 60300", jnp.bfloat16, 64),
        ("TFRT TPU v5 lite", jnp.bfloat16, 64),
        ("<unknown>", jnp.bfloat16, 64),
    ],
)
def test_all_else_takes_the_formula(platform: str, dtype: jnp.dtype, head_dim: int):
    assert implementation(platform, jnp.dtype(dtype), head_dim) == "xla"


def test_a_gpu_that_cannot_do_it_falls_back_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As here, where JAX finds no cuDNN."""
    heads = [jnp.asarray(np.random.default_rng(i).normal(size=(2, 8, 2, 16)), jnp.bfloat16) for i in range(3)]
    expected = causal_attention(*heads)
    monkeypatch.setattr(attention, "implementation", lambda *_: "cudnn")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(causal_attention(*heads), expected)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "attention is not fused, and takes more memory and time: cuDNN is not detected."
