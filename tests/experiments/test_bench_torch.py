"""Beside torch's 1F1B: the same draws on all sides, medians and ratios, and what is refused; at large where torch is.

``RRFP_TORCH_PYTHON`` names an interpreter that has torch where the tests' own has none.
"""

import io
import json
import os
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from experiments import bench_torch
from experiments.bench_torch import make_parser, make_setting, options_of_ours, show
from experiments.torch_comparison import TORCH, Setting, Turn, rows_of, torch_durations
from experiments.turns import our_ranks, printed_by, torch_processes
from rrfp_jax.commands.common.errors import BadInput
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.testing.emulated_stage import duration_of
from tests.commands.running import run_command, sentence

TORCH_PYTHON = os.environ.get("RRFP_TORCH_PYTHON", sys.executable)


def small(**changes: object) -> Setting:
    options = {"num-stages": 2, "num-microbatches": 4, "sigmas": "0,1", "steps": 3, "warm-up": 2, **changes}
    return make_setting(make_parser().parse_args([f"--{name}={value}" for name, value in options.items()]))


def test_torch_is_told_the_durations_that_emulated_stages_have() -> None:
    durations_ms = small().draw(0, 1.0)
    told, duration_ms = torch_durations(durations_ms), duration_of(durations_ms)
    assert np.shape(told) == (2, 2 + 3, 4, 3)
    for stage, step, microbatch in product(range(2), range(5), range(4)):
        forward_ms, backward_ms = (duration_ms(step, Task(k, stage, microbatch)) for k in (TaskKind.F, TaskKind.B))
        assert told[stage][step][microbatch][0] == forward_ms
        assert sum(told[stage][step][microbatch][1:]) == backward_ms


def test_draws_are_those_of_seed_block_and_sigma_behind_a_warm_up() -> None:
    setting = small(**{"durations-ms": "1,2,3", "sigmas": "0,0.5,1"})
    assert (setting.draw(1, 0.0) == [1, 2, 3]).all()
    drawn_ms = setting.draw(1, 0.5)
    assert (drawn_ms[:2] == [1, 2, 3]).all()
    noisy_ms = drawn_ms[2:]
    assert len(np.unique(noisy_ms)) == noisy_ms.size, "every task of every step has a draw of its own"
    np.testing.assert_array_equal(drawn_ms, setting.draw(1, 0.5))
    others = setting.draw(0, 0.5), setting.draw(1, 1.0), small(**{"durations-ms": "1,2,3", "seed": 1}).draw(1, 1.0)
    assert all((other[2:] != noisy_ms).all() for other in others)


def test_rows_are_medians_over_all_blocks_and_torchs_over_them() -> None:
    turns = [
        Turn(sigma=sigma, order=order, step_ms=step_ms, simulated_ms=[50.0, 150.0], in_flight=block)
        for block, torch_ms, bf_ms in ((1, [300.0, 310.0], [100.0, 900.0]), (2, [290.0, 900.0], [151.0, 153.0]))
        for sigma in (0.0, 0.5)
        for order, step_ms in ((TORCH, torch_ms), ("bf", bf_ms))
    ]
    rows = rows_of(turns)
    assert [(row.sigma, row.order) for row in rows] == [(0, TORCH), (0, "bf"), (0.5, TORCH), (0.5, "bf")]
    assert [row.median_ms for row in rows] == [305, 152] * 2
    assert [row.torch_over_this for row in rows] == [1, 305 / 152] * 2
    assert {(row.simulated_ms, row.in_flight) for row in rows} == {(100, 2)}
    shown = io.StringIO()
    show(Console(file=shown, width=120), small(blocks=2), "9.9", rows)
    assert "2 stages x 4 microbatches, torch 9.9, medians of 2 x 3 steps" in shown.getvalue()
    assert ["0.5,", "bf", "152.0", "2.007", "100.0", "2"] in [line.split() for line in shown.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", 0), "steps is 0"),
        (("--warm-up", 0), "warm-up is 0"),
        (("--blocks", 0), "blocks is 0"),
        (("--seed", -1), "seed is -1"),
        (("--sigmas", "0,-1"), "give 0 or more"),
        (("--sigmas", "some"), "not made of numbers"),
        (("--num-stages", 1), "at least 2 stages"),
        (("--num-microbatches", 3), "as many microbatches as stages"),
        (("--durations-ms", "1,2"), "three numbers"),
        (("--compare", "1f2b"), "names no schedule and no hint"),
        (("--compare", "bf,bf"), "twice"),
        (("--compare", "interleaved-1f1b"), "8 chunks on 4 stages"),
        (("--compare", "1f1b:strict", "--window", 2), "window"),
        (("--torch-python", "/no/such/python"), "/no/such/python has no torch.distributed.pipelining"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: tuple[object, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        bench_torch.main([*map(str, options)])


def test_without_torch_the_command_ends_with_the_remedy(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    said = sentence(run_command("bench_torch", "--torch-python", python))
    assert f"{python} has no torch.distributed.pipelining: install torch 2.6 or newer" in said
    assert "--torch-python PATH" in said


def test_processes_are_numbered_answer_and_say_why_they_ended() -> None:
    program = "import sys\nfor line in sys.stdin: print(*sys.argv[1:], 1 / int(line), flush=True)"
    assert printed_by(sys.executable, "print(6 * 7)") == "42"
    with torch_processes(sys.executable, ("-c", program, "first"), 2) as members:
        for member in members:
            member.tell("1")
        answers = [member.answer().split() for member in members]
        assert [answer[:3] for answer in answers] == [["first", "0", "2"], ["first", "1", "2"]]
        assert answers[0][3:] == answers[1][3:], "one port, and one over 1"
        members[1].tell("0")
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            members[1].answer()
        members[1].tell("1")
        members[0].tell("2")
        assert members[0].answer().split()[-1] == "0.5"


@pytest.mark.slow
def test_our_ranks_run_the_order_whose_turn_it_is_on_the_given_durations(tmp_path: Path) -> None:
    given = ["--num-stages=2", "--num-microbatches=3", "--compare=1f1b:strict,bf", "--window=2"]
    ours = options_of_ours(make_parser().parse_args([*given, "--steps=9"]))
    assert ours == given, "and nothing else"
    with our_ranks("experiments.bench_torch_ranks", 2, *ours) as ranks:
        for seed, order in enumerate(("bf", "1f1b:strict", "bf")):
            durations_ms = np.random.default_rng(seed).uniform(1, 4, (2 + seed, 2, 3, 3))
            np.save(tmp_path / "D.npy", durations_ms)
            ranks.tell(json.dumps({"order": order, "durations": str(tmp_path / "D.npy")}))
            figures = json.loads(ranks.answer())
            assert figures["in_flight"] == 2
            least_ms = durations_ms.sum(axis=(2, 3)).max(axis=1)
            assert all(ms > 0.9 * least for ms, least in zip(figures["step_ms"], least_ms, strict=True))
        ranks.tell("no turn")
        with pytest.raises(RuntimeError, match="JSONDecodeError"):
            ranks.answer()


@pytest.mark.slow
def test_no_side_is_faster_than_its_own_draws_allow() -> None:
    if printed_by(TORCH_PYTHON, "import torch.distributed.pipelining") is None:
        pytest.skip(f"{TORCH_PYTHON} has no torch: name an interpreter that has in RRFP_TORCH_PYTHON")
    sizes = ("--num-stages", 3, "--num-microbatches", 5, "--sigmas", "0,1", "--steps", 3, "--blocks", 2)
    result = run_command("bench_torch", "--torch-python", TORCH_PYTHON, *sizes, "--window", "3,2,1", "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    cases = [*product((0, 1), (TORCH, "1f1b:strict", "bf", "1f1b:ready"))]
    assert [(row["sigma"], row["order"]) for row in told["rows"]] == cases
    assert [(turn["sigma"], turn["order"]) for turn in told["turns"]] == 2 * cases
    for turn in told["turns"]:
        assert len(turn["step_ms"]) == len(turn["simulated_ms"]) == 3
        assert turn["in_flight"] == 3
        if turn["order"] in (TORCH, "1f1b:strict"):
            assert all(ms > 0.97 * least for ms, least in zip(turn["step_ms"], turn["simulated_ms"], strict=True)), turn
    for torch, strict in zip(told["turns"][::4], told["turns"][1::4], strict=True):
        assert torch["simulated_ms"] == strict["simulated_ms"]
