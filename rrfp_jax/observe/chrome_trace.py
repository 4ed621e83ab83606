"""A timeline as a trace file for https://ui.perfetto.dev or chrome://tracing.

The format is Chrome's Trace Event Format (JSON object form): one process per stage, in it one track of tasks, one for
each engine beside it, and one of idle time. Every box is a complete event (``ph: X``); ``ts`` and ``dur`` are
microseconds from the first start. An event is named by the task's text form (``2F5``): Perfetto colours by the name
without its digits, hence by kind.
"""

import json
import os
from pathlib import Path
from typing import Any

from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.panels import first_start_s
from rrfp_jax.observe.style import IDLE_LOOKS, task_looks
from rrfp_jax.record_files import parse_json, read_record
from rrfp_jax.schedules import COMPUTE, Task
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait

_IDLE, _TASKS = "idle", "tasks"
"""Names of tracks; the others are those of engines."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the trace as an object for ``json.dump``; raises ValueError for a timeline without tasks."""
    zero_s, stages = first_start_s(timeline), range(timeline.num_stages)
    looks = task_looks({span.task.kind: span.lane for span in timeline.spans})
    engines = sorted({(span.stage, span.lane) for span in timeline.beside()})
    tracks = [[COMPUTE, *(lane for of, lane in engines if of == stage), _IDLE] for stage in stages]
    most, events = max(map(len, tracks)), list[dict[str, Any]]()

    def place(stage: int, track: str) -> dict[str, Any]:
        # Perfetto takes thread 0 for the kernel's idle thread and thread numbers for unique on the machine.
        return {"pid": stage + 1, "tid": most * stage + 1 + tracks[stage].index(track)}

    def add(entry: Span | Wait, track: str, **fields: Any) -> None:
        # Both ends are rounded, to nanoseconds, before they are subtracted: neighbours never overlap by rounding.
        start_us, end_us = (round((time_s - zero_s) * 1e6, 3) for time_s in (entry.start_s, entry.end_s))
        times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
        events.append({"ph": "X", **place(entry.stage, track), **times, **fields})

    for stage in stages:
        process = {"ph": "M", "pid": stage + 1}
        events.append({**process, "name": "process_name", "args": {"name": f"stage {stage}"}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": stage}})
        for number, track in enumerate(tracks[stage]):
            thread = {"ph": "M", **place(stage, track)}
            events.append({**thread, "name": "thread_name", "args": {"name": _TASKS if track == COMPUTE else track}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in timeline.spans:
        task = span.task
        args: dict[str, Any] = {"step": span.step, "kind": looks[task.kind].label, "chunk": task.chunk}
        if task.microbatch >= 0:
            args["microbatch"] = task.microbatch
        add(span, span.lane, name=str(task), cat=f"task,{task.kind}", args=args)
    for wait in timeline.waits:
        if wait.end_s > wait.start_s:
            reason = wait.reason
            args = {"step": wait.step, "reason": reason.value, "meaning": IDLE_LOOKS[reason].label}
            add(wait, _IDLE, name=f"idle: {reason}", cat=f"idle,{reason}", args=args)
    summary = {
        f"step {step}": f"makespan {one.makespan_s() * 1e3:.3f} ms, bubble {one.bubble_fraction():.4f}"
        for step, one in zip(timeline.steps(), timeline.by_step(), strict=True)
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes :func:`chrome_trace` to ``path`` in one piece."""
    text = json.dumps(chrome_trace(timeline), allow_nan=False, separators=(",", ":"))
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Returns the timeline that :func:`write_trace` wrote, on a clock whose zero is its first start.

    Raises ValueError, with the file's name, where there is none or it is something else.
    """
    try:
        events = parse_json(read_record(Path(path))[0])["traceEvents"]
        boxes = [event for event in events if event["ph"] == "X"]
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        timeline = Timeline(max(event["pid"] for event in boxes))
        for event in boxes:
            start_s, end_s = event["ts"] / 1e6, round(event["ts"] + event["dur"], 3) / 1e6
            place = event["args"]["step"], event["pid"] - 1
            if event["cat"].startswith("task,"):
                lane = lanes[event["pid"], event["tid"]]
                task = Task.parse(event["name"])
                timeline.spans.append(Span(*place, task, start_s, end_s, COMPUTE if lane == _TASKS else lane))
            else:
                timeline.waits.append(Wait(*place, start_s, end_s, IdleReason(event["args"]["reason"])))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read ({error.strerror}): name the directory of a run") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of a run ({error}): take the trace.json of a run directory") from None
    return timeline
