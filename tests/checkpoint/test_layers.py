"""Optimizer state goes by layer, whatever the optimizer and the cut."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.checkpoint import ChunkLayers
from tests.checkpoint.states import LAYERS, bits, chunk_of, cut_at, pieces_of, trained


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def not_embedding(params: Any) -> Any:
    return {layer: jax.tree.map(lambda _, name=layer: name != "embedding", tree) for layer, tree in params.items()}


def by_layer(params: Any) -> Any:
    """Labels that are names of layers, too."""
    return {
        layer: jax.tree.map(lambda leaf, name=layer: name if name in ("embedding", "head") else "rest", tree)
        for layer, tree in params.items()
    }


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "schedule": optax.adamw(optax.cosine_decay_schedule(1e-3, 100), mask=is_matrix),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "sgd": optax.sgd(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "masked by name": optax.chain(optax.masked(optax.scale_by_adam(), not_embedding), optax.scale(-1e-3)),
    "labels": optax.multi_transform(
        {"embedding": optax.adam(1e-3), "head": optax.sgd(1e-3), "rest": optax.lion(1e-3)}, by_layer
    ),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "noise": optax.chain(optax.add_noise(1.0, 0.9, key=jax.random.key(1)), optax.scale_by_adam()),
    "several steps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2).gradient_transformation(),
}
CUTS = st.sets(st.integers(1, len(LAYERS) - 1), max_size=5).map(sorted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=3)
@given(first=CUTS, second=CUTS)
def test_a_state_in_one_cut_is_that_of_every_other_cut(name: str, first: list[int], second: list[int]) -> None:
    one = trained(pieces_of(cut_at(*first), OPTIMIZERS[name]))
    leaves = {key: leaf for layers, state in one for key, leaf in layers.split(state).items()}
    others = pieces_of(cut_at(*second), OPTIMIZERS[name])
    joined = [(layers, layers.join(leaves, target)) for layers, target in others]
    assert bits(joined) == bits(one)
    for (_, state), (_, target) in zip(joined, others, strict=True):
        assert jax.tree.structure(state.optimizer_state) == jax.tree.structure(target.optimizer_state)


@pytest.mark.parametrize("name", ["adamw", "schedule", "lion", "adafactor", "momentum", "hyperparameters"])
def test_layers_are_those_that_optax_finds(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    ((layers, state),) = pieces_of([LAYERS], optimizer)
    labels = {layer: jax.tree.map(lambda _, own=layer: own, tree) for layer, tree in state.params.items()}
    (whole,) = state.optimizer_state
    found = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, label: "masked" if _is_masked(leaf) else label,
        whole,
        labels,
        transform_non_params=lambda _: "common",
        is_leaf=_is_masked,
    )
    numbered = jax.tree.unflatten(jax.tree.structure(whole), range(len(jax.tree.leaves(whole))))
    owners: dict[int, list[str]] = {}
    state.optimizer_state = (numbered,)
    for key, number in layers.split(state).items():
        if key[1] == "optimizer":
            owners.setdefault(number, []).append(key[0])
    ours = ["common" if len(owners[n]) > 1 else owners[n][0] for n in sorted(owners)]
    assert ours == [label for label in jax.tree.leaves(found) if label != "masked"]


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def test_shared_layers_are_parts_of_their_own() -> None:
    optimizer, shared = optax.adamw(1e-3), frozenset(["embedding"])
    cut = [("embedding", "layers.0"), ("layers.1", "head", "embedding")]
    pieces = trained(pieces_of(cut, optimizer, shared=shared))
    assert all(len(state.optimizer_state) == 2 for _, state in pieces)
    leaves = pieces[0][0].split(pieces[0][1])
    copies = pieces[1][0].split(pieces[1][1])
    both = leaves.keys() & copies.keys()
    assert {name[0] for name in both} == {"embedding"}
    whole = pieces_of([("embedding", "layers.0", "layers.1", "head")], optimizer)
    joined = [(layers, layers.join(copies | leaves, target)) for layers, target in whole]
    assert bits(joined) == bits(pieces)


def test_a_chunk_without_gradient_has_parameters_only() -> None:
    layers = ChunkLayers(chunk_of(["layers.0"]), optax.adamw(1e-3), trains=False)
    ((_, state),) = pieces_of([["layers.0"]], optax.adamw(1e-3))
    state.optimizer_state = ()
    assert {name[1] for name in layers.split(state)} == {"params"}


def test_layers_that_were_updated_a_different_number_of_times_do_not_belong_together() -> None:
    pieces = pieces_of([["layers.0", "layers.2"]], optax.adamw(1e-3))
    ((layers, state),) = pieces
    leaves = layers.split(trained(pieces)[0][1]) | {("layers.2", "optimizer", "0", "count"): jnp.array(7)}
    with pytest.raises(ValueError, match=r"layers.0/optimizer/0/count and layers.2/optimizer/0/count differ"):
        layers.join(leaves, state)


def test_an_optimizer_that_packs_layers_into_one_array_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps optimizer state by layer"):
        ChunkLayers(chunk_of(["layers.0", "layers.2"]), optax.flatten(optax.adam(1e-3)))


def test_an_optimizer_that_numbers_arrays_is_refused() -> None:
    def init(params: Any) -> Any:
        return {"moments": [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]}

    numbering = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    with pytest.raises(ValueError, match="keeps optimizer state by layer"):
        ChunkLayers(chunk_of(["layers.0", "head"]), numbering)
