"""Layers that predict tokens further ahead, beside a loop in float64."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.config import PredictAheadConfig
from rrfp_jax.models.cuts import ContextCut, SequenceSlices
from rrfp_jax.models.model import AHEAD_LOSS
from rrfp_jax.schedules import linear
from tests.models import reference
from tests.models.reference import make_leaves, small_config
from tests.models.test_packed import packed_leaves
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_context import make_batches

CONFIG = small_config(num_layers=2, predict_ahead=PredictAheadConfig(num_layers=2, loss_weight=0.4))


def stream_of(config: LanguageModelConfig, params: Any, leaves: Any) -> np.ndarray:
    """The input of the head: logits where the head changes nothing."""
    plain = replace(config, predict_ahead=None, tie_embeddings=False)
    without_head, vectors = {**params, "head": {"kernel": np.eye(config.hidden)}}, params["embedding"]["table"]
    return reference.reference_logits(plain, without_head, vectors[leaves["tokens"]], leaves)


def reference_ahead_loss(config: LanguageModelConfig, params: Any, leaves: dict[str, Any]) -> float:
    """The summed losses of both layers, target by target."""
    params = reference.to_float64(params)
    head = params["embedding"]["table"].T if config.tie_embeddings else params["head"]["kernel"]
    at = {name: leaves[name] for name in ("positions", "segments") if name in leaves}
    length, total = leaves["tokens"].shape[1], 0.0
    stream = stream_of(config, params, leaves)
    for number in (1, 2):
        weights = params[f"layers.{config.num_layers + number - 1}"]

        def norm(name: str, x: np.ndarray, weights: Any = weights) -> np.ndarray:
            return reference._norm(config, x, weights[name]["scale"])

        places = np.minimum(np.arange(length) + number, length - 1)
        vectors = params["embedding"]["table"][leaves["tokens"][:, places]]
        x = np.concatenate([norm("token_norm", vectors), norm("stream_norm", stream)], -1) @ weights["join"]["kernel"]
        x = x + reference.reference_attention(config, weights["attention"], norm("attention_norm", x), **at)
        x = x + reference._mlp(config, weights["mlp"], norm("mlp_norm", x))
        stream = norm("output_norm", x)
        logits = stream @ head
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, place in np.ndindex(len(logits), length - number):
            later = place + number
            if "segments" in leaves and leaves["segments"][row, later] != leaves["segments"][row, place]:
                continue
            total -= log_probs[row, place, leaves["targets"][row, later]] * leaves["weights"][row, later]
    return total


@pytest.mark.parametrize(
    ("more", "packed"), [({}, True), pytest.param({"tie_embeddings": True}, False, marks=pytest.mark.slow)]
)
def test_losses_are_those_of_a_loop(more: dict[str, Any], packed: bool) -> None:
    config = replace(CONFIG, **more)
    leaves = packed_leaves(config) if packed else make_leaves(config)
    (chunk,) = language_model(config).split(1, packed=packed)
    params = jax.jit(chunk.init)(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_params()
    loss, weight, named = jax.jit(lambda params: chunk.apply(params, None, leaves, key=None))(params)
    expected = 0.4 / 2 * reference_ahead_loss(config, params, leaves)
    assert float(named[AHEAD_LOSS]) == pytest.approx(expected, rel=1e-5)
    plain = replace(config, predict_ahead=None)
    main, main_weight = reference.reference_loss(plain, params, leaves)
    assert (float(loss), float(weight)) == (pytest.approx(main + expected, rel=1e-5), main_weight)


SMALL = LanguageModelConfig(
    vocab_size=32, hidden=16, num_layers=3, num_heads=4, num_kv_heads=2, mlp_dim=32, init_std=0.1,
    predict_ahead=PredictAheadConfig(num_layers=2),
)  # fmt: skip
SPARSE = replace(
    SMALL,
    tie_embeddings=True,
    experts=ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=16, balance_coefficient=0.02),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "packed", "options"),
    [
        (SMALL, False, {"hint": "bfw"}),
        (SMALL, True, {"remat": "full"}),
        (SPARSE, True, {"remat": "dots", "mesh": {"fsdp": 2}}),
        (SPARSE, False, {"mesh": {"tensor": 2}}),
        (SMALL, True, {"mesh": {"context": 2}, "context": True}),
    ],
    ids=str,
)
def test_pipelines_train_what_the_plain_loop_does(
    config: LanguageModelConfig, packed: bool, options: dict[str, Any]
) -> None:
    optimizer = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
    num_stages = 2 if options.get("mesh") else 4
    options = dict(options)
    context = ContextCut(devices=2) if options.pop("context", False) else None
    counts = [1, 2] if num_stages == 2 else [1, 1, 1, 0]
    chunks = language_model(config).split(layers_per_chunk=counts, packed=packed, context=context)
    kept = ("tokens", "targets", "weights", *(("positions", "segments") if packed else ()))
    batches = [{name: batch[name] for name in kept} for batch in make_batches(2)]
    (whole,) = language_model(config).split(1, packed=packed)
    start, means = jax.jit(whole.init)(jax.random.key(1)), list[dict[str, float]]()
    expected = train_plainly([whole], start, optimizer, batches, clip_norm=1.0, means=means)
    with make_pipeline(
        chunks, placement=linear(num_stages), optimizer=optimizer, clip_norm=1.0, progress_deadline_s=120, **options
    ) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result())
        params = jax.tree.map(np.array, pipeline.params(state))
    assert_same_training([result.loss for result in results], params, *expected)
    for result, mean in zip(results, means, strict=True):
        assert result.means == pytest.approx(mean, rel=1e-6)


def test_what_cannot_predict_ahead_is_refused() -> None:
    model = language_model(CONFIG)
    with pytest.raises(ValueError, match="predict_ahead reads tokens of the next slice: leave it out, or the slices"):
        model.split(2, slices=SequenceSlices(2))
    with pytest.raises(ValueError, match="not for a model whose vocabulary is cut into shards: leave it out"):
        model.split_vocabulary(2, 2)
