"""Steps that overlap: training is that of a plain loop whose gradients are taken at the parameters before the last
update."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.checkpoint import NotDone
from rrfp_jax.core import Ordering
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.models.cuts import SequenceSlices
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import trained_specs
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.programs.optimizers import DelayedState
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.stage import ProgramStage
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear, looped
from rrfp_jax.testing import DelayedStage
from rrfp_jax.training.loop import RunSaver
from rrfp_jax.training.optimizer import make_optimizer
from rrfp_jax.training.run_config import OptimizerConfig
from tests import test_pipeline_slices as sliced
from tests import test_pipeline_vocabulary as sharded
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.runtime.logged_runs import replays_as_recorded
from tests.test_pipeline_context import make_batches

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden": 16, "num_layers": 4, "num_heads": 4, "mlp_dim": 32}
MODELS = {
    "untied": LanguageModelConfig(**SIZES, init_std=0.1),
    "tied": LanguageModelConfig(**SIZES, init_std=0.1, tie_embeddings=True),
}
OPTIMIZER = optax.adamw(optax.linear_schedule(1e-3, 5e-3, 6), weight_decay=0.01, eps=1e-3)
NADAM = make_optimizer(
    OptimizerConfig(learning_rate=5e-3, schedule="constant", arguments={"nesterov": True, "b1": 0.99, "eps": 1e-3}),
    optax.constant_schedule(5e-3),
)
NUM_STEPS, CLIP, SPOILT = 6, 0.5, 3


@cache
def batches(*, spoilt: bool = False) -> list[dict[str, np.ndarray]]:
    made = [{name: batch[name] for name in ("tokens", "targets", "weights")} for batch in make_batches(NUM_STEPS)]
    if spoilt:
        made[SPOILT]["weights"][0, 0, 0] = np.inf
    return made


@cache
def plain(
    model: str = "untied",
    *,
    delay: Any = 1,
    spoilt: bool = False,
    frozen: tuple[str, ...] = (),
    optimizer: Any = OPTIMIZER,
) -> Any:
    (chunk,) = language_model(MODELS[model]).split(1)
    start = jax.jit(chunk.init)(jax.random.key(1))
    norms: list[float] = []
    losses, params = train_plainly(
        [chunk],
        start,
        optimizer,
        batches(spoilt=spoilt),
        clip_norm=CLIP,
        norms=norms,
        delay=delay,
        left_out=[SPOILT] if spoilt else [],
        frozen=frozen,
    )
    return losses, params, norms


@cache
def by_stage(num_stages: int) -> Callable[[str], int]:
    """The delay of each layer of the untied model, where it goes by stage."""
    last = trained_specs(language_model(MODELS["untied"]).split(num_stages)[-1])
    return lambda name: int(name not in last)


def pipeline_of(model: str = "untied", num_chunks: int = 4, **options: Any) -> Pipeline:
    options = {"placement": linear(4), "delay": 1, "hint": "bf", "optimizer": OPTIMIZER} | options
    chunks = language_model(MODELS[model]).split(num_chunks)
    return make_pipeline(chunks, clip_norm=CLIP, progress_deadline_s=60, **options)


def train(model: str = "untied", num_chunks: int = 4, *, spoilt: bool = False, **options: Any) -> Any:
    with pipeline_of(model, num_chunks, **options) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches(spoilt=spoilt):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        results = [metrics.result() for metrics in results]
        assert all(map(replays_as_recorded, pipeline.runtime.logs().values()))
        peaks = np.max([result.peak_memory_bytes for result in results], axis=0)
        assert all(peak <= forecast.peak for peak, forecast in zip(peaks, pipeline.forecast, strict=True))
        return results, params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_chunks", "options"),
    [
        ("untied", 2, {"placement": linear(2), "hint": "bfw"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("tied", 4, {"hint": "bfw"}),
                ("untied", 4, {"window": 1}),
                ("untied", 4, {"window": 3, "hint": "f-priority", "remat": "full"}),
                ("tied", 4, {"placement": looped(2, 2), "hint": "bf-deep", "backward": "split"}),
                ("untied", 4, {"tensor": 2}),
                ("tied", 2, {"placement": linear(2), "data": 2}),
                ("untied", 2, {"placement": linear(2), "data": 2, "tensor": 2, "hint": "bfw"}),
                ("untied", 2, {"placement": linear(2), "mesh": {"fsdp": 2}, "remat": "dots"}),
                ("untied", 4, {"dispatch_ahead": 0}),
                ("untied", 2, {"placement": linear(2), "optimizer": NADAM}),
                ("untied", 4, {"dispatch_ahead": "just-in-time", "hint": "bfw"}),
                ("tied", 4, {"schedule": build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=4))}),
                ("untied", 4, {"schedule": build_schedule("zb-h1", ScheduleRequest(num_stages=4, num_microbatches=4))}),
            ]
        ),
    ],
    ids=str,
)
def test_training_is_that_of_the_loop_with_the_same_delay(model: str, num_chunks: int, options: dict[str, Any]) -> None:
    results, params = train(model, num_chunks, **options)
    optimizer = options.get("optimizer", OPTIMIZER)
    losses, expected, norms = plain(model, optimizer=optimizer)
    assert_same_training([result.loss for result in results], params, losses, expected)
    np.testing.assert_allclose([result.grad_norm for result in results], norms, rtol=1e-5)
    assert not np.allclose(losses, plain(model, delay=0, optimizer=optimizer)[0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_chunks", "spoilt", "options"),
    [
        (4, False, {"hint": "bfw"}),
        (4, True, {"window": 2}),
        (4, False, {"schedule": build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=4))}),
        (4, False, {"tensor": 2}),
        (2, True, {"placement": linear(2), "data": 2, "hint": "bfw"}),
        (1, False, {"placement": linear(1)}),
    ],
    ids=str,
)
def test_delays_by_stage_are_those_of_the_loop_with_a_delay_for_each_layer(
    num_chunks: int, spoilt: bool, options: dict[str, Any]
) -> None:
    results, params = train("untied", num_chunks, spoilt=spoilt, delay="by-stage", **options)
    losses, expected, _ = plain(delay=by_stage(num_chunks), spoilt=spoilt)
    steps = [step for step in range(NUM_STEPS) if not (spoilt and step == SPOILT)]
    assert [result.skipped for result in results] == [step not in steps for step in range(NUM_STEPS)]
    assert_same_training([results[step].loss for step in steps], params, [losses[step] for step in steps], expected)
    if num_chunks > 1 and not spoilt:
        assert not np.allclose(losses, plain()[0], rtol=1e-4)


@pytest.mark.slow
def test_a_step_left_out_is_left_out_on_every_stage_and_what_the_younger_step_computed_stands() -> None:
    results, params = train("tied", spoilt=True)
    losses, expected, _ = plain("tied", spoilt=True)
    assert [result.skipped for result in results] == [step == SPOILT for step in range(NUM_STEPS)]
    finite = [step for step in range(NUM_STEPS) if step != SPOILT]
    assert_same_training([results[step].loss for step in finite], params, [losses[step] for step in finite], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "delay"), [("tied", 1), ("untied", "by-stage")])
def test_deterministic_runs_have_the_same_bits_in_any_order(model: str, delay: int | str) -> None:
    seen = []
    for seed, options in enumerate([{"hint": "bf"}, {"hint": "f-priority", "window": 2}, {"hint": "bf", "window": 1}]):
        draw = Random(seed)
        wrap = {"wrap_stage": lambda stage, draw=draw: DelayedStage(stage, lambda *_: draw.random() * 0.003)}
        results, params = train(model, deterministic=True, delay=delay, **wrap, **options)
        seen.append(([result.loss for result in results], params))
    for losses, params in seen[1:]:
        assert losses == seen[0][0]
        jax.tree.map(np.testing.assert_array_equal, params, seen[0][1])


@pytest.mark.slow
def test_layers_that_do_not_train_stay_and_evaluations_see_the_newest_parameters() -> None:
    chunks = freeze(language_model(MODELS["untied"]).split(4), ["layers.1"])
    losses, expected, _ = plain(frozen=("layers.1",))
    options = {"ordering": Ordering(hint="bf"), "updates": UpdateRules(clip_norm=CLIP, delay=1)}
    with Pipeline(chunks, optimizer=OPTIMIZER, placement=linear(4), **options) as pipeline:
        state, found = pipeline.init(jax.random.key(1)), []
        for batch in batches():
            state, metrics = pipeline.step(state, batch)
            found.append(metrics)
        assert_same_training(
            [metrics.result().loss for metrics in found],
            jax.tree.map(np.array, pipeline.params(state)),
            losses,
            expected,
        )


def go_on(pipeline: Pipeline, folder: Path, steps: range, found: list[float]) -> Any:
    """Train from the newest checkpoint, or from the start; adds the losses to ``found``, and returns the parameters."""
    saver = RunSaver(folder, pipeline, every=3, minutes=None, keep=1)
    stored = saver.checkpoints.newest()
    state = pipeline.init(jax.random.key(1)) if stored is None else saver.restore(stored)
    for number in steps:
        state, metrics = pipeline.step(state, batches()[number])
        found.append(metrics.result().loss)
    saver.save(state, {})
    saver.checkpoints.close()
    return jax.tree.map(np.array, pipeline.params(state))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_in_another_layout(tmp_path: Path) -> None:
    losses, expected, _ = plain("tied")
    found: list[float] = []
    for steps, options in (
        (range(3), {}),
        (range(3, NUM_STEPS), {"placement": linear(2), "num_chunks": 2, "tensor": 2}),
    ):
        with pipeline_of("tied", **options) as pipeline:
            params = go_on(pipeline, tmp_path, steps, found)
    assert_same_training(found, params, losses, expected)


@pytest.mark.slow
def test_delays_by_stage_go_on_with_the_layers_that_had_them(tmp_path: Path) -> None:
    losses, expected, _ = plain(delay=by_stage(4))
    found: list[float] = []
    for steps, options in ((range(3), {}), (range(3, NUM_STEPS), {"tensor": 2})):
        with pipeline_of(delay="by-stage", **options) as pipeline:
            params = go_on(pipeline, tmp_path, steps, found)
            parts = [each.optimizer_state for _, each in pipeline.state_specs()]
            assert [isinstance(state[0], DelayedState) for state in parts] == [True, True, True, False]
    assert_same_training(found, params, losses, expected)
    for others, message in (
        ({"placement": linear(2), "num_chunks": 2, "delay": "by-stage"}, "delay 1 for layers.2 and is read with 0"),
        ({"delay": 1}, r"delay 0 for \S+ and is read with 1: give the delay and the layout of that run"),
        ({"delay": 0}, "delay 1 for embedding and is read with 0"),
    ):
        with pipeline_of(**others) as pipeline:
            saver = RunSaver(tmp_path, pipeline, every=3, minutes=None, keep=1)
            with pytest.raises(NotDone, match=message):
                saver.restore(saver.checkpoints.newest())


@pytest.mark.slow
def test_two_versions_of_the_parameters_are_alive_and_no_more() -> None:
    """Five matrices have this shape: each has two versions, two moments, and the gradients of two steps."""
    before, counts = {id(leaf) for leaf in jax.live_arrays()}, list[int]()

    def watched(stage: ProgramStage) -> ProgramStage:
        launch = stage.launch

        def counted(step: int, task: Any) -> Any:
            done = launch(step, task)
            counts.append(sum(leaf.shape == (32, 16) and id(leaf) not in before for leaf in jax.live_arrays()))
            return done

        stage.launch = counted  # type: ignore[method-assign]
        return stage

    results, params = train("tied", 1, placement=linear(1), wrap_stage=watched)
    assert max(counts) == 5 * 6
    losses, expected, _ = plain("tied")
    assert_same_training([result.loss for result in results], params, losses, expected)


@pytest.mark.parametrize(
    ("updates", "options", "message"),
    [
        ({"delay": 2}, {}, "delay is 2: give 0, or 1 for steps that overlap, or by-stage"),
        ({"delay": "by-stage"}, {"model": "tied"}, "layer embedding is on the last stage and on another one"),
        ({"delay": "by-stage"}, {"placement": looped(2, 2)}, "for a chain with one chunk on each stage: give delay 1"),
        ({"delay": 1, "reduce": "messages"}, {}, "leave out shard_optimizer, and reduce messages"),
        ({"delay": 1, "shard_optimizer": True}, {}, "leave out shard_optimizer, and reduce messages"),
        ({"delay": 1}, {"other_owners": True}, "do not survive lost ranks"),
    ],
)
def test_what_does_not_go_with_a_delay_is_refused(updates: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_of(**updates, **options)


def test_an_order_alone_cannot_ask_for_a_delay() -> None:
    chunks = language_model(MODELS["untied"]).split(2)
    with pytest.raises(ValueError, match="give it as updates=UpdateRules"):
        Pipeline(chunks, optimizer=OPTIMIZER, placement=linear(2), ordering=Ordering(delay=1))


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"hint": "bfw"}, {"hint": "bf-deep", "deterministic": True, "window": 1}], ids=str)
def test_slices_of_sequences_overlap_too(way: dict[str, Any]) -> None:
    (chunk,) = language_model(sliced.MODELS["tied"]).split(1)
    start = jax.jit(chunk.init)(jax.random.key(1))
    expected = train_plainly([chunk], start, sliced.OPTIMIZER, sliced.batches(), clip_norm=1.0, delay=1)
    found = sliced.train(sliced.make("tied", SequenceSlices(2), delay=1, **way))
    assert_same_training(*found, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tied", "untied, z-loss"])
def test_shards_of_the_vocabulary_overlap_too(model: str) -> None:
    (chunk,) = language_model(sharded.MODELS[model]).split(1)
    start = jax.jit(chunk.init)(jax.random.key(1))
    expected = train_plainly([chunk], start, sharded.OPTIMIZER, sharded.batches(), clip_norm=1.0, delay=1)
    results, params = sharded.train(model, shards=2, delay=1, hint="bfw")
    assert_same_training([result.loss for result in results], params, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_updates_that_are_fed_back_are_twice_an_update_less_the_one_before(name: str) -> None:
    config = OptimizerConfig(learning_rate=1e-2, name=name, schedule="constant", arguments={"feedback": True})
    plainly = OptimizerConfig(learning_rate=1e-2, name=name, schedule="constant")
    fed, bare = (make_optimizer(each, optax.constant_schedule(1e-2)) for each in (config, plainly))
    params = {"layers.0": {"kernel": jax.random.normal(jax.random.key(0), (4, 3))}}
    states, last = [fed.init(params), bare.init(params)], jax.tree.map(np.zeros_like, params)
    for step in range(4):
        grads = jax.tree.map(lambda leaf, step=step: leaf * np.cos(step), params)
        found, states[0] = fed.update(grads, states[0], params)
        update, states[1] = bare.update(grads, states[1], params)
        jax.tree.map(
            lambda a, b, c: np.testing.assert_allclose(a, 2 * b - c, rtol=1e-6, atol=1e-9), found, update, last
        )
        params, last = optax.apply_updates(params, found), update
    assert config.num_moments() == plainly.num_moments() + 1
