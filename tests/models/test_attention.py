"""Which implementation of attention runs where."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

# What JAX asks of the machine before it traces cuDNN's attention; there is no public way to trace for another machine.
from jax._src.cudnn import fused_attention_stablehlo as fused

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.models import LanguageModelConfig, attention, language_model
from rrfp_jax.models.attention import causal_attention, even_attention, full_attention, implementation, segment_bias
from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.target import Target, tracing_for
from tests.commands.running import ROOT

HOPPER = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", is_nvidia=True, capability=(9, 0))
PRESETS = ROOT / "tpu_gpu_configs"
GPU_PRESETS = sorted(path for path in (PRESETS / "gpu").glob("*.yaml") if "vision:" not in path.read_text())
TPU_PRESETS = sorted((PRESETS / "tpu").glob("*.yaml"))


@pytest.mark.parametrize("preset", GPU_PRESETS, ids=lambda preset: preset.stem)
def test_presets_for_gpus_take_the_fused_one(preset: Path):
    model = load_train_config(str(preset), {}).model
    assert implementation(HOPPER, jnp.dtype(model.compute_dtype), model.size_per_head) == "cudnn"


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim"),
    [
        (HOPPER, jnp.float32, 64),
        (HOPPER, jnp.bfloat16, 60),
        (HOPPER, jnp.bfloat16, 256),
        (Target(platform="gpu", kind="AMD Instinct MI300X"), jnp.bfloat16, 64),
        (Target(platform="tpu", kind="TPU v5 lite"), jnp.bfloat16, 64),
        (Target(platform="cpu", kind="cpu"), jnp.bfloat16, 64),
    ],
)
def test_all_else_takes_the_formula(target: Target, dtype: jnp.dtype, head_dim: int):
    assert implementation(target, jnp.dtype(dtype), head_dim) == "xla"


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


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX and this library take the machine for one with a recent NVIDIA GPU, until something is compiled."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91_000)
    attention._refusal.cache_clear()
    with tracing_for(HOPPER):
        yield


def layer_plan(config: TrainConfig, *, is_split: bool) -> ChunkPlan:
    """The plan of one decoder layer of a preset, with its microbatches."""
    data = config.data
    chunks = language_model(replace(config.model, num_layers=3)).split(num_chunks=3)
    rows = (data.batch_size // data.num_microbatches, data.length)
    leaves = {name: jax.ShapeDtypeStruct(rows, np.int32) for name in ("tokens", "targets")}
    leaves["weights"] = jax.ShapeDtypeStruct(rows, np.float32)
    graph = replace(model_graph(chunks, None, None), split=frozenset({1} if is_split else ()))
    return plan_chunk(1, chunks, graph, derive_shapes(chunks, graph, leaves))


def lowered(plan: ChunkPlan, params: object, platform: str) -> list[str]:
    """Forward and backward, or input gradient, as they would be compiled for the platform."""
    derived = jax.eval_shape(plan.prepare, params)
    stash = plan.stash.specs
    rest = (stash.saved, stash.kept)
    forward = jax.jit(plan.forward).trace(params, derived, plan.operands)
    backward = jax.jit(plan.input_gradient).trace(stash.donated, params, derived, rest, plan.output_grads)
    return [program.lower(lowering_platforms=(platform,)).as_text() for program in (forward, backward)]


def has_scores(plan: ChunkPlan, length: int) -> bool:
    """Whether a forward keeps an array for every head and every pair of tokens."""
    return any(leaf.ndim > 3 and leaf.shape[-2:] == (length, length) for leaf in jax.tree.leaves(plan.stash.specs))


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("preset", GPU_PRESETS, ids=lambda preset: preset.stem)
def test_programs_of_gpu_presets_are_fused_and_keep_no_scores(preset: Path):
    config = load_train_config(str(preset), {})
    plan = layer_plan(config, is_split=True)
    assert not has_scores(plan, config.data.length)
    assert not has_scores(layer_plan(config, is_split=False), config.data.length)
    forward, backward = lowered(plan, plan.params, "cuda")
    assert "fmhaSoftmax" in forward
    assert "fmhaSoftmaxBackward" in backward


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("length", [64, 65])
def test_all_that_models_ask_is_fused(length: int, window: int | None, is_packed: bool):
    heads = [jax.ShapeDtypeStruct((2, length, 4, 80), jnp.bfloat16)] * 3
    bias = jax.ShapeDtypeStruct((2, 1, length, length), jnp.bfloat16) if is_packed else None
    for function in (partial(causal_attention, window=window), full_attention):
        text = backward_text(function, bias, heads)
        assert ("fmhaScaleBiasSoftmax" if is_packed else "fmhaSoftmax") in text
        assert ("fmhaScaleBiasSoftmaxBackward" if is_packed else "fmhaSoftmaxBackward") in text


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("is_split", [False, True])
def test_packed_layers_keep_one_bias_for_all(is_split: bool):
    config = LanguageModelConfig(
        vocab_size=16, hidden=64, num_layers=2, num_heads=2, mlp_dim=64, compute_dtype="bfloat16"
    )
    chunks = language_model(config).split(layers_per_chunk=[0, 2, 0], packed=True)
    names = ("tokens", "targets", "positions", "segments")
    leaves = {name: jax.ShapeDtypeStruct((3, 128), np.int32) for name in names}
    leaves["weights"] = jax.ShapeDtypeStruct((3, 128), np.float32)
    graph = replace(model_graph(chunks, None, None), split=frozenset({1} if is_split else ()))
    plan = plan_chunk(1, chunks, graph, derive_shapes(chunks, graph, leaves))
    large = [leaf.shape for leaf in jax.tree.leaves(plan.stash.specs) if leaf.shape[-2:] == (128, 128)]
    assert large == [(3, 1, 128, 128)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_odd_rows_are_computed_as_even_ones(is_causal: bool, is_packed: bool):
    """With values and gradients that are those of the odd rows."""
    heads = [jnp.asarray(np.random.default_rng(i).normal(size=(2, 7, 2, 4)), jnp.float32) for i in range(3)]
    bias = segment_bias(jnp.array([[1, 1, 1, 2, 2, 0, 0], [1] * 7]), jnp.float32) if is_packed else None

    def of(function: Any) -> Any:
        mixed, pullback = jax.vjp(
            lambda *heads: function(*heads, bias, is_causal=is_causal, implementation="xla"), *heads
        )
        return mixed, pullback(jnp.cos(mixed))

    chex.assert_trees_all_close(of(even_attention), of(jax.nn.dot_product_attention), rtol=1e-5, atol=1e-6)


def backward_text(function: Any, bias: Any, heads: list[Any]) -> str:
    """The gradient by queries, keys and values, as it would be compiled for an NVIDIA GPU."""

    def gradients(bias: Any, *heads: Any) -> Any:
        mixed, pullback = jax.vjp(partial(function, bias=bias), *heads)
        return pullback(mixed)

    return jax.jit(gradients).trace(bias, *heads).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("preset", TPU_PRESETS, ids=lambda preset: preset.stem)
def test_programs_of_tpu_presets_take_the_formula(preset: Path):
    config = load_train_config(str(preset), {})
    plan = layer_plan(config, is_split=True)
    assert has_scores(plan, config.data.length)
    for program in lowered(plan, plan.params, "tpu"):
        assert "fmha" not in program
        assert "stablehlo.dot_general" in program
