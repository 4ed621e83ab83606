"""Event logs as files: read as they were written, replayed to the same instructions, refused where they are bad."""

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import (
    HINTS,
    Agreement,
    ClockTick,
    ForesightRules,
    GroupProtocol,
    InputArrived,
    Message,
    MessageKind,
    Ordering,
    RunTask,
    StageSetup,
    StepRules,
    TaskAnnounced,
    TaskFinished,
    group_arbiter,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.core.overlap import OverlappedArbiter
from rrfp_jax.core.snapshot import rebuild, save_arbiter
from rrfp_jax.records import from_plain, to_plain
from rrfp_jax.runtime.event_log import FORMAT, VERSION, RunLog, log_name, open_segment, read_log, take_log, write_log
from rrfp_jax.runtime.failure import StageState, WaitForReport
from rrfp_jax.runtime.replay import happenings, replay_run, standing
from rrfp_jax.schedules import Op, ScheduleRequest, Task, TaskKind, build_schedule, chain, linear, with_operations
from rrfp_jax.schedules.timeline import Timeline
from tests.checking.test_random_walk import random_absences, random_graph, random_placement
from tests.runtime.logged_runs import LoggedRun, arbiter_of

ORDERS: list[dict[str, Any]] = [
    *({"hint": name} for name in HINTS),
    {"hint": "bf", "window": 1},
    {"hint": "b-priority", "window": (3, 2, 1)},
    {"schedule": "1f1b", "consume": "strict"},
    {"schedule": "zb-h1", "hint": "schedule"},
    {"schedule": "interleaved-1f1b", "consume": "strict"},
]


def log_of(run: LoggedRun, **more: Any) -> RunLog:
    logs = {stage: log for (stage, _), log in run.logs.items()}
    return take_log(logs, taken_s=run.now_s, **more)


def through_a_file(log: RunLog, folder: Path) -> RunLog:
    write_log(log, folder / log_name())
    return read_log(folder / log_name())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("certain_ahead", "decides_early"), [(False, False), (True, False), (False, True)])
def test_every_order_replays_as_recorded(
    order: dict[str, Any], certain_ahead: bool, decides_early: bool, tmp_path: Path
) -> None:
    resolved = OrderingOptions(**order).resolve(num_stages=3, num_microbatches=6)
    arbiters = {(a.stage, 0): a for a in resolved.arbiters(StepRules(), certain_ahead=certain_ahead)}
    run = LoggedRun(arbiters, draw=Random(0).randrange, decides_early=decides_early).start(4).run()
    log = log_of(run)
    replay = replay_run([through_a_file(log, tmp_path)])
    assert replay.logs == (log,)
    assert [stage.difference or stage.refusal for stage in replay.stages] == [None] * 3
    assert replay.num_events == sum(len(s.entries) for log in run.logs.values() for s in log.segments)
    assert [stage.arbiter.key() for stage in replay.stages] == [arbiter.key() for arbiter in arbiters.values()]
    events = [type(event) for log in run.logs.values() for s in log.segments for event, _ in s.entries]
    assert (TaskAnnounced in events) == (resolved.foresight is not None)
    assert (ClockTick in events) == (resolved.foresight is not None)


@pytest.mark.parametrize("consume", ["strict", "ready"])
def test_operations_replay_on_their_lanes(consume: str, tmp_path: Path) -> None:
    out = Op("O", after="F", lane="d2h", frees=0.5, ms=2.0, run=print)
    back = Op("L", after=out, before="B", lane="h2d", holds=0.5, ms=2.0, pairs=frozenset({(0, 1), (0, 3)}))
    table = build_schedule("1f1b", ScheduleRequest(num_stages=3, num_microbatches=4))
    table = with_operations(table, (replace(out, pairs=back.pairs), back, Op("G", before="F", per="chunk", lane="net")))
    order = Ordering(schedule=table, consume=consume).resolve(table.placement, chain(3, 4))
    run = LoggedRun({(a.stage, 0): a for a in order.arbiters(StepRules())}, draw=Random(0).randrange).start(3).run()
    read = through_a_file(log_of(run), tmp_path)
    assert [op.letter for op in read.graph.ops] == ["O", "L", "G"]
    assert read.graph.ops[0].run is None
    assert read.graph.ops[1] == back
    replay = replay_run([read])
    assert [stage.difference or stage.refusal for stage in replay.stages] == [None] * 3
    beside = replay.timeline().of_step(2).beside()
    assert sorted(f"{span.task} {span.lane}" for span in beside) == [
        *("0G net", "0L1 h2d", "0L3 h2d", "0O1 d2h", "0O3 d2h", "1G net", "2G net"),
    ]


def random_arbiters(random: Random) -> dict[tuple[int, int], Any]:
    placement = random_placement(random, random.randint(1, 4), 2)
    graph = random_graph(random, placement.num_chunks, random.randint(1, 5))
    rules = StepRules(
        ordered=random.random() < 0.5, updates=random.random() < 0.7, agreement=random.choice(list(Agreement))
    )
    hints = [HINTS[random.choice(list(HINTS))] for _ in range(placement.num_stages)]
    if random.random() < 0.3:
        rows = [random.sample(tasks, len(tasks)) for tasks in (list(graph.tasks(c)) for c in placement.chunks_of_stage)]
        hints = [schedule_hint(row[: random.randint(0, len(row))]) for row in rows]
    protocol, certain_ahead = random.choice(list(GroupProtocol)), random.random() < 0.5
    windows = [random.choice((1, 2, 8)) for _ in range(placement.num_stages)]
    return {
        (stage, member): group_arbiter(
            protocol,
            StageSetup(
                graph,
                placement,
                stage,
                consumption=ready(hints[stage]),
                window=windows[stage],
                rules=rules,
                certain_ahead=certain_ahead,
                foresight=None if hints[stage].row is None else ForesightRules(),
            ),
            member,
            num_members,
        )
        for stage in range(placement.num_stages)
        for num_members in [random.choice((1, 1, 2, 3)) if protocol is not GroupProtocol.OFF else 1]
        for member in range(num_members)
    }


@given(st.integers(0, 2**64))
@settings(max_examples=60)
def test_an_arbiter_rebuilt_between_steps_goes_on_as_if_nothing_had_been(seed: int) -> None:
    random = Random(seed)
    arbiters = random_arbiters(random)
    graph = next(iter(arbiters.values())).graph
    absences = tuple(random_absences(random, graph) for _ in range(2))
    run = LoggedRun(arbiters, draw=random.randrange, decides_early=random.random() < 0.5).start(3, absences)
    twins = {place: arbiter.copy() for place, arbiter in arbiters.items()}
    while run.pending:
        place, event = run.draw_event()
        original = arbiters[place]
        if not original.is_active:
            made, segment = save_arbiter(original), run.logs[place].segments[-1]
            assert from_plain(type(made), json.loads(json.dumps(to_plain(made)))) == made
            events = [*segment.early, *(event for event, _ in segment.entries)]
            twins[place] = open_segment(
                rebuild(made, graph, original.placement), with_fields(segment, early=tuple(events))
            )
            assert twins[place].key() == original.key()
            assert type(twins[place]) is type(original)
        expected, reason = original.copy(), twins[place].idle_reason()
        assert reason == expected.idle_reason()
        assert twins[place].handle(event) == expected.handle(event)
        twins[place].validate()
        run.take(place, event)
    assert all(arbiter.step == 2 and not arbiter.is_active for arbiter in arbiters.values())


@given(st.integers(0, 2**64), st.integers(0, 400))
@settings(max_examples=30)
def test_random_runs_replay_from_their_files_wherever_they_end(seed: int, num_events: int) -> None:
    random = Random(seed)
    arbiters = random_arbiters(random)
    decides_early = random.random() < 0.5
    run = LoggedRun(arbiters, draw=random.randrange, decides_early=decides_early).start(4).run(num_events)
    for member in range(max(member for _, member in arbiters) + 1):
        logs = {stage: log for (stage, m), log in run.logs.items() if m == member}
        log = take_log(logs, taken_s=run.now_s, rank=member)
        replay = replay_run([from_plain(RunLog, json.loads(json.dumps(to_plain(log))))])
        for stage in replay.stages:
            assert stage.difference is stage.refusal is None
            assert stage.arbiter.key() == arbiters[stage.arbiter.stage, member].key()


@given(st.integers(0, 2**64), st.integers(0, 400))
@settings(max_examples=30)
def test_steps_that_overlap_replay_from_every_segment(seed: int, num_events: int) -> None:
    random = Random(seed)
    arbiters = {
        place: OverlappedArbiter(replace(arbiter.setup, foresight=None, delay=1))
        for place, arbiter in random_arbiters(random).items()
        if not place[1]
    }
    early = random.random() < 0.5
    run = LoggedRun(arbiters, draw=random.randrange, decides_early=early, log_steps=3).start(6).run(num_events)
    log = from_plain(RunLog, json.loads(json.dumps(to_plain(log_of(run)))))
    replay = replay_run([log])
    for stage in replay.stages:
        assert stage.difference is stage.refusal is None
        assert stage.arbiter.key() == arbiters[stage.arbiter.stage, 0].key()
        for segment in stage.log.segments:
            open_segment(stage.arbiter, segment).validate()
    check_nothing_happens_at_once(replay.timeline())


def overlapped_log() -> RunLog:
    arbiters = {(s, 0): OverlappedArbiter(replace(arbiter_of(s).setup, delay=1)) for s in range(3)}
    log = log_of(LoggedRun(arbiters, draw=Random(0).randrange).start(5).run(132))
    assert all(segment.under_way for stage in log.stages for segment in stage.segments)
    return log


@pytest.mark.parametrize("make_log", [overlapped_log, None])
def test_a_changed_instruction_is_the_first_difference(make_log: Any) -> None:
    log = make_log() if make_log else log_of(LoggedRun({(s, 0): arbiter_of(s) for s in range(3)}).start(2).run())
    stages = list(log.stages)
    segments = list(stages[1].segments)
    entries = list(segments[0].entries)
    number = next(n for n, (_, out) in enumerate(entries) if any(isinstance(i, RunTask) for i in out))
    event, instructions = entries[number]
    entries[number] = (event, (*instructions[:-1], RunTask(event.step, Task(TaskKind.W, 1, 2))))
    segments[0] = with_fields(segments[0], entries=tuple(entries))
    stages[1] = with_fields(stages[1], segments=tuple(segments))
    replay = replay_run([with_fields(log, stages=tuple(stages))])
    assert [bool(stage.difference) for stage in replay.stages] == [False, True, False]
    difference = replay.stages[1].difference
    assert difference is not None
    assert (difference.number, difference.event) == (number, event)
    assert "1W2" in str(difference).splitlines()[1]
    assert replay.stages[1].num_events == number


def test_a_state_that_does_not_follow_from_the_events_before_is_a_difference() -> None:
    log = log_of(LoggedRun({(0, 0): arbiter_of(0, num_stages=1)}).start(2).run())
    first, second, *_ = log.stages[0].segments
    wrong = with_fields(second, ended=second.ended + 1)
    replay = replay_run([with_fields(log, stages=(with_fields(log.stages[0], segments=(first, wrong)),))])
    assert "does not begin in the recorded state" in str(replay.stages[0].difference)


def with_fields(record: Any, **values: Any) -> Any:
    return type(record)(**{**vars(record), **values})


def test_a_step_that_is_under_way_otherwise_than_recorded_is_a_difference() -> None:
    log = overlapped_log()
    whole = replay_run([log]).stages[1]
    assert [standing(whole, 1, step).splitlines()[0] for step in (2, 3, 4, 5)] == [
        "  step 2 had ended here",
        "  1F1 has finished",
        "  1F1 waits for activation of microbatch 1 from chunk 0 to chunk 1",
        "  step 5 had not begun here",
    ]
    segments, others = log.stages[1].segments, (log.stages[0], log.stages[2])
    past = segments[1].under_way
    assert past is not None
    assert past.finished
    for changed in (with_fields(past, hint_state=1 - past.hint_state), with_fields(past, is_told=not past.is_told)):
        begun = (segments[0], with_fields(segments[1], under_way=changed))
        replay = replay_run([with_fields(log, stages=(with_fields(log.stages[1], segments=begun), *others))])
        assert str(replay.stages[1].difference).endswith("the stage's next step does not begin in the recorded state")
    unready = with_fields(past, finished=past.finished[:-1], running=(*past.running, past.running[0]))
    begun = (segments[0], with_fields(segments[1], under_way=unready))
    with pytest.raises(ValueError, match=r"the log of stage 1 contradicts itself: .* lacks something"):
        replay_run([with_fields(log, stages=(with_fields(log.stages[1], segments=begun), *others))])


def test_the_event_that_broke_the_core_breaks_it_again() -> None:
    run = LoggedRun({(0, 0): arbiter_of(0)}).start(1).run()
    alien = InputArrived(0, 99.0, Message(MessageKind.GRADIENT, 2, 1, 0))
    with pytest.raises(RuntimeError, match="nothing here waits"):
        run.take((0, 0), alien)
    (stage,) = replay_run([log_of(run)]).stages
    assert stage.difference is None
    assert "nothing here waits for it" in str(stage.refusal)


def test_the_timeline_is_that_of_the_events() -> None:
    run = LoggedRun({(s, 0): arbiter_of(s) for s in range(3)}).start(2).run(40)
    replay = replay_run([log_of(run)])
    timeline = replay.timeline()
    finished = {
        (event.step, event.task): event.time_s
        for log in run.logs.values()
        for segment in log.segments
        for event, _ in segment.entries
        if hasattr(event, "task")
    }
    running = {(a.step, task) for a in run.arbiters.values() for task in a.running()}
    assert running
    assert {(s.step, s.task) for s in timeline.spans} == finished.keys() | running
    assert all(s.end_s == finished[s.step, s.task] for s in timeline.spans if (s.step, s.task) not in running)
    assert timeline.waits
    check_nothing_happens_at_once(timeline)


def check_nothing_happens_at_once(timeline: Timeline) -> None:
    for stage in range(timeline.num_stages):
        record = sorted(
            (r.start_s, r.end_s) for r in (*timeline.of_stage(stage).spans, *timeline.of_stage(stage).waits)
        )
        assert all(before[1] <= after[0] for before, after in pairwise(record))


def test_processes_are_replayed_together_on_one_clock() -> None:
    run = LoggedRun({(s, 0): arbiter_of(s) for s in range(2)}).start(1).run(7)
    alone = replay_run([log_of(run)])
    logs = [
        take_log({rank: run.logs[rank, 0]}, taken_s=run.now_s, rank=rank, clock_offset_s=100.0 * rank)
        for rank in range(2)
    ]
    replay = replay_run(logs[::-1])
    assert [stage.rank for stage in replay.stages] == [0, 1]
    first = alone.timeline().spans
    assert {(s.task, s.start_s - 100.0 * s.stage) for s in replay.timeline().spans} == {
        (s.task, s.start_s) for s in first
    }
    assert [state.rank for state in replay.report().stages] == [0, 1]
    with pytest.raises(ValueError, match="two logs are of rank 0"):
        replay_run([logs[0], logs[0]])
    other = LoggedRun({(1, 0): arbiter_of(1, num_stages=4)}).start(1).run()
    with pytest.raises(ValueError, match="ranks 0 and 1 are of different pipelines"):
        replay_run([logs[0], log_of(other, rank=1)])


def test_the_end_is_told_as_the_run_told_it() -> None:
    lost = Message(MessageKind.GRADIENT, 2, 1, 1)
    run = LoggedRun({(s, 0): arbiter_of(s) for s in range(3)}, lost=frozenset({lost})).start(1).run()
    failed = StageState(
        stage=2,
        step=0,
        running="2B1",
        failed=True,
        since_s=0.0,
        idle_reason=None,
        held=(),
        waits=(),
        waits_for_stages=(),
    )
    report = WaitForReport(summary="a cable is out", stages=(failed,), lost_ranks=(3,), lost_stages=(1,))
    ended = replay_run([log_of(run, report=report)]).report()
    assert ended.summary == "a cable is out"
    assert (ended.lost_ranks, ended.lost_stages) == ((3,), (1,))
    assert [state.failed for state in ended.stages] == [False, False, True]
    assert f"1B1 waits for the {lost} (stage 2)" in str(ended)


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (
            "leader",
            [
                "the activation of microbatch 0 from chunk 0 to chunk 1 arrived",
                "member 1 said: the activation of microbatch 0 from chunk 0 to chunk 1 is here",
                "member 1 was told: task 0 is 1F0",
                "1F0 was dispatched",
            ],
        ),
        (
            "propose",
            [
                "the activation of microbatch 0 from chunk 0 to chunk 1 arrived",
                "member 1 was told: round 0, 1F0",
                "member 1 said: round 0, 1F0",
                "1F0 was dispatched",
            ],
        ),
    ],
)
def test_the_story_of_a_stage_of_two_processes_tells_what_they_said(protocol: str, expected: list[str]) -> None:
    alone = arbiter_of(1, num_stages=2)
    arbiters: dict[tuple[int, int], Any] = {(0, 0): arbiter_of(0, num_stages=2)}
    for member in range(2):
        arbiters[1, member] = group_arbiter(
            protocol,
            StageSetup(
                alone.graph,
                alone.placement,
                1,
                consumption=alone.consumption,
                window=2,
                rules=alone.rules,
            ),
            member,
            2,
        )
    run = LoggedRun(arbiters, log_steps=4).start(1).run()
    replay = replay_run([take_log({1: run.logs[1, m]}, taken_s=run.now_s, rank=m) for m in range(2)])
    assert [(stage.arbiter.stage, stage.rank) for stage in replay.stages] == [(1, 0), (1, 1)]
    told = [what for _, what in happenings(replay.stages[0], 0, 0)]
    assert told[: len(expected)] == expected
    spans = replay.timeline().spans
    assert len(spans) == len({span.task for span in spans}) == 6


# -- files that are none ---------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / log_name(3, 8)
    write_log(log_of(LoggedRun({(s, 0): arbiter_of(s) for s in range(3)}).start(2).run(50)), path)
    return path


def test_the_same_log_gives_the_same_bytes_and_nothing_else_is_left(written: Path) -> None:
    data = written.read_bytes()
    write_log(read_log(written), written)
    assert written.read_bytes() == data
    assert [path.name for path in written.parent.iterdir()] == ["events-rank3.json.gz"]


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_log(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_cut_or_damaged_are_refused(written: Path) -> None:
    data = written.read_bytes()
    for length in (0, 1, 2, 9, 30, len(data) // 2, len(data) - 1):
        written.write_bytes(data[:length])
        assert "is damaged or cut short" in refused(written) or length < 2
    for position in range(10, len(data), len(data) // 20):
        written.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        assert "is damaged or cut short" in refused(written)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": "rrfp-jax event log"}', "version None"),
        (b'{"format": "rrfp-jax event log", "version": 1, "log": {}}', "this program reads version 9"),
        (b'{"format": "another"}', "is no event log"),
        (b"[1, 2]", "is no event log"),
        (b"\x80\x04}\x94.", "is no event log"),
        (b"[" * 100_000, "is no event log"),
        (b'{"format": "rrfp-jax event log", "version": 9}', "an object with rank"),
    ],
)
def test_foreign_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / log_name()
    path.write_bytes(gzip.compress(content))
    assert message in refused(path)


def test_a_log_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / log_name()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(257):
            file.write(b" " * (1 << 20))
    assert "unfolds to more than 256 MiB" in refused(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("graph", "num_microbatches"), 10**9, "num_microbatches is 1000000000: give at most"),
        (("graph", "num_microbatches"), 10**18, "num_microbatches is 1000000000000000000: give at most"),
        (("graph", "num_chunks"), 10**9, "num_chunks is 1000000000: give at most"),
        (("graph", "num_chunks"), 10**6, "more than the 1048576 pairs that a step may have"),
        (("graph", "num_chunks"), 10**5, "the graph has 100000 chunks and the placement 2 of them"),
        (("placement", "stage_of_chunk"), [0, 10**9], "leaves stages [1, 2, 3, 4, 5, 6, 7, 8] without a chunk"),
        (("stages", 0, "arbiter", "evaluation_batches"), 10**9, "a replay has at most 262144"),
        (("taken_s",), float("nan"), "a time in it is no number of seconds"),
        (("clock_offset_s",), 1e308, "a time in it is no number of seconds"),
        (("stages", 0, "segments", 0, "entries", 0, 0, 2), float("inf"), "a time in it is no number of seconds"),
    ],
)
def test_numbers_of_a_log_are_compared_before_anything_is_made_as_large(
    where: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    log = log_of(
        LoggedRun({(s, 0): arbiter_of(s, num_stages=2, num_microbatches=2) for s in range(2)}).start(2).run(25)
    )
    plain: Any = to_plain(log)
    inner = plain
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path = tmp_path / log_name()
    path.write_bytes(gzip.compress(json.dumps({"format": FORMAT, "version": VERSION, "log": plain}).encode()))
    assert message in refused(path)


def test_files_that_are_not_compressed_or_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert "is not compressed" in refused(tmp_path / "x.json")
    assert "No such file" in refused(tmp_path / "y.json")
    assert "Is a directory" in refused(tmp_path)


@given(st.integers(0, 2**64))
@settings(max_examples=150)
def test_logs_with_a_changed_value_are_refused_or_replayed_but_never_break_the_program(seed: int) -> None:
    random = Random(seed)
    if random.random() < 0.5:
        log = overlapped_log()
    else:
        log = log_of(LoggedRun({(s, 0): arbiter_of(s, num_microbatches=2) for s in range(2)}).start(2).run(25))
    plain = to_plain(log)
    node, key = plain, "stages"
    while isinstance(node[key], list | dict) and len(node[key]) and random.random() < 0.95:
        node = node[key]
        key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
    node[key] = random.choice([None, True, -1, 0, 1, 7, 2.5, "x", "0F0", [], ["RunTask", 0, "0F0"], {}])
    try:
        replay = replay_run([from_plain(RunLog, json.loads(json.dumps(plain)))])
    except ValueError:
        return
    str(replay.report())
    replay.timeline()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 7}, "stage 7 is none of the 3 stages"),
        ({"hint": "mine"}, "hint 'mine' is unknown"),
        ({"hint": "schedule"}, "lacks the row"),
        ({"window": None}, "has window None"),
        ({"window": 0}, "has window 0"),
    ],
)
def test_arbiters_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    made = with_fields(save_arbiter(arbiter_of(1)), **change)
    with pytest.raises(ValueError, match=message):
        rebuild(made, chain(3, 3), linear(3))


def test_a_segment_that_opens_with_an_event_that_cannot_come_early_is_refused() -> None:
    log = log_of(LoggedRun({(0, 0): arbiter_of(0, num_stages=1)}).start(2).run())
    first, second, *_ = log.stages[0].segments
    wrong = with_fields(second, early=(TaskFinished(1, 0.0, Task(TaskKind.F, 0, 0)),))
    with pytest.raises(ValueError, match="the log of stage 0 contradicts itself"):
        replay_run([with_fields(log, stages=(with_fields(log.stages[0], segments=(first, wrong)),))])


def test_rows_and_names_tell_all_of_a_consumption() -> None:
    row = tuple(chain(3, 3).tasks([1]))
    for consumption in (ready(HINTS["bfw"]), ready(schedule_hint(row)), strict(row)):
        arbiter = group_arbiter("off", StageSetup(chain(3, 3), linear(3), 1, consumption=consumption, window=2), 0, 1)
        twin = rebuild(save_arbiter(arbiter), arbiter.graph, arbiter.placement)
        assert save_arbiter(twin) == save_arbiter(arbiter)
        assert twin._ranked.at == arbiter._ranked.at


def test_reading_and_replaying_load_no_jax(written: Path) -> None:
    program = (
        "import sys; from rrfp_jax.runtime.event_log import read_log; from rrfp_jax.runtime.replay import replay_run; "
        f"print(replay_run([read_log({str(written)!r})]).report()); "
        "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], capture_output=True)
