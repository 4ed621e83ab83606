"""A stage of programs: what it hands out where a task is launched before the one before it has ended."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from rrfp_jax.arbitration import Message, MessageKind, StepRules
from rrfp_jax.arbitration.replicas import Replication
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.program_stage import ProgramStage
from rrfp_jax.tasks import Task, chain, linear


def tied_stage() -> ProgramStage:
    """Stage 1 of two that share a layer, of which 3 is accumulated here and 4 there."""
    graph = replace(chain(2, 1), shared=((0, 1),))
    programs: Any = SimpleNamespace(
        prepare=lambda params: (),
        sharding=SingleDeviceSharding(jax.devices()[0]),
        shared_layers=lambda accumulators: {"table": accumulators["table"]},
        updates=SimpleNamespace(reduce=_add_all),
    )
    stage = ProgramStage(
        graph,
        linear(2),
        1,
        programs={1: programs},
        states={1: ChunkState({}, (), {"table": np.float32(3)})},
        update_rules=UpdateRules(),
        step_rules=StepRules(),
        copies=Replication(num_chunks=2, num_microbatches=1, num_replicas=1),
        replicas=None,
        meter=SimpleNamespace(ran=lambda *_, **__: None),  # type: ignore[arg-type]
        ship=lambda value, receiver, message, bucket, step: value,
        wishes=SimpleNamespace(),  # type: ignore[arg-type]
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
