"""Every schedule beside its closed form, at every step, eagerly and traced."""

import math

import jax
import numpy as np
import pytest

from rrfp_jax.training.optimizer import learning_rate_schedule, rates_changed
from rrfp_jax.training.run_config import CONSTANT, COSINE, LINEAR, STABLE, OptimizerConfig

PEAK, FINAL = 0.8, 0.1


def rates(num_steps: int, **fields: object) -> list[float]:
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=PEAK, **fields), num_steps)
    eager = [float(schedule(step)) for step in range(num_steps)]
    traced = jax.jit(jax.vmap(schedule))(np.arange(num_steps, dtype=np.int32))
    np.testing.assert_allclose(traced, eager, rtol=1e-6)
    return eager


def closed_form(schedule: str, step: int, *, warmup: int, begin: int, decay: int) -> float:
    if step < warmup:
        return PEAK * (step + 1) / (warmup + 1)
    x = min(max(step - begin, 0) / decay, 1)
    if schedule == COSINE:
        return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * x)) / 2
    return PEAK + (FINAL - PEAK) * x


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("schedule", "decay", "begin", "length"),
    [
        (COSINE, None, None, None),
        (LINEAR, None, None, None),
        (COSINE, 5, None, 5),
        (LINEAR, 5, None, 5),
        (STABLE, None, 17, 2),
        (STABLE, 6, 13, 6),
        (STABLE, 100, None, None),
    ],
)
def test_every_step_of_a_decay_is_the_closed_form(
    schedule: str, decay: int | None, begin: int | None, length: int | None, warmup: int
) -> None:
    found = rates(20, schedule=schedule, final_learning_rate=FINAL, warmup_steps=warmup, decay_steps=decay)
    begin, length = warmup if begin is None else begin, length or 19 - warmup
    expected = [closed_form(schedule, step, warmup=warmup, begin=begin, decay=length) for step in range(20)]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_constant_rate_is_the_peak_after_the_warm_up() -> None:
    assert rates(6, schedule=CONSTANT, warmup_steps=3) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates(2, schedule=CONSTANT) == pytest.approx([0.8, 0.8])


def test_warm_up_rises_evenly_to_the_peak_and_the_last_step_has_the_final_rate() -> None:
    found = rates(10, final_learning_rate=FINAL, warmup_steps=3)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[-1] == pytest.approx(0.1)
    assert found[-2] > 0.101


@pytest.mark.parametrize("num_steps", [2, 5])
def test_without_warm_up_the_first_step_has_the_peak(num_steps: int) -> None:
    found = rates(num_steps, final_learning_rate=FINAL)
    assert (found[0], found[-1]) == (pytest.approx(0.8), pytest.approx(0.1))


@pytest.mark.parametrize("schedule", [COSINE, LINEAR, STABLE])
@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (4, 3), (3, 5)])
def test_a_warm_up_as_long_as_the_run_is_cut_off(num_steps: int, warmup: int, schedule: str) -> None:
    expected = [PEAK * (step + 1) / (warmup + 1) for step in range(num_steps)]
    assert rates(num_steps, schedule=schedule, warmup_steps=warmup) == pytest.approx(expected)


def test_a_run_with_another_number_of_steps_says_to_what_its_rates_change() -> None:
    config = OptimizerConfig(learning_rate=PEAK, final_learning_rate=FINAL, schedule=LINEAR)
    before, after = (
        rates(5, schedule=LINEAR, final_learning_rate=FINAL),
        rates(9, schedule=LINEAR, final_learning_rate=FINAL),
    )
    said = rates_changed(config, before=5, now=9, step=4, update=3)  # one step was skipped
    assert f"to {after[3]:.2e} at step 4, which was to have {before[3]:.2e}, and {after[7]:.2e} at the last" in said
    for fixed in (
        OptimizerConfig(learning_rate=PEAK, schedule=CONSTANT),
        OptimizerConfig(learning_rate=PEAK, decay_steps=3),
    ):
        assert rates_changed(fixed, before=5, now=9, step=4, update=3) == "its learning rates stay as they are"
