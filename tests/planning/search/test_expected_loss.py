"""What leaving a candidate behind costs, beside what chance gives."""

import numpy as np
import pytest

from rrfp_jax.planning.search.expected_loss import expected_loss, moderated


@pytest.mark.parametrize("behind", [-0.5, 0.0, 1.0, 2.5])
def test_it_is_the_mean_of_what_the_other_may_be_ahead_by(behind: float) -> None:
    truth = np.random.default_rng(0).normal(behind, 0.8, 400_000)
    assert expected_loss(behind, 0.8) == pytest.approx(np.maximum(0, -truth).mean(), abs=2e-3)


def test_without_an_error_the_difference_is_what_is_lost() -> None:
    assert expected_loss(0.3, 0.0) == 0.0
    assert expected_loss(-0.3, 0.0) == 0.3


def test_errors_of_few_draws_are_drawn_towards_those_of_others() -> None:
    errors = [0.1, 1.0, 1.2]
    few, more, many = (moderated(errors[0], errors, number) for number in (4, 16, 4096))
    assert 0.9 > few > more > many
    assert many == pytest.approx(0.1, rel=0.1)
    alike = moderated(1.0, [1.0, 1.0], 4)
    assert alike == pytest.approx((7 / 5) ** 0.5)  # the deviation of Student's distribution with 7 degrees


def test_it_is_not_surer_than_chance_allows() -> None:
    """Of alike candidates one seems far ahead by few draws more often than its own error says, and not by this one."""
    draws = np.random.default_rng(1).standard_normal((2000, 8, 4))
    far = {"own": 0, "moderated": 0}
    for candidates in draws:
        means, errors = candidates.mean(axis=1), candidates.std(axis=1, ddof=1) / 2
        far["own"] += sum(abs(means) > 3.5 * errors)
        far["moderated"] += sum(
            abs(mean) > 3.5 * moderated(error, list(errors), 4) for mean, error in zip(means, errors, strict=True)
        )
    assert far["own"] > 10 * far["moderated"]
    assert far["moderated"] < 0.004 * draws[..., 0].size
