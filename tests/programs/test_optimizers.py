"""Which optimizers act leaf by leaf, and which are refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from rrfp_jax.programs.optimizers import _Values, check_leafwise
from rrfp_jax.programs.update_functions import averaged

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
    "average beside it": averaged(optax.adam(0.1), 0.9),
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


GROUPS = [("embedding",), ("head",), ("layers.0",)]


@pytest.mark.parametrize("optimizer", LEAFWISE.values(), ids=LEAFWISE)
def test_leafwise_optimizers_pass(optimizer: optax.GradientTransformation) -> None:
    check_leafwise(optimizer, PARAMS, GROUPS)


def scaled(factor_of: Any) -> optax.GradientTransformation:
    """Updates times a number by place: ``factor_of(index, num_leaves)``."""

    def update(updates: Any, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        return structure.unflatten([leaf * factor_of(i, len(leaves)) for i, leaf in enumerate(leaves)])

    return optax.stateless(update)


def noisy(key_of: Any) -> optax.GradientTransformation:
    """Updates plus noise, from a key of the state that moves on; ``key_of(key, index, num_leaves)``."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        keys = [key_of(state["key"], index, len(leaves)) for index in range(len(leaves))]
        noise = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.map(jnp.add, updates, structure.unflatten(noise)), {"key": jax.random.fold_in(state["key"], 1)}

    return optax.GradientTransformation(lambda params: {"key": jax.random.PRNGKey(0)}, update)


def labels_by_place(params: Any) -> Any:
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(["first" if index == 0 else "rest" for index in range(len(leaves))])


def scale_that_counts(params: Any) -> Any:
    return {"scale": jnp.float32(len(jax.tree.leaves(params)))}


def in_a_loop(by_place: bool) -> optax.GradientTransformation:
    """One loop over the whole tree, whose steps halve every array, or the first one only."""

    def update(updates: Any, params: Any) -> Any:
        def halve(_: Any, leaves: list[Any]) -> list[Any]:
            return [leaf * (1.0 if by_place and index else 0.5) for index, leaf in enumerate(leaves)]

        leaves, structure = jax.tree.flatten(updates)
        return structure.unflatten(jax.lax.fori_loop(0, 3, halve, leaves))

    return optax.stateless(update)


def in_a_conditional(by_place: bool) -> optax.GradientTransformation:
    """Every third update is left out, by a conditional over the whole tree."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        factor = len(jax.tree.leaves(updates)) if by_place else 3.0
        kept = jax.lax.cond(
            state["count"] % 3 == 2,
            lambda: jax.tree.map(jnp.zeros_like, updates),
            lambda: jax.tree.map(lambda leaf: leaf * factor, updates),
        )
        return kept, {"count": state["count"] + 1}

    return optax.GradientTransformation(lambda params: {"count": jnp.zeros((), jnp.int32)}, update)


BY_PLACE = {
    "layer-wise decay of the learning rate": scaled(lambda index, number: 0.5 ** (number - index)),
    "rate by place from the front": scaled(lambda index, number: 0.5**index),
    "division by the number of arrays": scaled(lambda index, number: 1 / number),
    "labels by place": optax.partition({"first": optax.sgd(0.1), "rest": optax.adam(0.1)}, labels_by_place),
    "noise by place": noisy(lambda key, index, number: jax.random.fold_in(key, index)),
    "noise of split keys": noisy(lambda key, index, number: jax.random.split(key, number)[index]),
    "a number of arrays in the state": optax.GradientTransformation(
        scale_that_counts,
        lambda grads, state, params=None: (jax.tree.map(lambda g: g / state["scale"], grads), state),
    ),
    "a loop over the tree": in_a_loop(by_place=True),
    "a conditional over the tree": in_a_conditional(by_place=True),
    "inside optax's own": optax.MultiSteps(
        optax.chain(optax.adam(0.1), scaled(lambda index, number: 1 / number)), 2
    ).gradient_transformation(),
}


@pytest.mark.parametrize("optimizer", BY_PLACE.values(), ids=BY_PLACE)
def test_optimizers_that_go_by_the_tree_are_refused(optimizer: optax.GradientTransformation) -> None:
    check_leafwise(optimizer, PARAMS)
    with pytest.raises(ValueError, match=r"the optimizer updates \['.*'\]\['.*'\] otherwise .*not on its place"):
        check_leafwise(optimizer, PARAMS, GROUPS)


def test_optimizers_that_go_by_names_and_whole_trees_alike_pass() -> None:
    def decayed(path: Any, update: Any) -> Any:
        return update * (0.5 if "layers" in jax.tree_util.keystr(path) else 2.0)

    by_name = optax.stateless(lambda updates, params: jax.tree.map_with_path(decayed, updates))
    jitted = optax.adamw(0.1)
    jitted = optax.GradientTransformation(jitted.init, jax.jit(jitted.update))
    same_noise = noisy(lambda key, index, number: key)
    for optimizer in (by_name, jitted, same_noise, in_a_loop(by_place=False), in_a_conditional(by_place=False)):
        check_leafwise(optimizer, PARAMS, GROUPS)


def test_masks_and_labels_that_are_trees_are_refused_with_a_remedy() -> None:
    mask = {"embedding": True, "head": False, "layers.0": True}
    with pytest.raises(ValueError, match=r"not the layers embedding alone.* as functions of the parameters"):
        check_leafwise(optax.adamw(0.1, mask=mask), PARAMS, GROUPS)


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
    values = _Values(max(map(int.bit_length, labels), default=0))
    inputs = [values.symbol(("input", index), label) for index, label in enumerate(labels)]
    outputs = values.outputs(jax.make_jaxpr(function)(*[jnp.ones(3)] * len(labels)).jaxpr, inputs)
    return [values.labels[output] for output in outputs]


VALUES = _Values(0)


def number(function: Any, *inputs: str) -> list[int]:
    """The numbers of what a function returns for inputs of these names."""
    numbered = [VALUES.symbol(name, 0) for name in inputs]
    return VALUES.outputs(jax.make_jaxpr(function)(*[jnp.ones(3)] * len(inputs)), numbered)


def test_numbers_of_loops_speak_of_what_a_result_depends_on() -> None:
    def both(a: Any, b: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, s: (s[0] * 2, s[1] * 3), (a, b))

    def steps(a: Any, b: Any) -> Any:
        return jax.lax.scan(lambda c, x: ((c[0] + x, c[1] * x), c[0] - x), (a.sum(), a.sum()), b)

    def one_step(a: Any, b: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c + x, c - x), a.sum(), b)

    double, treble = number(both, "a", "b")
    assert double != treble
    assert number(lambda a: jax.lax.fori_loop(0, 3, lambda i, s: s * 2, a), "a") == [double]
    assert number(lambda b: jax.lax.fori_loop(0, 3, lambda i, s: s * 3, b), "b") == [treble]
    assert number(lambda a: jax.lax.fori_loop(0, 4, lambda i, s: s * 2, a), "a") != [double]
    (first, _), stacked = jax.tree.unflatten(jax.tree.structure(((0, 0), 0)), number(steps, "a", "b"))
    assert number(one_step, "a", "b") == [first, stacked]


def test_nested_loops_over_one_array_keep_their_places_apart() -> None:
    def products(a: Any, other: bool) -> Any:
        def outer(total: Any, x: Any) -> Any:
            return jax.lax.scan(lambda c, y: (c + x * (y if other else x), None), total, a)[0], None

        return jax.lax.scan(outer, 0.0, a)[0]

    assert number(lambda a: products(a, True), "a") != number(lambda a: products(a, False), "a")


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
