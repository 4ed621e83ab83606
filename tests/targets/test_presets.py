"""Every preset of an accelerator compiles for it, with its own widths and meshes and few layers.

XLA warns of a donated argument whose memory no result takes over, and warnings are errors here: so whatever is donated
is taken.
"""

from functools import cache
from typing import Any

import jax
import pytest
import yaml

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.costs.devices import CUDA, Device, device_of
from rrfp_jax.planner.compile_for import CompiledRun, ProgramReport, compile_run
from rrfp_jax.programs.chunk import param_specs
from rrfp_jax.programs.program_text import ProgramText
from rrfp_jax.readable import parse_bytes
from tests.commands.running import ROOT
from tests.commands.test_presets import forecasts_told

PRESETS = ROOT / "tpu_gpu_configs"
NAMES = [str(path.relative_to(PRESETS).with_suffix("")) for path in sorted(PRESETS.glob("[gt]pu/*.yaml"))]
_OF_KIND = {CUDA: "gpu/", "tpu": "tpu/"}
_LAYERS = {"gpu/gemma3_27b_64": 4, "gpu/gpt_oss_120b_64": 2, "gpu/llama3_70b_128": 3, "gpu/mixtral_8x22b_128": 2}
"""Layers of a chunk where one is too few: a plan counts the embedding's output, which these presets' programs make
again, as kept, and beside a single layer that is more than the quarter by which a forecast may be too high; and a table
of 200,000 words is copied once for each chunk that reads it."""
_OF_MICROBATCHES = ("forward", "backward", "input_gradient", "weight_gradient")


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest, target: Device) -> CompiledRun:
    """A preset with one layer for each chunk, compiled once for all tests of this file."""
    name: str = request.param
    if not name.startswith(_OF_KIND[target.kind]):
        pytest.skip(f"{name} is for another accelerator than {target.name}")
    return _compiled(name, target.name)


@cache
def _compiled(name: str, device: str, *, in_full: bool = False) -> CompiledRun:
    config = load_train_config(str(PRESETS / f"{name}.yaml"), {} if in_full else _few_layers(name))
    return compile_run(config, device, TrainingConsole(0, is_quiet=True))


def _few_layers(name: str) -> dict[str, Any]:
    plain = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    layout, section = plain["pipeline"], "data"
    length, found = plain[section]["length"], dict[str, Any]()
    model = plain["model"]
    queries = model["num_heads"] * model.get("head_dim", model["hidden"] // model["num_heads"])
    if length in (
        model["hidden"],
        queries // layout.get("mesh", {}).get("tensor", 1),
    ):  # the stream or queries would look like scores
        found[f"{section}.length"] = length * 3 // 4
    if "vision" in plain:
        encoders = layout["layout"].count("v")
        found["pipeline.layout"] = "|".join(["Pv", "vp", "Et", *["t"] * (layout["num_stages"] - 4), "tL"])
        return found | {"model.num_layers": layout["num_stages"] - encoders, "vision.num_layers": encoders}
    if "layout" in layout:  # a null takes the preset's own cut away
        found["pipeline.layout"] = None
    num_chunks = layout["num_stages"] * layout.get("chunks_per_stage", 1)
    return found | {"model.num_layers": num_chunks * _LAYERS.get(name, 1)}


def length_of(run: CompiledRun) -> int:
    """Positions of a row of text."""
    return max(spec.shape[-1] for name, spec in run.buckets[0].items() if name == "tokens")


def of_microbatches(run: CompiledRun) -> list[ProgramReport]:
    return [each for each in run.programs() if each.name.partition(" ")[0] in _OF_MICROBATCHES]


def test_attention_is_fused_and_no_array_grows_with_the_square_of_the_length(run: CompiledRun, target: Device) -> None:
    for each in of_microbatches(run):
        assert not each.text.arrays_with(length_of(run)), f"{each.name} of chunk {each.chunk}"
    forwards = [each for each in run.programs() if each.name == "forward"]
    assert forwards
    if "context" in dict(run.pipeline.layout.axes_of_stage[0]):
        return  # keys and values pass around a ring between tiles of our own
    if target.kind == CUDA and run.config.model.layer_variant.sinks:
        return  # cuDNN knows no sinks
    for each in forwards:
        kernel = "fmha" if target.kind == CUDA else "tpu_custom_call"
        assert any(kernel in name.lower() for name in each.text.attention), f"{each.name} of chunk {each.chunk}"


def test_copies_are_few(run: CompiledRun, target: Device) -> None:
    programs = {f"{each.name} of chunk {each.chunk}": [each.text] for each in of_microbatches(run)}
    if target.kind != CUDA:
        # Beside one small layer the copies of weights alone may be more than 5% of what F touches: a chunk counts as a
        # whole.
        programs = {
            f"chunk {chunk}": [each.text for each in of_microbatches(run) if each.chunk == chunk]
            for chunk in {each.chunk for each in of_microbatches(run)}
        }
    for name, texts in programs.items():
        copied = sum(each.copied_bytes - _put_in_order(run, each) for each in texts)
        assert copied <= 0.05 * sum(each.touched_bytes for each in texts), name


def _put_in_order(run: CompiledRun, text: ProgramText) -> int:
    """Bytes of the copies that put the tokens of an all-to-all in the order of experts, or of devices again.

    Where a device has several experts, the tokens for one of them come from all devices, between those for the others.
    """
    experts, axes = run.config.model.experts, dict(run.pipeline.layout.axes_of_stage[0])
    if experts is None or experts.num_experts <= axes.get("expert", 1) or "all-to-all" not in text.collectives:
        return 0
    return min(text.copied_bytes, text.collectives["all-to-all"].num_bytes)


def test_memory_is_as_foreseen(run: CompiledRun) -> None:
    """What a plan works out for every stage, without compiling, bounds what its programs need, and not by far."""
    for stage, (foreseen, compiled) in enumerate(zip(run.foreseen(), run.compiled.forecast, strict=False)):
        assert 1.0 <= foreseen.peak / compiled.peak <= 1.25, f"stage {stage}"


@pytest.mark.parametrize("name", ["gpu/one_node_8"])
def test_the_readme_tells_what_is_compiled(name: str, target: Device) -> None:
    """The presets that compile quickly stand for all in its table."""
    (told,) = (row for row in forecasts_told() if row[0] == name)
    if device_of(told[1]) != target:
        pytest.skip(f"{name} is for another accelerator than {target.name}")
    peak = max(stage.peak for stage in _compiled(name, target.name, in_full=True).compiled.forecast)
    assert peak == pytest.approx(parse_bytes(told[3], name), rel=0.02)


def test_tokens_go_to_experts_and_back_by_all_to_all(run: CompiledRun) -> None:
    if "expert" not in dict(run.pipeline.layout.axes_of_stage[0]):
        pytest.skip("the preset has no axis for experts")
    for each in of_microbatches(run):
        paths = [path for path, _ in jax.tree.leaves_with_path(param_specs(run.pipeline.chunks[each.chunk]))]
        has_experts = any("experts" in jax.tree_util.keystr(path) for path in paths)
        if each.name in ("forward", "backward") and has_experts:
            assert "all-to-all" in each.text.collectives, f"{each.name} of chunk {each.chunk}"
