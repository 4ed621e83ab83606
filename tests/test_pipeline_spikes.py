"""Steps that are left out for a spike of the gradient's norm: those of a plain loop with the rule, also resumed."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.programs.agreement import NormHistory, StageReport, agree
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.schedules import linear
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.programs.toys import plain_model
from tests.test_pipeline_training import make_batches

RULE: dict[str, Any] = {"spike_deviations": 2.0, "spike_window": 6}
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)


def is_spike(norm: float, before: list[float], *, spike_deviations: float, spike_window: int) -> bool:
    """OLMo's rule as NumPy writes it."""
    known = np.array(before[-spike_window:])
    if len(known) < max(2, spike_window // 2):
        return False
    return bool(norm - known.mean() > spike_deviations * known.std(ddof=1))


def test_the_history_judges_as_the_published_rule() -> None:
    rng = np.random.default_rng(0)
    norms, found, expected, history = rng.lognormal(0.0, 0.7, 300).tolist(), [], [], NormHistory()
    norms[17:19] = [math.nan, math.inf]
    known: list[float] = []
    for step, norm in enumerate(norms):
        found.append(norm > history.limit(2.0, 16))
        expected.append(is_spike(norm, known, spike_deviations=2.0, spike_window=16))  # no comparison with NaN holds
        for _ in range(2):  # the units of a process add the same
            history.add(step, norm, 16)
        known += [norm] if math.isfinite(norm) else []
    assert found == expected
    assert 5 < sum(found) < 60
    assert list(history.norms) == known[-16:]
    again = NormHistory()
    again.go_on(history.norms)
    assert again.limit(2.0, 16) == history.limit(2.0, 16) > again.limit(1.0, 16)
    assert again.limit(None, 16) == math.inf


def test_a_spike_is_left_out_whatever_else_is_skipped_and_told_in_words() -> None:
    report = StageReport(squared_norms=((0, 36.0),), losses=((0, 0, 3.0, 2.0),))
    verdict = agree([report], largest_norm=2.5, skip_nonfinite=False)
    assert (verdict.apply, verdict.finite, verdict.grad_norm) == (False, True, 3.0)
    assert verdict.fault == "the gradient's norm 3 is a spike: the last steps' norms allow 2.5"
    assert agree([report], largest_norm=3.0).apply
    spoilt = StageReport(squared_norms=((0, math.inf),), losses=((0, 0, 3.0, 2.0),))
    assert agree([spoilt], largest_norm=3.0).fault == "loss or gradients were not finite"


@pytest.mark.parametrize("rule", [{"spike_deviations": 0.0}, {"spike_deviations": math.nan}, {"spike_window": 1}])
def test_rules_that_cannot_be_meant_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"spike_(deviations|window) is .*: give"):
        UpdateRules(**rule)


def batches(number: int) -> list[dict[str, np.ndarray]]:
    """Of which the ninth has one token that counts, and so a norm far above the others'."""
    made = make_batches(number)
    weights = np.zeros_like(made[8]["weights"])
    weights[1, 0, 3] = 1.0
    made[8] |= {"weights": weights, "targets": (made[8]["targets"] + 5) % 11}
    return made


def trained_plainly(chunks: list[Any], made: list[dict[str, np.ndarray]]) -> tuple[list[float], Any, list[bool]]:
    """A loop that leaves out spikes, by rerunning the plain loop without them."""
    params = model_params(chunk.init(jax.random.key(1)) for chunk in chunks)
    norms: list[float] = []
    skipped: list[bool] = []
    losses: list[float] = []
    for step, _ in enumerate(made):
        taken = [batch for batch, is_out in zip(made, skipped, strict=False) if not is_out]
        own: list[float] = []
        found, _ = train_plainly(chunks, params, OPTIMIZER, [*taken, made[step]], norms=own)
        losses.append(found[-1])
        skipped.append(is_spike(own[-1], norms, **RULE))
        norms.append(own[-1])
    taken = [batch for batch, is_out in zip(made, skipped, strict=True) if not is_out]
    return losses, train_plainly(chunks, params, OPTIMIZER, taken)[1], skipped


def run(pipeline: Any, made: list[dict[str, np.ndarray]], folder: Path | None = None) -> tuple[list[Any], Any]:
    with pipeline:
        saver = None if folder is None else RunSaver(folder, pipeline, every=None, minutes=None, keep=1)
        found = None if saver is None else saver.checkpoints.newest()
        state = pipeline.init(jax.random.key(1)) if found is None or saver is None else saver.restore(found)
        pipeline.prepare(made[0], evaluation=EvaluationShapes(buckets=[{n: leaf[0] for n, leaf in made[0].items()}]))
        results = []
        for batch in made[state.step :]:
            pipeline.evaluate(state, batch)  # whose norm of 0 counts for nothing
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        params = jax.tree.map(np.array, pipeline.params(state))
        if saver is not None:
            saver.save(state, {})
            saver.checkpoints.close()
        return [metrics.result() for metrics in results], params


def test_a_stage_leaves_out_a_spike_and_counts_it_among_the_norms() -> None:
    chunk = Chunk(
        name="layer",
        init=lambda key: {"layer": {"w": jnp.ones(2)}},
        apply=lambda params, inputs, leaves, *, key=None: (jnp.sum(leaves["x"] @ params["layer"]["w"]), jnp.float32(2)),
        leaves=("x",),
    )
    sizes = [1.0, 1.1, 0.9, 30.0, 1.2, 25.0, 1.0]
    rule = {"spike_deviations": 3.0, "spike_window": 6}
    with make_pipeline([chunk], placement=linear(1), optimizer=optax.sgd(0.1), **rule) as pipeline:
        state, results = pipeline.init(jax.random.key(0)), []
        for size in sizes:
            state, metrics = pipeline.step(state, {"x": np.full((1, 1, 2), size, np.float32)})
            results.append(metrics.result())
        assert [result.skipped for result in results] == [is_spike(s, sizes[:n], **rule) for n, s in enumerate(sizes)]
        assert sum(result.skipped for result in results) == 1
        np.testing.assert_allclose(pipeline.norms(state), np.multiply(sizes[-6:], np.sqrt(0.5)), 1e-6)


@pytest.mark.slow
def test_a_spike_changes_nothing_and_the_same_steps_are_left_out_after_a_resume(tmp_path: Path) -> None:
    chunks, made = plain_model((1, 1)), batches(10)
    whole, expected = run(make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, **RULE), made)
    left_out = [result.step for result in whole if result.skipped]
    assert 8 in left_out
    assert "is a spike" in str(whole[8].fault)
    parts: list[Any] = []
    for last, options in ((7, {"data": 2}), (10, {"hint": "bfw"})):
        pipeline = make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, **RULE, **options)
        results, params = run(pipeline, made[:last], tmp_path)
        parts += results
    assert [result.step for result in parts if result.skipped] == left_out
    assert_same_training([r.loss for r in parts], params, [r.loss for r in whole], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"hint": "bfw"}, {"data": 2, "shard_optimizer": True}, {"data": 2, "reduce": "messages"}],
    ids=["alone", "split", "sharded", "messages"],
)
def test_the_same_steps_are_left_out_as_in_a_plain_loop(options: dict[str, Any]) -> None:
    chunks, made = plain_model((1, 1, 1, 1)), batches(14)
    losses, params, skipped = trained_plainly(chunks, made)
    pipeline = make_pipeline(chunks, placement=linear(4), optimizer=OPTIMIZER, **RULE, **options)
    results, found = run(pipeline, made)
    assert [result.skipped for result in results] == skipped
    assert skipped[8]
    assert_same_training([result.loss for result in results], found, losses, params)
