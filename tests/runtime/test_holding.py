"""Pipelines that nobody closes: at the end of a script, when they are dropped, and in a forked child."""

import gc
import subprocess
import sys
import threading
import time

import jax
import optax
import pytest

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.schedules import linear
from tests.environment import of_child
from tests.test_pipeline import CHUNKS, make_batch, make_pipeline

SCRIPT = """
import os, sys, time, jax
from tests.test_pipeline import layer, loss_chunk, make_batch, make_pipeline
def slow(value):
    return jax.pure_callback(lambda x: (time.sleep(0.01), x)[1], jax.ShapeDtypeStruct(value.shape, value.dtype), value)
pipeline = make_pipeline([layer(0, before=slow), loss_chunk(1)])
state = pipeline.init(jax.random.key(0))
state, metrics = pipeline.step(state, make_batch())
metrics.result()
state, metrics = pipeline.step(state, make_batch())
"""
IN_CHILD = """
if not os.fork():
    for call in (
        lambda: pipeline.step(state, make_batch()),
        lambda: pipeline.evaluate(state, make_batch()),
        metrics.result,
        metrics.done,
        pipeline.wait,
        pipeline.close,
        lambda: pipeline.params(state),
        lambda: pipeline.reordered(),
        lambda: make_pipeline(),
    ):
        try:
            print("no error from", call())
        except RuntimeError as error:
            print("forked" if "forked from" in str(error) else error)
    sys.stdout.flush()
    os._exit(0)
os.wait()
print("parent", metrics.result().step)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT + script]
    environment = of_child() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("ending", "code", "last_line"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("raise RuntimeError('my own')", 1, "RuntimeError: my own")],
    ids=["end", "exit", "error"],
)
def test_a_script_that_ends_in_a_step_ends_with_its_own_code(ending: str, code: int, last_line: str) -> None:
    done = run(ending)
    assert (done.returncode, done.stderr.strip().rpartition("\n")[2]) == (code, last_line)


def test_a_forked_child_is_told_what_it_is_and_the_parent_goes_on() -> None:
    done = run(IN_CHILD)
    assert done.stdout.split("\n") == ["forked"] * 9 + ["parent 1", ""], done.stderr
    assert done.returncode == 0


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rrfp")}


def test_pipelines_that_are_dropped_end_their_threads_and_results_keep_them_open() -> None:
    before = threads()
    kept = []
    for number in range(3):
        pipeline = make_pipeline()
        state = pipeline.init(jax.random.key(0))
        state, metrics = pipeline.step(state, make_batch())
        metrics.result()
        if number == 2:
            kept.append(pipeline.step(state, make_batch())[1])
    del pipeline, state, metrics
    gc.collect()
    until_s = time.monotonic() + 60
    while len(threads() - before) > 3 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert len(threads() - before) == 3  # the loop's, and one for each stage
    assert kept.pop().result().step == 1
    while threads() - before and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.05)
    assert threads() == before


def test_a_pipeline_that_was_never_prepared_can_be_closed() -> None:
    Pipeline(CHUNKS, placement=linear(2), optimizer=optax.sgd(0.1)).close()
