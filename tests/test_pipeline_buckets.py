"""Microbatches of several shapes, with and without images and sounds: the same training as the unpipelined model's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.private.jax_names import compiler
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import PipelineGraph, Placement, ScheduleRequest, ScheduleTable, build_schedule, linear
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training
from tests.ragged import CHUNKS, EDGES, all_buckets, as_batch, make_microbatch, make_steps, train_plainly

OPTIMIZER = optax.adamw(1e-2)
NUM_MICROBATCHES, NUM_STEPS = 4, 20


@pytest.fixture(scope="module")
def base() -> Pipeline:
    return Pipeline(CHUNKS, placement=linear(5), edges=EDGES, optimizer=OPTIMIZER, updates=UpdateRules(clip_norm=1e6))


def trained(pipeline: Pipeline, steps: Any) -> tuple[list[float], list[float], Any, Any, list[Any]]:
    """Losses, norms, initial and final parameters, and what every step left."""
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        pipeline.prepare(as_batch(steps[0]), buckets=all_buckets())
        enqueued = []
        for microbatches in steps:
            state, metrics = pipeline.step(state, as_batch(microbatches))
            enqueued.append(metrics)
        results = [metrics.result() for metrics in enqueued]
        params = jax.tree.map(np.array, pipeline.params(state))
    return [r.loss for r in results], [r.grad_norm for r in results], initial, params, results


def table(name: str) -> ScheduleTable:
    graph = PipelineGraph(len(CHUNKS), NUM_MICROBATCHES, EDGES)
    request = ScheduleRequest(num_stages=5, num_microbatches=NUM_MICROBATCHES, graph=graph, placement=linear(5))
    return build_schedule(name, request)


@pytest.fixture(scope="module")
def plainly() -> Callable[..., tuple[list[float], list[float], Any]]:
    """What the plain model makes of the steps: once for all orders of the same layers, whose first values are equal."""
    known: dict[tuple[str, ...], tuple[Any, Any]] = {}

    def train(initial: Any, frozen: tuple[str, ...]) -> tuple[list[float], list[float], Any]:
        if frozen not in known:
            steps = make_steps(NUM_STEPS, NUM_MICROBATCHES)
            known[frozen] = initial, train_plainly(initial, OPTIMIZER, steps, frozen=frozen)
        jax.tree.map(np.testing.assert_array_equal, initial, known[frozen][0])
        return known[frozen][1]

    return train


FROZEN = {"encoders": ("image", "sound"), "all but one": ("image", "sound", "embedding", "layer", "head")}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"hint": "bfw"}, marks=pytest.mark.slow),
        pytest.param({"window": 1}, marks=pytest.mark.slow),
        pytest.param({"hint": "fb", "window": 3}, marks=pytest.mark.slow),
        pytest.param({"schedule": "1f1b", "consume": "strict"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zb-h1", "consume": "strict"}, marks=pytest.mark.slow),
        {"schedule": "zb-h1"},
        pytest.param({"schedule": "1f1b-split"}, marks=pytest.mark.slow),
        pytest.param({"hint": "bfw", "frozen": "encoders"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "1f1b", "consume": "strict", "frozen": "encoders"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zb-h1", "frozen": "all but one"}, marks=pytest.mark.slow),
        pytest.param({"frozen": "all but one"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mixed_microbatches_train_as_the_plain_model(
    base: Pipeline, plainly: Callable[..., Any], options: dict[str, Any]
) -> None:
    options = dict(options)
    frozen = FROZEN.get(options.pop("frozen", ""), ())
    if name := options.get("schedule"):
        options["schedule"] = table(name)
    if frozen:
        updates = UpdateRules(clip_norm=1e6)
        chunks = freeze(CHUNKS, frozen)
        base = Pipeline(chunks, placement=linear(5), edges=EDGES, optimizer=OPTIMIZER, updates=updates)
    steps = make_steps(NUM_STEPS, NUM_MICROBATCHES)
    losses, norms, initial, params, results = trained(base.reordered(Ordering(**options)), steps)
    expected_losses, expected_norms, expected = plainly(initial, frozen)
    assert_same_training(losses, params, expected_losses, expected)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    for microbatches, result in zip(steps, results, strict=True):
        ran = {(span.task.chunk, span.task.microbatch) for span in result.timeline.spans}
        for number, leaf in ((0, "images"), (1, "sounds")):
            for microbatch, each in enumerate(microbatches):
                assert ((number, microbatch) in ran) == (leaf in each)


@pytest.mark.slow
def test_encoders_beside_the_decoder_and_replicas_without_any_image() -> None:
    steps = [[*first, *second] for first, second in zip(make_steps(6, 2), make_steps(6, 2, seed=1), strict=True)]
    steps[2] = [{k: v for k, v in m.items() if "image" not in k and "sound" not in k} for m in steps[2][:2]] + steps[2][
        2:
    ]
    pipeline = make_pipeline(
        CHUNKS, placement=Placement((0, 1, 0, 1, 1)), edges=EDGES, optimizer=OPTIMIZER, data=2, clip_norm=1e6
    )
    losses, norms, initial, params, _ = trained(pipeline, steps)
    expected_losses, expected_norms, expected = train_plainly(initial, OPTIMIZER, steps)
    assert_same_training(losses, params, expected_losses, expected)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)


@pytest.mark.slow
def test_deterministic_bits_whatever_the_order() -> None:
    steps, updates = make_steps(4, NUM_MICROBATCHES), UpdateRules(deterministic=True)
    exact = Pipeline(CHUNKS, placement=linear(5), edges=EDGES, optimizer=OPTIMIZER, updates=updates)
    orders = (Ordering(window=1), Ordering(hint="fb"), Ordering(hint="bf"))
    bits = [trained(exact.reordered(order), steps)[3] for order in orders]
    for other in bits[1:]:
        jax.tree.map(np.testing.assert_array_equal, bits[0], other)


def test_nothing_compiles_once_the_buckets_are_prepared(base: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, compiled = make_steps(100, NUM_MICROBATCHES, seed=3), []
    with base.reordered() as pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(as_batch(steps[0]), buckets=all_buckets())
        whole = compiler.compile_or_get_cached
        monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *a, **k: compiled.append(a) or whole(*a, **k))
        for microbatches in steps:
            state, metrics = pipeline.step(state, as_batch(microbatches))
        metrics.result()
    assert not compiled
    jax.jit(lambda number: number + 3)(np.zeros(17))
    assert compiled, "what compiles is not counted"


def test_programs_are_there_once_for_what_a_chunk_reads(base: Pipeline) -> None:
    with base.reordered() as pipeline:
        pipeline.init(jax.random.key(0))
        pipeline.prepare(as_batch(make_steps(1, NUM_MICROBATCHES)[0]), buckets=all_buckets())
        chunks = next(iter(pipeline._model._compiled.values())).chunks
        assert [len(chunks[c].variants) for c in range(5)] == [3, 1, 24, 3, 3]


def test_a_shape_outside_all_buckets_is_refused_and_nothing_has_changed(base: Pipeline) -> None:
    steps, rng = make_steps(2, NUM_MICROBATCHES), np.random.default_rng(0)
    with base.reordered() as pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(as_batch(steps[0]), buckets=all_buckets())
        strange = [*steps[0][:2], make_microbatch(rng, 4, 0, has_sound=False), steps[0][3]]
        with pytest.raises(
            ValueError, match=r"microbatch 2 of the batch is .*tokens int32\[4\].* none of the 24 buckets"
        ):
            pipeline.step(state, as_batch(strange))
        with pytest.raises(ValueError, match="the batch has 2 microbatches"):
            pipeline.step(state, as_batch(steps[0][:2]))
        with pytest.raises(ValueError, match="optional input of chunk 2"):
            pipeline.step(state, as_batch(steps[0]), absent={(0, 1)})
        state, metrics = pipeline.step(state, as_batch(steps[0]))
        assert np.isfinite(metrics.result().loss)


def test_a_leaf_that_a_chunk_needs_cannot_be_missing_unless_its_edge_is_optional() -> None:
    edges, rng = tuple(edge._replace(is_optional=False) for edge in EDGES), np.random.default_rng(0)
    silent, whole = (make_microbatch(rng, 3, 1, has_sound=has_sound) for has_sound in (False, True))
    with Pipeline(CHUNKS, placement=linear(5), edges=edges, optimizer=OPTIMIZER) as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match="the batch lacks sounds: it has image_index, images"):
            pipeline.prepare(as_batch([silent] * 2))
        with pytest.raises(ValueError, match="microbatch 1 lacks 'sounds', which every microbatch needs"):
            pipeline.prepare(as_batch([whole, silent]))
        with pytest.raises(ValueError, match=r"skips chunk 1 \(sound\), whose output chunk 2 \(merge\) needs"):
            pipeline.prepare(as_batch([whole] * 2), buckets=[whole, silent])


def test_what_is_no_array_is_refused(base: Pipeline) -> None:
    with base.reordered() as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match="microbatch 0 of batch leaf 'targets' is of type list: give an array"):
            pipeline.prepare({**as_batch(make_steps(1, 2)[0]), "targets": [[1.0], [2.0]]})


def test_more_programs_than_allowed_are_refused_at_once(base: Pipeline) -> None:
    with base.reordered(options=RuntimeOptions(max_programs=5)) as pipeline:
        pipeline.init(jax.random.key(0))
        pipeline._model._compiled.clear()
        with pytest.raises(ValueError, match=r"24 buckets would compile .* more than max_programs 5"):
            pipeline.prepare(as_batch(make_steps(1, NUM_MICROBATCHES)[0]), buckets=all_buckets())


def test_far_too_many_buckets_are_refused_before_any_is_traced(base: Pipeline) -> None:
    def untraceable(*_: Any, **__: Any) -> Any:
        raise AssertionError("a chunk is traced")

    chunks = [replace(chunk, apply=untraceable) for chunk in CHUNKS]
    large = all_buckets()[-1]
    buckets = [
        large | {"tokens": np.zeros(length, np.int32), "targets": np.zeros((length, 8), np.float32)}
        for length in range(1, 1102)
    ]
    with Pipeline(chunks, placement=linear(5), edges=EDGES, optimizer=OPTIMIZER) as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(
            ValueError, match=r"1101 buckets would compile at least 1101 .* more than max_programs 1000"
        ):
            pipeline.prepare(as_batch(make_steps(1, NUM_MICROBATCHES)[0]), buckets=buckets)


def test_processes_with_other_buckets_are_refused(base: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def gather(self: Process, name: str, data: Any = None, *, to_all: bool = True) -> dict[int, Any]:
        told.extend([data] if name == "sizes" else [])
        return dict(enumerate(told)) if name == "sizes" else {0: data}

    monkeypatch.setattr(Process, "gather", gather)
    batch, (one, *others) = as_batch(make_steps(1, 2)[0]), all_buckets()
    for buckets in ([one, *others], [one, *others]):
        with base.reordered() as pipeline:
            pipeline.init(jax.random.key(0))
            pipeline.prepare(batch, buckets=buckets)
    with base.reordered() as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match="rank 2 was given other buckets than rank 0"):
            pipeline.prepare(batch, buckets=[*others, one])


def test_what_is_read_here_is_named_by_leaf(base: Pipeline) -> None:
    pipeline = make_pipeline(CHUNKS, placement=linear(5), edges=EDGES, optimizer=OPTIMIZER)
    assert pipeline.reads(4) == dict.fromkeys(
        ("images", "sounds", "tokens", "image_index", "sound_index", "targets"), range(4)
    )
