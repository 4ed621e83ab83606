"""When a run evaluates, how batches share steps, what a row says, and which checkpoint stays."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from rrfp_jax.checkpoint._records import keep_last
from rrfp_jax.training import evaluation as module
from rrfp_jax.training.evaluation import Evaluations, batches_per_step, row_of
from rrfp_jax.training.run_config import EvaluationConfig


def result(loss_sum: float, weight: float, **means: float) -> SimpleNamespace:
    return SimpleNamespace(loss_sum=loss_sum, weight=weight, means=means)


def test_when_it_is_due() -> None:
    config = EvaluationConfig(every=4)
    assert [step for step in range(11) if config.is_due(step, 10)] == [4, 8, 10]
    assert [step for step in range(11) if EvaluationConfig(when="start").is_due(step, 10)] == [0, 10]
    with pytest.raises(ValueError, match="every is 0"):
        EvaluationConfig(every=0)
    assert EvaluationConfig(when="start+idle").is_due(0, 10)
    assert EvaluationConfig(when="idle").in_idle_time
    assert not EvaluationConfig(when="idle").is_due(0, 10)
    with pytest.raises(ValueError, match="when is 'often': give between, start, idle, start\\+idle"):
        EvaluationConfig(when="often")
    with pytest.raises(ValueError, match="in idle time its loss is known later"):
        EvaluationConfig(when="idle", keep_best=True)
    with pytest.raises(ValueError, match="sets is empty"):
        EvaluationConfig(sets={})


@pytest.mark.parametrize(
    ("batches", "num_chunks", "num_microbatches", "expected"),
    [(8, 1, 8, 1), (8, 4, 8, 8), (20, 4, 8, 7), (20, 4, 64, 1), (1, 8, 1, 1), (9, 2, 8, 3)],
)
def test_batches_share_steps(batches: int, num_chunks: int, num_microbatches: int, expected: int) -> None:
    assert batches_per_step(batches, num_chunks=num_chunks, num_microbatches=num_microbatches) == expected


def test_a_row_is_a_mean_over_all_steps_without_what_training_adds() -> None:
    results = [result(30.0, 10.0, router_loss=0.5), result(10.0, 30.0, router_loss=0.1), result(0.0, 0.0)]
    row = row_of(7, "mine", results, bytes_per_token=2.0, seconds=3.0)  # type: ignore[arg-type]
    assert row.means == {"router_loss": pytest.approx(0.2)}
    assert row.loss == pytest.approx(0.8)
    assert row.perplexity == pytest.approx(math.exp(0.8))
    assert row.bits_per_byte == pytest.approx(0.8 / math.log(2) / 2)
    assert (row.step, row.evaluation, row.tokens, row.seconds) == (7, "mine", 40.0, 3.0)
    assert math.isnan(row_of(0, "x", [result(0.0, 0.0)], bytes_per_token=None, seconds=0.0).loss)  # type: ignore[list-item]
    assert row_of(0, "x", [result(1e3, 1.0)], bytes_per_token=None, seconds=0.0).perplexity == math.inf  # type: ignore[list-item]


def test_answers_are_counted_over_all_steps() -> None:
    results = [
        result(9.0, 3.0, answers=1 / 3, exact_answers=0.0, answer_tokens=1.0, right_tokens=2 / 3, router_loss=0.5),
        result(49.0, 7.0, answers=2 / 7, exact_answers=2 / 7, answer_tokens=1.0, right_tokens=1.0, router_loss=1.0),
    ]
    row = row_of(0, "mine", results, bytes_per_token=None, seconds=1.0)  # type: ignore[arg-type]
    assert (row.exact_match, row.token_accuracy) == (2 / 3, 0.9)
    assert row.means == {"router_loss": pytest.approx(0.85)}
    assert row.loss == pytest.approx(5.8 - 0.85)
    without = row_of(0, "mine", [result(9.0, 3.0)], bytes_per_token=None, seconds=1.0)  # type: ignore[list-item]
    assert (without.exact_match, without.token_accuracy) == (None, None)


class FakePipeline:
    """Notes the microbatches of each step; asks to stop in the one of this number."""

    layout, placement = SimpleNamespace(data=2), SimpleNamespace(num_chunks=4)
    process = SimpleNamespace(gather=lambda _, data: {0: data})

    def __init__(self, stop_in: int | None = None) -> None:
        self.steps: list[list[int]] = []
        self._stop_in = stop_in

    def reads(self, num_microbatches: int) -> dict[str, range]:
        return {"x": range(num_microbatches // 2, num_microbatches)}

    def averaged(self, state: object) -> nullcontext[None]:
        return nullcontext()

    def evaluate(self, state: object, batch: dict) -> SimpleNamespace:
        number = len(self.steps)
        self.steps.append([None if entry is None else int(entry) for entry in batch["x"]])
        weight = float(len(batch["x"]))
        done = SimpleNamespace(
            loss_sum=weight, weight=weight, means={}, stop=number == self._stop_in, save=number == self._stop_in
        )
        return SimpleNamespace(result=lambda: done)


class FakeData:
    """Microbatch m of batch n is 10 n + m; what is not read is None. Every second batch lacks a leaf."""

    buckets = None

    def batch(self, step: int, reads: dict | None = None) -> dict:
        own = range(4) if reads is None else reads.get("x", ())
        whole = {"x": [np.int32(10 * step + m) if m in own else None for m in range(4)]}
        return whole if step % 2 else {**whole, "picture": [np.zeros(3)] * 4}


def evaluations(pipeline: FakePipeline, config: EvaluationConfig) -> Evaluations:
    sets = {"a": FakeData(), "b": FakeData()}
    return Evaluations(config, pipeline, sets, num_steps=9, num_microbatches=4)  # type: ignore[arg-type]


def test_batches_are_joined_and_each_replica_reads_its_share() -> None:
    pipeline = FakePipeline()
    rows = evaluations(pipeline, EvaluationConfig(batches=3)).run(SimpleNamespace(step=5))  # type: ignore[arg-type]
    joined = [None] * 6 + [12, 13, 20, 21, 22, 23]
    assert pipeline.steps == [joined, joined]
    assert [(row.step, row.evaluation, row.tokens, row.loss) for row in rows] == [(4, "a", 12, 1.0), (4, "b", 12, 1.0)]


def test_a_run_that_is_told_to_stop_does_so_within_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "batches_per_step", lambda *_, **__: 1)
    pipeline = FakePipeline(stop_in=0)
    stopped = evaluations(pipeline, EvaluationConfig(batches=50))
    assert stopped.run(SimpleNamespace(step=5)) == []  # type: ignore[arg-type]
    assert len(pipeline.steps) <= 2
    assert stopped.stop
    assert stopped.save


def test_the_best_checkpoint_is_that_of_the_first_set(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, math.nan, 2.5, 2.1, 1.9])
    found_loss = {}

    def row_of(step: int, name: str, *_: object, **__: object) -> SimpleNamespace:
        found_loss[step] = found_loss[step] if step in found_loss else next(losses)
        return SimpleNamespace(loss=found_loss[step] if name == "a" else -found_loss[step])

    monkeypatch.setattr(module, "row_of", row_of)
    config = EvaluationConfig(every=1, batches=1, keep_best=True)
    found = evaluations(FakePipeline(), config)
    best = []
    for step in (1, 2, 3, 4):
        assert found.is_due(step)
        found.run(SimpleNamespace(step=step))  # type: ignore[arg-type]
        assert not found.is_due(step)
        best.append(found.keep_also)
    assert best == [(1,), (2,), (2,), (2,)]
    again = evaluations(FakePipeline(), config)
    again.go_on(found.host)
    assert not again.is_due(4)
    for step, expected in ((5, 2), (6, 6)):
        again.run(SimpleNamespace(step=step))  # type: ignore[arg-type]
        assert again.keep_also == (expected,)


def test_what_is_kept_beside_the_newest(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rrfp_jax.checkpoint import _records

    removed = []
    monkeypatch.setattr(_records, "steps_in", lambda _: [9, 8, 6, 4, 2])
    monkeypatch.setattr(_records, "is_ours", lambda _: True)
    monkeypatch.setattr(_records, "is_committed", lambda _, step: step != 6)
    monkeypatch.setattr(_records, "remove_tree", lambda directory: removed.append(int(directory.name[-2:])))
    monkeypatch.setattr(_records, "sync_directory", lambda _: None)
    keep_last(tmp_path, 8, 1, keep_also=(4, 6, 9))
    assert sorted(removed) == [2, 6, 9]
