"""Small models and their batches, made alike in the test and in every rank."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.programs.chunk import Chunk, param_specs, shard_named, whole_name
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.schedules import Edge, chain, sliced_chain
from tests import long_sums, ragged
from tests.multiprocess.cases import Case
from tests.plain_loop import holding_still, train_plainly, with_still
from tests.programs.toys import VOCAB, plain_model

NUM_MICROBATCHES, LENGTH = 8, 8
WORDS = 12
EXPERTS = "experts"
PLAIN, LONG_SUMS, RAGGED, DRAWN = "plain", "long sums", "ragged", "drawn"
"""The last two have microbatches of several shapes: two encoders (:mod:`tests.ragged`), and a vision-language model
(:mod:`tests.drawn_words`)."""


def make_chunks(case: Case) -> list[Chunk]:
    """The case's model in its cut; parameters start the same whatever the cut."""
    if case.model == LONG_SUMS:
        return long_sums.make_chunks()
    if case.model == RAGGED:
        return freeze([_with_constant_init(chunk) for chunk in ragged.CHUNKS], case.frozen)
    if case.model == DRAWN:
        return freeze([_with_constant_init(chunk) for chunk in _drawn_words().model().chunks], case.frozen)
    if case.model == PLAIN:
        return freeze([_with_constant_init(chunk) for chunk in plain_model(case.cut)], case.frozen)
    from rrfp_jax.models import ExpertsConfig, language_model  # takes long to load
    from rrfp_jax.models.cuts import ContextCut, SequenceSlices

    experts = ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=12, balance_coefficient=0.1)
    config = LanguageModelConfig(
        vocab_size=WORDS,
        hidden=16,
        num_layers=int(sum(case.cut)),
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=24,
        init_std=0.3,
        tie_embeddings=case.model == "tied",
        experts=experts if case.model == EXPERTS else None,
    )
    devices = case.mesh.get("context", 1) if isinstance(case.mesh, dict) else 1
    context = ContextCut(devices=devices) if devices > 1 else None
    model, layers = language_model(config), list(case.cut)
    if case.num_shards:
        chunks = model.split_vocabulary(case.num_shards, layers_per_chunk=layers, fan_out=1, context=context).chunks
    else:
        slices = SequenceSlices(case.slices)
        chunks = model.split(layers_per_chunk=layers, context=context, slices=slices)
    return [_with_constant_init(chunk) for chunk in chunks]


def _with_constant_init(chunk: Chunk) -> Chunk:
    """The chunk with numbers that compile quickly, and to the same bits in every process."""

    def numbers(path: Any, leaf: Any) -> np.ndarray:
        layer, shard = (whole_name(path[0].key), *path[1:]), shard_named(path[0].key)
        shape = list(leaf.shape)
        if shard is not None:
            shape[shard.axis] = WORDS
        values = np.random.default_rng(zlib.crc32(str(layer).encode())).normal(0, 0.3, shape)
        if shard is not None:
            values = np.take(values, range(*shard.bounds(WORDS)), axis=shard.axis)
        return (values + (len(leaf.shape) == 1)).astype(leaf.dtype)  # vectors are scales

    params = jax.tree.map_with_path(numbers, param_specs(chunk))
    return replace(chunk, init=lambda key: jax.tree.map(jnp.asarray, params))


def _drawn_words() -> Any:
    from tests import drawn_words  # takes long to load

    return drawn_words


def edges_of(case: Case) -> Sequence[Edge] | None:
    """Which chunk feeds which; None: a chain."""
    if case.model == DRAWN:
        return _drawn_words().model().edges
    if case.slices > 1:
        return sliced_chain(chain(len(case.cut), 1), case.slices).edges
    if case.num_shards:
        from rrfp_jax.models import LanguageModelConfig, language_model  # takes long to load

        config = LanguageModelConfig(
            vocab_size=WORDS, hidden=16, num_layers=int(sum(case.cut)), num_heads=4, mlp_dim=24
        )
        return (
            language_model(config).split_vocabulary(case.num_shards, layers_per_chunk=list(case.cut), fan_out=1).edges
        )
    return ragged.EDGES if case.model == RAGGED else None


def buckets_of(case: Case) -> Sequence[Any] | None:
    """The shapes of microbatches; None: that of the first batch."""
    if case.model == DRAWN:
        return _drawn_words().drawn().buckets
    return ragged.all_buckets() if case.model == RAGGED else None


def make_batches(case: Case) -> list[dict[str, Any]]:
    """Counting sequences; microbatches differ much in weight, and one of the first step weighs nothing."""
    if case.model == RAGGED:
        return [ragged.as_batch(step) for step in ragged.make_steps(case.num_steps, NUM_MICROBATCHES)]
    if case.model == DRAWN:
        return [ragged.as_batch(step) for step in _drawn_words().drawn().steps[-case.num_steps :]]
    if case.model == LONG_SUMS:
        return [long_sums.make_batch()] * case.num_steps
    rng = np.random.default_rng(0)
    batches = []
    for step in range(case.num_steps):
        start = rng.integers(0, VOCAB, (NUM_MICROBATCHES, case.num_rows, 1))
        sequence = ((start + np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)
        share = rng.random((NUM_MICROBATCHES, 1, 1))
        weights = (rng.random((NUM_MICROBATCHES, case.num_rows, LENGTH)) < share).astype(np.float32)
        weights[1] *= step > 0
        batches.append({"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights})
    return batches


def num_microbatches(case: Case) -> int:
    """Of a batch, over all replicas."""
    if case.model == DRAWN:
        return int(_drawn_words().NUM_MICROBATCHES)
    return long_sums.NUM_MICROBATCHES if case.model == LONG_SUMS else NUM_MICROBATCHES


def make_optimizer(case: Case) -> optax.GradientTransformation:
    return optax.adam(1e-2) if case.model == LONG_SUMS else optax.adamw(1e-3, weight_decay=0.01)


def train_reference(case: Case) -> tuple[list[float], dict[str, Any]]:
    """The same without a pipeline; compiled quickly, as the ranks compile what need not have equal bits."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return _train_plainly(case)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _train_plainly(case: Case) -> tuple[list[float], dict[str, Any]]:
    chunks = make_chunks(replace(case, mesh={}, slices=1, num_shards=0))
    params: dict[str, Any] = {}
    for chunk in chunks:
        params |= chunk.init(jax.random.key(0))
    frozen = frozenset().union(*(chunk.frozen for chunk in chunks))
    if case.model == RAGGED:
        steps = ragged.make_steps(case.num_steps, NUM_MICROBATCHES)
        losses, _, params = ragged.train_plainly(params, make_optimizer(case), steps, clip_norm=1.0, frozen=frozen)
        return losses, params
    if case.model == DRAWN:
        from tests import plain_graph

        graph, steps = _drawn_words().model(), _drawn_words().drawn().steps[-case.num_steps :]
        losses, _, params = plain_graph.train_plainly(
            graph, params, make_optimizer(case), steps, clip_norm=1.0, frozen=frozen
        )
        return losses, params
    batches = make_batches(case)
    if case.left_out:
        batches = [with_still(batch, case.left_out, len(chunks)) for batch in batches]
        chunks = [holding_still(chunk, number) for number, chunk in enumerate(chunks)]
    return train_plainly(chunks, params, make_optimizer(case), batches, clip_norm=1.0, frozen=frozen)
