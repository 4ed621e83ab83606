"""Runs whose embedding and head lie on all stages: ``rrfp train --schedule vocabulary``."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import order_run
from rrfp_jax.planner.configured import resolve_auto_cut
from rrfp_jax.schedules import vocabulary_sharded
from tests.commands.running import run_command

SIZES = {
    "num-layers": 4, "hidden": 16, "num-heads": 2, "mlp-dim": 32, "length": 16, "vocab-size": 259, "batch-size": 4,
    "num-microbatches": 4, "num-stages": 2, "hint": "null", "window": "null", "held-out": 0.2, "evaluation.batches": 1,
}  # fmt: skip
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", value)]


def rows(run: Path, *options: object) -> list[dict[str, Any]]:
    result = run_command("train", "--config", "cpu/debug", *SMALL, "--run-dir", run, *options)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def exported(run: Path) -> dict[str, np.ndarray]:
    result = run_command("convert", "export", run, run / "exported")
    assert result.returncode == 0, result.stderr
    return load_file(run / "exported" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["true", "false"])
def test_runs_go_on_in_shards_and_back_and_learn_the_same(tied: str, tmp_path: Path) -> None:
    tie = ("--model.tie-embeddings", tied)
    whole = rows(tmp_path / "whole", "--steps", 4, *tie)
    for folder, schedules in {"there": (None, "vocabulary"), "back": ("vocabulary:1", None)}.items():
        for steps, schedule in zip((2, 4), schedules, strict=True):
            found = rows(tmp_path / folder, "--steps", steps, *tie, "--schedule", schedule or "null")
        trained = [[(row["loss"], row["grad_norm"]) for row in each if "grad_norm" in row] for each in (found, whole)]
        np.testing.assert_allclose(*trained, rtol=2e-6)
        evaluated = [[row["loss"] for row in each if "grad_norm" not in row][-1] for each in (found, whole)]
        np.testing.assert_allclose(*evaluated, rtol=2e-6)
    jax.tree.map(
        # some entries are near zero, where a difference is one of the whole matrix
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max()),
        *map(exported, (tmp_path / "whole", tmp_path / "there")),
    )


def config(**changes: Any) -> Any:
    return load_train_config(
        "cpu/debug", {"pipeline.schedule": "vocabulary", "pipeline.hint": None, "pipeline.window": None} | changes
    )


def test_the_order_of_a_run_has_the_edges_of_its_model() -> None:
    ordered = order_run(
        config(
            **{
                "pipeline.layout": "Et|t|t|tL",
                "pipeline.num_stages": 4,
                "model.num_layers": 4,
                "pipeline.schedule": "vocabulary:2",
            }
        )
    )
    graph, placement = vocabulary_sharded(4, ordered.order.graph.num_microbatches, fan_out=2)
    assert (ordered.order.graph, ordered.order.placement) == (graph, placement)
    assert ordered.cut is not None
    assert (ordered.cut.edges, ordered.cut.placement) == (graph.edges, placement)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"pipeline.layout": "Et*2|t*2|L"},
            r"layout 'Et\*2\|t\*2\|L' says otherwise: give 2 chunks of layers, with E in",
        ),
        ({"pipeline.layout": "Et*2@1|t*2L@0"}, "L in the last, and without @"),
        ({"pipeline.layout": "E|t*4L"}, r"chunk 0 of layout \[0, 4\] holds no layer"),
        ({"model.vocab_size": 3, "pipeline.num_stages": 4}, "cuts 3 words into .* of 4 stages: give 2 to 3 stages, or"),
        ({"pipeline.num_stages": 1}, "for each of 1 stages: give 2 to 256 stages, or another schedule"),
        ({"pipeline.offload": 2}, "moves nothing to the host: leave offload out"),
        ({"pipeline.schedule": "vocabulary:2:equal"}, "runs sequences whole: leave slices out"),
    ],
    ids=str,
)
def test_what_shards_cannot_do_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        order_run(config(**{"pipeline.num_stages": 2, "model.num_layers": 4} | changes))


def test_a_cut_is_not_found_for_shards() -> None:
    with pytest.raises(ValueError, match="with whole vocabularies: give the layout, or another schedule"):
        resolve_auto_cut(config(**{"pipeline.layout": "auto"}))
