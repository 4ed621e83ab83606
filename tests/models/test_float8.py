"""Operands and products in float8 beside their formulas, the names of products, and devices that have none."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rrfp_jax.costs.devices import DEVICES
from rrfp_jax.models import ExpertsConfig, Float8Config, LanguageModelConfig, language_model
from rrfp_jax.models.float8 import E4M3, E5M2, Scaled, check_float8, joint_products, rounded
from rrfp_jax.models.loss import HeadLoss
from rrfp_jax.programs.splitting import split_backward
from rrfp_jax.programs.target import Target, tracing_for

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 32}


def value(operand: Scaled) -> np.ndarray:
    return np.asarray(operand.values, np.float64) * float(operand.scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("of", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_an_operand_is_rounded_once_at_the_least_power_of_two(dtype: Any, of: Any) -> None:
    most = float(ml_dtypes.finfo(dtype).max)
    for factor in (1e-30, 3e-5, 0.99, 1.0, most, 1.001 * most, 1e20):
        x = (jax.random.normal(jax.random.key(0), (64, 8)) * factor).astype(of)
        (operand,) = rounded(dtype, x)
        exact, scale = np.asarray(x, np.float64), float(operand.scale)
        assert np.log2(scale) % 1 == 0
        assert most / 2 < np.abs(exact).max() / scale <= most
        np.testing.assert_array_equal(value(operand), (exact / scale).astype(dtype).astype(np.float64) * scale)


def test_zeros_stay_and_what_is_not_finite_reaches_every_result() -> None:
    matrix = jnp.eye(4)
    assert not np.any(joint_products(jnp.zeros((2, 4)), [matrix])[0])
    for odd in (np.inf, -np.inf, np.nan):
        (found,) = joint_products(jnp.ones((2, 4)).at[0, 0].set(odd), [matrix])
        assert np.isnan(found).all()


def test_products_and_their_gradients_are_those_of_the_rounded_operands() -> None:
    x, *matrices = (
        jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(2, 5, 16), (16, 8), (16, 24)])
    )
    grads = tuple(jax.random.normal(jax.random.key(seed), (2, 5, n)) for seed, n in ((7, 8), (8, 24)))
    made, pullback = jax.vjp(joint_products, x, matrices)
    x_grad, matrix_grads = pullback(grads)
    (x8,), w8, g8 = rounded(E4M3, x), rounded(E4M3, *matrices), rounded(E5M2, *grads)
    assert w8[0].scale == w8[1].scale
    for found, weight, grad, found_grad in zip(made, w8, g8, matrix_grads, strict=True):
        np.testing.assert_allclose(found, value(x8) @ value(weight), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found_grad, np.einsum("blk,bln->kn", value(x8), value(grad)), rtol=1e-5, atol=1e-5)
    expected = sum(value(grad) @ value(weight).T for grad, weight in zip(g8, w8, strict=True))
    np.testing.assert_allclose(x_grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("words_first", [False, True])
@pytest.mark.one_in(2)
def test_the_head_has_the_loss_and_the_gradients_of_its_formula(words_first: bool) -> None:
    x, matrix = jax.random.normal(jax.random.key(0), (2, 6, 16)), jax.random.normal(jax.random.key(1), (16, 40))
    targets = jax.random.randint(jax.random.key(2), (2, 6), 0, 40)
    how = HeadLoss(words_first, "float32", 1e-3, float8=True)
    kernel = matrix.T if words_first else matrix
    (loss, _), pullback = jax.vjp(lambda x, m: how(x, m, targets, jnp.ones((2, 6))), x, kernel)
    x_grad, matrix_grad = pullback((jnp.float32(1), jnp.float32(0)))
    (x8,), (w8,) = rounded(E4M3, x), rounded(E4M3, matrix)
    logits = jnp.asarray(value(x8) @ value(w8), jnp.float32)
    np.testing.assert_allclose(how.logits(x, kernel), logits, rtol=1e-5, atol=1e-5)

    def formula(logits: jax.Array) -> jax.Array:
        normalisers = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum(
            normalisers - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0] + 1e-3 * normalisers**2
        )

    expected, of_logits = jax.value_and_grad(formula)(logits)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    (g8,) = rounded(E5M2, of_logits)
    np.testing.assert_allclose(x_grad, value(g8) @ value(w8).T, rtol=1e-4, atol=1e-4)
    found = matrix_grad.T if words_first else matrix_grad
    np.testing.assert_allclose(found, np.einsum("blk,bln->kn", value(x8), value(g8)), rtol=1e-4, atol=1e-4)


def test_the_weight_gradient_gets_operands_in_float8() -> None:
    """W holds a byte for each number of an operand, and nothing that the forward has not rounded."""
    params = {"a": jax.ShapeDtypeStruct((64, 32), jnp.float32), "b": jax.ShapeDtypeStruct((32, 64), jnp.float32)}
    x = jax.ShapeDtypeStruct((4, 16, 64), jnp.bfloat16)

    def fn(params: Any, x: jax.Array) -> jax.Array:
        return joint_products(jnp.tanh(joint_products(x, [params["a"]])[0]), [params["b"]])[0]

    split = split_backward(fn, params, x)
    large = [spec for spec in split.weight_residual_specs if spec.shape]
    assert sorted(str(spec.dtype) for spec in large) == ["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "float8_e5m2"]
    kept = [spec for spec in split.residual_specs if spec.shape]
    assert sum(spec.dtype.itemsize == 1 for spec in kept) == 2
    assert split.report.derived_bytes < 2 * 64 * 32 + 32, "matrices are rounded once an update, beside their scales"


def test_products_are_excluded_by_name() -> None:
    def of(*exclude: str, **more: Any) -> list[tuple[str, ...]]:
        config = LanguageModelConfig(**SIZES, fp8=Float8Config(exclude=exclude), **more)
        return [*(config.float8_products(layer) for layer in range(2)), ("head",) * config.has_float8_head]

    attention = tuple(f"attention.{name}" for name in ("query", "key", "value", "output"))
    assert of() == [(*attention, "mlp.gate", "mlp.up", "mlp.down")] * 2 + [("head",)]
    assert of("head", "layers.0", "*.down", "layers.*.attention") == [(), ("mlp.gate", "mlp.up"), ()]
    experts = ExpertsConfig(num_experts=2, experts_per_token=1, every=2, shared_mlp_dim=8)
    assert of("layers.0", experts=experts)[1][4:] == ("mlp.shared.gate", "mlp.shared.up", "mlp.shared.down")


@pytest.mark.parametrize(
    ("exclude", "told"),
    [
        (("layers.7",), "no product matches 'layers.7', which fp8.exclude names: the nearest is 'layers.1'"),
        (("head", "layers"), "leaves no product in float8: exclude fewer, or leave fp8 out"),
    ],
)
def test_patterns_without_a_product_and_without_the_rest_are_refused(exclude: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LanguageModelConfig(**SIZES, fp8=Float8Config(exclude=exclude))


def test_devices_without_float8_are_refused_by_name() -> None:
    for name in ("h100", "h200", "b200"):
        check_float8(Target.like(DEVICES[name]))
    check_float8(Target(platform="cpu", kind="cpu"))
    (chunk,) = language_model(LanguageModelConfig(**SIZES, fp8=Float8Config())).split(1)
    params = jax.eval_shape(chunk.init, jax.random.key(0))
    leaves = {name: jax.ShapeDtypeStruct((1, 8), jnp.int32) for name in chunk.leaves}
    for name in ("a100", "tpu-v5p"):
        target = Target.like(DEVICES[name])
        with (
            tracing_for(target),
            pytest.raises(ValueError, match=f"{target.kind} has no matrix products in float8: leave model.fp8 out"),
        ):
            jax.eval_shape(lambda p, leaves: chunk.apply(p, None, leaves, key=None), params, leaves)
