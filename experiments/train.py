"""Train a language model through a readiness-driven pipeline.

::

    python -m experiments.train --config tpu_gpu_configs/cpu/debug.yaml --steps 20 --hint fb --run-dir runs/mine

The resolved configuration and a table of the stages are printed before step 0; then one line per step. The run
directory receives the configuration, ``metrics.jsonl`` (one object per step), a picture and a trace of the last steps.
"""

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path

import yaml

from experiments.config import TrainConfig, add_overrides, load_train_config, overrides_of
from experiments.errors import NO_PROGRESS, TASK_FAILED, run_command
from rrfp_jax.training.run_directory import RunDirectory, new_run_path


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--config", required=True, help="YAML file of the run, for example tpu_gpu_configs/cpu/debug.yaml"
    )
    add_overrides(parser)
    arguments = parser.parse_args(argv)
    config = load_train_config(arguments.config, overrides_of(arguments))
    return train(config, name=Path(arguments.config).stem)


def train(config: TrainConfig, *, name: str) -> int:
    """Check everything, then train; returns the exit code."""
    from experiments.assembly import assemble
    from experiments.console import TrainingConsole
    from rrfp_jax.runtime import NoProgress, RunFailed

    run = assemble(config)
    console = TrainingConsole(config.run.steps)
    console.say(yaml.safe_dump(config.as_dict(), sort_keys=False).rstrip())
    run.prepare()
    console.show_stages(run.pipeline, run.devices)
    directory = RunDirectory(config.run.run_dir or new_run_path(name, datetime.now()))
    if earlier := directory.num_rows():
        console.say(
            f"{directory.path} holds {earlier} rows of an earlier run, whose parameters were not saved: "
            "training starts at step 0, and its rows are appended"
        )
    directory.write_config(config.as_dict())
    try:
        with directory.metrics() as metrics, console:
            loop = run.loop(metrics, console.show_step)
            run.train(loop)
    except RunFailed as failure:
        path = directory.write_failure(failure.report)
        print(f"error: {failure}\nthe report is in {path}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # a hung program cannot be stopped from within, and would keep the interpreter from ending
        os._exit(NO_PROGRESS if isinstance(failure, NoProgress) else TASK_FAILED)
    directory.write_timeline(loop.timeline(), f"{name}: {run.label}")
    console.say(f"the run is in {directory.path}: config.yaml, metrics.jsonl, timeline.png, trace.json")
    return 0


if __name__ == "__main__":
    run_command(main)
