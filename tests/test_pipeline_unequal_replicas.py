"""Stages with different numbers of replicas train what the plain loop trains, in one process."""

from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear, looped
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_layouts import NUM_MICROBATCHES, OPTIMIZER, make_batches, make_chunks, train

MESSAGES: dict[str, Any] = {"data": 2, "reduce": "messages", "clip_norm": 1.0}


def expected(chunks: list[Any]) -> Any:
    placement = linear(len(chunks))
    initial = make_pipeline(chunks, placement=placement, optimizer=OPTIMIZER)
    params = jax.tree.map(np.array, initial.params(initial.init(jax.random.key(1))))
    return train_plainly(chunks, params, OPTIMIZER, make_batches(), clip_norm=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1, 2, 2, 2), {}),
        ((2, 1, 1, 2), {"backward": "split", "hint": "bfw", "window": 2}),
        ((1, 2, 1, 2), {"schedule": "zb-h1"}),
        ((2, 2, 2, 1), {"deterministic": True}),
        ((1, 4, 1, 2), {"data": 4}),
    ],
    ids=str,
)
def test_unequal_replicas_train_what_the_plain_loop_trains(replicas: tuple[int, ...], options: dict[str, Any]) -> None:
    chunks, options = make_chunks(4, tied=True), MESSAGES | options
    if name := options.pop("schedule", None):
        request = ScheduleRequest(num_stages=4, num_microbatches=NUM_MICROBATCHES // options["data"])
        options["schedule"] = build_schedule(name, request)
    pipeline = make_pipeline(chunks, placement=linear(4), optimizer=OPTIMIZER, replicas=replicas, **options)
    assert pipeline.layout.num_devices == sum(replicas)
    assert_same_training(*train(pipeline, make_batches()), *expected(chunks))


@pytest.mark.slow
def test_evaluations_verifications_and_other_owners_know_which_units_there_are() -> None:
    batch = make_batches()[0]
    leaves = [{name: values[m] for name, values in batch.items()} for m in range(NUM_MICROBATCHES)]
    evaluated = []
    for replicas in ((), (1, 2)):
        pipeline = make_pipeline(
            make_chunks(4, tied=True),
            placement=looped(2, 2),
            optimizer=OPTIMIZER,
            replicas=replicas,
            other_owners=True,
            **MESSAGES,
        )
        with pipeline:
            state = pipeline.init(jax.random.key(1))
            pipeline.prepare(batch, evaluation=EvaluationShapes(buckets=leaves[:1], batches=2))
            found = pipeline.evaluate(
                state, {name: np.concatenate([each] * 2) for name, each in batch.items()}
            ).result()
            evaluated.append((found.loss_sum, found.weight))
            assert pipeline.verify(state, {name: each[:1] for name, each in batch.items()}).difference is None
            state, metrics = pipeline.step(state, batch, owners=StepOwners(((0,) * 4, (1, 0, 0, 1))))
            result = metrics.result()
            assert np.isfinite(result.loss)
            assert result.lost_units == ()
            assert [peak > 0 for peak in result.peak_memory_bytes] == [True, True, not replicas, True]
            assert len(pipeline.forecast) == 4
            if replicas:
                with pytest.raises(
                    ValueError, match="microbatch 1 of stage 0 is owned by replica 1, which is lost there"
                ):
                    pipeline.step(state, batch, owners=StepOwners(((0, 1, 0, 0), (0,) * 4)))
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


def test_what_unequal_replicas_cannot_have_is_refused() -> None:
    def made(**options: Any) -> Any:
        return make_pipeline(make_chunks(2, tied=False), placement=linear(2), optimizer=OPTIMIZER, **options)

    alike = "the stages have 1,2 replicas, which add up gradients by messages alone and share no optimizer state"
    with pytest.raises(ValueError, match=alike):
        made(data=2, replicas=(1, 2))
    with pytest.raises(ValueError, match=alike):
        made(replicas=(1, 2), shard_optimizer=True, **MESSAGES)
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES // 2))
    with made(replicas=(1, 2), schedule=table, consume="strict", **MESSAGES) as pipeline:
        state = pipeline.init(jax.random.key(1))
        with pytest.raises(ValueError, match="strict consumption keeps to its table's microbatches"):
            pipeline.step(state, make_batches()[0])


@pytest.mark.parametrize(
    ("replicas", "options", "bounds"),
    [
        ((1, 2), {"schedule": "1f1b"}, ["4", "1", "4", "1"]),
        ((2, 1), {"schedule": "1f1b"}, ["2", "2", "2", "2"]),
        pytest.param((1, 2), {"window": 2}, ["2", "2", "2", "2"], marks=pytest.mark.slow),
        pytest.param((2, 1), {"window": (1, 2)}, ["1", "2", "1", "2"], marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_stage_for_several_replicas_holds_as_much_as_they_would_and_no_more_than_foreseen(
    replicas: tuple[int, ...], options: dict[str, Any], bounds: list[str]
) -> None:
    chunks, options = make_chunks(2, tied=False), MESSAGES | options
    if name := options.pop("schedule", None):
        options["schedule"] = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=8))
    batch = {name: np.concatenate([each] * 4) for name, each in make_batches()[0].items()}
    pipeline = make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, replicas=replicas, **options)
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        for _ in range(3):
            state, metrics = pipeline.step(state, batch)
            peaks = metrics.result().peak_memory_bytes
            assert all(held <= each.peak for held, each in zip(peaks, pipeline.forecast, strict=True))
        assert [*pipeline.order.bounds] == bounds
