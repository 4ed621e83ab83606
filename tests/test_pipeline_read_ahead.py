"""A real pipeline whose encoder gets no gradient: it never runs further ahead than it may, and trains the same."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import Message, MessageKind, Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.runtime.mailbox import Mailbox
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import Edge, TaskKind, linear
from rrfp_jax.testing import DelayedStage

WIDTH, NUM_MICROBATCHES = 16, 64


def dense(name: str) -> Any:
    return lambda key: {name: {"kernel": 0.3 * jax.random.normal(key, (WIDTH, WIDTH))}}


def encode(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    return jnp.tanh(leaves["image"] @ params["encode"]["kernel"])


def decode(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    for _ in range(30):  # much slower than the encoder
        inputs = jnp.tanh(inputs @ params["decode"]["kernel"])
    return inputs


def loss(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    return jnp.sum((inputs @ params["last"]["kernel"] - leaves["target"]) ** 2), jnp.float32(inputs.shape[0])


CHUNKS = [
    Chunk(name="encode", init=dense("encode"), apply=encode, leaves=("image",)),
    Chunk(name="decode", init=dense("decode"), apply=decode),
    Chunk(name="last", init=dense("last"), apply=loss, leaves=("target",)),
]
EDGES = (Edge(0, 1, carries_gradient=False), Edge(1, 2))


@pytest.fixture(scope="module")
def trained() -> dict[int, tuple[list[float], list[int]]]:
    """For each bound the losses, and how much had not been taken at each start of an encoder's task."""
    pipeline = Pipeline(CHUNKS, placement=linear(3), edges=EDGES, optimizer=optax.sgd(1e-3))
    rng = np.random.default_rng(0)
    shape = (NUM_MICROBATCHES, 32, WIDTH)
    batches = [{name: rng.normal(size=shape).astype(np.float32) for name in ("image", "target")} for _ in range(3)]
    found = {}
    for bound in (1, 4, NUM_MICROBATCHES):
        with pipeline.reordered(Ordering(hint="f-priority", read_ahead=bound)) as bounded:
            state = bounded.init(jax.random.key(0))
            losses, untaken = [], []
            for batch in batches:
                state, metrics = bounded.step(state, batch)
                result = metrics.result()
                losses.append(float(result.loss))
                forwards = [span for span in result.timeline.spans if span.task.kind is TaskKind.F]
                begun = [span.start_s for span in forwards if span.task.chunk == 0]
                taken = [span.end_s for span in forwards if span.task.chunk == 1]
                untaken += [sum(at <= now for at in begun) - sum(at <= now for at in taken) for now in begun]
            found[bound] = losses, untaken
    return found


def test_never_further_ahead_than_it_may(trained: dict[int, tuple[list[float], list[int]]]) -> None:
    for bound, (_, untaken) in trained.items():
        assert len(untaken) == 3 * NUM_MICROBATCHES
        assert max(untaken) <= bound
    assert max(trained[4][1]) == 4
    assert max(trained[NUM_MICROBATCHES][1]) > 4


def test_the_same_training_whatever_the_bound(trained: dict[int, tuple[list[float], list[int]]]) -> None:
    for (losses, _), (others, _) in pairwise(trained.values()):
        np.testing.assert_allclose(losses, others, rtol=1e-5)


def test_the_inbox_holds_no_more_bytes_than_the_bound_has_features(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, rows, held = 4, 32, [0]
    accept, take = Mailbox.accept, Mailbox.take

    def is_feature(message: Message) -> bool:
        return message.kind is MessageKind.ACTIVATION and message.target == 1

    def counted_accept(self: Mailbox, step: int, message: Message, payload: Any) -> None:
        if is_feature(message):
            held.append(held[-1] + payload.nbytes)
        accept(self, step, message, payload)

    def counted_take(self: Mailbox, step: int, message: Message) -> Any:
        value = take(self, step, message)
        if is_feature(message):
            held.append(held[-1] - value.nbytes)
        return value

    monkeypatch.setattr(Mailbox, "accept", counted_accept)
    monkeypatch.setattr(Mailbox, "take", counted_take)
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(NUM_MICROBATCHES, rows, WIDTH)).astype(np.float32) for name in ("image", "target")}
    slow = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, lambda _, task: 3e-3 * (task.chunk > 0)))
    order = Ordering(hint="f-priority", window=2, read_ahead=bound)
    with Pipeline(
        CHUNKS, placement=linear(3), edges=EDGES, optimizer=optax.sgd(1e-3), ordering=order, options=slow
    ) as pipeline:
        state = pipeline.init(jax.random.key(0))
        for _ in range(2):
            state, metrics = pipeline.step(state, batch)
        metrics.result()
    features = rows * WIDTH * 4
    assert held[-1] == 0
    assert features < max(held) <= bound * features


def test_what_waits_for_a_chunk_that_runs_forward_only_is_forecast() -> None:
    frozen = [replace(chunk, frozen=frozenset({chunk.name})) for chunk in CHUNKS[:2]]
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(8, 512, WIDTH)).astype(np.float32) for name in ("image", "target")}
    slow = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, lambda _, task: 3e-3 * (task.chunk > 0)))
    order = Ordering(hint="f-priority", window=8)
    with Pipeline(
        [*frozen, CHUNKS[2]], placement=linear(3), optimizer=optax.sgd(1e-3), ordering=order, options=slow
    ) as pipeline:
        _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), batch)
        measured = metrics.result().peak_memory_bytes
        features = 512 * WIDTH * 4
        assert measured[1] > pipeline.forecast[1].fixed + 2 * features
        assert all(peak <= forecast.peak for forecast, peak in zip(pipeline.forecast, measured, strict=True))
