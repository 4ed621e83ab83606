"""Plans whose stages have different numbers of replicas on devices that differ."""

import json
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.commands.training.assembly import chunks_of, make_pipeline
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.core import Ordering
from rrfp_jax.costs import CostBook, CostEntry, CutModel, DeviceCosts, LinkCosts, MachineCosts, Noise
from rrfp_jax.costs.layer_costs import StageCosts
from rrfp_jax.layout import Layout
from rrfp_jax.planner.cost_file import write_costs, write_machine
from rrfp_jax.planner.judging import Judge, step_bound_ms
from rrfp_jax.planner.plan import main
from rrfp_jax.planner.records import LINEAR, PlanChoice, Point
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import PointCosts, SearchSpace, shapes_of
from rrfp_jax.planner.writing import write_choice
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import linear
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer
from tests.plain_loop import assert_same_training, train_plainly
from tests.planner.plans import choice_of, ranked_of
from tests.planner.test_unlike_devices import TYPES, a_book, of_speeds, two_islands
from tests.test_pipeline_layouts import train


def a_case(devices: int, seed: int) -> tuple[CostBook, SearchSpace]:
    """A small model on devices of random speeds, or on two islands of devices."""
    rng = np.random.default_rng(1000 * devices + seed)
    speeds = rng.choice([0.4, 0.5, 0.75, 1.0, 1.3], devices).tolist()
    machine = two_islands(devices, rng) if seed % 2 else of_speeds(*speeds)
    book = a_book(int(rng.integers(2, 6 if devices < 5 else 4)), machine)
    return book, SearchSpace(devices=devices, batch_size=int(rng.choice([6, 8, 12])), unequal=True)


def hinted(point: Point, costs: Any, counts: tuple[int, ...], *, split: bool) -> PlanChoice:
    """A choice with as large a window as there can be."""
    shape = point.shape
    cut = CutModel(
        costs=costs,
        counts=counts,
        placement=linear(shape.num_stages),
        num_microbatches=shape.num_microbatches,
        split=split,
        replicas=shape.replicas,
    )
    window, backward = shape.num_microbatches * shape.data, "split" if split else "fused"
    ordering = Ordering(hint="bfw" if split else "bf", window=window, backward=backward)
    return PlanChoice(shape=shape, cut=cut, is_even=False, ordering=ordering, order_name="any")


def least_ms(book: CostBook, space: SearchSpace) -> float:
    """Milliseconds per sample of the best of all ways to deal out devices, and of all cuts."""
    judge, places, best = Judge(Noise(), 1, 0), PointCosts(book, space), float("inf")
    for shape in (shape for shape in shapes_of(book, space) if shape.replicas):
        for order in permutations(range(space.devices)):
            point = Point(shape=shape, family=LINEAR, chunks=1, order=order)
            costs = places.of(point)
            for inner in combinations(range(1, len(book.layers)), shape.num_stages - 1):
                counts = tuple(stop - start for start, stop in pairwise((0, *inner, len(book.layers))))
                for one in (hinted(point, costs, counts, split=split) for split in (False, True)):
                    if step_bound_ms(one.cut) < best * shape.batch_size:
                        assert step_bound_ms(one.cut) <= judge.nominal_ms(one) * (1 + 1e-9)
                        best = min(best, judge.nominal_ms(one) / shape.batch_size)
    return best


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("devices", "seed"),
    [
        *((3, seed) for seed in (0, 2, 3)),
        (4, 4),
        pytest.param(3, 1, marks=pytest.mark.slow),
        *(pytest.param(4, seed, marks=pytest.mark.slow) for seed in (*range(4), 13)),
        *(pytest.param(5, seed, marks=pytest.mark.slow) for seed in range(6)),
    ],
)
@pytest.mark.one_in(2)
def test_devices_and_replicas_of_stages_are_as_looking_at_all_finds(devices: int, seed: int) -> None:
    book, space = a_case(devices, seed)
    best = make_plan(book, space).ranking[0]
    step_ms = best.forecast.step_ms / best.choice.shape.batch_size
    assert step_ms <= 1.05 * least_ms(book, space)
    assert best.forecast.bound_ms <= best.forecast.nominal_ms * (1 + 1e-9)
    alike = make_plan(book, replace(space, unequal=False)).ranking
    assert all(step_ms <= one.forecast.step_ms / one.choice.shape.batch_size for one in alike)


def test_slow_devices_are_replicas_of_one_stage() -> None:
    book, space = a_book(4, of_speeds(0.5, 1.0, 0.5)), SearchSpace(devices=3, batch_size=8, unequal=True)
    best = make_plan(book, replace(space, stages=(2,))).ranking[0].choice
    assert sorted(map(sorted, best.devices)) == [[0, 2], [1]]
    assert sorted(zip(best.shape.replicas, (stage.speed for stage in best.cut.costs.stages), strict=True)) == [
        (1, 1.0),
        (2, 0.5),
    ]


def test_each_replica_computes_at_its_own_speed_and_pairs_have_their_own_links() -> None:
    space, judge = SearchSpace(devices=3, batch_size=8, unequal=True), Judge(Noise(), 1, 0)

    def step_ms(machine: MachineCosts) -> float:
        book = a_book(2, machine)
        (shape,) = [shape for shape in shapes_of(book, space) if shape.replicas == (1, 2)]
        point = Point(shape=shape, family=LINEAR, chunks=1, order=(0, 1, 2))
        one = hinted(point, PointCosts(book, space).of(point), (2, 2), split=False)
        assert one.cut.costs.stages[1].speed == min(device.speed for device in machine.devices[1:])
        return judge.nominal_ms(one)

    alike, one_slow, both_slow = (step_ms(of_speeds(1.0, *speeds)) for speeds in ((1, 1), (1, 0.3), (0.3, 0.3)))
    assert alike < one_slow < both_slow
    near = [[0.1] * 3 for _ in range(3)]
    links = [near, *([[*row] for row in near] for _ in range(2))]
    links[1][0][2] = links[1][2][0] = 9.0  # to one replica
    links[2][0][1:] = [9.0, 9.0]
    links[2][1][0] = links[2][2][0] = 9.0
    steps = [step_ms(of_speeds(1, 1, 1, latency_ms=tuple(map(tuple, each)))) for each in links]
    assert steps[0] < steps[1] < steps[2]
    apart = [[*row] for row in near]
    apart[1][2] = apart[2][1] = 9.0  # sums of gradients alone
    assert steps[0] + 8.9 < step_ms(of_speeds(1, 1, 1, latency_ms=tuple(map(tuple, apart)))) <= steps[0] + 2 * 8.9


def test_stages_keep_to_the_memory_of_their_smallest_device() -> None:
    sizes = (4_000, 3_000, None, 5_000)
    machine = MachineCosts(devices=tuple(DeviceCosts(bytes=size) for size in sizes))
    types = {name: replace(each, output_bytes=10) for name, each in TYPES.items()}
    book = replace(a_book(4, machine), entries=(CostEntry(types=types),))
    space = SearchSpace(devices=4, batch_size=8, stages=(3,), unequal=True)
    plan = make_plan(book, space)
    assert plan.ranking[0].choice.shape.replicas
    for ranked in plan.ranking:
        for stage, numbers in zip(ranked.choice.memory, ranked.choice.devices, strict=True):
            assert all(size is None or stage.peak <= size for size in (sizes[number] for number in numbers))


def test_machines_that_do_not_fit_are_refused() -> None:
    space = SearchSpace(devices=4, batch_size=8, unequal=True)
    with pytest.raises(ValueError, match="the machine has 3 devices, and 4 are asked for: give --devices 3"):
        make_plan(a_book(4, of_speeds(1, 1, 0.5)), space)
    small = MachineCosts(devices=(*(DeviceCosts(),) * 3, DeviceCosts(bytes=10)))
    with pytest.raises(ValueError, match="device 3 has 10 B, and one layer needs"):
        make_plan(a_book(4, small), space)


@pytest.mark.slow
def test_many_devices_take_no_long_search() -> None:
    rng = np.random.default_rng(0)
    book = a_book(14, two_islands(12, rng))
    plan = make_plan(book, SearchSpace(devices=12, batch_size=24, stages=(5,), unequal=True))
    best = plan.ranking[0].choice
    assert sorted(sum(best.devices, ())) == list(range(12))
    assert sum(best.shape.replicas) == 12


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [(), (2, 1)])
def test_devices_are_written_in_the_order_in_which_units_take_them(
    replicas: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_train_config("cpu/debug", {"pipeline.reduce": "messages"})
    devices = ((3, 0), (1, 2)) if not replicas else ((2, 0), (1,))
    choice = choice_of(3, 3, ordering=Ordering(hint="bf", window=4), order_name="bf", data=2, replicas=replicas)
    types, links = choice.cut.costs.types, (LinkCosts(),) * 2
    stages = tuple(StageCosts(types=types, links=links, devices=numbers) for numbers in devices)
    choice = replace(choice, cut=replace(choice.cut, costs=replace(choice.cut.costs, stages=stages)))
    write_choice(config, ranked_of(choice, 200.0), Path("best.yaml"))
    found = load_train_config("best.yaml", {})
    layout = Layout(
        num_stages=2, data=2, replicas=replicas, by_replica=found.pipeline.reduce == "messages", order=found.run.devices
    )
    taken = [sum((layout.devices_of(unit) for unit in layout.units_of_stage(stage)), ()) for stage in range(2)]
    assert taken == [*devices]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_command_writes_a_plan_that_trains_what_the_plain_loop_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {
        "model.num_layers": 2,
        "model.hidden": 32,
        "data.length": 16,
        "data.batch_size": 8,
        "pipeline.num_stages": 2,
    }
    Path("config.yaml").write_text(load_train_config("cpu/debug", small).as_yaml())
    write_costs(a_book(2, None), "costs.json")
    write_machine(of_speeds(0.5, 1.2, 0.5), "machine.json")
    given = ["--config", "config.yaml", "--costs", "costs.json", "--machine", "machine.json", "--stages", "2"]
    assert main([*given, "--replicas", "unequal", "--json", "--write", "best.yaml"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["ranking"][0]
    config = load_train_config("best.yaml", {})
    assert config.pipeline.replicas == tuple(best["replicas"]) != ()
    assert config.pipeline.reduce == "messages"
    assert sorted(config.run.devices) == [0, 1, 2]
    planned = plan_run(config, tmp_path / "run")
    chunks = chunks_of(config, planned.ordered)
    layout = Layout(num_stages=2, data=2, replicas=config.pipeline.replicas, by_replica=True, order=config.run.devices)
    dealt = [layout.devices_of(unit) for unit in range(layout.num_units) if unit not in layout.absent]
    assert {*map(frozenset, best["devices_of_stage"])} == {
        frozenset(sum((layout.devices_of(unit) for unit in layout.units_of_stage(stage)), ())) for stage in range(2)
    }
    assert len(dealt) == 3

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (3, config.data.num_microbatches, config.data.microbatch_size, 17)).astype(np.int32)
    batches = [
        {"tokens": each[..., :-1], "targets": each[..., 1:], "weights": np.ones(each[..., 1:].shape, np.float32)}
        for each in tokens
    ]
    pipeline = make_pipeline(config, chunks, Process(layout), planned.ordered)
    losses, params = train(pipeline, batches)
    again = make_pipeline(config, chunks, Process(layout), planned.ordered)
    initial = jax.tree.map(np.array, again.params(again.init(jax.random.key(1))))
    optimizer = make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps))
    expected = train_plainly(chunks, initial, optimizer, batches, clip_norm=config.optimizer.clip_norm)
    assert_same_training(losses, params, *expected)
