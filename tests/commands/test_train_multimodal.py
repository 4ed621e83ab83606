"""Training of vision-language models by the command: its rows, going on in another layout, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from rrfp_jax.commands import train
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.data import ImageText
from rrfp_jax.data.sample_order import is_held_out
from tests.commands.running import ROOT, run_afresh
from tests.drawn_words import preset_data
from tests.environment import of_child

MULTIMODAL = "tpu_gpu_configs/cpu/multimodal.yaml"


def small() -> tuple[object, ...]:
    """Returns options that make the preset's model small and give it data."""
    return (
        *("--hidden", 16, "--num-heads", 2, "--mlp-dim", 16, "--vision", "{hidden: 16, num_heads: 2, mlp_dim: 16}"),
        *("--data.path", preset_data()),
        *("--data.images", "{text_buckets: 1, image_buckets: 1}"),
    )


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_with_the_same_samples(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = ("--config", MULTIMODAL, *small())
    assert run_afresh("train", *options, "--steps", 6, "--run-dir", whole).returncode == 0
    first = run_afresh("train", *options, "--steps", 3, "--run-dir", halves)
    assert first.returncode == 0, first.stderr
    assert "images/s" in first.stdout
    together = ("--num-stages", 2, "--layout", "Pvp@0|E@1|t@0|tL@1", "--data.num-microbatches", 8)
    more = run_afresh("train", *options, *together, "--steps", 6, "--learning-rate", 4e-3, "--run-dir", halves)
    assert more.returncode == 0, more.stderr
    straight, resumed = rows_of(whole), rows_of(halves)
    assert [row["step"] for row in resumed] == [*range(6)]
    rates = [row["learning_rate"] for row in straight]
    assert [row["learning_rate"] for row in resumed] == pytest.approx(rates)
    np.testing.assert_allclose([row["loss"] for row in resumed], [row["loss"] for row in straight], rtol=2e-5)
    assert all(row["images_per_s"] > 0 and 0 <= row["patch_padding"] < 1 for row in straight)
    assert sum(row["forwards_skipped"] for row in straight) > 0


ORDERED = """
import sys
from rrfp_jax.training import batches
batches._WALKED_S, batches._TRUSTED = 1e-12, -2.0  # short steps are ordered too, whatever they have shown
from rrfp_jax.commands.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_with_ordered_microbatches_goes_on_in_another_layout_with_the_same_samples(tmp_path: Path) -> None:
    """It is saved within its second epoch; a run whose samples come as they are has the same losses."""
    plain, halves = tmp_path / "plain", tmp_path / "halves"
    options = ("--config", MULTIMODAL, *small(), "--data.images", "{text_buckets: 3, image_buckets: 2}")
    options += ("--data.num-microbatches", 8, "--learning-rate", 4e-3, "--final-learning-rate", 4e-3)
    unordered = ("--data.images", "{text_buckets: 3, image_buckets: 2, balance: false, gather_text: false}")
    straight = run_afresh("train", *options, *unordered, "--steps", 20, "--run-dir", plain)
    assert straight.returncode == 0, straight.stderr
    together = ("--num-stages", 2, "--layout", "Pvp@0|E@1|t@0|tL@1", "--data.num-microbatches", 4)
    for steps, layout in ((13, ()), (20, together)):
        words = [sys.executable, "-c", ORDERED, *options, *layout, "--steps", steps, "--run-dir", halves]
        given: Any = {"cwd": ROOT, "env": of_child(), "capture_output": True, "text": True}
        ended = subprocess.run(list(map(str, words)), check=False, **given)
        assert ended.returncode == 0, ended.stderr
    straight_rows, resumed = rows_of(plain), rows_of(halves)
    assert [row["step"] for row in resumed] == [*range(20)]
    for half in (resumed[:13], resumed[13:]):
        assert sum(row["predicted_step_s"] is not None for row in half) >= 3
    assert all(row["predicted_step_s"] is None for row in straight_rows)
    np.testing.assert_allclose([row["loss"] for row in resumed], [row["loss"] for row in straight_rows], rtol=2e-5)


@pytest.mark.slow
def test_a_language_model_trains_on_text_of_any_length(tmp_path: Path) -> None:
    """Without vision: rows of few lengths, each sample attending to itself alone."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "abc " * (1 + number % 9)}) + "\n" for number in range(40)))
    config = yaml.safe_load(Path("tpu_gpu_configs/cpu/debug.yaml").read_text())
    config["model"] |= {"hidden": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": None, "mlp_dim": 16}
    config["pipeline"] |= {"num_stages": 2, "window": 4}
    config["data"] = {"kind": "image_text", "path": str(texts), "batch_size": 8, "num_microbatches": 4, "pack": False}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    ended = run_afresh("train", "--config", path, "--steps", 3, "--run-dir", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["images_per_s"] == 0 and row["forwards_skipped"] == 0 for row in rows)
    assert 0 < rows[0]["token_padding"] < 0.5


def changed(tmp_path: Path, sections: dict[str, dict[str, Any] | None]) -> str:
    """A configuration like the preset's with other values; None leaves a section out."""
    config = yaml.safe_load(Path(MULTIMODAL).read_text())
    config["data"]["path"] = preset_data()
    for name, values in sections.items():
        if values is None:
            del config[name]
        else:
            config[name] = config.get(name, {}) | values
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.parametrize(
    ("sections", "answer"),
    [
        ({"vision": {"patch_dim": 32}}, "vision.patch_dim is 32, and the data has 64: give vision.patch_dim 64"),
        ({"data": {"images": {"mean": [float("nan")]}}}, "data.mean is nan: give a finite number"),
        ({"data": {"images": {"maen": 0.5}}}, "data.images has no key 'maen': the known ones are"),
        ({"data": {"weights": [1]}}, "data.weights is for kind tokens, and the data is image_text: leave it out"),
        ({"vision": {"grid": [2, 3]}}, "vision knows 2 rows and 3 columns of patches, and the largest image has"),
        ({"projector": {"kind": "llava", "overrides": None}}, "projector.patches_per_feature is 1, and the data has 4"),
        (
            {"vision": None, "projector": None},
            "images, and the model no vision: give a section vision, or text alone",
        ),
        ({"vision": None}, "projector is given without vision"),
        ({"data": None}, "lacks the section data: add it"),
        ({"tokens": {"path": "x"}}, "'tokens' is no section: give data with kind tokens"),
        ({"vision": {"max_rows": 2}}, "'max_rows' is no key of vision: give vision.grid, 256 or 2,16"),
        ({"vision": {"kind": "vit"}}, "vision: kind is 'vit': give one of plain, clip, siglip, intern"),
        ({"pipeline": {"layout": "P|v|v|v|p|Et|tL"}}, "the encoder takes 4 of 4 stages and leaves the decoder none"),
        ({"pipeline": {"num_stages": 1}}, "the encoder takes 1 of 1 stages and leaves the decoder none"),
        ({"pipeline": {"layout": "Pvp@0|Et*2L@1"}}, "layout names 2 stages and num_stages is 4"),
        ({"pipeline": {"layout": "Pvp@0|Et@1|t@2|L@-3"}}, "has a chunk 'L@-3': write the letters of its parts"),
        ({"pipeline": {"layout": "Pvp@0|Et|t|L"}}, "mark all of them with @, or none"),
        ({"pipeline": {"layout": "Pvp@0|Et@1|t@2|L@3", "chunks_per_stage": 2}}, "leave chunks_per_stage out"),
        ({"pipeline": {"layout": "Pvp|Et|tL"}}, "layout has 2 chunks of the decoder for 3 stages"),
        ({"pipeline": {"layout": "Pvp|Et|t|tL"}}, "layout [1, 1, 1] sums to 3 but the model has 2"),
        ({"pipeline": {"layout": "Et|t|L"}}, "layout 'Et|t|L' has no encoder, and the model has one"),
        ({"pipeline": {"layout": "Pv|Et|t|L"}}, "has no projector between encoder and decoder: give one p there"),
        ({"pipeline": {"layout": "PvpEt|t|L"}}, "mixes encoder and decoder: give the encoder's chunks first"),
        (
            {"pipeline": {"schedule": "gis", "hint": None}},
            "makes a chain of chunks and its own placement, not this graph",
        ),
        ({"pipeline": {"layout": "Pvp|EtL|t|"}}, "has a chunk '': write the letters"),
        ({"model": {"rope_scaling": {"low_freq_factor": 2}}}, "model.rope_scaling.factor is missing: add it"),
        ({"model": {"rope_scaling": 8}}, "model.rope_scaling is 8: give a mapping"),
        ({"optimizer": {"freeze": ["vison"]}}, "no layer matches 'vison'"),
        ({"optimizer": {"freeze": ["*"]}}, "every layer of the model is frozen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    tmp_path: Path, sections: dict[str, dict[str, Any] | None], answer: str
) -> None:
    with pytest.raises(ValueError, match=r"(?s)^[^\n]*$") as refused:
        plan_run(load_train_config(changed(tmp_path, sections), {}), tmp_path / "run")
    assert answer in str(refused.value)
    assert "decoder_layers_per_chunk" not in str(refused.value)  # no key of a configuration


def test_the_preset_without_its_data_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_train_config(MULTIMODAL, {})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^cannot read runs/words/train\.jsonl \(No such .*\): give the path of a JSON"
    ):
        plan_run(config, tmp_path / "run")


def test_a_placement_of_other_stages_is_refused_for_any_model() -> None:
    with pytest.raises(ValueError, match="layout names 3 stages and num_stages is 4"):
        load_train_config("tpu_gpu_configs/cpu/debug.yaml", {"pipeline.layout": "Et@0|t@1|t*2L@2"})


def test_text_alone_is_refused_for_a_model_that_sees(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "abc"}) + "\n")
    values = {"path": str(texts), "batch_size": 1, "num_microbatches": 1}
    config = load_train_config(changed(tmp_path, {"data": values}), {})
    with pytest.raises(ValueError, match="has no images, and the model has vision: leave out the sections vision"):
        plan_run(config, tmp_path / "run")


def test_a_part_of_the_images_is_held_out_for_evaluation(tmp_path: Path) -> None:
    lines = []
    for number in range(40):
        Image.new("L", (16, 16), 6 * number).save(tmp_path / f"{number}.png")
        lines.append({"prompt": "how dark? ", "target": f"{number}", "images": [f"{number}.png"] * (number > 3)})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"path": str(texts), "batch_size": 8}
    sections = {"data": {**values, "held_out": 0.2}, "evaluation": {"every": 1}}
    planned = plan_run(load_train_config(changed(tmp_path, sections), {}), tmp_path / "run")
    assert isinstance(planned.dataset, ImageText)
    held = planned.evaluation_sets["held_out"]
    assert isinstance(held, ImageText)
    assert 0 < held.num_samples < 20
    assert held.num_samples + planned.dataset.num_samples == 40
    assert planned.ordered.cut is not None
    assert [chunk.apply_evaluating is not None for chunk in planned.ordered.cut.chunks] == [False, False, False, True]
    # pixels are scaled by the encoder, which all sets share
    sections["evaluation"] = {"every": 1, "sets": {"dark": {"images": {"mean": [0.1]}}}}
    with pytest.raises(ValueError, match=r"evaluation.sets.dark: .* leave out mean and std of images"):
        plan_run(load_train_config(changed(tmp_path, sections), {}), tmp_path / "run")
    sections["evaluation"] = {"every": 1}
    # what is held out need not have images
    shown = [line for line in lines[4:] if not is_held_out(line["images"][0], 0.2)]
    told = [{"text": f"nothing to see in {number}"} for number in range(20)]
    texts.write_text("".join(json.dumps(line) + "\n" for line in (*shown, *told)))
    held = plan_run(load_train_config(changed(tmp_path, sections), {}), tmp_path / "run").evaluation_sets["held_out"]
    assert isinstance(held, ImageText)
    assert held.num_images == 0 < held.num_samples


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("encoder_mesh", {"tensor": 1}, "encoder_mesh is for models with an encoder"),
        ("layout", "Pvp|Et*2|t|tL", "has an encoder, and the model none"),
    ],
)
def test_encoder_options_are_for_models_with_an_encoder(tmp_path: Path, name: str, value: Any, answer: str) -> None:
    config = load_train_config("tpu_gpu_configs/cpu/debug.yaml", {f"pipeline.{name}": value})
    with pytest.raises(ValueError, match=answer):
        plan_run(config, tmp_path / "run")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("pipeline", "stages"),
    [
        ({}, (0, 1, 2, 3)),
        ({"layout": "Pv|p|E|t|tL"}, (0, 0, 1, 2, 3)),
        ({"chunks_per_stage": 2, "layout": "Pvp|E|t|t|L"}, (0, 1, 2, 3, 1)),
        ({"num_stages": 2, "layout": "Pvp@0|Et@0|tL@1"}, (0, 0, 1)),
        ({"layout": "Pv@0|p@1|Et@2|tL@3"}, (0, 1, 2, 3)),
        (
            {"layout": "Pv|pE|t|tL", "schedule": "1f1b", "hint": None, "consume": "strict", "window": None},
            (0, 1, 2, 3),
        ),
    ],
    ids=str,
)
def test_chunks_lie_where_the_configuration_says(
    tmp_path: Path, pipeline: dict[str, Any], stages: tuple[int, ...]
) -> None:
    config = load_train_config(changed(tmp_path, {"pipeline": pipeline}), {})
    assert plan_run(config, tmp_path / "run").ordered.order.placement.stage_of_chunk == stages


def test_the_help_names_the_sections_of_encoders() -> None:
    shown = train.make_parser().format_help()
    assert "--vision MAPPING" in shown
    assert "--hidden N" in shown
