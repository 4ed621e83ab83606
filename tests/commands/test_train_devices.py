"""Stages on devices in an order that the configuration names, and with numbers of replicas of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.planner.configured import resolve_auto_cut
from tests.commands.running import run_command, sentence

SMALL = ("--config", "cpu/debug", "--num-layers", 2, "--hidden", 32, "--length", 32, "--num-stages", 2)


@pytest.mark.slow
def test_the_order_of_devices_changes_where_stages_lie_and_nothing_else(tmp_path: Path) -> None:
    losses = []
    for number, devices in enumerate(("null", "1,0")):
        run = tmp_path / str(number)
        options = ("--deterministic", "true", "--held-out", 0.1, "--devices", devices, "--steps", 2, "--run-dir", run)
        result = run_command("train", *SMALL, *options)
        assert result.returncode == 0, result.stderr
        losses.append([json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1]
    rows = [line.split()[:2] for line in result.stdout.splitlines() if "cpu:" in line]
    assert rows == [["0", "cpu:1"], ["1", "cpu:0"]]
    evaluated = run_command("evaluate", run, "--batches", 1)
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.slow
def test_a_plan_with_all_of_it_by_stage_trains_alike(tmp_path: Path) -> None:
    by_stage = ("--replicas", "1,2", "--reduce", "messages", "--remat", "full,none", "--devices", "2,0,1")
    losses = []
    for number, options in enumerate(((), by_stage)):
        run = tmp_path / str(number)
        result = run_command("train", *SMALL, "--steps", 3, "--run-dir", run, *options)
        assert result.returncode == 0, result.stderr
        losses.append([json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    rows = [line.split() for line in result.stdout.splitlines() if "cpu:" in line]
    assert [(row[0], row[2], row[3], row[-1]) for row in rows] == [
        ("0,", "0", "cpu:2", "full"),
        ("1,", "0", "cpu:0", "none"),
        ("1,", "1", "cpu:1", "none"),
    ]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("1,0,2", "devices '1,0,2' are no order of 2 devices: name each of 0 to 1 once, in the order in which"),
        ("0", "--devices 0: run: devices is 0: give at least 1"),
        ("a,b", "run.devices is ['a', 'b']: give a whole number"),
    ],
)
def test_an_order_that_cannot_be_is_refused_before_anything_is_loaded(devices: str, message: str) -> None:
    assert message in sentence(run_command("train", *SMALL, "--devices", devices))


def test_fewer_ranks_take_their_devices_by_number() -> None:
    config = load_train_config("cpu/debug", {"pipeline.replicas": 2, "run.devices": [7, 6, 5, 4, 3, 2, 1, 0]})
    assert config.on_part_of_ranks(2, 4).run.devices is None


def with_replicas(*replicas: int, **more: Any) -> Any:
    given = {f"pipeline.{name}": value for name, value in ({"reduce": "messages"} | more).items()}
    return load_train_config("cpu/debug", {"pipeline.replicas": [*replicas], **given})


def test_replicas_may_be_given_by_stage() -> None:
    config = with_replicas(1, 2, 2, 2)
    assert (config.pipeline.num_devices, config.pipeline.most_replicas) == (7, 2)
    assert with_replicas(2, 2, 2, 2).pipeline.replicas == 2
    with pytest.raises(ValueError, match="a part of the ranks holds no part of replicas that differ"):
        config.on_part_of_ranks(1, 2)
    with pytest.raises(ValueError, match="layout auto finds a cut for stages of equally many replicas"):
        resolve_auto_cut(with_replicas(1, 2, 2, 2, layout="auto"))


@pytest.mark.parametrize(
    ("replicas", "more", "message"),
    [
        ((1, 2), {}, r"replicas is \(1, 2\): give one number for all, or 1 or more for each of 4 stages"),
        ((1, 2, 0, 2), {}, r"replicas is \(1, 2, 0, 2\): give one number for all, or 1 or more for each of 4 stages"),
        ((1, 2, 2, 2), {"reduce": "auto"}, "give reduce messages, and consume foresight or ready"),
        ((1, 2, 2, 2), {"consume": "strict"}, "give reduce messages, and consume foresight or ready"),
    ],
)
def test_replicas_that_cannot_be_are_refused(replicas: tuple[int, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_replicas(*replicas, **more)


def test_state_is_shared_by_equal_replicas_alone() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.shard is for several replicas of all stages"):
        load_train_config(
            "cpu/debug",
            {"pipeline.replicas": [1, 2, 2, 2], "pipeline.reduce": "messages", "optimizer.shard": True},
        )
