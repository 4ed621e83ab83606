"""Adapters train what a plain loop trains with the same ones, and nothing else changes or is computed."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rrfp_jax.models import (
    AdaptersConfig,
    LanguageModelConfig,
    add_adapters,
    language_model,
    vision_language_model,
)
from rrfp_jax.models._parts import by_heads, from_heads, projection
from rrfp_jax.models.adapters import merged_params
from rrfp_jax.models.cuts import SequenceSlices
from rrfp_jax.programs.chunk import ADAPTERS, Chunk, as_evaluated, microbatch_key, param_specs, trained_specs
from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.target import Target
from rrfp_jax.schedules import Placement, chain, linear, sliced_chain
from tests.models.encoder_reference import AUDIO, PACKED, small_model
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.test_freezing import backward_flops

CONFIG = LanguageModelConfig(
    vocab_size=64, hidden=32, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=48, tie_embeddings=True
)
ADAPTED = AdaptersConfig(rank=3, alpha=6, targets=("query", "value", "mlp.down"))
OPTIMIZER = optax.adamw(0.02, b2=0.99)
NUM_STEPS, NUM_MICROBATCHES, ROWS, LENGTH = 5, 4, 4, 12


def make_batch(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, CONFIG.vocab_size, (NUM_MICROBATCHES, ROWS, LENGTH + 1)).astype(np.int32)
    weights = draw.integers(0, 2, (NUM_MICROBATCHES, ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


BATCHES = [make_batch(step) for step in range(NUM_STEPS)]


def trained(chunks: list[Any], **options: Any) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """The initial parameters, the losses and the final parameters of a pipeline."""
    options = {"placement": linear(len(chunks)), "optimizer": OPTIMIZER, "clip_norm": 1.0, "seed": 7, **options}
    with make_pipeline(chunks, **options, progress_deadline_s=60) as pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        losses = []
        for batch in BATCHES:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        return initial, losses, jax.tree.map(np.array, pipeline.params(state))


def frozen_of(chunks: list[Any]) -> set[str]:
    return set().union(*(chunk.frozen for chunk in chunks))


@pytest.mark.parametrize(
    ("dropout", "options"),
    [
        pytest.param(0.25, {"hint": "bfw", "remat": "full"}, id="split, remat full, dropout", marks=pytest.mark.slow),
        pytest.param(0.0, {}, id="alone", marks=pytest.mark.slow),
        pytest.param(0.25, {"tensor": 2}, id="tensor 2, dropout", marks=pytest.mark.slow),
        pytest.param(0.25, {"data": 2, "hint": "bfw"}, id="replicas, split, dropout", marks=pytest.mark.slow),
        pytest.param(0.0, {"mesh": {"fsdp": 2}, "remat": "dots"}, id="fsdp 2", marks=pytest.mark.slow),
        pytest.param(0.0, {"data": 2, "shard_optimizer": True}, id="shared state", marks=pytest.mark.slow),
    ],
)
def test_four_stages_train_what_the_plain_loop_trains(dropout: float, options: dict[str, Any]) -> None:
    chunks = add_adapters(language_model(CONFIG).split(4), replace(ADAPTED, dropout=dropout))
    initial, losses, params = trained(chunks, **options)
    frozen = frozen_of(chunks)
    expected = train_plainly(chunks, initial, OPTIMIZER, BATCHES, clip_norm=1.0, frozen=frozen, seed=7)
    assert_same_training(losses, params, *expected)
    for name in frozen:
        jax.tree.map(np.testing.assert_array_equal, params[name], initial[name])
    assert {name for name in params if name not in frozen} == {f"{ADAPTERS}layers.{n}" for n in range(4)}
    assert all(np.any(leaf) for name in params.keys() - frozen for leaf in jax.tree.leaves(params[name]))


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["inside layers", "slices", "vocabulary"])
def test_other_cuts(cut: str) -> None:
    adapters = replace(ADAPTED, targets=("query", "value", "layers.[13].mlp.*"))
    options: dict[str, Any] = {"hint": "bfw"}
    if cut == "inside layers":
        chunks = language_model(CONFIG).split(layers_per_chunk=[1.5, 0.5, 1.5, 0.5])
    elif cut == "slices":
        chunks = language_model(CONFIG).split(2, slices=SequenceSlices(3))
        options |= {"placement": Placement((0, 0, 0, 1, 1, 1)), "edges": sliced_chain(chain(2, 1), 3).edges}
    else:
        graph = language_model(CONFIG).split_vocabulary(2, 2)
        chunks, options = graph.chunks, options | {"edges": graph.edges, "placement": graph.placement}
    initial, losses, params = trained(add_adapters(chunks, adapters), **options)
    whole = add_adapters(language_model(CONFIG).split(1), adapters)
    expected = train_plainly(whole, initial, OPTIMIZER, BATCHES, clip_norm=1.0, frozen=whole[0].frozen)
    assert_same_training(losses, params, *expected)


def test_slices_of_a_sequence_draw_their_own_masks() -> None:
    chunks = add_adapters(language_model(CONFIG).split(1, slices=SequenceSlices(3)), replace(ADAPTED, dropout=0.5))
    assert [int(chunk.apply.numbers["pass"]) for chunk in chunks] == [0, 1, 2]  # type: ignore[attr-defined]
    assert {name for chunk in chunks for name in chunk.tied} == {f"{ADAPTERS}layers.{n}" for n in range(4)}


def test_evaluations_drop_nothing_and_merged_matrices_compute_the_same() -> None:
    model = language_model(replace(CONFIG, num_layers=1))
    (chunk,), (plain,) = add_adapters(model.split(1), replace(ADAPTED, dropout=0.5)), model.split(1)
    params = jax.jit(chunk.init)(jax.random.key(0))
    draw = np.random.default_rng(0)
    params |= {
        name: jax.tree.map(lambda x: x + 0.1 * draw.standard_normal(x.shape, np.float32), layer)
        for name, layer in params.items()
        if name.startswith(ADAPTERS)
    }
    leaves = {name: leaf[0] for name, leaf in BATCHES[0].items()}
    run = jax.jit(as_evaluated(chunk).apply, static_argnames="key")
    expected = jax.jit(plain.apply, static_argnames="key")(merged_params(params, ADAPTED), None, leaves, key=None)
    np.testing.assert_allclose(run(params, None, leaves, key=None)[0], expected[0], rtol=1e-6)
    drop = jax.jit(chunk.apply)
    dropped = [drop(params, None, leaves, key=microbatch_key(0, 0, m))[0] for m in (0, 1, 1)]
    assert float(dropped[1]) == float(dropped[2]) != float(dropped[0])
    assert not np.isclose(dropped[0], expected[0], rtol=1e-4)


@pytest.mark.slow
def test_no_gradient_of_the_base_is_computed() -> None:
    """W makes the factors' gradients alone; I does what it does in a frozen model, and passes the adapters."""
    rows, rank, tokens = 32, 3, 2 * 16
    chunks = language_model(replace(CONFIG, tie_embeddings=False)).split(layers_per_chunk=[1, 1, 2])
    adapted = add_adapters(chunks, replace(ADAPTED, targets=("layers.[01].attention.output",)))
    whole = add_adapters(chunks, replace(ADAPTED, targets=("layers.[012].attention.output",)))
    frozen, one = (backward_flops(plans_of(each)[1]) for each in (chunks, adapted))
    factors = 2 * tokens * rank * (rows + rows)
    assert one["W"] == factors
    assert one["I"] == frozen["I"] + factors
    last = [backward_flops(plans_of(each)[2]) for each in (adapted, whole)]
    assert (last[0]["W"], last[1]["W"]) == (0, factors)
    specs = [trained_specs(chunk) for chunk in adapted]
    assert [[*each] for each in specs] == [["adapters.layers.0"], ["adapters.layers.1"], []]


def plans_of(chunks: list[Any]) -> list[ChunkPlan]:
    graph = replace(model_graph(chunks, None, None), num_microbatches=2)
    graph = replace(graph, split=frozenset(range(len(chunks))))
    leaf = jax.ShapeDtypeStruct((2, 16), np.int32)
    batch = {"tokens": leaf, "targets": leaf, "weights": jax.ShapeDtypeStruct((2, 16), np.float32)}
    shapes = derive_shapes(chunks, graph, batch)
    return [plan_chunk(index, chunks, graph, shapes) for index in range(len(chunks))]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": ("quary",)}, "no matrix matches 'quary', which is to have an adapter: the nearest is 'query'"),
        ({"targets": ("layers.7.mlp.up",)}, "no matrix matches 'layers.7.mlp.up'"),
        ({"rank": 17}, "adapters.rank is 17, and layers.0.attention.value has 32 rows and 16 columns: give a rank of"),
        ({"rank": 0}, "rank is 0: give at least 1"),
        ({"alpha": 0}, "alpha is 0: give a number above 0"),
        ({"dropout": 1.0}, "dropout is 1.0: give 0 or more, and less than 1"),
        ({"targets": ()}, "targets names no matrix: give some"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}[^\n]*$"):
        add_adapters(language_model(CONFIG).split(2), replace(ADAPTED, **changes))


def test_other_chunks_are_refused() -> None:
    own = Chunk(name="own", init=lambda key: {"w": jnp.zeros(3)}, apply=lambda *_, key: None)
    for chunks in ([own], add_adapters(language_model(CONFIG).split(1), ADAPTED)):
        with pytest.raises(ValueError, match="is none of the library's layers, which alone can have adapters: give"):
            add_adapters(chunks, ADAPTED)


def test_products_by_head_have_adapters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On TPUs the product makes the heads itself."""
    layer = projection(CONFIG, 6, 8, nnx.Rngs(0))
    layer.adapt(ADAPTED)
    layer.lora_a[...], layer.lora_b[...] = jnp.ones((6, 3)), jnp.ones((3, 8))
    x, heads = jnp.arange(12.0).reshape(1, 2, 6), jnp.arange(12.0).reshape(1, 2, 2, 3)
    expected = by_heads(x, 4, layer)[0], from_heads(layer, heads)
    monkeypatch.setattr("rrfp_jax.models._parts.current_target", lambda: Target(platform="tpu", kind="TPU v5p"))
    for made, wanted in zip((by_heads(x, 4, layer)[0], from_heads(layer, heads)), expected, strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_a_model_that_sees_has_adapters_in_all_of_its_parts() -> None:
    graph = vision_language_model(small_model(PACKED, AUDIO)).split(
        encoder_layers_per_chunk=[1, 2], decoder_layers_per_chunk=[1, 1], packed=True
    )
    chunks = add_adapters(
        graph.chunks, replace(ADAPTED, targets=("vision.layers.0.*.query", "projector.*", "decoder.*.up"))
    )
    found = {name for chunk in chunks for name in trained_specs(chunk)}
    assert found == {
        *(f"{ADAPTERS}{name}" for name in ("vision.layers.0", "projector", "decoder.layers.0", "decoder.layers.1"))
    }
    for chunk in chunks:
        assert chunk.partition is not None
        specs, cut = param_specs(chunk), chunk.partition(param_specs(chunk), {"tensor": 2})
        assert jax.tree.structure(cut) == jax.tree.structure(specs)
