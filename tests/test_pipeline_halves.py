"""Chunks that end between the attention and the MLP of a layer: they train what the uncut model does in a plain loop,
start from its values, and their checkpoints fit every cut."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.models import (
    ExpertsConfig,
    LanguageModelConfig,
    VisionConfig,
    VisionLanguageConfig,
    language_model,
    vision_language_model,
)
from rrfp_jax.models.cuts import ContextCut
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk, whole_layers
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.schedules import Placement, chain, linear, looped, sliced_chain
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_context import make_batches as packed_batches
from tests.test_pipeline_slices import Uneven

SIZES = {"vocab_size": 32, "hidden": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 32}
DENSE = LanguageModelConfig(**SIZES, init_std=0.1)
EXPERTS = ExpertsConfig(
    num_experts=4, experts_per_token=2, mlp_dim=16, shared_mlp_dim=8, balance_coefficient=0.02, capacity_factor=1.0
)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_embeddings=True),
    "experts": replace(DENSE, experts=EXPERTS),
    "experts after a dense layer": replace(DENSE, experts=replace(EXPERTS, dense_layers=(1,))),
}
CUT = (0.5, 0.5, 1.5, 0.5)
NUM_STEPS = 3
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
Ways = dict[str, Any]


def batches(num_steps: int = NUM_STEPS, *, packed: bool = False) -> list[dict[str, np.ndarray]]:
    """Rows of several samples each; where they are not packed nobody is told."""
    kept = ("tokens", "targets", "weights", *(("positions", "segments") if packed else ()))
    return [{name: batch[name] for name in kept} for batch in packed_batches(num_steps)]


@cache
def plain(model: str, *, packed: bool = False) -> Any:
    """What the plain loop makes of the model in one chunk."""
    (chunk,) = language_model(MODELS[model]).split(1, packed=packed)
    return train_plainly(
        [chunk], jax.jit(chunk.init)(jax.random.key(1)), OPTIMIZER, batches(packed=packed), clip_norm=1.0
    )


def check(model: str, *, packed: bool = False, context: int = 1, cut: tuple[float, ...] = CUT, **way: Any) -> None:
    cut_over = ContextCut(devices=context) if context > 1 else None
    chunks = language_model(MODELS[model]).split(layers_per_chunk=cut, packed=packed, context=cut_over)
    check_training(chunks, model, packed=packed, **{"placement": linear(len(cut)), **way})


def check_training(chunks: list[Chunk], model: str, *, packed: bool = False, **way: Any) -> None:
    options = {"clip_norm": 1.0, "progress_deadline_s": 120} | way
    with make_pipeline(chunks, optimizer=OPTIMIZER, **options) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches(packed=packed):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        losses = [metrics.result().loss for metrics in results]
        assert_same_training(losses, jax.tree.map(np.array, pipeline.params(state)), *plain(model, packed=packed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("tied", {}),
        ("experts", {"hint": "bfw", "remat": "full"}),
        ("dense", {"hint": "bfw", "tensor": 2, "packed": True}),
    ],
    ids=str,
)
def test_a_model_cut_inside_layers_trains_what_the_plain_loop_does(model: str, way: Ways) -> None:
    check(model, **way)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "way",
    [
        {"hint": "bfw"},
        {"remat": "dots"},
        {"hint": "bfw", "remat": "full", "deterministic": True},
        {"tensor": 2, "schedule": "1f1b"},
        {"tensor": 2, "hint": "bfw", "remat": "full"},
        {"mesh": {"fsdp": 2}, "hint": "bfw"},
        {"mesh": {"context": 2}, "context": 2, "hint": "bfw", "remat": "dots"},
        {"data": 2, "shard_optimizer": True},
        {"data": 2, "reduce": "messages", "shard_optimizer": True},
        {"placement": looped(2, 2)},
        {"cut": (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)},
        {"cut": (0, 2.5, 0.5, 0)},
    ],
    ids=str,
)
def test_every_way_to_run_trains_what_the_plain_loop_does(way: Ways, model: str, packed: bool) -> None:
    if isinstance(way.get("schedule"), str):
        from rrfp_jax.schedules import ScheduleRequest, build_schedule

        request = ScheduleRequest(num_stages=4, num_microbatches=4)
        way = {**way, "schedule": build_schedule(way["schedule"], request), "hint": "schedule"}
    check(model, packed=packed, **way)


@pytest.mark.slow
def test_slices_of_sequences_pass_chunks_that_end_inside_layers() -> None:
    """One of them has no attention, and so no keys for later slices."""
    chunks = language_model(DENSE).split(layers_per_chunk=CUT, slices=Uneven(2))
    placement = Placement(tuple(number // 2 % 2 for number in range(len(chunks))))
    edges = sliced_chain(chain(len(CUT), 1), 2).edges
    check_training(chunks, "dense", placement=placement, edges=edges, hint="bfw")


# -- initial values ----------------------------------------------------------------------------------------------------


def initial(chunks: list[Chunk], **options: Any) -> dict[str, Any]:
    pipeline = make_pipeline(chunks, placement=linear(len(chunks)), optimizer=OPTIMIZER, **options)
    return jax.tree.map(np.array, pipeline.params(pipeline.init(jax.random.key(3))))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.slow
def test_initial_values_are_those_of_the_uncut_layers(model: str) -> None:
    whole = initial(language_model(MODELS[model]).split(1))
    cut = initial(language_model(MODELS[model]).split(layers_per_chunk=CUT))
    assert jax.tree.structure(cut) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, cut, whole)


def part(name: str, *arrays: str) -> Chunk:
    """A chunk of one's own that makes a whole layer and keeps a part of it."""

    def init(key: jax.Array) -> Any:
        keys = dict(zip("ab", jax.random.split(key), strict=True))
        return {name: {array: jax.random.normal(keys[array], (3,)) for array in arrays}}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        value = (leaves["x"] if inputs is None else inputs) * sum(params[name].values())
        return (jnp.sum(value), jnp.float32(1)) if "b" in arrays else value

    return Chunk(name=name, init=init, apply=apply, leaves=("x",))


def test_a_part_of_a_layer_of_ones_own_starts_from_the_key_of_the_layer() -> None:
    whole = initial([part("own", "a", "b")])
    jax.tree.map(np.testing.assert_array_equal, initial([part("own:1/2", "a"), part("own:2/2", "b")]), whole)


def test_parts_that_hold_the_same_array_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two layers have 'own\.b' in common, as a colon .* layers without colons"):
        initial([part("own:1/2", "a", "b"), part("own:2/2", "b")])
    with pytest.raises(ValueError, match="two layers have 'own' in common"):
        initial([part("own", "a"), part("own:2/2", "b")])


# -- layers by name ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_masks_and_frozen_layers_go_by_the_names_of_whole_layers() -> None:
    """A decay and rates by path, in an optimizer of one's own, and layers that are frozen by pattern."""

    def is_decayed(params: Any) -> Any:
        return {name: jax.tree.map(lambda _, name=name: name == "layers.1", layer) for name, layer in params.items()}

    def labels(params: Any) -> Any:
        paths = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."), params)
        return jax.tree.map(lambda path: "fast" if path.startswith("layers.0.mlp") else "slow", paths)

    optimizer = optax.chain(
        optax.add_decayed_weights(0.1, mask=is_decayed),
        optax.partition({"fast": optax.adam(1e-2, eps=1e-6), "slow": optax.sgd(1e-2)}, labels),
    )
    results = []
    for cut in ((3,), CUT):
        chunks = freeze(language_model(DENSE).split(layers_per_chunk=cut), ["layers.2", "head"])
        with make_pipeline(chunks, placement=linear(len(cut)), optimizer=optimizer) as pipeline:
            state = pipeline.init(jax.random.key(1))
            first = jax.tree.map(np.array, pipeline.params(state))
            losses = []
            for batch in batches():
                state, metrics = pipeline.step(state, batch)
                losses.append(metrics.result().loss)
            params = jax.tree.map(np.array, pipeline.params(state))
        jax.tree.map(np.testing.assert_array_equal, params["layers.2"], first["layers.2"])
        results.append((losses, params))
    assert_same_training(*results[1], *results[0])
    assert {name for chunk in chunks for name in chunk.frozen} == {"layers.2:attention", "layers.2:mlp", "head"}
    with pytest.raises(ValueError, match=r"no layer matches 'layers\.0:mlp'.*nearest is 'layers\.0'"):
        freeze(chunks, ["layers.0:mlp"])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def pipeline_of(cut: tuple[float, ...], **options: Any) -> Pipeline:
    """Chunks whose optimizer state has counts and moments; a part of the layers is frozen."""
    chunks = freeze(language_model(MODELS["tied"]).split(layers_per_chunk=cut), ["final_norm"])
    options = {"placement": linear(len(cut)), "clip_norm": 1.0} | options
    pipeline: Pipeline = make_pipeline(chunks, optimizer=OPTIMIZER, **options)
    return pipeline


def state_of(pipeline: Pipeline, state: Any) -> tuple[Any, Any]:
    """Parameters, and optimizer state, of whole layers; of the copies of a shared one and of counts the first."""
    moments: dict[str, Any] = {}
    counts = set()
    for _, each in pipeline.chunk_states(state):
        for of_part in each.optimizer_state:
            for path, leaf in jax.tree.leaves_with_path(of_part):
                moments.setdefault(jax.tree_util.keystr(path), np.array(leaf))
                counts |= {int(leaf)} if not leaf.shape else set()
    assert len(counts) == 1
    return jax.tree.map(np.array, pipeline.params(state)), moments


@pytest.mark.slow
@pytest.mark.parametrize("between", [{}, pytest.param({"data": 2, "shard_optimizer": True}, marks=pytest.mark.slow)])
def test_a_checkpoint_fits_every_cut(between: Ways, tmp_path: Path) -> None:
    """From halves to whole layers, to other halves and back, bit for bit; and whoever reads it sees whole layers."""
    with pipeline_of(CUT) as pipeline:
        state = pipeline.init(jax.random.key(1))
        for batch in batches():
            state, metrics = pipeline.step(state, batch)
            metrics.result()
        expected = state_of(pipeline, state)
        saver = RunSaver(tmp_path / "0", pipeline, every=1, minutes=None, keep=1)
        saver.save(state, {})
        saver.checkpoints.close()
        state, metrics = pipeline.step(state, batches()[0])
        next_loss = metrics.result().loss
    for number, cut in enumerate([(1, 2), (1.5, 0.5, 1), (3,), CUT]):
        stored = newest_step(tmp_path / str(number))
        assert {layer for each in stored.parts.values() for layer in each.layers} == {
            "embedding", "layers.0", "layers.1", "layers.2", "final_norm"
        }  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, read_params(stored), expected[0])
        options = between if number % 2 else {}
        with pipeline_of(cut, **options) as pipeline:
            saver = RunSaver(tmp_path / str(number), pipeline, every=1, minutes=None, keep=1)
            found = saver.checkpoints.newest()
            assert found is not None
            state = saver.restore(found)
            if not options:
                jax.tree.map(np.testing.assert_array_equal, state_of(pipeline, state), expected)
            saver.checkpoints.close()
            saver = RunSaver(tmp_path / str(number + 1), pipeline, every=1, minutes=None, keep=1)
            saver.save(state, {})
            saver.checkpoints.close()
            state, metrics = pipeline.step(state, batches()[0])
            np.testing.assert_allclose(metrics.result().loss, next_loss, rtol=1e-6)


# -- vision-language models --------------------------------------------------------------------------------------------


def test_the_decoder_of_a_model_that_sees_is_cut_inside_layers_and_its_encoder_is_not() -> None:
    vision = VisionConfig(num_patches=4, patch_dim=12, hidden=16, num_layers=2, num_heads=2, mlp_dim=32)
    model = vision_language_model(VisionLanguageConfig(vision=vision, decoder=DENSE))
    graph = model.split(decoder_layers_per_chunk=[0.5, 2.5], packed=True)
    assert [chunk.name for chunk in graph.chunks][1:] == [
        "embedding, attention of layer 0", "MLP of layer 0, layers 1-2, head"
    ]  # fmt: skip
    whole = model.split(packed=True).chunks
    found, expected = (
        model_params(jax.eval_shape(chunk.init, jax.random.key(0)) for chunk in chunks)
        for chunks in (graph.chunks, whole)
    )
    assert whole_layers(found) == expected
    with pytest.raises(ValueError, match=r"encoder_layers_per_chunk .* has 0.5 layers: give whole numbers"):
        model.split(encoder_layers_per_chunk=[0.5, 1.5])
