"""Optimizer state in host memory: not a bit of training changes, and the devices hold less by the forecast's bytes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.programs import shardings
from rrfp_jax.programs.chunk import trained_specs
from rrfp_jax.programs.update_functions import averaged, on_host
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.schedules import linear, looped
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.programs.toys import plain_model
from tests.test_pipeline_layouts import make_chunks
from tests.test_pipeline_training import make_batches

NUM_STEPS = 3
BATCHES = make_batches(NUM_STEPS)
OPTIMIZER = averaged(optax.adamw(3e-2), 0.8)
DEFAULTS: dict[str, Any] = {"clip_norm": 1.0, "deterministic": True, "progress_deadline_s": 60}


def kinds_of(pipeline: Any, state: Any) -> set[tuple[bool, str]]:
    """Whether an array of the state is a scalar, and in which memory it lies."""
    states = [held.optimizer_state for _, held in pipeline.chunk_states(state)]
    return {(not leaf.shape, str(leaf.sharding.memory_kind)) for leaf in jax.tree.leaves(states)}


def train(chunks: Any, *, moved: bool, steps: slice = slice(None), folder: Path | None = None, **options: Any) -> Any:
    """Losses, parameters, averages and forecasts; goes on from a checkpoint in a folder, and saves there."""
    optimizer = on_host(OPTIMIZER) if moved else OPTIMIZER
    with make_pipeline(chunks, optimizer=optimizer, **DEFAULTS, **options) as pipeline:
        saver = None if folder is None else RunSaver(folder, pipeline, every=None, minutes=None, keep=1)
        found = None if saver is None else saver.checkpoints.newest()
        state = pipeline.init(jax.random.key(1)) if found is None or saver is None else saver.restore(found)
        shapes = EvaluationShapes(buckets=[{name: leaf[0] for name, leaf in BATCHES[0].items()}])
        pipeline.prepare(BATCHES[0], evaluation=None if options.get("reduce") else shapes)
        results = []
        for batch in BATCHES[steps]:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result())
        params = jax.tree.map(np.array, pipeline.params(state))
        assert kinds_of(pipeline, state) == {(True, "device"), (False, "pinned_host" if moved else "device")}
        averages = None
        if not options.get("reduce"):
            with pipeline.averaged(state):
                averages = (
                    jax.tree.map(np.array, pipeline.params(state)),
                    pipeline.evaluate(state, BATCHES[0]).result().loss,
                )
        if saver is not None:
            saver.save(state, {})
            saver.checkpoints.close()
        return [result.loss for result in results], params, averages, pipeline.forecast, results[-1]


def check_same(chunks: Any, **options: Any) -> tuple[Any, Any]:
    plain, moved = (train(chunks, moved=moved, **options) for moved in (False, True))
    jax.tree.map(np.testing.assert_array_equal, moved[:3], plain[:3])
    return plain, moved


def test_the_state_lies_on_the_host_and_the_forecast_tells_its_bytes() -> None:
    chunks = plain_model((1, 1))
    # A window of 1, since peaks are compared: how many microbatches are in flight depends on the moment.
    plain, moved = check_same(chunks, placement=linear(2), window=1)
    for stage, (with_state, without) in enumerate(zip(plain[3], moved[3], strict=True)):
        numbers = sum(leaf.size for leaf in jax.tree.leaves(trained_specs(chunks[stage])))
        assert without.host_peak == 3 * 4 * numbers  # two moments and the average
        # One more count of updates for every layer.
        assert with_state.fixed - without.fixed == pytest.approx(without.host_peak, abs=100)
        assert moved[4].peak_host_bytes[stage] == without.host_peak
    assert all(one > other for one, other in zip(plain[4].peak_memory_bytes, moved[4].peak_memory_bytes, strict=True))


def test_devices_without_host_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardings, "HOST_MEMORY", "far_host")
    pipeline = make_pipeline(plain_model((1,)), placement=linear(1), optimizer=on_host(OPTIMIZER))
    with pipeline, pytest.raises(ValueError, match="on the host needs memory of kind far_host, which JAX does not"):
        pipeline.init(jax.random.key(0))


def test_steps_that_overlap_take_neither_averages_nor_spikes_nor_state_on_the_host() -> None:
    for optimizer, words in ((OPTIMIZER, "keep no averages"), (on_host(optax.sgd(0.1)), "need their state on the dev")):
        with pytest.raises(ValueError, match=words):
            make_pipeline(plain_model((1,)), placement=linear(1), optimizer=optimizer, delay=1)
    with pytest.raises(ValueError, match="are not judged: leave spike_deviations or the delay out"):
        UpdateRules(delay=1, spike_deviations=6.0)


LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages, split": {"placement": linear(4), "hint": "bfw"},
    "2 stages of 2 chunks": {"placement": looped(2, 2)},
    "replicas that share the state": {"placement": looped(2, 2), "data": 2, "shard_optimizer": True},
    "replicas that hold shares": {"placement": looped(2, 2), "data": 4, "shard_optimizer": True, "reduce": "messages"},
    "tensor": {"placement": linear(4), "mesh": {"tensor": 2}},
    "fsdp": {"placement": looped(2, 2), "mesh": {"fsdp": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_no_bit_changes_in_any_layout(options: dict[str, Any]) -> None:
    check_same(make_chunks(4, tied=True), **options)


@pytest.mark.slow
def test_a_checkpoint_of_one_kind_goes_on_as_the_other(tmp_path: Path) -> None:
    chunks = make_chunks(4, tied=True)
    whole = train(chunks, moved=False, placement=linear(4))
    losses = []
    for number, moved in enumerate((True, False, True)):
        part = train(
            chunks,
            moved=moved,
            steps=slice(number, number + 1),
            folder=tmp_path,
            placement=(linear(4), looped(2, 2))[number % 2],
        )
        losses += part[0]
    np.testing.assert_allclose(losses, whole[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), part[1:3], whole[1:3])
