"""When a run saves, and what a save that failed means for the next one."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from rrfp_jax import Chunk, Pipeline, linear
from rrfp_jax.pipeline import PipelineState
from rrfp_jax.training import loop
from rrfp_jax.training.loop import RunSaver


def loss(params, inputs, leaves):
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
    problems = [OSError("the disk is full"), None, AssertionError("saved once more")]

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
