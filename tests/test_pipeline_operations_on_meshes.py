"""Gradients of common operations on a stage's mesh against those of one device.

Convolutions, which it cuts wrongly over two axes, are refused.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline

WIDTH, LENGTH, ROWS = 8, 16, 4
Operation = Callable[[Any, Any, Any], Any]
"""``operation(x, w, s)`` of ``[rows, length, width]``, a matrix ``[width, width]`` and a vector ``[width]``."""


def convolution(groups: int) -> Operation:
    def run(x: Any, w: Any, s: Any) -> Any:
        kernel = jnp.stack([w, w.T, w * s])[:, : WIDTH // groups]
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )

    return run


def attention(x: Any, w: Any, s: Any) -> Any:
    heads = (x @ w).reshape(ROWS, LENGTH, 2, WIDTH // 2)
    return jax.nn.dot_product_attention(heads, heads * s[:4], heads, is_causal=True).reshape(x.shape)


def scanned(x: Any, w: Any, s: Any) -> Any:
    state, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row * s), None), x[:, 0], x.swapaxes(0, 1))
    return state


OPERATIONS: dict[str, Operation] = {
    "product": lambda x, w, s: x @ w * s,
    "product over rows and positions": lambda x, w, s: jnp.einsum("rlw,rlv->wv", x @ w, x * s),
    "batched product": lambda x, w, s: jnp.einsum("rlw,rmw->rlm", x @ w, x * s),
    "softmax": lambda x, w, s: jax.nn.softmax(x @ w * s),
    "softmax over positions": lambda x, w, s: jax.nn.softmax(x @ w * s, axis=1),
    "layer norm": lambda x, w, s: jax.nn.standardize(x @ w, epsilon=1e-5) * s,
    "cumulative sum": lambda x, w, s: jnp.cumsum(x @ w * s, axis=1),
    "sort": lambda x, w, s: jnp.sort(x @ w * s, axis=1),
    "top k": lambda x, w, s: jax.lax.top_k(x @ w * s, 3)[0],
    "maximum": lambda x, w, s: (x @ w * s).max(axis=1),
    "product of elements": lambda x, w, s: jnp.prod(1 + 0.1 * x @ w * s, axis=1),
    "gather": lambda x, w, s: (w * s)[jnp.argsort(x[:, :, 0], axis=1) % WIDTH],
    "scatter": lambda x, w, s: jnp.zeros((ROWS, 5, WIDTH)).at[:, jnp.arange(LENGTH) % 5].add(x @ w * s),
    "segment sum": lambda x, w, s: jax.ops.segment_sum((x @ w * s)[0], jnp.arange(LENGTH) // 3, 6),
    "one-hot": lambda x, w, s: jax.nn.one_hot(jnp.argmax(x, axis=-1), WIDTH) @ (w * s),
    "concatenation": lambda x, w, s: jnp.concatenate([x @ w, x * s], axis=1),
    "roll": lambda x, w, s: jnp.roll(x @ w * s, 3, axis=1),
    "reversal": lambda x, w, s: jnp.flip(x @ w * s, axis=(1, 2)),
    "padding and slice": lambda x, w, s: jnp.pad(x @ w * s, ((0, 0), (2, 1), (0, 0)))[:, 1:-3],
    "transposition": lambda x, w, s: (x @ w).transpose(2, 0, 1) * s[:, None, None],
    "window": lambda x, w, s: jax.lax.reduce_window(x @ w * s, 0.0, jax.lax.add, (1, 3, 1), (1, 2, 1), "VALID"),
    "Fourier transform": lambda x, w, s: jnp.abs(jnp.fft.rfft(x @ w * s, axis=1)),
    "attention": attention,
    "loop": scanned,
    "loop over layers": lambda x, w, s: jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w * s), x),
    "conditional": lambda x, w, s: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x @ w.T) * s,
    "solution": lambda x, w, s: jnp.linalg.solve(w @ w.T + 9 * jnp.eye(WIDTH) * s, x[0].T),
    "rematerialised": jax.checkpoint(lambda x, w, s: jnp.tanh(x @ w * s) @ w),
    "dense convolution": convolution(1),
    "depthwise convolution": convolution(WIDTH),
}
MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "fsdp, tensor": {"fsdp": 2, "tensor": 2},
    "context, tensor": {"context": 2, "tensor": 2},
}


def cut(params: Any, axes: Any) -> Any:
    rows = "fsdp" if "fsdp" in axes else None
    columns = "tensor" if "tensor" in axes else None
    return {"w": PartitionSpec(rows, columns), "s": PartitionSpec(columns)}


def gradient(operation: Operation, mesh: dict[str, int]) -> tuple[Any, float]:
    """The gradient of a function of the operation's result, and its norm as the pipeline says it."""

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.sum(jnp.sin(operation(leaves["x"], params["w"], params["s"]) + 0.3)), jnp.float32(1)

    def init(key: jax.Array) -> Any:
        return {"w": 0.5 * jax.random.normal(key, (WIDTH, WIDTH)), "s": jnp.linspace(0.5, 1.5, WIDTH)}

    chunk = Chunk(name="operation", init=init, apply=apply, leaves=("x",), partition=cut)
    batch = {"x": np.random.default_rng(0).normal(size=(1, ROWS, LENGTH, WIDTH)).astype(np.float32)}
    with make_pipeline([chunk], placement=linear(1), optimizer=optax.sgd(1.0), mesh=mesh or {"tensor": 1}) as pipeline:
        state = pipeline.init(jax.random.key(0))
        before = jax.tree.map(np.array, pipeline.params(state))
        state, metrics = pipeline.step(state, batch)
        norm = metrics.result().grad_norm
        return jax.tree.map(lambda old, new: old - np.array(new), before, pipeline.params(state)), norm


@cache
def on_one_device(operation: Operation) -> tuple[Any, float]:
    return gradient(operation, {})


def check(operation: Operation, mesh: dict[str, int]) -> None:
    (expected, norm), (found, norm_on_mesh) = on_one_device(operation), gradient(operation, mesh)
    assert norm_on_mesh == pytest.approx(norm, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * norm), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_on_a_mesh_are_those_of_one_device(name: str, mesh: dict[str, int]) -> None:
    if "convolution" in name and len(mesh) > 1:
        with pytest.raises(ValueError, match=r"chunk 0 \(operation\) .* it has a convolution on a mesh of .*shard_map"):
            gradient(OPERATIONS[name], mesh)
    else:
        check(OPERATIONS[name], mesh)


@pytest.mark.parametrize("inside", [lambda run: run, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"])
def test_convolutions_on_two_axes_are_refused_also_within_calls(inside: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk 0 \(operation\) .* a convolution on a mesh of .* wrong gradients"):
        gradient(inside(convolution(WIDTH)), MESHES["fsdp, tensor"])


def test_a_convolution_that_each_device_runs_by_itself_is_right() -> None:
    def mapped(x: Any, w: Any, s: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.shape:
            return convolution(WIDTH)(x, w, s)
        at = PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec()
        return jax.shard_map(convolution(WIDTH), mesh=mesh, in_specs=at, out_specs=at[0])(x, w, s)

    check(mapped, MESHES["fsdp, tensor"])
