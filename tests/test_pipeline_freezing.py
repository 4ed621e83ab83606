"""With some layers frozen a pipeline trains what a plain loop trains that takes these layers for constants."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk, param_specs
from rrfp_jax.programs.model_graph import freeze, mirrored
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, TaskKind, build_schedule, linear, looped
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import VOCAB, WIDTH, dense, embedding, head, joined, make_batch, plain_model, weights

NUM_STEPS = 20
NUM_MICROBATCHES = 6
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)
CLIPPED = UpdateRules(clip_norm=1.0)
OPTIONS = RuntimeOptions(progress_deadline_s=60)
FREEZES = {
    "none": [],
    "encoder": ["vision"],
    "all but the projector": ["vision", "decoder"],
    "last layers": ["decoder.layers.1", "decoder.f*", "decoder.head"],
    "in the middle": ["projector", "vision.layers.1", "decoder.layers.0"],
    "first layers of chunks": ["vision.patches", "vision.layers.1", "decoder.embedding"],
}


def vision_language() -> list[Chunk]:
    """Four chunks: an encoder, its rest with a projector, a decoder that adds tokens to the images, its rest."""
    parts = [
        [named(embedding("patches", "images"), "vision."), named(dense(0), "vision.")],
        [named(dense(1), "vision."), named(dense(2), "", "projector")],
        [merging(), named(dense(0), "decoder.")],
        [named(dense(1), "decoder."), named(head(), "decoder.")],
    ]
    return [joined(part) for part in parts]


def named(chunk: Chunk, prefix: str, name: str | None = None) -> Chunk:
    """The chunk with other names of layers, which also decide the first values."""
    names = {f"{prefix}{name or own}": own for own in param_specs(chunk)}

    def init(key: jax.Array) -> Any:
        layers = chunk.init(key)
        shift = 0.01 * len(prefix)
        return {new: jax.tree.map(lambda leaf: leaf + shift, layers[own]) for new, own in names.items()}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return chunk.apply({own: params[new] for new, own in names.items()}, inputs, leaves, key=key)

    def partition(params: Any, axes: Mapping[str, int]) -> Any:
        assert chunk.partition is not None
        specs = chunk.partition({own: params[new] for new, own in names.items()}, axes)
        return {new: specs[own] for new, own in names.items()}

    cut = None if chunk.partition is None else partition
    return replace(chunk, name=f"{prefix}{name or chunk.name}", init=init, apply=apply, partition=cut)


def merging() -> Chunk:
    """Adds the embeddings of tokens to what comes from the images."""
    return Chunk(
        name="merge",
        init=lambda key: {"decoder.embedding": {"table": weights(key, 7, VOCAB, WIDTH)}},
        apply=lambda params, inputs, leaves, *, key: inputs + params["decoder.embedding"]["table"][leaves["tokens"]],
        leaves=("tokens",),
    )


BATCHES = [make_batch(NUM_MICROBATCHES, seed) for seed in range(NUM_STEPS)]


class Case:
    """A choice of frozen layers, its pipeline and what the plain loop makes of it."""

    def __init__(self, patterns: list[str]) -> None:
        self.chunks = freeze(vision_language(), patterns)
        self.frozen = frozenset().union(*(chunk.frozen for chunk in self.chunks))
        self.base = Pipeline(self.chunks, placement=linear(4), optimizer=OPTIMIZER, updates=CLIPPED, options=OPTIONS)
        self.initial = jax.tree.map(np.array, self.base.params(self.base.init(jax.random.key(1))))
        self.norms: list[float] = []
        self.expected = train_plainly(
            self.chunks, self.initial, OPTIMIZER, BATCHES, clip_norm=1.0, frozen=self.frozen, norms=self.norms
        )

    def check(self, pipeline: Pipeline) -> None:
        """Losses, norms and parameters are those of the plain loop, and frozen ones bit for bit those of the start."""
        losses, norms, params = trained(pipeline)
        assert_same_training(losses, params, *self.expected)
        np.testing.assert_allclose(norms, self.norms, rtol=1e-5)
        for name in self.frozen:
            jax.tree.map(np.testing.assert_array_equal, params[name], self.initial[name])


def trained(pipeline: Pipeline) -> tuple[list[float], list[float], Any]:
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        results = []
        for batch in BATCHES:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        return [each.result().loss for each in results], [each.result().grad_norm for each in results], params


def table(name: str, num_stages: int = 4) -> ScheduleTable:
    return build_schedule(name, ScheduleRequest(num_stages=num_stages, num_microbatches=NUM_MICROBATCHES))


@cache
def case_of(name: str) -> Case:
    return Case(FREEZES[name])


@pytest.fixture(scope="module", params=FREEZES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("hint", ["bf", pytest.param("fb", marks=pytest.mark.slow), "bfw"])
def test_hints(case: Case, hint: str) -> None:
    case.check(case.base.reordered(Ordering(hint=hint, window=3)))


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    ("name", "consume"),
    [
        ("1f1b", "strict"),
        pytest.param("1f1b", "ready", marks=pytest.mark.slow),
        pytest.param("zb-h1", "strict", marks=pytest.mark.slow),
        ("zb-h1", "ready"),
    ],
)
def test_tables(case: Case, name: str, consume: str) -> None:
    case.check(case.base.reordered(Ordering(schedule=table(name), consume=consume)))


@pytest.mark.slow
def test_two_chunks_per_stage() -> None:
    case = case_of("in the middle")
    looped_case = Pipeline(case.chunks, placement=looped(2, 2), optimizer=OPTIMIZER, updates=CLIPPED, options=OPTIONS)
    case.check(looped_case)
    order = Ordering(schedule=table("interleaved-1f1b-split", 2))
    case.check(looped_case.reordered(order))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shard_optimizer", [pytest.param(False, marks=pytest.mark.slow), True], ids=["each its own", "ZeRO-1"]
)
@pytest.mark.parametrize(
    "name", [pytest.param("all but the projector", marks=pytest.mark.slow), "first layers of chunks"]
)
def test_replicas(name: str, shard_optimizer: bool) -> None:
    options = {"data": 2, "clip_norm": 1.0, "shard_optimizer": shard_optimizer, "progress_deadline_s": 60}
    case = case_of(name)
    case.check(make_pipeline(case.chunks, placement=linear(4), optimizer=OPTIMIZER, hint="bfw", **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "in the middle"])
def test_tensor_parallel_stages(name: str) -> None:
    case = case_of(name)
    options = {"tensor": 2, "clip_norm": 1.0, "progress_deadline_s": 60}
    case.check(make_pipeline(case.chunks, placement=linear(4), optimizer=OPTIMIZER, backward="split", **options))


FUSED = [{"hint": "bf", "window": 1}, {"hint": "fb"}, {"schedule": "1f1b", "consume": "strict"}]
SPLIT = [{"hint": "bf", "window": 1, "backward": "split"}, {"hint": "bfw"}, {"schedule": "zb-h1", "consume": "strict"}]


@pytest.mark.parametrize("orders", [pytest.param(FUSED, marks=pytest.mark.slow), SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("encoder", "all but the projector")),
        "first layers of chunks",
    ],
)
def test_deterministic_runs_have_the_same_bits_in_any_order(name: str, orders: list[dict[str, Any]]) -> None:
    updates = UpdateRules(clip_norm=1.0, deterministic=True)
    chunks = freeze(vision_language(), FREEZES[name])
    base = Pipeline(chunks, placement=linear(4), optimizer=OPTIMIZER, updates=updates, options=OPTIONS)
    schedules = [
        {**order, **({"schedule": table(order["schedule"])} if "schedule" in order else {})} for order in orders
    ]
    first, *others = (trained(base.reordered(Ordering(**order))) for order in schedules)
    for other in others:
        assert first[:2] == other[:2]
        jax.tree.map(np.testing.assert_array_equal, first[2], other[2])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("patterns", [["embedding"], ["embedding", "layers"], ["layers.0"]])
def test_tied_embeddings(patterns: list[str]) -> None:
    chunks = freeze(plain_model((1, 1, 0), tied=True), patterns)
    with Pipeline(chunks, placement=linear(3), optimizer=OPTIMIZER, updates=CLIPPED, options=OPTIONS) as pipeline:
        initial = jax.tree.map(np.array, pipeline.params(pipeline.init(jax.random.key(1))))
        losses, _, params = trained(pipeline)
    frozen = frozenset().union(*(chunk.frozen for chunk in chunks))
    expected = train_plainly(chunks, initial, OPTIMIZER, BATCHES, clip_norm=1.0, frozen=frozen)
    assert_same_training(losses, params, *expected)


@pytest.mark.parametrize(("name", "layers"), [("chimera", (1, 1)), ("bitpipe", (0, 1, 1, 0))])
@pytest.mark.one_in(2)
def test_a_bidirectional_table_trains_what_is_not_frozen(name: str, layers: tuple[int, ...]) -> None:
    chunks = freeze(plain_model(layers, tied=True), ["embedding", "layers.0"])
    ordering = Ordering(schedule=table(name, 2), consume="strict")
    with Pipeline(mirrored(chunks), optimizer=OPTIMIZER, ordering=ordering, options=OPTIONS) as pipeline:
        initial = jax.tree.map(np.array, pipeline.params(pipeline.init(jax.random.key(1))))
        losses, _, params = trained(pipeline)
    expected = train_plainly(chunks, initial, OPTIMIZER, BATCHES, clip_norm=1.0, frozen={"embedding", "layers.0"})
    assert_same_training(losses, params, *expected)


@pytest.mark.one_in(3)
def test_what_ran(case: Case) -> None:
    """Frozen chunks have no W, R and U; those before all that trains run F alone."""
    with case.base.reordered(Ordering(hint="bfw")) as pipeline:
        state, metrics = pipeline.step(pipeline.init(jax.random.key(1)), BATCHES[0])
        ran = {span.task for span in metrics.result().timeline.spans}
        states = dict(pipeline.chunk_states(state))
        for measured, forecast in zip(metrics.result().peak_memory_bytes, pipeline.forecast, strict=True):
            assert forecast.fixed <= measured <= forecast.peak
    names = [set(param_specs(chunk)) for chunk in case.chunks]
    trains = [bool(own - chunk.frozen) for own, chunk in zip(names, case.chunks, strict=True)]
    for index, chunk in enumerate(case.chunks):
        expected = "FIWRU" if trains[index] else "FI" if any(trains[:index]) else "F"
        assert {task.kind for task in ran if task.chunk == index} == set(map(TaskKind, expected))
        assert set(states[index].accumulators) == names[index] - chunk.frozen
        moments = {str(path[0]) for path, _ in jax.tree.leaves_with_path(states[index].optimizer_state)}
        assert bool(moments) == trains[index]


def held_until(num_updates: int, frozen: Collection[str], inner: optax.GradientTransformation) -> Any:
    """An optimizer for whose first updates some layers are frozen: they count, and moments of nothing are zero."""

    def cleared(tree: Any, count: Any) -> Any:
        going = {name: jnp.where(count < num_updates, 0.0, 1.0) if name in frozen else 1.0 for name in tree}
        return {name: jax.tree.map(lambda leaf, go=going[name]: leaf * go, layer) for name, layer in tree.items()}

    def init(params: Any) -> Any:
        return jnp.int32(0), inner.init(params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        count, own = state
        updates, own = inner.update(cleared(grads, count), own, params)
        return cleared(updates, count), (count + 1, own)

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param({"placement": linear(4)}, marks=pytest.mark.slow),
        pytest.param({"placement": looped(2, 2), "hint": "bfw"}, marks=pytest.mark.slow),
        {"placement": linear(4), "data": 2, "shard_optimizer": True},
        pytest.param({"placement": looped(2, 2), "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["as before", "looped", "ZeRO-1", "tensor"],
)
def test_training_goes_on_with_other_layers_frozen(tmp_path: Path, resumed: dict[str, Any]) -> None:
    """First the projector alone trains, then all but the encoder's first layer; on the way the layout changes."""
    first, second = FREEZES["all but the projector"], ["vision.layers.0"]
    half, losses = NUM_STEPS // 2, []
    chunks = freeze(vision_language(), first)
    options = {"optimizer": OPTIMIZER, "clip_norm": None, "progress_deadline_s": 60}
    with make_pipeline(chunks, placement=linear(4), **options) as pipeline:
        saver = RunSaver(tmp_path, pipeline, every=None, minutes=None, keep=1)
        state = pipeline.init(jax.random.key(1))
        initial = jax.tree.map(np.array, pipeline.params(state))
        for batch in BATCHES[:half]:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics)
        saver.save(state, {})
        saver.checkpoints.close()
    with make_pipeline(freeze(vision_language(), second), **options, **resumed) as pipeline:
        saver = RunSaver(tmp_path, pipeline, every=None, minutes=None, keep=1)
        found = saver.checkpoints.newest()
        assert found is not None
        state = saver.restore(found)
        for batch in BATCHES[half:]:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        saver.checkpoints.close()
    later = {name for chunk in chunks for name in chunk.frozen} - set(second)
    expected = train_plainly(
        vision_language(), initial, held_until(half, later, OPTIMIZER), BATCHES, frozen=frozenset(second)
    )
    assert_same_training([metrics.result().loss for metrics in losses], params, *expected)
