"""Stages with rematerialisations of their own: the same training, and memory told for each stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import order_run
from rrfp_jax.costs.devices import device_of
from rrfp_jax.planner.analytic_costs import largest_rows, microbatch_specs
from rrfp_jax.planner.configured import configured_memory, resolve_auto_cut
from tests.commands.running import run_command

SMALL = ("--config", "cpu/debug", "--num-layers", 4, "--hidden", 32, "--length", 32, "--deterministic", "true")


def losses(run: Path, *options: object) -> list[float]:
    result = run_command("train", *SMALL, "--run-dir", run, *options)
    assert result.returncode == 0, result.stderr
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_one_for_each_stage_goes_on_with_others_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    base = losses(tmp_path / "none", "--steps", 4)
    own = ("--remat", "full,full,dots,none")
    assert losses(tmp_path / "own", "--steps", 2, *own) == base[:2]
    assert losses(tmp_path / "own", "--steps", 4, "--remat", "[attention, none, full, dots]") == base


def configured(remat: Any, **pipeline: Any) -> Any:
    given = {f"pipeline.{name}": value for name, value in (pipeline | {"remat": remat}).items()}
    return load_train_config("cpu/debug", {"model.num_layers": 8, **given})


def test_each_stage_has_the_memory_of_a_run_with_its_own() -> None:
    def peaks(remat: Any) -> list[int]:
        config = configured(remat)
        rows = largest_rows(microbatch_specs(config, config.data.microbatch_size))
        return [each.peak for each in configured_memory(config, device_of("h100"), rows)]

    of_all = {name: peaks(name) for name in ("none", "dots", "full")}
    mixed = ("full", "dots", "none", "full")
    assert peaks(mixed) == [of_all[name][stage] for stage, name in enumerate(mixed)]
    assert len({peak[1] for peak in of_all.values()}) == 3


def test_a_list_has_a_value_for_each_stage_or_each_chunk() -> None:
    config = configured(["full", "dots", "none", "none"], chunks_per_stage=2)
    ordered = order_run(config)
    stages, chunks = ordered.order.placement.stage_of_chunk, range(8)
    values = config.pipeline.chunk_remats(ordered.order.placement)
    assert values == tuple(("full", "dots", "none", "none")[stages[chunk]] for chunk in chunks)
    each = ("full", "none") * 4
    assert configured(list(each), chunks_per_stage=2).pipeline.chunk_remats(ordered.order.placement) == each


@pytest.mark.parametrize(
    ("remat", "more", "message"),
    [
        (["full"] * 3, {}, r"remat has 3 values: give one for all, or one for each of 4 stages$"),
        (["full"] * 5, {"chunks_per_stage": 2}, r"remat has 5 values: .* of 4 stages or 8 chunks$"),
        ([], {}, "remat is an empty list: give one value for all, or one for each stage"),
        (["full", "dot", "none", "none"], {}, "remat is 'dot': give one of none, dots, full"),
        ("dot", {}, "remat is 'dot': give one of none, dots, full"),
        (["full", 3, "none", "none"], {}, r"pipeline.remat is .*: give text$"),
        (["full", "none", "none", "none"], {"recompute": 0, "schedule": "1f1b"}, "leave one of them out"),
        (["full", "none", "none", "none"], {"layout": "auto"}, "layout auto finds a cut for one remat"),
    ],
)
def test_bad_lists_are_refused_in_one_sentence(remat: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        order_run(resolve_auto_cut(configured(remat, **more)).config)
