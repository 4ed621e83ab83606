"""Batches that are read with patience, and taken or refused by all processes alike."""

import errno
import os
import threading
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest

from rrfp_jax.cluster.wire import pack_plain, unpack_plain
from rrfp_jax.core import Ordering
from rrfp_jax.data import BrokenData
from rrfp_jax.schedules import Task, TaskKind, chain, linear
from rrfp_jax.schedules.timeline import Span, Timeline
from rrfp_jax.training import batches as module
from rrfp_jax.training.batches import AgreedBatches, CostOrders, StepOrder


class Samples:
    """Four samples in each batch, some of which cannot be read by this process."""

    def __init__(self, bad: dict[int, set[int]] | None = None, error: Exception | None = None, times: int = 0) -> None:
        self._bad, self._error, self._left = bad or {}, error, times
        self.num_tries = 0

    def batch(self, step: int, _: Any, left_out: Container[int] = ()) -> dict[str, Any]:
        self.num_tries += 1
        if self._left:
            self._left -= 1
            assert self._error is not None
            raise BrokenData("a file cannot be read") from self._error
        for sample in self._bad.get(step, ()):
            if sample not in left_out:
                error = BrokenData(f"sample {sample} is broken")
                error.sample = sample
                raise error
        return {"counts": [int(sample not in left_out) for sample in range(4)]}


class Together:
    """Gathers as ranks of a run do, each on a thread of its own."""

    def __init__(self, num_ranks: int) -> None:
        self._told: dict[int, Any] = {}
        self._barrier = threading.Barrier(num_ranks)

    def gather(self, rank: int) -> Callable[[str, Any], dict[int, Any]]:
        def gather(_: str, data: Any) -> dict[int, Any]:
            self._told[rank] = unpack_plain(pack_plain(data))  # as data travels
            self._barrier.wait(10)
            told = dict(self._told)
            self._barrier.wait(10)
            return told

        return gather

    def all_do(self, read: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self._barrier.parties

        def run(rank: int) -> None:
            try:
                results[rank] = read(rank)
            except BrokenData as error:
                results[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results


def alone(_: str, data: Any) -> dict[int, Any]:
    return {0: data}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("error", "times", "num_tries"),
    [
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE)), 2, 3),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), 3, 4),
        (OSError(errno.EIO, "input/output error"), 9, 4),
        (OSError("image file is truncated"), 9, 1),  # as Pillow says it: no error of the system
        (ValueError("not a number"), 9, 1),
    ],
)
def test_what_the_system_refuses_is_tried_again_a_few_times(error: Exception, times: int, num_tries: int) -> None:
    samples = Samples(error=error, times=times)
    batches = AgreedBatches(samples, alone)
    if times > 3 or num_tries == 1:
        with pytest.raises(BrokenData, match="a file cannot be read"):
            batches.batch(0, None)
    else:
        assert batches.batch(0, None) == {"counts": [1, 1, 1, 1]}
    assert samples.num_tries == num_tries


def test_samples_that_one_process_cannot_read_are_left_out_by_all() -> None:
    together = Together(3)
    bad = [{0: {1}}, {}, {0: {3}, 1: {0}}]
    ranks = [AgreedBatches(Samples(bad[rank]), together.gather(rank), max_bad=3) for rank in range(3)]
    assert together.all_do(lambda rank: ranks[rank].batch(0, None)) == [{"counts": [1, 0, 1, 0]}] * 3
    assert together.all_do(lambda rank: ranks[rank].batch(1, None)) == [{"counts": [0, 1, 1, 1]}] * 3
    assert together.all_do(lambda rank: ranks[rank].batch(2, None)) == [{"counts": [1, 1, 1, 1]}] * 3
    assert [rank.num_bad for rank in ranks] == [3, 3, 3]


@pytest.mark.parametrize(
    ("max_bad", "words"),
    [(0, "rank 2: sample 1 is broken"), (1, "2 samples could not be read, more than max_bad_samp")],
)
def test_all_processes_end_alike_where_one_cannot_go_on(max_bad: int, words: str) -> None:
    together = Together(3)
    bad = [{}, {}, {0: {3, 1}}]
    ranks = [AgreedBatches(Samples(bad[rank]), together.gather(rank), max_bad=max_bad) for rank in range(3)]
    for told in together.all_do(lambda rank: ranks[rank].batch(0, None)):
        assert words in told


def test_those_read_ahead_end_where_one_cannot_be_read() -> None:
    batches = AgreedBatches(Samples({3: {0}}), alone)
    with batches.ahead(1, {}, num_threads=2) as ahead:
        assert [next(ahead), next(ahead)] == [{"counts": [1, 1, 1, 1]}] * 2
        with pytest.raises(BrokenData, match="sample 0 is broken"):
            next(ahead)


def test_a_defect_of_a_data_set_is_named_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Defective:
        def batch(self, *_: Any) -> None:
            raise KeyError("tokens")

    with pytest.raises(BrokenData, match="KeyError: 'tokens'"):
        AgreedBatches(Defective(), alone).batch(4, None)
    assert "the batch of step 4 cannot be made" in caplog.text


# -- the order of microbatches -----------------------------------------------------------------------------------------

NUM_STAGES, SHARE = 2, 6
ORDER = Ordering(window=2).resolve(linear(NUM_STAGES), chain(NUM_STAGES, SHARE))


def costs_of(batch: Any) -> Any:
    sizes = np.array(batch["sizes"], float)
    return np.repeat(np.repeat(sizes[None, :, None], NUM_STAGES, axis=0), 3, axis=2), ()


class Sizes:
    def __init__(self, num_microbatches: int = SHARE) -> None:
        self._num = num_microbatches

    def batch(self, step: int, _: Any, left_out: Container[int] = ()) -> dict[str, Any]:
        return {"sizes": (1 + np.random.default_rng(step).permutation(self._num)).tolist()}


def record_of(sizes: Any, order: Any, num_replicas: int = 1, unit_s: float = 0.5, stage: int = 0) -> Timeline:
    """The record of a step on one stage: a forward takes half a second for a unit of cost, a backward as long."""
    timeline = Timeline(NUM_STAGES)
    for place in range(len(sizes)):
        own = place if order is None else order[place]
        for kind in (TaskKind.F, TaskKind.B):
            replica = place // (len(sizes) // num_replicas)
            task = Task(kind, stage * num_replicas + replica, place)
            timeline.spans.append(Span(stage, 0, task, 0.0, unit_s * sizes[own]))
    return timeline


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_first_process_orders_microbatches_for_all_by_times_of_all(num_replicas: int) -> None:
    """The other process has the second stage, which takes three times as long."""
    together, sizes = Together(2), Sizes(SHARE * num_replicas)
    orders = [
        CostOrders(ORDER, costs_of, num_replicas=num_replicas, is_first=lambda rank=rank: rank == 0)
        for rank in range(2)
    ]
    ranks = [AgreedBatches(sizes, together.gather(rank), orders=orders[rank]) for rank in range(2)]

    def step(number: int) -> StepOrder | None:
        together.all_do(lambda rank: ranks[rank].batch(number, None))
        first, second = (each.order for each in ranks)
        assert first == second
        for rank, each in enumerate(orders):
            order = None if first is None else first.order
            made, unit_s = sizes.batch(number, None)["sizes"], (0.5, 1.5)[rank]
            each.learn(number, order, record_of(made, order, num_replicas, unit_s, stage=rank), 1e3)
        return first

    # Each of the first two steps has shown that costs are right, and the third exchange has told of it.
    assert [step(number) for number in range(2)] == [None, None]
    step(2)
    for number in range(3, 6):
        chosen = step(number)
        assert chosen is not None
        for first in range(0, SHARE * num_replicas, SHARE):
            assert sorted(chosen.order[first : first + SHARE]) == list(range(first, first + SHARE))
        made = sizes.batch(number, None)["sizes"]
        # Both stages run all microbatches of a replica.
        longest_s = 3 * max(sum(made[r * SHARE : (r + 1) * SHARE]) for r in range(num_replicas))
        assert longest_s <= chosen.predicted_s <= 1.5 * longest_s


class Run:
    """Steps of one process whose batches are read ahead; ``costs`` and ``taken`` make sizes of (step, sizes)."""

    def __init__(self, costs: Callable[[int, Any], Any], taken: Callable[[int, Any], Any], step_s: float = 1e3) -> None:
        self._sizes, self._costs, self._taken, self._step_s = Sizes(), costs, taken, step_s

    def orders(self, num_steps: int) -> list[StepOrder | None]:
        """Returns the orders of the steps."""
        numbered = (number for number in range(num_steps))
        orders = CostOrders(ORDER, lambda batch: costs_of({"sizes": self._costs(next(numbered), batch["sizes"])}))
        batches, found = AgreedBatches(self._sizes, alone, orders=orders), list[StepOrder | None]()
        for number in range(num_steps):
            made = batches.batch(number, None)["sizes"]
            found.append(batches.order)
            order = None if batches.order is None else batches.order.order
            orders.learn(number, order, record_of(self._taken(number, made), order), self._step_s)
        return found


def as_they_are(_: int, sizes: Any) -> Any:
    return sizes


def test_microbatches_come_as_they_are_where_steps_are_short() -> None:
    assert Run(as_they_are, as_they_are, step_s=1e-6).orders(6) == [None] * 6
    assert None not in Run(as_they_are, as_they_are).orders(6)[3:]


def test_costs_of_other_microbatches_are_not_followed() -> None:
    """Chance hardly ever agrees for some steps in a row, so such a predictor costs nothing to speak of."""
    rng = np.random.default_rng(1)
    assert Run(lambda _, sizes: rng.permutation(sizes), as_they_are).orders(50) == [None] * 50


def test_costs_are_followed_as_long_as_they_tell_the_times() -> None:
    found = Run(as_they_are, lambda step, sizes: sizes if step < 6 else [SHARE + 1 - size for size in sizes]).orders(12)
    assert None not in found[3:7]
    assert found[8:] == [None] * 4


def test_costs_that_hardly_differ_say_nothing() -> None:
    rng = np.random.default_rng(2)
    assert Run(lambda *_: [2.0] * SHARE, lambda *_: rng.random(SHARE)).orders(6) == [None] * 6


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_unknown_costs_leave_microbatches_as_they_are_and_are_told_of_once(
    wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    for costs in (lambda _, sizes: [wrong, *sizes[1:]], lambda *_: [wrong] * SHARE):
        caplog.clear()
        assert Run(costs, as_they_are).orders(8) == [None] * 8
        assert [message.partition(":")[0] for message in caplog.messages] == ["microbatches keep their order"]
