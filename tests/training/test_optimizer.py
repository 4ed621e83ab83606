"""The learning rate at the ends of its schedule, and which parameters decay."""

import jax.numpy as jnp
import pytest

from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from rrfp_jax.training.run_config import OptimizerConfig


def rates(num_steps: int, warmup_steps: int) -> list[float]:
    config = OptimizerConfig(learning_rate=0.8, final_learning_rate=0.1, warmup_steps=warmup_steps)
    schedule = learning_rate_schedule(config, num_steps)
    return [float(schedule(step)) for step in range(num_steps)]


def test_warm_up_rises_evenly_to_the_peak_and_the_last_step_has_the_final_rate():
    found = rates(10, 3)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[-1] == pytest.approx(0.1)
    assert found[-2] > 0.101


@pytest.mark.parametrize("num_steps", [2, 5])
def test_without_warm_up_the_first_step_has_the_peak(num_steps):
    found = rates(num_steps, 0)
    assert (found[0], found[-1]) == (pytest.approx(0.8), pytest.approx(0.1))


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (4, 3), (3, 5)])
def test_a_warm_up_as_long_as_the_run_is_cut_off(num_steps, warmup_steps):
    expected = [0.8 * (step + 1) / (warmup_steps + 1) for step in range(num_steps)]
    assert rates(num_steps, warmup_steps) == pytest.approx(expected)


def test_matrices_decay_and_vectors_do_not():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    params = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    optimizer = make_optimizer(config, learning_rate_schedule(config, 10))
    zero = {name: jnp.zeros_like(value) for name, value in params.items()}
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert updates["matrix"] == pytest.approx(-0.05 * jnp.ones((2, 2)))
    assert not updates["scale"].any()
