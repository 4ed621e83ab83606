"""Experts: routing against a loop over tokens, what a capacity drops, what routers add to the loss, how all is cut."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models import experts as ways
from rrfp_jax.models.experts import Routes, choose_experts, load_errors, router_loss
from rrfp_jax.programs.chunk import Loss, param_specs
from rrfp_jax.programs.shardings import param_partition, passing, place
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.testing.comparing import run_unpipelined

EXPERTS = ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=12, balance_coefficient=0.1, z_coefficient=0.01)
CONFIG = LanguageModelConfig(
    vocab_size=12, hidden=8, num_layers=2, num_heads=2, mlp_dim=16, init_std=0.3, experts=EXPERTS
)
BATCH, LENGTH, HIDDEN, INNER = 4, 10, 8, 12


by_all, by_runs, by_blocks = jax.jit(ways.by_all), jax.jit(ways.by_runs), jax.jit(ways.by_blocks)
by_places = jax.jit(ways.by_places, static_argnames="capacity")


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def matrices() -> tuple[np.ndarray, ...]:
    shapes = [(4, HIDDEN, INNER), (4, HIDDEN, INNER), (4, INNER, HIDDEN)]
    return tuple(normal(*shape, seed=seed) for seed, shape in enumerate(shapes))


def routed(config: ExpertsConfig = EXPERTS) -> tuple[np.ndarray, Routes]:
    logits = normal(BATCH, LENGTH, config.num_experts, seed=6)
    return normal(BATCH, LENGTH, HIDDEN, seed=5), choose_experts(config, logits)


def token_by_token(config: ExpertsConfig, x: np.ndarray, logits: np.ndarray, room: int = LENGTH) -> np.ndarray:
    """In float64; an expert takes the first ``room`` tokens of a row that choose it."""
    gate, up, down = (each.astype(np.float64) for each in matrices())
    y = np.zeros(x.shape)
    for row in range(len(x)):
        left = [room] * config.num_experts
        for at, (token, scores) in enumerate(zip(x[row].astype(np.float64), np.exp(logits[row]), strict=True)):
            chosen = np.argsort(-scores)[: config.experts_per_token]
            whole = scores[chosen].sum() if config.renormalise else scores.sum()
            for expert in chosen:
                if left[expert]:
                    left[expert] -= 1
                    product = token @ gate[expert]
                    inner = product / (1 + np.exp(-product)) * (token @ up[expert])
                    y[row, at] += scores[expert] / whole * (inner @ down[expert])
    return y


@pytest.mark.parametrize("compute", [by_all, by_runs, by_blocks])
@pytest.mark.parametrize("renormalise", [True, False])
def test_without_a_capacity_experts_equal_a_loop_over_tokens(compute: Any, renormalise: bool) -> None:
    config = replace(EXPERTS, renormalise=renormalise)
    x, routes = routed(config)
    expected = token_by_token(config, x, normal(BATCH, LENGTH, 4, seed=6))
    np.testing.assert_allclose(compute(x, routes, *matrices()), expected, rtol=1e-4, atol=1e-4)


def chosen_by_groups(config: ExpertsConfig, logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The experts of one token, as DeepSeek-V3 chooses them, in float64."""
    choice = 1 / (1 + np.exp(-logits)) + bias
    groups = choice.reshape(config.num_groups, -1)
    best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1), kind="stable")[: config.groups_per_token]
    is_open = np.repeat(np.isin(np.arange(config.num_groups), best), groups.shape[1])
    return np.argsort(-np.where(is_open, choice, -np.inf), kind="stable")[: config.experts_per_token]


@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_scores_are_chosen_in_groups_with_a_bias(renormalise: bool) -> None:
    config = ExpertsConfig(
        num_experts=12, experts_per_token=3, scores="sigmoid", num_groups=4, groups_per_token=2, scale=2.5,
        renormalise=renormalise, bias_rate=0.1,
    )  # fmt: skip
    logits, bias = normal(BATCH, LENGTH, 12, seed=1), 0.5 * normal(12, seed=2)
    routes = choose_experts(config, logits, bias)
    for at in np.ndindex(BATCH, LENGTH):
        chosen = chosen_by_groups(config, logits[at].astype(np.float64), bias)
        assert set(np.asarray(routes.experts[at])) == set(chosen)
        scores = 1 / (1 + np.exp(-logits[at].astype(np.float64)))
        expected = np.zeros(12)
        expected[chosen] = 2.5 * scores[chosen] / (scores[chosen].sum() if renormalise else 1)
        np.testing.assert_allclose(routes.weights[at], expected, rtol=1e-5)
    counts = np.arange(LENGTH) < np.arange(3, 3 + BATCH)[:, None]
    loads = np.bincount(np.asarray(routes.experts)[counts].reshape(-1), minlength=12)
    np.testing.assert_array_equal(load_errors(routes, counts), 12 * loads - loads.sum())


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.0])
def test_a_capacity_drops_what_comes_later_in_a_row_and_nothing_else(factor: float) -> None:
    x, routes = routed()
    room = replace(EXPERTS, capacity_factor=factor).capacity(LENGTH)
    assert room == {0.4: 2, 1.0: 5, 2.0: 10}[factor]
    y = by_places(x, routes, *matrices(), capacity=room)
    expected = token_by_token(EXPERTS, x, normal(BATCH, LENGTH, 4, seed=6), room)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    is_same = np.isclose(y, by_all(x, routes, *matrices()), rtol=1e-4, atol=1e-4).all()
    assert is_same == (factor == 2.0)


def test_padding_takes_no_place_from_tokens() -> None:
    x, routes = routed()
    is_token = np.arange(LENGTH) >= 4
    padded = by_places(x, routes, *matrices(), capacity=3, is_token=np.tile(is_token, (BATCH, 1)))
    behind = Routes(*(each[:, 4:] for each in routes))
    np.testing.assert_allclose(
        padded[:, 4:], by_places(x[:, 4:], behind, *matrices(), capacity=3), rtol=1e-5, atol=1e-5
    )


def test_all_ways_have_the_same_gradients() -> None:
    x, _ = routed()
    logits = normal(BATCH, LENGTH, 4, seed=6)

    def total(compute: Any, **rest: Any) -> Any:
        gradients = jax.grad(
            lambda x, logits, *parts: jnp.sin(compute(x, choose_experts(EXPERTS, logits), *parts, **rest)).sum(),
            argnums=tuple(range(5)),
        )
        return jax.jit(gradients)(x, logits, *matrices())

    biases = [0.5 * normal(4, size, seed=7) for size in (*(each.shape[-1] for each in matrices()),)]
    x, routes = routed()
    with_biases = [
        compute(x, routes, *matrices(), *biases, limit=0.7, **rest)
        for compute, rest in ((by_all, {}), (by_runs, {}), (by_blocks, {}), (by_places, {"capacity": LENGTH}))
    ]
    for found in with_biases[1:]:
        np.testing.assert_allclose(found, with_biases[0], rtol=1e-3, atol=1e-3)
    expected = total(by_all)
    for found in (total(by_runs), total(by_blocks), total(by_places, capacity=LENGTH)):
        for leaf, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-3)


def test_the_router_loss_is_what_was_published() -> None:
    logits, is_real = normal(2, 6, 4, seed=1).astype(np.float64), np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-logits)[..., :2]
    real = is_real.astype(bool)
    shares = np.array([(chosen[real] == expert).sum() for expert in range(4)]) / 6
    balance = 4 * (shares * scores[real].mean(0)).sum()
    z = (np.log(np.exp(logits).sum(-1))[real] ** 2).mean()
    found = loss_of(EXPERTS, jnp.float32(logits), jnp.asarray(real))
    assert float(found) == pytest.approx(0.1 * balance + 0.01 * z, rel=1e-6)
    config = replace(EXPERTS, z_coefficient=0.0)
    assert float(loss_of(config, jnp.zeros((1, 8, 4)), jnp.ones((1, 8), bool))) == pytest.approx(0.2)


def loss_of(config: ExpertsConfig, logits: Any, is_real: Any) -> Any:
    return jax.jit(lambda logits, real: router_loss(config, logits, choose_experts(config, logits), real))(
        logits, is_real
    )


def leaves_of(*, padding: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 12, (BATCH, LENGTH + 1), np.int32)
    weights = np.ones((BATCH, LENGTH), np.float32)
    weights[:, LENGTH - padding :] = 0
    tokens[:, LENGTH - padding + 1 :] = seed
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def packed(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    return leaves | {"positions": positions, "segments": (leaves["weights"] > 0).astype(np.int32)}


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_sum_beside_the_stream_reaches_the_total_and_padding_does_not_count(is_packed: bool) -> None:
    """Whatever stands in padding, the loss is that without it; and it is the dense sum and the routers' mean."""
    chunks = language_model(CONFIG).split(layers_per_chunk=[0, 1, 1], packed=is_packed)
    shapes = {name: layer for chunk in chunks for name, layer in param_specs(chunk).items()}
    params = jax.tree.map(lambda spec: 0.3 * normal(*spec.shape, seed=1), shapes)
    long = packed(leaves_of(padding=3)) if is_packed else leaves_of(padding=3)
    short = {name: leaf[:, :-3] for name, leaf in long.items()}

    def total(chunks: Any, leaves: Any) -> tuple[float, float]:
        loss = Loss(*jax.jit(lambda params, leaves: run_unpipelined(chunks, params, leaves))(params, leaves))
        named.append({name: float(value) for name, value in loss.named_sums.items()})
        return float(loss.loss_sum), float(loss.weight)

    named: list[dict[str, float]] = []
    loss, weight = total(chunks, long)
    whole = language_model(CONFIG).split(1, packed=is_packed)
    assert loss == pytest.approx(total(whole, short)[0], rel=1e-6)
    silent = replace(CONFIG, experts=replace(EXPERTS, balance_coefficient=0.0, z_coefficient=0.0))
    without, _ = total(language_model(silent).split(1, packed=is_packed), short)
    assert weight == BATCH * (LENGTH - 3)
    assert 0.2 <= (loss - without) / weight <= 0.6
    assert named == [{"router_loss": pytest.approx(loss - without, rel=1e-4)}] * 2 + [{}]


def test_only_models_with_router_losses_send_a_pair() -> None:
    shape = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)
    for config, is_pair in ((CONFIG, True), (replace(CONFIG, experts=None), False)):
        first = language_model(config).split(2)[0]
        read = dict.fromkeys(first.leaves, shape)
        outputs = jax.eval_shape(lambda p, r, f=first: f.apply(p, None, r, key=None), param_specs(first), read)
        assert isinstance(outputs, tuple) == is_pair
        assert ("weights" in first.leaves) == is_pair


def test_which_layers_are_sparse_and_what_they_hold() -> None:
    config = replace(
        CONFIG,
        num_layers=5,
        experts=replace(EXPERTS, every=2, dense_layers=[3], shared_mlp_dim=6, shared_gate=True),  # type: ignore[arg-type]
    )
    assert [config.is_sparse(layer) for layer in range(5)] == [False, True, False, False, False]
    (chunk,) = language_model(config).split(1)
    specs = param_specs(chunk)
    assert sum(leaf.size for leaf in jax.tree.leaves(specs)) == config.num_params()
    assert config.num_params() - config.num_params(active=True) == 2 * 3 * 8 * 12
    shapes = jax.tree.map(lambda leaf: leaf.shape, specs["layers.1"]["mlp"])
    assert shapes == {
        "router": (8, 4),
        "experts": {"gate": (4, 8, 12), "up": (4, 8, 12), "down": (4, 12, 8)},
        "shared": {
            "gate": {"kernel": (8, 6)},
            "up": {"kernel": (8, 6)},
            "down": {"kernel": (6, 8)},
            "weight": {"kernel": (8, 1)},
        },
    }
    assert set(specs["layers.3"]["mlp"]) == {"gate", "up", "down"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 5}, r"experts_per_token 5 is more than the 4 experts: give at most 4"),
        ({"capacity_factor": 0.0}, r"capacity_factor is 0.0: give a positive number"),
        ({"balance_coefficient": -1.0}, r"balance_coefficient is -1.0: give 0 or more"),
        ({"shared_gate": True}, r"shared_gate is given without a shared expert: give shared_mlp_dim"),
        ({"dense_layers": (2,)}, r"dense_layers names layer 2 of 2: give numbers from 0 to 1"),
        ({"every": 3}, r"none of the 2 layers has experts: give a smaller experts.every than 3"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, experts=replace(EXPERTS, **changes))


def cut_of(config: LanguageModelConfig, axes: dict[str, int]) -> Any:
    return param_partition(language_model(config).split(1), 0, axes)["layers.0"]["mlp"]


def test_experts_are_cut_over_expert_and_inside_over_tensor() -> None:
    config = replace(CONFIG, experts=replace(EXPERTS, shared_mlp_dim=6))
    cut = cut_of(config, {"tensor": 2, "expert": 2})
    assert cut["experts"]["gate"] == cut["experts"]["up"] == PartitionSpec("expert", None, "tensor")
    assert cut["experts"]["down"] == PartitionSpec("expert", "tensor", None)
    assert cut["shared"]["down"]["kernel"] == PartitionSpec("tensor", None)
    assert cut["router"] == PartitionSpec()
    assert cut_of(config, {"expert": 2, "fsdp": 2})["experts"]["gate"] == PartitionSpec("expert", "fsdp", None)


def test_experts_and_their_widths_must_divide() -> None:
    with pytest.raises(
        ValueError, match=r"experts.num_experts 4 does not divide over expert 3: give a degree of expert"
    ):
        cut_of(CONFIG, {"expert": 3})
    with pytest.raises(ValueError, match=r"experts.mlp_dim 13 does not divide over tensor 2: .* experts.mlp_dim 14$"):
        cut_of(replace(CONFIG, experts=replace(EXPERTS, mlp_dim=13)), {"tensor": 2})


def test_tokens_go_to_experts_and_back_by_all_to_all() -> None:
    """Also where the partitioner alone decides: matrices are larger than what travels here."""
    experts = replace(EXPERTS, num_experts=8, mlp_dim=64, capacity_factor=2.0)
    config = replace(CONFIG, hidden=32, num_layers=1, experts=experts)
    (chunk,) = language_model(config).split(1)
    boundary = StageDevices([jax.devices()[:4]], (("expert", 2), ("fsdp", 2))).unit_sharding(0)
    assert isinstance(boundary, NamedSharding)
    axes = dict(boundary.mesh.shape)
    leaves = {name: np.concatenate([leaf, leaf]) for name, leaf in leaves_of(padding=0).items()}
    params = jax.tree.map(lambda spec: 0.3 * normal(*spec.shape, seed=1), param_specs(chunk))

    def loss(params: Any, leaves: Any) -> Any:
        return chunk.apply(params, None, leaves, key=None)[0]

    at = (
        place(param_partition([chunk], 0, axes), boundary),
        {n: passing(boundary, leaf) for n, leaf in leaves.items()},
    )
    program = jax.jit(loss, in_shardings=at, out_shardings=boundary).lower(params, leaves).compile()
    np.testing.assert_allclose(program(*jax.device_put((params, leaves), at)), jax.jit(loss)(params, leaves), rtol=1e-5)
    assert len(re.findall(r" all-to-all(?:-start)?\(", program.as_text())) >= 2


def differentiated(compute: Any, **rest: Any) -> Any:
    """From tokens, router's logits and matrices to the sum's gradients and the result."""

    def total(x: Any, logits: Any, *parts: Any) -> Any:
        y = compute(x, choose_experts(EXPERTS, logits), *parts, **rest)
        return jnp.sin(y).sum(), y

    return jax.value_and_grad(total, argnums=tuple(range(5)), has_aux=True)


def on_mesh(function: Any, axes: dict[str, int], x: Any, logits: Any) -> tuple[Any, str]:
    """What a function returns on devices that hold their rows and experts, and its compiled text."""
    boundary = StageDevices([jax.devices()[:4]], tuple(axes.items())).unit_sharding(0)
    assert isinstance(boundary, NamedSharding)
    by_rows, held = passing(boundary, x), NamedSharding(boundary.mesh, PartitionSpec("expert"))
    at = (by_rows, by_rows, held, held, held)
    with use_abstract_mesh(boundary.mesh.abstract_mesh):
        program = jax.jit(function, in_shardings=at).lower(x, logits, *matrices()).compile()
    return program(*jax.device_put((x, logits, *matrices()), at)), program.as_text()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compute", "axes"),
    [
        (ways.by_runs, {"expert": 2, "fsdp": 2}),
        (ways.by_blocks, {"expert": 2, "fsdp": 2}),
        (ways.by_places, {"expert": 2, "fsdp": 2}),
        (ways.by_places, {"tensor": 2, "expert": 2}),
        (ways.by_places, {"expert": 2, "context": 2}),
    ],
)
def test_devices_that_share_experts_compute_what_one_does(compute: Any, axes: dict[str, int]) -> None:
    x, logits = normal(BATCH, LENGTH, HIDDEN, seed=5), normal(BATCH, LENGTH, 4, seed=6)
    rest: dict[str, Any] = {}
    if compute is ways.by_places:
        order = np.random.default_rng(0).permutation(LENGTH) if "context" in axes else None
        rest = {"capacity": 3, "is_token": np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 7 > 0, "order": order}
    function = differentiated(compute, **rest)
    found, text = on_mesh(function, axes, x, logits)
    expected = jax.jit(function)(x, logits, *matrices())
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)
    assert (" all-to-all(" in text) == (compute is ways.by_places)


def test_experts_stay_where_they_are_and_tokens_travel() -> None:
    """Even where the matrices of all experts are smaller than the tokens."""
    x, logits = normal(16, LENGTH, HIDDEN, seed=5), normal(16, LENGTH, 4, seed=6)
    _, text = on_mesh(differentiated(ways.by_places, capacity=LENGTH), {"expert": 4}, x, logits)
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 4, "there and back, for tokens and for their gradients"
    gathered = re.findall(r"= \(?f32\[([\d,]+)\]\S* all-gather", text)
    assert not {"4,8,12", "4,12,8", "16,10,8", "16,4,10,8"} & set(gathered)
