"""Two tasks that run as one program make the bits that each makes alone, and train what the plain loop trains."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering, RunPair, StepRules
from rrfp_jax.core.dispatch import PAIRS, dispatch_of
from rrfp_jax.core.replicas import Replication
from rrfp_jax.layout import Layout
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.batches import Buckets, StepBatch
from rrfp_jax.programs.microbatch_programs import PAIRED_PROGRAMS, compile_pair
from rrfp_jax.programs.program_text import ProgramText
from rrfp_jax.runtime import prepare
from rrfp_jax.runtime.event_log import RunLog, read_log, write_log
from rrfp_jax.runtime.model import HostedModel, HostedPrograms
from rrfp_jax.runtime.operations import recompute
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.replay import replay_run
from rrfp_jax.runtime.stage import ProgramStage
from rrfp_jax.runtime.stage_memory import MemoryMeter
from rrfp_jax.schedules import (
    Pair,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    Task,
    build_schedule,
    chain,
    linear,
)
from tests import pipelines, ragged
from tests.pipelines import take
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import VOCAB, plain_model
from tests.test_pipeline_kinds import counting, num_compiled

NUM_MICROBATCHES, NUM_ROWS, LENGTH = 4, 2, 8
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)
ON_ONE_STAGE = Placement((0, 0))
FUSED = "0F0+0F3 1F0+1F3 0F1+1B0 1F1+0B0 1B1 0F2+0B1 1F2+1B3 1B2 0B3 0B2"
SPLIT = "0F0+0F3 1F0+1F3 0F1+1I0 1F1+0I0 0F2+1W0 1I1+0W0 1F2+1W1 0I1 1I2+0W1 0I2+1W2 0W2 1I3+1W3 0I3+0W3"


@cache
def make_batches(number: int = 6) -> list[dict[str, np.ndarray]]:
    """Counting sequences; microbatches differ in weight."""
    rng, batches = np.random.default_rng(0), []
    for _ in range(number):
        start = rng.integers(0, VOCAB, (NUM_MICROBATCHES, NUM_ROWS, 1))
        sequence = ((start + np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)
        weights = (rng.random((NUM_MICROBATCHES, NUM_ROWS, LENGTH)) < 0.8).astype(np.float32)
        batches.append({"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights})
    return batches


def num_pairs(log: RunLog) -> int:
    """Returns how many pairs the stages of a log were asked to run, as far back as it goes."""
    entries = (entry for stage in log.stages for segment in stage.segments for entry in segment.entries)
    return sum(isinstance(instruction, RunPair) for _, instructions in entries for instruction in instructions)


def parsed(text: str) -> list[Task | Pair]:
    tasks = [[*map(Task.parse, each.split("+"))] for each in text.split()]
    return [Pair(*each) if len(each) > 1 else each[0] for each in tasks]


class OneStage:
    """A stage with both chunks of a small model, and its programs; no arbiter chooses its tasks."""

    def __init__(self, *, split: bool, num_devices: int = 2) -> None:
        self.graph: PipelineGraph = chain(2, 4, split=split)
        chunks = plain_model((1, 1), tied=False)
        process = Process(Layout(num_stages=1, mesh={"tensor": num_devices}), num_devices=num_devices)
        rules = UpdateRules()
        self.model = HostedModel(
            chunks,
            ON_ONE_STAGE,
            process,
            optimizer=OPTIMIZER,
            updates=rules,
            seed=0,
            remat=("none", "none"),
        )
        bucket = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in make_batches()[0].items()}
        self.buckets = Buckets(chunks, [bucket])
        self.counted: list[tuple[int, int]] = []
        self.programs: HostedPrograms = self.model.compile(
            self.graph, self.buckets, lambda *counts: self.counted.append(counts), pairs=PAIRED_PROGRAMS
        )

    def stage(self, *, pairs: bool) -> ProgramStage:
        programs = self.programs.chunks
        for chunk in programs.values():
            _ = chunk.of().constants
        stage = ProgramStage(
            0,
            programs,
            self.model.initial_state(self.graph, jax.random.key(0)).chunks,
            graph=self.graph,
            placement=ON_ONE_STAGE,
            copies=Replication(num_chunks=2, num_microbatches=4, num_replicas=1),
            update_rules=UpdateRules(),
            step_rules=StepRules(),
            stop_requests=SimpleNamespace(),  # type: ignore[arg-type]
            replicas=None,
            meter=MemoryMeter(programs, jax.devices()[0]),
            send_array=lambda value, receiver, message, bucket, step: value,
            pairs=self.programs.pairs if pairs else None,
        )
        stage.begin(0, StepBatch(leaves=make_batches()[0], buckets=[0] * 4), self.graph)
        return stage

    def results(self, tasks: Sequence[Task | Pair], *, pairs: bool) -> list[np.ndarray]:
        """The bits of the gradients, and of the losses in the order of microbatches."""
        stage = self.stage(pairs=pairs)
        for task in tasks:
            stage.launch(0, task).wait()
        losses = sorted(stage._steps[0].losses)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((losses, stage.states[0].accumulators))] + [
            np.asarray(leaf) for leaf in jax.tree.leaves(stage.states[1].accumulators)
        ]


@pytest.fixture(scope="module", params=[FUSED, SPLIT], ids=["fused", "split"])
def made(request: pytest.FixtureRequest) -> tuple[OneStage, str]:
    return OneStage(split=request.param == SPLIT), request.param


def test_pairs_make_the_bits_of_their_tasks_in_either_order(made: tuple[OneStage, str]) -> None:
    stage, text = made
    tasks = parsed(text)
    alone = parsed(text.replace("+", " "))
    turned = [
        Pair(task.second, task.first) if isinstance(task, Pair) and task.first[1:] != task.second[1:] else task
        for task in tasks
    ]
    expected = stage.results(alone, pairs=False)
    assert any(each.any() for each in expected)
    for given, has_programs in ((tasks, True), (turned, True), (tasks, False)):
        for found, known in zip(stage.results(given, pairs=has_programs), expected, strict=True):
            np.testing.assert_array_equal(found, known)


def test_a_pair_runs_the_program_of_both_and_takes_over_what_each_would(made: tuple[OneStage, str]) -> None:
    one, text = made
    stage, ran = one.stage(pairs=True), 0
    for task in parsed(text):
        before = [*jax.tree.leaves(stage.states[0].accumulators), *jax.tree.leaves(stage.states[1].accumulators)]
        launched = stage.launch(0, task)
        *_, enqueued, _read = launched.wait.args  # type: ignore[attr-defined]
        # The first chunk sends no gradient, so that its I has no program.
        runs_alone = "0I" in str(task)
        assert (enqueued.pair is not None) == (isinstance(task, Pair) and not runs_alone)
        ran += enqueued.pair is not None
        launched.wait()
        adds = any(each.kind in "BW" for each in (task if isinstance(task, Pair) else (task,)))
        assert any(leaf.is_deleted() for leaf in before) == adds
        del before
    assert ran == (6 if text == FUSED else 8)


def test_pair_programs_hold_the_work_of_both(made: tuple[OneStage, str]) -> None:
    one, text = made
    titles = [title for chunk in one.programs.chunks.values() for title in chunk.compiled if title.startswith("pair ")]
    assert len(titles) == (7 if text == FUSED else 12)
    assert len(one.programs.pairs) == (7 if text == FUSED else 11)
    done, total = one.counted[-1]
    assert done == total == len({id(p) for chunk in one.programs.chunks.values() for p in chunk.compiled.values()})
    for both, pair in one.programs.pairs.items():
        texts = [ProgramText(program.as_text() or "") for program in (*both, pair.compiled)]
        *alone, together = (sum(text.products.values()) for text in texts)
        assert together == sum(alone) > 0
        # The compiler may send several arrays by one collective.
        *alone, together = (sum(moved.num_bytes for moved in text.collectives.values()) for text in texts)
        assert together == sum(alone) > 0


@pytest.mark.slow
def test_pairs_share_programs_between_chunks_of_a_kind() -> None:
    """Stage 1 has two chunks of one kind, so that its four pairs of B and F are one program."""
    config = LanguageModelConfig(vocab_size=VOCAB, hidden=8, num_layers=4, num_heads=2, mlp_dim=8)
    counts = []
    for ahead in (0, PAIRS):
        with make_pipeline(language_model(config).split(4), Placement((0, 1, 1, 0)), dispatch_ahead=ahead) as pipeline:
            pipeline.init(jax.random.key(0))
            with counting() as compiled:
                pipeline.prepare(make_batches()[0])
            counts.append(num_compiled(compiled))
            names = [name for each in pipeline.chunk_sizes.values() for name in each.temporaries if "pair" in name]
            assert len(names) == 8 * (ahead == PAIRS)
    assert counts[1] - counts[0] == 4 + 1


def test_a_pair_that_does_not_fit_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = plain_model((1, 1), tied=False)
    with make_pipeline(chunks, linear(2)) as pipeline:
        pipeline.init(jax.random.key(0))
        pipeline.prepare(make_batches()[0])
        most = max(each.peak for each in pipeline.forecast)
    monkeypatch.setattr(
        "rrfp_jax.programs.compiled.compile_pair",
        lambda *each: compile_pair(*each)._replace(temporaries=1 << 30),
    )
    with make_pipeline(chunks, linear(2), memory_limit=2 * most) as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match="is predicted to need 1 GiB"):
            pipeline.prepare(make_batches()[0])


# -- whole pipelines ---------------------------------------------------------------------------------------------------


def make_pipeline(
    chunks: Sequence[Any],
    placement: Placement,
    *,
    data: int = 1,
    tensor: int = 2,
    dispatch_ahead: Any = PAIRS,
    **options: Any,
) -> Pipeline:
    options["dispatch_ahead"] = dispatch_ahead
    records = {
        name: record(**take(options, *(field.name for field in fields(record))))  # type: ignore[arg-type]
        for name, record in (("updates", UpdateRules), ("ordering", Ordering), ("options", RuntimeOptions))
    }
    process = Process(Layout(num_stages=placement.num_stages, data=data, mesh={"tensor": tensor}))
    return Pipeline(chunks, placement=placement, process=process, optimizer=OPTIMIZER, **records)


def table(name: str, num_stages: int) -> Any:
    return build_schedule(name, ScheduleRequest(num_stages=num_stages, num_microbatches=NUM_MICROBATCHES))


WAYS: Mapping[str, tuple[Placement, Any]] = {
    "1f1b": (linear(2), lambda: {"schedule": table("1f1b", 2)}),
    "1f1b strict": (linear(2), lambda: {"schedule": table("1f1b", 2), "consume": "strict"}),
    "zb-h1": (linear(2), lambda: {"schedule": table("zb-h1", 2)}),
    "readiness, split": (linear(2), lambda: {"hint": "bfw", "window": 3}),
    "stp strict, split": (Placement((0, 1, 1, 0)), lambda: {"schedule": table("stp", 2), "consume": "strict"}),
    "two chunks a stage on a V": (Placement((0, 1, 1, 0)), lambda: {"hint": "bf-deep", "window": 3}),
    "two chunks a stage on a V, split": (
        Placement((0, 1, 1, 0)),
        lambda: {"hint": "bf-deep", "window": 3, "backward": "split"},
    ),
}


@cache
def plain(num_chunks: int) -> tuple[list[float], Any]:
    chunks = plain_model((1,) * num_chunks)
    with Pipeline(chunks, placement=linear(num_chunks), optimizer=OPTIMIZER) as pipeline:
        params = jax.tree.map(np.array, pipeline.params(pipeline.init(jax.random.key(1))))
    return train_plainly(chunks, params, OPTIMIZER, make_batches(), clip_norm=1.0)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("tensor", [2, 1])
@pytest.mark.parametrize("way", WAYS)
def test_pairs_train_what_the_plain_loop_does_and_compile_nothing_on_the_way(
    way: str, tensor: int, tmp_path: Path
) -> None:
    placement, options = WAYS[way]
    num_chunks = placement.num_chunks
    with make_pipeline(
        plain_model((1,) * num_chunks), placement, tensor=tensor, clip_norm=1.0, **options()
    ) as pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(make_batches()[0])
        results = []
        with counting() as compiled:
            for batch in make_batches():
                state, metrics = pipeline.step(state, batch)
                results.append(metrics)
            losses = [metrics.result().loss for metrics in results]
        assert not num_compiled(compiled)
        params = jax.tree.map(np.array, pipeline.params(state))
        peaks, forecast = metrics.result().peak_memory_bytes, [each.peak for each in pipeline.forecast]
        log = pipeline.runtime.event_log()
    assert_same_training(losses, params, *plain(num_chunks))
    assert all(0 < peak <= most for peak, most in zip(peaks, forecast, strict=True))
    # How many there are depends on timing, but where backwards are split some tasks are always ready together.
    assert num_pairs(log) > 0 or "split" not in way
    write_log(log, tmp_path / "events.json.gz")
    replay = replay_run([read_log(tmp_path / "events.json.gz")])
    assert [stage.difference for stage in replay.stages] == [None] * placement.num_stages
    spans = [span for span in replay.timeline().spans if span.step == len(make_batches()) - 1]
    assert len({(span.step, span.task) for span in spans}) == len(spans) > 0
    for lane in range(placement.num_stages):
        own = sorted((span.start_s, span.end_s) for span in spans if span.stage == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(own))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["stp strict, split", "readiness, split", "two chunks a stage on a V, split"])
def test_pairs_are_launched_while_others_run(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where the next pair is in the device's queue before the running one has ended."""
    monkeypatch.setattr("rrfp_jax.runtime.stage.is_on_host", lambda sharding: False)
    monkeypatch.setattr(prepare, "dispatch_of", lambda value, on_host: dispatch_of(value, on_host=False))
    placement, options = WAYS[way]
    with make_pipeline(plain_model((1,) * placement.num_chunks), placement, clip_norm=1.0, **options()) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in make_batches():
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        losses = [metrics.result().loss for metrics in results]
        params = jax.tree.map(np.array, pipeline.params(state))
        log = pipeline.runtime.event_log()
    assert_same_training(losses, params, *plain(placement.num_chunks))
    assert num_pairs(log) > 0
    assert [stage.difference for stage in replay_run([log]).stages] == [None] * placement.num_stages


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["collective", "messages"])
def test_replicas_of_a_stage_run_pairs_too(reduce: str) -> None:
    placement, options = WAYS["two chunks a stage on a V, split"]
    chunks = plain_model((1,) * placement.num_chunks)
    with make_pipeline(chunks, placement, data=2, reduce=reduce, clip_norm=1.0, **options()) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in make_batches():
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        losses = [metrics.result().loss for metrics in results]
        params = jax.tree.map(np.array, pipeline.params(state))
        assert num_pairs(pipeline.runtime.event_log()) > 0
    assert_same_training(losses, params, *plain(placement.num_chunks))


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_microbatches_of_other_shapes_or_that_skip_chunks_run_in_pairs_or_alone(hint: str) -> None:
    steps = ragged.make_steps(3, 4)
    with pipelines.make_pipeline(
        ragged.CHUNKS,
        placement=Placement((0, 1, 0, 1, 1)),
        edges=ragged.EDGES,
        optimizer=optax.adam(1e-2),
        tensor=2,
        hint=hint,
        dispatch_ahead=PAIRS,
    ) as pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        pipeline.prepare(ragged.as_batch(steps[0]), buckets=ragged.all_buckets())
        results = []
        for microbatches in steps:
            state, metrics = pipeline.step(state, ragged.as_batch(microbatches))
            results.append(metrics)
        losses, params = [each.result().loss for each in results], jax.tree.map(np.array, pipeline.params(state))
        assert num_pairs(pipeline.runtime.event_log()) > 0
    expected_losses, _, expected = ragged.train_plainly(initial, optax.adam(1e-2), steps)
    assert_same_training(losses, params, expected_losses, expected)


# -- refusals and notes ------------------------------------------------------------------------------------------------


def refused(message: str, **options: Any) -> None:
    with make_pipeline(plain_model((1, 1)), linear(2), **options) as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match=message) as caught:
            pipeline.prepare(make_batches()[0])
    assert str(caught.value).endswith(("leave dispatch_ahead pairs out", "or the operations"))
    assert "\n" not in str(caught.value)


def test_pairs_are_refused_with_what_runs_tasks_one_by_one() -> None:
    refused("steps that overlap", delay=1)
    refused("depends on what is ready", deterministic=True)
    refused("operations have their own time", hint="bf", ops=(recompute(chunks=(0,)),))
    with pytest.raises(
        ValueError, match="members that propose agree on single tasks: for pairs take group_protocol leader"
    ):
        RuntimeOptions(dispatch_ahead="pairs", group_protocol="propose")


def test_stages_of_one_device_compile_no_pairs_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with make_pipeline(plain_model((1, 1)), linear(2), tensor=1) as pipeline:
        pipeline.init(jax.random.key(0))
        pipeline.prepare(make_batches()[0])
        assert not any("pair" in name for each in pipeline.chunk_sizes.values() for name in each.temporaries)
    (note,) = (record.getMessage() for record in caplog.records if "pairs" in record.getMessage())
    assert note.startswith("stages 0, 1 have one device each: pairs of tasks run one after the other there")
