"""Replicas that add up their gradients by messages train what the plain loop trains."""

import threading
from collections import Counter
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Message, MessageKind, Ordering
from rrfp_jax.core.dispatch import JUST_IN_TIME
from rrfp_jax.core.replicas import ReduceWay
from rrfp_jax.layout import Layout
from rrfp_jax.private.jax_names import compiler
from rrfp_jax.programs.model_graph import mirrored
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.stage_threads import Launched, StageExecutor
from rrfp_jax.schedules import Placement, ScheduleRequest, Task, TaskKind, build_schedule, linear, looped
from rrfp_jax.testing import AcceleratedStage, DelayedStage, EmulatedAccelerator
from rrfp_jax.testing.comparing import WrappedStage
from tests import pipelines, ragged
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import VOCAB, plain_model
from tests.runtime.logged_runs import replays_as_recorded

NUM_MICROBATCHES, NUM_STEPS = 4, 8


def on_accelerator(stage: StageExecutor) -> StageExecutor:
    """Tasks end a while after their programs have, so the next one is launched before."""
    return AcceleratedStage(stage, EmulatedAccelerator(launch_ms=0.1), lambda step, task: 0.5)


CASES: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "data 4": {"data": 4},
    "tied": {"data": 2, "tied": True},
    "tied, data 4, split": {"data": 4, "tied": True, "hint": "bfw"},
    "split": {"data": 2, "hint": "bfw"},
    "split table": {"data": 2, "schedule": "zb-h1"},
    "clipped": {"data": 2, "clip_norm": 0.5, "tied": True},
    "no agreement on norms": {"data": 2, "skip_nonfinite": False},
    "tensor 2": {"data": 2, "tensor": 2, "tied": True, "clip_norm": 0.5},
    "fsdp 2": {"data": 2, "mesh": {"fsdp": 2}, "clip_norm": 0.5},
    "handed over early": {"data": 2, "tied": True, "dispatch_ahead": JUST_IN_TIME, "wrap_stage": on_accelerator},
    "two chunks per stage": {"data": 2, "layers": (1, 1, 1, 0), "tied": True},
    "tied on one stage": {"data": 2, "layers": (1, 0), "num_stages": 1, "tied": True},
}


def make_batches(num_steps: int = NUM_STEPS, num_microbatches: int = NUM_MICROBATCHES) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num_steps):
        sequence = ((rng.integers(0, VOCAB, (num_microbatches, 2, 1)) + np.arange(9)) % VOCAB).astype(np.int32)
        weights = (rng.random((num_microbatches, 2, 8)) < 0.8).astype(np.float32)
        batches.append({"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights})
    return batches


def pipeline_of(*, tied: bool = False, layers: tuple[int, ...] = (1, 1), num_stages: int = 2, **options: Any) -> Any:
    if "schedule" in options:
        request = ScheduleRequest(num_stages=num_stages, num_microbatches=NUM_MICROBATCHES // options["data"])
        options["schedule"] = build_schedule(options["schedule"], request)
    placement = looped(num_stages, len(layers) // num_stages) if len(layers) > num_stages else linear(num_stages)
    return make_pipeline(
        plain_model(layers, tied=tied),
        placement=placement,
        optimizer=optax.adamw(3e-3, weight_decay=0.01),
        **{"reduce": "messages", "progress_deadline_s": 60, **options},
    )


def trained(pipeline: Any, batches: list[dict[str, np.ndarray]]) -> tuple[list[float], dict[str, Any], Any]:
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        initial = jax.tree.map(np.array, pipeline.params(state))
        losses = []
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics)
        return [metrics.result().loss for metrics in losses], jax.tree.map(np.array, pipeline.params(state)), initial


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_plain_loop(name: str) -> None:
    case, batches = CASES[name], make_batches()
    losses, params, initial = trained(pipeline_of(**case), batches)
    chunks = plain_model(case.get("layers", (1, 1)), tied=case.get("tied", False))
    optimizer = optax.adamw(3e-3, weight_decay=0.01)
    expected = train_plainly(chunks, initial, optimizer, batches, clip_norm=case.get("clip_norm"))
    assert_same_training(losses, params, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "tied, data 4, split", "tensor 2"])
def test_pieces_that_leave_at_the_launch_train_the_same_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that do not work in the host's memory."""
    monkeypatch.setattr("rrfp_jax.runtime.stage.is_on_host", lambda sharding: False)
    test_training_is_that_of_the_plain_loop(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("chimera", (1, 1)), ("bitpipe", (0, 1, 1, 0))])
def test_bidirectional_chunks_share_all_their_layers(name: str, layers: tuple[int, ...]) -> None:
    chunks = mirrored(plain_model(layers))
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=2))
    results = [
        trained(
            make_pipeline(
                chunks,
                optimizer=optax.adamw(3e-3),
                schedule=table,
                consume="strict",
                process=Process(Layout(num_stages=2, data=2)),
                reduce=way,
                deterministic=True,
            ),
            make_batches(),
        )
        for way in ReduceWay
    ]
    for losses, params, _ in results[1:]:
        assert losses == results[0][0]
        jax.tree.map(np.testing.assert_array_equal, params, results[0][1])


def random_delay(step: int, task: Task) -> float:
    """Up to two milliseconds, another for every task and step."""
    return float(np.random.default_rng((step, ord(task.kind), task.chunk, task.microbatch + 1)).uniform(0, 2e-3))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (4, 1), (2, 2)])
def test_bits_are_those_of_the_ordered_collective_in_any_order(data: int, tensor: int) -> None:
    """Norms are added up in another order than by the collective, so that nothing may be clipped here."""
    batches = make_batches()
    options = {"data": data, "tensor": tensor, "tied": True, "deterministic": True}
    losses, params, _ = trained(pipeline_of(**options, reduce="collective", hint="bf"), batches)
    messages = pipeline_of(**options)
    delayed = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, random_delay))
    for order, runtime in [(Ordering(hint="bf"), None), (Ordering(hint="fb", window=1), None), (Ordering(), delayed)]:
        others = trained(messages.reordered(order, options=runtime), batches)
        assert others[0] == losses
        jax.tree.map(np.testing.assert_array_equal, others[1], params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "orders",
    [
        [Ordering(hint="bf"), Ordering(hint="fb", window=1), Ordering(hint="bf", window=2)],
        [Ordering(hint="bfw"), Ordering(hint="bfw", window=2)],
    ],
    ids=["fused", "split"],
)
def test_clipped_bits_do_not_depend_on_the_order(orders: list[Ordering]) -> None:
    """With the same form of the backward: XLA compiles a fused one otherwise than two halves."""
    batches, bits = make_batches(), []
    messages = pipeline_of(data=4, tied=True, deterministic=True, clip_norm=0.1)
    for order in orders:
        runtime = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, random_delay))
        bits.append(trained(messages.reordered(order, options=runtime), batches))
    for other in bits[1:]:
        assert other[0] == bits[0][0]
        jax.tree.map(np.testing.assert_array_equal, other[1], bits[0][1])


def test_a_step_that_is_not_finite_is_left_out_everywhere() -> None:
    batches = make_batches(4)
    spoilt = {**batches[1], "weights": batches[1]["weights"].copy()}
    spoilt["weights"][3, 0, 0] = np.inf
    losses, params, _ = trained(pipeline_of(data=2, tied=True), [batches[0], spoilt, *batches[2:]])
    expected, expected_params, _ = trained(pipeline_of(data=2, tied=True), [batches[0], *batches[2:]])
    assert not np.isfinite(losses[1])
    assert [losses[0], *losses[2:]] == expected
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_replicas_without_any_image_add_zeros(hint: str) -> None:
    """Also in steps in which all replicas, or one of them, have no microbatch for an encoder."""
    steps = ragged.make_steps(6, 4)
    pipeline = make_pipeline(
        ragged.CHUNKS,
        placement=Placement((0, 1, 0, 1, 1)),
        edges=ragged.EDGES,
        optimizer=optax.adam(1e-2),
        reduce="messages",
        data=2,
        hint=hint,
    )
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        pipeline.prepare(ragged.as_batch(steps[0]), buckets=ragged.all_buckets())
        results = []
        for microbatches in steps:
            state, metrics = pipeline.step(state, ragged.as_batch(microbatches))
            results.append(metrics)
        losses, params = [each.result().loss for each in results], jax.tree.map(np.array, pipeline.params(state))
    expected_losses, norms, expected = ragged.train_plainly(initial, optax.adam(1e-2), steps)
    assert_same_training(losses, params, expected_losses, expected)
    np.testing.assert_allclose([each.result().grad_norm for each in results], norms, rtol=1e-5)


def test_nothing_compiles_after_the_first_step_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, compiled, counts = make_batches(3), [], []
    with pipeline_of(data=2, tied=True) as pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(batches[0], progress=lambda done, total: counts.append((done, total)))
        whole = compiler.compile_or_get_cached
        monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *a, **k: compiled.append(a) or whole(*a, **k))
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
        metrics.result()
    assert not compiled
    assert counts[-1][0] == counts[-1][1]


def test_stages_hold_no_more_than_was_forecast() -> None:
    batches = make_batches(3)
    with pipeline_of(data=2, tied=True, hint="bf") as pipeline:
        state = pipeline.init(jax.random.key(0))
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
        peaks = metrics.result().peak_memory_bytes
        forecast = [each.peak for each in pipeline.forecast]
    assert all(0 < peak <= most for peak, most in zip(peaks, forecast, strict=True))


class LastStage(WrappedStage):
    """Chunk 0 of replica 0 begins no backward before ``num_pieces`` pieces of others have come."""

    def __init__(self, inner: StageExecutor, num_pieces: int) -> None:
        super().__init__(inner)
        self._num_pieces = num_pieces
        self._come: Counter[int] = Counter()
        self._changed = threading.Condition()

    def accept(self, step: int, message: Message, payload: Any) -> None:
        super().accept(step, message, payload)
        with self._changed:
            self._come[step] += message.kind is MessageKind.PIECE
            self._changed.notify_all()

    def launch(self, step: int, task: Task) -> Launched:
        if task.kind is TaskKind.B and task.chunk == 0:
            with self._changed:
                assert self._changed.wait_for(lambda: self._come[step] == self._num_pieces, timeout=60)
        return super().launch(step, task)


EARLY: dict[str, dict[str, Any]] = {
    "tied": {"data": 2, "tied": True},
    "three stages": {"data": 2, "layers": (1, 1, 1), "num_stages": 3},
    "data 3": {"data": 3, "tied": True},
    "fsdp 2": {"data": 2, "mesh": {"fsdp": 2}},
    "window 1": {"data": 2, "window": 1},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", EARLY)
def test_pieces_that_come_before_the_first_backward_are_forecast(name: str) -> None:
    """Beside them the forecast has no more than an output on its way out, and gradients that may wait."""
    case = EARLY[name]
    num_pieces = case["data"] * (2 if case.get("tied") else 1) - 1
    late = partial(LastStage, num_pieces=num_pieces)
    with pipeline_of(hint="bf", wrap_stage=late, **case) as pipeline:
        state = pipeline.init(jax.random.key(0))
        for batch in make_batches(2, 2 * case["data"]):
            state, metrics = pipeline.step(state, batch)
            peaks, forecast = metrics.result().peak_memory_bytes, [each.peak for each in pipeline.forecast]
            assert all(0 < peak <= most for peak, most in zip(peaks, forecast, strict=True))
            sizes = pipeline.chunk_sizes[0]
            uncounted = sizes.outputs_bytes + pipeline.forecast[0].window * sizes.output_grads_bytes
            assert peaks[0] >= forecast[0] - uncounted


def test_every_stage_can_be_replayed() -> None:
    with pipeline_of(data=2, tied=True) as pipeline:
        state = pipeline.init(jax.random.key(0))
        for batch in make_batches(2):
            state, metrics = pipeline.step(state, batch)
        metrics.result()
        assert all(replays_as_recorded(log) for log in pipeline.runtime.logs().values())


def test_units_that_cannot_add_up_by_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="reduce is 'letters': give auto, messages, collective"):
        UpdateRules(reduce="letters")
    meshes = Process(Layout(num_stages=2, data=2, mesh=({"tensor": 2}, {"fsdp": 2})))
    with pytest.raises(ValueError, match="stages 0 and 1, which share layers, have different meshes"):
        pipelines.make_pipeline(
            plain_model((1, 1), tied=True),
            placement=linear(2),
            optimizer=optax.sgd(0.1),
            reduce="messages",
            process=meshes,
        )
