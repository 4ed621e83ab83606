"""The plan command, as a user runs it."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.commands import train
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.config_sources import find_preset
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.costs import CostBook, CostEntry, LinkCosts, Noise
from rrfp_jax.planner.cost_file import write_costs
from rrfp_jax.planner.plan import main
from rrfp_jax.planner.plan_request import parse_counts, parse_noise
from tests.commands.running import run_command
from tests.drawn_words import preset_data
from tests.planner.plans import MIB, TYPES

BOOK = CostBook(
    layers=("embedding", *("layer",) * 4, "head"),
    entries=(CostEntry(types=TYPES, microbatch_size=4), CostEntry(types=TYPES, microbatch_size=8)),
    links=LinkCosts(latency_ms=0.1),
    tokens_per_sample=128.0,
    device="a made up device",
    device_bytes=1000 * MIB,
    source="made up",
)
SMALL = ("--devices", "2", "--microbatches", "8", "--chunks-per-stage", "1", "--stages", "2", "--microbatch-size", "4")


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_costs(BOOK, "costs.json")
    return "costs.json"


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run the command with ``--json``; the last line's object."""
    assert main([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_plan_from_a_file_of_costs(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--costs", costs, *SMALL, "--top", "3")
    assert 1 <= len(plan["ranking"]) <= 3
    assert [each["step_ms"] for each in plan["ranking"]] == sorted(each["step_ms"] for each in plan["ranking"])
    for each in plan["ranking"]:
        assert sum(each["layers_of_chunk"]) == len(BOOK.layers)
        assert min(each["layers_of_chunk"]) >= 1
        assert each["peak_bytes"] <= 1000 * MIB
        assert each["bound_ms"] <= each["nominal_ms"]
        assert each["tokens_per_s"] == pytest.approx(8 * 4 * 128 / each["step_ms"] * 1e3)
    best = plan["ranking"][0]
    assert (best["num_stages"], best["microbatch_size"], best["num_microbatches"]) == (2, 4, 8)
    assert best["step_ms"] <= plan["best_cut_best_named"]["step_ms"] <= plan["even_cut_best_named"]["step_ms"]
    assert plan["costs"]["source"] == "made up"
    assert planned(capsys, "--costs", costs, *SMALL, "--top", "3") == plan, "the same seed, the same answer"


def test_tables_for_people(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--costs", costs, *SMALL, "--jitter", "lognormal:0.2"]) == 0
    shown = capsys.readouterr().out
    for words in ("stages x", "what cut and order give", "memory of each stage of 1000 MiB", "64 draws of noise"):
        assert words in shown
    assert "costs: made up, on a made up device" in shown


def test_a_configuration_on_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--config", "cpu/debug", "--device", "h100", "--devices", "2", "--stages", "2", "--remat", "none")
    plan = planned(capsys, *asked, "--chunks-per-stage", "1", "--microbatch-size", "4", "--schedules", "1f1b,zb-h1")
    best = plan["ranking"][0]
    assert best["batch_size"] == 32
    assert {each["order_name"] for each in plan["ranking"]} <= {"1f1b", "zb-h1"}
    assert sum(best["layers_of_chunk"]) == 6
    assert plan["costs"]["device"] == "NVIDIA H100 SXM"


def test_what_is_written_is_what_train_reads(costs: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ("--config", "cpu/debug", "--costs", costs, "--devices", "2", "--stages", "2", "--chunks-per-stage", "1")
    plan = planned(capsys, *asked, "--write", "best.yaml")
    best, found = plan["ranking"][0], load_train_config("best.yaml", {})
    assert found.pipeline.num_stages == 2
    assert found.data is not None
    assert found.data.batch_size // found.data.num_microbatches == best["microbatch_size"]
    assert Path("best.order.csv").exists() == (str(found.pipeline.schedule).endswith(".csv"))
    plan_run(found, tmp_path / "run")
    assert train.main(["--config", "best.yaml", "--print-config"]) == 0


needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'optimum' is missing")


@needs_solver
@pytest.mark.slow
def test_the_solvers_order_comes_first_where_it_is_quicker(
    costs: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_costs(replace(BOOK, layers=("embedding", *("layer",) * 12, "head")), costs)
    config = load_train_config("cpu/debug", {})
    larger = replace(config, model=replace(config.model, num_layers=12))
    Path("larger.yaml").write_text(larger.as_yaml())
    asked = ("--config", "larger.yaml", "--costs", costs, "--devices", "4", "--stages", "4", "--chunks-per-stage", "1")
    short = (*asked, "--microbatch-size", "4", "--memory", "280MiB")
    plain, plan = planned(capsys, *short), planned(capsys, *short, "--exact", "30", "--write", "best.yaml")
    best, before = plan["ranking"][:2]
    assert (best["order_name"], before["order_name"]) == ("optimum", plain["ranking"][0]["order_name"])
    assert best["step_ms"] < 0.98 * before["step_ms"]
    assert "longer: bubble" in before["why"]
    assert best["peak_bytes"] <= 280 * MIB
    assert "proven to be the least" in plan["notes"][-1]
    assert str(load_train_config("best.yaml", {}).pipeline.schedule).endswith("best.order.csv")
    plan_run(load_train_config("best.yaml", {}), tmp_path / "run")
    hurried = planned(capsys, *short, "--exact", "1e-3")  # the best order known without the solver, and its bound
    assert hurried["ranking"][0]["step_ms"] <= before["step_ms"]
    assert "none takes less than" in hurried["notes"][-1]


def test_without_the_solver_the_extra_is_named(costs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(BadInput, match=r"pip install 'rrfp-jax\[optimum\]'"):
        main(["--costs", costs, *SMALL, "--exact", "5"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--exact", "0"), "give the solver more than 0"),
        (("--exact", "5", "--schedules", "1f1b"), "leave one out"),
        (("--exact", "5", "--consume", "ready"), "let --consume name strict"),
    ],
)
def test_a_solver_that_cannot_help_is_refused(costs: str, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        main(["--costs", costs, *SMALL, *options])


@pytest.mark.slow
def test_what_is_written_trains(costs: str) -> None:
    folder = Path.cwd()
    asked = ("--config", "cpu/debug", "--costs", folder / costs, "--devices", 2, "--stages", 2)
    assert run_command("plan", *asked, "--write", folder / "best.yaml").returncode == 0
    result = run_command("train", "--config", folder / "best.yaml", "--steps", 2, "--run-dir", folder / "run")
    assert result.returncode == 0, result.stderr
    assert "step     1" in result.stdout


@pytest.mark.slow
def test_costs_from_programs_that_are_compiled_here(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--config", "cpu/debug", "--device", "a100", "--compile", "--devices", "2", "--stages", "2")
    plan = planned(capsys, *asked, "--microbatch-size", "4", "--chunks-per-stage", "1", "--schedules", "1f1b")
    assert plan["costs"]["source"].startswith("compiled for cpu")
    assert plan["ranking"][0]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "h100"), "give one of them"),
        (("--config", "cpu/debug", "--devices", "0"), "devices"),
        (("--devices", "3", "--stages", "2"), "cannot be divided by stages 2"),
        (("--memory", "0GiB"), "memory is '0GiB'"),
        (("--memory", "many"), "no size"),
        (("--stages", "9", "--devices", "9"), "9 stages are more than the 6 layers"),
        (("--microbatch-size", "3"), "microbatch_sizes"),
        (("--microbatches", "64..8"), "write 8,16,32, or 8..64"),
        (("--microbatches", "1..9999"), "more than 4,096"),
        (("--jitter", "gauss:1"), "jitter 'gauss:1' is unknown"),
        (("--jitter", "lognormal:-1"), "sigma -1"),
        (("--jitter", "lognormal:50"), "sigma 50.0 of kind 'F': give 0 to 5"),
        (("--jitter", "tail:1,0"), "no task takes any time"),
        (("--schedules", "1f2b"), "--schedules names '1f2b'"),
        (("--schedules", "chimera"), "--schedules names 'chimera'"),
        (("--schedules", "greedy-chimera"), "--schedules names 'greedy-chimera'"),
        (("--schedules", "bitpipe"), "--schedules names 'bitpipe'"),
        (("--schedules", "zb-v", "--chunks-per-stage", "1"), "no order of zb-v fits these sizes"),
        (("--remat", "some"), "--remat names 'some'"),
        (("--consume", "eager"), "--consume names 'eager'"),
        (("--top", "0"), "top"),
        (("--write", "best.yaml"), "give --config FILE.yaml too"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(costs: str, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        main(["--costs", costs, "--devices", "2", "--microbatches", "8", *flags])


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--objective", "the 95th percentile"),
        ("--draws", "suffice for the size"),
        ("--effort", "name --schedules"),
        ("--picture", "--json --top N"),
        ("--seed", "the same in every plan"),
        ("--window", "the largest window"),
    ],
)
def test_an_option_that_is_gone_is_refused_in_one_sentence(
    flag: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([flag, "1"])
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'{flag}' is no option: " in line
    assert instead in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "2"), "give one of them"),
        (("--device", "h100"), "give --config FILE.yaml too"),
        (("--config", "cpu/debug", "--device", "h1000"), "there is no device 'h1000': did you mean h100"),
        (("--costs", "costs.json", "--compile"), "give --device NAME in place of --costs, or measure every way"),
        (("--costs", "costs.json", "--microbatches", "8"), "give --devices"),
        (("--costs", "costs.json", "--devices", "2"), "neither the batch nor the number"),
        (("--costs", "missing.json", "--devices", "2"), "missing.json cannot be read"),
    ],
)
def test_what_is_missing_is_named(costs: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        main([*arguments])


def test_costs_of_another_model_are_refused_before_the_search(costs: str) -> None:
    write_costs(replace(BOOK, layers=("embedding", *("layer",) * 7, "head")), costs)
    with pytest.raises(BadInput, match="of a model with 9 layers, ends included, and this one has 6: measure"):
        main(["--config", "cpu/debug", "--costs", costs])


def meshed(mesh: str) -> str:
    """The name of a configuration whose stages have this mesh."""
    text = find_preset("cpu/debug").read_text().replace("pipeline:", f"pipeline:\n  mesh: {mesh}")
    Path("mine.yaml").write_text(text)
    return "mine.yaml"


def test_measured_costs_know_no_mesh(costs: str) -> None:
    with pytest.raises(BadInput, match="the costs know nothing of fsdp 2 in mesh: work them out"):
        main(["--config", meshed("{fsdp: 2}"), "--costs", costs])


def test_a_mesh_stays_while_stages_replicas_and_tensor_are_chosen(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = meshed("{tensor: 1, fsdp: 2}")
    asked = ("--device", "a100", "--stages", "2", "--microbatch-size", "2", "--schedules", "1f1b")
    best = planned(capsys, "--config", config, *asked, "--devices", "8", "--write", "best.yaml")["ranking"][0]
    assert (best["devices"], best["mesh"]) == (8, [["fsdp", 2]])
    assert best["num_stages"] * best["data"] * best["tensor"] == 4
    written = load_train_config("best.yaml", {}).pipeline
    assert written.mesh == {"tensor": best["tensor"], "fsdp": 2}


def test_a_configuration_as_it_is(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", meshed("{tensor: 2, fsdp: 2}"), "--device", "a100", "--as-configured"]) == 0
    told = capsys.readouterr().out
    assert "x 2 x fsdp 2" in told
    assert "memory of each stage of 72.92 GiB" in told
    assert main(["--config", "mine.yaml", "--device", "a100", "--as-configured", "--memory", "1KiB"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out
    with pytest.raises(BadInput, match="--stages is for a search"):
        main(["--config", "mine.yaml", "--device", "a100", "--as-configured", "--stages", "2"])
    with pytest.raises(BadInput, match="give --config"):
        main(["--costs", costs, "--as-configured"])


def test_a_configuration_with_cuts_inside_layers_as_it_is(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = find_preset("cpu/debug").read_text()
    Path("mine.yaml").write_text(text.replace("pipeline:", "pipeline:\n  layout: E<|>t<|>|tL"))
    (only,) = planned(capsys, "--config", "mine.yaml", "--device", "a100", "--as-configured")["ranking"]
    assert (only["layout"], only["layers_of_chunk"]) == ("E<|>t<|>|tL", [1.5, 2, 0.5, 2])
    with pytest.raises(BadInput, match="layout has < and >, and these costs are of whole layers"):
        main(["--config", "mine.yaml", "--costs", costs, "--as-configured"])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["encoder", "own", "decoder"])
def test_a_configuration_with_an_encoder_as_it_is(where: str, costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its chunks are those that training makes, also where the encoder's stages have another mesh."""
    text = find_preset("cpu/multimodal").read_text().replace("runs/words/train.jsonl", preset_data())
    layout = {"encoder": "Pvp|Et|tL", "own": "Pv|p|Et|tL", "decoder": "Pv|pEt|tL"}[where]
    more = f"pipeline:\n  mesh: {{tensor: 2}}\n  encoder_mesh: {{fsdp: 2}}\n  layout: {layout}"
    Path("seen.yaml").write_text(text.replace("pipeline:", more).replace("num_stages: 4", "num_stages: 3"))
    (only,) = planned(capsys, "--config", "seen.yaml", "--device", "h100", "--as-configured")["ranking"]
    counts = {"encoder": [3, 2, 2], "own": [2, 1, 2, 2], "decoder": [2, 3, 2]}[where]
    assert only["layers_of_chunk"] == counts
    run = plan_run(load_train_config("seen.yaml", {}), Path("run"))
    assert run.ordered.cut is not None
    assert len(run.ordered.cut.chunks) == len(counts)
    with pytest.raises(BadInput, match="--costs knows one mesh for all stages"):
        main(["--config", "seen.yaml", "--costs", costs])


def test_where_nothing_fits_the_nearest_changes_are_told(costs: str) -> None:
    with pytest.raises(BadInput, match=r"nothing fits: .* per device") as refused:
        main(["--costs", costs, *SMALL, "--memory", "150MiB"])
    assert "\n" not in str(refused.value)


def test_lists_ranges_and_noise() -> None:
    assert parse_counts("8..11,4,8", "--stages") == (8, 9, 10, 11, 4)
    assert parse_counts(None, "--stages") is None
    assert parse_noise("lognormal:0.2+tail:0.01,5") == Noise(
        sigma={"F": 0.2, "I": 0.2, "W": 0.2}, tail=0.01, tail_factor=5.0
    )
    assert parse_noise("none").is_none
