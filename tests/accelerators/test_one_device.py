"""Four stages on one accelerator train what a plain jitted loop trains there."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.layout import Layout
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.models.attention import AttentionCall, causal_attention, full_attention, implementation
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.target import current_target
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import linear
from tests.plain_loop import train_plainly

NUM_STAGES, NUM_MICROBATCHES, ROWS, LENGTH, NUM_STEPS = 4, 8, 2, 64, 5
OPTIMIZER = optax.adamw(1e-3)
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (2e-2, 2e-1)}
"""Of losses, and of a leaf's change by norm: accelerators round float32 products too, unless told otherwise."""


def model(compute_dtype: str) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=256, hidden=128, num_layers=4, num_heads=2, mlp_dim=256, compute_dtype=compute_dtype
    )


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(NUM_STEPS):
        first = rng.integers(256, size=(NUM_MICROBATCHES, ROWS, 1))
        tokens = ((first + np.arange(LENGTH + 1)) % 256).astype(np.int32)
        weights = (rng.random((NUM_MICROBATCHES, ROWS, LENGTH)) < 0.9).astype(np.float32)
        made.append({"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights})
    return made


def train(dtype: str, dispatch_ahead: int | str, **order: Any) -> tuple[list[float], Any, Any]:
    """Losses, and parameters before and after."""
    device = jax.local_devices()[0]
    with Pipeline(
        language_model(model(dtype)).split(num_chunks=NUM_STAGES),
        placement=linear(NUM_STAGES),
        process=Process(Layout(num_stages=NUM_STAGES), devices=[device] * NUM_STAGES),
        optimizer=OPTIMIZER,
        ordering=Ordering(window=4, **order),
        updates=UpdateRules(clip_norm=1.0),
        options=RuntimeOptions(dispatch_ahead=dispatch_ahead),  # type: ignore[arg-type]
    ) as pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        losses = []
        for batch in batches():
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        return losses, initial, jax.tree.map(np.array, pipeline.params(state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("order", "dispatch_ahead"),
    [({"hint": "bf"}, "auto"), ({"hint": "bfw"}, "just-in-time"), ({"hint": "bf"}, "certain"), ({"hint": "bfw"}, 0)],
)
def test_a_pipeline_trains_what_the_plain_loop_trains(dtype: str, order: Any, dispatch_ahead: int | str) -> None:
    with jax.default_matmul_precision("highest"):
        losses, initial, params = train(dtype, dispatch_ahead, **order)
        chunks = language_model(model(dtype)).split(num_chunks=NUM_STAGES)
        expected_losses, expected = train_plainly(chunks, initial, OPTIMIZER, batches(), clip_norm=1.0)
    loss_tolerance, change_tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(losses, expected_losses, rtol=loss_tolerance)
    for before, after, wanted in zip(*map(jax.tree.leaves, (initial, params, expected)), strict=True):
        change = np.linalg.norm(np.float64(wanted) - np.float64(before))
        assert np.linalg.norm(np.float64(after) - np.float64(wanted)) <= change_tolerance * change


def test_fused_attention_is_the_formula() -> None:
    """And where it runs, a chunk keeps no array that grows with the square of the length."""
    dtype, heads, length = jnp.dtype(jnp.bfloat16), 2, 384  # no other size of the model
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (2, length, heads, 64), dtype) for k in keys)
    as_formula = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
    np.testing.assert_allclose(
        np.float32(causal_attention(query, key, value)), np.float32(as_formula), atol=3e-2, rtol=3e-2
    )
    target = current_target()
    asked = AttentionCall(rows=2, length=length, heads=heads, kv_heads=heads, head_dim=64, dtype=dtype, is_causal=True)
    if target.capability is not None and target.capability >= (8, 0):
        assert target.is_nvidia
        assert implementation(target, asked) == "cudnn"
    if implementation(target, asked) not in ("cudnn", "splash"):
        return
    chunks = language_model(model("bfloat16")).split(num_chunks=NUM_STAGES)
    leaf = {name: jax.ShapeDtypeStruct((ROWS, length), np.int32) for name in ("tokens", "targets")}
    leaf["weights"] = jax.ShapeDtypeStruct((ROWS, length), np.float32)
    graph = model_graph(chunks, None, None)
    shapes = derive_shapes(chunks, graph, leaf)
    plan = plan_chunk(1, chunks, graph, shapes)
    kept = [spec.shape for spec in jax.tree.leaves(plan.residuals.specs)]
    assert kept
    assert not any(shape[-2:] == (length, length) for shape in kept)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("length", [256, 257])
def test_attention_of_encoders_and_packed_rows_is_the_formula(length: int, is_packed: bool) -> None:
    """With its gradients; an odd length is that of a class token beside patches."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = [jax.random.normal(key, (2, length, 2, 80), jnp.bfloat16) for key in keys]
    segments = jnp.minimum(jnp.arange(length) // 100, 1)[None] + jnp.arange(2)[:, None]
    mask = (segments[:, :, None] == segments[:, None])[:, None] if is_packed else None
    formula = partial(jax.nn.dot_product_attention, mask=mask, implementation="xla")
    told = {"segments": segments if is_packed else None}
    for function, expected in (
        (partial(full_attention, **told), formula),
        (partial(causal_attention, window=50, **told), partial(formula, is_causal=True, local_window_size=(49, 0))),
    ):

        def with_gradients(attention: Any, *heads: Any) -> Any:
            mixed, pullback = jax.vjp(attention, *heads)
            return mixed, pullback(jnp.cos(mixed))

        made, wanted = (jax.jit(partial(with_gradients, each))(*heads) for each in (function, expected))
        for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.float32(ours), np.float32(theirs), atol=5e-2, rtol=5e-2)
