"""Which optimizers act leaf by leaf, and which are refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from rrfp_jax.programs.optimizers import check_leafwise, output_labels

PARAMS = {
    "embedding": {"table": jax.ShapeDtypeStruct((256, 128), jnp.float32)},
    "head": {"table": jax.ShapeDtypeStruct((4, 4), jnp.float32)},
    "layers.0": {
        "w": jax.ShapeDtypeStruct((128, 256), jnp.float32),
        "b": jax.ShapeDtypeStruct((128,), jnp.float32),
    },
}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_layer(params: Any) -> Any:
    return {name: "slow" if name == "head" else "fast" for name in params}


LEAFWISE = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw with mask and schedule": optax.adamw(optax.cosine_decay_schedule(1.0, 10), mask=matrices),
    "adamw after a clip per element": optax.chain(optax.clip(1.0), optax.adamw(0.1)),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=32),
    "rmsprop": optax.rmsprop(0.1, centered=True),
    "lamb": optax.lamb(0.1),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "block clip": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "partition by layer": optax.partition({"fast": optax.adam(0.1), "slow": optax.set_to_zero()}, by_layer),
    "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "accumulation over steps": optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    "average of parameters": optax.contrib.schedule_free_adamw(0.1),
    "muon": optax.contrib.muon(0.1),
}

COUPLED = {
    "global clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "global clip in a partition": optax.partition(
        {"fast": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "slow": optax.sgd(0.1)}, by_layer
    ),
    "skip if not finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "normalised update": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "prodigy": optax.contrib.prodigy(),
    "d-adaptation": optax.contrib.dadapt_adamw(),
}


@pytest.mark.parametrize("optimizer", LEAFWISE.values(), ids=LEAFWISE)
def test_leafwise_optimizers_pass(optimizer: optax.GradientTransformation) -> None:
    check_leafwise(optimizer, PARAMS)


@pytest.mark.parametrize("optimizer", COUPLED.values(), ids=COUPLED)
def test_coupling_optimizers_are_refused(optimizer: optax.GradientTransformation) -> None:
    with pytest.raises(ValueError, match=r"couples leaves: its .* depends on \[.*\] and \[.*\];.* use clip_norm="):
        check_leafwise(optimizer, PARAMS)


def test_two_leaves_are_named() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"on \['embedding'\]\['table'\] and \['head'\]\['table'\]"):
        check_leafwise(optimizer, PARAMS)


def test_coupling_that_shows_only_in_a_later_step() -> None:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        scaled = jax.tree.map(lambda g: g * state["scale"].astype(g.dtype), grads)
        return scaled, {"scale": state["seen"], "seen": jnp.abs(grads["head"]["table"]).max()}

    optimizer = optax.GradientTransformation(lambda params: {"scale": jnp.ones(()), "seen": jnp.ones(())}, update)
    with pytest.raises(ValueError, match=r"its update of \['embedding'\]\['table'\]"):
        check_leafwise(optimizer, PARAMS)


def test_optimizers_that_need_more_than_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be called as update\(gradients, state, params\)"):
        check_leafwise(optax.contrib.reduce_on_plateau(), PARAMS)


def test_state_must_keep_its_shapes_and_dtypes() -> None:
    grow = optax.GradientTransformation(
        lambda params: {"seen": jnp.zeros(1)},
        lambda grads, state, params=None: (grads, {"seen": jnp.concatenate([state["seen"], state["seen"]])}),
    )
    with pytest.raises(ValueError, match=r"its state \['seen'\] from float32\[1\] into float32\[2\]"):
        check_leafwise(grow, PARAMS)
    half = PARAMS | {"layers.0": jax.ShapeDtypeStruct((128,), jnp.bfloat16)}
    check_leafwise(LEAFWISE["adamw with mask and schedule"], half)
    with pytest.raises(ValueError, match=r"from bfloat16\[.*\] into float32\[.*\] in one update"):
        check_leafwise(LEAFWISE["injected hyperparameters"], half)


def flow(function: Any, *labels: int) -> list[int]:
    return output_labels(jax.make_jaxpr(function)(*[jnp.ones(3)] * len(labels)).jaxpr, labels)


def test_flow_through_calls_conditionals_and_loops() -> None:
    assert flow(jax.jit(lambda a, b: (a + 1, b * 2)), 1, 2) == [1, 2]
    assert flow(jax.checkpoint(lambda a, b: (jax.nn.relu(b), a)), 1, 2) == [2, 1]
    assert flow(lambda a, b, c: jax.lax.cond(a.sum() > 0, lambda: (b, c), lambda: (c, c + 1)), 1, 2, 4) == [7, 5]
    rotate = jax.lax.fori_loop
    assert flow(lambda a, b, c: rotate(0, 3, lambda i, s: (s[1], s[0], s[2]), (a, b, c)), 1, 2, 4) == [3, 3, 4]
    halve = jax.lax.while_loop
    assert flow(lambda a, b: halve(lambda s: s[0].sum() > 1, lambda s: (s[0] / 2, s[1] + 1), (a, b)), 1, 2) == [1, 3]

    def body(carry: Any, x: Any) -> Any:
        return carry + 1, x * 2

    assert flow(lambda a, b: jax.lax.scan(body, a, b), 1, 2) == [1, 2]
    assert flow(lambda a, b: jax.lax.scan(lambda c, x: (c + x, c), a.sum(), b), 1, 2) == [3, 3]
