"""``model.fp8``: the option, what it refuses and tells, and a run beside one in float32."""

import json
from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.commands.train import main
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.costs.devices import device_of
from rrfp_jax.exit_codes import DONE
from rrfp_jax.models.config import ExpertsConfig, Float8Config, LanguageModelConfig
from rrfp_jax.models.float8 import float8_notes
from rrfp_jax.planner.analytic_costs import largest_rows, microbatch_specs
from rrfp_jax.planner.configured import configured_memory
from rrfp_jax.planner.measuring import small_cut
from rrfp_jax.programs.target import Target
from tests.commands.running import run_command

RUN = ("--config", "cpu/debug", "--steps", 300, "--deterministic", "true")
CPU = Target(platform="cpu", kind="cpu")


def test_the_option_takes_a_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "cpu/debug", "--fp8", "{exclude: [head, layers.0]}", "--print-config"]) == DONE
    assert "fp8:\n    exclude:\n    - head\n    - layers.0\n" in capsys.readouterr().out
    assert load_train_config("cpu/debug", {"model.fp8": {}}).model.fp8 == Float8Config()
    with pytest.raises(ValueError, match=r"no product matches 'layers.9.mlp', .*: the nearest is 'layers.\d.mlp'"):
        load_train_config("cpu/debug", {"model.fp8": {"exclude": ["layers.9.mlp"]}})
    with pytest.raises(ValueError, match=r"model\.fp8 has no key 'only'"):
        load_train_config("cpu/debug", {"model.fp8": {"only": ["head"]}})


def test_a_plan_for_a_card_without_float8_is_refused() -> None:
    config = load_train_config("cpu/debug", {"model.fp8": {}})
    rows = largest_rows(microbatch_specs(config, config.data.microbatch_size))
    configured_memory(config, device_of("h100"), rows)
    with pytest.raises(ValueError, match=r"NVIDIA A100.* has no matrix products in float8: leave model.fp8 out"):
        configured_memory(config, device_of("a100"), rows)


def test_a_few_layers_stand_for_all_that_are_alike() -> None:
    config = load_train_config("cpu/debug", {"model.fp8": {"exclude": ["layers.[0-3].mlp.down", "head"]}})
    few = config.model.with_layers(9)
    assert {few.float8_products(layer) for layer in range(9)} == {config.model.float8_products(0)}
    assert not few.has_float8_head
    with pytest.raises(ValueError, match="some layers have products in float8 and others have not"):
        small_cut(load_train_config("cpu/debug", {"model.fp8": {"exclude": ["layers.0"]}}), 4)


def test_emulation_and_experts_are_told() -> None:
    sizes = {"vocab_size": 32, "hidden": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 32}
    experts = ExpertsConfig(num_experts=2, experts_per_token=1)
    assert float8_notes(LanguageModelConfig(**sizes), CPU) == []
    emulated, left = float8_notes(LanguageModelConfig(**sizes, fp8=Float8Config(), experts=experts), CPU)
    assert emulated.startswith("fp8 is emulated: CPUs have no products in float8")
    assert left.startswith("fp8 leaves the products of experts in float32: ")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_ends_within_a_hundredth_of_one_in_float32(tmp_path: Path) -> None:
    def mean_loss(name: str, *options: str) -> float:
        command = (*RUN, "--run-dir", tmp_path / name, *options)
        result = run_command("train", *command, timeout_s=1200)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("fp8 is emulated") == bool(options)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return float(np.mean([row["loss"] for row in rows[-20:]]))

    assert mean_loss("float8", "--fp8", "{}") == pytest.approx(mean_loss("float32"), rel=0.01)
