"""Mixtures of experts in a pipeline: the losses and parameters of the plain loop, routers' losses included."""

from dataclasses import replace
from functools import cache
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_layouts import NUM_STEPS, OPTIMIZER, make_batches, train

EXPERTS = ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=16, balance_coefficient=0.02, z_coefficient=0.001)
CONFIG = LanguageModelConfig(
    vocab_size=32, hidden=16, num_layers=2, num_heads=2, mlp_dim=32, init_std=0.1, experts=EXPERTS
)
LOUD = replace(EXPERTS, balance_coefficient=50.0, z_coefficient=10.0)
"""Nearly all of the loss is the routers'."""
PLACES = replace(EXPERTS, capacity_factor=1.0, shared_mlp_dim=8, shared_gate=True)
MESHES: dict[str, dict[str, int]] = {
    "one device": {},
    "expert x fsdp": {"expert": 2, "fsdp": 2},
    "tensor x expert": {"tensor": 2, "expert": 2},
}


def wide_batches() -> list[dict[str, np.ndarray]]:
    """Four rows, which divide over every mesh."""
    batches = make_batches()
    others = [*batches[1:], batches[0]]
    return [
        {name: np.concatenate([batch[name], other[name]], axis=1) for name in batch}
        for batch, other in zip(batches, others, strict=True)
    ]


@cache
def plain(experts: ExpertsConfig, num_steps: int) -> Any:
    """The chunks, what the plain loop makes of them, and each step's named sums over its weight."""
    chunks = language_model(replace(CONFIG, experts=experts)).split(2)
    params = {name: layer for chunk in chunks for name, layer in chunk.init(jax.random.key(1)).items()}
    means: list[dict[str, float]] = []
    batches = wide_batches()[:num_steps]
    return chunks, train_plainly(chunks, params, OPTIMIZER, batches, clip_norm=1.0, means=means), means


def check(experts: ExpertsConfig, *, num_steps: int = NUM_STEPS, **options: Any) -> None:
    chunks, expected, expected_means = plain(experts, num_steps)
    pipeline = make_pipeline(
        chunks, placement=linear(2), optimizer=OPTIMIZER, clip_norm=1.0, progress_deadline_s=120, **options
    )
    means: list[dict[str, float]] = []
    assert_same_training(*train(pipeline, wide_batches()[:num_steps], means), *expected)
    assert [set(step) for step in means] == [{"router_loss"}] * num_steps
    chex.assert_trees_all_close(means, expected_means, rtol=1e-6)


@pytest.mark.slow
def test_experts_on_a_mesh_train_what_the_plain_loop_does() -> None:
    check(EXPERTS, num_steps=2, mesh={"expert": 2, "fsdp": 2}, hint="bfw")


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("experts", [EXPERTS, PLACES], ids=["dropless", "capacity"])
def test_every_way_to_run_trains_what_the_plain_loop_does(
    experts: ExpertsConfig, mesh: str, hint: str, remat: str
) -> None:
    layout = {"mesh": MESHES[mesh]} if MESHES[mesh] else {}
    check(experts, hint=hint, remat=remat, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_router_loss_is_that_of_plain_jit(mesh: str) -> None:
    """To 1e-6, in microbatches that differ in weight."""
    check(LOUD, **({"mesh": MESHES[mesh]} if MESHES[mesh] else {}))


@pytest.mark.slow
def test_experts_learn_at_least_as_well_as_a_dense_model_of_equal_active_size() -> None:
    """A random table says which token follows which; the loss without the routers' is compared."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, 32, (32, 32))
    batches = [following(table, rng) for _ in range(150)]
    rest: dict[str, Any] = {"num_layers": 1, "init_std": 0.1}
    falls = []
    for experts in (None, replace(EXPERTS, num_experts=8, balance_coefficient=0.01, z_coefficient=0.0)):
        config = replace(CONFIG, **rest, experts=experts)
        assert config.num_layer_params(active=True) - 16 * 8 * (experts is not None) == (
            replace(CONFIG, **rest, experts=None).num_layer_params()
        )
        chunks = language_model(config).split(1)
        losses, _ = train_plainly(chunks, chunks[0].init(jax.random.key(1)), optax.adam(5e-3), batches)
        falls.append(np.mean(losses[:3]) - np.mean(losses[-10:]))  # a router's loss hardly changes
    assert falls[0] > 0.3
    assert falls[1] >= 0.95 * falls[0], falls


def following(table: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows in which the last two tokens say the next one."""
    rows = rng.integers(0, 32, (2, 8, 17))
    for at in range(2, 17):
        rows[..., at] = table[rows[..., at - 2], rows[..., at - 1]]
    rows = rows.astype(np.int32)
    return {"tokens": rows[..., :-1], "targets": rows[..., 1:], "weights": np.ones((2, 8, 16), np.float32)}
