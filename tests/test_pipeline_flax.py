"""Flax modules of one's own train through a pipeline as in their plain loops, in any cut, layout and order."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.schedules import linear, looped
from rrfp_jax.training.loop import RunSaver
from tests.flax_models import (
    KEY,
    NUM_MICROBATCHES,
    OPTIMIZER,
    SEED,
    LinenPart,
    Transformer,
    cut_model,
    layers_of,
    linen_chunks,
    make_batches,
    nnx_chunks,
    remat_model,
    scanned_model,
    train_linen_plainly,
    train_nnx_plainly,
)
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training

NUM_STEPS = 5
BATCHES = make_batches(NUM_STEPS)


def pipeline_of(chunks: Any, *, num_stages: int | None = None, **options: Any) -> Any:
    num_stages = num_stages or len(chunks)
    placement = linear(len(chunks)) if num_stages == len(chunks) else looped(num_stages, len(chunks) // num_stages)
    return make_pipeline(chunks, placement=placement, optimizer=OPTIMIZER, seed=SEED, **options)


def trained(pipeline: Any, state: Any, batches: Any) -> tuple[Any, list[float]]:
    losses = []
    for batch in batches:
        state, metrics = pipeline.step(state, batch)
        losses.append(metrics.result().loss)
    return state, losses


def check(chunks: Any, expected: Any, **options: Any) -> None:
    start, losses, params = expected
    with pipeline_of(chunks, **options) as pipeline:
        state = pipeline.init(jax.random.key(KEY))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, pipeline.params(state)), start)
        state, own = trained(pipeline, state, BATCHES)
        assert_same_training(own, jax.tree.map(np.array, pipeline.params(state)), losses, params)


@pytest.fixture(scope="module")
def of_nnx() -> Any:
    return train_nnx_plainly(cut_model, BATCHES)


@pytest.fixture(scope="module")
def of_linen() -> Any:
    return train_linen_plainly(BATCHES)


WAYS = [
    {},
    {"tensor": 2},
    {"hint": "bfw"},
    {"hint": "bfw", "tensor": 2, "remat": "full"},
    {"num_stages": 2, "data": 2, "remat": "dots"},
]


@pytest.mark.slow
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_an_nnx_model_trains_as_its_plain_loop(of_nnx: Any, ways: dict[str, Any]) -> None:
    """Tied embeddings and dropout, over four chunks."""
    check(nnx_chunks(cut_model), of_nnx, **ways)


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_initial_values_are_those_of_the_model_in_any_cut(of_nnx: Any, num_chunks: int) -> None:
    for chunk in nnx_chunks(cut_model, num_chunks):
        for name, layer in jax.jit(chunk.init)(jax.random.key(KEY)).items():
            jax.tree.map(np.testing.assert_array_equal, layer, of_nnx[0][name])


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{}, {"hint": "bfw", "remat": "full"}], ids=str)
def test_nnx_remat_changes_nothing(of_nnx: Any, ways: dict[str, Any]) -> None:
    check(nnx_chunks(remat_model), of_nnx, **ways)


@pytest.mark.slow
def test_nnx_scan_within_a_block_draws_as_in_the_plain_loop() -> None:
    check(nnx_chunks(scanned_model), train_nnx_plainly(scanned_model, BATCHES), hint="bfw", remat="full")


@pytest.mark.slow
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_a_linen_model_trains_as_its_plain_loop(of_linen: Any, ways: dict[str, Any]) -> None:
    check(linen_chunks(is_cut="tensor" in ways), of_linen, **ways)


@pytest.mark.slow
def test_linen_remat_changes_nothing(of_linen: Any) -> None:
    check(linen_chunks(is_remat=True), of_linen, hint="bfw")


@pytest.mark.slow
@pytest.mark.parametrize("is_nnx", [True, False])
def test_evaluations_drop_nothing(is_nnx: bool) -> None:
    chunks, batch = nnx_chunks(Transformer(nnx.Rngs(1))) if is_nnx else linen_chunks(), BATCHES[0]
    microbatch = {name: leaf[0] for name, leaf in batch.items()}
    with pipeline_of(chunks) as pipeline:
        state = pipeline.init(jax.random.key(KEY))
        pipeline.prepare(batch, evaluation=EvaluationShapes(buckets=[microbatch]))
        found = pipeline.evaluate(state, batch).result().loss
        params = jax.tree.map(np.array, pipeline.params(state))
    if is_nnx:
        model = Transformer(nnx.Rngs(1))
        jax.tree.map(np.testing.assert_array_equal, params, layers_of(model))
        model.eval()

    def plain_loss(leaves: Any) -> Any:
        if not is_nnx:
            return LinenPart(range(4)).apply({"params": params}, None, **leaves)
        x = model.embed(leaves["tokens"])
        for block in model.blocks:
            x = block(x)
        return model.loss(x, leaves["targets"], leaves["weights"])

    sums = [plain_loss({name: leaf[m] for name, leaf in batch.items()}) for m in range(NUM_MICROBATCHES)]
    np.testing.assert_allclose(found, sum(s for s, _ in sums) / sum(w for _, w in sums), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_nnx", [True, False])
def test_a_checkpoint_of_four_stages_goes_on_with_two(is_nnx: bool, of_nnx: Any, of_linen: Any, tmp_path: Path) -> None:
    _, losses, params = of_nnx if is_nnx else of_linen

    def saver(pipeline: Any) -> RunSaver:
        return RunSaver(tmp_path, pipeline, every=1, minutes=None, keep=1)

    def chunks(number: int) -> Any:
        return nnx_chunks(cut_model, number) if is_nnx else linen_chunks(number, is_cut=True)

    with pipeline_of(chunks(4)) as pipeline:
        state, before = trained(pipeline, pipeline.init(jax.random.key(KEY)), BATCHES[:3])
        saving = saver(pipeline)
        saving.save(state, {})
        saving.checkpoints.close()
    with pipeline_of(chunks(2), tensor=2) as pipeline:
        saving = saver(pipeline)
        found = saving.checkpoints.newest()
        assert found is not None
        state, after = trained(pipeline, saving.restore(found), BATCHES[3:])
        saving.checkpoints.close()
        assert_same_training([*before, *after], jax.tree.map(np.array, pipeline.params(state)), losses, params)
