"""Work that no formula asks for: copies of donated arrays, and gradients that are rounded and read again."""

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.costs.devices import CUDA, Device
from rrfp_jax.planner.compile_for import ProgramReport, compile_run
from tests.commands.running import ROOT

PRESET = ROOT / "tpu_gpu_configs" / "gpu" / "one_node_8.yaml"


@pytest.fixture(scope="module")
def middle(target: Device) -> dict[str, ProgramReport]:
    """The programs of a stage in the middle, of three layers, by name."""
    if target.kind != CUDA:
        pytest.skip(f"the preset is for GPUs, not for {target.name}")
    # three stages in place of eight: the one in the middle is the same
    few = {"model.num_layers": 9, "pipeline.num_stages": 3}
    run = compile_run(load_train_config(str(PRESET), few), target.name, TrainingConsole(0, is_quiet=True))
    return {each.name: each for each in run.programs() if each.chunk == 1}


def test_an_input_gradient_copies_little(middle: dict[str, ProgramReport]) -> None:
    """Results take over what is read no more, not what the first layers still have to read."""
    assert middle["input_gradient"].text.copied_bytes <= 120 << 20


def test_weight_gradients_are_added_as_the_products_make_them(middle: dict[str, ProgramReport]) -> None:
    """No gradient is written and read again by a kernel of its own, nor joined with others of the same operand."""
    accumulators = 3 * 4 * (4 * 1536 * 1536 + 3 * 1536 * 4096)
    operands = 3 * 2 * 4096 * (4 * (1536 + 1536) + 3 * (1536 + 4096))  # input and gradient of every matrix
    norms = 3 * 2 * 3 * 2 * 4096 * 1536  # each keeps its input alone: reads it twice, and writes its result again
    text = middle["weight_gradient"].text
    assert text.touched_bytes < 1.01 * (2 * accumulators + operands + norms)
