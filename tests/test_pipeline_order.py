"""Steps whose microbatches come in another order: the same losses, random keys and parameters."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.runtime.event_log import read_log, write_log
from rrfp_jax.runtime.replay import replay_run
from rrfp_jax.schedules import Placement, ScheduleRequest, build_schedule, linear
from tests import ragged
from tests import test_pipeline_graph as two_encoders
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training
from tests.test_pipeline_layouts import OPTIMIZER, make_batches, make_chunks
from tests.test_pipeline_random_keys import BATCH, CHUNK, LEARNING_RATE, NUM_MICROBATCHES, SEED


def drawn(rng: np.random.Generator, num_replicas: int, share: int) -> list[int]:
    return [int(first * share + m) for first in range(num_replicas) for m in rng.permutation(share)]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 2, "dispatch_ahead": "just-in-time"},
        {"backward": "split", "hint": "bfw"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_microbatches_that_lack_leaves_in_any_order(data: int, options: dict[str, Any]) -> None:
    steps, rng = ragged.make_steps(4, 6, seed=3), np.random.default_rng(data)
    placement = Placement((0, 1, 0, 1, 1))
    pipeline = make_pipeline(
        ragged.CHUNKS, placement=placement, edges=ragged.EDGES, optimizer=OPTIMIZER, clip_norm=1e6, data=data, **options
    )
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        pipeline.prepare(ragged.as_batch(steps[0]), buckets=ragged.all_buckets())
        results = []
        for number, microbatches in enumerate(steps):
            order = None if number == 1 else drawn(rng, data, 6 // data)
            state, metrics = pipeline.step(state, ragged.as_batch(microbatches), order=order)
            results.append(metrics)
        found = [metrics.result() for metrics in results]
        params = jax.tree.map(np.array, pipeline.params(state))
    losses, norms, expected = ragged.train_plainly(initial, OPTIMIZER, steps)
    assert_same_training([each.loss for each in found], params, losses, expected)
    np.testing.assert_allclose([each.grad_norm for each in found], norms, rtol=1e-5)


def test_random_keys_and_the_sum_of_losses_go_by_the_own_numbers() -> None:
    def losses(order: list[int] | None) -> list[float]:
        options: dict[str, Any] = {"placement": linear(1), "optimizer": optax.sgd(LEARNING_RATE), "seed": SEED}
        with make_pipeline([CHUNK], **options) as pipeline:
            state = pipeline.init(jax.random.key(0))
            found = []
            for _ in range(3):
                state, metrics = pipeline.step(state, BATCH, order=order)
                found.append(metrics.result().loss)
            return found

    expected, found = losses(None), losses([2, 0, 3, 1])
    assert found[0] == expected[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(losses(list(range(NUM_MICROBATCHES))), expected, rtol=0)


def test_absent_pairs_are_given_by_the_own_numbers() -> None:
    def losses(orders: list[list[int] | None]) -> list[float]:
        pipeline = make_pipeline(
            two_encoders.CHUNKS, placement=linear(4), edges=two_encoders.EDGES, optimizer=OPTIMIZER, window=2
        )
        with pipeline:
            state, results = pipeline.init(jax.random.key(1)), []
            for step, (batch, order) in enumerate(zip(two_encoders.make_batches(), orders, strict=False)):
                state, metrics = pipeline.step(state, batch, absent=two_encoders.absent_pairs(step), order=order)
                results.append(metrics)
            return [each.result().loss for each in results]

    np.testing.assert_allclose(losses([[2, 3, 1, 0], None, [1, 0, 3, 2]]), losses([None] * 3), rtol=1e-6)


@pytest.mark.slow
def test_a_deterministic_pipeline_keeps_every_bit(tmp_path: Any) -> None:
    """With a table too, by which it accumulates; and the event log replays."""
    chunks = make_chunks(2, tied=True)
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=4))

    def train(order: list[int] | None) -> tuple[list[float], Any]:
        options: dict[str, Any] = {"deterministic": True, "schedule": table, "log_steps": 6}
        with make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, **options) as pipeline:
            state, results = pipeline.init(jax.random.key(1)), []
            for batch in make_batches():
                state, metrics = pipeline.step(state, batch, order=order)
                results.append(metrics)
            params = jax.tree.map(np.array, pipeline.params(state))
            write_log(pipeline.runtime.event_log(), tmp_path / "events.json.gz")
            return [each.result().loss for each in results], params

    losses, params = train(None)
    found, same = train([3, 1, 0, 2])
    assert found == losses
    jax.tree.map(np.testing.assert_array_equal, same, params)
    replay = replay_run([read_log(tmp_path / "events.json.gz")])
    assert [stage.difference for stage in replay.stages] == [None] * 2


def test_what_is_no_order_is_refused_and_the_run_goes_on() -> None:
    each_once = "give the numbers 0 to 3, each once"
    refused: list[tuple[Any, str]] = [
        ([0, 1, 2], rf"order is \[0, 1, 2\].*: {each_once}"),
        ([0, 1, 1, 3], each_once),
        ([0, 1, 2.0, 3], each_once),
        (3, f"order is 3.*: {each_once}"),
        (
            [0, 2, 1, 3],
            "order has microbatch 2 of replica 1 in place 1, of replica 0: reorder the microbatches of each",
        ),
    ]
    batch = make_batches()[0]
    with make_pipeline(make_chunks(2, tied=False), placement=linear(2), optimizer=OPTIMIZER, data=2) as pipeline:
        state = pipeline.init(jax.random.key(1))
        for order, message in refused:
            with pytest.raises(ValueError, match=message):
                pipeline.step(state, batch, order=order)
        state, metrics = pipeline.step(state, batch, order=np.array([1, 0, 3, 2]))
        assert np.isfinite(metrics.result().loss)
