"""Steps with owners drawn at random train what the plain loop trains: replicas hand microbatches to each other."""

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.runtime.event_log import read_log, write_log
from rrfp_jax.runtime.replay import replay_run
from rrfp_jax.schedules import Placement, ScheduleRequest, build_schedule, linear, looped
from tests import ragged
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_layouts import NUM_MICROBATCHES, OPTIMIZER, make_batches, make_chunks

OWNERS = {"data": 2, "other_owners": True}


def draw(num_stages: int, num_microbatches: int) -> StepOwners:
    return StepOwners(tuple(tuple(random.randrange(2) for _ in range(num_microbatches)) for _ in range(num_stages)))


@pytest.mark.parametrize(
    ("per_stage", "options"),
    [
        pytest.param(1, {"window": 2}, marks=pytest.mark.slow),
        pytest.param(1, {"backward": "split", "hint": "bfw", "shard_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(2, {"schedule": "zb-v"}, marks=pytest.mark.slow),
        pytest.param(1, {"schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param(1, {"deterministic": True, "clip_norm": None}, marks=pytest.mark.slow),
        pytest.param(2, {"window": 1, "dispatch_ahead": "just-in-time"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_owners_in_every_step(per_stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Tables as hints with footprint and foresight, too; and the event log replays with the rows made anew."""
    options, placement = {"clip_norm": 1.0} | options, looped(2, per_stage)
    if name := options.pop("schedule", None):
        request = ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES // 2)
        options["schedule"] = build_schedule(name, request)
        placement = options["schedule"].placement
    chunks = make_chunks(2 * per_stage, tied=True)
    pipeline = make_pipeline(chunks, placement=placement, optimizer=OPTIMIZER, log_steps=6, **OWNERS, **options)
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        first = jax.tree.map(np.array, pipeline.params(state))
        results = []
        for step, batch in enumerate(make_batches()):
            given = None if step == 2 else draw(2, NUM_MICROBATCHES)
            state, metrics = pipeline.step(state, batch, owners=given)
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        write_log(pipeline.runtime.event_log(), tmp_path / "events.json.gz")
    expected = train_plainly(chunks, first, OPTIMIZER, make_batches(), clip_norm=options["clip_norm"])
    assert_same_training([each.result().loss for each in results], params, *expected)
    replay = replay_run([read_log(tmp_path / "events.json.gz")])
    assert [stage.difference for stage in replay.stages] == [None] * 4
    assert all(stage.num_events for stage in replay.stages)


@pytest.mark.slow
def test_owners_of_whole_blocks_do_not_change_a_bit_of_a_deterministic_run() -> None:
    """Tied layers and a split backward too; a unit may run all blocks of its stage, or none."""
    chunks = make_chunks(4, tied=True)
    share, tables = NUM_MICROBATCHES // 2, [((0, 0), (1, 0)), ((1, 1), (0, 1)), ((1, 0), (1, 1))]
    shared_out = StepOwners(((0, 1) * share,) * 2)
    options = {"deterministic": True, "reduce": "messages", "clip_norm": 1.0, "hint": "bfw", "backward": "split"}

    def train(*, moves: bool) -> tuple[list[float], Any]:
        with make_pipeline(chunks, placement=looped(2, 2), optimizer=OPTIMIZER, **OWNERS, **options) as pipeline:
            state, results = pipeline.init(jax.random.key(1)), []
            for step, batch in enumerate(make_batches()):
                rows = tuple(tuple(r for r in row for _ in range(share)) for row in tables[step % len(tables)])
                state, metrics = pipeline.step(state, batch, owners=StepOwners(rows) if moves else None)
                results.append(metrics)
            with pytest.raises(ValueError, match="give all microbatches of a block to one replica"):
                pipeline.step(state, batch, owners=shared_out)
            peaks = [each.result().peak_memory_bytes for each in results]
            most = [each.peak for each in pipeline.forecast]
            assert all(0 < held <= bound for step in peaks for held, bound in zip(step, most, strict=True))
            return [each.result().loss for each in results], jax.tree.map(np.array, pipeline.params(state))

    losses, params = train(moves=False)
    moved_losses, moved = train(moves=True)
    assert moved_losses == losses
    jax.tree.map(np.testing.assert_array_equal, moved, params)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("image", "sound")], ids=["trained", "frozen"])
def test_microbatches_that_skip_encoders_move_between_replicas(frozen: tuple[str, ...]) -> None:
    steps = ragged.make_steps(4, 4)
    chunks = freeze(ragged.CHUNKS, frozen) if frozen else ragged.CHUNKS
    placement = Placement((0, 1, 0, 1, 1))
    pipeline = make_pipeline(
        chunks, placement=placement, edges=ragged.EDGES, optimizer=OPTIMIZER, clip_norm=1e6, **OWNERS
    )
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        pipeline.prepare(ragged.as_batch(steps[0]), buckets=ragged.all_buckets())
        results = []
        for microbatches in steps:
            state, metrics = pipeline.step(state, ragged.as_batch(microbatches), owners=draw(2, 4))
            results.append(metrics)
        found = [metrics.result() for metrics in results]
        params = jax.tree.map(np.array, pipeline.params(state))
    losses, norms, expected = ragged.train_plainly(initial, OPTIMIZER, steps, frozen=frozen)
    assert_same_training([each.loss for each in found], params, losses, expected)
    np.testing.assert_allclose([each.grad_norm for each in found], norms, rtol=1e-5)


@pytest.mark.slow
def test_evaluations_have_the_owners_of_a_training_step() -> None:
    from rrfp_jax.runtime.evaluation import EvaluationShapes

    batch = make_batches()[0]
    leaves = [{name: values[m] for name, values in batch.items()} for m in range(NUM_MICROBATCHES)]
    pipeline = make_pipeline(
        make_chunks(2, tied=False), placement=linear(2), optimizer=OPTIMIZER, reduce="messages", **OWNERS
    )
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(batch, evaluation=EvaluationShapes(buckets=leaves[:1], batches=2))
        twice = {name: np.concatenate([values, values[:2]]) for name, values in batch.items()}
        expected = pipeline.evaluate(state, twice).result()
        for _ in range(3):
            found = pipeline.evaluate(state, twice, owners=draw(2, NUM_MICROBATCHES)).result()
            assert (found.loss_sum, found.weight) == (expected.loss_sum, expected.weight)
        state, metrics = pipeline.step(state, batch)
        assert np.isfinite(metrics.result().loss)


@pytest.mark.slow
def test_what_cannot_have_other_owners_is_refused_and_the_run_goes_on() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES // 2))
    batch, given = make_batches()[0], draw(2, NUM_MICROBATCHES)
    cases = [
        ({"data": 2}, given, "replicas were not connected for other owners"),
        (OWNERS, draw(2, 3), "owners are of 2 stages and 3 microbatches, the pipeline has 2 and 4"),
        (OWNERS, given._replace(lost=(1,)), r"units \[1\] are named as lost, and all of them live: leave lost out"),
        ({**OWNERS, "schedule": table, "consume": "strict"}, given, "strict consumption keeps to its table's"),
    ]
    for options, owners, message in cases:
        with make_pipeline(make_chunks(2, tied=False), placement=linear(2), optimizer=OPTIMIZER, **options) as pipeline:
            state = pipeline.init(jax.random.key(1))
            with pytest.raises(ValueError, match=message):
                pipeline.step(state, batch, owners=owners)
            state, metrics = pipeline.step(state, batch)
            assert np.isfinite(metrics.result().loss)
