"""A language model as a list of chunks.

The model is a chain of named layers (:mod:`rrfp_jax.models.named_layers`): ``embedding``, ``layers.0`` ...,
``final_norm``, ``head``. As the decoder of a larger model it has a prefix before each of these, and features of
encoders may take the place of some tokens' vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rrfp_jax.models.answers import answer_counts
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.context_cut import ContextCut, SequenceOrder
from rrfp_jax.models.decoder import (
    DecoderLayer,
    Embedding,
    Head,
    Rows,
    SparseDecoderLayer,
    cut_rows,
    normaliser_loss,
    packed_rows,
    residual_norm,
    token_loss,
)
from rrfp_jax.models.layer_cut import ChunkPlan, plan_cut
from rrfp_jax.models.named_layers import NamedLayer, chunk_of
from rrfp_jax.models.tensor_cut import partition
from rrfp_jax.programs.chunk import Chunk, Partition
from rrfp_jax.programs.remat import one_layer

EMBEDDING = "embedding"
"""The token embedding; with tied embeddings also the copy in the head's chunk."""
FINAL_NORM = "final_norm"
"""The RMSNorm before the head; always in the head's chunk."""
HEAD = "head"
"""The output matrix; absent with tied embeddings."""
ROUTER_LOSS = "router_loss"
"""The named sum of what routers of experts add to the loss."""
Z_LOSS = "z_loss"
"""The named sum of what the z-loss adds to the loss."""


class Merge(NamedTuple):
    """Features that take the place of some tokens' vectors, in the chunk with the embedding."""

    index_leaf: str
    """The leaf that says which feature stands where, int32 ``[batch, length]``, -1 for the token's own vector."""
    projector: NamedLayer | None = None
    """A layer of this chunk that the features pass first."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder of a given shape, to be cut into chunks; made by :func:`language_model`."""

    config: LanguageModelConfig
    """Its shape and dtypes."""

    def split(
        self,
        num_chunks: int | None = None,
        layers_per_chunk: Sequence[int] | None = None,
        embedding_in: int = 0,
        head_in: int = -1,
        packed: bool = False,
        *,
        context: ContextCut | None = None,
        counts_answers: bool = False,
    ) -> list[Chunk]:
        """Cut the model into chunks, in order; every cut computes the same function of the same parameters.

        ``num_chunks`` alone cuts evenly; ``layers_per_chunk`` gives the number of decoder layers of every chunk, 0
        where a chunk holds only the embedding or the head. ``embedding_in`` and ``head_in`` say which chunk holds
        those (negative: counted from the last).

        The embedding's chunk reads the batch leaf ``tokens``, int32 ``[batch, length]``; the head's chunk reads
        ``targets``, int32, and ``weights``, float32, of the same shape, and returns ``(loss_sum, weight)``. Between
        chunks travels the residual stream, ``[batch, length, hidden]`` in the compute dtype. With tied embeddings in
        two chunks both hold ``embedding`` and list it in ``shared``.

        Where routers of experts add to the loss, a pair travels: the residual stream, and a float32 scalar beside it,
        the sum of what they add so far, over the number of sparse layers. The last chunk adds this times the
        microbatch's weight to ``loss_sum``, and returns it as the named sum ``router_loss`` too: the loss of a step is
        the mean over tokens, and of each microbatch's router loss by its weight. Chunks with sparse layers then also
        read ``weights``, unless rows are packed: tokens of weight 0, or of segment 0, do not count in it.

        With ``z_loss`` the last chunk adds that to ``loss_sum`` and returns it as the named sum ``z_loss``.

        ``packed`` is for rows that hold several samples: every chunk with decoder layers also reads ``positions`` and
        ``segments``, int32 ``[batch, length]``. A token looks only at tokens with its own segment id, and positions
        begin anew in each segment; padding is segment 0.

        ``context`` is for stages whose mesh has an axis of that name: positions are dealt out over its devices so that
        all have equally much to look at, and attention looks across the cuts. Batches stay in their natural order;
        ``apply`` reads leaves in that of ``leaf_orders``. On another mesh the chunks compute the same.

        With ``counts_answers`` evaluations have the named sums of :mod:`rrfp_jax.models.answers` besides; where rows
        are packed, the last chunk then reads ``segments`` in any case.

        Raises ValueError, with the remedy, for a cut that does not add up.
        """
        plans = plan_cut(
            self.config.num_layers,
            num_chunks=num_chunks,
            layers_per_chunk=layers_per_chunk,
            embedding_in=embedding_in,
            head_in=head_in,
        )
        options: dict[str, Any] = {"packed": packed, "context": context, "counts_answers": counts_answers}
        return [decoder_chunk(self.config, plan, **options) for plan in plans]


def decoder_chunk(
    config: LanguageModelConfig,
    plan: ChunkPlan,
    *,
    packed: bool = False,
    prefix: str = "",
    merges: tuple[Merge, ...] = (),
    cut_over_devices: Partition | None = None,
    gives_logits: bool = False,
    context: ContextCut | None = None,
    counts_answers: bool = False,
) -> Chunk:
    """One chunk of a decoder whose layers have names that begin with ``prefix``.

    With ``merges`` its inputs are their features in order, each ``[rows, features per row, dim]`` or None where the
    microbatch has none; one alone comes as it is. With ``gives_logits`` the chunk with the head returns those, float32
    ``[batch, length, vocab_size]``, and reads neither ``targets`` nor ``weights``. With ``counts_answers`` its
    evaluation counts them.
    """
    layers = decoder_layers(config, plan, prefix)
    layers += [merge.projector for merge in merges if merge.projector is not None]
    shared = {prefix + EMBEDDING} if config.tie_embeddings and plan.embedding != plan.head else set()
    has_router_loss = config.has_router_loss and not gives_logits
    counts_weights = has_router_loss and not packed and any(map(config.is_sparse, plan.layers))
    counts_answers = counts_answers and plan.head and not gives_logits
    reads_segments = packed and (len(plan.layers) > 0 or counts_answers)
    run = partial(
        _run,
        embeds=plan.embedding,
        is_last=plan.head,
        gives_logits=gives_logits,
        packed=packed and len(plan.layers) > 0,
        num_sparse=config.num_sparse_layers if has_router_loss else 0,
        z_loss=config.z_loss,
        merges=tuple((merge.index_leaf, None if merge.projector is None else merge.projector.own) for merge in merges),
        context=context,
    )
    indices = tuple(merge.index_leaf for merge in merges)
    leaves = (
        ("tokens",) * plan.embedding
        + indices
        + ("positions",) * (packed and len(plan.layers) > 0)
        + ("segments",) * reads_segments
        + ("targets",) * (plan.head and not gives_logits)
        + ("weights",) * (counts_weights or (plan.head and not gives_logits))
    )
    order = None if context is None else SequenceOrder(context.devices, config.sliding_window)
    return chunk_of(
        layers,
        run,
        plan.title,
        run_evaluating=partial(run, count_answers=partial(_count_answers, order=order)) if counts_answers else None,
        leaves=leaves,
        leaf_orders={} if order is None else dict.fromkeys(leaves, order),
        optional_leaves=frozenset(indices),
        shared=frozenset(shared & {layer.name for layer in layers}),
        partition=partial(partition, config) if cut_over_devices is None else cut_over_devices,
    )


def language_model(config: LanguageModelConfig) -> LanguageModel:
    """The model that ``config`` describes; nothing is allocated before a chunk's ``init``."""
    return LanguageModel(config)


def layer_name(layer: int) -> str:
    """The name of decoder layer ``layer``, counted from 0 over the whole model: ``layers.<layer>``."""
    return f"layers.{layer}"


def decoder_layers(config: LanguageModelConfig, plan: ChunkPlan, prefix: str) -> list[NamedLayer]:
    """The layers of a chunk in the order of the model.

    In the chunk decoder layers are counted from 0, so that chunks with as many of them are of one kind.
    """
    layers: list[NamedLayer] = []
    if plan.embedding or (plan.head and config.tie_embeddings):
        layers.append(NamedLayer(EMBEDDING, prefix + EMBEDDING, Embedding, config))
    layers += [
        NamedLayer(
            layer_name(own),
            prefix + layer_name(layer),
            SparseDecoderLayer if config.is_sparse(layer) else DecoderLayer,
            config,
        )
        for own, layer in enumerate(plan.layers)
    ]
    if plan.head:
        layers.append(NamedLayer(FINAL_NORM, prefix + FINAL_NORM, residual_norm, config))
        if not config.tie_embeddings:
            layers.append(NamedLayer(HEAD, prefix + HEAD, Head, config))
    return layers


def _run(
    modules: dict[str, Any],
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    embeds: bool,
    is_last: bool,
    gives_logits: bool,
    packed: bool,
    num_sparse: int,
    z_loss: float,
    merges: tuple[tuple[str, str | None], ...],
    context: ContextCut | None,
    count_answers: Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]] | None = None,
) -> Any:
    """``num_sparse`` is how many layers of the model add to the router's loss; 0: it is not computed."""
    hidden, router_loss = inputs if num_sparse and not embeds else (inputs, jnp.zeros((), jnp.float32))
    if embeds:
        hidden = modules[EMBEDDING](leaves["tokens"])
        for (index, projector), features in zip(merges, inputs if len(merges) > 1 else [inputs], strict=False):
            if features is not None:
                hidden = merged(hidden, features if projector is None else modules[projector](features), leaves, index)
    layers = [module for module in modules.values() if isinstance(module, DecoderLayer | SparseDecoderLayer)]
    rows = _rows(layers[0].config, context, hidden.shape[1], leaves if packed else None) if layers else None
    is_token = leaves["segments"] != 0 if packed else None
    for layer in layers:
        if isinstance(layer, DecoderLayer):
            hidden = one_layer(partial(layer, rows=rows))(hidden)
            continue
        counts = None if not num_sparse else is_token if packed else leaves["weights"] != 0
        hidden, added = one_layer(partial(layer, rows=rows, is_token=is_token, counts=counts))(hidden)
        router_loss = router_loss + added / num_sparse if num_sparse else router_loss
    if not is_last:
        return (hidden, router_loss) if num_sparse else hidden
    head = modules[HEAD] if HEAD in modules else modules[EMBEDDING]
    hidden = modules[FINAL_NORM](hidden)
    if gives_logits:
        return head.logits(hidden)
    named: dict[str, jax.Array] = {}
    if count_answers is None:
        loss_sum, squares = head.loss(hidden, leaves["targets"], leaves["weights"])
        weight = jnp.sum(leaves["weights"].astype(jnp.float32))
    else:  # who counts answers reads the logits anyway
        logits = head.logits(hidden)
        loss_sum, weight = token_loss(logits, leaves["targets"], leaves["weights"])
        squares = z_loss * normaliser_loss(logits, leaves["weights"]) if z_loss else 0
        loss_sum += squares
        named |= count_answers(logits, leaves)
    if z_loss:
        named[Z_LOSS] = squares
    if num_sparse:
        named[ROUTER_LOSS] = router_loss * weight
        loss_sum += named[ROUTER_LOSS]
    return loss_sum, weight, *([named] if named else [])


def _count_answers(
    logits: jax.Array, leaves: dict[str, jax.Array], *, order: SequenceOrder | None
) -> dict[str, jax.Array]:
    places = None if order is None else order(logits.shape[1])
    return answer_counts(logits, leaves["targets"], leaves["weights"], leaves.get("segments"), order=places)


def _rows(config: LanguageModelConfig, context: ContextCut | None, length: int, packed: Any) -> Rows:
    """What layers need to know of rows; ``packed`` are the leaves that say so, or None."""
    told = () if packed is None else (packed["positions"], packed["segments"])
    if context is not None:
        return cut_rows(config, context, length, *told)
    return packed_rows(config, *told) if told else None


def merged(hidden: jax.Array, features: jax.Array, leaves: dict[str, jax.Array], name: str) -> jax.Array:
    """``hidden`` ``[batch, length, dim]`` with feature ``leaves[name]`` in place of each vector where that is not -1.

    ``features`` ``[rows, features per row, dim]`` are counted through all rows. A number that is too high gives NaN.
    """
    if name not in leaves:
        raise ValueError(f"features came for a microbatch without {name}: give that leaf wherever there are features")
    flat, index = features.reshape(-1, features.shape[-1]), leaves[name]
    taken = jnp.take(flat, jnp.maximum(index, 0), axis=0, mode="fill", fill_value=jnp.nan)
    return jnp.where(index[..., None] >= 0, taken.astype(hidden.dtype), hidden)
