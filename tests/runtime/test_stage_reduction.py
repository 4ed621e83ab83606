"""Where the replicas of a stage meet: one launch for all, no lock held meanwhile, and nobody waits for who failed."""

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rrfp_jax.core import Message, MessageKind, StepRules
from rrfp_jax.core.replicas import Replication, replicated_graph, replicated_placement
from rrfp_jax.programs.agreement import StageReport
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.programs.microbatch_programs import ProgramCall
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.stage import ProgramStage
from rrfp_jax.runtime.stage_reduction import StageReplicas
from rrfp_jax.schedules import Task, TaskKind, chain, looped

PATIENCE_S = 20.0


class Caught(threading.Thread):
    """A thread that keeps what its function returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def end(self) -> "Caught":
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the thread still waits"
        return self


def barrier_of(num_threads: int) -> StageReplicas:
    return StageReplicas({}, {}, tuple(range(num_threads)))


def meet(barrier: StageReplicas, what: str, who: int, launch: Callable[[dict[int, Any]], dict[int, Any]]) -> Any:
    return barrier.meet(what, who, 10 * who, launch)


def test_the_last_to_come_launches_once_with_what_all_have_brought() -> None:
    barrier, launches = barrier_of(3), []

    def launch(arrived: dict[int, Any]) -> dict[int, Any]:
        launches.append(arrived)
        return {who: brought + 1 for who, brought in arrived.items()}

    for what in ("R", "U"):
        threads = [Caught(lambda who=who, what=what: meet(barrier, what, who, launch)) for who in (2, 0, 1)]
        assert [thread.end().result for thread in threads] == [21, 1, 11]
    assert launches == [{0: 0, 1: 10, 2: 20}] * 2


def test_others_may_meet_while_a_launch_takes_long() -> None:
    barrier = barrier_of(2)

    def launch(arrived: dict[int, Any]) -> dict[int, Any]:
        inner = [Caught(lambda who=who: meet(barrier, "other", who, dict)) for who in (0, 1)]
        assert [thread.end().result for thread in inner] == [0, 10]
        return arrived

    threads = [Caught(lambda who=who: meet(barrier, "one", who, launch)) for who in (0, 1)]
    assert [thread.end().result for thread in threads] == [0, 10]


def test_what_the_launch_raises_is_raised_for_all() -> None:
    barrier = barrier_of(2)

    def launch(arrived: dict[int, Any]) -> dict[int, Any]:
        raise ValueError("no memory")

    threads = [Caught(lambda who=who: meet(barrier, "one", who, launch)) for who in (0, 1)]
    assert [str(thread.end().error) for thread in threads] == ["no memory"] * 2


def test_a_broken_barrier_lets_everybody_go() -> None:
    barrier, error = barrier_of(2), RuntimeError("a task failed")
    waiting = Caught(lambda: meet(barrier, "one", 0, dict))
    while "one" not in barrier._open:
        pass
    barrier.abort(error)
    assert waiting.end().error is error
    with pytest.raises(RuntimeError, match="a task failed"):
        meet(barrier, "later", 1, dict)


def make_stage(
    programs: Any,
    num_microbatches: int,
    replica: int = 0,
    replicas: StageReplicas | None = None,
    *,
    num_chunks: int = 1,
) -> Any:
    """A stage with emulated programs, the same for all of its chunks."""
    num_replicas = 1 if replicas is None else 2
    graph = replicated_graph(chain(num_chunks, num_microbatches), num_replicas)
    copies = Replication(num_chunks=num_chunks, num_microbatches=num_microbatches, num_replicas=num_replicas)
    placement = replicated_placement(looped(1, num_chunks), num_replicas)
    chunks = placement.chunks_of_stage[replica]
    stage = ProgramStage(
        replica,
        dict.fromkeys(chunks, programs),
        {chunk: ChunkState({}, (), {}) for chunk in chunks},
        graph=graph,
        placement=placement,
        copies=copies,
        update_rules=UpdateRules(),
        step_rules=StepRules(),
        stop_requests=SimpleNamespace(decide=lambda stage, step: (False, False)),
        replicas=replicas,
        meter=SimpleNamespace(ran=lambda *_, **__: None),
        send_array=lambda value, receiver, message, bucket, step: value,
    )
    stage.begin(0, StepBatch(buckets=[0] * graph.num_microbatches), graph)
    return stage


def programs_with(forward: Callable[..., Any]) -> Any:
    sharding = SingleDeviceSharding(jax.devices()[0])
    call = ProgramCall(forward, (), lambda results, _: results)  # type: ignore[arg-type]
    of_bucket = SimpleNamespace(forward_call=lambda *_, **__: call, leaves=())
    return SimpleNamespace(prepare=lambda params: (), of=lambda bucket: of_bucket, sharding=sharding)


def fail(*_: Any, **__: Any) -> Any:
    raise ValueError("a forward failed")


@pytest.mark.parametrize("when", ["launched", "waited for"])
def test_a_task_that_fails_lets_the_other_replicas_go(when: str) -> None:
    broken = SimpleNamespace(is_ready=lambda: False, block_until_ready=fail, copy_to_host_async=lambda: None)
    replicas = StageReplicas({0: SimpleNamespace()}, {}, (0, 1))
    forward = fail if when == "launched" else lambda *_, **__: ((broken, broken), ())
    first, second = (make_stage(programs_with(forward), 1, replica, replicas) for replica in (0, 1))
    waiting = Caught(lambda: first.launch(0, Task(TaskKind.R, 0)))
    with pytest.raises(ValueError, match="a forward failed"):
        second.launch(0, Task(TaskKind.F, 1, 1)).wait()
    assert str(waiting.end().error) == "a forward failed"


@pytest.mark.parametrize("what", ["losses", "norms"])
def test_a_report_may_be_made_while_others_add_to_it(what: str) -> None:
    """The event loop reads what the compute thread writes: here a task ends between any two lines of the reader."""
    outputs, norm, count = (np.asarray(np.float32(1)), np.asarray(np.float32(2))), np.float32(3), 40
    programs = programs_with(lambda *_, **__: (outputs, ()))
    programs.updates = SimpleNamespace(reduce=lambda accumulators, shared: (accumulators, norm))
    if what == "losses":
        stage, tasks = make_stage(programs, count), iter([Task(TaskKind.F, 0, m) for m in range(count)])
    else:
        stage, tasks = make_stage(programs, 1, num_chunks=count), iter([Task(TaskKind.R, c) for c in range(count)])
    for _ in range(4):
        stage.launch(0, next(tasks)).wait()

    def meanwhile(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith("runtime/stage.py") and (task := next(tasks, None)) is not None:
            stage.launch(0, task).wait()
        return meanwhile

    before = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        report = StageReport.from_plain(stage.payload(0, Message(MessageKind.REPORT, 0, 0)))
    finally:
        sys.settrace(before)
    told, other = (report.losses, report.squared_norms)[:: 1 if what == "losses" else -1]
    assert len(told) > 4
    assert not other
    number = range(len(told))
    assert sorted(told) == ([(m, 0, 1.0, 2.0) for m in number] if what == "losses" else [(c, 3.0) for c in number])
