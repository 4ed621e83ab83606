"""What a user hands to a pipeline by mistake is refused in one sentence, and the pipeline goes on."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax import (
    Chunk,
    Edge,
    Layout,
    Op,
    Ordering,
    Placement,
    RuntimeOptions,
    ScheduleRequest,
    ScheduleTable,
    TaskKind,
    UpdateRules,
    build_schedule,
    freeze,
    linear,
    looped,
    microbatch_key,
    mirrored,
)
from rrfp_jax.models import ExpertsConfig, LanguageModelConfig
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.operations import recompute
from rrfp_jax.runtime.process import Process
from tests.test_pipeline import CHUNKS, layer, loss_chunk, make_batch, make_pipeline

OPTIMIZER = optax.adam(0.1)


@pytest.fixture(scope="module")
def base() -> Iterator[Pipeline]:
    with make_pipeline(optimizer=OPTIMIZER) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def stepped(base: Pipeline) -> Iterator[list[Any]]:
    """A pipeline and its state after a step, which a test must leave usable."""
    with base.reordered() as pipeline:
        state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), make_batch())
        metrics.result()
        held = [pipeline, state]
        yield held
        assert np.isfinite(pipeline.step(held[1], make_batch())[1].result().loss)


def refused(call: Callable[[], Any], message: str) -> None:
    """Whether it ends in one sentence of a reasonable length."""
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# -- states ------------------------------------------------------------------------------------------------------------


def test_states_of_other_pipelines_and_of_earlier_starts_are_refused(base: Pipeline) -> None:
    with base.reordered() as pipeline, base.reordered() as other:
        first = pipeline.init(jax.random.key(0))
        state, strange = pipeline.init(jax.random.key(1)), other.init(jax.random.key(0))
        for each in (first, strange):
            refused(lambda each=each: pipeline.step(each, make_batch()), "of another pipeline, or of an earlier init")
            refused(lambda each=each: pipeline.params(each), "of another pipeline")
        state, _ = pipeline.step(state, make_batch())
        strange, _ = other.step(strange, make_batch())
        refused(lambda: pipeline.evaluate(strange, make_batch()), "of another pipeline")
        pipeline.step(state, make_batch())[1].result()
        other.step(strange, make_batch())[1].result()


@pytest.mark.parametrize("state", [None, {}, 1, "state"])
def test_what_is_no_state_is_refused(stepped: list[Any], state: Any) -> None:
    refused(lambda: stepped[0].step(state, make_batch()), r"state is .*\(\w+\): give the PipelineState that")


def restored(base: Pipeline, change: Callable[[list[Any]], Any], step: Any = 3) -> float:
    """The loss of a step after states that a pipeline had are changed and restored; what is refused loses nothing."""
    with base.reordered() as pipeline:
        key = jax.random.key(0)
        pipeline_state = pipeline.init(key)
        states = [state for _, state in pipeline.chunk_states(pipeline_state)]
        try:
            state = pipeline.restore(change(states), step)
        except ValueError:
            state = pipeline.init(key)
            assert np.isfinite(pipeline.step(state, make_batch())[1].result().loss)
            raise
        assert state.step == step
        return pipeline.step(state, make_batch())[1].result().loss


@pytest.mark.parametrize("step", [-5, "3", None, 2**40, True, 2.0], ids=repr)
def test_a_step_that_is_none_is_not_restored(base: Pipeline, step: Any) -> None:
    refused(lambda: restored(base, lambda states: states, step), "step is .*: give the number of steps done, from 0 to")


def with_params(**params: Any) -> Callable[[list[ChunkState]], list[ChunkState]]:
    def change(states: list[ChunkState]) -> list[ChunkState]:
        states[0].params |= {f"layers.{name[1:]}": value for name, value in params.items()}
        return states

    return change


def with_optimizer_state(optimizer: Any) -> Callable[[list[ChunkState]], list[ChunkState]]:
    def change(states: list[ChunkState]) -> list[ChunkState]:
        states[1].optimizer_state = () if optimizer is None else (optimizer.init(states[1].params),)
        return states

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states[:1], "1 states are given, and the pipeline has 2"),
        (lambda states: None, "1 states are given"),
        (
            lambda states: list(enumerate(states)),
            r"states\[0\], for chunk 0 \(layer 0\), is \(0, .*give the Chunk",
        ),
        (lambda states: states[::-1], r"has no \['layers.0'\] in its params"),
        (with_params(_1=jnp.zeros(3)), r"has an unknown \['layers.1'\] in its params"),
        (with_params(_0=jnp.zeros((5, 4))), r"float32\[5,4\] in its params as .* where float32\[4,4\] is expected"),
        (with_params(_0=jnp.zeros((4, 4), jnp.bfloat16)), r"bfloat16\[4,4\] .* where float32\[4,4\] is expected"),
        (with_params(_0=0.5), r"has 0.5 \(float\) in its params as .*give an array"),
        (with_params(_0=jax.ShapeDtypeStruct((4, 4), jnp.float32)), "has a shape alone in its params"),
        (with_optimizer_state(None), r"states\[1\], for chunk 1 \(loss\), has no .*count in its optimizer_state"),
        (with_optimizer_state(optax.sgd(0.1)), "count in its optimizer_state"),
    ],
)
def test_states_that_do_not_fit_are_refused_before_any_is_taken(base: Pipeline, change: Any, message: str) -> None:
    refused(lambda: restored(base, change), message)


def test_a_deleted_array_is_named(base: Pipeline) -> None:
    def change(states: list[ChunkState]) -> list[ChunkState]:
        states[0].params["layers.0"].delete()
        return states

    refused(lambda: restored(base, change), "has a deleted array in its params")


def test_states_may_lie_anywhere(base: Pipeline) -> None:
    expected = restored(base, lambda states: states)

    def moved(states: list[ChunkState]) -> list[ChunkState]:
        states[0].params = {name: np.asarray(value) for name, value in states[0].params.items()}
        states[1].params = jax.device_put(states[1].params, jax.devices()[3])
        return states

    assert restored(base, moved) == expected


# -- batches -----------------------------------------------------------------------------------------------------------


def deleted() -> Any:
    x = jnp.asarray(make_batch()["x"])
    x.delete()
    return x


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: None, "batch is None .*: give a dictionary"),
        (lambda: [make_batch()], "give a dictionary from the names of leaves"),
        (lambda: {"x": deleted()}, "batch leaf 'x' is a deleted array"),
        (lambda: {"x": [*make_batch()["x"][:2], deleted()]}, "microbatch 2 of batch leaf 'x' is a deleted array"),
        (lambda: {"x": jax.random.split(jax.random.key(0), 3)}, "batch leaf 'x' holds typed random keys"),
        (lambda: {"x": np.ma.masked_array(make_batch()["x"], make_batch()["x"] > 0)}, "'x' is a masked array"),
    ],
)
def test_batches_that_are_none_are_refused_by_leaf(stepped: list[Any], batch: Any, message: str) -> None:
    refused(lambda: stepped[0].step(stepped[1], batch()), message)


@pytest.mark.parametrize("trace", [jax.jit, jax.grad, jax.vmap, jax.make_jaxpr, jax.checkpoint])
def test_stepping_in_what_jax_traces_is_refused(stepped: list[Any], trace: Any) -> None:
    pipeline, state = stepped
    x = make_batch()["x"]
    inputs = np.float32(1) if trace is jax.grad else x
    for batch in (lambda value: {"x": value * x}, lambda value: make_batch()):
        refused(
            lambda batch=batch: trace(lambda value: pipeline.step(state, batch(value))[1].result().loss)(inputs),
            "in a function that JAX traces.*outside of jit, grad and vmap",
        )


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ([(9, 0)], "absent has chunk 9 with microbatch 0: there are 2 chunks and 3 microbatches"),
        ([(0, 9)], "absent has chunk 0 with microbatch 9"),
        ([3], r"absent has 3 \(int\): give pairs"),
        (["ab"], "absent has 'ab'"),
    ],
)
def test_pairs_that_do_not_exist_cannot_be_absent(stepped: list[Any], absent: Any, message: str) -> None:
    refused(lambda: stepped[0].step(stepped[1], make_batch(), absent=absent), message)


# -- keys, chunks, names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [0, None, "0", np.zeros(2, np.uint32), jnp.zeros(2)], ids=repr)
def test_what_is_no_key_is_refused(key: Any) -> None:
    refused(lambda: make_pipeline().init(key), r"key is .*: give a random key, such as jax.random.key\(0\)")


def test_several_keys_are_refused() -> None:
    refused(lambda: make_pipeline().init(jax.random.split(jax.random.key(0))), "give a single one")


def apply_with(compute: Callable[[Any, Any, Any], Any]) -> Chunk:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return compute(params["layers.0"], leaves, key)

    return Chunk(name="layer 0", init=CHUNKS[0].init, apply=apply, leaves=("x",))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (
            apply_with(lambda w, leaves, key: leaves["x"] @ w + jax.random.normal(key, (4,))),
            "it reads `key`, which is None: give the chunk uses_key=True",
        ),
        (apply_with(lambda w, leaves, key: leaves["z"] @ w), "name 'z' in `leaves` if it is a leaf of the batch"),
        (
            apply_with(lambda w, leaves, key: jax.random.key(0)),
            r"typed random keys, key<fry>\[\], which cannot",
        ),
        (apply_with(lambda w, leaves, key: {"a": jax.random.split(jax.random.key(0))}), r"key<fry>\[2\] at \['a'\]"),
    ],
)
def test_what_a_chunk_forgot_is_said(chunk: Chunk, message: str) -> None:
    pipeline = make_pipeline([chunk, loss_chunk(1)])
    state = pipeline.init(jax.random.key(0))
    refused(lambda: pipeline.step(state, make_batch()), rf"chunk 0 \(layer 0\) cannot be applied.*{message}")


def test_random_keys_in_the_optimizer_state_are_refused() -> None:
    keyed = optax.GradientTransformation(lambda params: jax.random.key(0), lambda g, state, params=None: (g, state))
    refused(lambda: make_pipeline(optimizer=keyed).init(jax.random.key(0)), "typed random keys.*jax.random.key_data")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frozen": {"layers.9"}}, "freezes 'layers.9', but its layers are layers.0"),
        ({"shared": {"layers.9"}}, "shares 'layers.9', but its layers are layers.0"),
        ({"optional_leaves": {"z"}}, "optional_leaves of chunk 'layer 0' has 'z', which it does not read"),
        ({"leaf_orders": {"z": np.arange}}, "leaf_orders of chunk 'layer 0' has 'z'"),
    ],
)
def test_names_that_a_chunk_does_not_have_are_refused(fields: dict[str, Any], message: str) -> None:
    def start() -> None:
        pipeline = make_pipeline([apply_of(CHUNKS[0], **fields), loss_chunk(1)])
        pipeline.step(pipeline.init(jax.random.key(0)), make_batch())

    refused(start, message)


def apply_of(chunk: Chunk, **fields: Any) -> Chunk:
    return Chunk(name=chunk.name, init=chunk.init, apply=chunk.apply, leaves=chunk.leaves, **fields)


# -- types -------------------------------------------------------------------------------------------------------------

TABLE = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=3))


def pipeline_with(**options: Any) -> Any:
    return lambda: Pipeline(**{"chunks": CHUNKS, "placement": linear(2), "optimizer": OPTIMIZER, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (pipeline_with(chunks=3), "chunks is 3"),
        (pipeline_with(chunks=[layer]), r"chunks is \[<function.*give a list of Chunks"),
        (pipeline_with(chunks=(each for each in "ab")), "give a list of Chunks"),
        (pipeline_with(placement=2), r"placement is 2 \(int\): give a Placement such as linear\(2\)"),
        (pipeline_with(placement=[0, 1]), r"placement is \[0, 1\] \(list\): give a Placement"),
        (pipeline_with(optimizer=None), "optimizer is None"),
        (pipeline_with(optimizer=optax.adam), "optimizer is <function adam.*such as optax.adamw"),
        (pipeline_with(ordering="bf"), r"ordering is 'bf' \(str\): give an Ordering"),
        (pipeline_with(updates={}), "updates is {}"),
        (pipeline_with(options={}), "options is {}"),
        (pipeline_with(process=2), "process is 2"),
        (pipeline_with(process=Layout(num_stages=2)), "process is Layout.*give a Process or None"),
        (pipeline_with(edges="ab"), "edges is 'ab'"),
        (pipeline_with(edges=[(0, 1)]), r"edges is \[\(0, 1\)\] \(list\): give a list of Edges"),
        (pipeline_with(edges=[Edge("0", 1)]), "edge '0' -> 1 does not name chunks"),
        (pipeline_with(seed="a"), "seed is 'a'"),
        (pipeline_with(seed=1.5), "seed is 1.5"),
        (pipeline_with(seed=2**70), "does not fit 32 bits"),
        (pipeline_with(remat=3), "remat is 3"),
        (pipeline_with(trains="no"), "trains is 'no'.*True or False"),
        (lambda: make_pipeline().reordered("bf"), "ordering is 'bf'"),
        (lambda: Ordering(schedule="1f1b"), "schedule is '1f1b'.*as build_schedule makes it"),
        (lambda: Ordering(window=2.5), "window is 2.5"),
        (lambda: Ordering(window=True), "window is True"),
        (lambda: Ordering(hint=3), "hint is 3"),
        (lambda: Ordering(ops="C"), "ops is 'C'"),
        (lambda: Ordering(foresight="yes"), "foresight is 'yes'"),
        (lambda: UpdateRules(clip_norm="1"), "clip_norm is '1'"),
        (lambda: UpdateRules(skip_nonfinite=None), "skip_nonfinite is None"),
        (lambda: RuntimeOptions(memory_limit=1.5e9), "memory_limit is 1500000000.0"),
        (lambda: RuntimeOptions(progress_deadline_s="60"), "progress_deadline_s is '60'"),
        (lambda: RuntimeOptions(log_steps=1.5), "log_steps is 1.5"),
        (lambda: RuntimeOptions(wrap_stage=3), "wrap_stage is 3"),
        (lambda: Layout(num_stages="2"), "num_stages is '2'"),
        (lambda: Layout(num_stages=2.0), "num_stages is 2.0"),
        (lambda: Layout(num_stages=10**12), "num_stages is 1000000000000: give at most 16384"),
        (lambda: Layout(num_stages=2, mesh={"tensor": "2"}), "mesh is {'tensor': '2'}"),
        (lambda: Process("2"), "layout is '2'"),
        (lambda: linear(2.0), "num_stages is 2.0"),
        (lambda: linear(10**12), "more than 1,048,576 chunks"),
        (lambda: looped(2, None), "chunks_per_stage is None"),
        (lambda: Placement(2), "stage_of_chunk is 2"),
        (lambda: Placement((0, 10**12)), "leaves stages"),
        (lambda: apply_of(CHUNKS[0], shared="layers.0"), "shared is 'layers.0'.*a set of texts"),
        (lambda: Chunk(name="a", init=CHUNKS[0].init, apply=CHUNKS[0].apply, leaves="x"), "leaves is 'x'"),
        (lambda: Chunk(name="a", init={}, apply=CHUNKS[0].apply), "init is {}"),
        (lambda: Op(3), "letter is 3"),
        (lambda: Op("O", after=3), "after is"),
        (lambda: Op("O", after="F", lead=1.5), "lead is 1.5"),
        (lambda: recompute("all"), "part is 'all'"),
        (lambda: ScheduleRequest(num_stages="2", num_microbatches=3), "num_stages is '2'"),
        (lambda: build_schedule("1f1b", {}), "request is {}"),
        (lambda: ScheduleRequest(num_stages=2, num_microbatches=3, comm_ms=float("nan")), "must not be negative"),
        (lambda: ScheduleRequest(num_stages=2, num_microbatches=3, memory_limit=-1.0), "memory_limit is -1.0"),
        (lambda: ScheduleTable("a", TABLE.placement, TABLE.graph, rows=3), "rows is 3"),
        (lambda: EvaluationShapes(buckets=[], batches="1"), "batches is '1'"),
        (lambda: EvaluationShapes(buckets=3), "buckets is 3"),
        (lambda: Process(Layout(num_stages=2), patience_s=float("nan")), "patience_s is nan"),
        (lambda: freeze(3, ["lower"]), "chunks is 3"),
        (lambda: freeze(CHUNKS, [3]), r"the layers to freeze are given as \[3\] .*: give a list of patterns"),
        (lambda: mirrored(["a"]), r"chunks is \['a'\]"),
        (lambda: microbatch_key(0, -1, 0), "step is -1"),
        (lambda: microbatch_key(0, 0, 2.5), "microbatch is 2.5"),
        (lambda: TaskKind(3), "3 is not a kind of task"),
        (
            lambda: LanguageModelConfig(vocab_size=9, hidden=8, num_layers=2.5, num_heads=2, mlp_dim=8),
            "num_layers is 2.5",
        ),
        (lambda: ExpertsConfig(num_experts=4, experts_per_token="2"), "experts_per_token is '2'"),
    ],
)
def test_wrong_types_end_in_one_sentence(call: Callable[[], Any], message: str) -> None:
    refused(call, message)


def test_a_schedule_of_learning_rates_that_raises_is_refused() -> None:
    optimizer = optax.adam(lambda step: 1 / 0)
    refused(lambda: make_pipeline(optimizer=optimizer).init(jax.random.key(0)), "the optimizer cannot be called.*zero")


def test_lists_and_sets_stand_for_tuples_and_frozen_sets() -> None:
    chunk = apply_of(CHUNKS[0], shared=["layers.0"])
    assert (chunk.shared, chunk.leaves) == (frozenset({"layers.0"}), ("x",))
    assert Placement([0, np.int64(1)]) == Placement((0, 1))
    assert Ordering(schedule=TABLE, consume="strict", window=[2, 2]).window == (2, 2)


@pytest.mark.parametrize("buckets", [3, [3], [{"x": 1}], []], ids=repr)
def test_buckets_that_are_none_are_refused(buckets: Any) -> None:
    pipeline = make_pipeline()
    pipeline.init(jax.random.key(0))
    with pytest.raises(ValueError, match="bucket"):
        pipeline.prepare(make_batch(), buckets=buckets)


def test_an_executor_that_is_none_is_refused() -> None:
    pipeline = make_pipeline(wrap_stage=lambda stage: None)
    state = pipeline.init(jax.random.key(0))
    refused(lambda: pipeline.step(state, make_batch()), "wrap_stage returns None .* for stage 0: return the executor")


def test_a_state_made_by_hand_may_stand_for_the_last_one(stepped: list[Any]) -> None:
    pipeline, state = stepped
    stepped[1], metrics = pipeline.step(PipelineState(state.step), make_batch())
    assert np.isfinite(metrics.result().loss)


# -- settings of JAX ---------------------------------------------------------------------------------------------------


def test_without_compiling_nothing_is_made_and_the_setting_is_named(base: Pipeline) -> None:
    with jax.disable_jit():
        refused(make_pipeline, "jax_disable_jit is on.*unset JAX_DISABLE_JIT")
        refused(lambda: base.reordered().init(jax.random.key(0)), "jax_disable_jit is on")


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.adamw(optax.cosine_decay_schedule(0.1, 5))])
def test_strict_promotions_are_for_code_of_the_users_and_not_for_optax(optimizer: Any) -> None:
    def losses() -> list[float]:
        with make_pipeline(optimizer=optimizer, clip_norm=1.0) as pipeline:
            state, found = pipeline.init(jax.random.key(0)), []
            for _ in range(3):
                state, metrics = pipeline.step(state, make_batch())
                found.append(metrics.result().loss)
        return found

    expected = losses()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert losses() == expected


def test_a_window_in_bytes_goes_with_recompute_and_microbatches_of_two_sizes() -> None:
    x = make_batch()["x"]
    batch = {"x": [x[0], x[1][:1], x[2]]}
    losses = []
    for ordering in (Ordering(), Ordering(ops=(recompute(),), window="4KiB")):
        with Pipeline(CHUNKS, placement=linear(2), optimizer=OPTIMIZER, ordering=ordering) as pipeline:
            losses.append(pipeline.step(pipeline.init(jax.random.key(0)), batch)[1].result().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
