"""Replicas and tensor-parallel stages train what the plain loop trains, in one process."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.schedules import linear, looped
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly

NUM_STEPS = 6
NUM_MICROBATCHES = 4
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)


def make_batches() -> list[dict[str, np.ndarray]]:
    """Counting sequences; microbatches differ much in weight."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_STEPS):
        start = rng.integers(0, 32, (NUM_MICROBATCHES, 2, 1))
        sequence = ((start + np.arange(9)) % 32).astype(np.int32)
        share = rng.random((NUM_MICROBATCHES, 1, 1))
        weights = (rng.random((NUM_MICROBATCHES, 2, 8)) < share).astype(np.float32)
        batches.append({"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights})
    return batches


def make_chunks(num_chunks: int, *, tied: bool) -> list[Any]:
    config = LanguageModelConfig(
        vocab_size=32,
        hidden=16,
        num_layers=num_chunks,
        num_heads=2,
        num_kv_heads=2,
        mlp_dim=32,
        init_std=0.1,
        tie_embeddings=tied,
    )
    return language_model(config).split(num_chunks)


def train(
    pipeline: Pipeline, batches: list[dict[str, np.ndarray]], means: list[dict[str, float]] | None = None
) -> tuple[list[float], Any]:
    """Losses and final parameters; ``means`` gets every step's named sums over its weight."""
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        results = []
        for batch in batches:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        if means is not None:
            means += [metrics.result().means for metrics in results]
        return [metrics.result().loss for metrics in results], params


Case = tuple[list[Any], Any]


def make_case(*, tied: bool, clip_norm: float | None = 1.0) -> Case:
    """Chunks, and what the plain loop makes of them."""
    chunks = make_chunks(2, tied=tied)
    initial = make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER)
    params = jax.tree.map(np.array, initial.params(initial.init(jax.random.key(1))))
    return chunks, train_plainly(chunks, params, OPTIMIZER, make_batches(), clip_norm=clip_norm)


@pytest.fixture(scope="module")
def tied() -> Case:
    return make_case(tied=True)


@pytest.fixture(scope="module")
def untied() -> Case:
    return make_case(tied=False)


def check(case: Case, *, clip_norm: float | None = 1.0, **options: Any) -> None:
    chunks, expected = case
    options = {"clip_norm": clip_norm, "progress_deadline_s": 60} | options
    pipeline = make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, **options)
    assert_same_training(*train(pipeline, make_batches()), *expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [{"data": 2, "shard_optimizer": True}, {"mesh": {"tensor": 2, "fsdp": 2}}], ids=str)
def test_replicas_and_tensor_parallel_stages_train_what_the_plain_loop_does(tied: Case, layout: dict[str, Any]) -> None:
    check(tied, **layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2},
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "shard_optimizer": True, "backward": "split", "hint": "bfw"},
        {"data": 4, "window": 1},
        {"data": 2, "deterministic": True},
        {"data": 2, "shard_optimizer": True},
        {"tensor": 2, "backward": "split"},
        {"data": 2, "tensor": 2, "shard_optimizer": True, "dispatch_ahead": "just-in-time"},
        {"data": 2, "backward": "split", "hint": "bfw", "dispatch_ahead": 0},
        {"tensor": 2},
        {"mesh": {"fsdp": 4}, "hint": "bfw"},
        {"mesh": {"expert": 2, "fsdp": 2}},
        {"mesh": {"tensor": 2, "context": 2}, "hint": "bfw"},
        {"mesh": [{"fsdp": 4}, {"tensor": 2, "context": 2}], "hint": "bfw"},
        {"data": 2, "mesh": {"fsdp": 2}, "shard_optimizer": True},
        {"data": 2, "mesh": {"fsdp": 2}, "deterministic": True},
    ],
    ids=str,
)
def test_every_layout_trains_what_the_plain_loop_does(tied: Case, untied: Case, layout: dict[str, Any]) -> None:
    check(tied, **layout)
    check(untied, **layout)


@pytest.mark.slow
def test_replicas_without_clipping_and_skipping() -> None:
    check(make_case(tied=True, clip_norm=None), data=2, clip_norm=None, skip_nonfinite=False)


@pytest.mark.slow
def test_several_chunks_per_stage_with_replicas() -> None:
    chunks = make_chunks(4, tied=True)
    plain = make_pipeline(chunks, placement=looped(2, 2), optimizer=OPTIMIZER)
    expected = train(plain, make_batches())
    replicas = make_pipeline(chunks, placement=looped(2, 2), data=2, shard_optimizer=True, optimizer=OPTIMIZER)
    losses, params = train(replicas, make_batches())
    assert_same_training(losses, params, *expected)


@pytest.mark.slow
def test_a_shared_optimizer_state_is_shared_out() -> None:
    chunks = make_chunks(2, tied=False)
    peaks = []
    for shard in (False, True):
        options = {"data": 2, "shard_optimizer": shard, "optimizer": OPTIMIZER}
        with make_pipeline(chunks, placement=linear(2), **options) as pipeline:
            pipeline.init(jax.random.key(0))
            pipeline.prepare(make_batches()[0])
            peaks.append([forecast.fixed for forecast in pipeline.forecast])
    num_params = pipeline.num_params()
    for whole, shared, size in zip(*[peak[:2] for peak in peaks], num_params, strict=True):
        assert shared < whole - 3 * size  # two moments of 4 bytes, half of which are elsewhere


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": 3}, r"2 stages x data 3 x tensor 1|cannot be dealt out evenly to 3"),
        ({"shard_optimizer": True}, "whose layout has data of at least 2"),
        ({"data": 8}, r"need 16 devices for each process"),
        ({"mesh": {"tensor": 2, "fsdp": 3}}, r"tensor 2 x fsdp 3 .* need 12 devices for each process"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    chunks = make_chunks(2, tied=False)
    with pytest.raises(ValueError, match=message):
        train(make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, **options), make_batches())


@pytest.mark.parametrize("spec", [PartitionSpec("expert"), PartitionSpec(None, None, "tensor")], ids=str)
def test_a_partition_that_names_an_absent_axis_or_dimension_is_refused_at_once(spec: PartitionSpec) -> None:
    first, last = make_chunks(2, tied=False)
    cut = replace(first, partition=lambda params, axes: jax.tree.map(lambda _: spec, params))
    with make_pipeline([cut, last], placement=linear(2), mesh={"tensor": 2, "fsdp": 2}, optimizer=OPTIMIZER) as one:
        words = r"chunk 0 \(embedding, layer 0\) cannot cut its parameter .* over fsdp 2 x tensor 2: name axes of the"
        with pytest.raises(ValueError, match=words):
            one.init(jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"tensor": 2, "fsdp": 2}, {"context": 2, "fsdp": 2}], ids=str)
def test_fsdp_holds_a_part_of_parameters_accumulators_and_optimizer_state(mesh: dict[str, int]) -> None:
    """Each of them as its arrays lie, and all together as forecast."""
    whole, part = (held_on({"tensor": 1}), held_on(mesh))
    assert set(whole) == {"params", "accumulators", "optimizer_state", "forecast"}
    parts = mesh["fsdp"] * mesh.get("tensor", 1)
    for name, size in whole.items():
        assert size / parts <= part[name] <= 1.05 * size / parts, (name, size, part[name])


def held_on(mesh: dict[str, int]) -> dict[str, int]:
    """Bytes of the fullest device, and of its forecast's fixed part."""
    with make_pipeline(make_chunks(2, tied=False), placement=linear(2), mesh=mesh, optimizer=OPTIMIZER) as pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(make_batches()[0])
        held: dict[str, dict[Any, int]] = {}
        for _, chunk in pipeline.chunk_states(state):
            for name in ("params", "accumulators", "optimizer_state"):
                on_device = held.setdefault(name, {})
                for shard in (s for array in jax.tree.leaves(getattr(chunk, name)) for s in array.addressable_shards):
                    on_device[shard.device] = on_device.get(shard.device, 0) + shard.data.nbytes
        fullest = {name: max(on_device.values()) for name, on_device in held.items()}
        return fullest | {"forecast": max(forecast.fixed for forecast in pipeline.forecast)}
