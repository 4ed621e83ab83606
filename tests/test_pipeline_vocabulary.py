"""Embedding and head in shards of words on all stages: they train what the uncut model does in a plain loop, and start
from its values."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.cuts import ContextCut, plan_cut
from rrfp_jax.models.loss import COUNTS, EXACT_ANSWERS, RIGHT_TOKENS
from rrfp_jax.models.model import Z_LOSS, ChunkGraph, decoder_chunk
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleRequest, build_schedule, vocabulary_sharded
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_context import make_batches as packed_batches

UNTIED = LanguageModelConfig(
    vocab_size=35, hidden=16, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=32, init_std=0.1
)
MODELS = {
    "untied": UNTIED,
    "untied, z-loss": replace(UNTIED, z_loss=1e-2),
    "tied": replace(UNTIED, tie_embeddings=True),
    "tied, z-loss": replace(UNTIED, tie_embeddings=True, z_loss=1e-2),
    "experts": replace(
        UNTIED, z_loss=1e-2, experts=ExpertsConfig(num_experts=4, experts_per_token=2, balance_coefficient=0.02)
    ),
}
LAYERS = {2: [2, 2], 3: [2, 1, 1], 4: [1, 1, 1, 1]}
"""Layers of each chunk by the number of shards."""
NUM_STEPS = 3
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
Ways = dict[str, Any]


def batches(num_steps: int = NUM_STEPS, *, packed: bool = False) -> list[dict[str, np.ndarray]]:
    """Rows of several samples each; where they are not packed nobody is told."""
    kept = ("tokens", "targets", "weights", *(("positions", "segments") if packed else ()))
    drawn, rng = packed_batches(num_steps), np.random.default_rng(1)
    for batch in drawn:  # the last words too
        for name in ("tokens", "targets"):
            batch[name] = rng.integers(0, UNTIED.vocab_size, batch[name].shape).astype(np.int32)
    return [{name: batch[name] for name in kept} for batch in drawn]


@cache
def plain(model: str, *, packed: bool = False) -> Any:
    """What the plain loop makes of the model in one chunk, with the norms of its gradients and means of named sums."""
    (chunk,) = language_model(MODELS[model]).split(1, packed=packed)
    norms, means = list[float](), list[dict[str, float]]()
    first = jax.jit(chunk.init)(jax.random.key(1))
    options: Ways = {"clip_norm": 1.0, "norms": norms, "means": means}
    return *train_plainly([chunk], first, OPTIMIZER, batches(packed=packed), **options), norms, means


def pipeline_of(graph: ChunkGraph, **options: Any) -> Any:
    """A pipeline of one stage for every shard."""
    placement = graph.placement
    assert placement is not None
    if isinstance(name := options.get("schedule"), str):
        numbers = PipelineGraph(len(graph.chunks), 4, graph.edges)
        request = ScheduleRequest(
            num_stages=placement.num_stages, num_microbatches=4, graph=numbers, placement=placement
        )
        options |= {"schedule": build_schedule(name, request), "hint": "schedule"}
    defaults = {"clip_norm": 1.0, "optimizer": OPTIMIZER, "progress_deadline_s": 120}
    return make_pipeline(graph.chunks, edges=graph.edges, placement=placement, **{**defaults, **options})


def train(model: str, *, shards: int = 4, packed: bool = False, context: int = 1, **way: Any) -> Any:
    cut_over = ContextCut(devices=context) if context > 1 else None
    layers, fan_out = way.pop("layers", LAYERS[shards]), way.pop("fan_out", None)
    graph = language_model(MODELS[model]).split_vocabulary(
        shards, layers_per_chunk=layers, packed=packed, context=cut_over, fan_out=fan_out
    )
    with pipeline_of(graph, **way) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches(packed=packed):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        results = [metrics.result() for metrics in results]
        return results, jax.tree.map(np.array, pipeline.params(state))


def check(model: str, *, packed: bool = False, **way: Any) -> None:
    results, params = train(model, packed=packed, **way)
    losses, expected, norms, means = plain(model, packed=packed)
    assert_same_training([result.loss for result in results], params, losses, expected)
    np.testing.assert_allclose([result.grad_norm for result in results], norms, rtol=2e-6)
    for result, known in zip(results, means, strict=True):
        assert set(result.means) == set(known)
        np.testing.assert_allclose([result.means[name] for name in known], list(known.values()), rtol=2e-6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("tied, z-loss", {"shards": 2, "packed": True}),
        ("untied, z-loss", {"shards": 4, "hint": "bfw", "fan_out": 1}),
        ("experts", {"shards": 3, "remat": "full"}),
        ("tied", {"shards": 2, "tensor": 2, "hint": "bf", "backward": "split"}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_shards_train_what_the_plain_loop_does(model: str, way: Ways) -> None:
    check(model, **way)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "way",
    [
        {"shards": 2, "hint": "bfw"},
        {"shards": 3, "remat": "dots", "deterministic": True},
        {"shards": 2, "layers": [1, 1, 1, 1], "hint": "fb", "window": 1},
        {"shards": 2, "layers": [0.5, 3.5], "backward": "split", "remat": "full"},
        {"shards": 4, "schedule": "1f1b", "fan_out": 1},
        {"shards": 2, "schedule": "zb-h1", "tensor": 2},
        {"shards": 2, "mesh": {"fsdp": 2}, "hint": "bfw"},
        {"shards": 2, "mesh": {"context": 2}, "context": 2},
        {"shards": 2, "data": 2, "shard_optimizer": True},
        {"shards": 2, "data": 2, "reduce": "messages", "shard_optimizer": True},
    ],
    ids=str,
)
def test_every_way_to_run_trains_what_the_plain_loop_does(way: Ways, model: str, packed: bool) -> None:
    check(model, packed=packed, **way)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order() -> None:
    orders: list[Ways] = [{"hint": "bf", "window": 5}, {"hint": "fb", "window": 2}, {"hint": "f-priority", "window": 3}]
    found = []
    for order in orders:
        results, params = train("tied, z-loss", shards=2, deterministic=True, **order)
        found.append(([result.loss for result in results], [leaf.tobytes() for leaf in jax.tree.leaves(params)]))
    assert all(each == found[0] for each in found)


@pytest.mark.slow
def test_a_step_of_bfloat16_differs_from_that_of_the_uncut_head_by_rounding_alone() -> None:
    config = replace(UNTIED, compute_dtype="bfloat16", z_loss=1e-2)
    (whole,) = language_model(config).split(1)
    graph = language_model(config).split_vocabulary(2, 2)
    (batch,) = batches(1)
    losses = []
    for pipeline in (
        make_pipeline([whole], placement=Placement((0,)), optimizer=OPTIMIZER, clip_norm=1.0),
        pipeline_of(graph),
    ):
        with pipeline:
            _, metrics = pipeline.step(pipeline.init(jax.random.key(1)), batch)
            losses.append((metrics.result().loss, metrics.result().grad_norm))
    np.testing.assert_allclose(*losses, rtol=2e-3)


# -- evaluations -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_evaluations_count_answers_as_those_of_the_uncut_head(packed: bool) -> None:
    config = replace(MODELS["tied, z-loss"], init_std=0.5)
    options: Ways = {"packed": packed, "counts_answers": True}
    (whole,) = language_model(config).split(1, **options)
    graph = language_model(config).split_vocabulary(3, layers_per_chunk=[2, 1, 1], **options)
    (batch,) = batches(1, packed=packed)
    logits = decoder_chunk(config, plan_cut(4, num_chunks=1)[0], packed=packed, gives_logits=True)
    params = jax.jit(whole.init)(jax.random.key(1))
    for microbatch in range(4):  # most targets are the likeliest words, at the ends of shards too
        leaves = {name: leaf[microbatch] for name, leaf in batch.items()}
        likeliest = np.argmax(jax.jit(logits.apply)(params, None, leaves), axis=-1)
        batch["targets"][microbatch] = np.where(leaves["targets"] % 8, likeliest, leaves["targets"])
    found = []
    for pipeline in (make_pipeline([whole], placement=Placement((0,)), optimizer=OPTIMIZER), pipeline_of(graph)):
        with pipeline:
            state = pipeline.init(jax.random.key(1))
            shapes = EvaluationShapes(buckets=[{name: leaf[0] for name, leaf in batch.items()}])
            pipeline.prepare(batch, evaluation=shapes)
            found.append(pipeline.evaluate(state, batch).result())
    one, other = found
    np.testing.assert_allclose(other.loss_sum, one.loss_sum, rtol=1e-6)
    np.testing.assert_allclose(other.means[Z_LOSS], one.means[Z_LOSS], rtol=1e-6)
    assert {name: other.means[name] for name in COUNTS} == {name: one.means[name] for name in COUNTS}
    assert one.means[RIGHT_TOKENS] > one.means[EXACT_ANSWERS] > 0


# -- what stages hold and send -----------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_words_once_and_no_table_travels(tied: bool) -> None:
    graph = language_model(replace(UNTIED, tie_embeddings=tied)).split_vocabulary(4, 4)
    with pipeline_of(graph) as pipeline:
        state = pipeline.init(jax.random.key(1))
        held = {
            stage: [each for c, each in pipeline.chunk_states(state) if c in (stage, 8 + stage)] for stage in range(4)
        }
        for stage, states in held.items():
            sizes = [sum(leaf.size for leaf in jax.tree.leaves(state.params)) for state in states]
            words = (stage + 1) * 35 // 4 - stage * 35 // 4
            assert sizes == [words * 16] * (1 if tied else 2)
        # gradients of shared layers would travel in operations; passes have none
        assert pipeline._graph.passes == (tuple((stage, 8 + stage) for stage in range(4)) if tied else ())
        assert not any(len(pipeline._graph.sharing(chunk)) > 1 for chunk in range(pipeline._graph.num_chunks))
        state, metrics = pipeline.step(state, batches(1)[0])
        metrics.result()
        shapes = derive_shapes(graph.chunks, pipeline._graph, {n: leaf[0] for n, leaf in batches(1)[0].items()})
    sent = {leaf.size for shape in shapes for leaf in jax.tree.leaves(shape.outputs)}
    assert sent == {2 * 16 * 16, 2 * 16, 1}  # streams, numbers of tokens, scalars; no 9 words of 16


@pytest.mark.parametrize("fan_out", [None, 2])
def test_edges_and_stages_are_those_of_the_simulated_graph(fan_out: int | None) -> None:
    found = language_model(replace(UNTIED, num_layers=8)).split_vocabulary(4, 8, fan_out=fan_out)
    graph, placement = vocabulary_sharded(4, 1, chunks_per_stage=2, fan_out=fan_out)
    assert (found.edges, found.placement, len(found.chunks)) == (graph.edges, placement, graph.num_chunks)
    assert [placement.stage_of_chunk[chunk] for chunk in found.parts["layers"]] == [0, 1, 2, 3] * 2


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused() -> None:
    model = language_model(replace(UNTIED, vocab_size=3))
    with pytest.raises(ValueError, match=r"a vocabulary of 3 words cannot be cut into 4 shards: give 2 to 3"):
        model.split_vocabulary(4, 4)
    with pytest.raises(ValueError, match=r"cannot be cut into 1 shards"):
        model.split_vocabulary(1, 4)
    with pytest.raises(ValueError, match=r"3 chunks of layers .* 2 shards: give a multiple of 2"):
        model.split_vocabulary(2, layers_per_chunk=[2, 1, 1])
    with pytest.raises(ValueError, match=r"chunk 0 .* holds no layer: leave it out, or give it a layer"):
        model.split_vocabulary(2, layers_per_chunk=[0, 4])


@pytest.mark.parametrize("optimizer", [optax.adafactor(1e-3), optax.lamb(1e-3), optax.contrib.muon(1e-3)])
def test_an_optimizer_that_looks_at_whole_arrays_is_refused(optimizer: Any) -> None:
    graph = language_model(UNTIED).split_vocabulary(2, 2)
    with pytest.raises(ValueError, match=r"the optimizer updates embedding:rows 1 of 2, .* do not cut the layer"):
        pipeline_of(graph, optimizer=optimizer).init(jax.random.key(1))


@pytest.mark.parametrize(
    "optimizer", [optax.lion(1e-3), optax.sgd(1e-3, momentum=0.9), optax.adam(optax.linear_schedule(1e-3, 0, 9))]
)
@pytest.mark.one_in(3)
def test_an_optimizer_of_single_elements_is_taken(optimizer: Any) -> None:
    graph = language_model(UNTIED).split_vocabulary(2, 2)
    pipeline_of(graph, optimizer=optimizer).init(jax.random.key(1))


@pytest.mark.slow
def test_tokens_and_targets_that_are_no_words_give_no_number() -> None:
    graph = language_model(UNTIED).split_vocabulary(2, 2)
    for name in ("tokens", "targets"):
        (batch,) = batches(1)
        batch["weights"][:] = 1
        batch[name][0, 0, 3] = UNTIED.vocab_size
        with pipeline_of(graph) as pipeline:
            _, metrics = pipeline.step(pipeline.init(jax.random.key(1)), batch)
            assert np.isnan(metrics.result().loss)


# -- initial values ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_initial_values_are_those_of_the_uncut_model(model: str) -> None:
    (whole,) = language_model(MODELS[model]).split(1)
    expected = make_pipeline([whole], placement=Placement((0,)), optimizer=OPTIMIZER)
    params = jax.tree.map(np.array, expected.params(expected.init(jax.random.key(3))))
    for shards in (2, 4):
        pipeline = pipeline_of(language_model(MODELS[model]).split_vocabulary(shards, shards))
        found = pipeline.params(pipeline.init(jax.random.key(3)))
        assert jax.tree.structure(found) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.slow
@pytest.mark.parametrize("consume", ["strict", "ready"])
def test_stages_hold_no_more_than_is_forecast(consume: str) -> None:
    """The schedule's table weighs shards as the little that they keep."""
    graph = language_model(replace(UNTIED, num_layers=8)).split_vocabulary(4, 4)
    table = build_schedule("vocabulary", ScheduleRequest(num_stages=4, num_microbatches=4))
    with pipeline_of(graph, schedule=table, consume=consume) as pipeline:
        assert pipeline._graph.weights == table.graph.weights
        state = pipeline.init(jax.random.key(1))
        for batch in batches(2):
            state, metrics = pipeline.step(state, batch)
        for peak, forecast in zip(metrics.result().peak_memory_bytes, pipeline.forecast, strict=True):
            assert peak <= forecast.peak <= 1.25 * peak
