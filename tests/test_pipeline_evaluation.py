"""Evaluations between training steps: equal to a plain jit, and without a trace in what is trained."""

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import BESIDE
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.runtime import TaskFailed
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear, looped
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.testing import DelayedStage
from tests.cluster.mesh import eventually
from tests.pipelines import make_pipeline

NUM_MICROBATCHES = 4
OPTIMIZER = optax.adamw(3e-3)
Batch = dict[str, np.ndarray]


def make_chunks(num_chunks: int, **options: Any) -> list[Chunk]:
    config = LanguageModelConfig(
        vocab_size=32,
        hidden=16,
        num_layers=num_chunks,
        num_heads=2,
        num_kv_heads=2,
        mlp_dim=32,
        init_std=0.1,
        **{"tie_embeddings": False, **options},
    )
    return language_model(config).split(num_chunks)


def make_batch(seed: int, *, length: int = 8, batches: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    sequence = rng.integers(0, 32, (NUM_MICROBATCHES * batches, 2, length + 1)).astype(np.int32)
    weights = (rng.random((NUM_MICROBATCHES * batches, 2, length)) < 0.7).astype(np.float32)
    return {"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights}


def shapes(length: int = 8, batches: int = 1, **more: Any) -> EvaluationShapes:
    bucket = {name: leaf[0] for name, leaf in make_batch(0, length=length).items()}
    return EvaluationShapes(buckets=[bucket], batches=batches, **more)


def plainly(chunks: list[Chunk], params: Mapping[str, Any], batch: Batch) -> tuple[float, float]:
    """Summed loss and weight by a plain jit of the whole model."""

    @jax.jit
    def loss_and_weight(params: Any, microbatch: Any) -> Any:
        outputs = None
        for chunk in chunks:
            own = {name: params[name] for name in jax.eval_shape(chunk.init, jax.random.key(0))}
            leaves = {name: microbatch[name] for name in chunk.leaves}
            outputs = chunk.apply(own, outputs, leaves, key=None)
        return outputs[:2]  # type: ignore[index]

    of_microbatches = [
        loss_and_weight(params, {name: leaf[m] for name, leaf in batch.items()}) for m in range(len(batch["tokens"]))
    ]
    losses, weights = zip(*of_microbatches, strict=True)
    return float(np.sum(np.float64(losses))), float(np.sum(np.float64(weights)))


def train(pipeline: Pipeline, num_steps: int, *, evaluates: bool, **evaluation: Any) -> tuple[list[float], Any]:
    """Train, evaluating before each step and behind the last one, each equal to a plain jit; losses and parameters."""
    batches = evaluation.get("batches", 1)
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0), evaluation=shapes(**evaluation) if evaluates else None)
        losses = []
        for step in range(num_steps + 1):
            if evaluates:
                batch = make_batch(100 + step, length=evaluation.get("length", 8), batches=1 + step % batches)
                found = pipeline.evaluate(state, batch).result()
                params = jax.tree.map(np.array, pipeline.params(state))
                loss_sum, weight = plainly(list(pipeline.chunks), params, batch)
                assert found.step == step
                assert found.weight == weight
                np.testing.assert_allclose(found.loss_sum, loss_sum, rtol=1e-6)
            if step < num_steps:
                state, metrics = pipeline.step(state, make_batch(step))
                losses.append(metrics)
        assert state.step == num_steps
        assert [metrics.result().step for metrics in losses] == list(range(num_steps))
        return [metrics.result().loss for metrics in losses], jax.tree.map(np.array, pipeline.params(state))


def assert_no_trace(chunks: list[Chunk], num_steps: int = 3, *, evaluation: Any = None, **options: Any) -> None:
    """Training is the same, bit for bit, with and without evaluations in between."""
    defaults = {"optimizer": OPTIMIZER, "deterministic": True, "clip_norm": 1.0}
    results = [
        train(make_pipeline(chunks, **{**defaults, **options}), num_steps, evaluates=evaluates, **(evaluation or {}))
        for evaluates in (False, True)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def table(name: str, **more: Any) -> Any:
    return build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES, **more))


def test_a_loss_that_is_not_finite_shows_in_an_evaluation_without_weight() -> None:
    pipeline = make_pipeline(make_chunks(2), optimizer=optax.sgd(np.nan), skip_nonfinite=False, placement=linear(2))
    weightless = make_batch(1) | {"weights": np.zeros((NUM_MICROBATCHES, 2, 8), np.float32)}
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0), evaluation=shapes())
        assert pipeline.evaluate(state, weightless).result().loss_sum == 0.0
        state, _ = pipeline.step(state, make_batch(0))
        found = pipeline.evaluate(state, weightless).result()
    assert np.isnan(found.loss_sum)
    assert found.weight == 0.0


@pytest.mark.slow
def test_training_is_the_same_with_and_without() -> None:
    assert_no_trace(make_chunks(2), num_steps=6, placement=linear(2), evaluation={"batches": 3, "length": 6})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "consume": "strict"},
        {"schedule": "zb-h1", "consume": "strict"},
        {"schedule": "zb-h1"},
        {"hint": "bfw", "window": 1},
        {"tensor": 2},
        {"data": 2},
        {"data": 2, "shard_optimizer": True},
        {"data": 2, "reduce": "messages"},
        {"remat": "full"},
        {"dispatch_ahead": "just-in-time"},
        {"clip_norm": None, "skip_nonfinite": False},
        {"window": "1MiB"},
    ],
    ids=str,
)
def test_every_way_to_run(options: dict[str, Any]) -> None:
    if "schedule" in options:
        options = {**options, "schedule": table(options["schedule"])}
    assert_no_trace(make_chunks(2, tie_embeddings=True), placement=linear(2), evaluation={"batches": 2}, **options)


@pytest.mark.slow
def test_several_chunks_on_a_stage_in_bfloat16() -> None:
    chunks = make_chunks(4)
    schedule = table("interleaved-1f1b", chunks_per_stage=2)
    assert_no_trace(chunks, placement=looped(2, 2), schedule=schedule, consume="strict", evaluation={"batches": 2})
    assert_no_trace(chunks, placement=looped(2, 2))


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with make_pipeline(make_chunks(2), placement=linear(2), optimizer=OPTIMIZER) as pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0), evaluation=shapes())
        pipeline.step(state, make_batch(0))
        yield pipeline


def now(pipeline: Pipeline) -> Any:
    from rrfp_jax.pipeline import PipelineState

    return PipelineState(pipeline._step)


def test_nothing_is_compiled_by_an_evaluation(pipeline: Pipeline) -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: compiled.append(name))
    try:
        pipeline.evaluate(now(pipeline), make_batch(7)).result()
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]


def test_a_state_that_was_consumed_and_shapes_that_were_not_compiled_are_refused(pipeline: Pipeline) -> None:
    from rrfp_jax.pipeline import PipelineState

    with pytest.raises(ValueError, match="this state was consumed"):
        pipeline.evaluate(PipelineState(0), make_batch(0))
    with pytest.raises(ValueError, match="programs were compiled for"):
        pipeline.evaluate(now(pipeline), make_batch(0, length=5))
    with pytest.raises(ValueError, match="has room for 4: evaluate them in several calls"):
        pipeline.evaluate(now(pipeline), make_batch(0, batches=2))
    assert np.isfinite(pipeline.evaluate(now(pipeline), make_batch(0)).result().loss)


def test_a_pipeline_that_was_not_prepared_for_evaluations_says_so(pipeline: Pipeline) -> None:
    with pipeline.reordered() as twin:
        state = twin.init(jax.random.key(0))
        with pytest.raises(RuntimeError, match="call prepare"):
            twin.evaluate(state, make_batch(0))
        twin.prepare(make_batch(0))
        with pytest.raises(ValueError, match="was not prepared for evaluations"):
            twin.evaluate(state, make_batch(0))
    with pytest.raises(ValueError, match="give at least 1"):
        shapes(batches=0)


def test_chunks_get_no_key_and_errors_name_the_evaluation() -> None:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        noise = 0.0 if key is None else jax.random.normal(key, (4,)).sum()
        return jnp.sum(leaves["x"] * params["w"]) + noise, jnp.float32(2)

    chunk = Chunk(name="noisy", init=lambda key: {"w": jnp.ones(4)}, apply=apply, leaves=("x",), uses_key=True)
    batch = {"x": np.ones((2, 4), np.float32)}
    pipeline = make_pipeline([chunk], placement=linear(1), optimizer=optax.sgd(0.1))
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(batch, evaluation=EvaluationShapes(buckets=[{"x": batch["x"][0]}]))
        assert pipeline.evaluate(state, batch).result().loss == 2.0
        state, _ = pipeline.step(state, batch)
        pipeline.wait()
        stage = next(iter(pipeline.runtime._actors.values())).executor
        stage._steps = {}  # type: ignore[attr-defined]  # so that its next task fails
        stage.begin = lambda *_: None  # type: ignore[method-assign]
        failing = pipeline.evaluate(state, batch)
        with pytest.raises(TaskFailed, match="evaluation after 1 steps: 0F0 on stage 0 failed"):
            failing.result()


# -- in idle time ------------------------------------------------------------------------------------------------------


def evaluated(pipeline: Pipeline, num_steps: int = 24, **evaluation: Any) -> tuple[list[Any], list[Any], Any]:
    """Train, and evaluate two batches after every eighth step; results of evaluations and steps, and parameters."""
    with pipeline:
        state, found, losses = pipeline.init(jax.random.key(1)), list[Any](), list[Any]()
        pipeline.prepare(make_batch(0), evaluation=shapes(**evaluation))
        for step in range(num_steps):
            if step % 8 == 0:
                found += [pipeline.evaluate(state, make_batch(100 + step + number)) for number in range(2)]
            state, metrics = pipeline.step(state, make_batch(step))
            losses.append(metrics)
        results = [each.result() for each in found]
        return results, [each.result() for each in losses], jax.tree.map(np.array, pipeline.params(state))


def slow(stage: Any) -> Any:
    return DelayedStage(stage, lambda *_: 0.004)  # so that stages idle for each other


@pytest.mark.parametrize(
    "options",
    [
        {"hint": "bfw"},
        pytest.param({"schedule": "1f1b", "consume": "strict"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "reduce": "messages"}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "shard_optimizer": True}, marks=pytest.mark.slow),
        pytest.param({"dispatch_ahead": "just-in-time"}, marks=pytest.mark.slow),
        pytest.param({"dispatch_ahead": "pairs", "deterministic": False, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"pieces": lambda stage: repeat(lambda: None)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluations_in_idle_time_give_the_numbers_of_those_between_steps(options: dict[str, Any]) -> None:
    if "schedule" in options:
        options = {**options, "schedule": table(options["schedule"])}
    chunks = make_chunks(2, tie_embeddings=True)
    fixed = {"optimizer": OPTIMIZER, "deterministic": True, "clip_norm": 1.0, "placement": linear(2), **options}
    between, plain, params = evaluated(make_pipeline(chunks, **fixed))
    beside, steps, found = evaluated(make_pipeline(chunks, wrap_stage=slow, **fixed), in_idle_time=True)
    assert [each.step for each in beside] == [0, 0, 8, 8, 16, 16]
    equal = np.testing.assert_array_equal if fixed["deterministic"] else np.testing.assert_allclose
    for name in ("loss_sum", "weight"):
        equal([getattr(each, name) for each in beside], [getattr(each, name) for each in between])
    equal([each.loss for each in steps], [each.loss for each in plain])
    if fixed["deterministic"]:
        jax.tree.map(equal, found, params)
    assert sum(each.sums.idle_s.get(IdleReason.PIECE, 0.0) for each in steps) > 0


def test_in_idle_time_nothing_is_compiled_memory_is_foreseen_and_the_copy_is_freed() -> None:
    compiled: list[str] = []
    stages: list[Any] = []
    with make_pipeline(
        make_chunks(2), placement=linear(2), optimizer=OPTIMIZER, wrap_stage=lambda stage: stages.append(stage) or stage
    ) as pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0), evaluation=shapes(in_idle_time=True))
        forecast = [each.peak for each in pipeline.forecast]
        params = [
            sum(leaf.nbytes for leaf in jax.tree.leaves(stage.states[n].params)) for n, stage in enumerate(stages)
        ]
        state, first = pipeline.step(state, make_batch(0))
        first.result()
        held = [stage._meter._held for stage in stages]
        jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: compiled.append(name))
        try:
            found = [pipeline.evaluate(state, make_batch(7 + number)) for number in range(3)]
            assert eventually(lambda: all(stage._num_beside == 3 for stage in stages))
            copied = [stage._meter._held for stage in stages]
            state, metrics = pipeline.step(state, make_batch(1))
            assert [each.result().step for each in found] == [1, 1, 1]
        finally:
            jax.monitoring.clear_event_listeners()
        assert not [name for name in compiled if "backend_compile" in name]
        assert [now - before for now, before in zip(copied, held, strict=True)] == params
        assert all(peak <= most for peak, most in zip(metrics.result().peak_memory_bytes, forecast, strict=True))
        assert pipeline._running().evaluation.beside._copied() is None  # type: ignore[union-attr]
        assert [stage._meter._held for stage in stages] == held
        plain = pipeline.reordered()
    plain.init(jax.random.key(1))
    plain.prepare(make_batch(0), evaluation=shapes())
    alone = [each.peak for each in plain.forecast]
    assert all(a + p <= f < a + 2 * p for a, p, f in zip(alone, params, forecast, strict=True))
    plain.close()
    short = plain.reordered(options=RuntimeOptions(memory_limit=max(alone)))
    short.init(jax.random.key(1))
    with pytest.raises(ValueError, match=r"stage \d is predicted to need .*, and has"):
        short.prepare(make_batch(0), evaluation=shapes(in_idle_time=True))


def test_stages_without_idle_time_of_their_own_say_so() -> None:
    with make_pipeline(make_chunks(2), placement=linear(2), optimizer=OPTIMIZER, delay=1) as pipeline:
        pipeline.init(jax.random.key(1))
        with pytest.raises(ValueError, match="stages on which steps overlap hardly idle"):
            pipeline.prepare(make_batch(0), evaluation=shapes(in_idle_time=True))


def test_a_forward_that_fails_in_idle_time_names_the_evaluation() -> None:
    def failing(stage: Any) -> Any:
        launch = stage.launch

        def launched(step: int, task: Any) -> Any:
            if step >= BESIDE:
                raise MemoryError("no room for it")
            return launch(step, task)

        stage.launch = launched
        return stage

    with make_pipeline(make_chunks(2), placement=linear(2), optimizer=OPTIMIZER, wrap_stage=failing) as pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batch(0), evaluation=shapes(in_idle_time=True))
        state, _ = pipeline.step(state, make_batch(0))
        failed = pipeline.evaluate(state, make_batch(7))
        with pytest.raises(TaskFailed, match=r"evaluation after 1 steps: 0F0 on stage 0 failed: .*no room for it"):
            failed.result()
