"""A vision-language model on drawn words, 0 to 4 per sample: the same training as one jitted model's, however it runs.

The microbatches of a step have several shapes, some have no picture, and one step has none at all.
"""

from functools import cache
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.arbitration import Ordering
from rrfp_jax.data import RenderedText, RenderedTextConfig
from rrfp_jax.models import AudioConfig, LanguageModelConfig, ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.models.vision_language import ChunkGraph, vision_language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.freezing import freeze as frozen
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule
from rrfp_jax.tasks import PipelineGraph, Placement, linear
from tests.models.graph_of_chunks import start
from tests.pipelines import make_pipeline
from tests.plain_graph import Microbatch, batch_of, microbatches_of, train_plainly
from tests.plain_loop import assert_same_training
from tests.programs.toys import with_cheap_init

NUM_STEPS, NUM_MICROBATCHES, CLIP_NORM = 20, 4, 1.0
OPTIMIZER = optax.adamw(1e-3)
# Biases of keys change nothing: their gradients would be rounding, and Adam would make steps of them.
ENCODER: dict[str, Any] = {"hidden": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 12, "qkv_bias": False}
MODEL: dict[str, Any] = {
    "vision": VisionConfig(**ENCODER, qk_norm=True, patch_dim=64, max_rows=2, max_columns=8),
    "projector": ProjectorConfig(patches_per_feature=4),
    "decoder": LanguageModelConfig(vocab_size=256, hidden=8, num_layers=2, num_heads=2, mlp_dim=12),
}
AUDIO = AudioConfig(**ENCODER, bins=5, frames_per_position=2, is_packed=True)
CUT: dict[str, Any] = {"decoder_layers_per_chunk": [1, 1], "packed": True}


class Data(NamedTuple):
    """What a run trains on."""

    steps: list[list[Microbatch]]
    buckets: list[dict[str, Any]]


@cache
def drawn() -> Data:
    """Some steps, the last one without any picture."""
    config = RenderedTextConfig(
        batch_size=8, num_microbatches=NUM_MICROBATCHES, words=("am", "Be", "do", "up", "ink", "wax"), held_out=0.0,
        max_images=4, text_only=0.5, text_length=24, text_buckets=2, image_buckets=2, balance=False, max_bytes=2**14,
    )  # fmt: skip
    data = RenderedText(config)
    of_text = next(step for step in count() if not any(sample.images for sample in data.samples(step)))
    numbers = [*range(NUM_STEPS - 1), of_text]
    assert {len(sample.images) for step in numbers for sample in data.samples(step)} == {0, 1, 2, 3, 4}
    return Data([microbatches_of(data.batch(step)) for step in numbers], data.buckets)


@cache
def with_sounds() -> Data:
    """The same with a sound here and there, whose two features stand in the place of the first two tokens."""
    data, rng = drawn(), np.random.default_rng(0)

    def heard(microbatch: Microbatch) -> Microbatch:
        index = np.full(microbatch["tokens"].shape, -1, np.int32)
        is_free = microbatch.get("image_index", index)[0] < 0
        index[0, np.flatnonzero(is_free)[:2]] = [0, 2]
        segments = np.array([[1] * 8 + [2] * 4], np.int32)
        frames = rng.normal(size=(1, 12, AUDIO.bins)).astype(np.float32)
        return microbatch | {"frames": frames, "frame_segments": segments, "audio_index": index}

    steps = [[heard(each) if rng.integers(2) else each for each in step] for step in data.steps]
    leaf = {name: array for step in steps for each in step for name, array in each.items()}
    sounds = {name: leaf[name] for name in ("frames", "frame_segments")}
    loud = [bucket | sounds | {"audio_index": bucket["tokens"]} for bucket in data.buckets]
    return Data(steps, [*data.buckets, *loud])


@cache
def model(*, projector_in: str = "encoder", hears: bool = False) -> ChunkGraph:
    config = VisionLanguageConfig(
        **MODEL, audio=AUDIO if hears else None, audio_projector=ProjectorConfig(patches_per_feature=2)
    )
    graph = vision_language_model(config).split(**CUT, projector_in=projector_in)
    graph.chunks[:] = map(with_cheap_init, graph.chunks)
    return graph


@cache
def pipeline_of(
    *,
    projector_in: str = "encoder",
    hears: bool = False,
    freeze: tuple[str, ...] = (),
    stages: tuple[int, ...] | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline to be reordered, which has a stage for every chunk by default."""
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


OWN, ALL_BUT_PROJECTOR = {"projector_in": "own"}, {"freeze": ("vision", "decoder")}
STRICT, SPLIT = {"consume": "strict"}, {"hint": "bfw", "window": 2}
FAST: list[dict[str, Any]] = [
    {},
    {"schedule": "1f1b"} | STRICT,
    {"schedule": "zb-h1"},
    {"data": 2, "stages": (0, 1, 0, 1)} | OWN,
]
SLOW: list[dict[str, Any]] = [
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
        ran = {(span.task.chunk % len(base.chunks), span.task.microbatch) for span in result.timeline.spans}
        for chunk, leaf in encoder_chunks(base).items():
            assert {m for c, m in ran if c == chunk and m >= 0} == {
                m for m, each in enumerate(microbatches) if leaf in each
            }


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
