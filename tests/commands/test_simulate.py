"""The simulate command, as a user runs it."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.commands.simulate import main
from rrfp_jax.schedules import schedule_names
from tests.commands.running import ROOT
from tests.documentation.blocks import blocks

ZERO_BUBBLE = ROOT / "experiments" / "paper" / "published" / "zero_bubble.csv"
SMALL = ("--num-stages", "4", "--num-microbatches", "16")
EMULATE_KEYS = {
    "makespan_ms", "step_ms", "step_ms_mean", "us_per_task",
    "bubble_fraction", "stage_bubbles", "peak_in_flight", "order",
}  # fmt: skip


def published() -> list[tuple[dict[str, str], str, str]]:
    with ZERO_BUBBLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [(row, name, row[f"bubble_{name.replace('-', '_')}"]) for row in rows for name in ("1f1b", "zb-h1", "zb-h2")]


@pytest.fixture
def simulated(capsys):
    """Run the command with ``--json``; give the last line's object."""

    def run(*arguments: object) -> dict:
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize(("row", "name", "bubble"), published())
def test_the_published_bubble_rates_of_zero_bubble(simulated, row, name, bubble):
    durations = ",".join(row[key] for key in ("forward_ms", "backward_ms", "weight_ms"))
    sizes = ("--num-stages", row["num_stages"], "--num-microbatches", row["num_microbatches"])
    order = ("--schedule", name, "--consume", "strict", "--chunks-per-stage", 1)
    result = simulated(*sizes, *order, "--durations-ms", durations, "--comm-ms", row["comm_ms"])
    assert f"{result['bubble_fraction']:.4f}" == bubble


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'optimum' is missing")
@pytest.mark.parametrize(("slots", "optimum_ms"), [(2, 290), (3, 280), (4, 270)])
@pytest.mark.one_in(3)
def test_the_optimum_with_copies_stands_beside_the_table(simulated, slots, optimum_ms):
    order = ("--schedule", "1f1b-split", "--offload", slots, "--copy-ms", 5, "--optimum", 60)
    result = simulated("--num-stages", 4, "--num-microbatches", 8, *order)
    assert (result["optimum_ms"], result["optimum_is_proven"], result["makespan_ms"]) == (optimum_ms, True, [300])


def test_the_keys_are_those_of_emulate_and_more(simulated):
    result = simulated(*SMALL, "--steps", 2)
    assert set(result) >= EMULATE_KEYS | {"makespan_ms_mean", "peak_memory", "lower_bound_ms"}
    assert result["makespan_ms"] == result["step_ms"] == [570, 570]
    assert result["makespan_ms_mean"] == result["lower_bound_ms"] == result["upper_bound_ms"] == 570
    assert result["us_per_task"] == 570e3 / 128
    assert [len(order) for order in result["order"]] == [32] * 4
    assert result["peak_memory"] == result["peak_in_flight"]


@pytest.mark.parametrize(
    ("flags", "expected_ms"),
    [
        (("--schedule", "1f1b", "--consume", "strict"), 570),
        (("--hint", "bfw", "--window", 4), 540),
        (("--hint", "bfw", "--window", 6), 510),
        (("--schedule", "1f1b-split", "--consume", "strict"), 540),
        (("--schedule", "interleaved-1f1b", "--consume", "strict", "--durations-ms", "5,5,5"), 525),
        (("--schedule", "interleaved-1f1b-split", "--consume", "strict", "--durations-ms", "5,5,5"), 500),
        (("--schedule", "gis", "--consume", "strict", "--durations-ms", "5,5,5"), 520),
        (("--schedule", "gis", "--group-size", 4, "--consume", "strict", "--durations-ms", "5,5,5"), 510),
        (("--chunks-per-stage", 2, "--hint", "bf", "--window", 8, "--durations-ms", "5,5,5"), 570),
        (("--chunks-per-stage", 2, "--window", 8, "--durations-ms", "5,5,5"), 535),
    ],
)
def test_known_makespans(simulated, flags, expected_ms):
    assert simulated(*SMALL, *flags)["makespan_ms_mean"] == expected_ms


def test_slices_share_the_time_of_their_chunk(simulated, tmp_path):
    """And a hint, a schedule of any graph or a table in a file runs them too."""
    sizes, table = ("--num-stages", 4, "--num-microbatches", 8, "--slices", 5), tmp_path / "table.csv"
    assert main(["--schedule", "seq1f1b", "--show", "--csv", str(table), *map(str, sizes)]) == 0
    for order in (
        *(("--schedule", name, "--consume", "strict") for name in ("seq1f1b", "gpipe", table)),
        ("--window", 4),
    ):
        result = simulated(*sizes, *order)
        assert result["makespan_ms_mean"] == result["lower_bound_ms"] == 8 * 30 + 3 * 30 / 5
    assert simulated(*sizes, "--schedule", "seq1f1b")["peak_memory"] == [1.6, 1.4, 1.2, 1.0]


def test_the_seed_decides_and_orders_meet_the_same_noise(simulated):
    noisy = (*SMALL, "--jitter", "lognormal:0.5", "--steps", 3)
    first, again = simulated(*noisy, "--seed", 1), simulated(*noisy, "--seed", 1)
    assert first == again
    assert simulated(*noisy, "--seed", 2)["makespan_ms"] != first["makespan_ms"]
    assert simulated(*noisy, "--seed", 1, "--hint", "bfw")["work_ms"] == pytest.approx(first["work_ms"])
    assert len(set(first["makespan_ms"])) == 3


@pytest.mark.parametrize(
    "jitter", ["lognormal:0.3", "bimodal:0.1,4", "paper:J3", "straggler:2,1.5", "lognormal:0.2+straggler:0,2+paper:J1"]
)
def test_every_jitter_slows_a_strict_order(simulated, jitter):
    strict = (*SMALL, "--schedule", "1f1b", "--consume", "strict")
    result = simulated(*strict, "--jitter", jitter, "--steps", 4)
    assert result["makespan_ms_mean"] > 570
    assert result["lower_bound_ms"] < result["makespan_ms_mean"]


def test_paper_jitter_zero_is_none(simulated):
    assert simulated(*SMALL, "--jitter", "paper:J0")["makespan_ms"] == [570]


def test_a_durations_file_gives_the_steps(simulated, tmp_path):
    durations_ms = np.full((3, 4, 16, 3), 10.0)
    durations_ms[1] *= 2
    np.save(tmp_path / "d.npy", durations_ms)
    assert simulated(*SMALL, "--durations", tmp_path / "d.npy")["makespan_ms"] == [570, 1140, 570]
    assert simulated(*SMALL, "--durations", tmp_path / "d.npy", "--steps", 4)["makespan_ms"] == [570, 1140, 570, 570]


def test_a_trace_can_be_simulated_again(simulated, tmp_path):
    noisy = (*SMALL, "--jitter", "lognormal:0.5", "--steps", 2)
    first = simulated(*noisy, "--trace", tmp_path / "t.json")
    again = simulated(*SMALL, "--durations", tmp_path / "t.json", "--recorded", "tasks")
    assert again["makespan_ms"] == pytest.approx(first["makespan_ms"], abs=1e-3)
    means = simulated(*SMALL, "--durations", tmp_path / "t.json")
    assert means["work_ms"] == pytest.approx(first["work_ms"], rel=1e-4)


def test_slow_links_and_ways_to_communicate(simulated):
    strict = (*SMALL, "--schedule", "1f1b", "--consume", "strict", "--comm-ms", 1)
    takes_ms = [simulated(*strict, "--comm", mode)["makespan_ms_mean"] for mode in ("async", "blocking", "rendezvous")]
    assert 570 < takes_ms[0] < takes_ms[1] <= takes_ms[2]
    delayed = simulated(*strict, "--link-delay-ms", "2-3:30")["makespan_ms_mean"]
    assert delayed > takes_ms[0] + 30
    sized = simulated(*strict, "--message-bytes", "1e6,2e6", "--bandwidth-gb-per-s", 1)["makespan_ms_mean"]
    assert sized > takes_ms[0]
    crowded = (*SMALL, "--schedule", "gpipe", "--consume", "strict", "--comm-ms", 15)
    assert simulated(*crowded, "--contention")["makespan_ms_mean"] > simulated(*crowded)["makespan_ms_mean"]


def test_the_host_costs_unless_it_works_ahead(simulated):
    overhead = ("--dispatch-overhead-ms", 0.5, "--agreement-ms", 0.5)
    assert simulated(*SMALL, *overhead)["makespan_ms_mean"] > 590
    assert simulated(*SMALL, "--control-ms", 5, "--steps", 2)["step_ms"] == [575, 570]
    one = ("--num-stages", 1, "--num-microbatches", 8)
    assert simulated(*one, *overhead)["makespan_ms_mean"] == 240 + 15
    assert simulated(*one, *overhead, "--dispatch-ahead", "just-in-time")["makespan_ms_mean"] == 240


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (
            ("--dispatch-ahead", "-1"),
            "dispatch_ahead is -1: give auto, just-in-time (in place of a number of tasks), certain, pairs, or 0",
        ),
        (("--dispatch-ahead", "just-in-time", "--comm", "blocking"), "dispatch-ahead has no effect with blocking"),
        (("--dispatch-ahead", "later"), "dispatch_ahead is 'later': give auto, just-in-time"),
    ],
)
def test_bad_dispatch_is_refused(flags, what, capsys):
    with pytest.raises((SystemExit, Exception)) as error:
        main([*SMALL, *flags])
    assert what in str(error.value) + capsys.readouterr().err


def test_announcements_may_be_late_or_lost(simulated):
    flags = (*SMALL, "--schedule", "zb-h1", "--jitter", "lognormal:0.5", "--comm-ms", "1", "--steps", "4")
    heard, late, lost, without = (
        tuple(simulated(*flags, *more)["makespan_ms"])
        for more in ((), ("--announce-ms", "9"), ("--announce-loss", "1"), ("--foresight", "off"))
    )
    assert lost == without
    assert len({heard, late, lost}) == 3


def test_memory_weights_change_the_peak(simulated):
    flags = (*SMALL, "--schedule", "zb-h1", "--consume", "strict")
    assert max(simulated(*flags)["peak_memory"]) == 4
    assert max(simulated(*flags, "--memory-weights", "1,0.9,0.1")["peak_memory"]) < 4.5


def test_a_comparison_names_each_entry(simulated, capsys):
    compared = simulated(*SMALL, "--compare", "1f1b:strict,bf,bfw,zb-h1")["compare"]
    assert {label: result["makespan_ms_mean"] for label, result in compared.items()}.items() >= {
        ("1f1b:strict", 570), ("bf", 570), ("bfw", 510)
    }  # fmt: skip
    assert main([*SMALL, "--compare", "1f1b:strict,bf,interleaved-1f1b:ready"]) == 0
    shown = capsys.readouterr().out
    assert "1f1b:strict" in shown
    assert "the work differs" in shown


def test_the_groups_of_a_comparison_are_for_the_entries_that_have_them(simulated):
    entries = ("--compare", "interleaved-1f1b:strict,gis:strict", "--durations-ms", "5,5,5")
    own, asked = (simulated(*SMALL, *entries, *more)["compare"] for more in ((), ("--group-size", 4)))
    assert asked["interleaved-1f1b:strict"] == own["interleaved-1f1b:strict"]
    assert [max(one["gis:strict"]["peak_memory"]) for one in (own, asked)] == [3, 4]


def test_the_tables_for_people(capsys):
    assert main([*SMALL, "--hint", "bfw", "--window", "8,8,6,6", "--steps", "2", "--jitter", "paper:J1"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("makespan", "lower bound", "in flight", "input ms", "bfw, 2 steps"))


def test_the_list_names_every_schedule_and_hint(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*schedule_names(), "bf-deep", "f-priority", "bfw"))


def test_the_page_on_orders_has_the_numbers_that_its_commands_print(simulated):
    """In the column with noise: the mean makespan, and the most microbatches that a stage held."""
    page = (ROOT / "docs" / "orders.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "|" in line]
    told = {row[0].replace("`", "").removesuffix(" (with foresight)"): row[2] for row in cells if len(row) == 5}
    compare, hint = (
        command.split()[3:]
        for block in blocks("console")
        for command in block.commands
        if block.path.name == "orders.md" and "--jitter lognormal:0.5" in command
    )
    printed = simulated(*compare)["compare"] | {"bfw, window 8": simulated(*hint)}
    for label, entry in printed.items():
        wide = f"{label}, window 32" if f"{label}, window 32" in told else label
        assert told[wide] == f"{entry['makespan_ms_mean']:.0f}, {max(entry['peak_memory']):.0f}"


def test_a_page_holds_all_steps_and_a_picture_the_last_one_unless_told_otherwise(simulated, tmp_path, monkeypatch):
    drawn = {}

    def note(timelines, path, **_):
        drawn[Path(path).name] = [one.steps() for _, one in timelines]

    monkeypatch.setattr("rrfp_jax.observe.panels.write_page", note)
    monkeypatch.setattr("rrfp_jax.observe.picture.draw_timelines", note)
    sizes = ("--num-stages", 2, "--num-microbatches", 3, "--steps", 4, "--timeline")
    for name, flags in {"a.html": (), "a.png": (), "b.html": ("--timeline-steps", 2)}.items():
        simulated(*sizes, tmp_path / name, *flags)
    assert drawn == {"a.html": [[0, 1, 2, 3]], "a.png": [[3]], "b.html": [[2, 3]]}
    monkeypatch.setattr("rrfp_jax.commands.common.console._PAGE_BOXES", 40)
    simulated(*sizes, tmp_path / "c.html")
    assert drawn["c.html"] == [[2, 3]]


def test_a_page_without_a_name_goes_where_git_does_not_look(simulated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulated("--num-stages", 2, "--num-microbatches", 3, "--timeline")
    assert [path.name for path in tmp_path.glob("**/*.html")] == ["simulate.html"]
    assert (tmp_path / "runs" / "simulate.html").exists()


@pytest.mark.parametrize("name", ["t.png", "t.svg", "t.html"])
def test_pictures(simulated, tmp_path, name):
    simulated("--num-stages", 2, "--num-microbatches", 3, "--compare", "1f1b:strict,bfw", "--timeline", tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--jitter", "normal:1"), "jitter 'normal:1' is unknown"),
        (("--jitter", "bimodal:0.1"), "1 numbers instead of 2"),
        (("--jitter", "paper:J4"), "one level of J0, J1, J2, J3"),
        (("--jitter", "straggler:9,2"), "give 0..3"),
        (("--link-delay-ms", "6-7:30"), "link 6-7 does not exist"),
        (("--link-delay-ms", "6:30"), "for example 6-7:30"),
        (("--comm", "mail"), "choose one of async, blocking, rendezvous"),
        (("--comm", "blocking", "--contention"), "contention has no effect"),
        (("--message-bytes", "1e6"), "give both or neither"),
        (("--durations", "d.npy", "--durations-ms", "1,1,1"), "give one of them"),
        (("--recorded", "tasks"), "about the trace"),
        (("--durations-ms", "1,1"), "three numbers"),
        (("--steps", "0"), "at least 1"),
        (("--timeline-steps", "0"), "draw at least 1"),
        (("--seed", "-1"), "0 or more"),
        (("--timeline", "t.gif"), "end in .png, .svg or .html"),
        (("--compare", "bf,bf"), "twice"),
        (("--compare", "bf:strict"), "strict needs a schedule"),
        (("--compare", "1f1b:soon"), "write 1f1b:strict, 1f1b:ready or 1f1b:ready"),
        (("--compare", "nothing"), "names no schedule and no hint"),
        (("--compare", "1f1b:strict,bf", "--group-size", "4"), "name gis, or leave group-size out"),
        (("--compare", "bf", "--hint", "bf"), "leave --hint out"),
        (("--compare", "bf,fb", "--trace", "t.json"), "a trace holds one run"),
        (("--memory-weights", "1,1,1"), "make F the sum"),
        (("--window", "0"), "at least 1"),
        (("--num-microbatches", "0"), "at least 1"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(flags, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        main([*SMALL, *flags])
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_code_2_and_one_sentence():
    command = [sys.executable, "-m", "experiments.simulate", *SMALL, "--hint", "nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: hint 'nothing' is unknown: choose one of bf")
    assert ended.stderr.count("\n") == 1


def test_sizes_are_required(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--hint", "bf"])
    assert "--num-stages" in capsys.readouterr().err
