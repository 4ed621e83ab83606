"""Replicas that add up by messages and share the optimizer state: each holds two shares, and all train the same."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.programs.chunk import trained_specs
from rrfp_jax.programs.state import state_parts
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.testing import DelayedStage
from rrfp_jax.training.loop import RunSaver
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import plain_model
from tests.test_pipeline_messages import make_batches, pipeline_of, random_delay, trained

SHARED = {"shard_optimizer": True}
CASES: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "data 3": {"data": 3, "layers": (2, 2)},
    "data 4, tied": {"data": 4, "tied": True, "layers": (3, 2)},
    "more replicas than arrays": {"data": 8, "layers": (1,), "num_stages": 1},
    "clipped, split": {"data": 3, "clip_norm": 0.5, "tied": True, "layers": (2, 2), "hint": "bfw"},
    "no agreement on norms": {"data": 3, "skip_nonfinite": False},
    "two chunks per stage": {"data": 3, "layers": (1, 2, 1, 1), "tied": True},
    "tensor 2": {"data": 4, "tensor": 2, "tied": True, "clip_norm": 0.5, "num_stages": 1, "layers": (2, 1)},
    "fsdp 2": {"data": 3, "mesh": {"fsdp": 2}, "clip_norm": 0.5, "num_stages": 1, "layers": (2,)},
}


def batches_for(data: int, num_steps: int = 6) -> list[dict[str, np.ndarray]]:
    return make_batches(num_steps, 2 * data)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_plain_loop(name: str) -> None:
    case, batches = CASES[name], batches_for(CASES[name]["data"])
    losses, params, initial = trained(pipeline_of(**case, **SHARED), batches)
    chunks = plain_model(case.get("layers", (1, 1)), tied=case.get("tied", False))
    optimizer = optax.adamw(3e-3, weight_decay=0.01)
    expected = train_plainly(chunks, initial, optimizer, batches, clip_norm=case.get("clip_norm"))
    assert_same_training(losses, params, *expected)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order() -> None:
    """Those of replicas that hold the whole state may differ: XLA rounds otherwise in programs of other arrays."""
    batches, bits = batches_for(3), []
    pipeline = pipeline_of(data=3, tied=True, layers=(2, 1), deterministic=True, clip_norm=0.5, **SHARED)
    for order in (Ordering(hint="bf"), Ordering(hint="fb", window=1)):
        runtime = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, random_delay))
        bits.append(trained(pipeline.reordered(order, options=runtime), batches))
    assert bits[0][0] == bits[1][0]
    jax.tree.map(np.testing.assert_array_equal, bits[0][1], bits[1][1])


def test_shares_are_even_and_hold_every_array_once() -> None:
    first, last = (trained_specs(chunk) for chunk in plain_model((6, 2), tied=True))
    chunk, other = plain_model((6, 2), tied=True)
    parts = state_parts(chunk, first, optax.adamw(3e-3), 4)
    loads = [0] * 4
    arrays = []
    for part in parts:
        picked = jax.tree.leaves_with_path(part.pick(first))
        arrays += [jax.tree_util.keystr(path) for path, _ in picked]
        loads[part.share] += sum(leaf.size for _, leaf in picked)
    assert sorted(arrays) == sorted(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(first))
    assert max(loads) <= 1.5 * min(loads)
    tied = [part for part in parts if chunk.shared.issuperset(part.layers)]
    assert tied
    assert tied == [
        part for part in state_parts(other, last, optax.adamw(3e-3), 4) if other.shared.issuperset(part.layers)
    ]


@pytest.mark.slow
def test_each_replica_holds_two_shares_and_no_more_than_was_forecast() -> None:
    batches, sizes = batches_for(4, 3), []
    for options in ({}, SHARED):
        with pipeline_of(data=4, layers=(6,), num_stages=1, hint="bf", **options) as pipeline:
            state = pipeline.init(jax.random.key(0))
            for batch in batches:
                state, metrics = pipeline.step(state, batch)
            peaks = metrics.result().peak_memory_bytes
            forecast = [each.peak for each in pipeline.forecast]
            assert all(0 < peak <= most for peak, most in zip(peaks, forecast, strict=True))
            sizes.append([each.optimizer_bytes for _, each in sorted(pipeline.chunk_sizes.items())])
            held = [
                sum(leaf.nbytes for leaf in jax.tree.leaves(each.optimizer_state))
                for _, each in pipeline.chunk_states(state)
            ]
            assert held == sizes[-1]
    assert all(cut <= 0.65 * whole for whole, cut in zip(*sizes, strict=True))


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_left_out_everywhere() -> None:
    batches = batches_for(3, 4)
    spoilt = {**batches[1], "weights": batches[1]["weights"].copy()}
    spoilt["weights"][3, 0, 0] = np.inf
    losses, params, _ = trained(pipeline_of(data=3, **SHARED), [batches[0], spoilt, *batches[2:]])
    expected, expected_params, _ = trained(pipeline_of(data=3, **SHARED), [batches[0], *batches[2:]])
    assert not np.isfinite(losses[1])
    assert [losses[0], *losses[2:]] == expected
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


LAYOUTS: dict[str, dict[str, Any]] = {
    "three shares": {"data": 3, **SHARED},
    "four shares": {"data": 4, **SHARED},
    "whole": {"data": 2},
    "cut by a collective": {"data": 2, "reduce": "collective", **SHARED},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("three shares", "four shares"), ("three shares", "whole"), ("four shares", "cut by a collective"),
     ("whole", "three shares"), ("cut by a collective", "three shares")],
)  # fmt: skip
def test_a_run_is_resumed_with_other_shares(before: str, after: str, tmp_path: Path) -> None:
    case, batches = {"tied": True, "layers": (2, 1)}, make_batches(4, 12)
    losses, params, _ = trained(pipeline_of(**case, **LAYOUTS[before]), batches)
    options: dict[str, Any] = {"every": 2, "minutes": None, "keep": 1}
    with pipeline_of(**case, **LAYOUTS[before]) as pipeline:
        saver, state = RunSaver(tmp_path, pipeline, **options), pipeline.init(jax.random.key(1))
        for batch in batches[:2]:
            state, _ = pipeline.step(state, batch)
        saver.save(state, {})
        outcome = saver.checkpoints.close()
        assert outcome is not None
        assert outcome.failure is None
    with pipeline_of(**case, **LAYOUTS[after]) as pipeline:
        saver = RunSaver(tmp_path, pipeline, **options)
        found = saver.checkpoints.newest()
        assert found is not None
        state, own = saver.restore(found), []
        for batch in batches[2:]:
            state, metrics = pipeline.step(state, batch)
            own.append(metrics)
        resumed = [metrics.result().loss for metrics in own]
        assert_same_training(resumed, jax.tree.map(np.array, pipeline.params(state)), losses[2:], params)
        saver.checkpoints.close()


@pytest.mark.slow
def test_a_share_goes_to_another_replica_with_its_state() -> None:
    """As after the loss of replica 1, which held shares 0 and 1."""
    stages: list[Any] = []
    wrap = {"wrap_stage": lambda stage: stages.append(stage) or stage}
    with pipeline_of(data=3, tensor=2, layers=(2,), num_stages=1, **wrap, **SHARED) as pipeline:
        state = pipeline.init(jax.random.key(0))
        for batch in batches_for(3, 2):
            state, _ = pipeline.step(state, batch)
        before = [held for _, held in pipeline.chunk_states(state)]
        assert [sorted(stage.held_shares) for stage in stages] == [[0, 2], [0, 1], [1, 2]]
        for share, source, target in ((0, 0, 2), (1, 2, 0)):
            frames = stages[source].share_frames(share, has_state=True)
            stages[target].put_share(share, [memoryview(bytes(frame)) for frame in frames], has_state=True)
        assert [sorted(stages[replica].held_shares) for replica in (0, 2)] == [[0, 1, 2]] * 2
        after = [held for _, held in pipeline.chunk_states(state)]
        stages[0].drop_share(1)
        stages[2].drop_share(0)  # as replica 1 is back
        again = [held.optimizer_state for _, held in pipeline.chunk_states(state)]
        jax.tree.map(np.testing.assert_array_equal, again, [held.optimizer_state for held in before])
    jax.tree.map(np.testing.assert_array_equal, after[0].optimizer_state, after[2].optimizer_state)
    for own, other in ((after[0].params, after[2].params), (after[0].params, before[1].params)):
        jax.tree.map(np.testing.assert_array_equal, own, other)
    places = (jax.tree.map(lambda leaf: leaf.sharding.spec, held.optimizer_state) for held in (after[0], after[2]))
    assert len({str(place) for place in places}) == 1
