"""Every optimizer by name trains in a pipeline what it trains in the plain loop, wherever its state lies."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.programs.update_functions import scalars_of, update_fault
from rrfp_jax.schedules import linear
from rrfp_jax.training.optimizer import check_groups, learning_rate_schedule, make_optimizer
from rrfp_jax.training.run_config import OPTIMIZERS, SCHEDULES, OptimizerConfig, ParameterGroup
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.test_optimizers import LEAFWISE, PARAMS
from tests.programs.toys import plain_model
from tests.test_pipeline_experts import wide_batches
from tests.test_pipeline_layouts import NUM_STEPS, train
from tests.test_pipeline_training import make_batches

MODEL = LanguageModelConfig(
    vocab_size=32, hidden=16, num_layers=2, num_heads=2, mlp_dim=32, init_std=0.1, tie_embeddings=True
)
SPARSE = replace(MODEL, experts=ExpertsConfig(num_experts=4, experts_per_token=2, every=2), tie_embeddings=False)
GROUPS = (
    ParameterGroup(match=("layers.*.attention.*",), learning_rate_scale=0.1, weight_decay=0.0),
    ParameterGroup(match=("layers.1", "*norm.scale"), learning_rate_scale=2.0, weight_decay=0.3),
)
TOY_GROUP = ParameterGroup(match=("layers.*.up",), learning_rate_scale=0.5)
FIELDS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "adafactor": {"min_dim_size_to_factor": 8}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas that share the state": {"data": 2, "shard_optimizer": True},
    "replicas that hold shares": {"data": 4, "shard_optimizer": True, "reduce": "messages"},
    "tensor": {"mesh": {"tensor": 2}},
    "fsdp": {"mesh": {"fsdp": 2}},
    "fsdp, shared": {"mesh": {"fsdp": 2}, "data": 2, "shard_optimizer": True},
}


def config_of(name: str, schedule: str) -> OptimizerConfig:
    decay = {"decay_steps": 2} if schedule == "warmup-stable-decay" else {}
    return OptimizerConfig(
        name=name,
        learning_rate=3e-3,
        schedule=schedule,
        warmup_steps=1,
        groups=GROUPS,
        arguments=FIELDS.get(name, {}),
        **decay,
    )


@cache
def plain(name: str, schedule: str, model: LanguageModelConfig) -> tuple[list[Chunk], Any, Any]:
    """The chunks, the optimizer, and what the plain loop makes of them."""
    config = config_of(name, schedule)
    optimizer = make_optimizer(config, learning_rate_schedule(config, NUM_STEPS))
    chunks = language_model(model).split(2)
    params = model_params(chunk.init(jax.random.key(1)) for chunk in chunks)
    check_groups(config, params)
    return chunks, optimizer, train_plainly(chunks, params, optimizer, wide_batches(), clip_norm=1.0)


def check(name: str, schedule: str = "cosine", model: LanguageModelConfig = MODEL, **options: Any) -> None:
    chunks, optimizer, expected = plain(name, schedule, model)
    pipeline = make_pipeline(
        chunks, placement=linear(2), optimizer=optimizer, clip_norm=1.0, progress_deadline_s=120, **options
    )
    assert_same_training(*train(pipeline, wide_batches()), *expected)


@pytest.mark.slow
def test_muon_trains_whole_matrices_where_replicas_share_its_state() -> None:
    config = OptimizerConfig(name="muon", learning_rate=3e-3, arguments={"newton_schulz_steps": 2}, groups=(TOY_GROUP,))
    optimizer = make_optimizer(config, learning_rate_schedule(config, 3))
    chunks, batches = plain_model((1, 1)), make_batches(3)
    params = model_params(chunk.init(jax.random.key(1)) for chunk in chunks)
    pipeline = make_pipeline(
        chunks, placement=linear(2), optimizer=optimizer, clip_norm=1.0, data=2, shard_optimizer=True
    )
    assert_same_training(*train(pipeline, batches), *train_plainly(chunks, params, optimizer, batches, clip_norm=1.0))


def test_a_learning_rate_that_decays_by_place_in_the_tree_is_refused() -> None:
    def decayed(updates: Any, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        return structure.unflatten([leaf * 0.5 ** (len(leaves) - index) for index, leaf in enumerate(leaves)])

    optimizer = optax.chain(optax.sgd(0.1), optax.stateless(decayed))
    with pytest.raises(ValueError, match=r"updates .* otherwise in a part .* not on its place among the arrays"):
        make_pipeline(plain_model((1, 1)), placement=linear(2), optimizer=optimizer).init(jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [MODEL, SPARSE], ids=["tied", "experts"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_groups_trains_what_the_plain_loop_does(
    name: str, model: LanguageModelConfig, layout: str
) -> None:
    check(name, model=model, hint="bfw", **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_what_the_plain_loop_does(schedule: str) -> None:
    check("adamw", schedule)


def divided(count: Any) -> Any:
    """A learning rate that is infinite at the third update."""
    return 0.1 / (2.0 - count)


FAULTS: dict[str, tuple[Any, list[bool]]] = {
    "not a number": (lambda: optax.adam(float("nan")), [True] * 4),
    "infinite": (lambda: optax.sgd(float("inf")), [True] * 4),
    "a schedule that divides by zero": (lambda: optax.adamw(divided), [False, False, True, True]),
    "of one chunk's layers": (
        lambda: optax.partition(
            {"good": optax.sgd(0.1), "bad": optax.sgd(divided)},
            lambda params: {name: "bad" if name == "final" else "good" for name in params},
        ),
        [False, False, True, True],
    ),
    "accumulated over two steps": (
        lambda: optax.MultiSteps(optax.sgd(lambda count: jnp.where(count, jnp.nan, 0.1)), 2).gradient_transformation(),
        [False, False, True, True],
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "replicas": {"data": 2},
    "replicas that share the state": {"data": 2, "shard_optimizer": True},
    "replicas that hold shares": {"data": 4, "shard_optimizer": True, "reduce": "messages"},
    "on a mesh": {"mesh": {"tensor": 2}},
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("fault", "way"), [*((fault, "alone") for fault in FAULTS), *(("of one chunk's layers", way) for way in WAYS)]
)
def test_an_update_that_cannot_be_finite_changes_nothing_on_any_stage(fault: str, way: str) -> None:
    optimizer, expected = FAULTS[fault]
    with make_pipeline(plain_model((1, 1)), placement=linear(2), optimizer=optimizer(), **WAYS[way]) as pipeline:
        state = pipeline.init(jax.random.key(0))
        skipped = []
        for batch in make_batches(4):
            before = jax.tree.map(np.array, pipeline.params(state))
            state, metrics = pipeline.step(state, batch)
            result = metrics.result()
            skipped.append(result.skipped)
            assert np.isfinite(result.grad_norm)
            after = jax.tree.map(np.array, pipeline.params(state))
            if result.skipped:
                assert "update of chunk" in result.fault
                jax.tree.map(np.testing.assert_array_equal, before, after)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert skipped == expected


@pytest.mark.parametrize("optimizer", LEAFWISE.values(), ids=LEAFWISE)
def test_no_fault_is_seen_where_none_is(optimizer: optax.GradientTransformation) -> None:
    fault = update_fault(optimizer, PARAMS)
    state = optimizer.init(jax.tree.map(lambda spec: jnp.ones(spec.shape, spec.dtype), PARAMS))
    assert not fault(scalars_of(state))
