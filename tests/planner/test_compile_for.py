"""``rrfp train --compile-for``: every program of a run, compiled for devices that are not here."""

import re
from dataclasses import replace

import jax
import pytest

from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.train import main
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.exit_codes import DONE
from rrfp_jax.hardware import installed_accelerators
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planner.compile_for import compile_run
from rrfp_jax.runtime import process
from tests.commands.running import run_command, sentence

SMALL = ["--config", "cpu/debug", "--model.num-layers", "4"]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's virtual devices stand for those that are not here: a compiler for others is not installed."""
    monkeypatch.setattr(process, "devices_for", lambda name, number: jax.devices()[:number])
    monkeypatch.setattr("rrfp_jax.planner.compile_for.use_cpu", lambda number: None)


@pytest.mark.usefixtures("pretended")
@pytest.mark.slow
def test_the_table_of_stages_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--compile-for", "h100"]) == DONE
    told = capsys.readouterr().out
    assert "programs for NVIDIA H100 SXM" in told
    for name in ("forward", "backward", "reduce", "update"):
        assert re.search(rf"\n +\d+ +{name}", told), name
    config = load_train_config("cpu/debug", {"model.num_layers": 4})
    run = compile_run(config, "h100", TrainingConsole(0, is_quiet=True))
    pipeline = Pipeline(
        run.pipeline.chunks,
        optimizer=run.pipeline.optimizer,
        placement=run.pipeline.placement,
        ordering=run.pipeline.ordering,
        updates=run.pipeline.updates,
        options=run.pipeline.options,
    )
    pipeline.init(jax.random.key(0))
    shape = (config.data.num_microbatches, config.data.microbatch_size, config.row_length or 0)
    specs = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in (("tokens", "i4"), ("targets", "i4"))}
    with pipeline:
        pipeline.prepare(specs | {"weights": jax.ShapeDtypeStruct(shape, "f4")})
        assert [each.peak for each in pipeline.forecast] == [each.peak for each in run.compiled.forecast]


@pytest.mark.usefixtures("pretended")
@pytest.mark.slow
def test_each_stage_is_compiled_and_forecast_with_its_own_rematerialisation(capsys: pytest.CaptureFixture[str]) -> None:
    def peaks(remat: list[str]) -> list[int]:
        given = {"model.num_layers": 2, "pipeline.num_stages": 2, "pipeline.remat": remat}
        run = compile_run(load_train_config("cpu/debug", given), "h100", TrainingConsole(0, is_quiet=True))
        return [each.peak for each in run.compiled.forecast or ()]

    plain, full = peaks(["none", "none"]), peaks(["full", "full"])
    assert full[0] < plain[0]
    assert peaks(["full", "none"]) == [full[0], plain[1]]
    small = ["--config", "cpu/debug", "--model.num-layers", "2", "--num-stages", "2"]
    assert main([*small, "--remat", "full,none", "--compile-for", "h100"]) == DONE
    told = capsys.readouterr().out
    assert re.search(r"\n 0 .* full *\n 1 .* none *\n", told), told


@pytest.mark.usefixtures("pretended")
def test_stages_of_several_devices_are_compiled() -> None:
    config = load_train_config(
        "cpu/debug", {"model.num_layers": 2, "pipeline.num_stages": 2, "pipeline.mesh": {"tensor": 2}}
    )
    run = compile_run(config, "h100", TrainingConsole(0, is_quiet=True))
    assert any(each.name == "forward" and "all-reduce" in each.text.collectives for each in run.programs())


@pytest.mark.usefixtures("pretended")
@pytest.mark.slow
def test_replicas_are_compiled_once_and_all_are_forecast() -> None:
    config = load_train_config("cpu/debug", {"model.num_layers": 4, "pipeline.num_stages": 2, "pipeline.replicas": 2})
    run = compile_run(config, "h100", TrainingConsole(0, is_quiet=True))
    assert len(run.compiled.programs.chunks) == 2
    assert len(run.compiled.forecast) == 4
    assert any(each.name == "reduce" and "all-reduce" in each.text.collectives for each in run.programs())


@pytest.mark.usefixtures("pretended")
def test_stages_may_have_different_numbers_of_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--config", "cpu/debug", "--model.num-layers", "2", "--num-stages", "2", "--reduce", "messages"]
    assert main([*small, "--replicas", "1,2", "--compile-for", "h100"]) == DONE
    told = capsys.readouterr().out
    assert re.findall(r"\n (\d, replica \d)", told) == ["0, replica 0", "1, replica 0", "1, replica 1"]


@pytest.mark.usefixtures("pretended")
def test_a_stage_that_does_not_fit_is_refused_after_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match=r"stage 0 is predicted to need .* and has 1 MiB: "):
        main([*SMALL, "--pipeline.memory-limit", "1MiB", "--compile-for", "h100"])
    assert "programs for NVIDIA H100 SXM" in capsys.readouterr().out


@pytest.mark.usefixtures("pretended")
def test_evaluations_are_compiled_for_their_own_shapes_and_must_fit() -> None:
    sets = {"long": {"length": 256, "batch_size": 64}, "short": {"length": 8}}
    changed = {"model.num_layers": 2, "pipeline.num_stages": 2, "evaluation.sets": sets}
    config = load_train_config("cpu/debug", changed)
    run = compile_run(config, "h100", TrainingConsole(0, is_quiet=True))
    shapes = [each[0].leaves["tokens"].shape for each in run.compiled.programs.shapes]
    assert shapes == [(4, 128), (8, 256), (4, 8)]
    assert len(run.compiled.evaluation) == 2
    peak = max(each.peak for each in run.compiled.evaluation)
    fitting = replace(run.compiled, forecast=(), limit_bytes=peak)
    fitting.check_fits(is_strict=False)
    with pytest.raises(ValueError, match=r"is predicted to need .* in evaluations, and has .*: make the microbatches"):
        replace(fitting, limit_bytes=peak - 1).check_fits(is_strict=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("h10", "there is no device 'h10': did you mean h100? known are a100, "),
        ("l40s", "programs cannot be compiled for l40s: choose among a100, "),
        ("h100", "this environment cannot compile for NVIDIA H100 SXM: "),
    ],
)
@pytest.mark.one_in(2)
def test_a_target_that_cannot_be_had_is_refused(name: str, problem: str) -> None:
    if name == "h100" and installed_accelerators():
        pytest.skip("a compiler is installed here")
    assert problem in sentence(run_command("train", *SMALL, "--compile-for", name))
