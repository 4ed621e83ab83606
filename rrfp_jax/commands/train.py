"""Train a language model through a readiness-driven pipeline.

::

    rrfp train --config cpu/debug --steps 20 --hint fb --run-dir runs/mine
    rrfp train --config cpu/debug --window 4 --print-config >mine.yaml
    rrfp launch --processes 4 -- train --config cpu/four_processes
    rrfp train --config gpu/one_node_8 --compile-for h100

A table of the stages is printed before the first step; then one line per step. The run directory receives the resolved
configuration, ``metrics.jsonl`` (one object per step), checkpoints, a picture and a trace of the last step; a run that
is given up also leaves its report there, ``failure.json``, and its last events.

In a run directory that holds checkpoints training goes on from the newest one, in whatever layout this run has;
``--fresh`` starts over. One run at a time works in a run directory, a second one is refused. Told to stop (SIGTERM,
SIGHUP, SIGUSR1, SIGUSR2), a run saves at the next step boundary and ends with exit code 7. Output that cannot be
written, because its reader is gone or a disk is full, is left out, and the run goes on.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.cluster.config import ATTEMPT, NUM_RANKS, PROCESS_NUMBER, RANK_COUNTS, RESTARTS_LEFT, STARTED
from rrfp_jax.commands.common.console import go_on_without_output
from rrfp_jax.commands.common.errors import checking_input, end_stopped, ending_at_once, run_command, stop_requests
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.training.config import TrainConfig, add_overrides, load_train_config, overrides_of
from rrfp_jax.commands.training.config_sources import add_trust_argument, preset_names
from rrfp_jax.commands.training.data_sets import token_notes, vocabulary_note
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.costs.devices import DEVICES, device_of
from rrfp_jax.exit_codes import (
    COMPUTED_WRONGLY,
    DATA_UNREADABLE,
    DONE,
    INTERNAL_ERROR,
    NOT_FINITE,
    PREEMPTED,
    print_fatal_message,
)
from rrfp_jax.runtime.jax_environment import check_plugin
from rrfp_jax.storage import located

if TYPE_CHECKING:
    from rrfp_jax.commands.training.assembly import Run
    from rrfp_jax.runtime import RunFailed
    from rrfp_jax.training.loop import TrainingLoop

_CLOSING = (
    "Every key of a configuration is an option. N stands for a whole number, X for a number, N,N,... for several; null "
    "takes a value away. rrfp config --explain KEY says all about one of them."
)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        config = load_train_config(arguments.config, overrides_of(arguments), trust=arguments.trust)
        config, lines = _on_present_ranks(config)
        if config.pipeline.is_auto:
            from rrfp_jax.planner.configured import resolve_auto_cut

            cut = resolve_auto_cut(config, fresh=arguments.fresh)
            config, lines = cut.config, [*lines, *cut.lines]
    if arguments.print_config:
        print("".join(f"# {line}\n" for line in lines) + config.as_yaml(), end="")
        return DONE
    if arguments.compile_for is not None:
        return _compile_for(config, arguments.compile_for)
    name = Path(arguments.config).stem
    return train(config, name=name, fresh=arguments.fresh, force=arguments.force, to_say=lines)


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("train", __doc__, usage="%(prog)s --config FILE.yaml [option ...]", closing=_CLOSING)
    file = parser.add_argument(
        "--config",
        required=True,
        metavar="FILE.yaml",
        help="the run: a file, or a preset by name, such as cpu/debug; rrfp config --list names them",
    )
    offer(file, preset_names())
    parser.add_argument(
        "--print-config", action="store_true", help="print the configuration with all options applied, and end"
    )
    device = parser.add_argument(
        "--compile-for",
        metavar="DEVICE",
        help="compile every program of the run for an accelerator that need not be here, print the memory of the "
        f"stages and a table of the programs, and end; with code 2 where a stage does not fit: {', '.join(DEVICES)}",
    )
    offer(device, DEVICES)
    parser.add_argument("--fresh", action="store_true", help="remove what the run directory holds, and start over")
    parser.add_argument(
        "--force",
        action="store_true",
        help="go on from a checkpoint although model, data or optimizer differ from it, or from a model that knows "
        "other tokens",
    )
    add_trust_argument(parser)
    add_overrides(parser)
    return parser


def _on_present_ranks(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Returns the configuration for the number of ranks that the launcher has found, and lines that say so."""
    if (counts := os.environ.get(RANK_COUNTS)) is None:
        return config, []
    # All numbers that there may be are tried at once: at a restart it is too late to refuse one.
    most, *fewer = map(int, counts.split(","))
    fitting = {most: config} | {count: config.on_part_of_ranks(count, most) for count in fewer}
    config = fitting[num_ranks := int(os.environ[NUM_RANKS])]
    return config, [f"{num_ranks} of {most} ranks: {config.pipeline.replicas} replicas"] if num_ranks < most else []


def _compile_for(config: TrainConfig, device: str) -> int:
    with checking_input():
        device_of(device)
        with ending_at_once():
            from rrfp_jax.commands.training.training_console import TrainingConsole
            from rrfp_jax.planner.compile_for import compile_run, show_compiled
        console = TrainingConsole(0)
        run = compile_run(config, device, console)
        show_compiled(run, console)
        run.check_fits()
    return DONE


def train(
    config: TrainConfig, *, name: str, fresh: bool = False, force: bool = False, to_say: Sequence[str] = ()
) -> int:
    """Check everything, then train; returns the exit code. ``to_say`` is printed before the stages."""
    requests = stop_requests()
    try:
        return _plan_and_train(config, name, fresh=fresh, force=force, to_say=to_say)
    finally:
        requests.action = None  # nothing is left to be saved, and the run ends by itself


def _plan_and_train(config: TrainConfig, name: str, *, fresh: bool, force: bool, to_say: Sequence[str]) -> int:
    go_on_without_output()
    with checking_input():
        path = located(config.run.run_dir or _default_path(name))
        planned = plan_run(config, path, fresh=fresh and not _is_restart(), force=force)
        check_plugin(config.run.platform)
        with ending_at_once():
            from rrfp_jax.commands.training import assembly
        run = assembly.Run(planned)
    note = vocabulary_note(config, planned.dataset)
    notes = token_notes(planned.dataset, planned.known)
    for line in [*to_say, *([] if note is None else [note]), *notes, *run.notes]:
        run.console.say(line)
    try:
        return _train(run, name, fresh=fresh, force=force)
    finally:
        run.directory.close()


def _train(run: "Run", name: str, *, fresh: bool, force: bool) -> int:
    from rrfp_jax.runtime import RunFailed

    requests = stop_requests()
    requests.action = partial(_stop_before_first_step, run)
    with checking_input():
        # A restart goes on from what this run has saved.
        run.begin(fresh=fresh and not _is_restart(), force=force)
    run.console.show_stages(run.pipeline)
    if run.is_complete:
        run.console.say(f"{run.directory.place} holds all {run.config.run.steps} steps: give more steps, or --fresh")
        run.finish()
        return DONE
    with run.metrics() as metrics:
        loop = run.loop(metrics)
        requests.take_signals()
        requests.action = lambda _: loop.stop()
        try:
            with run.console:
                run.train(loop)
        except (RunFailed, KeyboardInterrupt) as end:
            is_restarted = isinstance(end, RunFailed) and int(os.environ.get(RESTARTS_LEFT, "0")) > 0
            if isinstance(end, RunFailed):
                _leave_report(run, end)
            # The next attempt waits for the end of this one, and draws a timeline in place of this one's.
            if not is_restarted:
                _leave_timeline(run, loop, name)
            if run.is_first:
                end.add_note(run.describe_saved())
            end.add_note(f"the run is in {run.directory.place}")
            raise
    _leave_timeline(run, loop, name)
    run.console.say(f"the run is in {run.directory.place}: {', '.join(run.directory.written())}")
    if _is_restart():
        run.console.say(f"goodput {loop.goodput:.1%}: the part of the time since the launch that went into its steps")
    if not run.is_saved:
        if run.is_first:
            print_fatal_message(
                f"error: the state after step {run.state.step - 1} is not on the disk: {run.describe_saved()}"
            )
        return INTERNAL_ERROR
    if (early := _early_end(run, loop)) is not None:
        code, told = early
        if run.is_first:
            print_fatal_message(f"error: {told}")
        return code
    if loop.was_stopped:
        run.console.say(f"told to stop: saved after step {run.state.step - 1}; the same command goes on from there")
        return PREEMPTED
    return DONE


def _is_restart() -> bool:
    """Returns whether this process goes on with what others of the same launcher have begun."""
    return any(int(os.environ.get(name, "0")) > 0 for name in (ATTEMPT, PROCESS_NUMBER))


def _early_end(run: "Run", loop: "TrainingLoop") -> tuple[int, str] | None:
    """Returns the code and the reason with which a run ends early, its state saved, or None; reports its omissions."""
    if run.batches.num_bad:
        run.console.say(f"{run.batches.num_bad} samples were left out, as they could not be read")
    if loop.wrong is not None:
        return COMPUTED_WRONGLY, loop.wrong
    if loop.unreadable is not None:
        return DATA_UNREADABLE, f"{loop.unreadable}\n{run.describe_saved(is_last=True)}"
    in_row = loop.skipped_in_row
    if loop.has_diverged or 0 < loop.num_recorded == in_row:
        return NOT_FINITE, (
            f"the last {in_row} steps changed nothing ({loop.last_fault or 'not finite'}): give a lower learning rate "
            f"or more warm-up, or look at the data of these steps\n{run.describe_saved(is_last=True)}"
        )
    if loop.num_skipped:
        run.console.say(
            f"{loop.num_skipped} of {loop.num_recorded} steps were left out ({loop.last_fault or 'not finite'})"
        )
    return None


def _stop_before_first_step(run: "Run", number: int) -> None:
    """End the process while programs are compiled: there is nothing new to save, and the main thread may hear of
    nothing for minutes."""
    saved = run.describe_saved() if run.is_first else ""
    run.directory.close()
    end_stopped(number, saved)


def _default_path(name: str) -> Path:
    """A new folder; the same one for every attempt that a launcher makes."""
    from rrfp_jax.training.run_directory import new_run_path

    started = os.environ.get(STARTED)
    return Path("runs") / f"{name}-{started}" if started else new_run_path(name, datetime.now())


def _leave_report(run: "Run", failure: "RunFailed") -> None:
    """The report once, by the lowest rank that is left; the last events of every process."""
    with suppress(OSError):  # a full disk must not hide the failure
        log = run.pipeline.runtime.event_log()
        failure.add_note(f"the last events are in {run.directory.write_events(log, run.process.layout.num_ranks)}")
    ranks = range(run.process.layout.num_ranks)
    if run.process.rank == min(rank for rank in ranks if rank not in failure.report.lost_ranks):
        with suppress(OSError):
            failure.add_note(f"the report is in {run.directory.write_failure(failure.report)}")


def _leave_timeline(run: "Run", loop: "TrainingLoop", name: str) -> None:
    if run.is_first and loop.timeline.spans:
        run.directory.write_timeline(loop.timeline, f"{name}: {run.label}")


if __name__ == "__main__":
    run_command(main)
