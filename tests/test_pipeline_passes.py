"""Passes of one set of parameters, edges that carry a part of an output, and losses of chunks that others read: a
sequence in slices, whose later slices attend to the earlier ones, against a plain loop over whole sequences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.schedules import Edge, Placement

STAGES, SLICES, MICROBATCHES = 2, 3, 4
ROWS, WIDTH, VOCAB = 2, 8, 17
CUTS = (0, 5, 9, 12)
OPTIMIZER = optax.adam(1e-2)
EDGES = [
    *(Edge(q, SLICES + q, part="stream") for q in range(SLICES)),
    *(
        Edge(stage * SLICES + q, stage * SLICES + later, part="keys")
        for stage in range(STAGES)
        for q in range(SLICES)
        for later in range(q + 1, SLICES)
    ),
]
PLACEMENT = Placement(tuple(stage for stage in range(STAGES) for _ in range(SLICES)))


def attend(layer: dict[str, jax.Array], x: jax.Array, earlier: list[Any], start: int) -> tuple[jax.Array, Any]:
    """A layer ``[rows, positions, width]`` whose positions read the sums of earlier ones; returns its own keys too."""
    own = jnp.tanh(x @ layer["key"])
    keys = jnp.concatenate([*earlier, own], axis=1)
    places = start + jnp.arange(x.shape[1])
    scores = jnp.einsum("bqd,bkd->bqk", x @ layer["query"], keys)
    seen = places[:, None] >= jnp.arange(keys.shape[1])
    x = x + jax.nn.softmax(jnp.where(seen, scores, -1e30)) @ keys
    return x + jnp.tanh(x @ layer["up"]), own


def init(key: jax.Array, *, stage: int) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    square = {
        name: jax.random.normal(k, (WIDTH, WIDTH)) / 3 for name, k in zip(("key", "query", "up"), keys, strict=False)
    }
    ends = {"embedding": jax.random.normal(keys[3], (VOCAB, WIDTH))} if stage == 0 else {}
    ends |= {"head": jax.random.normal(keys[3], (WIDTH, VOCAB)) / 3} if stage == STAGES - 1 else {}
    return {f"layer.{stage}": square, **ends}


def token_losses(params: Any, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets)
    return jnp.sum(losses), jnp.asarray(losses.size, jnp.float32)


def run(params: Any, inputs: Any, leaves: Any, *, key: Any, stage: int, part: int) -> Any:
    at = slice(CUTS[part], CUTS[part + 1])
    inputs = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    x, earlier = (params["embedding"][leaves["tokens"][:, at]], inputs) if stage == 0 else (inputs[0], inputs[1:])
    x, own = attend(params[f"layer.{stage}"], x, list(earlier), CUTS[part])
    if stage < STAGES - 1:
        return {"stream": x, "keys": own}
    return {"loss": token_losses(params, x, leaves["targets"][:, at]), "keys": own}


def chunk(stage: int, part: int) -> Chunk:
    leaf = "tokens" if stage == 0 else "targets"
    first = partial(init, stage=stage)
    return Chunk(
        name=f"stage {stage}, slice {part}",
        init=first,
        apply=partial(run, stage=stage, part=part),
        leaves=(leaf,),
        shared=frozenset(jax.eval_shape(first, jax.random.key(0))),
        gives_loss=stage == STAGES - 1,
    )


CHUNKS = [chunk(stage, part) for stage in range(STAGES) for part in range(SLICES)]


def batches(number: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(VOCAB, size=(MICROBATCHES, ROWS, CUTS[-1] + 1)).astype(np.int32) for _ in range(number)]
    return [{"tokens": each[..., :-1], "targets": each[..., 1:]} for each in drawn]


def plain(params: Any, number: int) -> tuple[list[float], Any]:
    def loss(params: Any, batch: Any) -> jax.Array:
        total = weight = jnp.zeros(())
        for m in range(MICROBATCHES):
            x = params["embedding"][batch["tokens"][m]]
            for stage in range(STAGES):
                x, _ = attend(params[f"layer.{stage}"], x, [], 0)
            summed, own = token_losses(params, x, batch["targets"][m])
            total, weight = total + summed, weight + own
        return total / weight

    step, state, losses = jax.jit(jax.value_and_grad(loss)), OPTIMIZER.init(params), []
    for batch in batches(number):
        value, grads = step(params, batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


def train(number: int = 3, *, inspect: Callable[[Pipeline, Any], None] | None = None, **settings: Any) -> Any:
    updates = UpdateRules(deterministic=settings.pop("deterministic", False))
    with Pipeline(
        CHUNKS, optimizer=OPTIMIZER, placement=PLACEMENT, edges=EDGES, ordering=Ordering(**settings), updates=updates
    ) as pipeline:
        state = pipeline.init(jax.random.key(0))
        start, losses = jax.tree.map(np.array, pipeline.params(state)), []
        for batch in batches(number):
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        if inspect is not None:
            inspect(pipeline, state)
        return start, losses, jax.tree.map(np.array, pipeline.params(state))


ORDERS: list[dict[str, Any]] = [
    {"hint": "bf-deep", "window": 2},
    {"hint": "fb", "window": 1},
    {"hint": "bfw", "window": 3},
    {"hint": "bf", "backward": "split"},
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order['hint']} {order.get('backward', '')}")
@pytest.mark.one_in(2)
def test_slices_train_like_whole_sequences(order: dict[str, Any]) -> None:
    start, losses, params = train(**order)
    expected, known = plain(start, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), params, known)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order() -> None:
    _, losses, params = train(deterministic=True, **ORDERS[0])
    for order in ORDERS[1:]:
        _, others, there = train(deterministic=True, **order)
        assert others == losses
        jax.tree.map(np.testing.assert_array_equal, there, params)


def test_passes_hold_one_state() -> None:
    def inspect(pipeline: Pipeline, state: Any) -> None:
        held = pipeline.chunk_states(state)
        assert [number for number, _ in held] == [0, SLICES]
        assert pipeline.num_params() == [
            sum(x.size for x in jax.tree.leaves(init(jax.random.key(0), stage=s))) for s in range(STAGES)
        ]

    train(1, inspect=inspect)
