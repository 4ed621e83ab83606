"""Plans whose stages have different numbers of replicas."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.costs import CostBook, CostEntry, CutModel, LayerCosts, LinkCosts, Noise
from rrfp_jax.planner.cost_file import write_costs
from rrfp_jax.planner.judging import Judge
from rrfp_jax.planner.plan import main
from rrfp_jax.planner.records import PlanChoice, PlanShape
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import SearchSpace, _replica_counts
from rrfp_jax.schedules import linear

LAYER = LayerCosts(
    forward_ms=1.0, input_gradient_ms=1.0, weight_gradient_ms=1.0, fixed_bytes=1000, stash_bytes=100, output_bytes=10
)
HEAD = replace(LAYER, forward_ms=4.0, input_gradient_ms=4.0, weight_gradient_ms=4.0)


def a_book(num_layers: int, **more: object) -> CostBook:
    types = {"layer": replace(LAYER, **more), "head": replace(HEAD, **more)}  # type: ignore[arg-type]
    links = LinkCosts(latency_ms=0.1, gb_per_s=20.0)
    return CostBook(layers=(*("layer",) * num_layers, "head"), entries=(CostEntry(types=types),), links=links)


def a_choice(book: CostBook, counts: tuple[int, ...], replicas: tuple[int, ...], **shape: object) -> PlanChoice:
    data = max(replicas)
    cut = CutModel(
        costs=book.at(microbatch_size=1),
        counts=counts,
        placement=linear(len(counts)),
        num_microbatches=6,
        split=False,
        replicas=replicas,
    )
    told = PlanShape(num_stages=len(counts), num_microbatches=6, data=data, replicas=replicas, **shape)
    return PlanChoice(shape=told, cut=cut, is_even=False, ordering=Ordering(hint="bf", window=6), order_name="bf")


def test_with_as_many_replicas_of_all_stages_it_is_the_step_of_one() -> None:
    one = a_choice(a_book(5), (2, 2, 2), (2, 2, 2))
    alike = replace(one, shape=replace(one.shape, replicas=()), cut=replace(one.cut, replicas=2))
    judge = Judge(Noise(), 1, 0)
    assert judge.nominal_ms(one) == pytest.approx(judge.nominal_ms(alike), abs=3 * 0.1)  # messages beside the sum


def test_replicas_share_the_work_of_their_stage_and_sum_gradients() -> None:
    judge = Judge(Noise(), 1, 0)
    two = a_choice(a_book(4), (4, 1), (1, 2))
    assert two.cut.stage_work_ms == (12 * 12.0, 12 * 6.0)  # 12 microbatches, of which each head has half
    assert two.shape.num_devices == 3
    assert two.shape.batch_size == 12
    step_ms = judge.nominal_ms(two)
    assert 12 * 12.0 <= step_ms < 12 * 12.0 + 2 * 12.0
    summed = a_choice(a_book(4, gradient_bytes=4 * 10**9), (4, 1), (1, 2))
    expected = 2 * 0.1 + 2 / 2 * 4e9 / 20 / 1e6
    assert judge.nominal_ms(summed) - step_ms == pytest.approx(expected, rel=0.5)
    reduce_ms = summed.cut.simulated_costs().reduce_ms
    assert reduce_ms == (0.0, pytest.approx(expected))


def test_a_head_that_no_cut_divides_gets_several_replicas() -> None:
    book = a_book(4, gradient_bytes=25 * 10**7)
    space = SearchSpace(devices=3, batch_size=24)
    plain, unequal = (make_plan(book, replace(space, unequal=asked)) for asked in (False, True))
    best = unequal.ranking[0]
    assert best.choice.shape.replicas
    assert sum(best.choice.shape.replicas) == 3
    assert best.choice.shape.batch_size == 24
    assert best.forecast.step_ms < plain.ranking[0].forecast.step_ms / 1.05
    assert max(best.choice.cut.stage_work_ms) <= best.forecast.step_ms
    assert all(not ranked.choice.shape.replicas for ranked in plain.ranking)
    few = make_plan(replace(book, device_bytes=3000), replace(space, unequal=True))
    assert all(ranked.choice.peak_bytes <= 3000 for ranked in few.ranking)
    noisy = make_plan(replace(book, noise=Noise.alike(0.2)), replace(space, unequal=True), draws=4)
    assert noisy.ranking[0].choice.shape.replicas
    assert noisy.ranking[0].forecast.error_ms > 0


@pytest.mark.parametrize("seed", range(8))
def test_the_replicas_of_stages_equal_looking_at_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work_ms, units = rng.uniform(1, 9, int(rng.integers(3, 7))), int(rng.integers(2, 6))
    speeds = [1.0] * units if seed % 2 else rng.uniform(0.3, 2.0, units).tolist()

    def least_ms(replicas: tuple[int, ...], at: int = 0) -> float:
        first, number = units - sum(replicas), replicas[0]
        pace = number * min(speeds[first : first + number])
        if len(replicas) == 1:
            return float(work_ms[at:].sum()) / pace if at < len(work_ms) else float("inf")
        stops = range(at + 1, len(work_ms) - len(replicas) + 2)
        return min(
            (max(work_ms[at:stop].sum() / pace, least_ms(replicas[1:], stop)) for stop in stops),
            default=float("inf"),
        )

    found = list(_replica_counts(work_ms, speeds))
    assert [len(each) for each in found] == list(range(1, min(units - 1, len(work_ms)) + 1))
    for replicas in found:
        every = [each for each in product(range(1, units + 1), repeat=len(replicas)) if sum(each) == units]
        assert least_ms(replicas) == pytest.approx(min(map(least_ms, every)))


def test_the_command_takes_unequal_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_costs(a_book(4, gradient_bytes=25 * 10**7), "costs.json")
    given = ["--costs", "costs.json", "--devices", "3", "--batch-size", "24", "--replicas", "unequal"]
    assert main([*given, "--json"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["ranking"][0]
    assert sum(best["replicas"]) == best["devices"] == 3
    assert main(given) == 0
    assert f"{best['num_stages']} x {','.join(map(str, best['replicas']))} x 1" in capsys.readouterr().out
