"""Evaluate a trained model on data that it was not trained on.

::

    rrfp evaluate runs/mine
    rrfp evaluate runs/mine --batches 100 --set stories
    rrfp launch --processes 2 -- evaluate runs/mine --num-stages 4

The parameters are those of the run's newest checkpoint, whatever layout saved it. The sets are those of the run's
section ``evaluation``, or else the part of its data that is held out; every key of a configuration is an option, and
changes it. Without such options a language model is put on one device. Nothing is written.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.training.config import (
    TrainConfig,
    add_overrides,
    load_train_config,
    overrides_of,
    read_train_config,
)
from rrfp_jax.commands.training.config_sources import add_trust_argument
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.exit_codes import DONE
from rrfp_jax.storage import local_copy, located
from rrfp_jax.training.run_config import EvaluationConfig
from rrfp_jax.training.run_directory import CONFIG

_NO_ORDER: dict[str, Any] = {
    **dict.fromkeys(f"pipeline.{key}" for key in ("schedule", "hint", "window", "backward", "offload", "recompute")),
    "pipeline.consume": "foresight",
    "pipeline.delay": 0,
    "pipeline.remat": "none",
    "optimizer.shard": False,
}
"""Settings of a run's order, which mean nothing in an evaluation."""
_ONE_DEVICE: dict[str, Any] = {
    **dict.fromkeys(f"pipeline.{key}" for key in ("layout", "chunks_per_stage", "mesh")),
    "run.devices": None,
    "pipeline.num_stages": 1,
    "pipeline.replicas": 1,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        run = located(arguments.run)
        asked = {"batches": arguments.batches, "sets": arguments.set, "trust": arguments.trust}
        config = config_of(run, overrides_of(arguments), **asked)
        planned = plan_run(config, run)
        from rrfp_jax.commands.training.assembly import evaluate_run

        step, rows, is_first = evaluate_run(planned, run)
    if not is_first:
        return DONE
    if arguments.json:
        told = [{key: _finite(value) for key, value in asdict(row).items()} | {"step": step - 1} for row in rows]
        print(json.dumps({"run": str(run), "steps": step, "sets": told}, indent=2))
        return DONE
    has_answers = any(row.exact_match is not None for row in rows)
    of_answers = ("exact match", "right tokens") if has_answers else ()
    heads = ("loss", "perplexity", "bits per byte", *of_answers, "tokens", "seconds")
    table = make_table(f"{run.name} after {step} steps", "set", *heads, numeric=True)
    for row in rows:
        per_byte = "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
        shares = (row.exact_match, row.token_accuracy) if has_answers else ()
        right = ["-" if share is None else f"{share:.1%}" for share in shares]
        of_time = f"{row.tokens:,.0f}", f"{row.seconds:.1f}"
        table.add_row(row.evaluation, f"{row.loss:.4f}", f"{row.perplexity:.5g}", per_byte, *right, *of_time)
    make_console().print(table)
    return DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("evaluate", __doc__, usage="%(prog)s RUN [option ...]")
    parser.add_argument("run", metavar="RUN", help="a run directory with a checkpoint")
    parser.add_argument("--set", action="append", metavar="NAME", help="only this set of the run's; several times")
    parser.add_argument("--batches", type=int, metavar="N", help="batches of each set (left out: as the run says)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    add_trust_argument(parser)
    add_overrides(parser)
    return parser


def config_of(
    run: Path, overrides: dict[str, Any], *, batches: int | None, sets: list[str] | None, trust: bool = False
) -> TrainConfig:
    """The configuration of a run, changed to evaluate it; raises ValueError, with the remedy, where it cannot be."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is no run directory, it has no {CONFIG}: give one that rrfp train has made")
    path = local_copy(run / CONFIG)
    config = read_train_config(str(path), {})
    resets = _NO_ORDER if config.vision is not None else _NO_ORDER | _ONE_DEVICE
    config = load_train_config(str(path), {**resets, **overrides}, trust=trust)
    evaluation = replace(config.evaluation or EvaluationConfig(), when="between")  # Nothing trains beside it.
    if batches is not None:
        evaluation = replace(evaluation, batches=batches)
    if sets is not None:
        unknown = [name for name in sets if name not in evaluation.named_sets]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no set of {run}: it has {', '.join(evaluation.named_sets)}")
        evaluation = replace(evaluation, sets={name: evaluation.named_sets[name] for name in sets})
    return replace(config, evaluation=evaluation)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    run_command(main)
