"""Microbatches of several shapes, with and without images and sounds, where parts of the model are frozen."""

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.programs.chunk import param_specs
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.programs.shapes import pick
from rrfp_jax.schedules import Placement, TaskKind
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training
from tests.ragged import CHUNKS, EDGES, as_batch, make_steps, train_plainly

OPTIMIZER = optax.adamw(1e-2)
PLACEMENT = Placement((0, 1, 0, 1, 2))
STEPS = make_steps(20, 3)
BUCKETS = [microbatch for step in STEPS for microbatch in step]


@pytest.mark.slow
@pytest.mark.parametrize("hint", [pytest.param("bf", marks=pytest.mark.slow), "bfw"])
@pytest.mark.parametrize(
    ("patterns", "kinds"),
    [
        (["embedding", "merge", "layer", "head", "sound"], ["FI", "F", "FI", "FI", "FI"]),
        pytest.param(["image", "sound", "embedding", "layer"], ["F", "F", "FI", "FI", "FI"], marks=pytest.mark.slow),
    ],
    ids=["one encoder trains", "the decoder trains"],
)
def test_mixed_microbatches(patterns: list[str], kinds: list[str], hint: str) -> None:
    chunks = freeze(CHUNKS, patterns)
    frozen = {name: name in chunk.frozen for chunk in chunks for name in param_specs(chunk)}
    options = {"edges": EDGES, "placement": PLACEMENT, "optimizer": OPTIMIZER, "hint": hint, "clip_norm": 1e6}
    with make_pipeline(chunks, progress_deadline_s=60, **options) as pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        pipeline.prepare(as_batch(STEPS[0]), buckets=BUCKETS)
        results = []
        for microbatches in STEPS:
            state, metrics = pipeline.step(state, as_batch(microbatches))
            results.append(metrics.result())
        params = jax.tree.map(np.array, pipeline.params(state))
    parts = {True: optax.set_to_zero(), False: OPTIMIZER}
    losses, _, expected = train_plainly(initial, optax.multi_transform(parts, frozen), STEPS)
    changing = [name for name, is_frozen in frozen.items() if not is_frozen]
    assert_same_training([result.loss for result in results], pick(params, changing), losses, pick(expected, changing))
    for name in frozen.keys() - set(changing):
        jax.tree.map(np.testing.assert_array_equal, params[name], initial[name])
    ran = {span.task for result in results for span in result.timeline.spans}
    for chunk, wanted in enumerate(kinds):
        found = {task.kind for task in ran if task.chunk == chunk} - {TaskKind.W, TaskKind.R, TaskKind.U}
        assert found == set(map(TaskKind, wanted if hint == "bfw" else wanted.replace("I", "B")))
