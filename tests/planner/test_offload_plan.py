"""Plans whose stages move activations to the host where memory is short."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import plan_run
from rrfp_jax.costs import CostBook, CostEntry, DeviceCosts, LayerCosts, LinkCosts, MachineCosts, Noise
from rrfp_jax.planner.configured import configured_plan
from rrfp_jax.planner.cost_file import write_costs
from rrfp_jax.planner.plan import main
from rrfp_jax.planner.records import Plan
from rrfp_jax.planner.report import order_in_words
from rrfp_jax.planner.search import make_plan, with_optimum
from rrfp_jax.planner.search_space import SearchSpace
from rrfp_jax.schedules import read_csv
from rrfp_jax.schedules.operations import copy_ops
from tests.commands.running import run_command

needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'optimum' is missing")
SIZE = 10**8
LAYER = LayerCosts(forward_ms=10.0, input_gradient_ms=10.0, weight_gradient_ms=10.0, stash_bytes=SIZE, fixed_bytes=SIZE)
SPACE = SearchSpace(devices=4, stages=(4,), data=(1,), microbatches=(8,), chunks=(1,))


def book_of(slots: float, copy_ms: float | None, **changes: Any) -> CostBook:
    """Four equal layers on devices with room for so many activations of one."""
    return CostBook(
        **{
            "layers": ("layer",) * 4,
            "entries": (CostEntry(types={"layer": LAYER}),),
            "links": LinkCosts(host_gb_per_s=None if copy_ms is None else SIZE / copy_ms / 1e6),
            "device_bytes": SIZE + int(slots * SIZE),
            **changes,
        }
    )


def moved(plan: Plan) -> tuple[int, ...]:
    return plan.ranking[0].choice.moved_of_stage


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copy_ms", [5.0, 10.0, 15.0])
@pytest.mark.parametrize(("slots", "without_ms", "best_ms"), [(2, 410, 290), (3, 310, 280), (4, 270, 270)])
def test_stages_short_of_memory_copy(slots: int, copy_ms: float, without_ms: float, best_ms: float) -> None:
    without = make_plan(book_of(slots, None), SPACE)
    assert (without.ranking[0].forecast.step_ms, any(moved(without))) == (without_ms, False)
    plan = make_plan(book_of(slots, copy_ms), SPACE)
    best = plan.ranking[0]
    assert best.forecast.step_ms <= 1.05 * best_ms
    assert best.choice.fits(plan.ranking[0].choice.cut.limits(book_of(slots, copy_ms).device_bytes)[0])
    assert any(moved(plan)) == (slots < 4)
    assert moved(plan)[3] == 0, "the last stage runs backwards at once"
    if slots < 4:
        assert "offload on 0" in order_in_words(best.choice)
        assert plan.alternatives[0].why.startswith("no copies to the host")
        assert "longer" in plan.alternatives[0].why


@pytest.mark.one_in(5)
@needs_solver
@pytest.mark.parametrize("copy_ms", [5.0, 10.0, 15.0])
@pytest.mark.parametrize(("slots", "best_ms"), [(2, 290), (3, 280), (4, 270)])
@pytest.mark.slow
def test_the_solver_orders_copies_too(slots: int, copy_ms: float, best_ms: float) -> None:
    book = book_of(slots, copy_ms)
    plan = with_optimum(make_plan(book, SPACE), book, SPACE, 120)
    assert plan.ranking[0].forecast.step_ms == best_ms
    assert f"takes {best_ms} ms from the first task to the last, proven to be the least" in plan.notes[-1]
    assert ("with copies to the host" in plan.notes[-1]) == any(moved(plan)) == (slots < 4)


@pytest.mark.slow
@needs_solver
@pytest.mark.parametrize("seconds", [1e-3, pytest.param(4.0, marks=pytest.mark.slow)])
def test_the_solver_is_never_worse_than_its_start(seconds: float) -> None:
    types = {"layer": LAYER, "end": replace(LAYER, forward_ms=7.0, stash_bytes=SIZE // 2)}
    book = book_of(2.5, 12.0, layers=("end", *("layer",) * 4, "end"), entries=(CostEntry(types=types),))
    space = replace(SPACE, microbatches=(16,))
    start = make_plan(book, space)
    plan = with_optimum(start, book, space, seconds)
    assert any(moved(start))
    assert plan.ranking[0].forecast.step_ms <= start.ranking[0].forecast.step_ms
    assert "takes less than" in plan.notes[-1] or "proven" in plan.notes[-1]


def test_copies_beat_recomputation_and_fewer_in_flight() -> None:
    """Where the host is near; where it is far, stages recompute as before."""
    full = replace(LAYER, input_gradient_ms=20.0, stash_bytes=SIZE // 10)
    entries = (CostEntry(types={"layer": LAYER}), CostEntry(types={"layer": full}, remat="full"))
    without = make_plan(book_of(2, None, entries=entries), SPACE)
    near, far = (make_plan(book_of(2, copy_ms, entries=entries), SPACE) for copy_ms in (10.0, 1000.0))
    assert any(remat == "full" for remat in without.ranking[0].choice.remats)
    assert near.ranking[0].forecast.step_ms < 0.95 * without.ranking[0].forecast.step_ms
    assert set(near.ranking[0].choice.remats) == {"none"}
    assert any(moved(near))
    assert far.ranking[0].forecast.step_ms == without.ranking[0].forecast.step_ms


@pytest.mark.slow
def test_devices_that_are_not_alike_copy_where_they_must_and_can() -> None:
    def plan_of(*devices: DeviceCosts) -> Plan:
        return make_plan(book_of(5, None, machine=MachineCosts(devices=devices)), replace(SPACE, schedules=None))

    short, wide = DeviceCosts(bytes=3 * SIZE), DeviceCosts(bytes=9 * SIZE)
    only = replace(short, host_gb_per_s=20.0)
    plan = plan_of(only, wide, only, wide)
    devices = plan.ranking[0].choice.devices
    assert any(moved(plan))
    assert all(devices[stage] in ((0,), (2,)) for stage, number in enumerate(moved(plan)) if number)
    assert not any(moved(plan_of(short, wide, short, wide)))
    assert plan.ranking[0].forecast.step_ms < plan_of(short, wide, short, wide).ranking[0].forecast.step_ms


@pytest.mark.slow
def test_noise_several_chunks_and_replicas() -> None:
    book = book_of(2.2, 8.0, layers=("layer",) * 8, noise=Noise.alike(0.2), device_bytes=2 * SIZE + int(4.4 * SIZE))
    space = SearchSpace(devices=8, stages=(4,), data=(2,), microbatches=(8,), chunks=(1, 2))
    plan = make_plan(book, space)
    without = make_plan(replace(book, links=LinkCosts()), space)
    assert any(moved(plan))
    assert plan.ranking[0].forecast.step_ms < without.ranking[0].forecast.step_ms
    assert plan.ranking[0].forecast.error_ms > 0
    assert make_plan(book, space).ranking[0].forecast == plan.ranking[0].forecast, "the same seed, the same answer"


def test_less_than_one_activation_names_the_least_that_works() -> None:
    plan = make_plan(book_of(0.5, 10.0), SPACE)
    assert not plan.ranking
    assert "needs 190.7 MiB of 143.1 MiB with one microbatch in flight" in plan.refused[0].reason
    assert "per device" in plan.refused[0].change


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostBook:
    """Costs of ``cpu/debug`` by which its first stages copy, in ``costs.json``."""
    monkeypatch.chdir(tmp_path)
    end = replace(LAYER, forward_ms=0.1, input_gradient_ms=0.1, weight_gradient_ms=0.1, stash_bytes=SIZE // 1000)
    types = {"embedding": end, "layer": replace(LAYER, output_bytes=SIZE // 1000), "head": end}
    book = book_of(
        3.3,
        10.0,
        layers=("embedding", *("layer",) * 4, "head"),
        entries=(CostEntry(types=types, microbatch_size=4),),
    )
    write_costs(book, "costs.json")
    return book


ASKED = (
    "--config",
    "cpu/debug",
    "--costs",
    "costs.json",
    "--stages",
    "4",
    "--replicas",
    "1",
    "--chunks-per-stage",
    "1",
)


@pytest.mark.parametrize("consume", ["strict", "ready,strict"])
def test_a_plan_with_copies_is_read_as_planned(
    costs: CostBook, consume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, "--consume", consume, "--jitter", "none", "--write", "best.yaml", "--json"]) == 0
    best = json.loads(capsys.readouterr().out.splitlines()[-1])["ranking"][0]
    assert best["moved_of_stage"][0] > 0 == best["moved_of_stage"][3]
    config = load_train_config("best.yaml", {})
    order = plan_run(config, tmp_path / "run").ordered.order
    assert sorted(op.letter for op in order.graph.ops) == ["L", "O"]
    again = configured_plan(config, costs).ranking[0]
    assert again.forecast.step_ms == pytest.approx(best["step_ms"])
    assert (again.choice.peak_bytes, [*again.choice.moved_of_stage]) == (best["peak_bytes"], best["moved_of_stage"])
    with pytest.raises(ValueError, match="costs no host_gb_per_s of links: add it"):
        configured_plan(config, replace(costs, links=LinkCosts()))


@pytest.mark.slow
def test_a_plan_with_copies_trains_with_the_same_bits(costs: CostBook) -> None:
    folder = Path.cwd()
    assert main([*ASKED, "--write", str(folder / "best.yaml")]) == 0
    table = read_csv("best.order.csv", ops=copy_ops(1.0))
    rows = [[task for task in row if task.kind not in ("O", "L")] for row in table.orders]
    Path("plain.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    config = load_train_config("best.yaml", {})
    plain = replace(config, pipeline=replace(config.pipeline, schedule=str(folder / "plain.csv")))
    Path("plain.yaml").write_text(plain.as_yaml())
    seen = []
    for name in ("best", "plain"):
        asked = ("--steps", 3, "--deterministic", "true", "--run-dir", folder / name)
        result = run_command("train", "--config", folder / f"{name}.yaml", *asked)
        assert result.returncode == 0, result.stderr
        lines = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
        seen.append([(line["loss"], line["grad_norm"], line["peak_host_bytes"]) for line in lines])
    assert [each[:2] for each in seen[0]] == [each[:2] for each in seen[1]]
    assert [[number > 0 for number in each[2]] for each in (seen[0][2], seen[1][2])] == [
        [True, True, False, False],
        [False] * 4,
    ]
