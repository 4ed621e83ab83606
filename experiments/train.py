"""Train a language model through a readiness-driven pipeline.

::

    python -m experiments.train --config tpu_gpu_configs/cpu/debug.yaml --steps 20 --hint fb --run-dir runs/mine

The resolved configuration and a table of the stages are printed before step 0; then one line per step. The run
directory receives the configuration, ``metrics.jsonl`` (one object per step), a picture and a trace of the last step;
a run that is given up also leaves its report there, ``failure.json``.
"""

import argparse
from datetime import datetime
from pathlib import Path

import yaml

from experiments.config import TrainConfig, add_overrides, load_train_config, overrides_of
from experiments.errors import checking_input, run_command


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--config", required=True, help="YAML file of the run, for example tpu_gpu_configs/cpu/debug.yaml"
    )
    add_overrides(parser)
    arguments = parser.parse_args(argv)
    with checking_input():
        config = load_train_config(arguments.config, overrides_of(arguments))
    return train(config, name=Path(arguments.config).stem)


def train(config: TrainConfig, *, name: str) -> int:
    """Check everything, then train; returns the exit code."""
    from experiments.assembly import assemble
    from experiments.console import TrainingConsole
    from rrfp_jax.runtime import RunFailed
    from rrfp_jax.training.run_directory import RunDirectory, new_run_path

    console = TrainingConsole(config.run.steps)
    with checking_input():
        directory = RunDirectory(config.run.run_dir or new_run_path(name, datetime.now()))
        directory.check()
        run = assemble(config)
        console.say(yaml.safe_dump(config.as_dict(), sort_keys=False).rstrip())
        run.prepare()
        directory.start(config.as_dict())
    console.show_stages(run.pipeline, run.devices)
    if earlier := directory.num_rows():
        console.say(
            f"{directory.path} holds {earlier} rows of an earlier run, whose parameters were not saved: "
            "training starts at step 0, and its rows are appended"
        )
    with directory.metrics() as metrics:
        loop = run.loop(metrics, console.show_step)
        try:
            with console:
                run.train(loop)
        except (RunFailed, KeyboardInterrupt) as end:
            if isinstance(end, RunFailed):
                end.add_note(f"the report is in {directory.write_failure(end.report)}")
            if (timeline := loop.timeline()).spans:
                directory.write_timeline(timeline, f"{name}: {run.label}")
            end.add_note(f"the run is in {directory.path}")
            raise
    directory.write_timeline(loop.timeline(), f"{name}: {run.label}")
    console.say(f"the run is in {directory.path}: config.yaml, metrics.jsonl, timeline.png, trace.json")
    return 0


if __name__ == "__main__":
    run_command(main)
