"""The time of a task as a line in its operations, fitted from sums that add up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from rrfp_jax.costs.task_costs import TaskLine, TaskSums, fitted_line

TASKS = st.lists(st.tuples(st.integers(1, 100).map(lambda n: n * 1e9), st.floats(1e-4, 1)), min_size=1, max_size=20)


def test_a_line_is_found_again():
    tasks = [(flops, 2e-3 + flops * 5e-15) for flops in (1e12, 2e12, 7e12)]
    line = fitted_line(TaskSums.of(tasks))
    assert line == pytest.approx((2e-3, 5e-15))
    assert line.predicted_s(TaskSums.of(tasks)) == pytest.approx(sum(seconds for _, seconds in tasks))


@given(TASKS)
def test_the_fit_is_the_best_line_without_negative_numbers(tasks):
    flops, seconds = np.array(tasks).T
    line = fitted_line(TaskSums.of(tasks))
    assert min(line) >= 0
    scale = flops.max()
    best = nnls(np.stack([np.ones_like(flops), flops / scale], 1), seconds)[0]
    error, least = (np.square(a + b * flops - seconds).sum() for a, b in (line, (best[0], best[1] / scale)))
    assert error <= least * (1 + 1e-6) + 1e-12


@given(TASKS, TASKS)
def test_sums_add_up(some, others):
    assert TaskSums.of(some).plus(TaskSums.of(others)) == pytest.approx(TaskSums.of([*some, *others]))


def test_equal_tasks_take_time_in_proportion_and_none_take_none():
    assert fitted_line(TaskSums.of([(2e9, 0.1), (2e9, 0.3)])) == pytest.approx((0.0, 1e-10))
    assert fitted_line(TaskSums.of([(0.0, 0.1), (0.0, 0.3)])) == pytest.approx((0.2, 0.0))
    assert fitted_line(TaskSums.of([])) == TaskLine(0.0, 0.0)


def test_a_slow_replica_shifts_all_predictions_alike():
    flops = [1e12, 2e12, 3e12, 9e12]
    replicas = [[(each, factor * (1e-3 + each * 1e-15)) for each in flops] for factor in (1, 1, 1.3, 1)]
    line = fitted_line(TaskSums.of(task for tasks in replicas for task in tasks))
    ratios = [TaskSums.of(tasks).busy_s / line.predicted_s(TaskSums.of(tasks)) for tasks in replicas]
    assert [ratio / ratios[0] for ratio in ratios] == pytest.approx([1, 1, 1.3, 1])
