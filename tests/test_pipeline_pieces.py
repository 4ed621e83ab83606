"""Pieces of other work in the idle time of stages: training is not changed, and goes on whatever they do."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.runtime import stage_threads
from rrfp_jax.schedules import linear
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.testing import DelayedStage
from tests.pipelines import make_pipeline
from tests.test_pipeline_messages import make_batches, plain_model

NUM_STEPS = 8
Pieces = Callable[[int], Iterator[Callable[[], Any]]]


def train(pieces: Pieces | None, num_steps: int = NUM_STEPS) -> tuple[list[Any], Any]:
    slow = lambda stage: DelayedStage(stage, lambda *_: 0.01)  # noqa: E731 - so that stages idle for each other
    (batch, *_) = make_batches()
    with make_pipeline(
        plain_model((1, 1)),
        optimizer=optax.adam(1e-2),
        placement=linear(2),
        deterministic=True,
        pieces=pieces,
        wrap_stage=slow,
    ) as pipeline:
        state, results = pipeline.init(jax.random.key(0)), []
        for _ in range(num_steps):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result())
        return results, jax.tree.map(np.array, pipeline.params(state))


def test_pieces_run_in_idle_time_and_change_no_bit() -> None:
    runs = Counter[int]()

    def pieces(stage: int) -> Iterator[Callable[[], Any]]:
        program = jax.jit(lambda x: x @ x)

        def piece() -> jax.Array:
            runs[stage] += 1
            return program(jnp.ones((16, 16)))

        return repeat(piece)

    plain, params = train(None)
    results, with_pieces = train(pieces)
    assert [result.loss for result in results] == [result.loss for result in plain]
    jax.tree.map(np.testing.assert_array_equal, with_pieces, params)
    assert runs[0] > 3
    assert runs[1] > 3
    assert sum(result.sums.idle_s.get(IdleReason.PIECE, 0.0) for result in results) > 0
    assert not any(IdleReason.PIECE in result.sums.idle_s for result in plain)


def test_pieces_that_end_fail_or_hang_leave_training_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_threads, "LONGEST_PIECE_S", 0.1)
    runs = Counter[str]()

    def few(stage: int) -> Iterator[Callable[[], Any]]:
        for _ in range(3):
            yield lambda: runs.update([f"few {stage}"])

    def failing(stage: int) -> Iterator[Callable[[], Any]]:
        def piece() -> None:
            runs.update([f"failing {stage}"])
            raise MemoryError("no room for it")

        return repeat(piece)

    def hanging(stage: int) -> Iterator[Callable[[], Any]]:
        def piece() -> None:
            runs.update([f"hanging {stage}"])
            time.sleep(2)

        return repeat(piece)

    plain, _ = train(None)
    with caplog.at_level(logging.WARNING, "rrfp_jax"):
        for pieces in (few, failing, hanging):
            results, _ = train(pieces)
            assert [result.loss for result in results] == [result.loss for result in plain]
    assert runs == {
        f"{name} {stage}": 3 if name == "few" else 1 for name in ("few", "failing", "hanging") for stage in (0, 1)
    }
    for stage in (0, 1):
        assert f"rrfp-pieces-{stage}: a piece failed (MemoryError: no room for it" in caplog.text
        assert f"rrfp-pieces-{stage}: a piece has taken more than 0.1 s" in caplog.text


def test_stages_that_have_no_pieces_say_so() -> None:
    pieces = lambda stage: repeat(lambda: None)  # noqa: E731
    with pytest.raises(ValueError, match=r"hardly idle: leave out options\.pieces, or the delay"):
        make_pipeline(plain_model((1, 1)), optimizer=optax.adam(1e-2), placement=linear(2), delay=1, pieces=pieces)
