"""Steps that leave weight gradients out train as a plain loop in which those parameters are constants there."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear, looped
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, holding_still, train_plainly, with_still
from tests.test_pipeline_context import make_batches

MODEL = LanguageModelConfig(
    vocab_size=32, hidden=16, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=32, init_std=0.1
)
NUM_STEPS = 4
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
Pairs = list[tuple[int, int]]


def batches() -> list[dict[str, np.ndarray]]:
    kept = ("tokens", "targets", "weights")
    return [{name: batch[name] for name in kept} for batch in make_batches(NUM_STEPS)]


def chunks_of(number: int, **ways: Any) -> Sequence[Chunk]:
    return language_model(replace(MODEL, num_layers=number, **ways)).split(number)


def draw_pairs(num_chunks: int) -> list[Pairs]:
    """The pairs of every step: none, some, all of one chunk, all of one microbatch."""
    num_microbatches = len(batches()[0]["tokens"])
    every = [(chunk, m) for chunk in range(num_chunks) for m in range(num_microbatches)]
    draw = np.random.default_rng(3)
    some = [pair for pair in every if draw.random() < 0.6]
    return [[], some, [pair for pair in every if pair[0] == 1], [pair for pair in every if pair[1] == 1]]


@cache
def plain(num_chunks: int, *, tied: bool = False) -> Any:
    told = [
        with_still(batch, pairs, num_chunks) for batch, pairs in zip(batches(), draw_pairs(num_chunks), strict=True)
    ]
    made = chunks_of(num_chunks, tie_embeddings=tied)
    params = {name: leaf for chunk in made for name, leaf in chunk.init(jax.random.key(1)).items()}
    norms: list[float] = []
    held = [holding_still(chunk, index) for index, chunk in enumerate(made)]
    return *train_plainly(held, params, OPTIMIZER, told, clip_norm=1.0, norms=norms), norms


def train(*, tied: bool = False, **ways: Any) -> Any:
    options = {"placement": linear(4), "clip_norm": 1.0, "progress_deadline_s": 120} | ways
    num_chunks = options["placement"].num_chunks
    if name := options.get("schedule"):
        request = ScheduleRequest(
            num_stages=options["placement"].num_stages, num_microbatches=len(batches()[0]["tokens"])
        )
        options["schedule"] = build_schedule(name, request)
    with make_pipeline(chunks_of(num_chunks, tie_embeddings=tied), optimizer=OPTIMIZER, **options) as pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch, pairs in zip(batches(), draw_pairs(num_chunks), strict=True):
            state, metrics = pipeline.step(state, batch, left_out=pairs)
            results.append(metrics)
        told = [metrics.result() for metrics in results]
        assert [each.weights_left_out for each in told] == [len(pairs) for pairs in draw_pairs(num_chunks)]
        params = jax.tree.map(np.asarray, pipeline.params(state))
    return [each.loss for each in told], params, [each.grad_norm for each in told]


@pytest.mark.parametrize(
    "way",
    [
        {"schedule": "zb-h1", "placement": linear(2)},
        pytest.param({"hint": "bfw", "tied": True}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zb-h1", "consume": "strict"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "1f1b-split"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "schedule": "zb-v",
                "placement": build_schedule("zb-v", ScheduleRequest(num_stages=2, num_microbatches=4)).placement,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"hint": "bfw", "placement": looped(2, 2), "data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_is_that_of_a_plain_loop(way: dict[str, Any]) -> None:
    losses, params, norms = train(**way)
    expected_losses, expected_params, expected_norms = plain(
        way.get("placement", linear(4)).num_chunks, tied=way.get("tied", False)
    )
    assert_same_training(losses, params, expected_losses, expected_params)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["collective", "messages"])
def test_orders_leave_every_bit_alone(reduce: str) -> None:
    ways = {"deterministic": True, "placement": looped(2, 2), "data": 2, "reduce": reduce}
    losses, params, norms = train(hint="bfw", **ways)
    again = train(hint="f-priority", window=1, backward="split", **ways)
    assert (losses, norms) == (again[0], again[2])
    jax.tree.map(np.testing.assert_array_equal, params, again[1])


def test_pairs_that_no_step_can_leave_out_are_refused() -> None:
    batch = batches()[0]
    every = [(chunk, m) for chunk in range(2) for m in range(len(batch["tokens"]))]
    cases = {
        "left_out has chunk 2 with microbatch 0: there are 2 chunks": [(2, 0)],
        "left_out has 3 (int): give pairs of a chunk and a microbatch": [3],
        "left_out has every weight gradient of the step, and nothing would train: leave out fewer": every,
    }
    with make_pipeline(chunks_of(2), optimizer=OPTIMIZER, placement=linear(2), hint="bfw") as pipeline:
        state = pipeline.init(jax.random.key(1))
        for message, pairs in cases.items():
            with pytest.raises(ValueError, match=re.escape(message)):
                pipeline.step(state, batch, left_out=pairs)
        state, metrics = pipeline.step(state, batch, left_out=every[1:])
        assert metrics.result().weights_left_out == len(every) - 1
        whole = pipeline.reordered(Ordering(hint="bf"))
        state = whole.init(jax.random.key(1))
        with whole, pytest.raises(ValueError, match="left_out has chunk 1, whose backward runs in one piece: take"):
            whole.step(state, batch, left_out=[(1, 0)])
