"""Replay the event logs of a run: the same core, the same instructions, on any machine and without a model.

::

    rrfp replay runs/mine
    rrfp replay runs/mine --microbatch 3 --stage 1 --timeline runs/replay.html

Every event is fed through the core again, and every instruction compared with the recorded one; then follow the story
of the microbatch that was asked for, and the task that every stage waited for when the log was taken. Ends with 0 if
all instructions are the same, with 1 if one differs (this program is not the one that wrote the log), with 2 on bad
input.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rrfp_jax.commands.common.console import add_timeline_argument, check_outputs, draw, say
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.runtime.event_log import PATTERN, read_log
from rrfp_jax.runtime.replay import RunReplay, happenings, replay_run, standing
from rrfp_jax.schedules import NO_MICROBATCH
from rrfp_jax.storage import local_copy, located

_DIFFERS = 1


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        check_outputs(timeline=arguments.timeline, trace=arguments.trace)
        run = replay_run([read_log(path) for path in _files(arguments.logs)], rules_file=arguments.rules)
        told = _Story(run, arguments.microbatch, arguments.stage, arguments.step)
        timeline = run.timeline()
        if (arguments.timeline or arguments.trace) and not timeline.spans:
            raise ValueError("the log holds no task, so there is no timeline: leave --timeline and --trace out")
    if arguments.timeline:
        draw([(f"replay of {' '.join(arguments.logs)}", timeline)], arguments.timeline)
    if arguments.trace:
        from rrfp_jax.observe.chrome_trace import write_trace

        write_trace(timeline, arguments.trace)
    say(json.dumps(_figures(run, told)) if arguments.json else "\n\n".join(_text(run, told)))
    return _DIFFERS if any(stage.difference for stage in run.stages) else 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("replay", __doc__)
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="a run directory, or the logs of one run's processes (events*.json.gz)"
    )
    parser.add_argument(
        "--rules",
        metavar="FILE.py",
        help="the file of the rule that was the run's hint; it is run, so take your own copy (default: a log names no "
        "code that is run)",
    )
    story = parser.add_argument_group("story of a microbatch")
    story.add_argument(
        "--microbatch",
        type=int,
        metavar="M",
        help=f"tell the story of this microbatch; {NO_MICROBATCH}: what happens once per step, R, U and agreement",
    )
    story.add_argument(
        "--stage", type=int, metavar="S", help="tell what this stage saw (default: every stage of the logs)"
    )
    story.add_argument("--step", type=int, metavar="N", help="tell this step (default: the last one)")
    output = parser.add_argument_group("output")
    add_timeline_argument(output, "replay")
    output.add_argument("--trace", metavar="FILE.json", help="write it for ui.perfetto.dev")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _files(names: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for path in map(located, names):
        found = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no event log ({PATTERN}): one is written there when a run is given up")
        files += map(local_copy, found)
    return list(dict.fromkeys(files))


class _Story:
    """The events of one microbatch in one step, on the requested stages; empty without a microbatch."""

    def __init__(self, run: RunReplay, microbatch: int | None, stage: int | None, step: int | None) -> None:
        self.run, self.microbatch = run, microbatch
        if microbatch is None and (stage is not None or step is not None):
            raise ValueError("--stage and --step choose a part of a microbatch's story: give --microbatch too")
        self.stages = [s for s in run.stages if stage in (None, s.arbiter.stage)]
        if not self.stages:
            raise ValueError(
                f"stage {stage} is not in these logs: choose {_listed({s.arbiter.stage for s in run.stages})}"
            )
        last = max((s.arbiter.step for s in run.stages if s.arbiter.step is not None), default=0)
        self.step = last if step is None else step
        num_microbatches = run.logs[0].graph.num_microbatches
        if microbatch is not None and not NO_MICROBATCH <= microbatch < num_microbatches:
            raise ValueError(f"microbatch {microbatch} is none of the run's: choose 0 to {num_microbatches - 1}")
        steps = {event.step for s in run.stages for g in s.log.segments for event, _ in g.entries} | {last}
        if self.step not in steps:
            raise ValueError(f"step {self.step} is not in these logs: choose {_listed(steps)}")

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yields one part of the story per stage."""
        if self.microbatch is None:
            return
        start_s = min(
            (e.time_s + s.offset_s for s in self.run.stages for g in s.log.segments for e, _ in g.entries),
            default=0.0,
        )
        for stage in self.stages:
            zero_s = start_s - stage.offset_s
            yield {
                "rank": stage.rank,
                "stage": stage.arbiter.stage,
                "step": self.step,
                "microbatch": self.microbatch,
                "events": [
                    {"time_ms": round((time_s - zero_s) * 1e3, 6), "what": what}
                    for time_s, what in happenings(stage, self.microbatch, self.step)
                ],
                "at_the_end": [line.strip() for line in standing(stage, self.microbatch, self.step).splitlines()],
            }


def _text(run: RunReplay, told: _Story) -> Iterator[str]:
    yield _verdict(run)
    for part in told.parts():
        subject = "what happens once per step" if told.microbatch == NO_MICROBATCH else f"microbatch {told.microbatch}"
        rank = f" (rank {part['rank']})" if len(run.logs) > 1 else ""
        lines = [f"{subject} in step {part['step']} on stage {part['stage']}{rank}:"]
        lines += [f"  {event['time_ms']:12.3f} ms  {event['what']}" for event in part["events"]]
        yield "\n".join([*lines, "  at the end:", *(f"    {line}" for line in part["at_the_end"])])
    yield str(run.report())


def _verdict(run: RunReplay) -> str:
    differences = [stage.difference for stage in run.stages if stage.difference is not None]
    num_stages = len({stage.arbiter.stage for stage in run.stages})
    numbers = f"{run.num_events} events of {num_stages} stage{'' if num_stages == 1 else 's'}"
    if len(run.logs) > 1:
        numbers += f" from {len(run.logs)} processes"
    if differences:
        return f"the core answers otherwise than in the run, first here:\n{differences[0]}"
    refusals = [
        f"stage {s.arbiter.stage} refused its last event, as in the run: {s.refusal}" for s in run.stages if s.refusal
    ]
    return "\n".join([f"{numbers} replayed: every instruction is the same as in the run", *refusals])


def _figures(run: RunReplay, told: _Story) -> dict[str, Any]:
    return {
        "num_events": run.num_events,
        "is_same": not any(stage.difference for stage in run.stages),
        "differences": [str(stage.difference) for stage in run.stages if stage.difference],
        "refusals": [stage.refusal for stage in run.stages if stage.refusal],
        "stages": [
            {
                "rank": stage.rank,
                "stage": stage.log.arbiter.stage,
                "hint": stage.log.arbiter.hint,
                "consume": "strict" if stage.log.arbiter.is_strict else "ready",
                "window": stage.log.arbiter.window,
                "step": stage.arbiter.step,
                "num_events": stage.num_events,
            }
            for stage in run.stages
        ],
        "story": list(told.parts()),
        "report": asdict(run.report()),
    }


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


if __name__ == "__main__":
    run_command(main)
