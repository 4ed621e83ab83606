"""The bytes that one microbatch of the debug model occupies, pinned; nothing is compiled."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.model import language_model
from rrfp_jax.programs.chunk_plan import ChunkPlan, WeightResidualBytes, plan_chunk
from rrfp_jax.programs.shapes import derive_shapes, num_bytes
from rrfp_jax.schedules import chain

DEBUG = Path(__file__).parents[1] / "tpu_gpu_configs" / "cpu" / "debug.yaml"
NUM_CHUNKS = 4
FIRST, MIDDLE, LAST = 0, 1, NUM_CHUNKS - 1


def plans(remat: str = "none", **model: Any) -> list[ChunkPlan]:
    config = yaml.safe_load(DEBUG.read_text())
    chunks = language_model(LanguageModelConfig(**config["model"], **model)).split(NUM_CHUNKS)
    shape = (config["data"]["batch_size"], config["data"]["length"])
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    graph = chain(NUM_CHUNKS, 1, split=True)
    shapes = derive_shapes(chunks, graph, {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()})
    return [plan_chunk(c, chunks, graph, shapes, remat=remat) for c in range(NUM_CHUNKS)]


def made_and_aliased(plan: ChunkPlan) -> tuple[int, int]:
    specs = plan.residuals.specs
    return num_bytes((specs.donated, specs.saved)), num_bytes(specs.aliased)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("remat", "dtype", "expected"),
    [
        (
            "none",
            "float32",
            {FIRST: (53_100_544, 0), MIDDLE: (51_511_296, 1_572_864), LAST: (56_246_272, 1_605_632)},
        ),
        (
            "dots",
            "float32",
            {FIRST: (23_068_672, 16_384), MIDDLE: (23_068_672, 1_572_864), LAST: (26_230_784, 1_605_632)},
        ),
        ("full", "float32", {FIRST: (0, 16_384), MIDDLE: (0, 1_572_864), LAST: (3_162_112, 1_605_632)}),
        ("none", "bfloat16", {FIRST: (30_818_304, 0), MIDDLE: (30_015_488, 786_432), LAST: (32_391_168, 819_200)}),
    ],
)
def test_residuals_of_one_microbatch(remat: str, dtype: str, expected: dict[int, tuple[int, int]]) -> None:
    """Bytes of residuals that the forward makes, and of inputs that they keep alive.

    At most what ``jax.vjp`` alone would keep, without every value that parameters alone determine. The numbers depend
    on JAX's own rules of differentiation; a new release may lower them.
    """
    made = plans(remat, compute_dtype=dtype)
    for plan in made:
        report = plan.split.report if plan.split else None
        assert report is not None
        assert sum(made_and_aliased(plan)) == report.residual_bytes
        assert report.residual_bytes <= report.vjp_bytes - report.fixed_vjp_bytes
    assert {chunk: made_and_aliased(made[chunk]) for chunk in expected} == expected


def test_weight_residuals_of_one_microbatch() -> None:
    """One pair of arrays per weight matrix; the first chunk, which has no input gradient, keeps all."""
    made = plans()
    assert made[FIRST].weight_residuals.num_bytes == WeightResidualBytes(saved=53_100_544, gradients=1_572_864)
    assert made[MIDDLE].weight_residuals.num_bytes == WeightResidualBytes(
        saved=8_912_896, gradients=1_572_864, made=13_107_968
    )
    assert made[LAST].weight_residuals.num_bytes == WeightResidualBytes(
        saved=10_502_144, aliased=16_384, made=14_697_600
    )


def test_weights_in_bfloat16_are_derived_once_per_update() -> None:
    """Two bytes per parameter but for the embedding, of which only the rows that are read are cast."""
    for remat in ("none", "full"):
        sizes = [plan.split.report.derived_bytes for plan in plans(remat, compute_dtype="bfloat16") if plan.split]
        assert sizes == [203_136, 203_136, 203_136, 252_480]
