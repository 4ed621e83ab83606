"""``rrfp levels --systems``, as a user runs it: schedules over systems of fast and slow devices and networks."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.levels import main
from experiments.systems.cells import ORDERS, Case, Entry, Setting, run, table_of
from experiments.systems.records import Device, Hop, Model, Network, make_systems
from experiments.systems.results import distinct_hops
from experiments.systems.turnovers import Lead, crossing
from rrfp_jax.exit_codes import PEER_LOST
from rrfp_jax.schedules.slots import EQUAL, execute, per_stage
from rrfp_jax.simulation import Communication
from tests.commands.running import ROOT, run_command
from tests.environment import of_child

STUDIED = make_systems(Device(), Network(), Model())
HANAYO_OVER_CHIMERA = {0.000218: 16.1, 0.00218: 15.7, 0.0218: 12.1, 0.218: -12.4, 2.18: -57.0}
"""With two waves, 8 stages, 8 microbatches, nobody occupied by communication: percent by ratio of hop to forward."""
TWO = (
    *("--systems", "3x3", "--stages", 8, "--microbatches", 8, "--schedules", "chimera,hanayo:4"),
    *("--modes", "async", "--orders", "strict"),
)
SMALL = ("--systems", "3x3", "--stages", "2,4", "--microbatches", "2,4", "--schedules", "gpipe,1f1b,chimera,hanayo")

Cells = dict[tuple[str, ...], dict]


@pytest.fixture
def levels(capsys) -> Callable[..., dict]:
    """Run the command with ``--json`` in one process; give the last line's object."""

    def run(*arguments: object) -> dict:
        assert main([*map(str, arguments), "--processes", "1", "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def by_system(found: dict, **wanted: object) -> dict[tuple[str, str], dict[str, dict]]:
    """Of the cells that are as wanted, those of each (network, compute) by schedule."""
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for cell in found["cells"]:
        if all(cell[name] == value for name, value in wanted.items()):
            cells.setdefault((cell["network"], cell["compute"]), {})[cell["schedule"]] = cell
    return cells


def test_nine_systems_are_five_ratios() -> None:
    assert len(STUDIED) == 9
    assert all(system.is_compute_bound for system in STUDIED)
    for num_stages, middle in ((8, 0.0218), (4, 0.0109)):
        ratios = [hop.ratio for hop in distinct_hops(STUDIED, num_stages)]
        assert ratios == pytest.approx([middle / 100, middle / 10, middle, middle * 10, middle * 100], rel=2e-3)
    middle = STUDIED[4]
    assert middle.name == "mid network, mid compute"
    assert middle.forward_ms(8) == pytest.approx(30.8, rel=1e-3)
    assert middle.hop_ms == pytest.approx(0.6716, rel=1e-3)


def test_where_memory_binds_a_faster_device_is_no_faster_and_the_ratios_are_more_than_five() -> None:
    systems = make_systems(Device(memory_gb_per_s=1000.0, memory_efficiency=0.5), Network(), Model())
    slow, mid, fast = (system.forward_ms(8) for system in systems[3:6])
    assert slow == pytest.approx(307.9, rel=1e-3), "compute binds"
    assert mid == fast > slow / 10, "memory binds"
    assert [system.is_compute_bound for system in systems[3:6]] == [True, False, False]
    assert len(distinct_hops(systems, 8)) == 6, "three networks by two devices"
    halved = make_systems(Device(compute_efficiency=0.5), Network(), Model(), num_networks=1, num_devices=1)
    assert halved[0].forward_ms(8) == pytest.approx(2 * STUDIED[4].forward_ms(8))


def test_hanayo_with_two_waves_against_chimera_in_all_nine_systems(levels) -> None:
    """Published for 8 stages and 8 microbatches: 12 to 14% faster on fast and middle networks."""
    cells = by_system(levels(*TWO), order="strict")
    assert len(cells) == 9
    for of_system in cells.values():
        ratio = of_system["chimera"]["hop_per_forward"]
        (expected,) = [gain for near, gain in HANAYO_OVER_CHIMERA.items() if abs(near / ratio - 1) < 0.01]
        gain = 100 * (of_system["chimera"]["step_ms"] / of_system["hanayo:4"]["step_ms"] - 1)
        assert gain == pytest.approx(expected, abs=1.0)


def equal_times(found: dict) -> dict[tuple[str, float], list[float]]:
    """By how many percent 1F1B and GPipe differ, by mode and ratio."""
    differences: dict[tuple[str, float], list[float]] = {}
    for cell, other in pairwise(sorted(found["cells"], key=lambda c: [str(c[n]) for n in CELL])):
        if cell["order"] == "strict" and (cell["schedule"], other["schedule"]) == ("1f1b", "gpipe"):
            gain = 100 * (other["step_ms"] / cell["step_ms"] - 1)
            differences.setdefault((cell["communication"], cell["hop_per_forward"]), []).append(gain)
    return differences


CELL = ("stages", "microbatches", "network", "compute", "communication", "order", "schedule")


@pytest.mark.parametrize(
    "sizes",
    [
        ("--stages", 8, "--microbatches", "8,16"),
        pytest.param(("--stages", "4,8", "--microbatches", "8,16,32,64,128,256"), marks=pytest.mark.slow),
    ],
    ids=["few sizes", "all sizes"],
)
def test_gpipe_and_1f1b_take_the_same_time_where_senders_block_and_not_where_they_go_on(levels, sizes) -> None:
    differences = equal_times(levels("--systems", "3x3", "--schedules", "1f1b,gpipe", "--orders", "strict", *sizes))
    short = [
        gain for (mode, ratio), gains in differences.items() for gain in gains if mode == "blocking" and ratio < 0.3
    ]
    assert len(short) >= 10
    assert max(map(abs, short)) <= 0.6
    assert all(
        gain < -2.5 for (mode, ratio), gains in differences.items() for gain in gains if mode == "async" and ratio > 0.1
    )


@pytest.mark.parametrize(
    ("label", "name", "chunks"),
    [("1f1b", "1f1b", None), ("hanayo:4", "hanayo", 4), ("asymmetric-chimera", "asymmetric-chimera", None)],
)
@pytest.mark.parametrize("ratio", [0.0, 0.0218, 0.75])
def test_a_strict_execution_with_asynchronous_senders_is_the_ideal_table_with_hops(label, name, chunks, ratio) -> None:
    case = Case(Entry(label, name, chunks), 4, 8)
    table = table_of(case)
    parts = (1, 1, 2, 2) * 2 if name == "asymmetric-chimera" else ()
    ideal = execute(table, per_stage(table, EQUAL, parts), hop=ratio)
    done = run(case, Setting(Hop(ratio, 0.0), Communication.ASYNC, "strict"))
    assert done.step == pytest.approx(ideal.makespan, rel=1e-6)
    assert done.peak == pytest.approx(max(table.peak_activations(parts)))


def test_without_room_no_order_holds_more_than_the_table(levels) -> None:
    cells = levels(*SMALL[:3], 4, "--microbatches", 8, *SMALL[6:], "--window", 6)["cells"]
    assert {cell["order"] for cell in cells} == {*ORDERS}
    for cell in cells:
        if not cell["order"].endswith("+room"):
            assert cell["peak"] <= cell["peak_table"] + 1e-9
    held = {o: max(c["peak"] for c in cells if c["schedule"] == "1f1b" and c["order"] == o) for o in ORDERS}
    assert (held["foresight"], held["ready+room"]) == (4, 6)


def test_a_turnover_is_where_both_take_the_same_time(levels) -> None:
    found = levels(*TWO)
    (turnover,) = found["turnovers"]
    assert (turnover["ahead_by_table"], turnover["behind_by_table"]) == ("hanayo:4", "chimera")
    assert turnover["lead_by_table"] == pytest.approx(36 / 31 - 1)
    ratio = turnover["turned_over_at_hop_per_forward"]
    assert 0.0218 < ratio < 0.218

    def lead(at: float) -> float:
        setting = Setting(Hop(at, 0.0), Communication.ASYNC, "strict")
        cases = (Case(Entry("chimera", "chimera", None), 8, 8), Case(Entry("hanayo:4", "hanayo", 4), 8, 8))
        chimera, hanayo = (run(case, setting).step for case in cases)
        return chimera - hanayo

    assert lead(ratio * 0.98) > 0 > lead(ratio * 1.02)


@pytest.mark.parametrize(
    ("lead", "where"),
    [
        (lambda x: 1 - x, 1.0),
        (lambda x: min(0.1, 0.5 - 0.01 * x) if x < 48 else 0.02 - 50 * (x - 48), 48.0004),
        (lambda x: 5 - x**3, 5 ** (1 / 3)),
        (lambda x: -0.1 if x else 0.2, 0.0),
    ],
)
def test_a_crossing_is_found_where_lines_bend(lead, where) -> None:
    assert crossing(lead, Lead(0.0, lead(0.0)), Lead(60.0, lead(60.0))) == pytest.approx(where, rel=0.01)


def test_several_processes_find_what_one_finds(levels, capsys) -> None:
    few = ("--orders", "strict,ready", "--modes", "async")
    alone = levels(*SMALL, *few)
    assert main([*map(str, SMALL), *few, "--processes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == alone


def test_own_devices_networks_and_models(levels) -> None:
    own = ("--device.tflops", 989, "--device.compute-efficiency", 0.4, "--network.gb-per-s", 25, "--model.blocks", 32)
    (system,) = levels("--systems", "1x1", "--stages", 4, "--microbatches", 4, "--schedules", "1f1b", *own)["systems"]
    middle = STUDIED[4]
    assert system["stages"]["4"]["forward_ms"] == pytest.approx(middle.forward_ms(4) / 4 / 0.989 / 0.4)
    assert system["hop_ms"] == pytest.approx(2 * middle.hop_ms, rel=1e-3)


def test_a_schedule_of_ones_own_takes_part(levels, tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from rrfp_jax.schedules.language import B, F, rounds\n\n"
        "def mine(s):\n    return rounds(F.ahead(s.p - 1 - s.i), B)\n"
    )
    sizes = ("--stages", 4, "--microbatches", 8, "--orders", "foresight")
    cells = levels("--systems", "1x1", *sizes, "--schedules", f"1f1b,{own}:mine")["cells"]
    steps = {(cell["schedule"], cell["communication"], cell["order"]): cell["step_ms"] for cell in cells}
    assert len(steps) == 2 * 2 * 2
    for mode in ("async", "blocking"):
        for order in ("strict", "foresight"):
            assert steps[f"{own}:mine", mode, order] == steps["1f1b", mode, order]


@pytest.mark.slow
def test_what_is_written_and_printed(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "study"
    assert main([*map(str, SMALL), "--stages", "2", "--processes", "1", "--output", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert all(system.name in shown for system in STUDIED)
    assert "0.000218" not in shown, "that is of 8 stages"
    assert re.search(
        r"distinct ratios of a hop to a stage's F: 5\.45e-05, 0\.000545, 0\.00545, 0\.0545, 0\.545 with 2", shown
    )
    assert "not public of the tabular study" in shown
    with (folder / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 * 2 * 4 * 2 * len(ORDERS), "systems, sizes, schedules, modes, orders"
    assert {(row["network"], row["compute"]) for row in rows} == {(n, c) for n in SPEEDS for c in SPEEDS}
    assert (folder / "turnovers.csv").read_text().startswith("stages,microbatches,communication,ahead_by_table,")
    pictures = {path.name: path.read_bytes()[:8] for path in folder.glob("*.png")}
    assert {"ranking.png", "fastest.png", "readiness-async.png", "readiness-blocking.png"} <= {*pictures}
    assert {"hanayo-chimera.png", "1f1b-gpipe.png", "chimera-gpipe.png"} <= {*pictures}
    assert set(pictures.values()) == {b"\x89PNG\r\n\x1a\n"}


SPEEDS = ("slow", "mid", "fast")


def test_sizes_that_do_not_fit_are_left_out_with_the_reason(capsys) -> None:
    arguments = ("--systems", "1x1", "--stages", "3,4", "--microbatches", "4", "--schedules", "gpipe,chimera")
    assert main([*arguments, "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "chimera is left out at 3 x 4: " in shown
    assert "must be even" in shown or "even number" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--systems", "3"), "as 3x3"),
        (("--systems", "2x3"), "have no middle one"),
        (("--systems", "3x3", "--stages", "4,four"), "stages '4,four' are no numbers"),
        (("--systems", "3x3", "--microbatches", "8,8"), "names something twice"),
        (("--systems", "3x3", "--modes", "mail"), "choose among async"),
        (("--systems", "3x3", "--schedules", "hanayo:0"), "give at least 1"),
        (("--systems", "3x3", "--schedules", "1f1b:2"), "1 chunks per stage, not 2"),
        (("--systems", "3x3", "--schedules", "1f2b"), "did you mean '1f1b'"),
        (("--systems", "3x3", "--orders", "strict,late"), "order 'late' is unknown"),
        (("--systems", "3x3", "--window", "table"), "one for all stages"),
        (("--systems", "3x3", "--processes", "0"), "at least 1"),
        (("--systems", "3x3", "--num-stages", "4"), "--num-stages is about one machine"),
        (("--systems", "3x3", "--jitter", "lognormal:1"), "--jitter is about one machine"),
        (("--systems", "3x3", "--device.tflops", "fast"), "tflops is 'fast': give a number"),
        (("--systems", "3x3", "--device.memory-efficiency", "1.5"), "memory_efficiency is 1.5: give a part"),
        (("--systems", "3x3", "--model.blocks", "0.5"), "give a whole number"),
        (
            ("--systems", "3x3", "--stages", "3", "--schedules", "chimera", "--processes", "1"),
            "no schedule fits any size",
        ),
        (("--num-stages", "4", "--num-microbatches", "8", "--modes", "async"), "--modes is about a study"),
        (("--num-stages", "4", "--num-microbatches", "8", "--device.tflops", "1"), "--device.tflops is about a study"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(flags, message) -> None:
    with pytest.raises(ValueError, match=message):
        main([*flags])


def test_without_sizes_or_systems_one_sentence(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().err == "error: give --num-stages and --num-microbatches, or --systems, for example 3x3\n"


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_says_how_far_they_had_come(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.levels", "--systems", "3x3", "--processes", "2"]
    process = subprocess.Popen(
        [*command, "--output", tmp_path], cwd=ROOT, env=of_child(), stderr=subprocess.PIPE, text=True, process_group=0
    )
    children = wait_for_children(process.pid, number=2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"interrupted\n\d+ of 84 cases had ended; nothing was written", errors), errors
    for _ in range(300):
        if not any(map(is_alive, children)):
            break
        signal.sigtimedwait([], 0.1)
    assert not any(map(is_alive, children))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_study_with_a_sentence() -> None:
    command = [sys.executable, "-m", "experiments.levels", "--systems", "3x3", "--processes", "2"]
    process = subprocess.Popen(command, cwd=ROOT, env=of_child(), stderr=subprocess.PIPE, text=True)
    os.kill(wait_for_children(process.pid, number=2)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == PEER_LOST
    assert re.fullmatch(r"error: a process was killed after \d+ of 84 cases, .*: give fewer --processes\n", errors)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_whole_study_is_printed() -> None:
    """It takes about six minutes of processor time."""
    done = run_command("levels", "--systems", "3x3", "--processes", 2, timeout_s=1800)
    assert done.returncode == 0, done.stderr
    assert all(system.name in done.stdout for system in STUDIED)
    assert "left out" not in done.stdout


def wait_for_children(pid: int, *, number: int) -> list[int]:
    """The workers of a process, once all of them have begun to simulate."""
    import psutil

    for _ in range(600):
        found = [
            child.pid
            for child in psutil.Process(pid).children()
            if "spawn_main" in " ".join(child.cmdline()) and child.cpu_times().user > 1.5
        ]
        if len(found) == number:
            return found
        signal.sigtimedwait([], 0.1)
    raise AssertionError("no workers have begun")


def is_alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
