"""The public functions: structures, types, errors, preparation, effects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rrfp_jax.programs.splitting import split_backward
from tests.programs.splitting.checks import (
    assert_close,
    check_split,
    output_gradient,
    quick_jit,
    reference,
    run_split,
)
from tests.programs.splitting.zoo import ZOO, Example, make_mesh, normal

KEY = jax.random.key(1)


@pytest.mark.parametrize("name", ["transformer", "remat_dots_scan", "experts"])
def test_gradients_in_float32(name: str) -> None:
    check_split(ZOO[name](KEY), 1e-5)


@pytest.mark.parametrize("name", ["derived_weights", "low_precision_scan", "shard_map_checked", "remat_low_precision"])
def test_prepared_values_change_nothing(name: str) -> None:
    with jax.enable_x64(True):
        split = check_split(ZOO[name](KEY), 1e-3 if "low_precision" in name else 1e-12, prepared=True)
    assert split.report.derived_bytes > 0 or name == "shard_map_checked"


def test_inputs_can_be_denied_a_gradient() -> None:
    example = ZOO["several_inputs"](KEY)
    split = split_backward(*example, input_gradients=(False, True))
    outputs, residuals = split.forward(example.params, example.inputs)
    output_grad = {**jax.tree.map(jnp.ones_like, outputs), "ids": None}
    inputs_grad, weight_residuals = split.backward(example.params, residuals, output_grad)
    _, expected, params_grad = reference(example, output_grad)
    assert_close(
        (inputs_grad, split.weight_gradient(example.params, weight_residuals)), ((None, expected[1]), params_grad), 1e-6
    )
    nothing = split_backward(*example, input_gradients=False)
    assert jax.tree.leaves(nothing.backward(example.params, residuals, output_grad)[0]) == []


@pytest.mark.parametrize("name", ["mlp", "remat_full_scan", "head", "embedding"])
def test_fused_backward(name: str) -> None:
    example = ZOO[name](KEY)
    split = split_backward(*example)
    output_grad = output_gradient(jax.eval_shape(example.fn, example.params, example.inputs))

    def both(params: Any, inputs: Any) -> Any:
        outputs, residuals = split.forward(params, inputs)
        return outputs, *split.full_backward(params, residuals, output_grad)

    expected = quick_jit(lambda p, x: reference(example._replace(params=p, inputs=x), output_grad))
    actual = quick_jit(both)(example.params, example.inputs)
    assert_close(actual, expected(example.params, example.inputs), 1e-5)


def test_leaves_without_a_gradient_are_none() -> None:
    example = ZOO["several_inputs"](KEY)
    split = split_backward(*example)
    outputs, residuals = split.forward(example.params, example.inputs)
    output_grad = {**jax.tree.map(jnp.ones_like, outputs), "ids": None}
    inputs_grad, weight_residuals = split.backward(example.params, residuals, output_grad)
    params_grad = split.weight_gradient(example.params, weight_residuals)
    assert [g.shape for g in inputs_grad] == [(2, 3), (2, 4)]
    assert params_grad["swap"] is None
    assert params_grad["count"] is None
    assert params_grad["text"].shape == (4, 5)


def test_trivial_sides() -> None:
    no_inputs, no_params = ZOO["no_inputs"](KEY), ZOO["no_params"](KEY)
    split = split_backward(*no_inputs)
    outputs, residuals = split.forward(no_inputs.params, None)
    assert split.backward(no_inputs.params, residuals, outputs)[0] is None
    split = split_backward(*no_params)
    outputs, residuals = split.forward({}, no_params.inputs)
    _, weight_residuals = split.backward({}, residuals, outputs)
    assert weight_residuals == ()
    assert split.weight_gradient({}, weight_residuals) == {}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_functions_can_be_jitted_with_a_donated_stash() -> None:
    example = ZOO["mlp"](KEY)
    split = split_backward(*example)
    outputs, residuals = jax.jit(split.forward)(example.params, example.inputs)
    gradients = split.backward(example.params, residuals, outputs)
    fresh = [jnp.array(array, copy=True) for array in residuals]
    backward = jax.jit(split.backward, donate_argnums=1)
    assert_close(backward(example.params, fresh, outputs), gradients, 1e-5)
    assert all(array.is_deleted() for array in fresh)


def test_shapes_other_than_those_split_for_are_refused() -> None:
    fn, params, inputs = ZOO["mlp"](KEY)
    split = split_backward(fn, params, inputs)
    with pytest.raises(ValueError, match=r"inputs is float32\[5, 6\], but the function was split for float32\[4, 6\]"):
        split.forward(params, jnp.ones((5, 6)))
    with pytest.raises(ValueError, match="params have the structure"):
        split.forward({}, inputs)
    outputs, residuals = split.forward(params, inputs)
    with pytest.raises(ValueError, match="gradient of outputs is float32"):
        split.backward(params, residuals, outputs[:1])


def test_abstract_and_concrete_arguments_split_alike() -> None:
    fn, params, inputs = ZOO["transformer"](KEY)
    shapes = jax.eval_shape(lambda *x: x, params, inputs)
    assert split_backward(fn, *shapes).report == split_backward(fn, params, inputs).report


def test_prints_of_forward_and_backward_happen_once(capfd: pytest.CaptureFixture[str]) -> None:
    @jax.custom_vjp
    def loud(x: jax.Array) -> jax.Array:
        return x

    def loud_backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        jax.debug.print("backward")
        return (g,)

    loud.defvjp(lambda x: (x, None), loud_backward)

    def fn(p: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("forward")
        return jnp.sum(jnp.tanh(loud(x) @ p))

    params, inputs = normal(KEY, 3, 3), normal(KEY, 2, 3)
    split = split_backward(fn, params, inputs)
    outputs, residuals = jax.jit(split.forward)(params, inputs)
    _, weight_residuals = jax.jit(split.backward)(params, residuals, outputs)
    jax.block_until_ready(jax.jit(split.weight_gradient)(params, weight_residuals))
    jax.effects_barrier()
    printed = capfd.readouterr().out.split()
    assert sorted(printed) == ["backward", "forward"]


def test_explicit_sharding() -> None:
    """Shardings as part of the arrays' types."""
    mesh, spec = make_mesh(AxisType.Explicit), PartitionSpec

    def put(array: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec(*axes)))

    def fn(p: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, q: Any) -> Any:
            return h + jnp.matmul(jnp.tanh(h @ q["up"]), q["down"], out_sharding=spec("data", None)), None

        return jax.lax.scan(layer, x, p)[0]

    params = {
        "up": put(normal(KEY, 2, 4, 8), None, None, "tensor"),
        "down": put(normal(KEY, 2, 8, 4), None, "tensor", None),
    }
    with jax.set_mesh(mesh):
        example = Example(fn, params, put(normal(KEY, 4, 4), "data", None))
        output_grad = put(normal(KEY, 4, 4), "data", None)
        split = split_backward(*example)
        actual = jax.jit(lambda g: run_split(split, example, g, prepared=False))(output_grad)
        assert_close(actual, jax.jit(lambda g: reference(example, g))(output_grad), 1e-5)
    assert actual[2]["up"].sharding.spec == params["up"].sharding.spec
