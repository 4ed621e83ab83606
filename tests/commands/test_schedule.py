"""The view of one schedule, and a user's own schedules in all commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import levels
from rrfp_jax.commands import simulate
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.schedules import ScheduleRequest, build_schedule, read_csv
from tests.commands.running import run_command

SIZES = ("--num-stages", "4", "--num-microbatches", "8")
FILE = """
from rrfp_jax.schedules.language import B, F, I, W, rounds, rule, turns

in_turn = rule(turns(B, F), W, key="microbatch")

def mine(s):
    return rounds(F.ahead(s.p - 1 - s.i), B)

def halves(s):
    return rounds(F.ahead(s.p - 1 - s.i), I, W.behind(s.i))

def late(s):
    return rounds(F, B, F)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "my_schedules.py"
    path.write_text(FILE)
    return str(path)


def printed(capsys, command, *arguments: object) -> dict:
    assert command.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_schedule_is_shown_with_rows_peaks_formulas_and_a_step(capsys) -> None:
    assert simulate.main(["--schedule", "zb-h1", "--show", *SIZES]) == 0
    text = capsys.readouterr().out
    assert "zb-h1: one chunk per stage; backward I and W; source: Zero Bubble" in text
    assert "stage 3: 3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 " in text
    assert "formula (p-1)(F+I-W): holds (m >= p, W <= F, W <= I)" in text
    assert "bubble: 11.1% (published), 11.1% (ideal slots)" in text
    assert "simulated step: 270 ms (strict), 270 ms (with foresight)" in text


def test_its_picture_is_text_or_a_file(capsys, tmp_path) -> None:
    assert simulate.main(["--schedule", "1f1b", "--num-stages", "2", "--num-microbatches", "2", "--show", "slots"]) == 0
    assert "0F0 0F1         0B0 ---     0B1 ---" in capsys.readouterr().out.splitlines()
    drawn = tmp_path / "mine.html"
    assert simulate.main(["--schedule", "1f1b", "--show", *SIZES, "--timeline", str(drawn)]) == 0
    assert drawn.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_numbers_and_the_table_for_programs(capsys, tmp_path, own) -> None:
    csv = tmp_path / "table.csv"
    name = f"{own}:halves"
    result = printed(
        capsys,
        simulate,
        "--show",
        "--schedule",
        name,
        *SIZES,
        "--durations-ms",
        "10,12,8",
        "--comm-ms",
        1,
        "--csv",
        csv,
    )
    table = build_schedule("zb-h1", ScheduleRequest(num_stages=4, num_microbatches=8))
    assert result["schedule"] == name
    assert (
        result["rows"]
        == [[*map(str, order)] for order in table.orders]
        == [[*map(str, order)] for order in read_csv(csv).orders]
    )
    assert result["peak_activations"] == [4, 4, 4, 4]
    assert result["formulas"] == []
    same = printed(
        capsys, simulate, "--show", "--schedule", "zb-h1", *SIZES, "--durations-ms", "10,12,8", "--comm-ms", 1
    )
    assert result["step_ms"] == same["step_ms"]
    assert result["bubble"]["table"] == same["bubble"]["table"]


def test_a_schedule_of_ones_own_in_simulate_and_levels(capsys, own) -> None:
    mine = printed(capsys, simulate, *SIZES, "--schedule", f"{own}:mine", "--consume", "strict")
    known = printed(capsys, simulate, *SIZES, "--schedule", "1f1b", "--consume", "strict")
    assert mine["makespan_ms"] == known["makespan_ms"]
    entries = f"{own}:mine:strict,{own}:halves,{own}:in_turn,bf"
    compared = printed(capsys, simulate, *SIZES, "--compare", entries)["compare"]
    assert [*compared] == entries.split(",")
    assert compared[f"{own}:mine:strict"]["makespan_ms"] == known["makespan_ms"]
    ranked = printed(capsys, simulate, *SIZES, "--hint", f"{own}:in_turn")
    assert ranked["order"] == compared[f"{own}:in_turn"]["order"] == compared["bf"]["order"]
    rows = printed(capsys, levels, *SIZES, "--schedules", f"1f1b,{own}:mine")["schedules"]
    assert rows[f"{own}:mine"]["strict"] == rows["1f1b"]["strict"]


def test_a_schedule_of_ones_own_in_emulate(own) -> None:
    sizes = ("--num-stages", 2, "--num-microbatches", 4, "--durations-ms", "1,1,1", "--steps", 1)
    found = run_command("emulate", *sizes, "--schedule", f"{own}:mine", "--consume", "strict", "--json")
    assert found.returncode == 0, found.stderr
    ran = json.loads(found.stdout.splitlines()[-1])
    assert ran["order"][1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]


def test_a_configuration_names_a_schedule_of_ones_own(own) -> None:
    config = load_train_config("cpu/debug", {"pipeline.schedule": f"{own}:mine"})
    assert config.pipeline.schedule == f"{own}:mine"


def test_ranks_agree_on_the_rows_and_not_on_the_name_of_a_file_alone(own, tmp_path) -> None:
    config = load_train_config("cpu/debug", {"pipeline.schedule": f"{own}:mine"})
    one, same = (plan_run(config, tmp_path / "run").agreed for _ in range(2))
    assert one == same
    Path(own).write_text(FILE.replace("s.p - 1 - s.i), B)", "s.p - s.i), B)"))
    os.utime(own, ns=(1, 1))
    other = plan_run(config, tmp_path / "run").agreed
    assert other["pipeline"].pop("rows") != one["pipeline"].pop("rows")
    assert other == one


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.py:mine", "cannot read schedule nowhere.py:mine: No such file or directory"),
        ("OWN:mind", "has no schedule 'mind': did you mean mine?"),
        ("OWN:late", "stage 0: 0F0 stands at 0 and again at 2: keep one of them"),
        ("1f1bb", "did you mean '1f1b'?"),
    ],
)
@pytest.mark.parametrize("view", [(), ("--show",)], ids=["run", "view"])
def test_what_is_no_schedule_is_bad_input(view: tuple[str, ...], name: str, words: str, own: str) -> None:
    with pytest.raises(BadInput) as caught:
        simulate.main(["--schedule", name.replace("OWN", own), *view, *SIZES])
    assert words in str(caught.value)


def test_durations_that_leave_nothing_to_do_are_bad_input() -> None:
    with pytest.raises(BadInput, match="leave nothing to do"):
        simulate.main(["--schedule", "1f1b", "--show", *SIZES, "--durations-ms", "0,0,0"])
    with pytest.raises(BadInput, match="let the name end in"):
        simulate.main(["--schedule", "1f1b", "--show", *SIZES, "--timeline", "picture.jpg"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--show",), "give --schedule"),
        (("--csv", "table.csv"), "give --show too"),
        (("--show", "--schedule", "1f1b", "--steps", "2", "--jitter", "lognormal:1"), "leave --steps, --jitter out"),
        (("--show", "--schedule", "table.csv"), "name a schedule"),
    ],
)
def test_the_view_refuses_options_that_are_not_about_it(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        simulate.main([*SIZES, *options])


def test_the_view_takes_durations_of_a_chunk(capsys) -> None:
    result = printed(capsys, simulate, *SIZES, "--schedule", "interleaved-1f1b", "--show", "--durations-ms", "10,10,10")
    ran = printed(capsys, simulate, *SIZES, "--schedule", "interleaved-1f1b", "--consume", "strict")
    assert result["step_ms"]["strict"] == pytest.approx(ran["makespan_ms_mean"])


@pytest.mark.parametrize("name", ["schedule", "emulate", "levels", "import-hf", "export-hf", "completion", "read"])
def test_a_command_that_is_gone_names_its_successor(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rrfp_jax.commands.main", name, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {name!r} is no command any more: give ")
