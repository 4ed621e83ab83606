"""A cut's forecast memory beside what the stages of a real run hold, and the words of a case."""

import pytest

from experiments.bench_plan import MEMORY_CASES, STEP_CASES
from experiments.bench_plan_real import SMALL_MODEL, Case, bench_of, forecast_peaks, forecast_step_ms
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts

LAYER = LayerCosts(forward_ms=1.0, input_gradient_ms=1.0, weight_gradient_ms=1.0, stash_bytes=100)


def test_the_cases_are_cuts_of_the_model_that_a_book_describes() -> None:
    layers = ("embedding", *("layer",) * 8, "head")
    nothing = LayerCosts(forward_ms=0.0, input_gradient_ms=0.0, weight_gradient_ms=0.0)
    types = {"embedding": nothing, "layer": LAYER, "head": nothing}
    book = CostBook(layers=layers, entries=(CostEntry(types=types, microbatch_size=2),))
    for case in STEP_CASES:
        assert forecast_step_ms(case, book) >= case.num_microbatches * 3.0 * max(case.layers)
    for case in MEMORY_CASES:
        assert min(forecast_peaks(case, book)) >= 100 * min(case.layers)
    strict = STEP_CASES[0]
    assert strict.words == "4+4 layers, 1f1b strict"
    assert forecast_step_ms(strict, book) == pytest.approx((8 + 1) * 12.0)


@pytest.mark.slow
def test_stages_in_four_processes_hold_what_is_foreseen_and_not_much_less() -> None:
    case = Case(layers=(2, 2, 1, 1), num_stages=4, num_microbatches=8, order={"schedule": "zb-h1", "consume": "strict"})
    with bench_of(SMALL_MODEL, 6, length=32) as bench:
        book = bench.profile(4, repeats=1)
        peaks = bench.train(case, 1).peaks
    for seen, foreseen in zip(peaks, forecast_peaks(case, book), strict=True):
        assert seen <= foreseen <= 1.2 * seen
