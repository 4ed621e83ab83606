"""The trace holds every span and wait once, in the form that Perfetto reads."""

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from rrfp_jax.observe.chrome_trace import chrome_trace, read_trace, write_trace
from rrfp_jax.schedules.timeline import Timeline
from tests.observe.conftest import SampleTimeline


def test_every_event_has_the_fields_of_its_kind(sample: SampleTimeline) -> None:
    timeline = sample(3, 6, split=True, jitter=0.3, host_ms=0.1, start_s=77.7)
    trace = chrome_trace(timeline)
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert len(complete) == len(timeline.spans) + len(timeline.waits)
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"]["step"], int)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == ["stage 0", "stage 1", "stage 2"]
    assert 0 not in {event.get("tid") for event in events} | {event["pid"] for event in events}
    json.dumps(trace, allow_nan=False)


def test_spans_and_waits_keep_their_meaning(sample: SampleTimeline) -> None:
    timeline = sample(2, 3, durations_ms={"F": 1.0, "B": 2.0})
    events = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]
    first = events[0]
    assert (first["name"], first["ts"], first["dur"]) == ("0F0", 0, 1000)
    assert first["args"] == {"step": 0, "kind": "F: forward", "chunk": 0, "microbatch": 0}
    update = next(event for event in events if event["name"] == "1U")
    assert "microbatch" not in update["args"]
    idle = next(event for event in events if event["cat"] == "idle,fill")
    assert (idle["pid"], idle["ts"], idle["dur"], idle["args"]["reason"]) == (2, 0, 1000, "fill")


def test_no_two_events_of_a_track_overlap(sample: SampleTimeline) -> None:
    tracks = defaultdict(list)
    for event in chrome_trace(sample(4, 12, jitter=0.5, host_ms=0.01, start_s=1e6))["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert len(tracks) == 8
    for entries in tracks.values():
        entries.sort()
        for (start, duration), (following, _) in itertools.pairwise(entries):
            assert round(start + duration, 3) <= following


def test_engines_have_tracks_between_tasks_and_idle_time(offloaded: SampleTimeline) -> None:
    timeline = offloaded(4, 6)
    events = chrome_trace(timeline)["traceEvents"]
    tracks = {event["tid"]: (event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    order = [event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"]
    assert list(tracks.values())[:5] == [*((1, "tasks"), (1, "d2h"), (1, "h2d"), (1, "idle")), (2, "tasks")]
    assert order == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]
    found = [(event["name"], *tracks[event["tid"]]) for event in events if event.get("cat", "").startswith("task")]
    names = {"compute": "tasks"}
    assert found == [(str(s.task), s.stage + 1, names.get(s.lane, s.lane)) for s in timeline.spans]
    copy = next(event for event in events if event["name"] == "0O3")
    assert copy["args"] == {"step": 0, "kind": "O: operation on d2h", "chunk": 0, "microbatch": 3}


def test_file_is_the_object(sample: SampleTimeline, tmp_path: Path) -> None:
    timeline = sample(2, 2)
    write_trace(timeline, tmp_path / "new" / "trace.json")
    assert json.loads((tmp_path / "new" / "trace.json").read_text()) == chrome_trace(timeline)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trace.json"]


def test_what_is_written_is_read_again(offloaded: SampleTimeline, tmp_path: Path) -> None:
    timeline, path = offloaded(4, 6), tmp_path / "trace.json"
    write_trace(timeline, path)
    read = read_trace(path)
    assert read.num_stages == timeline.num_stages
    assert [s[:3] + s[5:] for s in read.spans] == [s[:3] + s[5:] for s in timeline.spans]
    first_s = min(s.start_s for s in timeline.spans)
    for found, written in zip(read.spans, timeline.spans, strict=True):
        assert found.start_s + first_s == pytest.approx(written.start_s, abs=1e-8)
        assert found.end_s + first_s == pytest.approx(written.end_s, abs=1e-8)
    assert [w.reason for w in read.waits] == [w.reason for w in timeline.waits if w.end_s > w.start_s]


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'])
def test_another_file_is_no_trace(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"is no trace of a run .*: take the trace.json of a run directory"):
        read_trace(tmp_path / "trace.json")
    with pytest.raises(ValueError, match=r"cannot be read .*: name the directory of a run"):
        read_trace(tmp_path / "none.json")


def test_empty_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no task"):
        write_trace(Timeline(2), tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
