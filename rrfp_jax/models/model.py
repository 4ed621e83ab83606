"""A language model as a list of chunks.

The model is a chain of named layers (:mod:`rrfp_jax.models.flax_modules`): ``embedding``, ``layers.0`` ...,
``final_norm``, ``head``. A chunk may end with ``layers.3:attention``, and the next begin with ``layers.3:mlp``. As the
decoder of a larger model it has a prefix before each of these, and features of encoders may take the place of some
tokens' vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.models._decoder import (
    AheadLayer,
    DecoderLayer,
    Embedding,
    EmbeddingShard,
    KVCache,
    LMHead,
    LMHeadShard,
    RowInfo,
    ahead_layer,
    decoder_layer,
    residual_norm,
    row_info,
    vocabulary_layer,
)
from rrfp_jax.models._tensor_cut import decoder_partition
from rrfp_jax.models.config import LanguageModelConfig, PredictAheadConfig
from rrfp_jax.models.cuts import (
    ATTENTION,
    MLP,
    ChunkContents,
    ContextCut,
    CutWords,
    SequenceOrder,
    SequenceSlices,
    plan_cut,
    sequence_order,
)
from rrfp_jax.models.experts import BALANCE_BIAS
from rrfp_jax.models.flax_modules import NamedLayer, chunk_of
from rrfp_jax.models.loss import (
    answer_counts,
    counts_of_right,
    joined_loss,
    likeliest_words,
    normaliser_loss,
    shard_logits,
    token_loss,
)
from rrfp_jax.programs.chunk import Chunk, LayerShard, Partition, part_name
from rrfp_jax.programs.remat import one_layer
from rrfp_jax.programs.shapes import LOSS
from rrfp_jax.schedules import KEYS, STREAM, Edge, Placement, vocabulary_sharded

EMBEDDING = "embedding"
"""Name of the token embedding; with tied embeddings also of the copy in the head's chunk."""
FINAL_NORM = "final_norm"
"""Name of the RMSNorm before the head; it is always in the head's chunk."""
HEAD = "head"
"""Name of the output matrix; absent with tied embeddings."""
ROUTER_LOSS = "router_loss"
"""Named sum of the loss that routers of experts add."""
AHEAD_LOSS = "ahead_loss"
"""Named sum of the loss that layers add which predict further ahead."""
Z_LOSS = "z_loss"
"""Named sum of the loss that the z-loss adds."""


_CountAnswers = Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]
"""Maps logits and leaves to the named sums of answers."""


class Merge(NamedTuple):
    """Features that take the place of some tokens' vectors, in the chunk with the embedding."""

    index_leaf: str
    """The leaf with the number of the feature for each token, int32 ``[batch, length]``, -1 for the token's own
    vector."""
    projector: NamedLayer | None = None
    """A layer of this chunk that the features pass first."""


class SequenceSlice(NamedTuple):
    """One slice of every sequence."""

    slices: SequenceSlices
    number: int

    @property
    def is_last(self) -> bool:
        return self.number == self.slices.number - 1

    def taken(self, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the positions of the slice, and of segments those of earlier slices too."""
        if not leaves:
            return {}
        length = next(iter(leaves.values())).shape[1]
        start, stop = self.slices.bounds(length)[self.number : self.number + 2]
        return {name: leaf[:, 0 if name == "segments" else start : stop] for name, leaf in leaves.items()}


def _check_sliceable(config: LanguageModelConfig, *, context: ContextCut | None, counts_answers: bool) -> None:
    """Raises ValueError for a model of which a slice does not compute what it does in the whole sequence."""
    experts = config.experts
    if experts is not None and (experts.capacity_factor is not None or config.has_router_loss):
        what = "have a capacity" if experts.capacity_factor is not None else "add a loss of their router"
        raise ValueError(f"experts {what}, which is of whole sequences: leave it out, or the slices")
    if config.predict_ahead is not None:
        raise ValueError("predict_ahead reads tokens of the next slice: leave it out, or the slices")
    if context is not None or counts_answers:
        what = "lie on the devices of a context" if context is not None else "have answers that are counted whole"
        raise ValueError(f"sequences {what} and cannot be cut into slices: leave out one of the two")


@dataclass(frozen=True)
class ChunkGraph:
    """A model cut into chunks that are no chain."""

    chunks: list[Chunk]
    """All chunks, in an order in which every edge leads to a larger number."""
    edges: tuple[Edge, ...]
    """Edges from each chunk to the chunks that it feeds."""
    parts: dict[str, range]
    """Numbers of the chunks of ``vision``, ``audio`` (each with its projector, unless that is a layer of the decoder's
    first chunk) and ``decoder``; or of what a decoder is cut into whose vocabulary is cut too."""
    placement: Placement | None = None
    """Stages of the chunks, where the cut decides them."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder of a given shape, to be cut into chunks; :func:`language_model` makes it."""

    config: LanguageModelConfig
    """Shape and dtypes of the model."""

    def split(
        self,
        num_chunks: int | None = None,
        layers_per_chunk: Sequence[float] | None = None,
        embedding_in: int = 0,
        head_in: int = -1,
        packed: bool = False,
        *,
        context: ContextCut | None = None,
        counts_answers: bool = False,
        slices: SequenceSlices | None = None,
    ) -> list[Chunk]:
        """Cuts the model into chunks, in order; every cut computes the same function of the same parameters.

        ``num_chunks`` alone cuts evenly; ``layers_per_chunk`` gives the number of decoder layers of every chunk, 0
        where a chunk holds only the embedding or the head; a half, as in ``[2.5, 1.5]``, ends a chunk between the
        attention and the MLP of a layer. ``embedding_in`` and ``head_in`` are the chunks that hold those (negative:
        counted from the last).

        The embedding's chunk reads the batch leaf ``tokens``, int32 ``[batch, length]``; the head's chunk reads
        ``targets``, int32, and ``weights``, float32, of the same shape, and returns ``(loss_sum, weight)``. Between
        chunks travels the residual stream, ``[batch, length, hidden]`` in the compute dtype. With tied embeddings in
        two chunks both hold ``embedding`` and list it in ``shared``.

        Where routers of experts add to the loss, a pair travels: the residual stream, and a float32 scalar beside it,
        their sum so far, over the number of sparse layers. The last chunk adds this times the microbatch's weight to
        ``loss_sum``, and returns it as the named sum ``router_loss`` too: the loss of a step is the mean over tokens,
        and of each microbatch's router loss by its weight. Chunks with sparse layers then also read ``weights``, unless
        rows are packed: tokens of weight 0, or of segment 0, do not count in it.

        With ``predict_ahead`` the last chunk has further layers, and a copy of the embedding, which it lists in
        ``shared``. At each place they predict the tokens behind the target, as far as these are of the same row and
        segment; the last chunk adds their losses to ``loss_sum``, and returns them as the named sum ``ahead_loss``.

        With ``z_loss`` the last chunk adds the z-loss to ``loss_sum`` and returns it as the named sum ``z_loss``.

        ``packed`` is for rows that hold several samples: every chunk with attention also reads ``positions`` and
        ``segments``, int32 ``[batch, length]``. A token attends only to tokens with its own segment id, and positions
        begin anew in each segment; padding is segment 0. With ``rope_sections`` positions are ``[batch, length, 3]``.

        ``context`` is for stages whose mesh has an axis of that name: positions are dealt out over its devices so that
        all compute equally much, and attention works across the cuts. Batches stay in their natural order;
        ``apply`` reads leaves in that of ``leaf_orders``. On another mesh the chunks compute the same.

        With ``counts_answers`` evaluations also have the named sums :data:`rrfp_jax.models.loss.COUNTS`; if rows are
        packed, the last chunk then reads ``segments`` in any case.

        With ``slices`` sequences are cut too: chunk ``c * n + q`` of the list is what runs slice ``q`` of ``n`` through
        chunk ``c``, for the edges of :func:`rrfp_jax.schedules.sliced_chain`. All ``n`` are passes of one set of
        parameters. A slice attends to itself and, by the keys and values that earlier ones hand on, to these.

        Raises ValueError, with the remedy, for a cut that does not add up, and for a model whose sequences cannot be
        cut.
        """
        plans = plan_cut(
            self.config.num_layers,
            num_chunks=num_chunks,
            layers_per_chunk=layers_per_chunk,
            embedding_in=embedding_in,
            head_in=head_in,
        )
        options: dict[str, Any] = {"packed": packed, "context": context, "counts_answers": counts_answers}
        if slices is None or slices.number == 1:
            return [decoder_chunk(self.config, plan, **options) for plan in plans]
        _check_sliceable(self.config, context=context, counts_answers=counts_answers)
        parts = [SequenceSlice(slices, number) for number in range(slices.number)]
        return [decoder_chunk(self.config, plan, packed=packed, part=part) for plan in plans for part in parts]

    def split_vocabulary(
        self,
        num_shards: int,
        num_chunks: int | None = None,
        layers_per_chunk: Sequence[float] | None = None,
        packed: bool = False,
        *,
        fan_out: int | None = None,
        context: ContextCut | None = None,
        counts_answers: bool = False,
    ) -> ChunkGraph:
        """Cuts the model into chunks, and embedding and head into shards of words, in chunks of their own.

        Every stage has one shard of each, and so the same number of words. ``parts`` of the result are ``embedding``,
        whose chunks give zeros for the words of others; ``layers``, one or more chunks for each shard, whose first one
        adds up the vectors and whose last one has the final norm; ``relay``; ``head``, whose chunks give a few numbers
        a token; and ``loss``, the chunk that makes the loss of them. Chunks of ``relay`` have no parameters: they hand
        the stream on, where a stage may send it to ``fan_out`` others, see
        :func:`rrfp_jax.schedules.vocabulary_sharded`, whose edges and placement these are.

        With tied embeddings a shard of the head is a pass of that of the embedding. The other arguments, leaves and
        results are those of :meth:`split`. Raises ValueError, with the remedy, for a cut that does not add up.
        """
        return _vocabulary_graph(
            self.config,
            num_shards,
            plan_cut(
                self.config.num_layers,
                num_chunks=num_chunks,
                layers_per_chunk=layers_per_chunk,
                words=CutWords(first="", last=""),
            ),
            packed=packed,
            fan_out=fan_out,
            context=context,
            counts_answers=counts_answers,
        )


def language_model(config: LanguageModelConfig) -> LanguageModel:
    """Returns the model that ``config`` describes; nothing is allocated before a chunk's ``init``."""
    return LanguageModel(config)


def layer_name(layer: int) -> str:
    """Returns the name of decoder layer ``layer``, counted from 0 over the whole model: ``layers.<layer>``."""
    return f"layers.{layer}"


def named_decoder_layers(config: LanguageModelConfig, plan: ChunkContents, prefix: str) -> list[NamedLayer]:
    """Returns the layers of a chunk in the order of the model.

    In the chunk decoder layers are counted from 0, so that chunks with as many of them are of one kind.
    """
    layers: list[NamedLayer] = []
    ahead = range(config.num_layers, config.num_layers + config.num_layers_ahead) if plan.head else ()
    if plan.embedding or (plan.head and (config.tie_embeddings or ahead)):
        layers.append(NamedLayer(EMBEDDING, prefix + EMBEDDING, Embedding, config))
    for own, layer in enumerate(plan.layers):
        name, part = prefix + layer_name(layer), plan.part(layer)
        is_sparse, is_global = part != ATTENTION and config.is_sparse(layer), part != MLP and config.is_global(layer)
        build = decoder_layer(is_sparse=is_sparse, is_global=is_global, part=part, float8=config.float8_products(layer))
        layers.append(NamedLayer(layer_name(own), name if part is None else part_name(name, part), build, config))
    if plan.head:
        layers.append(NamedLayer(FINAL_NORM, prefix + FINAL_NORM, residual_norm, config))
        if not config.tie_embeddings:
            layers.append(NamedLayer(HEAD, prefix + HEAD, LMHead, config))
    for number, layer in enumerate(ahead):
        build_ahead = ahead_layer(is_sparse=config.is_sparse(layer))
        layers.append(NamedLayer(f"ahead.{number}", prefix + layer_name(layer), build_ahead, config))
    return layers


def decoder_chunk(
    config: LanguageModelConfig,
    plan: ChunkContents,
    *,
    packed: bool = False,
    prefix: str = "",
    merges: tuple[Merge, ...] = (),
    cut_over_devices: Partition | None = None,
    gives_logits: bool = False,
    context: ContextCut | None = None,
    counts_answers: bool = False,
    part: SequenceSlice | None = None,
    ends_apart: bool = False,
) -> Chunk:
    """Returns one chunk of a decoder whose layers have names that begin with ``prefix``, or what runs one slice through
    it.

    With ``ends_apart`` embedding and head are in chunks of their own, but the final norm is in this one.

    With ``merges`` its inputs are their features in order, each ``[rows, features per row, dim]`` or None if the
    microbatch has none; one alone comes as it is. With ``gives_logits`` the chunk with the head returns those, float32
    ``[batch, length, vocab_size]``, and reads neither ``targets`` nor ``weights``. With ``counts_answers`` its
    evaluation counts them.
    """
    if config.predict_ahead is not None and (ends_apart or prefix):
        other = "whose vocabulary is cut into shards" if ends_apart else "behind an encoder"
        raise ValueError(f"predict_ahead is for text alone and whole heads, and not for a model {other}: leave it out")
    ends, plan = plan, replace(plan, embedding=False, head=False) if ends_apart else plan
    layers = named_decoder_layers(config, plan, prefix)
    if ends_apart and ends.head:
        layers.append(NamedLayer(FINAL_NORM, prefix + FINAL_NORM, residual_norm, config))
    layers += [merge.projector for merge in merges if merge.projector is not None]
    # in two chunks, tied embeddings are copies of one parameter; so are those that a prediction further ahead reads
    has_copy = config.tie_embeddings or config.predict_ahead is not None
    shared = {prefix + EMBEDDING} if has_copy and plan.embedding != plan.head else set()
    ahead = config.predict_ahead if plan.head and not gives_logits else None
    has_router_loss = config.has_router_loss and not gives_logits
    counts_routes = config.counts_routes and not gives_logits
    counts_answers = counts_answers and plan.head and not gives_logits
    gives_loss = plan.head and not gives_logits
    has_attention = any(plan.part(layer) != MLP for layer in plan.layers) or ahead is not None
    has_experts = any(config.is_sparse(layer) and plan.part(layer) != ATTENTION for layer in plan.layers)
    has_experts |= ahead is not None and config.is_sparse(config.num_layers)
    indices = tuple(merge.index_leaf for merge in merges)
    leaves = []
    if plan.embedding or ahead is not None:
        leaves.append("tokens")
    leaves += indices
    # behind an encoder, such positions depend on the images
    has_positions = packed or (bool(prefix) and config.layer_variant.rope_sections is not None)
    if has_positions and has_attention:
        leaves.append("positions")
    if packed and (has_attention or has_experts or counts_answers):
        leaves.append("segments")
    if gives_loss:
        leaves.append("targets")
    # where rows are not packed, weights are all that tells a router which tokens are padding
    if gives_loss or (counts_routes and not packed and has_experts):
        leaves.append("weights")
    order = sequence_order(config, context)
    rate = None if config.experts is None else config.experts.bias_rate
    run = partial(
        _run,
        embeds=plan.embedding,
        is_last=plan.head,
        gives_logits=gives_logits,
        packed=packed,
        has_positions=has_positions,
        num_sparse=config.num_sparse_layers + config.num_sparse_layers_ahead if has_router_loss else 0,
        counts_routes=counts_routes,
        z_loss=config.z_loss,
        ahead=ahead,
        merges=tuple((merge.index_leaf, None if merge.projector is None else merge.projector.own) for merge in merges),
        context=context,
        order=order,
        part=part,
    )
    if ends_apart:
        run = partial(
            _run_between, run=run, is_first=ends.embedding, is_last=ends.head, has_router_loss=has_router_loss
        )
    title = plan.title if part is None else f"{plan.title} (slice {part.number + 1} of {part.slices.number})"
    if part is not None:  # the slices of a chunk are passes of its layers
        shared = {layer.name for layer in layers}
    return chunk_of(
        layers,
        run,
        title,
        run_evaluating=partial(run, count_answers=partial(_count_answers, order=order)) if counts_answers else None,
        leaves=tuple(leaves),
        leaf_orders={} if order is None else dict.fromkeys(leaves, order),
        optional_leaves=frozenset(indices),
        shared=frozenset(shared & {layer.name for layer in layers}),
        gives_loss=part is not None and gives_loss and not part.is_last,
        sign_rates={} if rate is None else {BALANCE_BIAS: rate},
        partition=partial(decoder_partition, config) if cut_over_devices is None else cut_over_devices,
    )


def _run(
    modules: dict[str, Any],
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    embeds: bool,
    is_last: bool,
    gives_logits: bool,
    packed: bool,
    has_positions: bool,
    num_sparse: int,
    counts_routes: bool,
    z_loss: float,
    ahead: PredictAheadConfig | None,
    merges: tuple[tuple[str, str | None], ...],
    context: ContextCut | None,
    order: SequenceOrder | None,
    part: SequenceSlice | None,
    count_answers: _CountAnswers | None = None,
) -> Any:
    """Computes a chunk of a decoder. ``num_sparse`` is the number of layers of the model that add to the router loss;
    0: it is not computed."""
    layers = [module for module in modules.values() if isinstance(module, DecoderLayer)]
    further = [layer for layer in layers if isinstance(layer, AheadLayer)]
    layers = layers[: len(layers) - len(further)]
    attending = [layer for layer in layers if layer.part != MLP]
    earlier: list[tuple[KVCache, ...]] | None = None
    if part is not None:
        inputs, earlier = _inputs_of_slice(inputs, part, embeds=embeds, num_attending=len(attending))
        leaves = part.taken(leaves)
    hidden, router_loss = inputs if num_sparse and not embeds else (inputs, jnp.zeros((), jnp.float32))
    if embeds:
        hidden = modules[EMBEDDING](leaves["tokens"])
        for (index, projector), features in zip(merges, inputs if len(merges) > 1 else [inputs], strict=False):
            if features is not None:
                projected = features if projector is None else modules[projector](features)
                hidden = merge_features(hidden, projected, leaves, index)

    length, start = hidden.shape[1], sum(held.keys.shape[1] for held in earlier[0]) if earlier else 0
    with_rows = [*attending, *further]
    of_rows = {name: leaves[name] for name in ("positions",) * has_positions + ("segments",) * packed if with_rows}
    rows = {
        is_global: row_info(with_rows[0].config, length, is_global=is_global, start=start, cut=context, **of_rows)
        for is_global in {layer.is_global for layer in with_rows}
    }
    has_experts = any(layer.is_sparse for layer in (*layers, *further))
    is_token = leaves["segments"][:, -length:] != 0 if packed and has_experts else None
    counts = None if not (counts_routes and has_experts) else is_token if packed else leaves["weights"] != 0
    routing = {"is_token": is_token, "counts": counts, "order": None if order is None else order(length)}
    keys = list[KVCache]()
    for layer in layers:
        own_rows = None if layer.part == MLP else rows[layer.is_global]
        options: dict[str, Any] = {"rows": own_rows, **(routing if layer.is_sparse else {})}
        if earlier is not None and layer.part != MLP:
            options["earlier"] = earlier[len(keys)]
        # each layer by itself is rematerialised, so that a backward holds the activations of one
        hidden, added, own = one_layer(partial(layer, **options))(hidden)
        if own is not None:
            keys.append(own)
        if num_sparse and added is not None:
            router_loss = router_loss + added / num_sparse
    handed_on = {} if part is None or part.is_last else {KEYS: tuple(keys)}
    if not is_last:
        stream = (hidden, router_loss) if num_sparse else hidden
        return stream if part is None else {STREAM: stream, **handed_on}
    head = modules[HEAD] if HEAD in modules else modules[EMBEDDING]
    hidden = modules[FINAL_NORM](hidden)
    if gives_logits:
        return head.logits(hidden)
    loss_sum, weight, named = _loss(head, hidden, leaves, z_loss, count_answers)
    if ahead is not None:
        places = np.arange(length) if order is None else order(length)
        # these layers are never global
        losses, added = _predict_ahead(modules, hidden, leaves, places=places, rows=rows[False], routing=routing)
        named[AHEAD_LOSS] = ahead.loss_weight / ahead.num_layers * losses
        loss_sum += named[AHEAD_LOSS]
        router_loss = router_loss + added / max(num_sparse, 1)
    if num_sparse:
        named[ROUTER_LOSS] = router_loss * weight
        loss_sum += named[ROUTER_LOSS]
    loss = (loss_sum, weight, named) if named else (loss_sum, weight)
    return {LOSS: loss, **handed_on} if handed_on else loss


def _predict_ahead(
    modules: dict[str, Any],
    stream: jax.Array,
    leaves: dict[str, jax.Array],
    *,
    places: np.ndarray,
    rows: RowInfo | None,
    routing: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Returns the summed losses of layers that predict further ahead, and of their routers; float32 scalars."""
    losses, of_routers = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    embedding, head = modules[EMBEDDING], modules.get(HEAD, modules[EMBEDDING])
    layers = [module for module in modules.values() if isinstance(module, AheadLayer)]
    for number, layer in enumerate(layers, 1):
        later = _later(leaves, number, places)
        predict = one_layer(partial(layer.predict, rows=rows, **(routing if layer.is_sparse else {})))
        stream, added = predict(stream, embedding(later["tokens"]))
        losses += head.loss(stream, later["targets"], later["weights"])[0]
        of_routers += 0 if added is None else added
    return losses, of_routers


def _later(leaves: dict[str, jax.Array], number: int, places: np.ndarray) -> dict[str, jax.Array]:
    """Returns tokens, targets and weights of ``number`` tokens later at each place, whose natural positions are
    ``places``; without weight where that is behind the row's end, or in another segment."""
    at = np.argsort(places)[np.minimum(places + number, len(places) - 1)]
    later = {name: jnp.take(leaves[name], at, axis=1) for name in ("tokens", "targets", "weights")}
    is_there = jnp.asarray(places + number < len(places))
    if "segments" in leaves:
        is_there &= jnp.take(leaves["segments"], at, axis=1) == leaves["segments"]
    return later | {"weights": jnp.where(is_there, later["weights"], 0)}


def _inputs_of_slice(
    inputs: Any, part: SequenceSlice, *, embeds: bool, num_attending: int
) -> tuple[Any, list[tuple[KVCache, ...]]]:
    """Returns the stream, if one comes, and for each layer with attention the keys and values of earlier slices."""
    is_one = (not embeds) + part.number == 1  # a single input does not come in a tuple
    came = () if inputs is None else (inputs,) if is_one else inputs
    stream, *from_slices = (None, *came) if embeds else came
    return stream, list(zip(*from_slices, strict=True)) if from_slices else [()] * num_attending


def _loss(
    head: Any, hidden: jax.Array, leaves: dict[str, jax.Array], z_loss: float, count_answers: _CountAnswers | None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the summed loss without that of routers, its weight, and the named sums."""
    named: dict[str, jax.Array] = {}
    if count_answers is None:
        loss_sum, squares = head.loss(hidden, leaves["targets"], leaves["weights"])
        weight = jnp.sum(leaves["weights"].astype(jnp.float32))
    else:  # counting answers needs whole logits anyway
        logits = head.logits(hidden)
        loss_sum, weight = token_loss(logits, leaves["targets"], leaves["weights"])
        squares = z_loss * normaliser_loss(logits, leaves["weights"]) if z_loss else 0
        loss_sum += squares
        named |= count_answers(logits, leaves)
    if z_loss:
        named[Z_LOSS] = squares
    return loss_sum, weight, named


def _count_answers(
    logits: jax.Array, leaves: dict[str, jax.Array], *, order: SequenceOrder | None
) -> dict[str, jax.Array]:
    places = None if order is None else order(logits.shape[1])
    return answer_counts(logits, leaves["targets"], leaves["weights"], leaves.get("segments"), order=places)


def merge_features(hidden: jax.Array, features: jax.Array, leaves: dict[str, jax.Array], name: str) -> jax.Array:
    """Returns ``hidden`` ``[batch, length, dim]`` with feature ``leaves[name]`` in place of each vector unless it is
    -1.

    ``features`` ``[rows, features per row, dim]`` are counted through all rows. A number that is too high gives NaN.
    """
    if name not in leaves:
        raise ValueError(f"features came for a microbatch without {name}: give that leaf wherever there are features")
    # -1 must not count from the end; a number that is too high must not become a wrong feature
    flat, index = features.reshape(-1, features.shape[-1]), leaves[name]
    taken = jnp.take(flat, jnp.maximum(index, 0), axis=0, mode="fill", fill_value=jnp.nan)
    return jnp.where(index[..., None] >= 0, taken.astype(hidden.dtype), hidden)


# -- shards of the vocabulary ------------------------------------------------------------------------------------------


def _vocabulary_graph(
    config: LanguageModelConfig,
    num_shards: int,
    plans: Sequence[ChunkContents],
    *,
    packed: bool,
    fan_out: int | None,
    context: ContextCut | None,
    counts_answers: bool,
) -> ChunkGraph:
    if not 2 <= num_shards <= config.vocab_size:
        raise ValueError(
            f"a vocabulary of {config.vocab_size} words cannot be cut into {num_shards} shards: give 2 to "
            f"{config.vocab_size}"
        )
    if len(plans) % num_shards:
        raise ValueError(
            f"{len(plans)} chunks of layers are not equally many beside each of {num_shards} shards: give "
            f"a multiple of {num_shards}"
        )
    graph, placement = vocabulary_sharded(num_shards, 1, chunks_per_stage=len(plans) // num_shards, fan_out=fan_out)
    order = sequence_order(config, context)
    tied = config.tie_embeddings
    shards = [LayerShard(number, num_shards) for number in range(num_shards)]

    def chunk(title: str, layers: list[NamedLayer], run: Any, *leaves: str, **rest: Any) -> Chunk:
        shared = {layer.name for layer in layers if tied}
        orders = {} if order is None else dict.fromkeys(leaves, order)
        return chunk_of(layers, run, title, leaves=leaves, leaf_orders=orders, shared=frozenset(shared), **rest)

    def shard_chunk(title: str, shard: LayerShard, run: Any, leaf: str, **rest: Any) -> Chunk:
        own, build = (EMBEDDING, EmbeddingShard) if tied or leaf == "tokens" else (HEAD, LMHeadShard)
        name = shard._replace(axis=0 if own == EMBEDDING else -1).name(own)
        layer = NamedLayer(own, name, vocabulary_layer(build, shard), config)
        first, stop = shard.bounds(config.vocab_size)
        cut = partial(decoder_partition, replace(config, vocab_size=stop - first))
        return chunk(f"{title}, words {first}-{stop - 1}", [layer], run, leaf, partition=cut, **rest)

    has_router_loss = config.has_router_loss
    counting = ("segments",) if counts_answers and packed else ()
    joins = partial(_run_loss, words=config.vocab_size, z_loss=config.z_loss, has_router_loss=has_router_loss)
    evaluating_loss = partial(joins, counts_answers=True, order=order) if counts_answers else None

    def head(shard: LayerShard) -> Chunk:
        run = partial(_run_head_shard, has_router_loss=has_router_loss, is_last=shard.number == num_shards - 1)
        evaluating = partial(run, gives_peaks=True) if counts_answers else None
        return shard_chunk("head", shard, run, "targets", run_evaluating=evaluating)

    ends = 2 * num_shards + 1  # an embedding and a head of each shard, and the loss
    chains = {
        "embedding": [shard_chunk("embedding", shard, _run_embedding_shard, "tokens") for shard in shards],
        "layers": [decoder_chunk(config, plan, packed=packed, context=context, ends_apart=True) for plan in plans],
        "relay": [chunk("relay", [], _run_relay) for _ in range(graph.num_chunks - len(plans) - ends)],
        "head": [head(shard) for shard in shards],
        "loss": [chunk("loss", [], joins, "targets", "weights", *counting, run_evaluating=evaluating_loss)],
    }
    chunks: list[Chunk] = []
    parts = dict[str, range]()
    for name, chain in chains.items():
        parts[name] = range(len(chunks), len(chunks) + len(chain))
        chunks += chain
    return ChunkGraph(chunks, graph.edges, parts, placement)


def _run_embedding_shard(modules: dict[str, Any], _: Any, leaves: dict[str, jax.Array]) -> Any:
    return modules[EMBEDDING](leaves["tokens"])


def _run_between(
    modules: dict[str, Any],
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    run: Callable[..., Any],
    is_first: bool,
    is_last: bool,
    has_router_loss: bool,
) -> Any:
    """Computes layers between shards of the embedding and of the head."""
    if is_first:
        inputs = sum(inputs)  # exact: all but one of the vectors of a token are zeros
        inputs = (inputs, jnp.zeros((), jnp.float32)) if has_router_loss else inputs
    outputs = run(modules, inputs, leaves)
    if not is_last:
        return outputs
    if not has_router_loss:
        return modules[FINAL_NORM](outputs)
    hidden, router_loss = outputs
    return modules[FINAL_NORM](hidden), router_loss


def _run_relay(_modules: dict[str, Any], stream: Any, _leaves: dict[str, jax.Array]) -> Any:
    return stream


def _run_head_shard(
    modules: dict[str, Any],
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    has_router_loss: bool,
    is_last: bool,
    gives_peaks: bool = False,
) -> Any:
    """Makes the numbers of a shard; the last one hands on the router loss too."""
    (head,) = modules.values()
    hidden, router_loss = inputs if has_router_loss else (inputs, None)
    if gives_peaks:  # counting answers needs whole logits anyway
        numbers = shard_logits(head.logits(hidden), leaves["targets"], head.bounds[0])
    else:
        numbers = head.numbers(hidden, leaves["targets"])
    return (numbers, router_loss) if has_router_loss and is_last else numbers


def _run_loss(
    _: dict[str, Any],
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    words: int,
    z_loss: float,
    has_router_loss: bool,
    counts_answers: bool = False,
    order: SequenceOrder | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Makes the loss from the numbers of all shards, and the router loss, which comes with the last ones."""
    *shards, last = inputs
    last, router_loss = last if has_router_loss else (last, None)
    shards = [*shards, last]
    normalisers, target_logits, *peaks = map(jnp.stack, zip(*shards, strict=True))
    targets, weights = leaves["targets"], leaves["weights"]
    loss_sum, squares = joined_loss(normalisers, target_logits, targets, weights, words=words, z_loss=z_loss)
    weight, named = jnp.sum(weights.astype(jnp.float32)), dict[str, jax.Array]()
    if counts_answers:
        places = None if order is None else order(targets.shape[1])
        is_right = likeliest_words(*peaks) == targets
        named |= counts_of_right(is_right, weights, leaves.get("segments"), order=places)
    if z_loss:
        named[Z_LOSS] = squares
    if router_loss is not None:
        named[ROUTER_LOSS] = router_loss * weight
        loss_sum += named[ROUTER_LOSS]
    return loss_sum, weight, named
