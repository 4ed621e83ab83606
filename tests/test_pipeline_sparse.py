"""Replicas that average a share of their parameters late: training is that of a plain loop which simulates the replicas
one by one."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.checkpoint import newest_step, read_params
from rrfp_jax.core import Ordering
from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.models.cuts import SequenceSlices
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk, Loss
from rrfp_jax.programs.update_functions import averaged, on_host
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear, looped
from rrfp_jax.testing import DelayedStage
from rrfp_jax.training.loop import RunSaver
from tests import test_pipeline_slices as sliced
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, holding_still, with_still
from tests.programs.toys import plain_model
from tests.test_pipeline_messages import make_batches, random_delay

OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)
LAYERS = (1, 1)


def part_of(name: str, size: int, step: int, num_parts: int, seed: int) -> np.ndarray:
    """The flat places that a step averages: one of each row, a row's first column being its number's hash."""
    rows = np.arange(ceil(size / num_parts), dtype=np.uint32)
    with np.errstate(over="ignore"):
        mixed = rows * np.uint32(0x9E3779B1) ^ np.uint32(crc32(f"{seed} {name}".encode()))
        mixed = (mixed ^ mixed >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    places = rows.astype(np.int64) * num_parts + (mixed % num_parts + step) % num_parts
    return places[places < size]


def train_replicas_plainly(
    chunks: Sequence[Chunk],
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    batches: Sequence[Mapping[str, np.ndarray]],
    *,
    replicas: int,
    share: float,
    tau: int,
    seed: int = 0,
    clip_norm: float | None = None,
    left_out: Collection[int] = (),
) -> tuple[list[float], list[dict[str, Any]], list[float]]:
    """The losses, the final parameters of each replica, and their distances after every step."""
    layers = [list(jax.eval_shape(chunk.init, jax.random.key(0))) for chunk in chunks]
    num_parts = ceil(1 / share - 1e-9)

    def sums(params: Any, batch: Any) -> Any:
        def of_one(microbatch: Any) -> Any:
            value: Any = None
            for index, chunk in enumerate(chunks):
                own = {name: params[name] for name in layers[index]}
                value = chunk.apply(own, value, {name: microbatch[name] for name in chunk.leaves}, key=None)
            return value

        loss = Loss(*jax.lax.map(of_one, dict(batch)))
        return loss.loss_sum.sum(), loss.weight.sum()

    gradient = jax.jit(jax.value_and_grad(sums, has_aux=True))
    update = jax.jit(optimizer.update)
    own = [jax.tree.map(np.array, dict(params)) for _ in range(replicas)]
    states = [optimizer.init(each) for each in own]
    under_way: list[tuple[int, list[Any]]] = []
    losses, distances = [], []
    for step, batch in enumerate(batches):
        share_of_each = len(next(iter(batch.values()))) // replicas
        blocks = [{k: v[r * share_of_each :][:share_of_each] for k, v in batch.items()} for r in range(replicas)]
        results = [gradient(*each) for each in zip(own, blocks, strict=True)]
        weight = sum(float(own_weight) for (_, own_weight), _ in results)
        losses.append(sum(float(loss) for (loss, _), _ in results) / weight)
        # What this step averages, of the parameters as they are.
        names = [f"{p[0].key}{jax.tree_util.keystr(p[1:])}" for p, _ in jax.tree.leaves_with_path(own[0])]
        differences = []
        for place, name in enumerate(names):
            values = [jax.tree.leaves(each)[place].reshape(-1) for each in own]
            taken = part_of(name, values[0].size, step, num_parts, seed)
            mean = sum(each[taken] for each in values) / replicas
            differences.append((taken, [mean - each[taken] for each in values]))
        under_way.append((step, differences))
        if len(under_way) > tau:
            for place, (taken, of_replicas) in enumerate(under_way.pop(0)[1]):
                for each, difference in zip(own, of_replicas, strict=True):
                    jax.tree.leaves(each)[place].reshape(-1)[taken] += difference
        for number, (_, of_sums) in enumerate(results) if step not in left_out else ():
            norm = float(optax.tree.norm(of_sums)) * replicas / weight
            clip = 1.0 if clip_norm is None or norm < clip_norm else clip_norm / norm
            grads = optax.tree.scale(np.float32(clip * replicas / weight), of_sums)
            updates, states[number] = update(grads, states[number], own[number])
            own[number] = jax.tree.map(np.array, optax.apply_updates(own[number], updates))
        distances.append(distance(own))
    return losses, own, distances


def distance(replicas: Sequence[Any]) -> float:
    """The root of the squares of what the replicas differ by from their mean."""
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(each)]) for each in replicas]
    mean = sum(flat) / len(flat)
    return float(np.sqrt(sum(np.sum((each - mean) ** 2) for each in flat)))


def pipeline_of(chunks: Sequence[Chunk], **options: Any) -> Pipeline:
    placement = looped(2, len(chunks) // 2) if len(chunks) > 2 else linear(2)
    given = {"data": 2, "optimizer": OPTIMIZER, "progress_deadline_s": 60, "placement": placement, **options}
    return make_pipeline(chunks, **given)


def params_of_replicas(pipeline: Pipeline, state: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in range(pipeline.layout.data)]
    counts: dict[int, int] = {}
    for chunk, held in pipeline.chunk_states(state):
        found[counts.setdefault(chunk, 0)] |= jax.tree.map(np.array, held.params)
        counts[chunk] += 1
    return found


def trained(
    pipeline: Pipeline, batches: Sequence[Any], left_out: Sequence[tuple[int, int]] = ()
) -> tuple[list[float], list[dict[str, Any]], dict[str, Any]]:
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        initial = jax.tree.map(np.array, pipeline.params(state))
        metrics = []
        for batch in batches:
            state, made = pipeline.step(state, batch, left_out=left_out)
            metrics.append(made)
        return [made.result().loss for made in metrics], params_of_replicas(pipeline, state), initial


CASES: dict[str, dict[str, Any]] = {
    "tau 3, clipped": {"tau": 3, "clip_norm": 0.5},
    "tau 0": {"tau": 0},
    "tau 1": {"tau": 1, "hint": "bfw"},
    "tau 1, all elements": {"share": 1.0, "tau": 1},
    "tau 3, data 4": {"tau": 3, "data": 4, "hint": "bfw"},
    "tau 1, fsdp 2": {"tau": 1, "mesh": {"fsdp": 2}},
    "tau 3, tensor 2": {"tau": 3, "tensor": 2, "clip_norm": 0.5},
    "tau 1, two chunks per stage": {"tau": 1, "layers": (1, 1, 1, 0)},
    "tau 0, table": {"tau": 0, "schedule": build_schedule("zb-h1", ScheduleRequest(num_stages=2, num_microbatches=2))},
}


def make(layers: tuple[int, ...] = LAYERS, *, share: float = 0.05, tau: int, seed: int = 0, **options: Any) -> Pipeline:
    options = {"reduce": {"share": share, "tau": tau, "seed": seed}, **options}
    return pipeline_of(plain_model(layers, tied=False), **options)


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_loop_over_replicas(name: str) -> None:
    case, batches = dict(CASES[name]), make_batches()
    losses, params, initial = trained(make(**case), batches)
    expected = train_replicas_plainly(
        plain_model(case.get("layers", LAYERS), tied=False),
        initial,
        OPTIMIZER,
        batches,
        replicas=case.get("data", 2),
        share=case.get("share", 0.05),
        tau=case["tau"],
        clip_norm=case.get("clip_norm"),
    )
    for own, other in zip(params, expected[1], strict=True):
        assert_same_training(losses, own, expected[0], other)
    assert distance(params) > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"hint": "fb"}, {"hint": "bfw", "deterministic": True}], ids=str)
def test_slices_of_sequences_average_once(way: dict[str, Any]) -> None:
    """The passes of a chunk have the same parameters."""
    pipeline = sliced.make("dense", SequenceSlices(2), data=2, reduce={"share": 0.1, "tau": 1}, **way)
    losses, params, initial = trained(pipeline, sliced.batches())
    options: dict[str, Any] = {"replicas": 2, "share": 0.1, "tau": 1, "clip_norm": 1.0}
    (chunk,) = language_model(sliced.MODELS["dense"]).split(1)
    expected = train_replicas_plainly([chunk], initial, sliced.OPTIMIZER, sliced.batches(), **options)
    for own, other in zip(params, expected[1], strict=True):
        assert_same_training(losses, own, expected[0], other)


@pytest.mark.slow
def test_a_step_that_one_replica_spoils_is_left_out_by_all_and_averages_go_on() -> None:
    batches = make_batches()
    spoilt = {**batches[3], "weights": batches[3]["weights"].copy()}
    spoilt["weights"][3, 0, 0] = np.inf  # of the second replica
    given = [*batches[:3], spoilt, *batches[4:]]
    losses, params, initial = trained(make(tau=1, clip_norm=0.5), given)
    options: dict[str, Any] = {"replicas": 2, "share": 0.05, "tau": 1, "clip_norm": 0.5, "left_out": [3]}
    chunks = plain_model(LAYERS, tied=False)
    expected = train_replicas_plainly(chunks, initial, OPTIMIZER, batches, **options)
    assert not np.isfinite(losses[3])
    for own, other in zip(params, expected[1], strict=True):
        assert_same_training(losses[:3] + losses[4:], own, expected[0][:3] + expected[0][4:], other)


@pytest.mark.slow
def test_weight_gradients_may_be_left_out_beside_averages() -> None:
    batches, left_out = make_batches(), [(0, 1), (0, 2), (1, 0), (1, 1), (1, 3)]
    losses, params, initial = trained(make(tau=1, clip_norm=0.5, hint="bfw"), batches, left_out)
    still = [with_still(batch, left_out, 2) for batch in batches]
    chunks = [holding_still(chunk, number) for number, chunk in enumerate(plain_model(LAYERS, tied=False))]
    options: dict[str, Any] = {"replicas": 2, "share": 0.05, "tau": 1, "clip_norm": 0.5}
    expected = train_replicas_plainly(chunks, initial, OPTIMIZER, still, **options)
    for own, other in zip(params, expected[1], strict=True):
        assert_same_training(losses, own, expected[0], other)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (4, 1), (2, 2)])
def test_bits_do_not_depend_on_the_order(data: int, tensor: int) -> None:
    batches, bits = make_batches(), []
    messages = make(tau=1, data=data, tensor=tensor, deterministic=True, clip_norm=0.1)
    delayed = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, random_delay))
    for order, runtime in [
        (Ordering(hint="bf"), None),
        (Ordering(hint="fb", window=1), delayed),
        (Ordering(), delayed),
    ]:
        bits.append(trained(messages.reordered(order, options=runtime), batches))
    for other in bits[1:]:
        assert other[0] == bits[0][0]
        jax.tree.map(np.testing.assert_array_equal, other[1], bits[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"hint": "bf"}, {"hint": "bfw", "data": 3, "window": 1}], ids=str)
def test_stages_hold_no_more_than_was_forecast(way: dict[str, Any]) -> None:
    with make(tau=3, share=0.5, **way) as pipeline:
        state = pipeline.init(jax.random.key(0))
        for batch in make_batches(3, 2 * way.get("data", 2)):
            state, metrics = pipeline.step(state, batch)
        peaks = metrics.result().peak_memory_bytes
        forecast = [each.peak for each in pipeline.forecast]
    assert all(0 < peak <= most for peak, most in zip(peaks, forecast, strict=True))


BYTES = LanguageModelConfig(vocab_size=256, hidden=32, num_layers=2, num_heads=2, mlp_dim=64, init_std=0.05)


def byte_model(num_chunks: int) -> list[Chunk]:
    return language_model(BYTES).split(num_chunks)


def byte_batches(num_steps: int) -> list[dict[str, np.ndarray]]:
    """Rows from all over a text, four microbatches in each step."""
    text = np.frombuffer(Path("LICENSE").read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - 33, (num_steps, 4, 2))
    rows = text[starts[..., None] + np.arange(33)]
    weights = np.ones((4, 2, 32), np.float32)
    return [{"tokens": each[..., :-1], "targets": each[..., 1:], "weights": weights} for each in rows]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "share 0": ({"reduce": {"share": 0}}, "share is 0: give a number from 0.0001 to 1"),
    "share 2": ({"reduce": {"share": 2.0}}, "share is 2.0: give a number from 0.0001 to 1"),
    "no share": ({"reduce": {"tau": 1}}, "reduce lacks share: give share, tau, seed"),
    "unknown": ({"reduce": {"share": 0.5, "late": 1}}, "reduce has late: give share, tau, seed"),
    "tau": ({"reduce": {"share": 0.5, "tau": -1}}, "tau is -1: give 0 or more steps"),
    "type": ({"reduce": {"share": "all"}}, "share is 'all' .str.: give a number"),
    "one replica": ({"data": 1}, "2 or more: give such replicas, or reduce auto"),
    "owners": ({"other_owners": True}, "leave other_owners out"),
    "ZeRO-1": ({"shard_optimizer": True}, "do not go with shard_optimizer: leave it out"),
    "spikes": ({"spike_deviations": 6.0}, "do not go with spike_deviations: leave it out"),
    "delay": ({"delay": 1}, "do not go with a delay: leave it out"),
    "averages": ({"optimizer": averaged(OPTIMIZER, 0.9)}, "keep no averages of their own: leave average_decay out"),
    "on host": ({"optimizer": on_host(OPTIMIZER)}, "need their state on the devices: leave on_host out"),
    "tied": ({"tied": True}, "share no layers between chunks: untie them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_that_differ_cannot_have_is_refused(name: str) -> None:
    options, words = REFUSED[name]
    chunks = plain_model(LAYERS, tied=options.get("tied", False))
    given = {name: value for name, value in options.items() if name != "tied"}
    with pytest.raises(ValueError, match=words):
        pipeline_of(chunks, **{"reduce": {"share": 0.05}, **given})


def test_replicas_that_differ_cannot_be_verified() -> None:
    with make(tau=0) as pipeline, pytest.raises(ValueError, match="differ, so that none verifies another"):
        pipeline.check_verifies()


@pytest.mark.slow
def test_replicas_stay_together_with_late_averages() -> None:
    """A model of bytes: at most twice as far apart as with averages that are not late."""
    batches, found = byte_batches(300), {}
    for tau in (0, 3):
        with pipeline_of(byte_model(2), reduce={"share": 0.05, "tau": tau}) as pipeline:
            state, apart = pipeline.init(jax.random.key(1)), []
            for number, batch in enumerate(batches):
                state, _ = pipeline.step(state, batch)
                if number % 10 == 9:
                    apart.append(distance(params_of_replicas(pipeline, state)))
        found[tau] = np.array(apart)
    assert found[3][15:].max() <= 2 * found[0][15:].max()
    assert found[3][15:].max() <= 2 * found[3][5:15].max()  # It stays so.


def saved_run(
    folder: Path, steps: range, *, cut: tuple[float, ...] = (1, 1), **options: Any
) -> tuple[list[float], list[dict[str, Any]]]:
    """Trains these steps, from the checkpoint in the folder where there is one, and saves."""
    found, settings = [], {"share": 0.05, "tau": 3, "seed": 0}
    settings |= {name: options.pop(name) for name in settings if name in options}
    chunks = language_model(BYTES).split(layers_per_chunk=cut)
    with pipeline_of(chunks, **{"reduce": settings, "hint": "bf", "deterministic": True, **options}) as pipeline:
        saver = RunSaver(folder, pipeline, every=1, minutes=None, keep=1)
        stored = saver.checkpoints.newest()
        state = pipeline.init(jax.random.key(1)) if stored is None else saver.restore(stored)
        for batch in byte_batches(8)[steps.start : steps.stop]:
            state, metrics = pipeline.step(state, batch)
            found.append(metrics)
        saver.save(state, {})
        saver.checkpoints.close()
        return [each.result().loss for each in found], params_of_replicas(pipeline, state)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    whole = saved_run(tmp_path / "whole", range(8))
    parts = [saved_run(tmp_path / "parts", steps) for steps in (range(5), range(5, 8))]
    assert parts[0][0] + parts[1][0] == whole[0]
    jax.tree.map(np.testing.assert_array_equal, parts[1][1], whole[1])
    mean = jax.tree.map(lambda *own: sum(own) / len(own), *whole[1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), read_params(newest_step(tmp_path / "whole")), mean)
    for options in ({"tau": 1}, {"share": 0.1}, {"seed": 1}, {"data": 4}, {"reduce": "messages"}):
        with pytest.raises(
            ValueError, match=r"was saved with reduce \{.* and is read with .*: give the same, or start"
        ):
            saved_run(tmp_path / "parts", range(8, 8), **options)
    # In another cut, inside a layer: only programs differ.
    other = [saved_run(tmp_path / "cut", range(5), cut=(1.5, 0.5)), saved_run(tmp_path / "cut", range(5, 8))]
    for own, expected in zip(other[1][1], whole[1], strict=True):
        assert_same_training(other[0][0] + other[1][0], own, whole[0], expected)
    with pipeline_of(byte_model(2), reduce={"share": 0.05, "tau": 1}, data=4) as pipeline:
        saver = RunSaver(tmp_path / "other", pipeline, every=1, minutes=None, keep=1)
        state = saver.start_from(tmp_path / "whole")
        for own in params_of_replicas(pipeline, state):
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), own, mean)
        saver.checkpoints.close()
