"""``layout: auto`` as a user meets it: what it chooses, says, writes down and refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts
from rrfp_jax.planner import configured
from rrfp_jax.planner.configured import resolve_auto_cut
from tests.commands.running import run_command
from tests.drawn_words import preset_data

DEBUG, MULTIMODAL = "cpu/debug", "cpu/multimodal"


def layer(milliseconds: float, num_bytes: int = 0) -> LayerCosts:
    third = milliseconds / 3
    return LayerCosts(
        forward_ms=third,
        input_gradient_ms=third,
        weight_gradient_ms=third,
        fixed_bytes=num_bytes,
        stash_bytes=num_bytes,
    )


def by_hand(monkeypatch: pytest.MonkeyPatch, *, layers: int = 8, head_ms: float = 12.0) -> None:
    """Have all cuts found by these costs."""
    types = {"embedding": layer(0.3), "layer": layer(3.0, 1000), "head": layer(head_ms)}
    names = ("embedding", *["layer"] * layers, "head")
    book = CostBook(layers=names, entries=(CostEntry(types=types, microbatch_size=4),), source="by hand")
    monkeypatch.setattr(configured, "_book", lambda config: book)


def layout_of(config: TrainConfig, **options: Any) -> str | None:
    return resolve_auto_cut(config, **options).config.pipeline.layout


def config(**overrides: Any) -> TrainConfig:
    layout = {"num_stages": 4, "layout": "auto"}
    sections = {"model.num_layers": 8, **{f"pipeline.{name}": value for name, value in layout.items()}}
    return load_train_config(DEBUG, sections | overrides)


def test_the_head_of_a_large_vocabulary_takes_the_place_of_layers() -> None:
    found = resolve_auto_cut(config(**{"model.vocab_size": 8192}))
    counts = found.config.pipeline.cut.layers
    assert counts is not None
    assert sum(counts) == 8
    assert counts[-1] < min(counts[:-1])
    chosen, why = found.lines
    assert chosen.startswith(f"layout auto: {found.config.pipeline.layout}; costs: analytic")
    assert "with Et*2|t*2|t*2|t*2L: a step is expected to take" in why
    assert plan_run(found.config, Path("nowhere")).ordered.num_chunks == 4
    assert resolve_auto_cut(found.config).config == found.config


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ({}, "Et*2|t*3|t*3|L"),
        ({"pipeline.num_stages": 2}, "Et*6|t*2L"),
        ({"pipeline.num_stages": 2, "pipeline.chunks_per_stage": 2}, "Et*3|t*2|t*3|L"),
        ({"pipeline.num_stages": 2, "pipeline.schedule": "zb-v", "pipeline.hint": None}, "Et*2|t*3|t*3|L"),
        ({"pipeline.num_stages": 1}, "Et*8L"),
    ],
)
def test_costs_decide(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], layout: str) -> None:
    by_hand(monkeypatch)
    found = resolve_auto_cut(config(**{"pipeline.window": None} | sizes))
    assert found.config.pipeline.layout == layout
    assert "costs: by hand" in found.lines[0]


def test_memory_limits_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand(monkeypatch)
    given = {"pipeline.window": 2, "pipeline.num_stages": 2}
    assert layout_of(config(**given, **{"pipeline.memory_limit": 12_500})) == "Et*4|t*4L"
    with pytest.raises(ValueError, match=r"was found that fits: at best stage \d needs"):
        resolve_auto_cut(config(**given, **{"pipeline.memory_limit": 9_000}))


def test_a_run_that_goes_on_keeps_its_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand(monkeypatch)
    given = config(**{"run.run_dir": str(tmp_path)})
    assert layout_of(given) == "Et*2|t*3|t*3|L"
    earlier = replace(given, pipeline=replace(given.pipeline, layout="Et*3|t*2|t*2|tL"))
    (tmp_path / "config.yaml").write_text(earlier.as_yaml())
    again = resolve_auto_cut(given)
    assert again.config == earlier
    assert again.lines == ("layout auto: Et*3|t*2|t*2|tL, as this run has it already",)
    assert layout_of(given, fresh=True) == "Et*2|t*3|t*3|L"
    elsewhere = replace(given, pipeline=replace(given.pipeline, num_stages=2))
    assert layout_of(elsewhere) == "Et*6|t*2L"
    (tmp_path / "config.yaml").write_text("pipeline: [")
    assert layout_of(given) == "Et*2|t*3|t*3|L"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pipeline.schedule": "chimera", "pipeline.window": None, "pipeline.hint": None}, "run in one direction"),
        ({"pipeline.num_stages": 11}, "10 layers, ends included, do not fill 11 chunks"),
    ],
)
def test_what_auto_cannot_cut_is_one_sentence(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_auto_cut(config(**overrides))


def test_an_automatic_layout_is_resolved_by_train_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which only rrfp train works out"):
        plan_run(config(), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, "Pv*4|v*4p|Et*3|tL"),
        ({"vision.num_layers": 2}, "Pv*2p|Et*2|t*2|L"),
        ({"model.num_layers": 1}, "Pv*4|v*4p|Et|L"),
    ],
)
def test_an_encoder_gets_stages_by_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, int], expected: str
) -> None:
    layers = {"vision.num_layers": 8, "model.num_layers": 4} | overrides
    data = {"data.path": preset_data()}
    types = {"patches": layer(0.5), "encoder_layer": layer(2.0), "projector": layer(0.5)}
    types |= {"embedding": layer(0.1), "layer": layer(3.0), "head": layer(6.0)}
    inner = {name: [name] * number for name, number in zip(("encoder_layer", "layer"), layers.values(), strict=True)}
    names = ("patches", *inner["encoder_layer"], "projector", "embedding", *inner["layer"], "head")
    entry = CostEntry(types=types, microbatch_size=4)
    book = CostBook(layers=names, entries=(entry,), ends=frozenset({layers["vision.num_layers"] + 1}))
    monkeypatch.setattr(configured, "_book", lambda config: book)
    asked = layers | data | {"pipeline.layout": "auto"}
    found = resolve_auto_cut(load_train_config(MULTIMODAL, asked))
    assert found.config.pipeline.layout == expected
    assert f"layout auto: {expected}; costs" in found.lines[0]
    assert overrides or plan_run(found.config, tmp_path).ordered.num_chunks == 4
    (tmp_path / "config.yaml").write_text(found.config.as_yaml())
    run = {"run.run_dir": str(tmp_path)}
    kept = resolve_auto_cut(load_train_config(MULTIMODAL, asked | run))
    assert kept.config.pipeline == found.config.pipeline
    assert "as this run has it already" in kept.lines[0]


def test_an_encoder_whose_stages_are_given_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave chunks_per_stage out \(null\), or give the layout"):
        resolve_auto_cut(load_train_config(MULTIMODAL, {"pipeline.layout": "auto", "pipeline.chunks_per_stage": 2}))


@pytest.mark.slow
def test_a_run_says_what_it_chose_and_writes_it_down(tmp_path: Path) -> None:
    small = ("--num-layers", 3, "--hidden", 32, "--vocab-size", 4096, "--batch-size", 8, "--length", 32)
    layout = ("--num-stages", 2, "--layout", "auto", "--steps", 1, "--run-dir", tmp_path)
    result = run_command("train", "--config", DEBUG, *small, "--mlp-dim", 64, *layout)
    assert result.returncode == 0, result.stderr
    assert "layout auto: Et*3|L; costs: analytic" in result.stdout
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["pipeline"]
    assert written["layout"] == "Et*3|L"
