"""The z-loss: its closed form, its part of the loss, and training with it in a pipeline."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.cuts import plan_cut
from rrfp_jax.models.model import ROUTER_LOSS, Z_LOSS, decoder_chunk
from rrfp_jax.schedules import linear
from rrfp_jax.testing.comparing import run_unpipelined
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_layouts import OPTIMIZER, make_batches, train

CONFIG = LanguageModelConfig(vocab_size=32, hidden=8, num_layers=1, num_heads=2, mlp_dim=8, init_std=0.5)
WITH = replace(CONFIG, z_loss=0.02)
SPARSE = replace(WITH, experts=ExpertsConfig(num_experts=2, experts_per_token=1, z_coefficient=0.1))


def test_it_is_the_square_of_the_normaliser_s_logarithm_by_weight_and_is_told_apart() -> None:
    batch = {name: leaf[0] for name, leaf in make_batches()[0].items()}
    (plain,), (chunk,) = (language_model(config).split(1) for config in (CONFIG, WITH))
    params = chunk.init(jax.random.key(0))
    loss, weight = run_unpipelined([plain], params, batch)
    whole, same, sums = jax.jit(lambda params: run_unpipelined([chunk], params, batch))(params)
    logits = jax.jit(lambda params: plain_logits(params, batch))(params)
    expected = 0.02 * (np.log(np.exp(np.asarray(logits, np.float64)).sum(-1)) ** 2 * batch["weights"]).sum()
    assert set(sums) == {Z_LOSS}
    assert float(sums[Z_LOSS]) == pytest.approx(expected, rel=1e-5)
    assert float(whole) == pytest.approx(float(loss) + expected, rel=1e-6)
    assert float(same) == float(weight)


def plain_logits(params: Any, batch: Any) -> jax.Array:
    (chunk,) = (decoder_chunk(CONFIG, plan, gives_logits=True) for plan in plan_cut(1, num_chunks=1))
    return chunk.apply(params, None, {"tokens": batch["tokens"]}, key=None)


@pytest.mark.parametrize("z_loss", [-0.1, float("nan")])
def test_a_weight_that_is_none_is_refused(z_loss: float) -> None:
    with pytest.raises(ValueError, match=r"z_loss is .*: give 0 or more"):
        replace(CONFIG, z_loss=z_loss)


@pytest.mark.slow
@pytest.mark.parametrize("config", [WITH, SPARSE], ids=["dense", "experts"])
@pytest.mark.parametrize("mesh", [{"tensor": 1}, {"tensor": 2}], ids=str)
def test_a_pipeline_trains_with_it_what_the_plain_loop_does(config: LanguageModelConfig, mesh: dict[str, int]) -> None:
    chunks, batches = language_model(config).split(layers_per_chunk=[1, 0]), make_batches()
    params = {name: layer for chunk in chunks for name, layer in chunk.init(jax.random.key(1)).items()}
    pipeline = make_pipeline(
        chunks, placement=linear(2), optimizer=OPTIMIZER, clip_norm=1.0, mesh=mesh, hint="bfw", progress_deadline_s=120
    )
    assert_same_training(*train(pipeline, batches), *train_plainly(chunks, params, OPTIMIZER, batches, clip_norm=1.0))
    with make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER) as pipeline:
        _, metrics = pipeline.step(pipeline.init(jax.random.key(1)), batches[0])
        means = metrics.result().means
    assert set(means) == ({Z_LOSS} if config is WITH else {Z_LOSS, ROUTER_LOSS})
    assert means[Z_LOSS] > 0
