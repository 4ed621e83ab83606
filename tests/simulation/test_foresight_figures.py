"""What foresight is worth beside strict consumption of the same table, at its memory: the figures that it must reach.

Eight stages and sixteen microbatches, F = I = W = 10 ms of a whole stage, 1 ms per hop; the mean of all steps, the
first included.
"""

from statistics import fmean
from typing import Any

import numpy as np
import pytest

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import parse_jitter
from rrfp_jax.core import StepRules
from rrfp_jax.simulation import Costs, Links, Machine, both_directions, constant, for_steps, peak_memory, simulate

NUM_STAGES, NUM_MICROBATCHES = 8, 16
TABLES = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-auto", "interleaved-1f1b", "zb-v")
RULES = StepRules(updates=False)
LEAST_UNDER_NOISE = {
    "zb-h1": {"lognormal:0.2": 1.01, "lognormal:0.5": 1.05, "lognormal:1": 1.09},
    "zb-v": {"lognormal:0.2": 1.01, "lognormal:0.5": 1.025, "lognormal:1": 1.05},
}
OVER_A_SLOW_LINK = {
    "1f1b": 1.1535, "eager-1f1b": 1.0471, "zb-h1": 1.3549, "zb-h2": 1.2044, "zb-auto": 1.2044,
    "interleaved-1f1b": 1.1990, "zb-v": 1.4198,
}  # fmt: skip


def resolved(name: str, **words: Any) -> Any:
    return OrderingOptions(schedule=name, **words).resolve(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)


def costs_of(order: Any, jitter: str | None, num_steps: int, seed: int) -> Costs:
    each_ms = 10.0 * NUM_STAGES / order.placement.num_chunks
    durations_ms = for_steps(constant((each_ms,) * 3, order.graph), num_steps)
    durations_ms, sleeps = parse_jitter(jitter)(durations_ms, order.placement, np.random.default_rng(seed))
    return Costs(durations_ms=durations_ms, sleeps=sleeps)


def run(name: str, links: Links, jitter: str | None, num_steps: int, seed: int = 0, **words: Any) -> Any:
    """Mean makespan in seconds, and what each stage held at most."""
    order = resolved(name, **words)
    costs = costs_of(order, jitter, num_steps, seed)
    found = simulate(order.arbiters(RULES), costs, machine=Machine(links=links), num_steps=num_steps)
    mean_s = fmean(found.timeline.of_step(step).makespan_s() for step in range(num_steps))
    return mean_s, peak_memory(found.timeline, order.graph, order.placement)


def times_as_fast(name: str, links: Links, jitter: str | None, num_steps: int, seed: int = 0) -> float:
    strict_s, strict_held = run(name, links, jitter, num_steps, seed, consume="strict")
    foresight_s, held = run(name, links, jitter, num_steps, seed)
    assert all(most <= limit + 1e-9 for most, limit in zip(held, strict_held, strict=True))
    ratio: float = strict_s / foresight_s
    return ratio


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 9091])
@pytest.mark.parametrize(
    "jitter", ["lognormal:0.2", "lognormal:0.5", "lognormal:1", "paper:J1", "paper:J2", "paper:J3"]
)
@pytest.mark.parametrize("name", TABLES)
def test_under_noise(name: str, jitter: str, seed: int) -> None:
    ratio = times_as_fast(name, Links(latency_ms=1.0), jitter, 24, seed)
    assert ratio >= LEAST_UNDER_NOISE.get(name, {}).get(jitter, 0.995)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_over_a_slow_link(name: str) -> None:
    links = Links(latency_ms=1.0, extra_ms=both_directions({(3, 4): 30.0}, NUM_STAGES))
    assert times_as_fast(name, links, None, 3) >= OVER_A_SLOW_LINK[name] - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 4, 7])
@pytest.mark.parametrize("name", TABLES)
def test_with_a_slow_stage(name: str, stage: int) -> None:
    assert times_as_fast(name, Links(latency_ms=1.0), f"straggler:{stage},1.3", 3) >= 1 - 1e-9


@pytest.mark.parametrize(("hop_ms", "least"), [(0.0, 1.10), (1.0, 1.14), (5.0, 1.28)])
def test_a_split_backward_within_the_memory_of_1f1b(hop_ms: float, least: float) -> None:
    links = Links(latency_ms=hop_ms)
    fused_s, fused_held = run("1f1b", links, None, 3, consume="strict")
    split_s, held = run("1f1b-split", links, None, 3)
    assert fused_s / split_s >= least
    assert held == fused_held
    assert max(held) == NUM_STAGES
