"""The optimizers by name beside those of optax, groups of parameters, and which parameters decay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from rrfp_jax.checkpoint import ChunkLayers
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.optimizers import check_leafwise
from rrfp_jax.training.optimizer import check_groups, learning_rate_schedule, make_optimizer
from rrfp_jax.training.run_config import OPTIMIZERS, OptimizerConfig, ParameterGroup

SHAPES = {
    "embedding": {"table": (8, 4)},
    "layers.0": {"attention": {"query": {"kernel": (4, 6)}}, "norm": {"scale": (4,)}},
    "layers.1": {"mlp": {"experts": {"up": (3, 4, 5)}, "router": (4, 3)}, "norm": {"scale": (4,)}},
}


def drawn(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), SHAPES, is_leaf=is_shape)


def trained(optimizer: optax.GradientTransformation, num_steps: int = 3) -> Any:
    params = drawn(0)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for step in range(num_steps):
        updates, state = update(drawn(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


def ours(**fields: Any) -> optax.GradientTransformation:
    given = {name: fields.pop(name) for name in ("name", "groups") if name in fields}
    config = OptimizerConfig(learning_rate=0.1, arguments=fields, **given)
    return make_optimizer(config, learning_rate_schedule(config, 10))


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)


RATE = learning_rate_schedule(OptimizerConfig(learning_rate=0.1), 10)


def of_optax(params: Any) -> Any:
    """Muon's dimensions: all matrices but the embedding."""
    return jax.tree.map_with_path(
        lambda path, leaf: (
            contrib.MuonDimensionNumbers(-2, -1) if leaf.ndim > 1 and path[0].key != "embedding" else None
        ),
        params,
    )


THE_SAME = {
    "adamw": ({"weight_decay": 0.2}, optax.adamw(RATE, b2=0.95, weight_decay=0.2, mask=matrices)),
    "adamw nesterov": (
        {"nesterov": True, "b1": 0.99, "weight_decay": 0.2},
        optax.nadamw(RATE, b1=0.99, b2=0.95, weight_decay=0.2, mask=matrices),
    ),
    "lion": ({"weight_decay": 0.2}, optax.lion(RATE, weight_decay=0.2, mask=matrices)),
    "sgd": ({}, optax.sgd(RATE)),
    "sgd nesterov": ({"momentum": 0.9, "nesterov": True}, optax.sgd(RATE, momentum=0.9, nesterov=True)),
    "adafactor": ({"min_dim_size_to_factor": 4}, optax.adafactor(RATE, min_dim_size_to_factor=4)),
    "adafactor plain": (
        {"clipping_threshold": 0.0, "multiply_by_parameter_scale": False},
        optax.adafactor(RATE, clipping_threshold=None, multiply_by_parameter_scale=False),
    ),
    "muon": (
        {"nesterov": False, "weight_decay": 0.0},
        contrib.muon(RATE, nesterov=False, adam_b2=0.95, muon_weight_dimension_numbers=of_optax, consistent_rms=0.2),
    ),
    "muon by width": (
        {"nesterov": False, "weight_decay": 0.0, "consistent_rms": 0.0, "newton_schulz_steps": 3},
        contrib.muon(RATE, ns_steps=3, nesterov=False, adam_b2=0.95, muon_weight_dimension_numbers=of_optax),
    ),
}


@pytest.mark.parametrize("case", THE_SAME)
def test_an_optimizer_by_name_is_that_of_optax(case: str) -> None:
    fields, theirs = THE_SAME[case]
    assert_close(trained(ours(name=case.partition(" ")[0], **fields)), trained(theirs))


def test_the_state_of_adamw_has_the_names_and_bits_that_earlier_checkpoints_have() -> None:
    params, mine = drawn(0), ours()
    theirs = optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=matrices)
    paths = [[path for path, _ in jax.tree.leaves_with_path(each.init(params))] for each in (mine, theirs)]
    assert paths[0] == paths[1]
    jax.tree.map(np.testing.assert_array_equal, trained(mine), trained(theirs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_acts_leaf_by_leaf_and_its_state_goes_by_layer(name: str) -> None:
    params = jax.eval_shape(lambda: drawn(0))
    optimizer = ours(name=name, groups=(ParameterGroup(match=("layers.*.norm",), learning_rate_scale=0.5),))
    check_leafwise(optimizer, params)
    ChunkLayers(Chunk(name="all", init=lambda key: drawn(0), apply=lambda *_, **__: None), optimizer)


def test_experts_are_orthogonalised_each_by_itself() -> None:
    """The singular values of an update are near 1, those of a stack are each matrix's own."""
    optimizer, params = ours(name="muon", weight_decay=0.0, consistent_rms=0.0), drawn(0)
    updates, _ = jax.jit(optimizer.update)(drawn(1), jax.jit(optimizer.init)(params), params)
    stack = -np.asarray(updates["layers.1"]["mlp"]["experts"]["up"]) / 0.1 / np.sqrt(5 / 4)
    values = np.linalg.svd(stack, compute_uv=False)
    assert values.shape == (3, 4)
    assert (values > 0.6).all()
    assert (values < 1.3).all()


def test_matrices_decay_and_vectors_do_not() -> None:
    config = OptimizerConfig(learning_rate=0.1, arguments={"weight_decay": 0.5})
    params = {"layer": {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(2)}}
    optimizer = make_optimizer(config, learning_rate_schedule(config, 10))
    update = jax.jit(optimizer.update)
    updates, _ = update(jax.tree.map(jnp.zeros_like, params), jax.jit(optimizer.init)(params), params)
    assert updates["layer"]["matrix"] == pytest.approx(-0.05 * jnp.ones((2, 2)))
    assert not updates["layer"]["scale"].any()


GROUPS = (
    ParameterGroup(match=("layers.*.attention.*",), learning_rate_scale=0.1, weight_decay=0.0),
    ParameterGroup(match=("layers", "embedding.table"), learning_rate_scale=3.0),
)


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in [*OPTIMIZERS][1:])])
def test_the_first_group_that_matches_says_rate_and_decay(name: str) -> None:
    """As if each parameter had an optimizer of its own."""
    found = trained(ours(name=name, weight_decay=0.3, groups=GROUPS))
    for scale, decay, layer, keys in (
        (0.1, 0.0, "layers.0", ("attention", "query", "kernel")),
        (3.0, 0.3, "layers.0", ("norm", "scale")),
        (3.0, 0.3, "layers.1", ("mlp", "experts", "up")),
        (3.0, 0.3, "embedding", ("table",)),
    ):
        config = OptimizerConfig(name=name, learning_rate=0.1 * scale, arguments={"weight_decay": decay})
        alone = trained(make_optimizer(config, learning_rate_schedule(config, 10)))
        for each in (found, alone):
            each["leaf"] = each[layer]
            for key in keys:
                each["leaf"] = each["leaf"][key]
        assert_close(found["leaf"], alone["leaf"])


@pytest.mark.parametrize(
    ("match", "words"),
    [
        (
            ("layers.7",),
            r"optimizer.groups\[2\] \(layers.7\) matches no parameter that is trained: paths are such as la",
        ),
        (
            ("embedding",),
            r"all that optimizer.groups\[2\] \(embedding\) matches is in groups before it: move it up, or",
        ),
    ],
)
def test_groups_that_no_parameter_is_in_are_refused(match: tuple[str, ...], words: str) -> None:
    groups = (*GROUPS, ParameterGroup(match=match, weight_decay=0.0))
    check_groups(OptimizerConfig(learning_rate=0.1, groups=GROUPS), drawn(0))
    with pytest.raises(ValueError, match=words):
        check_groups(OptimizerConfig(learning_rate=0.1, groups=groups), drawn(0))


def test_every_pattern_must_match_a_parameter() -> None:
    fields: list[tuple[dict[str, Any], str]] = [
        (
            {"groups": (ParameterGroup(match=("embedding", "heads"), weight_decay=0.0),)},
            r"groups\[0\].match has 'heads'",
        ),
        (
            {"name": "muon", "arguments": {"adam_parameters": ("*experts.up", "*experts.upp")}},
            "arguments.adam_parameters has .*experts.upp'",
        ),
    ]
    for each, words in fields:
        with pytest.raises(ValueError, match=f"optimizer.{words}, which matches no parameter that is trained"):
            check_groups(OptimizerConfig(learning_rate=0.1, **each), drawn(0))
    check_groups(OptimizerConfig(learning_rate=0.1, name="muon"), drawn(0))
