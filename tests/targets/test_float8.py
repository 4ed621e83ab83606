"""Products in float8, compiled for an H100: kernels multiply float8 itself, in F, I and W."""

from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.costs.devices import CUDA, Device
from rrfp_jax.planner.compile_for import CompiledRun, ProgramReport, compile_run
from tests.commands.running import ROOT

PRESET = str(ROOT / "tpu_gpu_configs" / "gpu" / "one_node_8.yaml")
FEW: dict[str, Any] = {"model.num_layers": 3, "pipeline.num_stages": 3}
FORWARD, GRADIENT = "f8e4m3fn", "f8e5m2"


def compiled(target: Device, **more: Any) -> CompiledRun:
    if target.kind != CUDA:
        pytest.skip(f"{target.name} has no float8")
    config = load_train_config(PRESET, FEW | {f"model.{name}": value for name, value in more.items()})
    return compile_run(config, target.name, TrainingConsole(0, is_quiet=True))


@pytest.fixture(scope="module")
def run(target: Device) -> CompiledRun:
    return compiled(target, fp8={})


def programs(run: CompiledRun, chunk: int) -> dict[str, ProgramReport]:
    return {each.name: each for each in run.programs() if each.chunk == chunk}


def counts(program: ProgramReport) -> tuple[int, int]:
    """Products of operands that are both in e4m3, and of one with a gradient in e5m2; there are no others."""
    found = dict(program.text.products)
    with_gradients = found.pop((FORWARD, GRADIENT), 0) + found.pop((GRADIENT, FORWARD), 0)
    forwards = found.pop((FORWARD, FORWARD), 0)
    assert not found, f"{program.name} multiplies {found}"
    return forwards, with_gradients


def test_every_product_of_a_layer_multiplies_float8(run: CompiledRun) -> None:
    middle = programs(run, 1)
    forwards, _ = counts(middle["forward"])
    assert 4 <= forwards <= 7, "queries, keys and values may be one, and gate and up"
    assert counts(middle["input_gradient"]) == (0, 7)
    assert counts(middle["weight_gradient"]) == (0, 7), "each is added to its accumulator by the kernel that makes it"


def test_the_head_multiplies_float8(run: CompiledRun) -> None:
    (_, of_layer), last = counts(programs(run, 1)["forward"]), programs(run, 2)
    forwards, with_gradients = counts(last["forward"])
    assert of_layer == 0
    assert forwards > 4, "logits"
    assert with_gradients > 0, "the gradient of the head's input"
    assert counts(last["weight_gradient"]) == (forwards - counts(programs(run, 1)["forward"])[0], 8)


def test_float8_halves_what_waits_for_the_weight_gradient(run: CompiledRun, target: Device) -> None:
    owed = [each.compiled.programs.chunks[1].sizes.owed.total for each in (run, compiled(target))]
    assert owed[0] == pytest.approx(owed[1] / 2, rel=0.01)
    for foreseen, found in zip(run.foreseen(), run.compiled.forecast, strict=False):
        assert 1.0 <= foreseen.peak / found.peak <= 1.25


def test_excluded_products_stay_as_they_were(target: Device) -> None:
    middle = programs(compiled(target, fp8={"exclude": ["head", "*.down"]}), 1)
    assert dict(middle["input_gradient"].text.products) == {(GRADIENT, FORWARD): 6, ("bf16", "bf16"): 1}


def test_a_card_without_float8_is_refused(target: Device) -> None:
    config = load_train_config(PRESET, FEW | {"model.fp8": {}})
    if target.kind == CUDA:
        target_name, told = "a100", "NVIDIA A100"
    else:
        target_name, told = target.name, target.title
    with pytest.raises(ValueError, match=f"{told}.* has no matrix products in float8"):
        compile_run(config, target_name, TrainingConsole(0, is_quiet=True))
