"""Batch leaves go to the devices some microbatches ahead, in order; no task waits for copies that have not begun."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rrfp_jax.costs.layer_sizes import LEAVES_AHEAD
from rrfp_jax.runtime.mailbox import LeavesAhead, StepPair
from tests.cluster.mesh import eventually


class Stage:
    """Places nothing before it may, and notes what it has placed."""

    def __init__(self) -> None:
        self.ahead, self.may_place, self.placed = LeavesAhead(0), threading.Event(), list[Any]()

    def expect(self, chunk: int, step: int, num_microbatches: int) -> None:
        pairs = [(step, m) for m in range(num_microbatches)]
        self.ahead.expect(chunk, [(pair, self._place(chunk, pair)) for pair in pairs])

    def _place(self, chunk: int, pair: StepPair) -> Callable[[], dict[str, Any]]:
        def place() -> dict[str, Any]:
            self.may_place.wait(20)
            self.placed.append((chunk, *pair))
            return {"x": np.array([chunk, *pair])}

        return place


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_each_chunk_has_a_few_microbatches_ahead(stage: Stage) -> None:
    stage.may_place.set()
    for chunk in (0, 2):
        stage.expect(chunk, 5, 4)
    stage.expect(0, 6, 2)
    assert eventually(lambda: len(stage.placed) == 2 * LEAVES_AHEAD)
    for number, pair in enumerate([(5, 0), (5, 1), (5, 2), (5, 3), (6, 0), (6, 1)], start=1):
        taken = stage.ahead.take(0, pair)
        assert taken is not None
        assert taken["x"].tolist() == [0, *pair]
        most = min(LEAVES_AHEAD + number, 6)
        assert eventually(lambda most=most: sum(chunk == 0 for chunk, *_ in stage.placed) == most)
    assert sorted(stage.placed) == [
        *((0, 5, m) for m in range(4)),
        *((0, 6, m) for m in range(2)),
        *((2, 5, m) for m in range(LEAVES_AHEAD)),
    ]


def test_a_task_whose_leaves_are_late_does_not_wait_and_nothing_is_copied_twice(stage: Stage) -> None:
    stage.expect(0, 0, 4)
    assert eventually(stage.ahead._begun[0][0, 0].running)
    assert stage.ahead.take(0, (0, 1)) is None  # behind the first
    assert stage.ahead.take(0, (0, 3)) is None  # not begun
    stage.may_place.set()
    assert stage.ahead.take(0, (0, 0)) is not None
    assert stage.ahead.take(0, (0, 2)) is not None or (0, 0, 2) not in stage.placed
    assert {(0, 0, 1), (0, 0, 3)}.isdisjoint(stage.placed)


def test_what_a_step_leaves_is_forgotten(stage: Stage) -> None:
    stage.may_place.set()
    stage.expect(0, 0, 3)
    stage.ahead.forget(0)
    assert stage.ahead.take(0, (0, 0)) is None
    stage.expect(0, 1, 1)
    assert eventually(lambda: (0, 1, 0) in stage.placed)
    assert stage.ahead.take(0, (1, 0)) is not None


def test_leaves_that_cannot_be_placed_fail_their_task(stage: Stage) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no memory")

    stage.ahead.expect(0, [((0, 0), fail)])
    assert eventually(stage.ahead._begun[0][0, 0].done)
    with pytest.raises(RuntimeError, match="no memory"):
        stage.ahead.take(0, (0, 0))


def test_its_thread_ends_with_it(stage: Stage) -> None:
    stage.may_place.set()
    stage.expect(0, 0, 1)
    assert eventually(lambda: bool(stage.placed))
    (thread,) = stage.ahead._thread._threads
    del stage.ahead
    thread.join(20)
    assert not thread.is_alive()
