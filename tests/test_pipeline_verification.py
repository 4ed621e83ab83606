"""Steps that verify: they find a replica that computes other bits, name it, and leave no trace in training."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.runtime import consistency
from rrfp_jax.schedules import Placement, linear, looped
from tests import ragged
from tests.pipelines import make_pipeline
from tests.spoilt import of_input_gradients, of_outputs, of_sums, spoil
from tests.test_pipeline_evaluation import make_batch, make_chunks, table
from tests.test_pipeline_random_keys import BATCH, CHUNK

OPTIMIZER = optax.adamw(3e-3)


def with_spoilt(unit: int, *how: Any, **options: Any) -> Any:
    """A wrapper of stages that spoils a program of one of them."""

    def wrap(stage: Any) -> Any:
        if stage._stage == unit:
            spoil(stage, *how, **options)
        return stage

    return wrap


def one(batch: Any, microbatch: int = 0) -> Any:
    return {name: [leaf[microbatch]] for name, leaf in batch.items()}


def verify(pipeline: Pipeline, num_steps: int = 2) -> str | None:
    """Train some steps, verifying before each and behind the last one; returns the first difference."""
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0))
        for step in range(num_steps + 1):
            if (found := pipeline.verify(state, one(make_batch(7))).difference) is not None:
                return f"{step}: {found}"
            if step < num_steps:
                state, _ = pipeline.step(state, make_batch(step))
    return None


@pytest.mark.one_in(8)
@pytest.mark.parametrize("reduce", ["collective", "messages"])
@pytest.mark.parametrize(
    ("unit", "program", "place", "told"),
    [
        (2, "forward", of_outputs, "outputs in task 0F"),
        (1, "backward", of_sums, "parameter gradients in task 1B"),
        (3, "backward", of_input_gradients, "input gradients in task 1B"),
    ],
)
def test_a_bit_that_flips_in_one_of_two_replicas(reduce: str, unit: int, program: str, place: Any, told: str) -> None:
    # Two microbatches in each of the first two steps, and one in each verification.
    wrap = with_spoilt(unit, program, place, from_call=4)
    options: dict[str, Any] = {"placement": linear(2), "data": 2, "optimizer": OPTIMIZER, "reduce": reduce}
    found = verify(make_pipeline(make_chunks(2), **options, wrap_stage=wrap), 3)
    stage = unit % 2
    units = f"stage {stage}, replica 0 (rank 0, cpu) and stage {stage}, replica 1 (rank 0, cpu)"
    assert found == f"2: {units} made different {told} of the same inputs"


@pytest.mark.slow
def test_of_three_replicas_the_one_is_named() -> None:
    pipeline = make_pipeline(
        make_chunks(1), placement=linear(1), data=3, optimizer=OPTIMIZER, reduce="messages",
        wrap_stage=with_spoilt(1, "forward", of_outputs),
    )  # fmt: skip
    batch = {name: np.concatenate([leaf, leaf[:2]]) for name, leaf in make_batch(0).items()}
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(batch)
        found = pipeline.verify(state, one(batch)).difference
    assert found == "stage 0, replica 1 (rank 0, cpu) made other outputs in task 0F than the 2 other replicas"


@pytest.mark.slow
def test_one_replica_finds_a_fault_that_comes_and_goes() -> None:
    wrap = with_spoilt(1, "forward", of_outputs, from_call=1)
    found = verify(make_pipeline(make_chunks(2), placement=linear(2), optimizer=OPTIMIZER, wrap_stage=wrap), 0)
    assert found == "0: stage 1 (rank 0, cpu) made different outputs in task 1F of the same inputs"


@pytest.mark.slow
@pytest.mark.parametrize("is_spoilt", [True, False])
def test_sums_that_the_devices_make(is_spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerators do: the sums are begun before accumulators are taken over, and read at the end of the step."""
    monkeypatch.setattr(consistency, "is_on_host", lambda _: False)
    monkeypatch.setattr(consistency, "_HOST_MEMORY", ())
    wrap = with_spoilt(1, "backward", of_sums, from_call=3) if is_spoilt else None
    options: dict[str, Any] = {"placement": linear(2), "data": 2, "optimizer": OPTIMIZER, "reduce": "messages"}
    found = verify(make_pipeline(make_chunks(2), **options, wrap_stage=wrap), 2)
    assert (found or "").startswith("1: stage 1, replica 0 ") == is_spoilt


def test_all_replicas_get_the_same_random_keys() -> None:
    with make_pipeline([CHUNK], placement=linear(1), data=2, optimizer=OPTIMIZER) as pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(BATCH)
        for _ in range(4):
            assert pipeline.verify(state, one(BATCH)).difference is None
            state, _ = pipeline.step(state, BATCH)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"reduce": "messages", "window": 1}], ids=str)
def test_microbatches_that_skip_encoders(options: dict[str, Any]) -> None:
    steps = ragged.make_steps(4, 4)
    several = {"placement": Placement((0, 1, 0, 1, 1)), "edges": ragged.EDGES, "data": 2, "optimizer": OPTIMIZER}
    with make_pipeline(ragged.CHUNKS, **several, **options) as pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(ragged.as_batch(steps[0]), buckets=ragged.all_buckets())
        for number, step in enumerate(steps):
            for microbatch in step[:2]:
                assert pipeline.verify(state, ragged.as_batch([microbatch])).difference is None
            state, metrics = pipeline.step(state, ragged.as_batch(step))
            assert metrics.result().step == number


def train(pipeline: Pipeline, *, verifies: bool, num_steps: int = 4) -> Any:
    """Losses, parameters and optimizer state."""
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0))
        losses = []
        for step in range(num_steps):
            if verifies:
                assert pipeline.verify(state, one(make_batch(7))).difference is None
            state, metrics = pipeline.step(state, make_batch(step))
            losses.append(metrics.result().loss)
        held = [(each.params, each.optimizer_state) for _, each in pipeline.chunk_states(state)]
        return losses, jax.tree.map(np.array, held)


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("per_stage", "options"),
    [
        (1, {"data": 2}),
        (2, {"data": 2, "reduce": "messages", "backward": "split", "hint": "bfw"}),
        (1, {"shard_optimizer": True, "data": 2}),
        (1, {"schedule": "1f1b", "consume": "strict"}),
        (2, {"schedule": "zb-v"}),
        (1, {"skip_nonfinite": False, "data": 2}),
        (1, {"tensor": 2, "data": 2}),
        (1, {"window": "100KiB", "data": 2}),
    ],
    ids=str,
)
def test_training_is_the_same_bit_for_bit(per_stage: int, options: dict[str, Any]) -> None:
    placement = looped(2, per_stage)
    if (name := options.get("schedule")) is not None:
        options = {**options, "schedule": table(name)}
        placement = options["schedule"].placement
    make: Any = {"placement": placement, "optimizer": OPTIMIZER, "deterministic": True, **options}
    results = [
        train(make_pipeline(make_chunks(2 * per_stage, tie_embeddings=True), **make), verifies=verifies)
        for verifies in (False, True)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_what_cannot_be_verified_is_refused() -> None:
    chunks = make_chunks(2)
    with make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER) as pipeline:
        state = pipeline.init(jax.random.key(1))
        with pytest.raises(RuntimeError, match="call prepare or step first"):
            pipeline.verify(state, one(make_batch(0)))
        pipeline.prepare(make_batch(0))
        with pytest.raises(ValueError, match="the batch has 4 microbatches, and a verification runs one"):
            pipeline.verify(state, make_batch(0))
    with (
        make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, trains=False) as pipeline,
        pytest.raises(ValueError, match="it has nothing to verify"),
    ):
        pipeline.verify(pipeline.init(jax.random.key(1)), one(make_batch(0)))
