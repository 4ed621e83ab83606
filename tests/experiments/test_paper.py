"""The evaluation: rows survive kills and are measured once; every question's report is made of its rows alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from experiments.paper import correctness, emulated, endtoend, fixed_orders, never_slower, plan, planned
from experiments.paper.__main__ import main
from experiments.paper.again import compared, measure_again
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.questions import QUESTIONS
from experiments.paper.repeats import TARGET, Rounds, widths
from experiments.paper.report import REPORT, write_report
from experiments.paper.rows import Cell, RowFile
from experiments.paper.run import measure_all, row_file
from experiments.paper.scene import EQUAL, Method, Scene, simulated
from experiments.paper.tables import geometric_mean, interval
from rrfp_jax.costs import CostBook, CostEntry
from rrfp_jax.planner.search_space import SearchSpace
from rrfp_jax.schedules import ScheduleRequest, build_schedule, schedule_names

MEASURED: list[Cell] = []
QUIET = Console(quiet=True)
REAL = ("real", "jitter_real")
LONG = ("breakdown", "correctness", "others", "plan", "small_models")
LARGE_MODELS = {one.model for one in endtoend.PUBLISHED} - {endtoend.GPT3, "qwen3-1.7b+vit-h"}


def _measure(cell: Cell) -> Measured:
    MEASURED.append(cell)
    return [{"method": name, "ms": int(cell["size"]) * factor} for name, factor in (("slow", 3), ("fast", 2))]


def _write(rows: Rows, folder: Path) -> str:
    return json.dumps([(row["size"], row["method"], row["ms"]) for row in rows])


def toy(*sizes: int) -> Question:
    return Question(
        name="toy",
        title="A toy",
        settings=("size",),
        figures=("method", "ms"),
        cells=lambda quick: [{"size": size} for size in sizes],
        measure=_measure,
        write=_write,
        is_timed=True,
    )


@pytest.fixture(autouse=True)
def measured() -> list[Cell]:
    MEASURED.clear()
    return MEASURED


def run(question: Question, folder: Path) -> str:
    measure_all([question], folder, QUIET, quick=True, command="the command")
    assert write_report([question], folder) == []
    return (folder / REPORT).read_text()


def test_a_run_goes_on_where_it_was_and_the_report_says_the_same(tmp_path: Path, measured: list[Cell]) -> None:
    run(toy(3, 1), tmp_path)
    text = run(toy(3, 1, 2), tmp_path)
    assert measured == [{"size": 3}, {"size": 1}, {"size": 2}]
    assert run(toy(3, 1, 2), tmp_path) == text
    assert '[["1", "slow", "3"], ["1", "fast", "2"], ["2",' in text, "whatever came first"
    assert "`the command`" in text


@pytest.mark.parametrize("cut", [1, 5, 40, 60])
def test_what_a_kill_has_cut_off_is_measured_again(tmp_path: Path, measured: list[Cell], cut: int) -> None:
    """In the middle of a line, or between two rows of a cell."""
    text = run(toy(1, 2), tmp_path)
    path = tmp_path / "results" / "toy.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    measured.clear()
    assert run(toy(1, 2), tmp_path) == text
    assert measured == [{"size": 2}]
    assert path.read_bytes() == whole


def test_rows_of_other_columns_are_refused(tmp_path: Path) -> None:
    run(toy(1), tmp_path)
    with pytest.raises(ValueError, match="move it away"):
        RowFile(tmp_path / "results" / "toy.csv", ("size", "more"), ("method", "ms"))


def test_a_question_without_rows_is_left_out_and_named(tmp_path: Path) -> None:
    run(toy(1), tmp_path)
    other = Question(**(vars(toy(1)) | {"name": "other"}))
    assert write_report([other, toy(1)], tmp_path) == ["other"]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [(["run", "laddder"], "there is no question 'laddder'"), (["report", "--full"], "report measures nothing")],
)
def test_bad_input_is_refused(arguments: list[str], refusal: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=refusal):
        main([*arguments, "--folder", str(tmp_path)])


@pytest.mark.parametrize("name", QUESTIONS)
def test_cells_have_names_of_their_own(name: str) -> None:
    for quick in (True, False):
        cells = QUESTIONS[name].cells(quick)
        assert len({tuple(cell[key] for key in QUESTIONS[name].settings) for cell in cells}) == len(cells) > 1


def test_quickly_a_sample_of_every_questions_settings_is_compared() -> None:
    everything, some = never_slower._settings(quick=True), never_slower._sampled(never_slower._settings(quick=True))
    named, sampled = (
        [tuple((key, cell[key]) for key in sorted(cell)) for cell in cells] for cells in (everything, some)
    )
    assert set(sampled) < set(named)
    assert len(sampled) < len(named) / 2
    assert {dict(cell)["question"] for cell in sampled} == {dict(cell)["question"] for cell in named}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in QUESTIONS])
def test_a_report_of_small_cells(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question, measured in small: rows have its columns, and text and pictures come of them."""
    for module in (emulated, correctness):
        monkeypatch.setattr(module, "use_devices", lambda num_stages: None)
    question = QUESTIONS[name]
    if (lack := question.lacks()) is not None:
        pytest.skip(lack)
    every = [cell for cell in question.cells(True) if cell.get("model") not in LARGE_MODELS]
    every = every[::5] if name == "never_slower" else every  # which are sampled from all other questions already
    cells = {tuple(small.items()): small for cell in every for small in [_small(name, cell)]}
    rows = row_file(question, tmp_path)
    for cell in cells.values():
        rows.add(cell, question.measure(cell), "python -m experiments.paper run")
    assert set(rows.rows[0]) == set(rows.columns)
    write_report([question], tmp_path)
    text = (tmp_path / REPORT).read_text()
    assert question.title in text
    assert "*Threats*" in text
    assert "nan" not in text
    pictures = list((tmp_path / "results").glob("*.png"))
    assert len(pictures) == text.count("![") == (name not in ("real", "breakdown", "correctness"))


def _small(name: str, cell: Cell) -> Mapping[str, str | int | float]:
    wanted: dict[str, str | int | float] = {"seed": 1, "seeds": 1}
    if name == "breakdown":
        wanted |= {"tensor": 1, "forward_ms": 1.0, "comm_ms": 0.5, "steps": 1}
    elif name == "correctness":
        wanted["steps"] = 2
    elif name in REAL:
        times = dict.fromkeys(("forward_ms", "input_ms", "weight_ms"), 1.0)
        wanted |= {"steps": 1, "stages": 2, "microbatches": 4, "comm_ms": 0.5, **times}
    elif name in ("endtoend", "encoders"):
        wanted |= {"stages": 8, "microbatches": 8} | ({"transfer": 1.0} if name == "encoders" else {})
    elif name == "devices":
        wanted |= {"stages": 4, "microbatches": 4, "replicas": 2}
    elif "steps" in cell:
        wanted |= {"steps": 1, "stages": 4, "microbatches": 64 if name == "windows" else 8}
    return {**cell, **{key: value for key, value in wanted.items() if key in cell}}


def test_methods_hold_what_they_may() -> None:
    scene = Scene(stages=4, microbatches=12, jitter="lognormal:0.5", steps=2)
    assert simulated(scene, Method({"hint": "bf"}, EQUAL)).above_1f1b <= 0
    assert simulated(scene, Method({"schedule": "1f1b-split"})).above_1f1b <= 0
    assert simulated(scene, Method({"hint": "bfw"}, 12)).above_1f1b > 0


def test_a_frozen_hint_is_its_own_order_where_nothing_varies() -> None:
    scene = Scene(stages=4, microbatches=8, steps=2)
    ready, strict = (simulated(scene, Method({"hint": "bf"}, 6, frozen=frozen)) for frozen in (None, "strict"))
    assert strict == ready
    noisy = Scene(stages=4, microbatches=8, jitter="lognormal:1", steps=2)
    assert simulated(noisy, Method({"hint": "bf"}, 6, frozen="strict")) != simulated(noisy, Method({"hint": "bf"}, 6))


def test_blocking_senders_and_tasks_that_last_until_arrival_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """How the real runtime emulates a blocking sender, in virtual time."""
    scene = Scene(stages=4, microbatches=8, jitter="lognormal:0.5", comm_ms=3.0, steps=2)
    method = Method({"schedule": "1f1b", "consume": "strict"}, communication="blocking")
    blocking_ms = simulated(scene, method).step_ms
    costs = Scene.costs
    monkeypatch.setattr(
        Scene,
        "costs",
        lambda self, order: type(costs(self, order))(
            durations_ms=emulated.until_arrived(costs(self, order).durations_ms, 3.0)
        ),
    )
    free = Scene(stages=4, microbatches=8, jitter="lognormal:0.5", comm_ms=0.0, steps=2)
    lasting_ms = simulated(free, Method({"schedule": "1f1b", "consume": "strict"})).step_ms
    assert lasting_ms == pytest.approx(blocking_ms, rel=1e-9)


@pytest.mark.parametrize("jitter", ["lognormal:0.2", "lognormal:0.5", "paper:J2", "paper:J3"])
def test_in_its_own_memory_foresight_is_not_slower_than_the_split_table_alone(jitter: str) -> None:
    scene = Scene(stages=4, microbatches=16, jitter=jitter, comm_ms=2.0, steps=8)
    strict, ours = (simulated(scene, Method({"schedule": "1f1b-split", "consume": c})) for c in ("strict", "ready"))
    assert ours.step_ms <= strict.step_ms / 0.995


def test_the_best_fixed_order_of_a_memory_fits_it_and_no_other_that_does_is_faster() -> None:
    scene = Scene(stages=4, microbatches=8, jitter="lognormal:0.5", comm_ms=2.0, steps=2)
    setting = fixed_orders.of_scene(scene, [1, 2])
    found = {memory: setting.best(memory) for memory in (EQUAL, 4, 8)}
    assert found[EQUAL].best == "1f1b-split"
    assert max(found[4].fixed.held) <= 4
    assert found[EQUAL].fixed.step_ms > found[4].fixed.step_ms > found[8].fixed.step_ms
    for one in found.values():
        assert all(ours <= most for ours, most in zip(one.ours.held, one.fixed.held, strict=True))
    strict = Method({"schedule": "zb-h1", "consume": "strict"})
    each = [simulated(Scene(**(scene.as_cell() | {"seed": seed})), strict).step_ms for seed in (1, 2)]
    assert found[4].fixed.step_ms <= sum(each) / 2


@pytest.mark.parametrize("slower", ["slow link", "slow stage", "lognormal:1"])
def test_what_a_plan_does_not_know_of_costs_time(slower: str) -> None:
    book = CostBook(layers=("layer",) * 8, entries=(CostEntry(types=planned.CASES["homogeneous"].costs.types),))
    space = SearchSpace(devices=4, stages=(4,), microbatches=(8,), chunks=(1,))
    one, *_ = planned.on_even_cuts(planned.CASES["homogeneous"], book, space)
    assert planned.step_ms(one, slower, 2, 1) > 1.05 * planned.step_ms(one, "none", 2, 1)
    assert planned.step_ms(one, slower, 2, 1) == planned.step_ms(one, slower, 2, 1)


@pytest.mark.slow
def test_what_a_plan_may_choose_grows_and_so_does_its_speed() -> None:
    cell: Cell = {"model": "Gemma-like", "stages": 2, "microbatches": 4, "sigma": 0.0, "steps": 1, "seeds": 1}
    rows = {str(row["method"]): row for row in plan.measure(cell) if row["jitter"] == "none"}
    assert list(rows) == list(planned.METHODS)
    times_ms = [float(rows[name]["step_ms"]) for name in planned.METHODS[:4]]
    assert times_ms == sorted(times_ms, reverse=True)
    assert times_ms[-1] < times_ms[0]
    assert float(rows["plan, strict"]["step_ms"]) >= float(rows["plan, strict"]["bound_ms"])
    assert all(float(rows[name]["held"]) <= float(rows[name]["memory"]) for name in planned.METHODS[1:])


def noisy_question(*, noise: float, most: int, seed: int = 0) -> Question:
    """Its rounds' ratios are 1.25 with so much log-normal noise."""
    rng = np.random.default_rng(seed)

    def measure(cell: Cell) -> Measured:
        MEASURED.append(cell)
        return [{"method": "fast", "ms": 1.25 * math.exp(noise * rng.standard_normal())}]

    rounds = Rounds(
        of=lambda quick, number: [{"size": number}],
        ratios=lambda rows: {"fast": [float(row["ms"]) for row in rows]},
        quick=(3, most),
    )
    return replace(toy(), cells=rounds.first, measure=measure, rounds=rounds)


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 3), (0.5, 6)])
def test_rounds_go_on_until_intervals_are_narrow_or_the_budget_is_spent(
    tmp_path: Path, measured: list[Cell], noise: float, rounds: int
) -> None:
    for _ in range(2):
        run(noisy_question(noise=noise, most=6), tmp_path)
        assert [cell["size"] for cell in measured] == [*range(1, rounds + 1)], "and no more in a second run"


def test_rounds_end_as_soon_as_the_interval_is_narrow_enough(tmp_path: Path, measured: list[Cell]) -> None:
    question = noisy_question(noise=0.03, most=200)
    run(question, tmp_path)
    assert 3 < len(measured) < 200
    rows = row_file(question, tmp_path).complete_rows()
    assert question.rounds is not None
    assert max(widths(question.rounds.ratios(rows)).values()) <= TARGET
    assert max(widths(question.rounds.ratios(rows[:-1])).values()) > TARGET


def test_a_second_run_agrees_within_the_intervals_or_is_said_not_to(tmp_path: Path) -> None:
    once = noisy_question(noise=0.02, most=10)
    run(once, tmp_path)
    other = noisy_question(noise=0.02, most=10, seed=1)
    assert measure_again([other], tmp_path, QUIET, quick=True, command="again")
    slower = replace(other, measure=lambda cell: [{"method": "fast", "ms": 1.0 + 1e-3 * int(cell["size"])}])
    assert not measure_again([slower], tmp_path, QUIET, quick=True, command="again")
    rows = row_file(once, tmp_path).complete_rows()
    assert compared(once, rows, [{**row, "ms": "1.0"} for row in rows])[1].startswith("0 of 1 ratios agree")


def test_what_is_simulated_comes_out_equal(tmp_path: Path) -> None:
    run(toy(1, 2), tmp_path)
    assert measure_again([toy(1, 2)], tmp_path, QUIET, quick=True, command="again")
    changed = replace(toy(1, 2), measure=lambda cell: [{"method": "slow", "ms": 3}])
    assert not measure_again([changed], tmp_path, QUIET, quick=True, command="again")
    with pytest.raises(ValueError, match="run it without --again first"):
        measure_again([toy(1)], tmp_path / "nowhere", QUIET, quick=True, command="again")


def test_means_of_ratios() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert interval([1.25]) == "1.250"
    assert interval([1.0, 1.0, 1.0]) == "1.000 ± 0.000 (least 1.000)"


def test_tables_that_keep_copies_of_parameters_are_no_candidates() -> None:
    request = ScheduleRequest(num_stages=4, num_microbatches=8)
    copies = {name for name in schedule_names() if fixed_orders._has_copies(build_schedule(name, request))}
    assert copies == {name for name in schedule_names() if "chimera" in name or name == "bitpipe"}
