"""The verdict of a step: means, clipping as optax does it, and what counts as finite."""

import itertools
import math

import numpy as np
import optax
import pytest

from rrfp_jax.programs.agreement import StageReport, agree

FIRST = StageReport(squared_norms=((0, 16.0), (2, 9.0)))
LAST = StageReport(squared_norms=((1, 0.0), (3, 11.0)), losses=((1, 3, 5.0, 2.0), (0, 3, 3.0, 0.0)))


def test_mean_loss_and_norm() -> None:
    verdict = agree([FIRST, LAST])
    assert (verdict.weight, verdict.loss, verdict.grad_norm) == (2.0, 4.0, 3.0)
    assert verdict.scale == 0.5
    assert verdict.finite
    assert verdict.apply


@pytest.mark.parametrize("loss", [3.0, math.nan])
def test_a_loss_that_has_no_weight_is_summed_as_it_is(loss: float) -> None:
    verdict = agree([StageReport(losses=((0, 3, loss, 0.0),))])
    np.testing.assert_equal((verdict.loss_sum, verdict.weight), (loss, 0.0))


@pytest.mark.parametrize("clip_norm", [0.5, 2.9, 3.0, 4.0])
def test_clips_as_optax(clip_norm: float) -> None:
    gradients = {"a": np.float32([0.0, 4.0]), "b": np.float32([math.sqrt(20.0)])}
    mean = {name: leaf / 2.0 for name, leaf in gradients.items()}
    clipped, _ = optax.clip_by_global_norm(clip_norm).update(mean, optax.EmptyState())
    scale = agree([FIRST, LAST], clip_norm=clip_norm).scale
    for name, leaf in gradients.items():
        np.testing.assert_allclose(leaf * scale, clipped[name], rtol=1e-6)


def test_same_bits_whatever_the_order_of_reports() -> None:
    rng = np.random.default_rng(0)
    reports = [
        StageReport(squared_norms=((c, rng.exponential()),), losses=((c, 3, rng.exponential(), rng.exponential()),))
        for c in range(5)
    ]
    assert len({agree(order, clip_norm=0.1) for order in itertools.permutations(reports)}) == 1


def test_named_sums_are_divided_by_the_total_weight_and_keep_their_bits_in_any_order() -> None:
    rng = np.random.default_rng(0)
    reports = [
        StageReport(losses=((m, 3, 1.0, 2.0),), named_sums=((m, 3, "router_loss", rng.exponential()), (m, 3, "z", 1.0)))
        for m in range(5)
    ]
    assert all(StageReport.from_plain(report.as_plain()) == report for report in reports)
    means = [agree(order).means for order in itertools.permutations(reports)]
    assert all(each == means[0] for each in means)
    total = sum(report.named_sums[0][-1] for report in reports)
    assert means[0] == {"router_loss": pytest.approx(total / 10, rel=1e-15), "z": 0.5}
    assert agree([FIRST, LAST]).means == {}


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_left_out(spoilt: float) -> None:
    bad_norm = StageReport(squared_norms=((4, spoilt),))
    bad_loss = StageReport(losses=((2, 3, spoilt, 1.0),))
    for bad in (bad_norm, bad_loss):
        assert not agree([FIRST, LAST, bad], clip_norm=1.0).apply
        assert not agree([FIRST, LAST, bad]).finite
        assert agree([FIRST, LAST, bad], skip_nonfinite=False).apply


def test_a_step_without_weight_is_left_out() -> None:
    verdict = agree([StageReport(squared_norms=((0, 0.0),), losses=((0, 0, 0.0, 0.0),))], clip_norm=1.0)
    assert math.isnan(verdict.loss)
    assert not verdict.apply


def test_a_negative_weight_leaves_the_step_out_and_never_turns_the_norm_round() -> None:
    negative = StageReport(squared_norms=((0, 16.0),), losses=((0, 0, 3.0, 1.0), (1, 0, 3.0, -3.0)))
    verdict = agree([negative], clip_norm=0.5)
    assert (verdict.apply, verdict.fault) == (False, "a microbatch has the negative weight -3")
    forced = agree([negative], clip_norm=0.5, skip_nonfinite=False)
    assert forced.apply
    assert (forced.grad_norm, forced.scale) == (2.0, 0.25 / -2.0)


def test_a_verdict_says_what_is_wrong() -> None:
    nothing = StageReport(squared_norms=((0, 0.0),), losses=((0, 0, 0.0, 0.0),))
    assert agree([nothing]).fault == "there is nothing to predict: all weights are 0"
    assert agree([FIRST, LAST]).fault is None
    for spoilt in (StageReport(squared_norms=((4, math.inf),)), StageReport(losses=((2, 3, 1.0, math.nan),))):
        assert agree([FIRST, LAST, spoilt]).fault == "loss or gradients were not finite"


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan])
def test_clip_norm_is_positive(clip_norm: float) -> None:
    with pytest.raises(ValueError, match=r"clip_norm is .*: give a positive number, or None"):
        agree([FIRST], clip_norm=clip_norm)
