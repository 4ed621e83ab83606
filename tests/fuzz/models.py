"""The model of a composition, in the chunks of its pipeline and in those of the plain loop, and its batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.cuts import ContextCut
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import Edge
from tests import drawn_words
from tests.fuzz.composition import EXPERTS, GRAPH, RAW, VISION, Composition
from tests.fuzz.raw_model import EMBED, FEATURES, OUTPUTS, VOCABULARY, edges_of, raw_chunks
from tests.programs.toys import with_cheap_init

ROWS, LENGTHS = 4, (8, 4)
Microbatch = dict[str, np.ndarray]
_FROZEN_PATTERNS = {
    RAW: {
        "first": (EMBED, "left"),
        "middle": ("layers.1", "layers.2"),
        "last": ("head",),
        "most": ("layers", EMBED, "left"),
    },
    VISION: {"first": ("vision",), "middle": ("vision.layers", "projector"), "decoder": ("decoder",)},
    "": {"first": ("embedding",), "middle": ("layers.0",), "last": ("head", "final_norm"), "most": ("layers",)},
}


@dataclass(frozen=True)
class Model:
    """A model, cut into chunks."""

    chunks: tuple[Chunk, ...]
    """The chunks of the pipeline, frozen layers marked; without the copies of bidirectional pipelines."""
    plain: tuple[Chunk, ...]
    """The chunks of the plain loop, which know no mesh."""
    edges: tuple[Edge, ...] | None
    """The edges between the chunks; None: a chain."""
    frozen: frozenset[str]
    """Names of layers that never change."""


@lru_cache(maxsize=16)
def model_of(setup: Composition) -> Model:
    """Returns the model of a setup."""
    number = setup.num_chunks
    edges: tuple[Edge, ...] | None = None
    if setup.model == RAW:
        chunks = plain = raw_chunks(setup, number, num_layers=max(setup.depth, number))
        edges = edges_of(setup)
    elif setup.model == VISION:
        graph = drawn_words.model(projector_in="encoder")
        chunks = plain = graph.chunks
        edges = graph.edges
    else:
        model = language_model(_decoder(setup, number))
        context = dict(setup.mesh).get("context", 1)
        plain = model.split(number, packed=setup.packed)
        cut = ContextCut(devices=context) if context > 1 else None
        chunks = model.split(number, packed=setup.packed, context=cut)
        plain, chunks = list(map(with_cheap_init, plain)), list(map(with_cheap_init, chunks))
    wanted = _FROZEN_PATTERNS.get(setup.model, _FROZEN_PATTERNS[""]).get(setup.frozen, ())
    names = {name for chunk in chunks for name in jax.eval_shape(chunk.init, jax.random.key(0))}
    frozen = frozenset(name for name in names if any(name == each or name.startswith(f"{each}.") for each in wanted))
    marked = [replace(chunk, frozen=frozen & set(jax.eval_shape(chunk.init, jax.random.key(0)))) for chunk in chunks]
    return Model(tuple(marked), tuple(plain), edges, frozen)


def _decoder(setup: Composition, num_chunks: int) -> LanguageModelConfig:
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=8, balance_coefficient=0.1)
    return LanguageModelConfig(
        vocab_size=VOCABULARY,
        hidden=16,
        num_layers=max(setup.depth, num_chunks),
        num_heads=2,
        mlp_dim=16,
        init_std=0.1,
        qk_norm=setup.tied,
        sliding_window=3 if setup.tied else None,
        z_loss=1e-3 if setup.tied else 0.0,
        tie_embeddings=setup.tied,
        experts=experts if setup.model == EXPERTS else None,
        compute_dtype="bfloat16" if setup.params == "bf16" else "float32",
        param_dtype="float32",
    )


def is_exact(setup: Composition) -> bool:
    """Returns whether nothing in the model is rounded to 16 bits."""
    return setup.params == "f32" and setup.carry not in ("bf16", "f16")


def microbatches(composition: Composition, step: int) -> list[Microbatch]:
    """Returns the microbatches of a step, over all replicas. The second step is the one with strange weights or
    numbers."""
    number = composition.microbatches * composition.data
    rng = np.random.default_rng((composition.data_seed, step))
    made = [_microbatch(composition, rng, place, step) for place in range(number)]
    weights = "w" if composition.model == RAW else "weights"
    if composition.weights == "zero":
        made[::2] = [each | {weights: np.zeros_like(each[weights])} for each in made[::2]]
    if composition.weights in ("none", "negative") and step == 1:
        factor = np.float32(0 if composition.weights == "none" else -1)
        made = [each | {weights: factor * each[weights]} for each in made]
    if composition.nonfinite and step == 1:
        name = "x" if composition.model == RAW and "x" in made[-1] else weights
        struck = np.array(made[-1][name])
        struck[(0,) * struck.ndim] = np.nan
        made[-1] = made[-1] | {name: struck}
    return made


def _microbatch(
    composition: Composition, rng: np.random.Generator, place: int, step: int, *, length: int = 0
) -> Microbatch:
    if composition.model == VISION:
        steps = drawn_words.drawn().steps
        of_step = steps[(composition.data_seed + step + place // 4) % len(steps)]
        return dict(of_step[place % 4])
    length = length or (int(rng.choice(LENGTHS)) if composition.ragged else LENGTHS[0])
    shape = (ROWS, length)
    weights = (rng.random(shape) * (rng.random(shape) < 0.8)).astype(np.float32)
    if composition.model != RAW:
        return _tokens(composition, rng, shape, weights)
    microbatch = {
        "x": rng.normal(size=(*shape, FEATURES)).astype(np.float32),
        "ids": rng.integers(0, VOCABULARY, shape).astype(np.int32),
        "y": rng.normal(size=(*shape, OUTPUTS)).astype(np.float32),
        "w": weights,
    }
    if composition.placement == GRAPH and composition.graph in ("towers", "optional"):
        lacks = composition.absent and composition.graph == "optional" and rng.random() < 0.5
        microbatch |= {} if lacks else {"z": rng.normal(size=(*shape, FEATURES)).astype(np.float32)}
    return microbatch


def _tokens(composition: Composition, rng: np.random.Generator, shape: Any, weights: np.ndarray) -> Microbatch:
    sequence = rng.integers(0, VOCABULARY, (shape[0], shape[1] + 1)).astype(np.int32)
    microbatch = {"tokens": sequence[:, :-1], "targets": sequence[:, 1:], "weights": weights}
    if composition.packed:  # two documents in a row, and padding
        ends = np.sort(rng.integers(1, shape[1] + 1, (shape[0], 2)), axis=1)
        places = np.broadcast_to(np.arange(shape[1]), shape)
        segments = np.where(places < ends[:, :1], 1, np.where(places < ends[:, 1:], 2, 0)).astype(np.int32)
        positions = np.where(segments == 2, places - ends[:, :1], places).astype(np.int32)
        microbatch |= {"segments": segments, "positions": positions, "weights": weights * (segments > 0)}
    return microbatch


def absent_pairs(composition: Composition, step: int) -> tuple[tuple[int, int], ...]:
    """Returns the (chunk, microbatch) pairs that a step is told to leave out, beside those whose leaves are lacking."""
    if not composition.absent or composition.graph != "towers":
        return ()
    number = composition.microbatches * composition.data
    return tuple((1, place) for place in range(number) if (place + step) % 2)


def as_batch(made: Sequence[Microbatch]) -> dict[str, Any]:
    """Returns the leaves of a step: arrays if microbatches are alike, else lists."""
    names = list(dict.fromkeys(name for each in made for name in each))
    alike = len({tuple((name, each[name].shape) for name in sorted(each)) for each in made}) == 1
    if alike:
        return {name: np.stack([each[name] for each in made]) for name in names}
    return {name: [each.get(name) for each in made] for name in names}


@cache
def buckets(composition: Composition) -> list[Microbatch] | None:
    """Returns a microbatch of each shape; None if all are alike."""
    if composition.model == VISION:
        return drawn_words.drawn().buckets
    lacking = composition.placement == GRAPH and composition.graph == "optional" and composition.absent
    if not composition.ragged and not lacking:
        return None
    rng, made = np.random.default_rng(0), []
    for length in LENGTHS if composition.ragged else LENGTHS[:1]:
        whole = _microbatch(replace(composition, ragged=False, absent=False), rng, 0, 0, length=length)
        without = {name: leaf for name, leaf in whole.items() if name != "z"}
        made += [whole, without] if lacking else [whole]
    return made
