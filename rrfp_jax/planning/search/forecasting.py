"""What a candidate is expected to do, as a record."""

import numpy as np

from rrfp_jax.costs import CostBook
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import HELD_OUT, Judge
from rrfp_jax.planning.search.records import Forecast
from rrfp_jax.planning.search.step_bound import step_bound_ms


def forecast(
    one: Candidate, book: CostBook, judge: Judge, num_draws: int | None = None, which: int = HELD_OUT
) -> Forecast:
    """By these draws, all or the first of them."""
    draws_ms = judge.times(one, num_draws or judge.num_draws, which).draws_ms
    shape, cut, nominal_ms = one.choice.shape, one.choice.cut, judge.nominal_ms(one)
    step_ms, number = float(draws_ms.mean()), len(draws_ms)
    sd_ms = float(draws_ms.std(ddof=1)) if number > 1 else 0.0
    samples_per_s = shape.batch_size / step_ms * 1e3
    flops = (
        sum(cut.costs.of(layer).flops for layer in range(cut.costs.num_layers)) * shape.num_microbatches * shape.data
    )
    peak = book.device_flops
    return Forecast(
        step_ms=step_ms,
        p95_ms=float(np.quantile(draws_ms, 0.95)),
        sd_ms=sd_ms,
        error_ms=sd_ms / number**0.5,
        nominal_ms=nominal_ms,
        bound_ms=step_bound_ms(cut),
        bubble=max(0.0, 1 - sum(cut.stage_work_ms) / shape.num_stages / nominal_ms),
        memory=one.memory,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * book.tokens_per_sample or None,
        mfu=flops / (shape.num_devices * peak * step_ms / 1e3) if peak and flops else None,
        draws_ms=tuple(map(float, draws_ms)) if number > 1 else (),
    )
