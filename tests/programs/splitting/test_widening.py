"""Gradients of parameters come from their products in the dtype in which they are added up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.programs.splitting import split_backward

ROWS, WIDTH = 40, 8


def layers(params: Any, x: jax.Array) -> jax.Array:
    """Matrices are cast as they are, behind a reshape and before one."""
    first, second = params["first"].astype(jnp.bfloat16), params["second"].reshape(WIDTH, WIDTH).astype(jnp.bfloat16)
    third = params["third"].astype(jnp.bfloat16).reshape(WIDTH, WIDTH)
    return jnp.tanh(jnp.tanh(x @ first) @ second + params["bias"].astype(jnp.bfloat16)) @ third


def given() -> tuple[Any, jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {"first": (WIDTH, WIDTH), "second": (2, 4, WIDTH), "third": (2, 4, WIDTH), "bias": (WIDTH,)}
    params = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, gradient = (jnp.asarray(random.normal(size=(ROWS, WIDTH)), jnp.bfloat16) for _ in range(2))
    return params, x, gradient


def gradients(*, widens: bool) -> tuple[Any, Any]:
    params, x, gradient = given()
    split = split_backward(layers, params, x, widens=widens)
    _, residuals = split.forward(params, x)
    input_grad, weight_residuals = split.backward(params, residuals, gradient)
    return input_grad, split.weight_gradient(params, weight_residuals)


def test_nothing_is_rounded_in_between() -> None:
    (rounded_input, rounded), (input_grad, exact) = gradients(widens=False), gradients(widens=True)
    np.testing.assert_array_equal(input_grad, rounded_input)
    np.testing.assert_array_equal(exact["bias"], rounded["bias"])
    for name in ("first", "second", "third"):
        assert exact[name].dtype == jnp.float32
        assert np.any(exact[name] != exact[name].astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(exact[name].astype(jnp.bfloat16), rounded[name].astype(jnp.bfloat16))


@pytest.mark.parametrize("widens", [False, True])
def test_no_cast_of_a_matrix_is_left(widens: bool) -> None:
    params, x, gradient = given()
    split = split_backward(layers, params, x, widens=widens)
    _, residuals = jax.eval_shape(split.forward, params, x)
    _, weight_residuals = jax.eval_shape(split.backward, params, residuals, gradient)
    text = str(jax.make_jaxpr(split.weight_gradient)(params, weight_residuals))
    assert text.count("new_dtype=float32") == (1 if widens else 4), "the bias's gradient was made by the input gradient"
    assert text.count("preferred_element_type=float32") == 3 * widens


def test_what_is_read_as_it_is_stays_rounded() -> None:
    def twice(params: Any, x: jax.Array) -> jax.Array:
        kernel = params.astype(jnp.bfloat16)
        return x @ kernel @ kernel

    params, x, gradient = given()
    split = split_backward(twice, params["first"], x, widens=True)
    plain = split_backward(twice, params["first"], x)
    results = [s.full_backward(params["first"], s.forward(params["first"], x)[1], gradient) for s in (split, plain)]
    jax.tree.map(np.testing.assert_array_equal, *results)
