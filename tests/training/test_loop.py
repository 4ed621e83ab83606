"""The loop over a pipeline that only pretends: rows, skipped steps, and how far ahead it enqueues."""

import json
from contextlib import suppress
from itertools import count, repeat
from types import SimpleNamespace

import pytest

from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.runtime import StepResult
from rrfp_jax.tasks import Task, linear
from rrfp_jax.timeline import Span, Timeline
from rrfp_jax.training.loop import TrainingLoop


class FakePipeline:
    """One stage, whose steps end at once; some of them are skipped, and one may fail."""

    placement = linear(1)

    def __init__(self, skipped: frozenset[int] = frozenset(), failing: int | None = None) -> None:
        self._skipped, self._failing = skipped, failing
        self.calls: list[str] = []
        self._clock = count(1)

    def prepare(self, batch) -> None:
        self.calls.append("prepare")

    def step(self, state, batch):
        self.calls.append(f"enqueue {state}")
        return state + 1, SimpleNamespace(result=lambda: self._result(state))

    def _result(self, step: int) -> StepResult:
        self.calls.append(f"result {step}")
        if step == self._failing:
            raise RuntimeError("failed")
        return StepResult(
            step=step,
            loss=2.0,
            weight=100.0,
            grad_norm=1.0,
            skipped=step in self._skipped,
            peak_memory_bytes=(7,),
            timeline=Timeline(1, [Span(step, 0, Task.parse("0F0"), 0.0, 1.0)]),
            ended_s=1e9 + next(self._clock),
        )


@pytest.fixture
def run(tmp_path):
    """Run a loop; give the loop, the rows that it wrote, and what went to the display."""

    def run(pipeline: FakePipeline, num_steps: int, timeline_steps: int = 1):
        shown = []
        with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
            loop = TrainingLoop(
                pipeline,  # type: ignore[arg-type]
                learning_rate=lambda update: update / 10,
                metrics=metrics,
                on_step=shown.append,
                timeline_steps=timeline_steps,
            )
            with suppress(RuntimeError):
                loop.run(0, repeat({}), num_steps)  # type: ignore[arg-type]
        rows = [json.loads(line) for line in metrics.path.read_text().splitlines()]
        metrics.path.unlink()
        assert [row.step for row in shown] == [row["step"] for row in rows]
        return loop, rows

    return run


def test_a_skipped_step_is_counted_and_does_not_move_the_learning_rate(run):
    _, rows = run(FakePipeline(skipped=frozenset({1})), 4)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["skipped"] for row in rows] == [False, True, False, False]
    assert [row["num_skipped"] for row in rows] == [0, 1, 1, 1]
    assert [row["learning_rate"] for row in rows] == [0.0, 0.1, 0.1, 0.2]
    assert [row["step_time_s"] for row in rows[1:]] == [1.0, 1.0, 1.0]
    assert rows[1]["tokens_per_s"] == 100


def test_one_step_is_enqueued_ahead_of_the_results(run):
    pipeline = FakePipeline()
    run(pipeline, 3)
    assert pipeline.calls == [
        *("prepare", "enqueue 0", "enqueue 1", "result 0", "enqueue 2", "result 1", "result 2")
    ]  # fmt: skip


def test_the_timeline_holds_the_last_steps_that_finished(run):
    loop, _ = run(FakePipeline(), 4, timeline_steps=2)
    assert loop.timeline().steps() == [2, 3]
    loop, rows = run(FakePipeline(failing=2), 4, timeline_steps=2)
    assert loop.timeline().steps() == [0, 1]
    assert [row["step"] for row in rows] == [0, 1]
    loop, _ = run(FakePipeline(failing=0), 4)
    assert loop.timeline().spans == []
