"""Training over tensor and data axes, with and without a sharded optimizer state, equals the plain loop."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.model import language_model
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import PipelineGraph, chain
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.grids import GridTrainer, grids_of
from tests.programs.toys import make_batch, with_cheap_init

CONFIG = LanguageModelConfig(
    vocab_size=12, hidden=8, num_layers=1, num_heads=2, mlp_dim=12, tie_embeddings=True, init_std=0.3
)
NUM_MICROBATCHES, NUM_STEPS = 4, 3
BATCHES = [make_batch(NUM_MICROBATCHES, seed) for seed in range(NUM_STEPS)]
OPTIMIZER = optax.adamw(1e-2)


def chunks_of(**changes: Any) -> list[Chunk]:
    return [
        with_cheap_init(chunk) for chunk in language_model(replace(CONFIG, **changes)).split(layers_per_chunk=[1, 0])
    ]


def graph_of(*, tied: bool = True, split: bool = False) -> PipelineGraph:
    return chain(2, NUM_MICROBATCHES, split=split, shared=((0, 1),) if tied else ())


def trained_plainly(**changes: Any) -> tuple[list[float], dict[str, Any]]:
    chunks = chunks_of(**changes)
    params: dict[str, Any] = {}
    for chunk in chunks:
        params |= chunk.init(jax.random.key(0))
    return train_plainly(chunks, params, OPTIMIZER, BATCHES, clip_norm=1.0)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Any]]:
    return trained_plainly()


def train(
    data: int,
    tensor: int,
    *,
    split: bool = False,
    tied: bool = True,
    compute_dtype: str = "float32",
    num_steps: int = NUM_STEPS,
    **options: Any,
) -> tuple[GridTrainer, list[float]]:
    grids = grids_of(jax.devices(), 2, data, tensor)
    chunks = chunks_of(tie_embeddings=tied, compute_dtype=compute_dtype)
    trainer = GridTrainer(chunks, graph_of(tied=tied, split=split), grids, BATCHES[0], OPTIMIZER, **options)
    return trainer, [trainer.step(batch).loss for batch in BATCHES[:num_steps]]


def assert_replicas_equal(trainer: GridTrainer) -> None:
    first, *others = (trainer.params(r) for r in trainer.replicas)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    for r in trainer.replicas:
        tables = [trainer.held[r, c].params["embedding"]["table"] for c in (0, 1)]
        np.testing.assert_array_equal(*tables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "tensor", "options"),
    [
        (1, 2, {"split": True}),
        (2, 1, {"ordered": True}),
        (2, 1, {"shard_optimizer": True}),
        (2, 2, {"split": True, "shard_optimizer": True, "ordered": True}),
        (2, 2, {"remat": "full"}),
    ],
)
def test_training_equals_the_plain_loop(reference: Any, data: int, tensor: int, options: Any) -> None:
    trainer, losses = train(data, tensor, **options)
    assert_same_training(losses, trainer.params(0), *reference)
    assert_replicas_equal(trainer)


@pytest.mark.slow
def test_untied_layers_in_bfloat16() -> None:
    trainer, losses = train(2, 2, tied=False, compute_dtype="bfloat16", split=True)
    expected, _ = trained_plainly(tie_embeddings=False, compute_dtype="bfloat16")
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    jax.tree.map(np.testing.assert_array_equal, trainer.params(0), trainer.params(1))
    head = trainer.programs[0, 1]
    assert head.of().shapes.inputs[0].dtype == jax.numpy.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.params(0))} == {np.dtype("float32")}


class Sharded(NamedTuple):
    trainer: GridTrainer
    losses: list[float]
    params: dict[str, Any]
    """Of the first replica, after the last step."""


@pytest.fixture(scope="module")
def trained_sharded() -> Sharded:
    """Data 2 x tensor 2 with split backwards and a sharded optimizer state."""
    trainer, losses = train(2, 2, split=True, shard_optimizer=True)
    assert_replicas_equal(trainer)
    return Sharded(trainer, losses, trainer.params(0))


@pytest.fixture
def sharded(trained_sharded: Sharded) -> GridTrainer:
    return trained_sharded.trainer


@pytest.mark.slow
def test_training_with_a_sharded_optimizer_equals_the_plain_loop(reference: Any, trained_sharded: Sharded) -> None:
    assert_same_training(trained_sharded.losses, trained_sharded.params, *reference)


@pytest.mark.slow
def test_every_device_holds_a_quarter_of_the_moments_and_half_of_the_parameters(sharded: GridTrainer) -> None:
    (own, *_), params = sharded.shared_states[0], sharded.held[0, 0].params["layers.0"]
    moments = next(each for each in own if isinstance(each, optax.ScaleByAdamState)).mu["layers.0"]
    for name in ("gate", "up", "down"):
        moment, param = moments["mlp"][name]["kernel"], params["mlp"][name]["kernel"]
        assert {shard.data.size for shard in moment.addressable_shards} == {param.size // 4}
        assert len({str(shard.index) for shard in moment.addressable_shards}) == 4
        assert {shard.data.size for shard in param.addressable_shards} == {param.size // 2}
    sizes = sharded.programs[0, 0].sizes
    held = jax.tree.leaves((sharded.shared_states[0], sharded.held[0, 0].params))
    assert sizes.optimizer_bytes + sizes.params_bytes == sum(leaf.addressable_data(0).nbytes for leaf in held)
    assert sizes.optimizer_bytes < 1.1 * sizes.params_bytes  # two moments, each cut in two


def test_a_step_left_out_changes_no_bit(sharded: GridTrainer) -> None:
    before = jax.device_get((sharded.params(0), sharded.shared_states))
    sharded.step(BATCHES[0], apply=False)
    jax.tree.map(np.testing.assert_array_equal, (sharded.params(0), sharded.shared_states), before)
    assert not any(leaf.any() for held in sharded.held.values() for leaf in jax.tree.leaves(held.accumulators))


def test_programs_that_replicas_replace_are_not_there(sharded: GridTrainer) -> None:
    alone = sharded.programs[0, 0]
    with pytest.raises(ValueError, match="chunk 0 has replicas, which reduce together"):
        alone.updates.reduce(alone.zeros())
    with pytest.raises(ValueError, match="replicas of chunk 0 share its optimizer state"):
        alone.updates.update({}, (), {}, 1.0, True)
    assert {"reduce", "update embedding", "update layers.0"} <= alone.compiled.keys()
