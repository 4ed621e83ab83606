"""Offload: activations move to host memory and back, no bit changes, and memory stays below its forecast."""

import importlib.util
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from rrfp_jax.core import Ordering, StepRules
from rrfp_jax.layout import Layout
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime import operations as offloading
from rrfp_jax.runtime.operations import check_operations, device_slots, host_copies, offload
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.stage_threads import Launched
from rrfp_jax.schedules import Placement, ScheduleRequest, ScheduleTable, Task, build_schedule, chain, linear, looped
from rrfp_jax.schedules.operations import COPY
from rrfp_jax.schedules.slots import SlotLengths, execute
from rrfp_jax.simulation import Costs, find_optimum, simulate
from rrfp_jax.simulation.costs import constant
from rrfp_jax.testing.comparing import WrappedStage
from tests.programs.toys import VOCAB, plain_model
from tests.test_pipeline_training import OPTIMIZER

M = 6
SLOW = pytest.mark.slow


def table(name: str, *, p: int = 3, m: int = M) -> ScheduleTable:
    return build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m))


def moved(schedule: ScheduleTable) -> set[tuple[int, int]]:
    return {pair for op in schedule.graph.ops for pair in op.pairs or ()}


# -- what moves --------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "1f1b-split", "interleaved-1f1b", "chimera", "bitpipe", "hanayo"])
@pytest.mark.parametrize("slots", [3, 4, 5])
def test_no_row_holds_more_than_the_slots(name: str, slots: int) -> None:
    plain = table(name, p=8, m=32)
    schedule = offload(plain, slots, copy_ms=0.01)
    for rows in filter(None, (schedule, schedule.hint)):
        assert max(rows.peak_activations()) <= slots
    assert max(schedule.peak_activations()) <= slots < max(plain.peak_activations())
    assert device_slots(plain, slots) == tuple(min(slots, -(-int(8 * peak) // 8)) for peak in plain.peak_activations())
    untouched = [stage for stage, peak in enumerate(plain.peak_activations()) if peak <= slots]
    assert not {plain.placement.stage_of_chunk[c] for c, _ in moved(schedule)} & {*untouched}


def test_only_as_many_move_as_it_takes() -> None:
    plain = table("1f1b", p=8, m=32)
    numbers = [len(moved(offload(plain, slots))) for slots in (3, 4, 5, 6, 7, 8)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 0
    assert numbers[1] <= 32 * (7 / 8 + 6 / 7 + 5 / 6 + 4 / 5)  # stage 0 keeps one of eight, and so on
    assert offload(plain, 8) is plain


def test_what_waits_for_less_than_three_round_trips_stays() -> None:
    plain, lengths = table("1f1b", p=8, m=32), SlotLengths(10, 10, 10)
    spans = execute(plain, lengths).spans
    for copy_ms in (5.0, 15.0, 20.0):
        schedule = offload(plain, 5, copy_ms=copy_ms, lengths=lengths)
        for chunk, m in moved(schedule):
            wait_ms = spans[Task.parse(f"{chunk}B{m}")][0] - spans[Task.parse(f"{chunk}F{m}")][1]
            assert wait_ms >= 6 * copy_ms


# -- another order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_ms", [5.0, 10.0, 15.0])
@pytest.mark.parametrize(("p", "m", "slots", "optimum_ms"), [(4, 8, 2, 290), (4, 8, 3, 280), (3, 6, 2, 210)])
@pytest.mark.one_in(3)
def test_order_and_copies_are_chosen_together(p: int, m: int, slots: int, optimum_ms: float, copy_ms: float) -> None:
    plain, lengths = table("zb-h1", p=p, m=m), SlotLengths(10, 10, 10)
    for consume in ("strict", "ready"):
        schedule = offload(plain, slots, copy_ms=copy_ms, lengths=lengths, consume=consume)
        assert max(schedule.peak_activations()) <= slots
        assert makespan_ms(schedule, consume, 10, device_slots(plain, slots)) <= 1.05 * optimum_ms
        schedule.check_accumulation()
    assert (schedule.name, schedule.placement) == (plain.name, plain.placement)
    assert moved(schedule)


@pytest.mark.one_in(15)
@pytest.mark.parametrize(("consume", "lanes"), [("strict", (COPY, COPY)), ("ready", ("d2h", "h2d"))])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "v-half", "interleaved-1f1b-split", "bitpipe"])
def test_one_slot_does_for_every_table(name: str, lanes: tuple[str, str], consume: str) -> None:
    plain, lengths = table(name, p=4, m=4), SlotLengths(10, 12, 7)
    for slots, copy_ms in ((1, 0.0), (1, 40.0), (2, 8.0)):
        schedule = offload(plain, slots, copy_ms=copy_ms, lengths=lengths, lanes=lanes, consume=consume)
        for rows in filter(None, (schedule, schedule.hint)):
            assert max(rows.peak_activations()) <= slots
        window = device_slots(plain, slots) if schedule.graph.ops else None
        assert makespan_ms(schedule, consume, 10, window) > 0


def test_a_copy_that_buys_no_time_is_not_made() -> None:
    plain, lengths = table("zb-h1", p=4, m=8), SlotLengths(10, 10, 10)
    schedule = offload(plain, 3, copy_ms=10.0, lengths=lengths)
    pairs = moved(schedule)
    assert 0 < len(pairs) <= 10
    assert offload(plain, 4, copy_ms=10.0, lengths=lengths) is plain


@pytest.mark.parametrize("lead", [0, 2, 3])
def test_activations_may_be_asked_back_earlier(lead: int) -> None:
    schedule = offload(table("1f1b", p=8, m=32), 4, copy_ms=0.01, lead=lead)
    assert max(schedule.peak_activations()) <= 4
    row = schedule.orders[0]
    computed = [task for task in row if task.kind in "FB"]
    chunk, m = max(moved(schedule), key=lambda pair: (pair[0] == 0, pair[1] == 16))
    ahead = row[row.index(Task.parse(f"{chunk}L{m}")) : row.index(Task.parse(f"{chunk}B{m}"))]
    assert len([task for task in ahead if task in computed]) == lead


@pytest.mark.parametrize(("slots", "copy_ms", "words"), [(0, 1.0, "0 slots"), (2, -1.0, "copy_ms is -1")])
def test_bad_numbers_are_refused(slots: int, copy_ms: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        offload(table("1f1b"), slots, copy_ms=copy_ms)


COSTLESS = {"1f1b": 1.0, "gpipe": 0.6, "breadth-first": 0.6, "interleaved-1f1b": 0.6, "interleaved-1f1b-split": 0.6}
COSTLESS |= {"chimera": 0.75, "hanayo": 0.6}
"""Up to which round trip, in forwards and backwards of a chunk, copies hide behind compute in 3 slots and more."""


@pytest.mark.one_in(14)
@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("name", COSTLESS)
def test_copies_hide_behind_compute(name: str, consume: str) -> None:
    plain = table(name, p=8, m=32)
    ms = 10 / len(plain.placement.chunks_of_stage[0])
    lengths, peak = SlotLengths(ms, ms, ms), max(plain.peak_activations())
    expected = makespan_ms(plain, consume, ms)
    for slots in [slots for slots in (3, 4, 5, 8) if slots < peak and (slots > 3 or not name.endswith("split"))]:
        for ratio in (COSTLESS[name], 0.2):
            copy_ms = 1.5 * ms * ratio
            schedule = offload(plain, slots, copy_ms=copy_ms, lengths=lengths, consume=consume)
            assert moved(schedule)
            assert makespan_ms(schedule, consume, ms, device_slots(plain, slots)) <= expected + 1e-6


def makespan_ms(schedule: ScheduleTable, consume: str, ms: float, window: tuple[int, ...] | None = None) -> float:
    ordering = Ordering(schedule=schedule, consume=consume, window=window)
    order = ordering.resolve(schedule.placement, replace(schedule.graph, ops=()))
    costs = Costs(durations_ms=constant((ms, ms, ms), order.graph))
    return simulate(order.arbiters(StepRules(updates=False)), costs).timeline.makespan_s() * 1e3


def test_ways_back_wait_for_the_copies_that_forwards_need() -> None:
    (row,) = offload(table("gpipe", p=1), 3, copy_ms=0.01).orders
    assert " ".join(map(str, row)).startswith("0F0 0F1 0O1 0F2 0O2 0F3 0O3 0F4 0O4 0F5 0O5 0L1 0B0 0L2 0B1")
    (_, back) = offload(table("gpipe", p=1), 3, copy_ms=0.01).graph.ops
    last = Task.parse("0O4")
    assert back.waits == {(Task.parse(f"0L{m}"), last) for m in (1, 2, 3, 4, 5)}
    (_, back) = offload(table("gpipe", p=1), 3, copy_ms=0.01, consume="ready").graph.ops
    assert not back.waits


# -- in the real runtime -----------------------------------------------------------------------------------------------


def make_pipeline(placement: Placement, layers: tuple[int, ...], remat: Any) -> Pipeline:
    updates = UpdateRules(clip_norm=1.0, deterministic=True)
    chunks = plain_model(layers, tied=False)
    return Pipeline(chunks, placement=placement, optimizer=OPTIMIZER, updates=updates, remat=remat)


def batches(number: int) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(number):
        sequence = ((rng.integers(0, VOCAB, (M, 2, 1)) + np.arange(9)) % VOCAB).astype(np.int32)
        weights = (rng.random((M, 2, 8)) < 0.8).astype(np.float32)
        yield {"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights}


def train(pipeline: Pipeline, num_steps: int = 3) -> tuple[list[Any], dict[str, Any]]:
    with pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches(num_steps):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        return [metrics.result() for metrics in results], jax.tree.map(np.array, pipeline.params(state))


def check_same(base: Pipeline, name: str, slots: int, *, remat: Any, options: RuntimeOptions | None = None) -> None:
    plain = table(name, p=base.placement.num_stages)
    schedule, window = offload(plain, slots, copy_ms=0.01), device_slots(plain, slots)
    assert moved(schedule)
    for consume in ("strict", "ready"):
        expected, params = train(base.reordered(Ordering(schedule=plain, consume=consume)))
        pipeline = base.reordered(Ordering(schedule=schedule, consume=consume, window=window), options=options)
        results, found = train(pipeline)
        assert [result.loss for result in results] == [result.loss for result in expected]
        jax.tree.map(np.testing.assert_array_equal, params, found)
        stages = {base.placement.stage_of_chunk[chunk] for chunk, _ in moved(schedule)}
        for stage, forecast in enumerate(pipeline.forecast):
            for result in results:
                assert result.peak_memory_bytes[stage] <= forecast.peak
                assert result.peak_host_bytes[stage] <= forecast.host_peak
                if remat == "none":
                    assert (result.peak_host_bytes[stage] > 0) == (stage in stages)
        if remat == "none" and consume == "strict":
            assert results[-1].peak_memory_bytes[0] < expected[-1].peak_memory_bytes[0]


@pytest.fixture(scope="module")
def base() -> Pipeline:
    return make_pipeline(linear(3), (1, 1, 1), "none")


def test_bits_and_peaks(base: Pipeline) -> None:
    check_same(base, "1f1b", 2, remat="none")


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'optimum' is missing")
@pytest.mark.parametrize("consume", ["strict", "ready"])
def test_the_optimum_trains_with_the_same_bits(base: Pipeline, consume: str) -> None:
    graph = chain(3, M, split=True)
    durations_ms = constant((10.0, 10.0, 10.0), graph)[0]
    schedule = find_optimum(graph, linear(3), durations_ms, slots=2, copies=host_copies(5.0), time_limit_s=60).table
    assert moved(schedule)
    expected, params = train(base.reordered(Ordering(schedule=table("1f1b-split"), consume="strict")))
    pipeline = base.reordered(Ordering(schedule=schedule, consume=consume, window=2))
    results, found = train(pipeline)
    assert [result.loss for result in results] == [result.loss for result in expected]
    jax.tree.map(np.testing.assert_array_equal, params, found)
    for stage, forecast in enumerate(pipeline.forecast):
        assert all(result.peak_memory_bytes[stage] <= forecast.peak for result in results)


def test_bits_and_peaks_of_another_order(base: Pipeline) -> None:
    check_same(base, "zb-h1", 2, remat="none")


@SLOW
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    "name", ["1f1b", "1f1b-split", "eager-1f1b", "gpipe", "interleaved-1f1b", "interleaved-1f1b-split"]
)
def test_bits_and_peaks_of_all(name: str, remat: str) -> None:
    is_looped = name.startswith("interleaved")
    placement = looped(2, 2) if is_looped else linear(4)
    pipeline = make_pipeline(placement, (1, 1, 1, 1), remat)
    # another order of split backwards needs no copies for two slots
    check_same(pipeline, name, 1 if name == "interleaved-1f1b-split" else 2, remat=remat)


@SLOW
def test_replicas_move_each_its_own() -> None:
    chunks, placement = plain_model((1, 1, 0), tied=True), linear(3)
    plain = table("1f1b", p=3, m=M // 2)
    found = []
    for schedule, window in ((plain, None), (offload(plain, 2, copy_ms=0.01), device_slots(plain, 2))):
        pipeline = Pipeline(
            chunks,
            process=Process(Layout(num_stages=3, data=2)),
            placement=placement,
            optimizer=OPTIMIZER,
            updates=UpdateRules(deterministic=True),
            ordering=Ordering(schedule=schedule, consume="strict", window=window),
        )
        results, params = train(pipeline)
        found.append(([result.loss for result in results], params))
        hosted = [peak > 0 for peak in results[-1].peak_host_bytes]
        assert hosted == ([False] * 6 if window is None else [True, False, False] * 2)
    assert found[0][0] == found[1][0]
    jax.tree.map(np.testing.assert_array_equal, found[0][1], found[1][1])


class Watching(WrappedStage):
    """Keeps weak references to what the stashes hold before they go to the host, and counts what is left of it."""

    left: ClassVar[list[int]] = []
    num_watched = 0

    def begin(self, step: int, batch: StepBatch, graph: Any) -> None:
        super().begin(step, batch, graph)
        self.stashes = self._inner._steps[step].stashes  # type: ignore[attr-defined]

    def launch(self, step: int, task: Task) -> Launched:
        if task.kind != "O":
            return super().launch(step, task)
        assert threading.current_thread().name.endswith(COPY)
        arrays = [weakref.ref(array) for part in self.stashes[task.chunk, task.microbatch][:2] for array in part]
        launched = super().launch(step, task)

        def wait() -> None:
            launched.wait()
            self.left.append(sum(array() is not None for array in arrays))

        Watching.num_watched += len(arrays)
        return launched._replace(wait=wait)


def test_the_device_is_rid_of_what_has_moved(base: Pipeline) -> None:
    plain = table("1f1b")
    schedule = offload(plain, 2, copy_ms=0.01)
    options = RuntimeOptions(wrap_stage=Watching)
    ordering = Ordering(schedule=schedule, window=device_slots(plain, 2))
    train(base.reordered(ordering, options=options), num_steps=1)
    assert Watching.left == [0] * len(moved(schedule))
    assert Watching.num_watched > len(Watching.left)


def test_a_backend_without_pinned_memory_is_refused_before_work_starts(
    base: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "HOST", "far_host")
    schedule = offload(table("1f1b"), 2, copy_ms=0.01)
    with pytest.raises(ValueError, match="offload needs memory of kind far_host, which JAX does not have"):
        base.reordered(Ordering(schedule=schedule))


def test_what_groups_cannot_run_beside_compute_is_refused_before_work_starts() -> None:
    process: Any = SimpleNamespace(
        units=(0,), layout=Layout(num_stages=1, tensor=2, num_ranks=2), devices_of=lambda _: jax.devices()
    )
    graph = offload(table("gpipe", p=1), 3, copy_ms=0.01).graph
    check_operations(graph, process, "leader")
    where = "operation O runs beside compute on stage 0, which spans 2 processes"
    with pytest.raises(ValueError, match=rf"{where}: let their leader choose \(group_protocol leader\)"):
        check_operations(graph, process, "propose")
    own = replace(graph, ops=tuple(replace(op, run=lambda context: None) for op in graph.ops))
    with pytest.raises(ValueError, match=f"{where}, where copies to the host and back alone can: give it the lane"):
        check_operations(own, process, "leader")
