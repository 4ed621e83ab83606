"""A pipeline trains exactly what the plain, unpipelined loop trains, whatever the order of its tasks."""

import threading
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import HINTS, Ordering
from rrfp_jax.core.dispatch import JUST_IN_TIME
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.microbatch_programs import MicrobatchPrograms
from rrfp_jax.programs.model_graph import mirrored
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.stage_threads import StageExecutor
from rrfp_jax.schedules import Placement, ScheduleRequest, ScheduleTable, build_schedule, linear, looped
from rrfp_jax.testing import AcceleratedStage, EmulatedAccelerator
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import VOCAB, plain_model

NUM_STEPS = 20
NUM_MICROBATCHES = 4
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)
CLIPPED = UpdateRules(clip_norm=1.0)
OPTIONS = RuntimeOptions(progress_deadline_s=60)


def make_batches(num_steps: int = NUM_STEPS) -> list[dict[str, np.ndarray]]:
    """Counting sequences, which a model learns quickly; microbatches differ in weight."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num_steps):
        start = rng.integers(0, VOCAB, (NUM_MICROBATCHES, 2, 1))
        sequence = ((start + np.arange(9)) % VOCAB).astype(np.int32)
        weights = (rng.random((NUM_MICROBATCHES, 2, 8)) < 0.8).astype(np.float32)
        batches.append({"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights})
    return batches


def make_model(*, tied: bool, layers_per_chunk: tuple[int, ...]) -> list[Chunk]:
    return plain_model(layers_per_chunk, tied=tied)


class Case:
    """One cut of a model, its compiled pipeline and what the plain loop makes of it."""

    def __init__(self, chunks: list[Any], placement: Placement) -> None:
        self.chunks, self.placement = chunks, placement
        self.batches = make_batches()
        self.base = Pipeline(chunks, placement=placement, optimizer=OPTIMIZER, updates=CLIPPED, options=OPTIONS)
        initial = jax.tree.map(np.array, self.base.params(self.base.init(jax.random.key(1))))
        self.expected = train_plainly(chunks, initial, OPTIMIZER, self.batches, clip_norm=CLIPPED.clip_norm)

    def table(self, name: str) -> ScheduleTable:
        stages = self.placement.num_stages
        return build_schedule(name, ScheduleRequest(num_stages=stages, num_microbatches=NUM_MICROBATCHES))

    def check(self, *, options: RuntimeOptions | None = None, **order: Any) -> None:
        with self.base.reordered(Ordering(**order), options=options) as pipeline:
            state = pipeline.init(jax.random.key(1))
            losses = []
            for batch in self.batches:
                state, metrics = pipeline.step(state, batch)
                losses.append(metrics)
            params = jax.tree.map(np.array, pipeline.params(state))
            assert_same_training([metrics.result().loss for metrics in losses], params, *self.expected)


@pytest.fixture(scope="module")
def tied_linear() -> Case:
    return Case(make_model(tied=True, layers_per_chunk=(1, 2, 0)), linear(3))


@pytest.fixture(scope="module")
def untied_looped() -> Case:
    return Case(make_model(tied=False, layers_per_chunk=(1, 1, 1, 1)), looped(2, 2))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("hint", [*HINTS, "schedule"])
@pytest.mark.parametrize("window", [1, 3, (4, 1, 2)])
def test_every_hint_on_a_linear_placement(tied_linear: Case, hint: str, window: Any) -> None:
    schedule = tied_linear.table("1f1b") if hint == "schedule" else None
    tied_linear.check(hint=hint, window=window, schedule=schedule, footprint=False if schedule else None)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_strict_tables_on_a_linear_placement(tied_linear: Case, name: str) -> None:
    tied_linear.check(consume="strict", schedule=tied_linear.table(name))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("hint", [*HINTS, "schedule"])
def test_every_hint_on_a_looped_placement(untied_looped: Case, hint: str) -> None:
    schedule = untied_looped.table("interleaved-1f1b") if hint == "schedule" else None
    untied_looped.check(hint=hint, window=2, schedule=schedule, footprint=False if schedule else None)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "1f1b-split", "zb-h1", "zb-h2", "zb-auto"])
def test_tables_with_foresight_on_a_linear_placement(tied_linear: Case, name: str) -> None:
    tied_linear.check(schedule=tied_linear.table(name))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "breadth-first", "interleaved-1f1b-split", "gis"])
def test_tables_with_foresight_on_a_looped_placement(untied_looped: Case, name: str) -> None:
    untied_looped.check(schedule=untied_looped.table(name))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "breadth-first"])
def test_strict_tables_on_a_looped_placement(untied_looped: Case, name: str) -> None:
    untied_looped.check(consume="strict", schedule=untied_looped.table(name))


def test_a_regression_with_default_arguments_is_what_a_plain_loop_makes_of_it() -> None:
    """As somebody writes it who tries the library for the first time; the gradients' norm is far from 1."""

    def layer(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["kernel"] + params["bias"])

    def make(name: str) -> Any:
        return lambda key: {name: {"kernel": jax.random.normal(key, (8, 8)), "bias": jnp.zeros(8)}}

    def first(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return layer(params["first"], leaves["x"])

    def second(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.sum((layer(params["second"], inputs) - leaves["y"]) ** 2), jnp.float32(len(inputs))

    chunks = [
        Chunk(name="first", init=make("first"), apply=first, leaves=("x",)),
        Chunk(name="second", init=make("second"), apply=second, leaves=("y",)),
    ]
    rng = np.random.default_rng(0)
    batches = [{"x": (x := rng.normal(size=(4, 16, 8)).astype(np.float32)), "y": np.sin(3 * x)} for _ in range(5)]
    with Pipeline(chunks, optimizer=optax.sgd(5e-2), placement=linear(2)) as pipeline:
        state = pipeline.init(jax.random.key(1))
        params = jax.tree.map(np.array, pipeline.params(state))
        losses, norms = [], []
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
            norms.append(metrics.result().grad_norm)
        trained = pipeline.params(state)

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            output = layer(params["second"], layer(params["first"], batch["x"]))
            return jnp.mean(jnp.sum((output - batch["y"]) ** 2, axis=-1))

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 5e-2 * g, params, grads)

    expected = []
    for batch in batches:
        value, params = step(params, batch)
        expected.append(float(value))
    assert min(norms) > 1.2  # clipping to 1 would show
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trained, params)


def on_accelerator(stage: StageExecutor) -> StageExecutor:
    """Tasks end a while after their programs have, so the next one is launched before."""
    return AcceleratedStage(stage, EmulatedAccelerator(launch_ms=0.1), lambda step, task: 0.5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap_stage", [None, on_accelerator])
@pytest.mark.parametrize("dispatch_ahead", [0, "certain", JUST_IN_TIME])
def test_tasks_handed_over_early_train_the_same_model(
    tied_linear: Case, untied_looped: Case, dispatch_ahead: int | str, wrap_stage: Any
) -> None:
    options = RuntimeOptions(dispatch_ahead=dispatch_ahead, wrap_stage=wrap_stage)
    tied_linear.check(hint="bf", window=3, options=options)
    untied_looped.check(hint="bfw", window=2, options=options)


def test_outputs_that_are_handed_over_at_the_launch_train_the_same_model(
    tied_linear: Case, untied_looped: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices that do not work in the host's memory."""
    monkeypatch.setattr("rrfp_jax.runtime.stage.is_on_host", lambda sharding: False)
    for dispatch_ahead in (0, JUST_IN_TIME):
        options = RuntimeOptions(dispatch_ahead=dispatch_ahead)
        tied_linear.check(hint="bf", window=3, options=options)
        untied_looped.check(hint="bfw", window=2, options=options)


def test_batch_leaves_are_on_the_devices_before_their_tasks(
    tied_linear: Case, untied_looped: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes there once, on a thread that neither launches nor waits for a task."""
    placed: list[str] = []
    given: list[Any] = []
    operands, place = MicrobatchPrograms._operands, MicrobatchPrograms.place

    def counting(self: MicrobatchPrograms, inputs: Any, leaves: dict[str, Any], *rest: int) -> Any:
        given.extend(leaves.values())
        return operands(self, inputs, leaves, *rest)

    def placing(self: MicrobatchPrograms, leaves: dict[str, Any]) -> Any:
        placed.extend([threading.current_thread().name] * len(leaves))
        return place(self, leaves)

    monkeypatch.setattr("rrfp_jax.runtime.stage.is_on_host", lambda sharding: False)
    monkeypatch.setattr(Future, "cancel", lambda future: False)  # a task takes other arrays if its copies are late
    monkeypatch.setattr(MicrobatchPrograms, "_operands", counting)
    monkeypatch.setattr(MicrobatchPrograms, "place", placing)
    for case, hint in ((tied_linear, "bf"), (untied_looped, "bfw")):
        given.clear()
        placed.clear()
        case.check(hint=hint, window=2, options=RuntimeOptions(dispatch_ahead=JUST_IN_TIME))
        assert len(given) == len(placed) == 3 * NUM_MICROBATCHES * NUM_STEPS
        assert all(isinstance(leaf, jax.Array) for leaf in given)
        assert {name.rpartition("-")[2] for name in placed} == {"leaves_0"}


def test_all_chunks_on_one_stage_share_the_tied_embedding() -> None:
    case = Case(make_model(tied=True, layers_per_chunk=(1, 1)), looped(1, 2))
    case.check(hint="bf-deep", window=2)


@pytest.mark.parametrize(("name", "layers_per_chunk"), [("chimera", (1, 1)), ("bitpipe", (0, 1, 1, 0))])
@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.one_in(2)
def test_bidirectional_tables_train_both_copies_as_one_model(
    name: str, layers_per_chunk: tuple[int, ...], consume: str
) -> None:
    chunks = mirrored(make_model(tied=True, layers_per_chunk=layers_per_chunk))
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES))
    batches = make_batches()
    ordering = Ordering(schedule=table, consume=consume)
    with Pipeline(chunks, optimizer=OPTIMIZER, ordering=ordering, options=OPTIONS) as pipeline:
        state = pipeline.init(jax.random.key(1))
        initial = jax.tree.map(np.array, pipeline.params(state))
        results = []
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        downwards = [span for span in results[0].result().timeline.spans if span.task.chunk == 0]
        assert {(span.stage, span.task.microbatch) for span in downwards} == {(0, -1), (0, 0), (0, 2)}
    expected = train_plainly(chunks[: len(layers_per_chunk)], initial, OPTIMIZER, batches)
    assert_same_training([metrics.result().loss for metrics in results], params, *expected)


def test_a_bidirectional_table_asks_for_both_copies() -> None:
    table = build_schedule("chimera", ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES))
    chunks = make_model(tied=False, layers_per_chunk=(1, 1, 1, 1))
    with pytest.raises(ValueError, match="mirrored"):
        Pipeline(chunks, optimizer=OPTIMIZER, ordering=Ordering(schedule=table, consume="strict"))
