"""Leaves of ``params`` that are no parameters are refused by name, before anything is trained."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.schedules import linear

WIDTH = 4
BATCH = {"x": np.ones((2, 3, WIDTH), np.float32)}


class Normalised(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(key))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.dense(x))


class Dropped(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(key))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.dense(x))


def step(make: Any, use: Any, **fields: Any) -> float:
    """The loss of a step of two chunks. The first has ``more`` besides a weight, which ``make(key)`` makes.

    ``use(more, value)`` returns the first chunk's output.
    """

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return use(params["more"], leaves["x"] @ params["w"])

    def loss(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.sum((inputs * params["scale"] - 1.0) ** 2), jnp.float32(1)

    chunks = [
        Chunk(
            name="first",
            init=lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH)), "more": make(key)},
            apply=apply,
            leaves=("x",),
            **fields,
        ),
        Chunk(name="second", init=lambda key: {"scale": jnp.ones(WIDTH)}, apply=loss),
    ]
    with Pipeline(chunks, placement=linear(2), optimizer=optax.adamw(0.1, weight_decay=0.1)) as pipeline:
        state = pipeline.init(jax.random.key(0))
        before = jax.tree.map(np.array, pipeline.params(state)["more"])
        state, metrics = pipeline.step(state, BATCH)
        if fields.get("frozen"):
            jax.tree.map(np.testing.assert_array_equal, before, pipeline.params(state)["more"])
        return float(metrics.result().loss)


def scanned(more: Any, value: Any) -> Any:
    """A loop over stacked layers, each of which has a scale, and statistics that it only writes."""
    return jax.lax.scan(lambda x, layer: (x * layer["scale"], x.mean() + layer["mean"]), value, more)[0]


NO_PARAMETERS = {
    "an integer": (lambda key: {"count": jnp.int32(0)}, r"\['more'\]\['count'\] of type int32, which has no gradient"),
    "a truth value": (lambda key: jnp.zeros(3, bool), r"\['more'\] of type bool, which has no gradient"),
    "a key": (lambda key: {"key": key}, r"\['more'\]\['key'\] of type key<fry>, which has no gradient"),
    "a text": (lambda key: {"activation": "relu"}, r"chunk 'first' cannot be initialised: .*\['activation'\]"),
    "float8": (lambda key: jnp.ones(3, jnp.float8_e4m3fn), r"\['more'\] of type float8_e4m3fn, in which updates would"),
}


@pytest.mark.parametrize(("make", "message"), NO_PARAMETERS.values(), ids=NO_PARAMETERS)
def test_leaves_that_cannot_be_parameters_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(make, lambda more, value: value)


def test_variables_of_flax_that_are_no_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"\['more'\]\.norm\.mean, an nnx BatchStat, .* LayerNorm or GroupNorm"):
        step(Normalised, lambda module, value: module(value))
    with pytest.raises(ValueError, match=r"\['more'\]\.dropout\.rngs\.count, an nnx RngCount, .* \(uses_key=True\)"):
        step(Dropped, lambda module, value: module(value))


NO_GRADIENT = {
    "unused": (lambda key: {"left": jnp.ones(3)}, lambda more, value: value, "left"),
    "behind stop_gradient": (
        lambda key: {"held": jnp.ones(WIDTH), "used": jnp.ones(WIDTH)},
        lambda more, value: value * jax.lax.stop_gradient(more["held"]) * more["used"],
        "held",
    ),
    "statistics of a loop": (lambda key: {"scale": jnp.ones((3, 1)), "mean": jnp.zeros(3)}, scanned, "mean"),
    "rematerialised": (
        lambda key: {"scale": jnp.ones((3, 1)), "mean": jnp.zeros(3)},
        jax.checkpoint(scanned),
        "mean",
    ),
    "of a module as a dictionary": (
        lambda key: nnx.to_pure_dict(nnx.state(Normalised(key))),
        lambda more, value: (value @ more["dense"]["kernel"] + more["dense"]["bias"]) * more["norm"]["scale"],
        r"norm'\]\['bias'\], \['more'\]\['norm'\]\['mean'\], \['more'\]\['norm'\]\['var",
    ),
}


@pytest.mark.parametrize(("make", "use", "leaf"), NO_GRADIENT.values(), ids=NO_GRADIENT)
def test_parameters_that_no_gradient_reaches_are_refused_by_name(make: Any, use: Any, leaf: str) -> None:
    message = rf"chunk 0 \(first\) has parameters that no gradient reaches, .*: \['more'\]\['{leaf}'\]; .*frozen="
    with pytest.raises(ValueError, match=message):
        step(make, use)


def test_such_leaves_may_be_frozen() -> None:
    assert step(lambda key: {"left": jnp.ones(3)}, lambda more, value: value, frozen={"more"}) > 0

    def normalised(module: Any, value: Any) -> Any:
        return (value - module.mean[...]) / jnp.sqrt(module.var[...] + 1e-5)

    assert step(lambda key: nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(key)), normalised, frozen={"more"}) > 0


def test_complex_parameters_train_as_in_a_plain_loop_and_are_clipped_by_their_norm() -> None:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        turned = leaves["x"] * params["turn"]
        return jnp.sum(jnp.abs(turned - 1.0) ** 2), jnp.float32(2)

    turn = jnp.array([3 + 4j, 1 - 2j, -1j, 2], jnp.complex64)
    chunk = Chunk(name="turn", init=lambda key: {"turn": turn}, apply=apply, leaves=("x",))
    optimizer = optax.sgd(0.1)

    def mean(params: Any) -> Any:
        sums = [apply(params, None, {"x": BATCH["x"][m]}, key=None) for m in range(2)]
        return sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)

    plain = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    params, state = {"turn": turn}, plain.init({"turn": turn})
    with Pipeline([chunk], placement=linear(1), optimizer=optimizer, updates=UpdateRules(clip_norm=0.5)) as pipeline:
        trained = pipeline.init(jax.random.key(0))
        for _ in range(3):
            grads = jax.grad(mean)(params)
            trained, metrics = pipeline.step(trained, BATCH)
            assert metrics.result().grad_norm == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)
            updates, state = plain.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(pipeline.params(trained)["turn"], params["turn"], rtol=1e-6)


@pytest.mark.parametrize(
    ("weight", "fault"), [(0.0, "nothing to predict"), (-1.0, "the negative weight -1"), (np.nan, "not finite")]
)
def test_a_step_of_weights_that_mean_nothing_changes_nothing_and_says_why(weight: float, fault: str) -> None:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.sum(params["w"] ** 2) * leaves["weight"], leaves["weight"]

    chunk = Chunk(name="only", init=lambda key: {"w": jnp.ones(3)}, apply=apply, leaves=("weight",))
    rules = UpdateRules(clip_norm=0.1)
    with Pipeline([chunk], placement=linear(1), optimizer=optax.adamw(0.1), updates=rules) as pipeline:
        state = pipeline.init(jax.random.key(0))
        state, metrics = pipeline.step(state, {"weight": np.full(2, weight, np.float32)})
        result = metrics.result()
        assert result.skipped
        assert fault in result.fault
        np.testing.assert_array_equal(pipeline.params(state)["w"], np.ones(3))
        state, metrics = pipeline.step(state, {"weight": np.ones(2, np.float32)})
        assert (metrics.result().skipped, metrics.result().fault) == (False, None)
