"""A vision-language model on drawn words, 0 to 4 per sample: one jitted model's training, however it runs."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.model_graph import freeze as frozen
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleRequest, ScheduleTable, build_schedule, linear
from tests.drawn_words import NUM_MICROBATCHES, NUM_STEPS, Data, drawn, model, with_sounds
from tests.models.graph_of_chunks import start
from tests.pipelines import make_pipeline
from tests.plain_graph import Microbatch, batch_of, train_plainly
from tests.plain_loop import assert_same_training

CLIP_NORM, OPTIMIZER = 1.0, optax.adamw(1e-3)


@cache
def pipeline_of(
    *,
    projector_in: str = "encoder",
    hears: bool = False,
    freeze: tuple[str, ...] = (),
    stages: tuple[int, ...] | None = None,
    meshes: tuple[tuple[tuple[str, int], ...], ...] = (),
    **options: Any,
) -> Pipeline:
    """A pipeline to be reordered, which has a stage for every chunk by default; ``meshes`` has the axes of each."""
    if meshes:
        options["mesh"] = [dict(axes) for axes in meshes]
    graph = model(projector_in=projector_in, hears=hears)
    chunks = frozen(graph.chunks, freeze) if freeze else graph.chunks
    placement = linear(len(chunks)) if stages is None else Placement(stages)
    pipeline: Pipeline = make_pipeline(
        chunks, edges=graph.edges, placement=placement, optimizer=OPTIMIZER, clip_norm=CLIP_NORM,
        progress_deadline_s=60, **options,
    )  # fmt: skip
    return pipeline


def table(name: str, base: Pipeline) -> ScheduleTable:
    """Of one replica."""
    num_microbatches = NUM_MICROBATCHES // base.layout.data
    graph = PipelineGraph(len(base.chunks), num_microbatches, base._graph.edges)
    request = ScheduleRequest(
        num_stages=base.placement.num_stages, num_microbatches=num_microbatches, graph=graph, placement=base.placement
    )
    return build_schedule(name, request)


def encoder_chunks(base: Pipeline) -> dict[int, str]:
    """Every chunk of an encoder with the leaf without which it does not exist."""
    leaf_of = {"vision": "patches", "projector": "patches", "audio": "frames", "audio_projector": "frames"}
    names = {number: chunk.name.split(":")[0] for number, chunk in enumerate(base.chunks)}
    return {number: leaf_of[name] for number, name in names.items() if name in leaf_of}


def trained(pipeline: Pipeline, data: Data) -> tuple[Any, list[Any]]:
    """The final parameters and what every step left."""
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(batch_of(data.steps[0]), buckets=data.buckets)
        enqueued = []
        for microbatches in data.steps:
            state, metrics = pipeline.step(state, batch_of(microbatches))
            enqueued.append(metrics)
        results = [metrics.result() for metrics in enqueued]
        return jax.tree.map(np.array, pipeline.params(state)), results


@cache
def expected(*, hears: bool, frozen: frozenset[str]) -> tuple[list[float], list[float], Any]:
    """Losses, norms and final parameters of one jitted model; initial values follow from names alone."""
    graph, data = model(hears=hears), with_sounds() if hears else drawn()
    params = start(graph)
    return train_plainly(graph, params, OPTIMIZER, data.steps, clip_norm=CLIP_NORM, frozen=frozen)


def num_buckets(step: list[Microbatch]) -> int:
    return len({tuple(sorted((name, leaf.shape) for name, leaf in each.items())) for each in step})


def test_the_data_are_as_mixed_as_they_should_be() -> None:
    assert max(map(num_buckets, drawn().steps)) >= 3
    pictures = [["patches" in each for each in step] for step in drawn().steps]
    assert pictures[-1] == [False] * NUM_MICROBATCHES
    assert sum(any(step) and not all(step) for step in pictures) >= NUM_STEPS // 2
    assert any(any(step) and not any(half) for step in pictures for half in (step[:2], step[2:]))


OTHER_MESHES = {"stages": (0, 1, 1), "meshes": ((("fsdp", 4),), (("tensor", 2), ("context", 2)))}
OWN, ALL_BUT_PROJECTOR = {"projector_in": "own"}, {"freeze": ("vision", "decoder")}
STRICT, SPLIT = {"consume": "strict"}, {"hint": "bfw", "window": 2}
FAST: list[dict[str, Any]] = [
    {"schedule": "1f1b"} | STRICT,
]
SLOW: list[dict[str, Any]] = [
    {},
    {"data": 2, "stages": (0, 1, 0, 1)} | OWN,
    {"schedule": "zb-h1"},
    {"hint": "fb", "window": 3},
    {"hint": "f-priority", "window": 1},
    {"hint": "b-priority"},
    {"hint": "bf-deep", "stages": (0, 1, 0, 1)} | OWN,
    SPLIT,
    {"schedule": "zb-h1"} | STRICT,
    {"schedule": "zb-h2"} | STRICT,
    {"schedule": "1f1b-split"},
    {"schedule": "gpipe"} | STRICT,
    {"tensor": 2},
    {"tensor": 2, "projector_in": "decoder", "schedule": "zb-h1"},
    {"schedule": "zb-h1"} | OTHER_MESHES,
    {"schedule": "1f1b"} | STRICT | OTHER_MESHES,
    {"schedule": "zb-h1", "projector_in": "decoder", "meshes": ((("fsdp", 2),), (("tensor", 2),), (("expert", 2),))},
    {"freeze": ("vision",), "data": 2},
    {"data": 2, "tensor": 2, "stages": (0, 1, 1), "shard_optimizer": True} | SPLIT,
    {"projector_in": "decoder", "stages": (0, 0, 1)},
    {"projector_in": "decoder", "freeze": ("vision",), "schedule": "1f1b"} | STRICT,
    {"freeze": ("vision",), "schedule": "zb-h1"} | STRICT,
    OWN | ALL_BUT_PROJECTOR | SPLIT,
    {"stages": (0, 1, 0, 1)} | OWN | ALL_BUT_PROJECTOR,
    {"schedule": "1f1b"} | STRICT | OWN | ALL_BUT_PROJECTOR,
    {"schedule": "zb-h1", "data": 2} | OWN | ALL_BUT_PROJECTOR,
    {"hears": True},
    {"hears": True, "schedule": "1f1b"} | STRICT,
    {"hears": True, "schedule": "zb-h1", "stages": (0, 1, 0, 1)},
    {"hears": True, "freeze": ("vision", "audio"), "stages": (0, 0, 1, 2), "data": 2},
    {"hears": True, "tensor": 2, "stages": (0, 1, 2, 0, 1, 2), **OWN, **SPLIT},
]


@pytest.mark.parametrize(
    "options", [*FAST, *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW)], ids=str
)
def test_training_is_that_of_one_jitted_model(options: dict[str, Any]) -> None:
    order = {name: options[name] for name in ("hint", "window", "schedule", "consume") if name in options}
    built = {name: value for name, value in options.items() if name not in order}
    base = pipeline_of(**built)
    if "schedule" in order:
        order["schedule"] = table(order["schedule"], base)
    hears = built.get("hears", False)
    data = with_sounds() if hears else drawn()
    params, results = trained(base.reordered(Ordering(**order)), data)
    frozen = frozenset[str]().union(*(chunk.frozen for chunk in base.chunks))
    losses, norms, expected_params = expected(hears=hears, frozen=frozen)
    assert_same_training([result.loss for result in results], params, losses, expected_params)
    np.testing.assert_allclose([result.grad_norm for result in results], norms, rtol=1e-5)
    for microbatches, result in zip(data.steps, results, strict=True):
        ran = {(span.task.chunk // options.get("data", 1), span.task.microbatch) for span in result.timeline.spans}
        for chunk, leaf in encoder_chunks(base).items():
            assert {m for c, m in ran if c == chunk and m >= 0} == {
                m for m, each in enumerate(microbatches) if leaf in each
            }


@pytest.mark.parametrize(
    ("leaf", "value", "answer"),
    [
        (
            "image_index",
            99,
            r"^image_index of microbatch 2 of the batch names feature 99 but the patches give \d+ .*-1 for",
        ),
        ("patch_columns", 8, r"^patch_columns of microbatch 2 of the batch go from 0 to 8, but max_columns is 8: give"),
    ],
)
def test_numbers_that_fit_no_image_are_refused_before_anything_has_changed(leaf: str, value: int, answer: str) -> None:
    base, data = pipeline_of(), drawn()
    step = next(step for step in data.steps if leaf in step[2])
    wrong = step[2] | {leaf: step[2][leaf].copy()}
    wrong[leaf].flat[0] = value
    losses = []
    for is_tried in (True, False):
        with base.reordered() as pipeline:
            state = pipeline.init(jax.random.key(0))
            pipeline.prepare(batch_of(step), buckets=data.buckets)
            if is_tried:
                with pytest.raises(ValueError, match=answer):
                    pipeline.step(state, batch_of([*step[:2], wrong, step[3]]))
            state, metrics = pipeline.step(state, batch_of(step))
            losses.append(metrics.result().loss)
    assert losses[0] == losses[1]
    assert np.isfinite(losses[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fused", "split"])
@pytest.mark.parametrize(
    "built",
    [
        {},
        {"hears": True, "stages": (0, 1, 0, 1)},
        {"freeze": ("vision",), "data": 2},
        {"stages": (0, 1, 2, 1)} | OWN | ALL_BUT_PROJECTOR,
        {"tensor": 2},
    ],
    ids=str,
)
def test_every_order_computes_the_same_bits(built: dict[str, Any], kind: str) -> None:
    base, data = pipeline_of(deterministic=True, **built), with_sounds() if "hears" in built else drawn()
    fused, split = {"schedule": table("1f1b", base)}, {"schedule": table("zb-h1", base)}
    orders: list[dict[str, Any]] = {
        "fused": [{}, {"hint": "fb"}, {"hint": "b-priority", "window": 1}, fused, fused | STRICT],
        "split": [{"hint": "bfw"}, SPLIT, split, split | STRICT],
    }[kind]
    first, *others = (trained(base.reordered(Ordering(**order)), data) for order in orders)
    for params, results in others:
        assert [result.loss for result in results] == [result.loss for result in first[1]]
        jax.tree.map(np.testing.assert_array_equal, params, first[0])
