"""Two encoders and a decoder in which parts are frozen train what the plain loop trains."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import vision_language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.schedules import Placement, Task, TaskKind
from tests.models.encoder_reference import AUDIO, PACKED, make_leaves, small_model
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import with_cheap_init

NUM_STEPS, NUM_MICROBATCHES = 20, 3
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
"""Adam would make numbers of the rounding errors that are the gradients of biases of keys."""
CONFIG = small_model(PACKED, AUDIO)
GRAPH = vision_language_model(CONFIG).split(
    encoder_layers_per_chunk=[1, 2], decoder_layers_per_chunk=[1, 1], packed=True
)
PLACEMENT = Placement((0, 1, 0, 1, 2))
"""The vision encoder in two chunks, the audio encoder beside its first, the decoder behind both."""


def make_batch(step: int) -> dict[str, np.ndarray]:
    leaves = [make_leaves(CONFIG, seed=step * NUM_MICROBATCHES + m) for m in range(NUM_MICROBATCHES)]
    return {name: np.stack([each[name] for each in leaves]) for name in leaves[0]}


BATCHES = [make_batch(step) for step in range(NUM_STEPS)]


def plain_inputs(outputs: list[Any], chunk: int) -> Any:
    inputs = tuple(outputs[edge.source] for edge in GRAPH.edges if edge.target == chunk)
    return inputs if len(inputs) > 1 else next(iter(inputs), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patterns", "hint", "forwards_only", "passing"),
    [
        (["vision", "decoder"], "bfw", {0}, {3, 4}),
        pytest.param(["vision", "audio", "projector", "decoder.layers.1"], "bf", {0, 1}, set(), marks=pytest.mark.slow),
    ],
    ids=["the encoder and the decoder", "both encoders"],
)
def test_parts_of_a_vision_language_model(
    patterns: list[str], hint: str, forwards_only: set[int], passing: set[int]
) -> None:
    chunks = freeze([with_cheap_init(chunk) for chunk in GRAPH.chunks], patterns)
    frozen = frozenset().union(*(chunk.frozen for chunk in chunks))
    pipeline: Pipeline = make_pipeline(
        chunks, edges=GRAPH.edges, placement=PLACEMENT, optimizer=OPTIMIZER, hint=hint, clip_norm=1.0,
        progress_deadline_s=60,
    )  # fmt: skip
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        results = []
        for batch in BATCHES:
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result())
        params = jax.tree.map(np.array, pipeline.params(state))
    norms: list[float] = []
    expected = train_plainly(
        chunks, initial, OPTIMIZER, BATCHES, clip_norm=1.0, inputs_of=plain_inputs, frozen=frozen, norms=norms
    )
    assert_same_training([result.loss for result in results], params, *expected)
    np.testing.assert_allclose([result.grad_norm for result in results], norms, rtol=1e-5)
    ran = {span.task for span in results[0].timeline.spans}
    backward = TaskKind.I if hint == "bfw" else TaskKind.B
    for chunk in range(len(chunks)):
        assert (Task(backward, chunk, 0) in ran) == (chunk not in forwards_only)
        assert (Task(TaskKind.U, chunk) in ran) == (chunk not in forwards_only | passing)
