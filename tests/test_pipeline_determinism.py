"""Deterministic mode: identical bits whatever the order of tasks, their timing, and the devices of the process."""

from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.core.dispatch import JUST_IN_TIME
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, Task, build_schedule
from rrfp_jax.testing import DelayedStage
from tests.commands.running import ROOT, run_code
from tests.long_sums import NUM_MICROBATCHES, NUM_STAGES, digest, make_pipeline, train

NUM_STEPS = 10
"""As many as ``tests.long_sums`` takes in a process of its own."""


def foreseen(name: str) -> dict[str, Any]:
    request = ScheduleRequest(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
    return {"schedule": build_schedule(name, request)}


def strict(name: str) -> dict[str, Any]:
    return {"consume": "strict"} | foreseen(name)


def random_delay(step: int, task: Task) -> float:
    """Up to two milliseconds, another for every task and step."""
    return float(np.random.default_rng((step, ord(task.kind), task.chunk, task.microbatch + 1)).uniform(0, 2e-3))


@pytest.fixture(scope="module")
def base() -> Pipeline:
    return make_pipeline(deterministic=True)


@pytest.fixture(scope="module")
def expected(base: Pipeline) -> tuple[list[float], dict[str, Any]]:
    return train(base.reordered(Ordering(hint="bf", window=1)), NUM_STEPS)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "order",
    [
        {"hint": "bf"},
        {"hint": "bfw"},
        {"hint": "fb", "window": 2},
        strict("1f1b"),
        strict("zb-h1"),
        foreseen("zb-h1"),
        foreseen("1f1b-split"),
    ],
    ids=["bf", "bfw", "fb", "strict 1f1b", "strict zb-h1", "foresight zb-h1", "foresight 1f1b-split"],
)
@pytest.mark.parametrize("delayed", [False, True], ids=["prompt", "delayed"])
def test_orders_and_timing_leave_every_bit_alone(
    base: Pipeline, expected: tuple[list[float], dict[str, Any]], order: dict[str, Any], delayed: bool
) -> None:
    options = RuntimeOptions(wrap_stage=(lambda stage: DelayedStage(stage, random_delay)) if delayed else None)
    losses, params = train(base.reordered(Ordering(**order), options=options), NUM_STEPS)
    assert losses == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


@pytest.mark.parametrize("dispatch_ahead", ["certain", JUST_IN_TIME])
def test_tasks_handed_over_early_leave_every_bit_alone(
    base: Pipeline, expected: tuple[list[float], dict[str, Any]], dispatch_ahead: int | str
) -> None:
    options = RuntimeOptions(dispatch_ahead=dispatch_ahead, wrap_stage=lambda stage: DelayedStage(stage, random_delay))
    losses, params = train(base.reordered(Ordering(hint="bfw"), options=options), NUM_STEPS)
    assert losses == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


def test_without_deterministic_mode_losses_agree_to_rounding(expected: tuple[list[float], dict[str, Any]]) -> None:
    losses, _ = train(make_pipeline(hint="f-priority"), NUM_STEPS)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("num_devices", "hint"), [(3, "f-priority"), (1, "bf"), (8, "bfw")])
def test_processes_with_other_devices_compute_the_same_bits(
    expected: tuple[list[float], dict[str, Any]], num_devices: int, hint: str
) -> None:
    result = run_code(f"from tests.long_sums import main; main({num_devices}, {hint!r})", ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == digest(*expected)
