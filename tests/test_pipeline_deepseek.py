"""DeepSeek-V3 in a pipeline: latent attention, and a bias of each expert that follows a loop over loads in NumPy."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.config import LatentAttentionConfig, RopeScaling
from rrfp_jax.models.cuts import ContextCut, SequenceSlices
from rrfp_jax.schedules import Placement, chain, linear, sliced_chain
from rrfp_jax.training.loop import RunSaver
from tests.models.test_experts import chosen_by_groups
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training
from tests.test_pipeline_context import make_batches as packed_batches

RATE = 0.01
EXPERTS = ExpertsConfig(
    num_experts=8,
    experts_per_token=2,
    mlp_dim=12,
    scores="sigmoid",
    scale=2.5,
    num_groups=4,
    groups_per_token=2,
    bias_rate=RATE,
    shared_mlp_dim=12,
    dense_layers=(0,),
)
CONFIG = LanguageModelConfig(
    vocab_size=32,
    hidden=16,
    num_layers=4,
    num_heads=4,
    mlp_dim=32,
    init_std=0.2,
    latent_attention=LatentAttentionConfig(
        query_rank=10, kv_rank=8, plain_dim=4, rotary_dim=2, value_dim=4, score_mscale=0.5
    ),
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_positions=8),
    experts=EXPERTS,
)
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
CLIP = 0.5
NUM_STEPS = 3
BIAS = "balance_bias"


def batches(*, packed: bool = False) -> list[dict[str, np.ndarray]]:
    """Four microbatches of four rows, some of whose tokens do not count."""
    found = packed_batches(NUM_STEPS)
    others = [*found[1:], found[0]]
    left_out = () if packed else ("segments", "positions")
    return [
        {name: np.concatenate([one[name], other[name]], axis=1) for name in one if name not in left_out}
        for one, other in zip(found, others, strict=True)
    ]


@cache
def plain(config: LanguageModelConfig = CONFIG, *, packed: bool = False) -> tuple[list[float], Any, list[float]]:
    """Losses, parameters and norms of a loop in which nothing but NumPy knows loads.

    The model is cut before every MLP, so that the loop sees what the routers see.
    """
    chunks = language_model(config).split(layers_per_chunk=[0.5, *[1] * (config.num_layers - 1), 0.5], packed=packed)
    (whole,) = language_model(config).split(1)
    params = jax.tree.map(np.array, jax.jit(whole.init)(jax.random.key(1)))

    def of_chunk(params: Any, chunk: Any) -> Any:
        specs = jax.eval_shape(chunk.init, jax.random.key(0))
        return {name: {path: params[name.partition(":")[0]][path] for path in layer} for name, layer in specs.items()}

    def run(params: Any, microbatch: Any) -> Any:
        outputs: list[Any] = [None]
        for chunk in chunks:
            leaves = {name: microbatch[name] for name in chunk.leaves}
            outputs.append(chunk.apply(of_chunk(params, chunk), outputs[-1], leaves, key=None))
        return outputs[-1][:2], outputs[1:-1]

    def mean_loss(rest: Any, biases: Any, batch: Any) -> Any:
        params = {name: {**layer, **({"mlp": {**layer["mlp"], BIAS: biases[name]}} if name in biases else {})}
                  for name, layer in rest.items()}  # fmt: skip
        (loss_sums, weights), streams = jax.lax.map(lambda microbatch: run(params, microbatch), batch)
        return loss_sums.sum() / weights.sum(), streams

    biases = {name: layer["mlp"].pop(BIAS) for name, layer in params.items() if BIAS in layer.get("mlp", {})}
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZER)

    @jax.jit
    def step(params: Any, biases: Any, state: Any, batch: Any) -> Any:
        (loss, streams), grads = jax.value_and_grad(mean_loss, has_aux=True)(params, biases, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, streams, optax.tree.norm(grads)

    state, losses, norms = optimizer.init(params), [], []
    for batch in batches(packed=packed):
        counts = (batch["segments"] if packed else batch["weights"]) != 0
        before = jax.tree.map(np.array, params)
        params, state, loss, streams, norm = step(params, biases, state, batch)
        for name, bias in biases.items():
            layer = before[name]
            stream = np.asarray(streams[int(name.partition(".")[2])], np.float64)
            normed = stream / np.sqrt((stream**2).mean(-1, keepdims=True) + config.norm_eps)
            logits = normed * layer["mlp_norm"]["scale"] @ layer["mlp"]["router"]
            loads = np.zeros(EXPERTS.num_experts)
            for at in np.argwhere(counts):
                loads[chosen_by_groups(EXPERTS, logits[tuple(at)], bias)] += 1
            biases[name] = bias + np.float32(RATE) * np.sign(loads.mean() - loads).astype(np.float32)
        losses.append(float(loss))
        norms.append(float(norm))
    for name, bias in biases.items():
        params[name]["mlp"][BIAS] = bias
        assert np.any(bias)
    return losses, params, norms


def check(*, config: LanguageModelConfig = CONFIG, num_chunks: int = 4, packed: bool = False, **options: Any) -> None:
    split = {name: options.pop(name) for name in ("context", "slices") if name in options}
    chunks = language_model(config).split(num_chunks, packed=packed, **split)
    options.setdefault("placement", linear(4))
    pipeline = make_pipeline(chunks, optimizer=OPTIMIZER, clip_norm=CLIP, progress_deadline_s=120, **options)
    with pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches(packed=packed):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result())
        params = jax.tree.map(np.array, pipeline.params(state))
    losses, expected, norms = plain(config, packed=packed)
    assert_same_training([result.loss for result in results], params, losses, expected)
    np.testing.assert_allclose([result.grad_norm for result in results], norms, rtol=1e-5)
    for name, layer in params.items():
        if BIAS in layer.get("mlp", {}):
            np.testing.assert_array_equal(layer["mlp"][BIAS], expected[name]["mlp"][BIAS])


@pytest.mark.slow
def test_latent_attention_and_biases_train_what_the_plain_loop_does() -> None:
    check(config=replace(CONFIG, num_layers=2), num_chunks=2, placement=linear(2))


@pytest.mark.slow
def test_four_stages_train_what_the_plain_loop_does() -> None:
    check(hint="bfw")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"packed": True, "remat": "full"},
        {"placement": linear(2), "mesh": {"expert": 2, "fsdp": 2}},
        {"placement": linear(2), "mesh": {"tensor": 2}, "remat": "dots", "hint": "bfw"},
        {"placement": linear(2), "data": 2, "shard_optimizer": True},
        {"placement": linear(2), "data": 2, "reduce": "messages"},
        {"placement": linear(2), "data": 2, "deterministic": True},
        {"placement": linear(2), "data": 2, "reduce": "messages", "shard_optimizer": True, "packed": True},
        {"placement": linear(2), "mesh": {"context": 2}, "context": ContextCut(devices=2, attention="ring")},
        {"placement": linear(2), "mesh": {"context": 2}, "context": ContextCut(devices=2, attention="gather")},
    ],
    ids=str,
)
def test_every_way_to_run_trains_what_the_plain_loop_does(options: dict[str, Any]) -> None:
    if options.get("placement") == linear(2):
        options = {**options, "placement": Placement((0, 1, 0, 1))}
    check(**options)


@pytest.mark.slow
def test_slices_of_sequences_train_what_the_plain_loop_does() -> None:
    placement = Placement(tuple(chunk % 2 for chunk in range(4) for _ in range(2)))
    edges = sliced_chain(chain(4, 1), 2).edges
    check(slices=SequenceSlices(2), placement=placement, edges=edges, window=4)


@pytest.mark.slow
def test_a_checkpoint_carries_the_biases_into_another_layout(tmp_path: Path) -> None:
    def pipeline_of(num_stages: int) -> Any:
        chunks = language_model(CONFIG).split(num_stages)
        return make_pipeline(chunks, placement=linear(num_stages), optimizer=OPTIMIZER, clip_norm=CLIP)

    first, *rest = batches()
    with pipeline_of(4) as pipeline:
        state, metrics = pipeline.step(pipeline.init(jax.random.key(1)), first)
        losses = [metrics.result().loss]
        saver = RunSaver(tmp_path, pipeline, every=1, minutes=None, keep=1)
        saver.save(state, {})
        saver.checkpoints.close()
    with pipeline_of(2) as pipeline:
        saver = RunSaver(tmp_path, pipeline, every=1, minutes=None, keep=1)
        found = saver.checkpoints.newest()
        assert found is not None
        state = saver.restore(found)
        for batch in rest:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        params = jax.tree.map(np.array, pipeline.params(state))
        saver.checkpoints.close()
    assert_same_training(losses, params, *plain()[:2])


@pytest.mark.slow
def test_a_bias_that_stays_and_one_of_a_skipped_step_keep_their_bits() -> None:
    still = replace(CONFIG, num_layers=2, experts=replace(EXPERTS, bias_rate=0.0))
    first = batches()[0]
    for config, batch in ((still, first), (replace(CONFIG, num_layers=2), {**first, "weights": 0 * first["weights"]})):
        pipeline = make_pipeline(language_model(config).split(1), placement=linear(1), optimizer=OPTIMIZER)
        with pipeline:
            state, metrics = pipeline.step(pipeline.init(jax.random.key(1)), batch)
            assert metrics.result().skipped == (config is not still)
            assert not np.any(pipeline.params(state)["layers.1"]["mlp"][BIAS])
