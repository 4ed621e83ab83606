"""The split does the work of the fused forward and backward, and no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.programs.splitting import split_backward
from tests.programs.splitting.flops import dot_flops, fused_work, split_work, xla_flops
from tests.programs.splitting.zoo import ZOO, Example, block, stack_blocks

LAYERS, WIDTH, HIDDEN = 3, 32, 128


def chunk(scan: bool, layer: Any = block, unroll: int = 1) -> Example:
    params = jax.tree.map(lambda w: w.astype(jnp.float32), stack_blocks(jax.random.key(0), LAYERS, WIDTH, HIDDEN))
    inputs = jnp.ones((2, 16, WIDTH), jnp.float32)
    if scan:
        return Example(
            lambda p, x: jax.lax.scan(lambda h, q: (layer(q, h), None), x, p, unroll=unroll)[0], params, inputs
        )

    def fn(blocks: Any, x: jax.Array) -> jax.Array:
        for p in blocks:
            x = layer(p, x)
        return x

    return Example(fn, [jax.tree.map(lambda w, i=index: w[i], params) for index in range(LAYERS)], inputs)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_matrix_products_are_those_of_the_fused_backward(scan: bool, remat: bool) -> None:
    example = chunk(scan, jax.checkpoint(block) if remat else block)
    work = split_work(dot_flops, split_backward(*example), example)
    assert sum(work) == fused_work(dot_flops, example)
    assert work.weight_gradient == 2 * 2 * 16 * WIDTH * (4 * WIDTH + 2 * HIDDEN) * LAYERS


@pytest.mark.parametrize("scan", [False, True])
def test_flops_by_xla_are_within_two_percent(scan: bool) -> None:
    """The loop is unrolled: XLA counts the body of a loop once."""
    example = chunk(scan, unroll=LAYERS)
    assert sum(split_work(xla_flops, split_backward(*example), example)) <= 1.02 * fused_work(xla_flops, example)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ZOO)
def test_no_matrix_product_of_any_chunk_is_repeated(name: str) -> None:
    example = ZOO[name](jax.random.key(0))
    assert sum(split_work(dot_flops, split_backward(*example), example)) <= fused_work(dot_flops, example)


def test_weight_gradients_hold_the_matrix_products_and_little_else() -> None:
    """Per block: one product per weight matrix, and nothing that is not needed for one."""
    example = chunk(scan=True)
    split = split_backward(*example)
    outputs, residuals = jax.eval_shape(split.forward, example.params, example.inputs)
    _, weight_residuals = jax.eval_shape(split.backward, example.params, residuals, outputs)
    names = [
        e.primitive.name for e in jax.make_jaxpr(partial(split.weight_gradient, example.params))(weight_residuals).eqns
    ]
    assert names.count("dot_general") == 6
    assert set(names) <= {"dot_general", "transpose", "reshape", "broadcast_in_dim"}, names
