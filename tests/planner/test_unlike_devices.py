"""Plans for devices that differ in speed and memory, and for links that differ from pair to pair."""

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.costs import CostBook, CostEntry, CutModel, DeviceCosts, LayerCosts, LinkCosts, MachineCosts
from rrfp_jax.planner.cost_file import write_costs, write_machine
from rrfp_jax.planner.judging import quick_bound_ms, step_bound_ms, strict_times_ms, walk_of
from rrfp_jax.planner.plan import main
from rrfp_jax.planner.records import LINEAR, PlanShape, Point
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import PointCosts, SearchSpace, points_of, shapes_of
from rrfp_jax.schedules import ScheduleRequest, build_schedule

LAYER = LayerCosts(
    forward_ms=1.0,
    input_gradient_ms=1.0,
    weight_gradient_ms=1.0,
    update_ms=0.1,
    fixed_bytes=1000,
    gradient_bytes=10**6,
    stash_bytes=100,
    output_bytes=10**6,
    temporaries_bytes=10,
)
TYPES = {
    "embedding": replace(LAYER, forward_ms=0.2, input_gradient_ms=0.0, weight_gradient_ms=0.4),
    "layer": LAYER,
    "head": replace(LAYER, forward_ms=2.5, input_gradient_ms=2.5, weight_gradient_ms=2.5),
}


def a_book(num_layers: int, machine: MachineCosts | None, **more: Any) -> CostBook:
    return CostBook(
        layers=("embedding", *("layer",) * num_layers, "head"),
        entries=(CostEntry(types=TYPES),),
        links=LinkCosts(latency_ms=0.2, gb_per_s=50.0),
        machine=machine,
        **more,
    )


def of_speeds(*speeds: float, **more: Any) -> MachineCosts:
    return MachineCosts(devices=tuple(DeviceCosts(speed=speed) for speed in speeds), **more)


SLOW_THIRD = of_speeds(1.0, 1.0, 0.5, 1.0)


def a_space(stages: int, microbatches: int, **more: Any) -> SearchSpace:
    return SearchSpace(**{"devices": stages, "stages": (stages,), "microbatches": (microbatches,), **more})


def step_1f1b_ms(cut: CutModel) -> float:
    request = ScheduleRequest(num_stages=cut.placement.num_stages, num_microbatches=cut.num_microbatches)
    return float(strict_times_ms(cut, walk_of(build_schedule("1f1b", request)), cut.durations_ms)[0])


@pytest.mark.parametrize(
    ("num_layers", "microbatches"), [(12, 6), (16, 8), pytest.param(24, 16, marks=pytest.mark.slow)]
)
def test_a_slow_device_gets_fewer_layers_as_looking_at_all_finds(num_layers: int, microbatches: int) -> None:
    book, space = a_book(num_layers, SLOW_THIRD), a_space(4, microbatches)
    (shape,) = shapes_of(book, space)
    found = []
    for slow in range(4):
        order = tuple(2 if stage == slow else [0, 1, 3][stage - (stage > slow)] for stage in range(4))
        costs = PointCosts(book, space).of(Point(shape=shape, family=LINEAR, chunks=1, order=order))
        for inner in combinations(range(1, num_layers + 2), 3):
            counts = tuple(stop - start for start, stop in pairwise((0, *inner, num_layers + 2)))
            cut = CutModel(costs=costs, counts=counts, placement=a_line(4), num_microbatches=microbatches, split=False)
            if max(cut.stage_work_ms) < min(found, default=float("inf")):
                found.append(step_1f1b_ms(cut))
    same = make_plan(book, replace(space, schedules=("1f1b",), chunks=(1,)))
    assert same.ranking[0].forecast.step_ms <= 1.03 * min(found)
    plan = make_plan(book, space)
    assert plan.ranking[0].forecast.step_ms <= 1.03 * min(found)
    assert plan.even is not None
    assert plan.even.forecast.step_ms >= 1.25 * plan.ranking[0].forecast.step_ms
    best = plan.ranking[0].choice
    assert sorted(best.devices) == [(0,), (1,), (2,), (3,)]
    at = best.devices.index((2,))
    assert best.cut.costs.stages[at].speed == 0.5


def a_line(num_stages: int) -> Any:
    return Point(shape=PlanShape(num_stages=num_stages, num_microbatches=1), family=LINEAR, chunks=1).placement


def two_islands(p: int, rng: np.random.Generator) -> MachineCosts:
    """Quick links inside of two islands and slow ones between them, the devices of both mixed."""
    island = rng.permutation(np.arange(p) % 2 if rng.random() < 0.5 else rng.integers(0, 2, p))
    inside = island[:, None] == island[None, :]
    latency_ms = np.where(inside, rng.uniform(0.01, 0.2, (p, p)), rng.uniform(1, 6, (p, p)))
    gb_per_s = np.where(inside, rng.uniform(100, 300, (p, p)), rng.uniform(1, 5, (p, p)))
    speeds = [1.0] * p if rng.random() < 0.5 else rng.choice([0.5, 0.75, 1.0, 1.25], p).tolist()
    return of_speeds(
        *speeds, latency_ms=tuple(map(tuple, latency_ms.tolist())), gb_per_s=tuple(map(tuple, gb_per_s.tolist()))
    )


def check_islands(p: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    book = a_book(int(rng.integers(p, 3 * p)), two_islands(p, rng))
    space = a_space(p, int(rng.integers(p, 2 * p)))
    costs, (shape,) = PointCosts(book, space), shapes_of(book, space)
    walk = walk_of(build_schedule("1f1b", ScheduleRequest(num_stages=p, num_microbatches=shape.num_microbatches)))
    all_ms = [costs._step_ms(shape, order, walk, 0) for order in permutations(range(p))]
    assert costs._step_ms(shape, costs.orders(shape)[0], walk, 0) <= 1.05 * min(all_ms)


@pytest.mark.parametrize("seed", range(3))
def test_two_islands_are_passed_one_after_the_other(seed: int) -> None:
    check_islands(5, seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("p", [6, 7])
@pytest.mark.parametrize("seed", range(6))
def test_orders_of_more_devices_equal_looking_at_all(p: int, seed: int) -> None:
    check_islands(p, 100 * p + seed)


def test_many_devices_take_no_long_search() -> None:
    far = tuple(tuple(0.01 if a % 4 == b % 4 else 3.0 for b in range(32)) for a in range(32))
    book, space = a_book(62, of_speeds(*[1.0] * 32, latency_ms=far)), a_space(32, 64)
    (order, given) = PointCosts(book, space).orders(shapes_of(book, space)[0])
    assert given == tuple(range(32))
    assert sum(a % 4 != b % 4 for a, b in pairwise(order)) == 3  # four islands


@pytest.mark.parametrize("seed", [0, 11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 11))])
@pytest.mark.one_in(2)
def test_no_bound_is_above_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = int(rng.integers(2, 5))
    book, space = (
        a_book(int(rng.integers(2 * p, 5 * p)), two_islands(2 * p, rng)),
        a_space(p, p, devices=2 * p, data=(2,)),
    )
    plan = make_plan(book, space)
    points = [point for shape in shapes_of(book, space) for point in points_of(shape, book, space)]
    costs = PointCosts(book, space)
    bounds_ms = [
        quick_bound_ms(replace(point, order=order), costs.of(replace(point, order=order)), split=split)
        for point in points
        for order in costs.orders(point.shape)
        for split in (False, True)
    ]
    for ranked in plan.ranking:
        assert min(bounds_ms) <= ranked.forecast.nominal_ms
        assert step_bound_ms(ranked.choice.cut) <= ranked.forecast.nominal_ms * (1 + 1e-9)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("speeds", [(0.1, 1.4, 0.5, 0.6), (0.5, 0.3, 1.1, 1.0), (1.0, 1.0, 1.0, 1.0)])
def test_a_slow_first_stage_with_few_microbatches_is_bounded_too(speeds: tuple[float, ...], microbatches: int) -> None:
    book, space = a_book(5, of_speeds(*speeds), task_ms=0.3), a_space(4, microbatches)
    (shape,) = shapes_of(book, space)
    point = Point(shape=shape, family=LINEAR, chunks=1, order=(0, 1, 2, 3))
    costs, steps_ms = PointCosts(book, space).of(point), list[float]()
    for inner in combinations(range(1, 7), 3):
        counts = tuple(stop - start for start, stop in pairwise((0, *inner, 7)))
        cut = CutModel(costs=costs, counts=counts, placement=a_line(4), num_microbatches=microbatches, split=False)
        steps_ms.append(step_1f1b_ms(cut))
    assert quick_bound_ms(point, costs, split=False) <= min(steps_ms)


@pytest.mark.slow
def test_each_stage_keeps_to_the_memory_of_its_device() -> None:
    sizes = (9_000, 60_000, 30_000, None)
    machine = MachineCosts(devices=tuple(DeviceCosts(bytes=size) for size in sizes))
    types = {name: replace(each, output_bytes=10) for name, each in TYPES.items()}
    book = replace(a_book(24, machine), entries=(CostEntry(types=types),))
    plan = make_plan(book, a_space(4, 8))
    assert plan.ranking
    for ranked in plan.ranking:
        for stage, numbers in zip(ranked.choice.memory, ranked.choice.devices, strict=True):
            limit = sizes[numbers[0]]
            assert limit is None or stage.peak <= limit
    smaller = make_plan(book, a_space(4, 8, memory_bytes=25_000))
    assert all(stage.peak <= 25_000 for stage in smaller.ranking[0].choice.memory)


def test_replicas_and_devices_that_share_a_layer_are_groups() -> None:
    book, space = a_book(8, of_speeds(1.0, 0.5, 1.0, 0.5)), a_space(2, 4, devices=4, data=(2,))
    plan = make_plan(book, space)
    assert sorted(map(sorted, plan.ranking[0].choice.devices)) == [[0, 2], [1, 3]]  # quick ones with quick ones
    far = tuple(tuple(0.0 if a % 2 == b % 2 else 5.0 for b in range(4)) for a in range(4))
    joined = make_plan(replace(book, machine=of_speeds(*[1.0] * 4, latency_ms=far)), space)
    assert sorted(map(sorted, joined.ranking[0].choice.devices)) == [[0, 2], [1, 3]]  # each on an island
    entries = (CostEntry(types=TYPES, tensor=2),)
    plan = make_plan(replace(book, entries=entries), replace(space, data=(1,)))
    assert sorted(plan.ranking[0].choice.devices) == [(0, 1), (2, 3)]


def test_what_does_not_fit_names_the_device() -> None:
    machine = MachineCosts(devices=(DeviceCosts(), DeviceCosts(bytes=1000, name="b:1")))
    message = r"device 1 \(b:1\) has 1000 B, and one layer needs 1.084 KiB at least: leave it out"
    with pytest.raises(ValueError, match=message):
        make_plan(a_book(4, machine), a_space(2, 4))
    with pytest.raises(ValueError, match="the machine has 2 devices, and 4 are asked for: give --devices 2"):
        make_plan(a_book(4, machine), a_space(4, 4))
    machine = MachineCosts(devices=(DeviceCosts(bytes=3000), DeviceCosts(bytes=2000)))
    (refused,) = make_plan(a_book(8, machine), a_space(2, 4)).refused
    assert re.match(r"stage \d \(device \d\) needs .* MiB of .* KiB with one microbatch in flight", refused.reason)


def test_the_command_reads_the_machine_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_costs(a_book(8, None), "costs.json")
    write_machine(SLOW_THIRD, "machine.json")
    given = ["--costs", "costs.json", "--stages", "4", "--microbatches", "8", "--chunks-per-stage", "1"]
    assert main([*given, "--machine", "machine.json", "--json"]) == 0
    apart = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(apart["ranking"][0]["devices_of_stage"]) == [[0], [1], [2], [3]]
    write_machine(SLOW_THIRD, "costs.json")
    assert main([*given, "--json"]) == 0
    together = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert together["ranking"] == apart["ranking"]
    assert main([*given, "--devices", "4"]) == 0
    assert "devices" in capsys.readouterr().out
