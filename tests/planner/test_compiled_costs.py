"""Costs from compiled programs: what they hold is what the runtime forecasts."""

from dataclasses import replace
from typing import Any

import pytest

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.core import FUSED, SPLIT, Ordering
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.devices import device_of
from rrfp_jax.costs.fitting import ChunkParts
from rrfp_jax.costs.forecast import ChunkBytes, forecast_memory
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.layout import Layout
from rrfp_jax.models import language_model
from rrfp_jax.planner import compile_for
from rrfp_jax.planner.analytic_costs import analytic_book, microbatch_specs, model_layers
from rrfp_jax.planner.compile_for import compiled_book
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.runtime.model import HostedModel
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.stage_memory import chunk_bytes
from rrfp_jax.schedules import linear
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer

SETTING = StageSetting(3, 1, "none")
SMALL = {
    **{f"model.{name}": size for name, size in (("hidden", 48), ("num_heads", 6), ("num_kv_heads", 2))},
    **{f"model.{name}": size for name, size in (("mlp_dim", 112), ("num_layers", 5))},
    **{f"data.{name}": size for name, size in (("length", 40), ("batch_size", 12), ("num_microbatches", 4))},
}


def small(**more: Any) -> TrainConfig:
    return load_train_config("cpu/debug", SMALL | {f"model.{name}": value for name, value in more.items()})


# -- without compiling -----------------------------------------------------------------------------------------------


def made_up(**temporaries: int) -> list[ChunkParts]:
    """Chunks of one layer of each type."""
    return [
        ChunkParts(
            layer=name, count=1, fixed=9, gradient=8, stash=7, kept_inputs=0, owed=6, outputs=5, temporaries=temporaries
        )
        for name in dict.fromkeys(model_layers(small(), microbatch_size=3).layers)
    ]


def book_of(parts: list[ChunkParts], monkeypatch: pytest.MonkeyPatch, **more: Any) -> CostBook:
    monkeypatch.setattr(compile_for, "compile_chunks", lambda *_, **__: parts)
    return compiled_book(small(), [SETTING], device_of("h100"), **more)


def test_bytes_are_those_of_programs_and_times_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of("h100")
    costs = book_of(made_up(forward=4), monkeypatch).entries[0].types["layer"]
    assert (costs.fixed_bytes, costs.gradient_bytes, costs.stash_bytes, costs.owed_bytes) == (9, 8, 7, 6)
    assert (costs.output_bytes, costs.remade_bytes, costs.temporaries_bytes) == (5, 0, 4)
    own = analytic_book(small(), device, microbatch_sizes=[3]).entries[0].types["layer"]
    assert costs.task_ms(split=True) == own.task_ms(split=True)
    assert costs.flops == own.flops


def test_a_backend_that_says_no_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = book_of(made_up(), monkeypatch).entries[0].types["layer"]
    own = analytic_book(small(), device_of("h100"), microbatch_sizes=[3]).entries[0].types["layer"]
    assert costs.temporaries_bytes == own.temporaries_bytes > 0
    assert costs.stash_bytes == 7


def test_fewer_devices_than_share_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor 64 needs 64 devices"):
        compiled_book(small(), [StageSetting(3, 64, "none")], device_of("h100"))


# -- compiled --------------------------------------------------------------------------------------------------------


def forecast_by_runtime(config: TrainConfig, counts: list[int], remat: str, backward: str) -> dict[int, ChunkBytes]:
    """What each chunk of a cut holds, as the runtime has it from the programs of that very cut."""
    chunks = language_model(config.model).split(layers_per_chunk=counts)
    process = Process(Layout(num_stages=len(counts)), num_devices=1)
    model = HostedModel(
        chunks,
        linear(len(counts)),
        process,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, 10)),
        updates=UpdateRules(),
        seed=0,
        remat=(remat,) * len(counts),
    )
    graph = Ordering(hint="bf", backward=backward).fitted(linear(len(counts)), model_graph(chunks, None, None))
    programs = model.compile(graph, Buckets(chunks, microbatch_specs(config, 3)))
    return {chunk: chunk_bytes(each.sizes) for chunk, each in programs.chunks.items()}


def check_cuts(remat: str, cuts: list[list[int]], **more: Any) -> None:
    """Bytes of every part are those of the runtime: equal, temporaries within a few percent where layers share room
    with an end of the model, and the peak of every stage."""
    config = small(**more)
    costs = compiled_book(config, [StageSetting(3, 1, remat)], device_of("h100")).at(microbatch_size=3, remat=remat)
    for counts in cuts:
        layers, placement = [counts[0] + 1, *counts[1:-1], counts[-1] + 1], linear(len(counts))
        for backward in (SPLIT, FUSED):
            real = forecast_by_runtime(config, counts, remat, backward)
            cut = CutModel(
                costs=costs, counts=tuple(layers), placement=placement, num_microbatches=8, split=backward == SPLIT
            )
            order = Ordering(hint="bf", window=3, backward=backward).resolve(placement, cut.graph)
            peaks = [
                [stage.peak for stage in forecast_memory(order, sizes, 8)]
                for sizes in (real, dict(enumerate(cut.chunk_bytes)))
            ]
            for stage, (by_runtime, by_plan) in enumerate(zip(*peaks, strict=True)):
                assert 0.98 <= by_plan / by_runtime <= 1.2, (counts, backward, stage)
            for chunk, sizes in real.items():
                check_chunk(sizes, cut.chunk_bytes[chunk])


def check_chunk(real: ChunkBytes, planned: ChunkBytes) -> None:
    assert (planned.inputs, planned.output_grads) == (real.inputs, real.output_grads)
    assert planned.fixed == pytest.approx(real.fixed, rel=1e-3)
    one_more = 0 if real.inputs else real.output_grads  # behind an embedding, which is looked up again, not stashed
    assert real.stash <= planned.stash <= real.stash + one_more
    assert real.owed <= planned.owed <= real.owed + one_more
    assert real.temporaries * 0.97 <= planned.temporaries


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "cuts"), [("none", [[0, 5, 0], [2, 3]]), ("dots", [[1, 4]]), ("full", [[2, 3]])])
def test_bytes_are_those_that_the_runtime_forecasts(remat: str, cuts: list[list[int]]) -> None:
    check_cuts(remat, cuts)


@pytest.mark.slow
def test_bytes_of_tied_embeddings_and_cast_parameters() -> None:
    check_cuts("none", [[1, 4]], tie_embeddings=True, compute_dtype="bfloat16")


MESHES = [{"fsdp": 4}, {"tensor": 2, "fsdp": 2}, {"tensor": 2, "context": 2}, {"context": 4}]


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "least", "most"), [("none", 0.95, 1.1), ("full", 0.95, 1.15)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_memory_worked_out_for_a_mesh_is_that_of_compiled_programs(
    mesh: dict[str, int], remat: str, least: float, most: float
) -> None:
    """The peak of every stage; below only where the update decides, which copies its state on CPUs alone."""
    sizes = {"hidden": 128, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 352, "num_layers": 4, "vocab_size": 256}
    config = load_train_config(
        "cpu/debug",
        {f"model.{name}": size for name, size in sizes.items()}
        | {"data.length": 64, "data.batch_size": 32, "data.num_microbatches": 4, "pipeline.mesh": mesh},
    )
    tensor, device = mesh.get("tensor", 1), replace(device_of("tpu-v4"), kind="")  # as quick, and compiled for as CPUs
    books = (
        analytic_book(config, device, microbatch_sizes=[8], tensors=[tensor], remats=[remat]),
        compiled_book(config, [StageSetting(8, tensor, remat)], device),
    )
    for backward in (SPLIT, FUSED):
        peaks = []
        for book in books:
            costs = book.at(microbatch_size=8, tensor=tensor, remat=remat)
            cut = CutModel(costs=costs, counts=(3, 3), placement=linear(2), num_microbatches=8, split=backward == SPLIT)
            order = Ordering(hint="bf", window=4, backward=backward).resolve(linear(2), cut.graph)
            peaks.append([stage.peak for stage in forecast_memory(order, dict(enumerate(cut.chunk_bytes)), 8)])
        for worked_out, compiled in zip(*peaks, strict=True):
            assert least <= worked_out / compiled <= most
