"""The loop over a pipeline that only pretends: rows, skipped steps, how far ahead it enqueues, and when it saves."""

import json
import re
import time
from contextlib import closing, suppress
from itertools import count, repeat
from types import SimpleNamespace

import pytest

from rrfp_jax.data import BrokenData
from rrfp_jax.layout import Layout
from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.pipeline import PipelineState
from rrfp_jax.runtime import StepResult
from rrfp_jax.runtime.consistency import Verification
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Task
from rrfp_jax.schedules.timeline import Span, Timeline
from rrfp_jax.training.loop import TrainingLoop


class FakePipeline:
    """One stage, whose steps end at once; some of them are skipped, and one may fail."""

    layout, updates = Layout(num_stages=1), UpdateRules()

    def __init__(self, skipped: frozenset[int] = frozenset(), failing: int | None = None) -> None:
        self.process = Process(self.layout)
        self._skipped, self._failing = skipped, failing
        self.calls: list[str] = []
        self._clock = count(1)

    def prepare(self, batch) -> None:
        self.calls.append("prepare")

    def step(self, state, batch):
        self.calls.append(f"enqueue {state.step}")
        return PipelineState(state.step + 1), SimpleNamespace(result=lambda: self._result(state.step))

    def _result(self, step: int) -> StepResult:
        self.calls.append(f"result {step}")
        if step == self._failing:
            raise RuntimeError("failed")
        stop, save = self.process.stop_requests.decide(0, step)
        timeline = Timeline(1, [Span(step, 0, Task.parse("0F0"), 0.0, 1.0)])
        return StepResult(
            step=step,
            loss=2.0,
            weight=100.0,
            grad_norm=1.0,
            skipped=step in self._skipped,
            peak_memory_bytes=(7,),
            peak_host_bytes=(0,),
            lost_units=(),
            timeline=timeline,
            sums=timeline.sums(),
            stop=stop,
            save=save,
            ended_s=1e9 + next(self._clock),
            means={"router_loss": 0.5},
        )


class FakeSaver:
    """Notes the steps at which it is told to save, with the number of skipped updates."""

    def __init__(self, every: int | None = None, time_at: int | None = None, spoilt: int = 0) -> None:
        self._spoilt = spoilt
        """How many saves losses spoil at the end."""
        self._every, self._time_at, self._num_asked = every, time_at, 0
        self.saved: list[tuple[int, int]] = []
        self.took_back: list[int] = []
        """The steps after which lost ranks may have come back."""

    def is_time(self) -> bool:
        self._num_asked += 1
        return self._num_asked == self._time_at

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def save(self, state: PipelineState, host) -> None:
        self.saved.append((state.step, host["num_skipped"]))

    def take_back(self, state: PipelineState) -> None:
        assert self.saved[-1][0] == state.step, "lost ranks come back with the state that was saved"
        self.took_back.append(state.step)

    def must_repeat(self) -> bool:
        self._spoilt -= 1
        return self._spoilt >= 0


@pytest.fixture
def run(tmp_path):
    """Run a loop; give the loop, the rows that it wrote, and what went to the display."""

    def run(
        pipeline: FakePipeline,
        num_steps: int,
        stop_at: int | None = None,
        batches=None,
        **options,
    ):
        shown = []
        with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
            loop = TrainingLoop(
                pipeline,  # type: ignore[arg-type]
                learning_rate=lambda update: update / 10,
                metrics=metrics,
                on_step=lambda row: (shown.append(row), loop.stop() if row.step == stop_at else None),
                **options,
            )
            with suppress(RuntimeError):
                loop.run(PipelineState(0), batches or repeat({}), num_steps)
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
    assert rows[1]["means"] == {"router_loss": 0.5}


def test_goodput_is_the_time_of_the_steps_over_that_since_the_launch(run):
    _, rows = run(FakePipeline(), 3, launched_s=time.time() - 4e9)
    spent_s = [sum(row["step_time_s"] for row in rows[: number + 1]) for number in range(3)]
    assert [row["goodput"] for row in rows] == pytest.approx([spent / 4e9 for spent in spent_s])
    loop, _ = run(FakePipeline(), 3)
    assert loop.goodput == 1.0, "this clock runs ahead of that of the host"


def test_one_step_is_enqueued_ahead_of_the_results(run):
    pipeline = FakePipeline()
    run(pipeline, 3)
    assert pipeline.calls == [
        *("prepare", "enqueue 0", "enqueue 1", "result 0", "enqueue 2", "result 1", "result 2")
    ]  # fmt: skip


def test_the_timeline_holds_the_last_step_that_finished(run):
    loop, _ = run(FakePipeline(), 4)
    assert loop.timeline.steps() == [3]
    loop, rows = run(FakePipeline(failing=2), 4)
    assert loop.timeline.steps() == [1]
    assert [row["step"] for row in rows] == [0, 1]
    loop, _ = run(FakePipeline(failing=0), 4)
    assert loop.timeline.spans == []


@pytest.mark.parametrize(
    ("saver", "saved"),
    [
        (FakeSaver(), [(5, 1)]),
        (FakeSaver(every=2), [(2, 0), (4, 1), (5, 1)]),
        (FakeSaver(time_at=2), [(3, 1), (5, 1)]),
        (FakeSaver(spoilt=2), [(5, 1), (5, 1), (5, 1)]),
    ],
    ids=["at the end", "every 2 steps", "by time", "again where losses spoil it"],
)
def test_when_the_state_is_saved(run, saver: FakeSaver, saved: list[tuple[int, int]]):
    run(FakePipeline(skipped=frozenset({2})), 5, saver=saver)
    assert saver.saved == saved
    assert saver.took_back == [step for step, _ in saved if step < 5], "nobody comes back at the end"


def test_nothing_is_enqueued_ahead_of_a_save(run):
    pipeline = FakePipeline()
    run(pipeline, 3, saver=FakeSaver(every=2))
    assert pipeline.calls == [
        *("prepare", "enqueue 0", "enqueue 1", "result 0", "result 1", "enqueue 2", "result 2")
    ]  # fmt: skip


def test_a_loop_that_is_told_to_stop_saves_at_the_next_boundary_or_the_one_after_it(run):
    saver = FakeSaver()
    loop, rows = run(FakePipeline(), 9, stop_at=1, saver=saver)
    assert loop.was_stopped
    assert saver.saved == [(len(rows), 0)]
    assert len(rows) == 4  # the step that was under way, and one more


def test_told_to_stop_during_its_last_step_a_loop_is_just_done(run):
    saver = FakeSaver()
    loop, _ = run(FakePipeline(), 3, stop_at=2, saver=saver)
    assert not loop.was_stopped
    assert saver.saved == [(3, 0)]


def broken_after(num_batches: int):
    yield from repeat({}, num_batches)
    raise BrokenData("element 7 cannot be read")


@pytest.mark.parametrize("every", [None, 3])
def test_what_was_trained_is_saved_before_a_batch_that_cannot_be_read(run, every: int | None):
    saver = FakeSaver(every=every)
    loop, rows = run(FakePipeline(), 9, saver=saver, batches=broken_after(3))
    assert str(loop.unreadable) == "element 7 cannot be read"
    assert len(rows) == 3
    assert saver.saved == [(3, 0)]


def test_nothing_is_saved_where_the_first_batch_cannot_be_read(run):
    saver = FakeSaver()
    loop, _ = run(FakePipeline(), 9, saver=saver, batches=broken_after(0))
    assert loop.unreadable is not None
    assert not saver.saved


@pytest.mark.parametrize(("most", "num_rows"), [(3, 6), (None, 9)])
def test_too_many_skipped_steps_in_a_row_end_the_loop_with_its_state_saved(run, most: int | None, num_rows: int):
    saver = FakeSaver()
    skipped = frozenset({0, 2, 3, 4, 5, 6, 7, 8})
    loop, rows = run(FakePipeline(skipped=skipped), 9, saver=saver, max_skipped_in_row=most)
    assert len(rows) == num_rows  # with the step that was under way
    assert loop.has_diverged == (most is not None)
    assert saver.saved == [(num_rows, num_rows - 1)]


class VerifyingPipeline(FakePipeline):
    """Its replicas differ from some step on."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__()
        self._wrong_from = wrong_from
        self.verified: list[int] = []

    def verify(self, state, microbatch):
        assert microbatch == {"x": [1]}
        self.verified.append(state.step)
        found = "stage 1 made other bits" if state.step >= self._wrong_from else None
        return Verification(difference=found, stop=False, save=False)


@pytest.mark.parametrize(
    ("wrong_from", "verified", "told"),
    [
        (9, [0, 2, 4, 6], None),
        (
            3,
            [0, 2, 4],
            "after 4 steps stage 1 made other bits: .* a checkpoint of at most 2 steps, .*",
        ),
        (0, [0], "stage 1 made other bits, at the first verification: .* or leave verify_every out"),
    ],
)
def test_replicas_that_differ_end_the_loop_and_nothing_is_saved(run, wrong_from, verified, told):
    pipeline, saver = VerifyingPipeline(wrong_from), FakeSaver(every=2)
    loop, rows = run(pipeline, 7, saver=saver, verification=(2, {"x": [1]}))
    assert pipeline.verified == verified
    assert len(rows) == (7 if told is None else verified[-1])
    assert [step for step, _ in saver.saved] == ([2, 4, 6, 7] if told is None else verified[1:-1])
    assert loop.wrong is None if told is None else re.fullmatch(told, loop.wrong)


@pytest.mark.parametrize(("started", "verified"), [(4, [6]), (5, [6])])
def test_a_process_that_comes_back_verifies_with_the_others(tmp_path, started, verified):
    """They have verified after 4 steps, before it took part."""
    pipeline = VerifyingPipeline(9)
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
        loop = TrainingLoop(
            pipeline,  # type: ignore[arg-type]
            learning_rate=float,
            metrics=metrics,
            on_step=lambda row: None,
            verification=(2, {"x": [1]}),
        )
        loop.last_verified = 4
        loop.run(PipelineState(started), repeat({}), 7)
    assert pipeline.verified == verified
