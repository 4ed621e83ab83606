"""What is handed on: nothing from parameters alone, nothing twice, free operations undone, and the numbers pinned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.programs.splitting import split_backward
from tests.programs.splitting.checks import assert_close
from tests.programs.splitting.zoo import ZOO, Example, block, block_params

ROWS, WIDTH, HIDDEN = 10, 6, 12
FLOAT_BYTES = 4


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ params["up"] + params["bias"]) @ params["down"]


MLP = Example(mlp, {"up": spec(WIDTH, HIDDEN), "bias": spec(HIDDEN), "down": spec(HIDDEN, WIDTH)}, spec(ROWS, WIDTH))


def test_bytes_of_a_small_model() -> None:
    """Forward keeps x, sin and cos; W gets (x, gradient of the hidden layer), (sin, dy) and the bias's gradient."""
    report = split_backward(*MLP).report
    hidden, narrow = ROWS * HIDDEN * FLOAT_BYTES, ROWS * WIDTH * FLOAT_BYTES
    weights = 2 * WIDTH * HIDDEN * FLOAT_BYTES
    assert report.residual_bytes == narrow + 2 * hidden
    assert report.input_bytes == narrow
    assert report.weight_residual_bytes == 2 * narrow + 2 * hidden + HIDDEN * FLOAT_BYTES
    assert report.aliased_bytes == narrow + hidden
    assert report.fixed_vjp_bytes == weights
    assert report.vjp_bytes == report.residual_bytes + weights
    assert report.derived_bytes == 0
    origins = sorted(crossing.origin for crossing in report.weight_residuals)
    assert origins == ["input", "mul", "output gradient", "residual", "weight gradient"]
    assert f"residuals {report.residual_bytes:,} B" in str(report)


def test_bytes_of_a_transformer_block() -> None:
    """For W: the operands of six weight gradients and two light gradients. The residuals depend on JAX's own rules."""
    report = split_backward(block, block_params(jax.random.key(0), 8, 16), spec(2, 4, 8)).report
    narrow, hidden, light = 8 * 8 * FLOAT_BYTES, 8 * 16 * FLOAT_BYTES, (8 + 16) * FLOAT_BYTES
    assert report.weight_residual_bytes == 8 * narrow + 2 * hidden + light
    assert report.residual_bytes <= 5824


@pytest.mark.parametrize("name", ZOO)
def test_no_more_than_jax_vjp_keeps_without_parameters(name: str) -> None:
    report = split_backward(*ZOO[name](jax.random.key(0))).report
    assert report.residual_bytes <= report.vjp_bytes - report.fixed_vjp_bytes


def test_rematerialisation_shrinks_the_stash_and_not_what_is_owed() -> None:
    reports = {
        name: split_backward(*ZOO[name](jax.random.key(0))).report
        for name in ("scan_over_layers", "remat_dots_scan", "remat_full_scan")
    }
    none, dots, full = (report.residual_bytes for report in reports.values())
    assert full < dots < none
    assert full == 3 * 2 * 4 * 8 * FLOAT_BYTES, "the input of each of three layers"
    assert len({report.weight_residual_bytes for report in reports.values()}) == 1


def test_a_reshaped_transposed_or_widened_residual_is_stored_as_what_it_shows() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x.T.reshape(2, -1).astype(jnp.float32) @ w))

    report = split_backward(fn, spec(15, 3), spec(6, 5, dtype=jnp.bfloat16)).report
    assert [str(crossing.dtype) for crossing in report.residuals] == ["bfloat16", "float32"]
    assert report.input_bytes == 6 * 5 * 2


def test_what_is_passed_on_is_the_same_buffer() -> None:
    split = split_backward(*MLP)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), MLP.params)
    x, output_grad = jnp.ones((ROWS, WIDTH)), jnp.ones((ROWS, WIDTH))
    outputs, made = jax.jit(split.forward_made)(params, x)
    residuals = split.residuals_of(x, outputs, made)
    assert any(array is x for array in residuals)
    input_grad, made = jax.jit(split.backward_made)(params, residuals, output_grad)
    weight_residuals = split.weight_residuals_of(residuals, output_grad, input_grad, made)
    assert sum(array is output_grad or any(array is kept for kept in residuals) for array in weight_residuals) == 3
    plain = split.backward(params, split.forward(params, x)[1], output_grad)[1]
    assert_close(weight_residuals, plain, 1e-6)


def test_what_is_derived_from_parameters_is_made_once_per_update() -> None:
    example = ZOO["derived_weights"](jax.random.key(0))
    split = split_backward(*example)
    derived = split.prepare(example.params)
    assert sum(array.nbytes for array in derived) == split.report.derived_bytes > 0
    outputs, residuals = jax.eval_shape(split.forward, example.params, example.inputs)
    with_derived = jax.make_jaxpr(lambda p, s, g, d: split.backward(p, s, g, derived=d))
    names = [e.primitive.name for e in with_derived(example.params, residuals, outputs, derived).eqns]
    assert names.count("dot_general") < str(jax.make_jaxpr(split.backward)(example.params, residuals, outputs)).count(
        "dot_g"
    )


def test_weights_that_are_cast_again_by_a_rematerialised_backward_are_derived_once() -> None:
    @jax.checkpoint
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)

    report = split_backward(lambda p, x: layer(p[1], layer(p[0], x)), [spec(6, 8), spec(8, 5)], spec(4, 6)).report
    assert report.derived_bytes == 2 * (6 * 8 + 8 * 5)


def test_what_is_made_of_constants_alone_is_left_to_the_compiler() -> None:
    report = split_backward(lambda w, x: x @ jnp.tril(w) + jnp.cos(jnp.arange(6.0)), spec(6, 6), spec(4, 6)).report
    assert report.derived_bytes == 6 * 6 * FLOAT_BYTES, "the masked weight and neither mask nor cosines"


def test_a_callback_on_parameters_runs_once_per_preparation() -> None:
    calls = []

    def scale(v: Any) -> Any:
        calls.append(1)
        return np.asarray(v) * 2

    @jax.custom_jvp
    def doubled(v: Any) -> Any:
        return jax.pure_callback(scale, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))
    params, x = {"w": jnp.full((3, 4), 0.3), "v": jnp.linspace(0.0, 1.0, 4)}, jnp.ones((2, 3))
    split = split_backward(lambda p, x: x @ (p["w"] * doubled(p["v"])), params, x)
    derived = jax.block_until_ready(jax.jit(split.prepare)(params))
    before = len(calls)
    outputs, residuals = jax.jit(split.forward)(params, x, derived=derived)
    _, weight_residuals = jax.jit(split.backward)(params, residuals, outputs, derived=derived)
    jax.block_until_ready(jax.jit(split.weight_gradient)(params, weight_residuals, derived=derived))
    assert len(calls) == before > 0


def test_an_output_that_the_backward_reads_is_not_stored_twice() -> None:
    split = split_backward(lambda w, x: jnp.exp(x @ w), spec(6, 6), spec(4, 6))
    assert [place.origin for place in split.residual_sources] == ["input", "output"]
    assert split.report.output_bytes == 4 * 6 * FLOAT_BYTES
    w, x = jnp.ones((6, 6)), jnp.ones((4, 6))
    outputs, made = jax.jit(split.forward_made)(w, x)
    assert made == ()
    assert split.residuals_of(x, outputs, made)[1] is outputs


def test_an_input_gradient_that_is_owed_is_not_stored_twice() -> None:
    def fn(table: jax.Array, inputs: Any) -> jax.Array:
        x, ids = inputs
        return jnp.sin(x + table[ids])

    split = split_backward(fn, spec(5, 6), (spec(4, 6), spec(4, dtype=jnp.int32)))
    assert {place.origin for place in split.weight_residual_sources} == {"input gradient", "residual"}
    table, x, ids = jnp.ones((5, 6)), jnp.ones((4, 6)), jnp.arange(4)
    output, residuals = split.forward(table, (x, ids))
    input_grad, made = jax.jit(split.backward_made)(table, residuals, output)
    assert made == ()
    assert any(array is input_grad[0] for array in split.weight_residuals_of(residuals, output, input_grad, made))


def test_without_input_gradient_everything_is_deferred() -> None:
    example = ZOO["embedding"](jax.random.key(0))
    split = split_backward(*example)
    outputs, residuals = jax.eval_shape(split.forward, example.params, example.inputs)
    assert not jax.make_jaxpr(split.backward)(example.params, residuals, outputs).eqns
    assert split.report.weight_residual_bytes == split.report.residual_bytes + outputs.size * outputs.dtype.itemsize


def test_light_gradients_are_made_with_the_input_gradient() -> None:
    split = split_backward(*MLP)
    _, residuals = jax.eval_shape(split.forward, MLP.params, MLP.inputs)
    _, weight_residuals = jax.eval_shape(split.backward, MLP.params, residuals, MLP.inputs)
    assert (HIDDEN,) in {array.shape for array in weight_residuals}


def test_rematerialised_layers_wait_for_their_cotangents() -> None:
    example = ZOO["remat_full"](jax.random.key(0))
    split = split_backward(*example)
    outputs, residuals = jax.eval_shape(split.forward, example.params, example.inputs)
    _, weight_residuals = jax.eval_shape(split.backward, example.params, residuals, outputs)
    backward = jax.make_jaxpr(split.backward)(example.params, residuals, outputs)
    assert [e.primitive.name for e in backward.eqns].count("optimization_barrier") == 2
    assert "optimization_barrier" not in str(jax.make_jaxpr(split.weight_gradient)(example.params, weight_residuals))


def test_the_backward_in_one_piece_shares_the_stash() -> None:
    example = ZOO["transformer"](jax.random.key(0))
    split = split_backward(*example)
    _, residuals = jax.eval_shape(split.forward, example.params, example.inputs)
    input_grad, params_grad = jax.eval_shape(split.full_backward, example.params, residuals, example.inputs)
    assert input_grad.shape == example.inputs.shape
    assert jax.tree.structure(params_grad) == jax.tree.structure(example.params)
