"""Two encoders feed one decoder, and some microbatches skip an encoder: the same training as the plain loop's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import Edge, Placement, linear
from tests.plain_loop import assert_same_training, train_plainly

WIDTH, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 20
EDGES = (Edge(0, 2), Edge(1, 2), Edge(2, 3))
OPTIMIZER = optax.adamw(1e-2)


def dense(name: str, num_inputs: int) -> Any:
    def init(key: jax.Array) -> dict[str, Any]:
        return {name: {"kernel": 0.5 * jax.random.normal(key, (num_inputs, WIDTH)), "bias": jnp.zeros(WIDTH)}}

    return init


def apply_dense(layer: Any, value: Any) -> Any:
    return jnp.tanh(value @ layer["kernel"] + layer["bias"])


def encoder(name: str) -> Chunk:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return apply_dense(params[name], leaves[name])

    return Chunk(name=name, init=dense(name, WIDTH), apply=apply, leaves=(name,))


def fuse(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    image, audio = inputs
    return apply_dense(params["fuse"], jnp.concatenate([image, audio], axis=-1))


def loss(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    errors = jnp.sum((apply_dense(params["decode"], inputs) - leaves["target"]) ** 2)
    return errors, jnp.float32(inputs.shape[0])


CHUNKS = [
    encoder("image"),
    encoder("audio"),
    Chunk(name="fuse", init=dense("fuse", 2 * WIDTH), apply=fuse),
    Chunk(name="decode", init=dense("decode", WIDTH), apply=loss, leaves=("target",)),
]


def make_batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (NUM_MICROBATCHES, 2, WIDTH)
    return [
        {name: rng.normal(size=shape).astype(np.float32) for name in ("image", "audio", "target")}
        for _ in range(NUM_STEPS)
    ]


def absent_pairs(step: int) -> frozenset[tuple[int, int]]:
    """Which encoder each microbatch skips, another pattern every step."""
    return frozenset((0, m) if (step + m) % 3 == 0 else (1, m) for m in range(NUM_MICROBATCHES) if (step + m) % 2)


def as_zeros_where_absent(batches: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """For the plain loop, which always runs both encoders: a mask says which outputs count."""
    masked = []
    for step, batch in enumerate(batches):
        present = np.ones((NUM_MICROBATCHES, 2), np.float32)
        for chunk, microbatch in absent_pairs(step):
            present[microbatch, chunk] = 0
        masked.append({**batch, "present": present})
    return masked


def plain_chunks() -> list[Chunk]:
    """The same model, with encoders that give zeros where they are absent."""

    def masked(index: int, chunk: Chunk) -> Chunk:
        def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
            return chunk.apply(params, inputs, leaves, key=key) * leaves["present"][index]

        return Chunk(name=chunk.name, init=chunk.init, apply=apply, leaves=(*chunk.leaves, "present"))

    return [masked(0, CHUNKS[0]), masked(1, CHUNKS[1]), *CHUNKS[2:]]


def plain_inputs(outputs: list[Any], chunk: int) -> Any:
    if chunk < 2:
        return None
    return tuple(outputs) if chunk == 2 else outputs[-1]


@pytest.fixture(scope="module")
def straight() -> Pipeline:
    return Pipeline(CHUNKS, placement=linear(4), edges=EDGES, optimizer=OPTIMIZER)


@pytest.mark.parametrize("placement", [linear(4), Placement((0, 1, 1, 0))], ids=["linear", "encoder-with-decoder"])
def test_microbatches_that_skip_an_encoder(straight: Pipeline, placement: Placement) -> None:
    batches, base = make_batches(), straight
    if placement != base.placement:
        base = Pipeline(CHUNKS, placement=placement, edges=EDGES, optimizer=OPTIMIZER)
    with base.reordered(Ordering(window=2)) as pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        results = []
        for step, batch in enumerate(batches):
            state, metrics = pipeline.step(state, batch, absent=absent_pairs(step))
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        ran = {str(span.task) for span in results[1].result().timeline.spans}
    assert all(f"{chunk}F{m}" not in ran and f"{chunk}B{m}" not in ran for chunk, m in absent_pairs(1))
    expected = train_plainly(plain_chunks(), initial, OPTIMIZER, as_zeros_where_absent(batches), inputs_of=plain_inputs)
    assert_same_training([metrics.result().loss for metrics in results], params, *expected)


def test_a_microbatch_without_any_encoder_is_refused_and_nothing_has_changed(straight: Pipeline) -> None:
    batches = make_batches()
    with straight.reordered() as pipeline:
        state = pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match="chunk 2 is left without any input"):
            pipeline.step(state, batches[0], absent={(0, 1), (1, 1)})
        state, metrics = pipeline.step(state, batches[0])
        assert np.isfinite(metrics.result().loss)


def test_zeros_for_what_microbatches_may_skip_are_forecast() -> None:
    batch = make_batches()[0]
    fixed = {}
    for is_optional in (False, True):  # whose place holds None instead
        edges = [edge._replace(is_optional=is_optional and edge.target == 2) for edge in EDGES]
        with Pipeline(CHUNKS, placement=linear(4), edges=edges, optimizer=OPTIMIZER) as pipeline:
            pipeline.init(jax.random.key(0))
            pipeline.prepare(batch)
            fixed[is_optional] = [forecast.fixed for forecast in pipeline.forecast]
    one = batch["image"][0].nbytes
    assert [a - b for a, b in zip(fixed[False], fixed[True], strict=True)] == [0, 0, 2 * one, 0]
