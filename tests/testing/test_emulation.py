"""The real runtime on emulated stages: complete, replayable, explained, and in the order that was asked for."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rrfp_jax import core
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Agreement, Announce, StepRules, WakeAt
from rrfp_jax.core.rebalancing import adopted_owners
from rrfp_jax.core.replicas import StepOwners, block_owners
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Edge, PipelineGraph, ScheduleTable, Task, TaskKind, absences, linear
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.testing import Emulation, emulate
from tests.runtime.logged_runs import replays_as_recorded

RULES = StepRules(updates=False, agreement=Agreement.ALL)
NUM_STAGES, NUM_MICROBATCHES = 3, 5


def run(
    durations_ms: Any,
    num_steps: int = 3,
    chunks_per_stage: int = 1,
    certain_ahead: bool = False,
    shortest_s: float = 0.0,
    link_delays_ms: dict[tuple[int, int], float] | None = None,
    **order: Any,
) -> Emulation:
    resolved = OrderingOptions(**order).resolve(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, chunks_per_stage=chunks_per_stage
    )
    shape = (1, NUM_STAGES * chunks_per_stage, NUM_MICROBATCHES, 3)
    durations = np.broadcast_to(np.array(durations_ms, np.float64), shape)
    arbiters = resolved.arbiters(RULES, certain_ahead=certain_ahead, shortest_s=shortest_s)
    return emulate(arbiters, durations, num_steps, log_steps=num_steps + 1, link_delays_ms=link_delays_ms)


@pytest.mark.parametrize(
    "order",
    [
        {"hint": "bf", "window": 2},
        {"hint": "bfw", "window": 1},
        {"hint": "f-priority"},
        {"hint": "b-priority", "window": (3, 2, 1)},
        {"schedule": "1f1b", "consume": "strict"},
        {"schedule": "zb-h1"},
        {"hint": "bf-deep", "chunks_per_stage": 2},
        {"hint": "bf", "certain_ahead": True},
        {"hint": "bfw", "certain_ahead": True, "delay": 1},
        {"hint": "bf", "certain_ahead": True, "delay": "by-stage"},
    ],
)
def test_every_task_runs_once_a_step_and_the_event_log_replays_exactly(order: dict[str, Any]) -> None:
    emulation = run((0, 0, 0), **order)
    per_step = [sorted(map(str, (s.task for s in emulation.timeline.of_step(step).spans))) for step in range(3)]
    assert per_step[0] == per_step[1] == per_step[2] == sorted(set(per_step[0]))
    for log in emulation.logs.values():
        assert replays_as_recorded(log)
        assert sum(len(segment.entries) for segment in log.segments) > NUM_MICROBATCHES


def test_steps_that_overlap_end_in_order_where_no_stage_updates() -> None:
    # At this window younger steps are done first on some stages.
    order = OrderingOptions(hint="bfw", window=5, delay=1).resolve(num_stages=4, num_microbatches=4)
    emulation = emulate(
        order.arbiters(RULES, certain_ahead=True), np.full((1, 4, 4, 3), 2.0), 20, progress_deadline_s=10
    )
    assert all(len(emulation.timeline.of_step(step).spans) == 3 * 4 * 4 for step in range(20))


@pytest.mark.parametrize("order", [{"hint": "bf"}, {"hint": "bfw", "window": 2}, {"schedule": "1f1b"}], ids=str)
@pytest.mark.parametrize("lost", [(), (4,), (0, 4)], ids=str)
def test_owners_run_the_microbatches_of_units_that_are_lost(lost: tuple[int, ...], order: dict[str, Any]) -> None:
    resolved = OrderingOptions(**order).resolve(num_stages=NUM_STAGES, num_microbatches=4, num_replicas=2)
    living = [unit for unit in range(6) if unit not in lost]
    owners = StepOwners(adopted_owners(block_owners(NUM_STAGES, 8, 2), living), lost)
    graph, stage_of = resolved.graph, resolved.placement.stage_of_chunk
    durations = np.zeros((1, graph.num_chunks, graph.num_microbatches, 3))
    emulation = emulate(resolved.arbiters(RULES), durations, 3, owners=owners, log_steps=4)
    expected = {
        Task(kind, stage * 2 + replica, m)
        for stage, row in enumerate(owners.owners)
        for m, replica in enumerate(row)
        for kind in graph.kinds(stage * 2)
    }
    for step in range(3):
        spans = emulation.timeline.of_step(step).spans
        assert sorted(span.task for span in spans) == sorted(expected)
        assert all(span.stage == stage_of[span.task.chunk] for span in spans)
    assert sorted(emulation.logs) == living
    check_replays(emulation)


def test_losses_are_refused_in_several_processes() -> None:
    resolved = OrderingOptions(hint="bf").resolve(num_stages=2, num_microbatches=2, num_replicas=2)
    process = Process.alone(4)
    process.layout = replace(process.layout, num_ranks=4)
    owners = StepOwners(((0, 0, 0, 0), (0, 0, 1, 1)), lost=(2,))
    with pytest.raises(ValueError, match="emulate losses in one process"):
        emulate(resolved.arbiters(RULES), np.zeros((1, 4, 4, 3)), 1, process=process, owners=owners)


def check_replays(emulation: Emulation) -> None:
    for log in emulation.logs.values():
        assert replays_as_recorded(log)


def test_a_stage_holds_for_what_is_in_sight_and_says_so() -> None:
    emulation = run((10, 20, 40), schedule="zb-h1")
    holds = [wait for wait in emulation.timeline.waits if wait.reason is IdleReason.HOLD]
    # W would have been in the way of the I whose gradient is announced
    assert holds, "a stage between others waits for gradients that are on their way"
    assert emulation.looking_ahead == NUM_STAGES
    check_replays(emulation)
    alone = run((10, 20, 40), num_steps=1, schedule="zb-h1", foresight=False)
    assert not [wait for wait in alone.timeline.waits if wait.reason is IdleReason.HOLD]
    assert alone.looking_ahead == 0


def test_a_slow_link_hands_tensors_over_later_and_stages_hold_for_them() -> None:
    slow = {(0, 1): 30.0, (1, 0): 30.0}
    emulation = run((10, 10, 10), num_steps=3, schedule="zb-h1", link_delays_ms=slow)
    assert any(wait.reason is IdleReason.HOLD for wait in emulation.timeline.waits)
    check_replays(emulation)
    for step in range(3):
        spans = {str(span.task): span for span in emulation.timeline.of_step(step).spans}
        for m in range(NUM_MICROBATCHES):
            for sent, got in ((f"0F{m}", f"1F{m}"), (f"1I{m}", f"0I{m}")):
                assert spans[got].start_s - spans[sent].end_s > 0.028  # timers come in whole milliseconds


def test_foresight_sleeps_where_tasks_are_shorter_than_it_needs() -> None:
    emulation = run((1, 1, 1), schedule="zb-h1", shortest_s=100.0)
    assert emulation.looking_ahead == 0
    last = emulation.timeline.steps()[-1]
    answers = [answer for log in emulation.logs.values() for entry in log.segments[last].entries for answer in entry[1]]
    assert not any(isinstance(answer, Announce | WakeAt) for answer in answers)
    check_replays(emulation)


def test_strict_consumption_runs_the_table_in_order() -> None:
    emulation = run((0.2, 0.1, 0.1), schedule="1f1b", consume="strict")
    expected = OrderingOptions(schedule="1f1b", consume="strict").resolve(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    assert expected.table is not None
    for step in range(3):
        assert tuple(map(tuple, emulation.timeline.of_step(step).order())) == expected.table.orders


def test_durations_are_slept_and_a_fused_backward_takes_the_sum_of_its_halves() -> None:
    timeline = run((4, 2, 6), num_steps=1).timeline
    by_kind = {
        kind: np.median([s.end_s - s.start_s for s in timeline.spans if s.task.kind is kind]) * 1e3
        for kind in (TaskKind.F, TaskKind.B)
    }
    assert by_kind[TaskKind.F] >= 3.9
    assert by_kind[TaskKind.B] >= 7.9


def test_the_window_is_kept_and_idle_time_is_explained_without_gaps() -> None:
    timeline = run((1, 1, 1), num_steps=2, hint="bf", window=2).timeline
    assert max(timeline.peak_in_flight()) <= 2
    assert IdleReason.FILL in timeline.of_stage(2).idle_s_by_reason()[2]
    for stage in range(NUM_STAGES):
        for step in timeline.steps():
            alone = timeline.of_stage(stage).of_step(step)
            record = sorted((r.start_s, r.end_s) for r in (*alone.spans, *alone.waits))
            assert all(start <= end for start, end in record)
            gaps = [later[0] - earlier[1] for earlier, later in pairwise(record)]
            assert max(map(abs, gaps)) < 1e-9, "spans and waits must tile a stage's step"


@pytest.mark.parametrize("words", [{"schedule": "1f1b", "consume": "strict"}, {"schedule": "zb-h1"}, {"hint": "bf"}])
def test_steps_may_lack_pairs_another_pattern_in_each(words: dict[str, Any]) -> None:
    edges = (Edge(0, 2, is_optional=True), Edge(1, 2, is_optional=True))
    graph = PipelineGraph(3, NUM_MICROBATCHES, edges)
    order = OrderingOptions(**words).resolve(
        num_stages=3, num_microbatches=NUM_MICROBATCHES, graph=graph, placement=linear(3)
    )
    patterns = [absences([(0, 0), (1, 0), (1, 3)]), (), absences((c, m) for c in (0, 1) for m in range(5))]
    emulation = emulate(order.arbiters(RULES), np.zeros((1, 3, NUM_MICROBATCHES, 3)), 6, absent=patterns)
    for step in range(6):
        ran = sorted(span.task for span in emulation.timeline.of_step(step).spans)
        assert ran == sorted(order.graph.skipping(patterns[step % 3]).tasks())


@pytest.mark.parametrize("order", [{"hint": "bf"}, {"hint": "f-priority"}, {"schedule": True}])
def test_a_fast_encoder_without_backward_never_runs_further_ahead_than_it_may(order: dict[str, Any]) -> None:
    num_microbatches, bound = 64, 3
    graph = PipelineGraph(3, num_microbatches, (Edge(0, 1), Edge(1, 2)), frozen=frozenset({0}))
    if order.pop("schedule", False):
        order["schedule"] = one_forward_one_backward(graph)
    wanted = core.Ordering(read_ahead=bound, **order).resolve(linear(3), graph)
    durations = np.zeros((1, 3, num_microbatches, 3))
    durations[:, 1:] = 1.0
    emulation = emulate(wanted.arbiters(RULES), durations, 2, log_steps=3)
    check_replays(emulation)
    for step in range(2):
        forwards = [span for span in emulation.timeline.of_step(step).spans if span.task.kind is TaskKind.F]
        begun = [span.start_s for span in forwards if span.task.chunk == 0]
        taken = [span.end_s for span in forwards if span.task.chunk == 1]
        untaken = [sum(at <= start for at in begun) - sum(at <= start for at in taken) for start in begun]
        assert len(untaken) == num_microbatches
        assert max(untaken) == bound


def one_forward_one_backward(graph: PipelineGraph) -> ScheduleTable:
    """All of the encoder first, as a table may have it; the decoder's two stages as 1F1B."""
    microbatches = range(graph.num_microbatches)
    last = [Task(kind, 2, m) for m in microbatches for kind in (TaskKind.F, TaskKind.B)]
    middle = [Task(TaskKind.F, 1, 0)]
    for m in microbatches[1:]:
        middle += [Task(TaskKind.F, 1, m), Task(TaskKind.B, 1, m - 1)]
    rows = [Task(TaskKind.F, 0, m) for m in microbatches], [*middle, Task(TaskKind.B, 1, microbatches[-1])], last
    return ScheduleTable.from_orders("mine", linear(3), graph, rows)
