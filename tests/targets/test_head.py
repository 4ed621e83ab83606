"""The last stage of a model with many words: its float32 logits are handed to nobody, and never there as a whole."""

from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.costs.devices import CUDA, Device
from rrfp_jax.planner.compile_for import CompiledRun, compile_run
from tests.commands.running import ROOT

PRESET = ROOT / "tpu_gpu_configs" / "gpu" / "one_node_8_multimodal.yaml"
ROWS, LENGTH, WORDS = 4, 2048, 151936
LOGITS_BYTES = 4 * ROWS * LENGTH * WORDS


@pytest.fixture(scope="module")
def run(target: Device) -> CompiledRun:
    if target.kind != CUDA:
        pytest.skip(f"the preset is for GPUs, not for {target.name}")
    # five layers for six stages: the last one has the head alone
    few: dict[str, Any] = {"model.num_layers": 5, "vision.num_layers": 2, "data.path": "nowhere.jsonl"}
    few["pipeline.layout"] = "Pv|vp|Et|t|t|t|t|L"
    return compile_run(load_train_config(str(PRESET), few), target.name, TrainingConsole(0, is_quiet=True))


def test_logits_are_neither_kept_nor_owed_nor_whole(run: CompiledRun) -> None:
    chunks = run.compiled.programs.chunks
    last = chunks[max(chunks)]
    sizes = last.sizes
    assert sizes.stash_bytes + sizes.owed.total < LOGITS_BYTES / 8
    for name in ("forward", "input_gradient", "weight_gradient"):
        gradient_of_table = 4 * 2048 * WORDS * (name == "weight_gradient")
        assert sizes.temporaries[name] < LOGITS_BYTES / 4 + gradient_of_table, name


def test_the_input_gradient_makes_no_logits(run: CompiledRun) -> None:
    last = max(each.chunk for each in run.programs() if each.name == "input_gradient")
    (program,) = (each for each in run.programs() if (each.chunk, each.name) == (last, "input_gradient"))
    assert not program.text.arrays_with(WORDS)
