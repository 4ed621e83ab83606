"""``layers_per_chunk: auto`` as a user meets it: what it chooses, says, writes down and refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.commands.planning.auto_cut import resolved
from rrfp_jax.commands.planning.cost_file import write_costs
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.planning.costs import CostBook, CostEntry, LayerCosts
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


def costs_file(folder: Path, *, layers: int = 8, head_ms: float = 12.0, **more: Any) -> str:
    types = {"embedding": layer(0.3), "layer": layer(3.0, 1000), "head": layer(head_ms)}
    names = ("embedding", *["layer"] * layers, "head")
    book = CostBook(layers=names, entries=(CostEntry(types=types, **{"microbatch_size": 4, **more}),), source="by hand")
    write_costs(book, folder / "costs.json")
    return str(folder / "costs.json")


def config(**overrides: Any) -> TrainConfig:
    layout = {"num_stages": 4, "layers_per_chunk": "auto"}
    sections = {"model.num_layers": 8, **{f"pipeline.{name}": value for name, value in layout.items()}}
    return load_train_config(DEBUG, sections | overrides)


def test_the_head_of_a_large_vocabulary_takes_the_place_of_layers() -> None:
    found = resolved(config(**{"model.vocab_size": 8192}))
    counts = found.config.pipeline.layers_per_chunk
    assert isinstance(counts, tuple)
    assert sum(counts) == 8
    assert counts[-1] < min(counts[:-1])
    assert found.config.pipeline.costs is None
    chosen, why = found.lines
    assert chosen.startswith(f"layers_per_chunk auto: {','.join(map(str, counts))}; costs: analytic")
    assert "with 2,2,2,2: a step is expected to take" in why
    assert plan_run(found.config, Path("nowhere")).ordered.num_chunks == 4
    assert resolved(found.config).config == found.config


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ({}, (2, 3, 3, 0)),
        ({"pipeline.num_stages": 2}, (6, 2)),
        ({"pipeline.num_stages": 2, "pipeline.chunks_per_stage": 2}, (3, 2, 3, 0)),
        ({"pipeline.num_stages": 2, "pipeline.schedule": "zb-v", "pipeline.hint": None}, (2, 3, 3, 0)),
        ({"pipeline.num_stages": 1}, (8,)),
    ],
)
def test_costs_of_a_file_decide(tmp_path: Path, layout: dict[str, Any], counts: tuple[int, ...]) -> None:
    found = resolved(config(**{"pipeline.costs": costs_file(tmp_path), "pipeline.window": None} | layout))
    assert found.config.pipeline.layers_per_chunk == counts
    assert "costs: by hand" in found.lines[0]


def test_memory_limits_the_cut(tmp_path: Path) -> None:
    given = {"pipeline.costs": costs_file(tmp_path), "pipeline.window": 2, "pipeline.num_stages": 2}
    assert resolved(config(**given, **{"pipeline.memory_limit": 12_500})).config.pipeline.layers_per_chunk == (4, 4)
    with pytest.raises(ValueError, match=r"was found that fits: at best stage \d needs"):
        resolved(config(**given, **{"pipeline.memory_limit": 9_000}))


def test_a_run_that_goes_on_keeps_its_cut(tmp_path: Path) -> None:
    given = config(**{"run.run_dir": str(tmp_path), "pipeline.costs": costs_file(tmp_path)})
    assert resolved(given).config.pipeline.layers_per_chunk == (2, 3, 3, 0)
    earlier = replace(given, pipeline=replace(given.pipeline, layers_per_chunk=(3, 2, 2, 1), costs=None))
    (tmp_path / "config.yaml").write_text(earlier.as_yaml())
    again = resolved(given)
    assert again.config == earlier
    assert again.lines == ("layers_per_chunk auto: 3,2,2,1, as this run has it already",)
    assert resolved(given, fresh=True).config.pipeline.layers_per_chunk == (2, 3, 3, 0)
    elsewhere = replace(given, pipeline=replace(given.pipeline, num_stages=2))
    assert resolved(elsewhere).config.pipeline.layers_per_chunk == (6, 2)
    (tmp_path / "config.yaml").write_text("pipeline: [")
    assert resolved(given).config.pipeline.layers_per_chunk == (2, 3, 3, 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pipeline.embedding_chunk": 1}, "leave embedding_chunk and head_chunk out"),
        ({"pipeline.schedule": "chimera", "pipeline.window": None, "pipeline.hint": None}, "run in one direction"),
        ({"pipeline.num_stages": 11}, "10 layers, ends included, do not fill 11 chunks"),
        ({"pipeline.costs": "costs.json"}, r"costs costs\.json cannot be read"),
    ],
)
def test_what_auto_cannot_cut_is_one_sentence(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(config(**overrides))


def test_costs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with 9 layers, ends included, and this one has 10"):
        resolved(config(**{"pipeline.costs": costs_file(tmp_path, layers=7)}))
    with pytest.raises(ValueError, match=r"costs\.json: no costs are known for microbatch size 4"):
        resolved(config(**{"pipeline.costs": costs_file(tmp_path, microbatch_size=2)}))
    with pytest.raises(ValueError, match="costs are for layers_per_chunk auto"):
        config(**{"pipeline.layers_per_chunk": None, "pipeline.costs": costs_file(tmp_path)})
    with pytest.raises(ValueError, match="layers_per_chunk is all: give the layers of each chunk, or auto"):
        config(**{"pipeline.layers_per_chunk": "all"})
    with pytest.raises(ValueError, match="which only rrfp train works out"):
        plan_run(config(), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "encoder", "decoder"),
    [
        ({}, (4, 4), (3, 1)),
        ({"vision.num_layers": 2}, (2,), (2, 2, 0)),
        ({"model.num_layers": 1}, (4, 4), (1, 0)),
    ],
)
def test_an_encoder_gets_stages_by_what_it_costs(
    tmp_path: Path, overrides: dict[str, int], encoder: tuple[int, ...], decoder: tuple[int, ...]
) -> None:
    layers = {"vision.num_layers": 8, "model.num_layers": 4} | overrides
    data = {"image_text.path": preset_data()}
    types = {"patches": layer(0.5), "encoder_layer": layer(2.0), "projector": layer(0.5)}
    types |= {"embedding": layer(0.1), "layer": layer(3.0), "head": layer(6.0)}
    inner = {name: [name] * number for name, number in zip(("encoder_layer", "layer"), layers.values(), strict=True)}
    names = ("patches", *inner["encoder_layer"], "projector", "embedding", *inner["layer"], "head")
    entry = CostEntry(types=types, microbatch_size=4)
    book = CostBook(layers=names, entries=(entry,), ends=frozenset({layers["vision.num_layers"] + 1}))
    write_costs(book, tmp_path / "costs.json")
    layout = {"layers_per_chunk": "auto", "encoder_stages": None, "costs": str(tmp_path / "costs.json")}
    found = resolved(
        load_train_config(MULTIMODAL, layers | data | {f"pipeline.{name}": each for name, each in layout.items()})
    )
    assert found.config.pipeline.encoder_layers_per_chunk == encoder
    assert found.config.pipeline.layers_per_chunk == decoder
    assert (
        f"auto: encoder {','.join(map(str, encoder))}, decoder {','.join(map(str, decoder))}; costs" in found.lines[0]
    )
    assert overrides or plan_run(found.config, tmp_path).ordered.num_chunks == 4
    (tmp_path / "config.yaml").write_text(found.config.as_yaml())
    run = {"run.run_dir": str(tmp_path)}
    kept = resolved(
        load_train_config(MULTIMODAL, layers | data | run | {f"pipeline.{n}": v for n, v in layout.items()})
    )
    assert kept.config.pipeline == found.config.pipeline
    assert "as this run has it already" in kept.lines[0]


def test_an_encoder_whose_stages_are_given_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave encoder_stages out \(null\), or give the numbers"):
        resolved(load_train_config(MULTIMODAL, {"pipeline.layers_per_chunk": "auto"}))
    given = {"pipeline.layers_per_chunk": "auto", "pipeline.encoder_stages": None, "pipeline.projector_in": "own"}
    with pytest.raises(ValueError, match=r"leave projector_in out"):
        resolved(load_train_config(MULTIMODAL, given))


def test_a_run_says_what_it_chose_and_writes_it_down(tmp_path: Path) -> None:
    small = ("--num-layers", 3, "--hidden", 32, "--vocab-size", 4096, "--batch-size", 8, "--length", 32)
    layout = ("--num-stages", 2, "--layers-per-chunk", "auto", "--steps", 1, "--run-dir", tmp_path)
    result = run_command("train", "--config", DEBUG, *small, "--mlp-dim", 64, *layout)
    assert result.returncode == 0, result.stderr
    assert "layers_per_chunk auto: 3,0; costs: analytic" in result.stdout
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["pipeline"]
    assert written["layers_per_chunk"] == [3, 0]
