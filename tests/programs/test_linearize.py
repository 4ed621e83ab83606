"""What the backward of a function keeps: nothing that is at hand anyway, nothing that parameters alone give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.linearize import Linearization, inexact_places, linearize

PARAMS = {"w": jnp.full((3, 4), 0.3), "v": jnp.linspace(0.0, 1.0, 4)}
X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def cut(apply: Any, params: Any, operands: Any) -> Linearization:
    outputs = jax.eval_shape(apply, params, operands)
    places = inexact_places(operands)
    return linearize(apply, params, operands, operand_leaves=places, output_leaves=inexact_places(outputs))


def gradients(lin: Linearization, params: Any, operands: Any) -> Any:
    outputs, stash = lin.forward(params, operands)
    at_hand = jax.tree.leaves((operands, outputs))
    ones = [jnp.ones_like(leaf) for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return lin.backward(params, [at_hand[place] for place in lin.kept], stash, ones)


def expected(apply: Any, params: Any, operands: Any) -> Any:
    grads = jax.grad(lambda p, o: jnp.sum(apply(p, o)), (0, 1))(params, operands)
    return grads[0], jax.tree.leaves(grads[1])


def test_parameters_inputs_and_outputs_are_not_stashed() -> None:
    def apply(params: Any, operands: Any) -> Any:
        return jnp.exp(operands["x"] @ params["w"])

    operands = {"x": X}
    lin = cut(apply, PARAMS, operands)
    assert lin.stash == ()
    assert lin.kept == (0, 1)
    jax.tree.map(np.testing.assert_allclose, gradients(lin, PARAMS, operands), expected(apply, PARAMS, operands))


def test_what_follows_from_parameters_or_constants_is_computed_again() -> None:
    def apply(params: Any, operands: Any) -> Any:
        weight = (params["w"] * jnp.cos(jnp.arange(4.0))).T.astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.sin(operands @ weight.T) * jnp.exp(params["v"])

    lin = cut(apply, PARAMS, X)
    assert [spec.shape for spec in lin.stash] == [(2, 4)] * len(lin.stash)
    assert len(lin.stash) <= 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradients(lin, PARAMS, X), expected(apply, PARAMS, X)
    )


def test_a_value_needed_twice_is_kept_once() -> None:
    def apply(params: Any, operands: Any) -> Any:
        hidden = jnp.tanh(operands @ params["w"]) + 1
        return hidden * params["v"] + hidden @ (params["w"].T @ params["w"])

    lin = cut(apply, PARAMS, X)
    _, stash = lin.forward(PARAMS, X)
    distinct = {np.asarray(value).tobytes() for value in stash}
    assert len(distinct) == len(stash)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradients(lin, PARAMS, X), expected(apply, PARAMS, X)
    )


def test_a_callback_is_not_run_again_by_the_backward() -> None:
    calls = []

    def scale(v: Any) -> Any:
        calls.append(1)
        return np.asarray(v) * 2

    @jax.custom_jvp
    def doubled(v: Any) -> Any:
        return jax.pure_callback(scale, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))

    def apply(params: Any, operands: Any) -> Any:
        return operands @ (params["w"] * doubled(params["v"]))

    lin = cut(apply, PARAMS, X)
    _, stash = jax.block_until_ready(jax.jit(lin.forward)(PARAMS, X))
    before = len(calls)
    jax.block_until_ready(jax.jit(lin.backward)(PARAMS, [X] * len(lin.kept), stash, [jnp.ones((2, 4))]))
    assert len(calls) == before
