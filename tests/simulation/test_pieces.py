"""Pieces of other work on idle stages: how much idle time they use, and how much they slow a run."""

from statistics import fmean

import numpy as np
import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.core.dispatch import GapTimer
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.simulation import Costs, Machine, Simulation, simulate

NUM_STEPS, TASK_MS, UPDATE_MS = 48, 10.0, 2.0
SIZES = [(4, 8), (8, 24)]


class Always(GapTimer):
    """Runs pieces whenever a stage idles."""

    def fits(self, now_s: float, kind: object = None, earliest_s: float | None = None) -> bool:
        del now_s, kind, earliest_s
        return True


class ByHistory(GapTimer):
    """Does not ask foresight."""

    def fits(self, now_s: float, kind: object = None, earliest_s: float | None = None) -> bool:
        del earliest_s
        return super().fits(now_s, kind)


def run(
    name: str,
    size: tuple[int, int],
    sigma: float,
    *,
    timer: type[GapTimer] = GapTimer,
    seed: int = 1,
    consume: str | None = None,
    piece_ms: float = TASK_MS,
) -> tuple[float, float]:
    """Returns by how many percent pieces make a run longer, and the percentage of its idle time that they use."""
    num_stages, num_microbatches = size
    per_stage = 2 if "interleaved" in name else 1
    request = ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=per_stage)
    table = build_schedule(name, request)
    order = Ordering(schedule=table, consume=consume or ("ready" if name == "zb-h1" else "strict"))
    resolved = order.resolve(table.placement, table.graph)
    noise = np.random.default_rng(seed).normal(size=(NUM_STEPS, table.graph.num_chunks, num_microbatches, 3))
    durations = TASK_MS * np.exp(sigma * noise - sigma**2 / 2)
    costs = Costs(durations_ms=durations, update_ms=UPDATE_MS / per_stage)

    def simulated(machine: Machine) -> Simulation:
        arbiters = resolved.arbiters(StepRules(updates=True, agreement=Agreement.NONE))
        return simulate(arbiters, costs, machine=machine, num_steps=NUM_STEPS)

    plain, filled = simulated(Machine()), simulated(Machine(piece_ms=piece_ms, gap_timer=timer))
    idle_ms = num_stages * plain.step_ends_ms[-1] - durations.sum() - UPDATE_MS * num_stages * NUM_STEPS
    return 100 * (filled.step_ends_ms[-1] / plain.step_ends_ms[-1] - 1), float(100 * filled.filled_ms / idle_ms)


def test_where_nothing_varies_pieces_cost_nothing() -> None:
    slower, used = run("1f1b", (4, 8), 0.0)
    assert slower < 0.05
    assert used >= 85


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sigma", "slower", "used"), [(0.0, 0.05, 85), (0.1, 1.0, 40), (0.3, 1.2, 35)])
def test_pieces_use_idle_time_and_hardly_slow_a_run(
    name: str, size: tuple[int, int], sigma: float, slower: float, used: float
) -> None:
    runs = [run(name, size, sigma, seed=seed) for seed in range(4 if sigma else 1)]
    assert fmean(each[0] for each in runs) <= slower
    assert fmean(each[1] for each in runs) >= used


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("size", SIZES)
def test_with_foresight_pieces_use_more_idle_time_and_slow_a_run_less(name: str, size: tuple[int, int]) -> None:
    def means(timer: type[GapTimer], piece_ms: float) -> tuple[float, float]:
        runs = [run(name, size, 0.3, timer=timer, seed=seed, consume="ready", piece_ms=piece_ms) for seed in range(4)]
        return fmean(each[0] for each in runs), fmean(each[1] for each in runs)

    (slower, used), (slower_before, used_before) = means(GapTimer, TASK_MS), means(ByHistory, TASK_MS)
    assert slower <= min(0.8, slower_before + 0.02)
    assert used > used_before
    short, short_before = means(GapTimer, TASK_MS / 3), means(ByHistory, TASK_MS / 3)
    assert short[0] <= 1.3
    assert short[1] > short_before[1] + 15


@pytest.mark.parametrize(("name", "size", "least"), [("1f1b", (4, 8), 15), ("zb-h1", (4, 8), 10)])
def test_pieces_that_always_run_slow_it_much(name: str, size: tuple[int, int], least: float) -> None:
    assert run(name, size, 0.0, timer=Always)[0] > least


def test_a_piece_of_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"piece_ms \(-1\) must not be negative"):
        Machine(piece_ms=-1)
