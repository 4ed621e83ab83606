"""A choice written as a configuration: ``train`` reads the same cut and the same order from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.planned import order_of, ordering_of, plan_run
from rrfp_jax.core import Ordering
from rrfp_jax.costs import LinkCosts
from rrfp_jax.costs.layer_costs import StageCosts
from rrfp_jax.planner.records import PlanChoice
from rrfp_jax.planner.writing import check_writable, write_choice
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.training.run_config import PipelineConfig
from tests.planner.plans import choice_of, ranked_of, table_of

TEN = {"model.num_layers": 10, "run.platform": "cpu"}
V = table_of("zb-v", 2, 8)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainConfig:
    monkeypatch.chdir(tmp_path)
    return load_train_config("cpu/debug", TEN)


def searched() -> ScheduleTable:
    """1F1B of four stages, but that the last stage runs its first backward later."""
    table = table_of("1f1b", 4, 8)
    *others, last = table.orders
    moved = [last[0], last[2], last[1], *last[3:]]
    return ScheduleTable.from_orders("searched", table.placement, table.graph, [*others, moved]).validate()


CHOICES = {
    "a name, strict": choice_of(3, 3, 3, 3, ordering=Ordering(schedule=table_of("1f1b", 4, 8), consume="strict")),
    "a name, ready, a cut that is not even": choice_of(4, 3, 3, 2, ordering=Ordering(schedule=table_of("1f1b", 4, 8))),
    "readiness alone": choice_of(
        *(4, 3, 3, 2), ordering=Ordering(schedule=table_of("zb-h1", 4, 8), foresight=False), order_name="zb-h1"
    ),
    "searched": choice_of(
        *(4, 3, 3, 2),
        ordering=Ordering(schedule=searched(), consume="strict"),
        order_name="searched",
        is_searched=True,
    ),
    "a name for other durations": choice_of(3, 3, 3, 3, ordering=Ordering(schedule=searched()), order_name="zb-auto"),
    "ends alone": choice_of(1, 5, 5, 1, ordering=Ordering(hint="bf", window=(4, 3, 2, 1)), order_name="bf"),
    "a hint": choice_of(3, 3, 3, 3, ordering=Ordering(hint="bf", window=(4, 4, 4, 4)), order_name="bf"),
    "several chunks": choice_of(
        *(2, 3, 4, 3),
        ordering=Ordering(schedule=table_of("interleaved-1f1b", 2, 8)),
        order_name="interleaved-1f1b",
        num_stages=2,
    ),
    "a hint on looped chunks": choice_of(
        *(2, 3, 4, 3), ordering=Ordering(hint="bf-deep", window=4), order_name="bf-deep", num_stages=2
    ),
    "a V": choice_of(2, 3, 4, 3, ordering=Ordering(schedule=V, consume="strict"), order_name="zb-v", num_stages=2),
    "inside layers": choice_of(
        *(4, 4, 3, 3),
        ordering=Ordering(schedule=table_of("1f1b", 4, 8), consume="strict"),
        cut_layers=(3, 6),
    ),
    "replicas": choice_of(
        *(4, 3, 3, 2),
        ordering=Ordering(schedule=table_of("1f1b", 4, 8)),
        data=2,
        tensor=2,
        microbatch_size=4,
        remat="dots",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_train_reads_the_same_cut_and_order(name: str, config: TrainConfig, tmp_path: Path) -> None:
    choice = CHOICES[name]
    written = write_choice(config, ranked_of(choice, 200.0), Path("best.yaml"))
    found = load_train_config("best.yaml", {})
    layout, shape = found.pipeline, choice.shape
    assert (layout.num_stages, layout.replicas, layout.tensor) == (shape.num_stages, shape.data, shape.tensor)
    assert layout.remat == shape.remat
    assert found.data is not None
    assert (found.data.batch_size, found.data.num_microbatches) == (
        shape.batch_size,
        shape.num_microbatches * shape.data,
    )
    assert _counts(layout, choice) == choice.cut.layer_counts
    order = order_of(layout, ordering_of(layout), shape.num_microbatches)
    assert order.placement == choice.cut.placement
    if choice.ordering.schedule is not None:
        assert order.table is not None
        assert order.table.orders == choice.ordering.schedule.orders
    assert (written.table is not None) == (name in ("searched", "a name for other durations"))
    plan_run(found, tmp_path / "run")


def test_what_the_plan_decides_takes_the_place_of_what_the_configuration_said(config: TrainConfig) -> None:
    said = {"num_stages": 2, "mesh": {"tensor": 2}, "layout": "auto", "window": 3}
    asked = replace(config, pipeline=replace(config.pipeline, **said))
    write_choice(asked, ranked_of(CHOICES["a name, strict"], 200.0), Path("best.yaml"))
    found = load_train_config("best.yaml", {}).pipeline
    assert (found.num_stages, found.tensor, found.mesh) == (4, 1, None)
    assert (found.layout, found.window) == ("Et*2|t*3|t*3|t*2L", None)


def test_devices_and_rematerialisation_of_stages_are_written(config: TrainConfig, tmp_path: Path) -> None:
    choice = CHOICES["a name, strict"]
    ways, devices = ("full", "full", "none", "none"), ((2,), (0,), (3,), (1,))
    stages = tuple(
        StageCosts(types=choice.cut.costs.types, links=(LinkCosts(),) * 4, remat=remat, devices=numbers)
        for remat, numbers in zip(ways, devices, strict=True)
    )
    differing = replace(choice, cut=replace(choice.cut, costs=replace(choice.cut.costs, stages=stages)))
    write_choice(config, ranked_of(differing, 200.0), Path("best.yaml"))
    found = load_train_config("best.yaml", {})
    assert found.pipeline.chunk_remats(choice.cut.placement) == ways
    assert found.run.devices == (2, 0, 3, 1)
    plan_run(found, tmp_path / "run")


def test_replicas_of_each_stage_are_written(config: TrainConfig, tmp_path: Path) -> None:
    choice = choice_of(
        *(4, 3, 3, 2), ordering=Ordering(hint="bf", window=4), order_name="bf", data=2, replicas=(2, 1, 2, 1)
    )
    write_choice(config, ranked_of(choice, 200.0), Path("best.yaml"))
    found = load_train_config("best.yaml", {})
    assert (found.pipeline.replicas, found.pipeline.num_devices) == ((2, 1, 2, 1), choice.shape.num_devices)
    assert (found.data.batch_size, found.data.num_microbatches) == (16, 16)
    plan_run(found, tmp_path / "run")


def _counts(layout: PipelineConfig, choice: PlanChoice) -> tuple[int, ...]:
    """Layers of each chunk, ends included, as the section says."""
    chunks = choice.cut.placement.num_chunks
    counts = list(layout.cut.layers or [10 // chunks] * chunks)
    counts[layout.cut.embedding_chunk] += 1
    counts[layout.cut.head_chunk] += 1
    return tuple(counts)


def test_another_table_than_the_planned_one_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    write_choice(config, ranked_of(CHOICES["searched"], 200.0), Path("best.yaml"))
    table, text = Path("best.order.csv"), Path("best.yaml").read_text()
    assert "schedule: best.order.csv" in text
    rows = table.read_text().splitlines()
    assert rows[0].startswith("# hash of the rows: ")
    cells = rows[4].split(",")
    cells[1:3] = reversed(cells[1:3])
    table.write_text("\n".join([*rows[:4], ",".join(cells)]))
    with pytest.raises(ValueError, match=r"best\.order\.csv has rows with the hash .* bring back the table"):
        plan_run(load_train_config("best.yaml", {}), tmp_path / "run")
    table.write_text(table.read_text().partition("\n")[2])
    plan_run(load_train_config("best.yaml", {}), tmp_path / "run")


def test_what_the_file_says_of_itself(config: TrainConfig) -> None:
    write_choice(config, ranked_of(CHOICES["searched"], 200.0), Path("best.yaml"))
    head = Path("best.yaml").read_text().splitlines()[:2]
    assert head[0] == "# Written by rrfp plan for 4 devices: Et*3|t*3|t*3|tL, searched strict."
    assert head[1].startswith("# Forecast: 200.0 ms per step, and ")


def test_what_cannot_be_written_is_refused_before_the_search(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"let the name end in \.yaml"):
        check_writable(config, tmp_path / "best.json")
    with pytest.raises(ValueError, match="with an encoder"):
        check_writable(load_train_config("cpu/multimodal", {}), tmp_path / "best.yaml")
    other = replace(config, model=replace(config.model, num_layers=12))
    with pytest.raises(ValueError, match="10 layers between the ends, and the model of the configuration 12"):
        write_choice(other, ranked_of(CHOICES["searched"], 200.0), tmp_path / "best.yaml")
