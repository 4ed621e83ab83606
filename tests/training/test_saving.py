"""When a run saves, and what a save that failed means for the next one."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax import Chunk, Layout, Pipeline, Process, linear
from rrfp_jax.pipeline import PipelineState
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.training import loop
from rrfp_jax.training.loop import RunSaver


def loss(params, inputs, leaves, *, key=None):
    return jnp.sum((leaves["x"] @ params["layer"]["w"]) ** 2), jnp.float32(len(leaves["x"]))


@pytest.fixture
def pipeline():
    chunk = Chunk(
        name="layer",
        init=lambda key: {"layer": {"w": jnp.ones((2, 2))}},
        apply=loss,
        leaves=("x",),
    )
    with Pipeline([chunk], placement=linear(1), optimizer=optax.sgd(0.1)) as made:
        yield made


def test_a_save_that_failed_is_no_last_save(pipeline, tmp_path: Path, monkeypatch, caplog) -> None:
    problems = [OSError("the disk is full"), None, None, AssertionError("saved once more")]

    def before_commit() -> None:
        if (problem := problems.pop(0)) is not None:
            raise problem

    monkeypatch.setattr(loop, "_AGAIN_S", 0.0)
    saver = RunSaver(tmp_path, pipeline, every=None, minutes=30.0, keep=1, before_commit=before_commit)
    state: PipelineState = pipeline.init(jax.random.key(0))
    with caplog.at_level(logging.WARNING):
        saver.save(state, {})
        failed = saver.checkpoints.wait()
    assert failed is not None
    assert failed.failure is not None
    assert saver.is_time()  # and not half an hour later
    saver.save(state, {})
    saved = saver.checkpoints.wait()
    assert saved is not None
    assert saved.failure is None
    assert not saver.is_time()
    saver.save(state, {})  # which is there already
    saver.checkpoints.close()
    assert len(problems) == 1


@pytest.mark.parametrize("reduce", ["collective", "messages"])
@pytest.mark.parametrize("of_state", [False, True])
def test_a_save_tells_of_a_bit_that_flipped_in_one_replica(
    reduce: str, of_state: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = Chunk(name="layer", init=lambda key: {"layer": {"w": jnp.ones((2, 2))}}, apply=loss, leaves=("x",))
    made = Pipeline(
        [chunk],
        placement=linear(1),
        process=Process(Layout(num_stages=1, data=2)),
        optimizer=optax.sgd(0.01, momentum=0.9),
        updates=UpdateRules(reduce=reduce),
    )
    with made as pipeline, caplog.at_level(logging.ERROR):
        saver = RunSaver(tmp_path, pipeline, every=1, minutes=None, keep=2)
        state: PipelineState = pipeline.init(jax.random.key(0))
        for _ in range(2):
            state, metrics = pipeline.step(state, {"x": np.ones((4, 3, 2), np.float32)})
            metrics.result()
            saver.save(state, {})
        assert pipeline.differing_copies(state) is None
        assert not caplog.messages
        held = pipeline._held(state).chunks[1]
        tree = held.optimizer_state if of_state else held.params
        leaves, structure = jax.tree.flatten(tree)
        place = next(place for place, leaf in enumerate(leaves) if leaf.shape == (2, 2))
        flipped = np.array(leaves[place])
        flipped.view(np.uint32)[1, 0] ^= 1 << 16
        leaves[place] = jax.device_put(flipped, leaves[place].sharding)
        if of_state:
            held.optimizer_state = jax.tree.unflatten(structure, leaves)
        else:
            held.params = jax.tree.unflatten(structure, leaves)
        state, metrics = pipeline.step(state, {"x": np.ones((4, 3, 2), np.float32)})
        metrics.result()
        saver.save(state, {})
        saver.checkpoints.close()
    (told,) = caplog.messages
    assert told.startswith("after 3 steps stage 0: ")
    assert "differs between chunk 0 of replica 0 on rank 0" in told
    assert "and chunk 0 of replica 1 on rank 0" in told
