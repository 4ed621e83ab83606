"""A stage of programs: what it hands out where a task is launched before the one before it has ended."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from rrfp_jax.core import Message, MessageKind, StepRules
from rrfp_jax.core.replicas import Replication
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.stage import ProgramStage
from rrfp_jax.schedules import Task, chain, linear
from tests.environment import of_child

ROOT = Path(__file__).parents[2]


def tied_stage(reduce: Any = None) -> ProgramStage:
    """Stage 1 of two that share a layer, of which 3 is accumulated here and 4 there."""
    graph = replace(chain(2, 1), shared=((0, 1),))
    programs: Any = SimpleNamespace(
        prepare=lambda params: (),
        sharding=SingleDeviceSharding(jax.devices()[0]),
        shared_layers=lambda accumulators: {"table": accumulators["table"]},
        updates=SimpleNamespace(reduce=reduce or _add_all),
    )
    stage = ProgramStage(
        1,
        {1: programs},
        {1: ChunkState({}, (), {"table": np.float32(3)})},
        graph=graph,
        placement=linear(2),
        copies=Replication(num_chunks=2, num_microbatches=1, num_replicas=1),
        update_rules=UpdateRules(),
        step_rules=StepRules(),
        stop_requests=SimpleNamespace(),  # type: ignore[arg-type]
        replicas=None,
        meter=SimpleNamespace(ran=lambda *_, **__: None),  # type: ignore[arg-type]
        send_array=lambda value, receiver, message, bucket, step: value,
    )
    stage.begin(0, StepBatch(), graph)
    return stage


def _add_all(accumulators: Any, shared: Any) -> tuple[Any, Any]:
    return {"table": sum(layers["table"] for layers in shared)}, np.float32(49)


def test_others_get_what_was_accumulated_here_also_when_r_was_launched_before_it_is_sent() -> None:
    """R may follow the last backward before that was seen to end, and only then do others get their part."""
    stage = tied_stage()
    stage.accept(0, Message(MessageKind.SHARED, 0, 1), {"table": np.float32(4)})
    launched = stage.launch(0, Task.parse("1R"))
    assert stage.states[1].accumulators["table"] == 7
    assert stage.payload(0, Message(MessageKind.SHARED, 1, 0)) == {"table": 3}
    launched.wait()


def test_a_norm_is_reported_once_its_task_has_ended() -> None:
    stage = tied_stage()
    stage.accept(0, Message(MessageKind.SHARED, 0, 1), {"table": np.float32(4)})
    launched = stage.launch(0, Task.parse("1R"))
    report = Message(MessageKind.REPORT, 1, 0)
    assert stage.payload(0, report)["squared_norms"] == b""
    launched.wait()
    assert len(stage.payload(0, report)["squared_norms"]) > 0


def test_a_task_that_has_failed_before_it_is_waited_for_has_failed() -> None:
    """What a program returns that fails on its devices is "ready", and only who blocks on it is told."""
    command = [sys.executable, "-c", _FAILING]
    done = subprocess.run(command, check=False, cwd=ROOT, env=of_child(), capture_output=True, text=True)
    assert done.stdout == "ready: True\nraised: the device failed\n", done.stdout + done.stderr


_FAILING = """
import os, time
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "true"  # on other devices that is so by itself
import jax, jax.numpy as jnp
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.schedules import Task
from tests.runtime.test_stage import tied_stage

def fail(_):
    raise RuntimeError("the device failed")

# what waits for a program that is long under way is not run within its launch
start = jnp.ones((50, 50))
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 5000, lambda _, x: x @ x * 0.02, x)).lower(start).compile()
fails = lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])
failing = jax.jit(fails).lower(start).compile()
norms = []

def reduce(accumulators, shared):
    norms.append(failing(slow(start)))
    return accumulators, norms[0]

stage = tied_stage(reduce)
stage.accept(0, Message(MessageKind.SHARED, 0, 1), {"table": 4.0})
launched = stage.launch(0, Task.parse("1R"))
until_s = time.monotonic() + 30
while not norms[0].is_ready() and time.monotonic() < until_s:
    time.sleep(0.01)
print("ready:", norms[0].is_ready(), flush=True)
try:
    launched.wait()
except jax.errors.JaxRuntimeError as error:
    print("raised:", "the device failed" if "the device failed" in str(error) else error, flush=True)
os._exit(0)  # JAX would tell of the failure once more
"""
