"""Exact match in evaluations: that of greedy decoding and of a plain jit, and without a trace in what is trained."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from experiments.reading.draw import draw_word
from rrfp_jax.commands.sampling.generating import Drawing, Generator, TokenPrompt
from rrfp_jax.data import ImageText, ImageTextConfig
from rrfp_jax.models import LanguageModelConfig, ProjectorConfig, VisionConfig, VisionLanguageConfig, language_model
from rrfp_jax.models.cuts import ContextCut, plan_cut
from rrfp_jax.models.loss import ANSWER_TOKENS, ANSWERS, EXACT_ANSWERS, RIGHT_TOKENS, answer_counts
from rrfp_jax.models.model import decoder_chunk
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.programs.chunk import as_evaluated
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.schedules import Placement, linear
from rrfp_jax.testing import run_unpipelined
from tests.drawn_words import as_floats
from tests.pipelines import make_pipeline
from tests.plain_graph import batch_of

WORDS = tuple(f"{a}{b}{c}" for a in "abdW" for b in "oMl" for c in ("", "nu", "tsa"))
NUM_MICROBATCHES, ROWS = 4, 4
Microbatch = dict[str, Any]


def config() -> VisionLanguageConfig:
    shape: dict[str, Any] = {"hidden": 16, "num_heads": 2, "mlp_dim": 32, "init_std": 0.5}
    vision = VisionConfig(num_layers=1, patch_dim=64, max_rows=2, max_columns=8, **shape)
    decoder = LanguageModelConfig(vocab_size=256, num_layers=2, **shape)
    return VisionLanguageConfig(vision=vision, projector=ProjectorConfig(patches_per_feature=4), decoder=decoder)


def greedy_answers(folder: Path, params: Any) -> tuple[list[Microbatch], int]:
    """Pictures with what the model itself writes below them, up to the end of each row; in every third row one token is
    another. How many rows are left as they are, too."""
    rng, generator, num_exact = np.random.default_rng(0), Generator(config(), params), 0
    lines = []
    for number in range(NUM_MICROBATCHES * ROWS):
        Image.fromarray(draw_word(WORDS[number], rng)).save(folder / f"{number}.png")
        images = [f"{number}.png"] * (1 + number % 2)
        lines.append({"prompt": "<image>\n" * len(images), "target": "?" * 30, "images": images})
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shape: dict[str, Any] = {"batch_size": len(lines), "num_microbatches": NUM_MICROBATCHES, "balance": False}
    grey: dict[str, Any] = {"patch_size": 8, "channels": 1, "pack": False, "text_buckets": 1, "image_buckets": 1}
    batch = as_floats(ImageText(ImageTextConfig(path=str(folder / "words.jsonl"), **shape, **grey)).batch(0))
    microbatches = []
    for number in range(NUM_MICROBATCHES):
        leaves = {name: leaf[number] for name, leaf in batch.items()}
        images = {name: leaf for name, leaf in leaves.items() if name.startswith("patch")}
        starts = np.argmax(leaves["weights"] > 0, axis=1) + 1
        length = leaves["tokens"].shape[1]
        for row, start in enumerate(starts.tolist()):
            index = leaves["image_index"][row : row + 1, :start]
            prompt = TokenPrompt(tokens=leaves["tokens"][row, :start], image_leaves=images | {"image_index": index})
            leaves["tokens"][row, start:] = generator.tokens(prompt, Drawing(max_tokens=length - start))
            if (number * ROWS + row) % 3:
                num_exact += 1
                continue
            at = rng.integers(start, length)
            leaves["tokens"][row, at] = (leaves["tokens"][row, at] + 1) % 256
        leaves["positions"][:], leaves["segments"][:] = np.arange(length), 1
        weights = (np.arange(length) >= starts[:, None]).astype(np.float32)
        leaves["targets"], leaves["weights"] = np.roll(leaves["tokens"], -1, 1), np.roll(weights, -1, 1)
        leaves["weights"][:, -1] = 0
        microbatches.append(leaves)
    return microbatches, num_exact


@pytest.fixture(scope="module")
def initial() -> Any:
    chunks = vision_language_model(config()).split(packed=True).chunks
    return {name: layer for chunk in chunks for name, layer in chunk.init(jax.random.key(1)).items()}


def plainly(graph: Any, params: Any, microbatches: list[Microbatch]) -> dict[str, float]:
    """The named sums of all microbatches by a plain jit of the whole model."""
    chunks = [as_evaluated(chunk) for chunk in graph.chunks]
    run = jax.jit(lambda params, leaves: run_unpipelined(chunks, params, leaves, edges=graph.edges))
    found = [run(params, microbatch)[2] for microbatch in microbatches]
    return {name: float(sum(np.float64(each[name]) for each in found)) for name in found[0]}


CUTS = [
    pytest.param({"decoder_layers_per_chunk": [2, 0]}, linear(3), {}, id="a head alone"),
    pytest.param({"encoder_layers_per_chunk": [0, 1]}, Placement((0, 1, 0)), {}, id="two stages"),
    pytest.param({"decoder_layers_per_chunk": [1, 1]}, linear(3), {"data": 2}, id="replicas"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "placement", "options"), CUTS)
def test_exact_match_is_that_of_greedy_decoding(
    tmp_path: Path, initial: Any, cut: Any, placement: Any, options: Any
) -> None:
    microbatches, num_exact = greedy_answers(tmp_path, initial)
    assert 0 < num_exact < NUM_MICROBATCHES * ROWS
    trained = []
    for counts in (True, False):
        graph = vision_language_model(config()).split(packed=True, counts_answers=counts, **cut)
        with make_pipeline(
            graph.chunks,
            edges=graph.edges,
            placement=placement,
            optimizer=optax.adamw(1e-3),
            deterministic=True,
            clip_norm=1.0,
            **options,
        ) as pipeline:
            state = pipeline.init(jax.random.key(1))
            batch = batch_of(microbatches)
            shapes = EvaluationShapes(buckets=microbatches[:1]) if counts else None
            pipeline.prepare(batch, buckets=microbatches[:1], evaluation=shapes)
            for step in range(3):
                if counts:
                    found = pipeline.evaluate(state, batch).result()
                    sums = {name: mean * found.weight for name, mean in found.means.items()}
                    params = jax.tree.map(np.array, pipeline.params(state))
                    assert sums == pytest.approx(plainly(graph, params, microbatches), abs=1e-9)
                    assert sums[ANSWERS] == pytest.approx(NUM_MICROBATCHES * ROWS)
                    assert sums[ANSWER_TOKENS] == pytest.approx(found.weight)
                    if not step:
                        assert sums[EXACT_ANSWERS] == pytest.approx(num_exact)
                        assert sums[RIGHT_TOKENS] < found.weight
                state, metrics = pipeline.step(state, batch)
                assert metrics.result().means == {}
            trained.append(jax.tree.map(np.array, pipeline.params(state)))
    jax.tree.map(np.testing.assert_array_equal, *trained)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"context": 2}, {"tensor": 2, "context": 2}, {"fsdp": 2}], ids=str)
def test_answers_are_counted_across_the_devices_of_a_stage(mesh: dict[str, int]) -> None:
    """Of packed rows, whose targets are mostly what the model finds likeliest."""
    model = LanguageModelConfig(vocab_size=32, hidden=16, num_layers=2, num_heads=2, mlp_dim=32, init_std=0.3)
    [chunk] = language_model(model).split(1, packed=True)
    params, rng = chunk.init(jax.random.key(1)), np.random.default_rng(0)
    segments = 1 + np.sort(rng.integers(3, size=(NUM_MICROBATCHES, 2, 16)), axis=-1).astype(np.int32)
    is_first = np.diff(segments, axis=-1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(is_first, np.arange(16), 0), axis=-1)
    tokens = rng.integers(32, size=segments.shape).astype(np.int32)
    batch = {"tokens": tokens, "segments": segments, "positions": (np.arange(16) - starts).astype(np.int32)}
    whole = decoder_chunk(model, plan_cut(2, num_chunks=1)[0], packed=True, gives_logits=True)
    logits = jax.vmap(lambda leaves: whole.apply(params, None, leaves, key=None))(batch)
    best = np.asarray(jnp.argmax(logits, axis=-1)).astype(np.int32)
    batch["targets"] = np.where(rng.random(best.shape) < 0.8, best, (best + 1) % 32)
    batch["weights"] = (rng.random(best.shape) < 0.7).astype(np.float32)
    cut = ContextCut(devices=mesh["context"]) if "context" in mesh else None
    chunks = language_model(model).split(2, packed=True, context=cut, counts_answers=True)
    with make_pipeline(chunks, placement=linear(2), optimizer=optax.sgd(0.1), mesh=mesh) as pipeline:
        state = pipeline.init(jax.random.key(1))
        microbatch = {name: leaf[0] for name, leaf in batch.items()}
        pipeline.prepare(batch, evaluation=EvaluationShapes(buckets=[microbatch]))
        found = pipeline.evaluate(state, batch).result()
    read = ("targets", "weights", "segments")
    counted = [answer_counts(logits[m], *(batch[name][m] for name in read)) for m in range(NUM_MICROBATCHES)]
    expected = {name: float(sum(each[name] for each in counted)) for name in counted[0]}
    assert 0 < expected[EXACT_ANSWERS] < expected[ANSWERS]
    assert {name: mean * found.weight for name, mean in found.means.items()} == pytest.approx(expected)
