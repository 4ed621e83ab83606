"""Every preset of an accelerator compiles for it, with its own widths and meshes and few layers.

XLA warns of a donated argument whose memory no result takes over, and warnings are errors here: so whatever is donated
is taken.
"""

from functools import cache
from typing import Any

import pytest
import yaml

from rrfp_jax.commands.planning.compile_for import CompiledRun, ProgramReport, compile_run
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.planning.devices import CUDA, Device
from tests.commands.running import ROOT

PRESETS = ROOT / "tpu_gpu_configs"
NAMES = [str(path.relative_to(PRESETS).with_suffix("")) for path in sorted(PRESETS.glob("[gt]pu/*.yaml"))]
_OF_KIND = {CUDA: "gpu/", "tpu": "tpu/"}
_OF_MICROBATCHES = ("forward", "backward", "input_gradient", "weight_gradient")


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest, target: Device) -> CompiledRun:
    """A preset with one layer for each chunk, compiled once for all tests of this file."""
    name: str = request.param
    if not name.startswith(_OF_KIND[target.kind]):
        pytest.skip(f"{name} is for another accelerator than {target.name}")
    return _compiled(name, target.name)


@cache
def _compiled(name: str, device: str) -> CompiledRun:
    config = load_train_config(str(PRESETS / f"{name}.yaml"), _few_layers(name))
    return compile_run(config, device, TrainingConsole(0, is_quiet=True))


def _few_layers(name: str) -> dict[str, Any]:
    plain = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    layout = plain["pipeline"]
    if "vision" in plain:
        encoders = layout["encoder_stages"]
        return {"model.num_layers": layout["num_stages"] - encoders, "vision.num_layers": encoders}
    chunks = layout["num_stages"] * layout.get("chunks_per_stage", 1)
    # a null takes the preset's own cut away
    return {"model.num_layers": chunks} | ({"pipeline.layers_per_chunk": None} if "layers_per_chunk" in layout else {})


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
    for each in forwards:
        kernel = "fmha" if target.kind == CUDA else "tpu_custom_call"
        assert any(kernel in name.lower() for name in each.text.attention), f"{each.name} of chunk {each.chunk}"


def test_copies_are_few(run: CompiledRun) -> None:
    for each in of_microbatches(run):
        assert each.text.copied_bytes <= 0.05 * each.text.touched_bytes, f"{each.name} of chunk {each.chunk}"


def test_tokens_go_to_experts_and_back_by_all_to_all(run: CompiledRun) -> None:
    if "expert" not in dict(run.pipeline.layout.axes_of_stage[0]):
        pytest.skip("the preset has no axis for experts")
    for each in of_microbatches(run):
        if each.name in ("forward", "backward"):
            assert "all-to-all" in each.text.collectives, f"{each.name} of chunk {each.chunk}"
