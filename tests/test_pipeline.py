"""What a pipeline does with good and bad input beyond training right: states, skips, refusals, failures."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.layout import Layout
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.runtime import NoProgress, PipelineClosed, TaskFailed
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear
from tests import pipelines
from tests.runtime.logged_runs import replays_as_recorded

NUM_MICROBATCHES = 3


def layer(index: int, *, before: Any = lambda value: value) -> Chunk:
    def init(key: jax.Array) -> dict[str, Any]:
        return {f"layers.{index}": jax.random.normal(jax.random.fold_in(key, index), (4, 4)) * 0.5}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.tanh(before(inputs if index else leaves["x"]) @ params[f"layers.{index}"])

    return Chunk(name=f"layer {index}", init=init, apply=apply, leaves=() if index else ("x",))


def loss_chunk(index: int) -> Chunk:
    inner = layer(index)

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.sum(inner.apply(params, inputs, {}, key=None) ** 2), jnp.float32(2)

    return Chunk(name="loss", init=inner.init, apply=apply)


CHUNKS = [layer(0), loss_chunk(1)]


def make_pipeline(chunks: list[Chunk] = CHUNKS, **options: Any) -> Pipeline:
    defaults = {"placement": linear(len(chunks)), "optimizer": optax.sgd(0.1), "progress_deadline_s": 60}
    return pipelines.make_pipeline(chunks, **{**defaults, **options})


def make_batch(fill: float | None = None) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(NUM_MICROBATCHES, 2, 4)).astype(np.float32)
    if fill is not None:
        x[1, 0, 0] = fill
    return {"x": x}


@pytest.fixture(scope="module")
def base() -> Pipeline:
    """Holds what the tests compile."""
    return make_pipeline()


@pytest.fixture
def pipeline(base: Pipeline) -> Iterator[Pipeline]:
    with base.reordered() as pipeline:
        yield pipeline


def test_a_step_that_is_not_finite_is_skipped_on_all_stages(pipeline: Pipeline) -> None:
    state = pipeline.init(jax.random.key(0))
    before = jax.tree.map(np.array, pipeline.params(state))
    state, metrics = pipeline.step(state, make_batch(np.nan))
    assert metrics.result().skipped
    after = jax.tree.map(np.array, pipeline.params(state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, metrics = pipeline.step(state, make_batch())
    assert not metrics.result().skipped
    assert np.isfinite(metrics.result().loss)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before, pipeline.params(state))), strict=True))


def test_stages_need_not_agree_on_norms_without_clipping_and_skipping(pipeline: Pipeline) -> None:
    with make_pipeline(skip_nonfinite=False) as free:
        losses = []
        for each in (free, pipeline):
            state = each.init(jax.random.key(0))
            for _ in range(3):
                state, metrics = each.step(state, make_batch())
            losses.append(metrics.result())
    assert losses[0].loss == losses[1].loss
    assert losses[0].grad_norm is None
    assert losses[1].grad_norm > 0


def test_a_state_can_be_used_once(pipeline: Pipeline) -> None:
    state = pipeline.init(jax.random.key(0))
    pipeline.step(state, make_batch())
    with pytest.raises(ValueError, match="consumed by step 0"):
        pipeline.step(state, make_batch())


def test_stepping_before_init_is_refused(pipeline: Pipeline) -> None:
    from rrfp_jax.pipeline import PipelineState

    with pytest.raises(RuntimeError, match="call init first"):
        pipeline.step(PipelineState(0), make_batch())


def test_batches_of_another_shape_are_refused_and_the_run_goes_on(pipeline: Pipeline) -> None:
    state = pipeline.init(jax.random.key(0))
    state, _ = pipeline.step(state, make_batch())
    with pytest.raises(ValueError, match=r"compiled for x float32\[2,4\]: pad every batch to one shape"):
        pipeline.step(state, {"x": make_batch()["x"][:, :1]})
    with pytest.raises(ValueError, match="the batch has 2 microbatches, and the pipeline was prepared for 3"):
        pipeline.step(state, {"x": make_batch()["x"][:2]})
    with pytest.raises(ValueError, match="lacks x"):
        pipeline.step(state, {"y": make_batch()["x"]})
    state, metrics = pipeline.step(state, make_batch())
    assert metrics.result().step == 1


def test_programs_are_not_compiled_again_after_the_first_step(pipeline: Pipeline) -> None:
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, make_batch())
    metrics.result()
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled: list[str] = []
        patch.setattr("jax._src.compiler.compile_or_get_cached", lambda *a, **k: compiled.append(str(a[1])))
        for _ in range(3):
            state, metrics = pipeline.step(state, make_batch())
            metrics.result()
    assert compiled == []


def test_programs_are_traced_by_the_settings_of_the_thread_that_steps() -> None:
    """Though other threads trace them: on a GPU a lost precision would change every product."""
    seen = set()

    def note(value: Any) -> Any:
        seen.add((jax.config.jax_default_matmul_precision, jax.config.jax_numpy_rank_promotion))  # type: ignore[attr-defined]
        return value

    with make_pipeline([layer(0, before=note), loss_chunk(1)]) as pipeline:
        state = pipeline.init(jax.random.key(0))
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("raise"):
            pipeline.step(state, make_batch())[1].result()
    assert seen == {("highest", "raise")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))}, "clip_norm"),
        ({"window": 0}, "at least 1 microbatch"),
        ({"window": (4, 4, 4)}, "3 numbers for 2 stages"),
        ({"hint": "fastest"}, "unknown: choose one of bf"),
        ({"consume": "strict"}, "needs a schedule"),
        ({"placement": linear(3)}, "cut the model into 3 chunks"),
        ({"clip_norm": -1.0}, "positive number"),
        ({"log_steps": 0}, "at least 1 step"),
        ({"seed": -1}, "32 bits"),
        ({"remat": "half"}, "remat is 'half'"),
        ({"dispatch_ahead": -1}, r"dispatch_ahead is -1: give auto, just-in-time .*, certain, pairs, or 0"),
        ({"dispatch_ahead": "later"}, "dispatch_ahead is 'later': give auto"),
        ({"progress_deadline_s": float("nan")}, "progress_deadline_s is nan: give a positive number of seconds"),
        ({"window": "512MX"}, "window is '512MX', which is no size"),
        ({"memory_limit": "much"}, "memory_limit is 'much', which is no size"),
        ({"memory_limit": 0}, "memory_limit is 0: give at least 1 byte"),
        ({"group_protocol": "vote"}, "group_protocol is 'vote': give leader, propose"),
        ({"process": Process(Layout(num_stages=3))}, "3 stages x data 1 x tensor 1.* but the pipeline has 2 stages"),
    ],
)
def test_bad_options_are_refused_with_a_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pipeline(**options).init(jax.random.key(0))


def test_devices_are_as_many_as_the_layout_has() -> None:
    with pytest.raises(ValueError, match="1 devices are given for 2 stages"):
        Process(Layout(num_stages=2), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"8 devices .* tensor 3 on 1 process multiply to 6 for each: give axes that"):
        Process(Layout(num_stages=2, tensor=3), num_devices=8)


def test_stages_share_the_devices_that_there_are() -> None:
    devices = Process.alone(12).devices
    assert [jax.devices().index(device) for device in devices] == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]
    assert Process.alone(3).devices == tuple(jax.devices()[:3])


def test_a_table_that_exceeds_the_window_is_refused_under_strict() -> None:
    table = build_schedule("gpipe", ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES))
    with pytest.raises(ValueError, match="raise the window to 3"):
        make_pipeline(schedule=table, consume="strict", window=2)


def test_a_table_for_other_microbatches_is_refused() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=8))
    pipeline = make_pipeline(schedule=table, consume="strict")
    state = pipeline.init(jax.random.key(0))
    with pytest.raises(ValueError, match="8 microbatches"):
        pipeline.step(state, make_batch())


class Host:
    """A function of the host that the first chunk's forward calls; another one for each test, compiled once."""

    def __init__(self) -> None:
        self.call: Any = np.asarray
        self._base = make_pipeline([layer(0, before=self._before), loss_chunk(1)])

    def _before(self, value: jax.Array) -> jax.Array:
        stopped = jax.lax.stop_gradient(value)
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return value + 0 * jax.pure_callback(lambda x: self.call(x), shape, stopped)  # noqa: PLW0108 - it is replaced

    def pipeline(self, call: Any, **options: Any) -> Pipeline:
        self.call = call
        return self._base.reordered(options=RuntimeOptions(**{"progress_deadline_s": 60.0, **options}))


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


def test_a_task_that_fails_ends_the_run_with_a_report(host: Host) -> None:
    def explode(value: Any) -> Any:
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    with host.pipeline(explode) as pipeline:
        state = pipeline.init(jax.random.key(0))
        state, metrics = pipeline.step(state, make_batch())
        with pytest.raises(TaskFailed, match="RESOURCE_EXHAUSTED") as caught:
            metrics.result()
        assert "stage 1" in str(caught.value)
        assert caught.value.report.stages[1].waits_for_stages == (0,)
        with pytest.raises(TaskFailed, match="RESOURCE_EXHAUSTED"):
            pipeline.step(state, make_batch())


def test_a_hung_task_ends_the_run_at_the_deadline_and_the_report_names_it(host: Host) -> None:
    release = threading.Event()

    def hang(value: Any) -> Any:
        release.wait(20)
        return np.asarray(value)

    pipeline = host.pipeline(hang, progress_deadline_s=0.5)
    try:
        state = pipeline.init(jax.random.key(0))
        _, metrics = pipeline.step(state, make_batch())
        start = time.perf_counter()
        with pytest.raises(NoProgress, match=r"stage 0 has been running 0F0 for") as caught:
            metrics.result()
        assert time.perf_counter() - start < 5
        assert "1F0 waits for the activation of microbatch 0 from chunk 0 to chunk 1 (stage 0)" in str(caught.value)
        assert str(caught.value).endswith("all stages that wait do so, directly or not, for stage 0")
    finally:
        release.set()
        pipeline.close()


def test_num_params_counts_what_each_stage_holds(pipeline: Pipeline) -> None:
    assert pipeline.num_params() == [16, 16]


def test_a_failed_step_is_never_gone_on_from(host: Host) -> None:
    calls = []

    def fail_in_the_second_step(value: Any) -> Any:
        calls.append(0)
        if len(calls) > NUM_MICROBATCHES:
            raise RuntimeError("broken")
        return np.asarray(value)

    with host.pipeline(fail_in_the_second_step) as pipeline:
        state = pipeline.init(jax.random.key(0))
        state, _ = pipeline.step(state, make_batch())
        state, _ = pipeline.step(state, make_batch())
        for _ in range(2):
            with pytest.raises(TaskFailed, match="broken"):
                pipeline.params(state)
        with pytest.raises(TaskFailed, match="broken"):
            pipeline.step(state, make_batch())


def test_closing_in_mid_step_abandons_it_and_says_so(host: Host) -> None:
    release = threading.Event()

    def hang(value: Any) -> Any:
        release.wait(20)
        return np.asarray(value)

    pipeline = host.pipeline(hang)
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, make_batch())
    threading.Timer(0.5, release.set).start()
    pipeline.close()
    with pytest.raises(PipelineClosed, match="make a new one"):
        metrics.result()
    with pytest.raises(PipelineClosed):
        pipeline.params(state)
    with pytest.raises(PipelineClosed):
        pipeline.step(state, make_batch())


def test_a_batch_may_be_overwritten_as_soon_as_its_step_is_enqueued(pipeline: Pipeline) -> None:
    batch = make_batch()
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, batch)
    batch["x"][:] = np.nan
    assert np.isfinite(metrics.result().loss)


def test_a_refused_optimizer_leaves_nothing_to_step() -> None:
    pipeline = make_pipeline(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="clip_norm"):
        pipeline.init(jax.random.key(0))
    with pytest.raises(RuntimeError, match="call init first"):
        pipeline.prepare(make_batch())


def test_batches_that_say_no_number_of_microbatches_are_refused(pipeline: Pipeline) -> None:
    state = pipeline.init(jax.random.key(0))
    with pytest.raises(ValueError, match="0 microbatches"):
        pipeline.step(state, {"x": make_batch()["x"][:0]})


def test_the_event_logs_of_a_training_run_replay_to_the_same_instructions(base: Pipeline) -> None:
    with base.reordered(options=RuntimeOptions(log_steps=3)) as pipeline:
        state = pipeline.init(jax.random.key(0))
        for _ in range(6):
            state, _ = pipeline.step(state, make_batch())
        pipeline.wait()
        logs = pipeline.runtime.logs()
    for log in logs.values():
        assert len(log.segments) == 3
        assert replays_as_recorded(log)


def test_a_result_prints_in_one_line(pipeline: Pipeline) -> None:
    _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), make_batch())
    result = metrics.result()
    assert len(result.timeline.spans) > 2 * NUM_MICROBATCHES
    assert repr(result) == (
        f"StepResult(step=0, loss={result.loss}, weight=6.0, grad_norm={result.grad_norm}, skipped=False)"
    )
