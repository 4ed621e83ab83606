"""The layers of decoders and encoders, with their names, operations and bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from rrfp_jax.costs.flops import Flops
from rrfp_jax.costs.layer_costs import HALVES
from rrfp_jax.costs.layer_sizes import (
    LayerSizes,
    Sent,
    Widths,
    dense_layer,
    embedding_layer,
    head_layer,
    transformer_layer,
)
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.cuts import ATTENTION, MLP
from rrfp_jax.models.presets import decoder_sizes, sizes_of
from rrfp_jax.models.vision_config import VisionConfig, VisionLanguageConfig

if TYPE_CHECKING:
    from rrfp_jax.programs.target import Target

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by the name of its dtype."""
_ID_COLUMNS = 64
"""Columns that each head of packed rows has in cuDNN's attention; see :mod:`rrfp_jax.models.attention`."""
FLOAT32 = FLOAT_BYTES["float32"]


@dataclass(frozen=True, kw_only=True)
class MicrobatchRows:
    """The largest microbatch of a size."""

    num_rows: int
    length: int
    """Tokens of a row."""
    image_rows: int = 0
    patch_length: int = 0
    """Patches of a row."""

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.num_rows * self.length

    @property
    def pairs(self) -> int:
        """Pairs of tokens, as attention over whole rows computes them."""
        return self.num_rows * self.length**2

    @property
    def patches(self) -> int:
        """Number of patches, padding included."""
        return self.image_rows * self.patch_length

    @property
    def patch_pairs(self) -> int:
        """Pairs of patches, as attention over whole rows computes them."""
        return self.image_rows * self.patch_length**2


class Placed(NamedTuple):
    """A layer in its place."""

    kind: str
    names: tuple[str, ...]
    """Names of its parts, as configurations freeze them."""
    sizes: LayerSizes
    param_dtype: str
    is_encoder: bool = False
    halves: tuple[LayerSizes, ...] = ()
    """Its attention and its MLP, where it may be cut between them."""


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """How a stage runs its layers."""

    rows: MicrobatchRows
    """Rows of the whole microbatch."""
    tensor: int = 1
    """Devices that share every layer."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Axes of the stage's mesh that share no matrices, with their sizes."""
    remat: str = "none"
    target: "Target"
    """The kind of device that runs them, which decides how attention and experts are computed."""
    compute_bytes: int = 4
    """Bytes of a number with which the decoder computes."""
    pixel_bytes: int = 4
    """Bytes of a value of a patch, as the data hand it over."""

    def part(self, size: int) -> int:
        """Returns each device's part of a size: an equal one, or all where it does not divide."""
        return _part(size, self.tensor)

    @cached_property
    def own(self) -> MicrobatchRows:
        """Rows of one device; a number that does not divide is whole on each."""
        rows, context = prod(self.axes.get(axis, 1) for axis in (FSDP, EXPERT)), self.axes.get(CONTEXT, 1)
        return MicrobatchRows(
            num_rows=_part(self.rows.num_rows, rows),
            length=_part(self.rows.length, context),
            image_rows=_part(self.rows.image_rows, rows),
            patch_length=_part(self.rows.patch_length, context),
        )

    @property
    def is_context_cut(self) -> bool:
        """Whether positions of a decoder are dealt out, and scores are computed in tiles."""
        return self.own.length < self.rows.length

    def spread(self, sizes: LayerSizes, parts: float, *more: Sent) -> LayerSizes:
        """Returns the layer with the costs of parameters and their gradients on the axes: gathered and added up by
        ``fsdp``, added up by others that cut rows or positions into ``parts`` altogether; ``more`` is sent besides."""
        fsdp, held = self.axes.get(FSDP, 1), -(-sizes.num_params // self.axes.get(FSDP, 1))
        num_bytes = sizes.num_params * self.compute_bytes * (1 - 1 / fsdp)
        # CPU devices sum gradients over such an axis into arrays of their own
        copies = 1 + (self.target.platform == "cpu" and any(self.axes.get(axis, 1) > 1 for axis in (EXPERT, CONTEXT)))
        summed, own = sizes.num_params * FLOAT32 * copies, sizes.more_temporaries_bytes - sizes.lasting_bytes
        sent = [Sent(FSDP, num_bytes, num_bytes * sizes.returns_gradient, num_bytes)] if fsdp > 1 else []
        for axis in (EXPERT, CONTEXT):
            size = self.axes.get(axis, 1)
            sent += [Sent(axis, weight_gradient=2 * (1 - 1 / size) * held * self.compute_bytes)] if size > 1 else []
        return replace(
            sizes,
            held_params=held,
            derived_bytes=-(-sizes.derived_bytes // fsdp),
            more_temporaries_bytes=round(max(own, summed) + num_bytes) + sizes.lasting_bytes,
            lasting_bytes=sizes.lasting_bytes + round(num_bytes),
            sharing=round(parts),
            sent=(*sent, *more),
        )

    def is_fused(
        self,
        compute_dtype: str,
        length: int,
        widths: Widths,
        *,
        head_dim: int,
        is_packed: bool,
        has_sinks: bool = False,
    ) -> bool:
        """Whether attention keeps no scores of all pairs of positions."""
        import jax.numpy as jnp  # a plan whose costs come from a file loads no JAX

        from rrfp_jax.models.attention import AttentionCall, implementation

        asked = AttentionCall(
            rows=self.own.num_rows, length=length, heads=round(widths.num_heads), kv_heads=widths.key // head_dim,
            head_dim=head_dim, dtype=jnp.dtype(compute_dtype), is_causal=True, is_packed=is_packed,
            has_sinks=has_sinks,
        )  # fmt: skip
        return implementation(self.target, asked) != "formula"


def _part(size: int, number: int) -> int:
    return size if size % number else size // number


def decoder_layer_sizes(
    model: LanguageModelConfig, way: StageRun, *, packed: bool, prefix: str = ""
) -> Iterator[Placed]:
    """``embedding``, so many times ``layer``, and ``head`` with the final norm.

    Where some layers have experts and others have none, those that have are of kind ``sparse``; where some have no
    window and others have one, those without are of kind ``global`` or ``global sparse``.
    """
    if model.predict_ahead is not None:
        raise ValueError("model.predict_ahead has no costs in plans: leave it out where a plan is made")
    if model.fp8 is not None:
        from rrfp_jax.models.float8 import check_float8  # a plan whose costs come from a file loads no JAX

        check_float8(way.target)
    sizes, c = decoder_sizes(model), FLOAT_BYTES[model.compute_dtype]
    tokens, is_cast = way.own.tokens, model.compute_dtype != model.param_dtype
    parts = way.rows.tokens / tokens
    words, stream = way.part(model.vocab_size), tokens * model.hidden * c
    embedding = embedding_layer(
        model.hidden,
        num_params=words * model.hidden,
        num_tokens=tokens,
        compute_bytes=c,
        param_bytes=FLOAT_BYTES[model.param_dtype],
    )
    # a look-up costs less than keeping its rows; behind an encoder its rows are merged with features, and kept
    remade = 0 if prefix or way.remat != "full" else stream
    embedding = replace(embedding, sums=(1, 0), sum_bytes=stream, returns_gradient=bool(prefix), remade_bytes=remade)
    yield Placed("embedding", (f"{prefix}embedding",), way.spread(embedding, parts), model.param_dtype)
    kinds = {
        kind: [_decoder_layer(model, way, *kind, part=part, packed=packed) for part in (None, *HALVES)]
        for kind in {(model.is_sparse(number), model.is_global(number)) for number in range(model.num_layers)}
    }
    is_mixed = 0 < model.num_sparse_layers < model.num_layers
    for number in range(model.num_layers):
        is_sparse, is_global = model.is_sparse(number), model.is_global(number)
        kind = " ".join(["global"] * is_global + ["sparse"] * (is_sparse and is_mixed)) or "layer"
        whole, *halves = kinds[is_sparse, is_global]
        yield Placed(kind, (f"{prefix}layers.{number}",), whole, model.param_dtype, halves=tuple(halves))
    head = head_layer(
        model.hidden,
        words,
        sizes.head(way.rows.tokens),
        num_params=words * model.hidden + model.hidden,
        num_tokens=tokens,
        remat=way.remat,
        compute_bytes=c,
        is_cast=is_cast,
        is_float8=model.has_float8_head,
    )
    names = (f"{prefix}final_norm", f"{prefix}{'embedding' if model.tie_embeddings else 'head'}")
    head = way.spread(replace(head, sums=(1, 1), sum_bytes=stream), parts)
    yield Placed("head", names, head, model.param_dtype)


def _decoder_layer(
    model: LanguageModelConfig, way: StageRun, is_sparse: bool, is_global: bool, *, part: str | None, packed: bool
) -> LayerSizes:
    """Returns a layer or a part of it. A device's experts compute more than those tokens that choose them: see
    `rrfp_jax.models.experts`."""
    attends, has_mlp = part != MLP, part != ATTENTION
    tokens, c, is_tiled = way.own.tokens, FLOAT_BYTES[model.compute_dtype], way.is_context_cut and attends
    is_sparse &= has_mlp
    sizes = replace(decoder_sizes(model), expert_dims=_expert_dims(model, way)) if is_sparse else decoder_sizes(model)
    widths = _decoder_widths(model, way, is_sparse)
    of_attention, of_mlp = _layer_params(model, way, is_sparse)
    flops, window, has_kernel = Flops(), model.window(is_global=is_global), False
    if attends:
        has_kernel = way.is_fused(
            model.compute_dtype, way.rows.length, widths, head_dim=model.attention_dim, is_packed=packed,
            has_sinks=model.layer_variant.sinks,
        )  # fmt: skip
        # kernels leave out pairs that are too far apart; tiles that are dealt out over devices only mask them
        is_near = has_kernel and not is_tiled
        seen = min(window or way.rows.length, way.rows.length) * way.rows.tokens if is_near else way.rows.pairs
        flops += sizes.attention(way.rows.tokens, seen * _seen(way))
    else:
        widths = Widths(hidden=model.hidden, query=0, key=0, mlp=widths.mlp, num_heads=0, mlp_kept=widths.mlp_kept)
    if has_mlp:
        flops += sizes.mlp(way.rows.tokens, is_sparse=is_sparse)
    else:
        widths = replace(widths, mlp=0)
    if model.layer_variant.post_norms:
        widths = replace(widths, normed_heads=widths.normed_heads + (attends + has_mlp) * model.hidden)
    float8 = _float8_products(model, is_sparse, is_global, part)
    layer = transformer_layer(
        widths,
        flops,
        num_params=of_attention * attends + of_mlp * has_mlp,
        num_tokens=tokens,
        length=way.rows.length,
        remat=way.remat,
        compute_bytes=c,
        is_fused=is_tiled or not attends or has_kernel,
        is_cast=model.compute_dtype != model.param_dtype,
        num_branches=attends + has_mlp,
        float8=float8,
    )
    of_rows = 0
    if packed and attends:  # positions and segments, or what is made of them
        of_rows = 8 if way.remat != "none" else model.rotary_dim * FLOAT32
        if way.target.is_nvidia and way.remat == "none":  # queries and keys tell samples apart by more columns
            of_rows += (widths.query + widths.key) // model.attention_dim * _ID_COLUMNS * c
    if is_sparse:  # tokens before, behind and weighed behind the experts; the second are a product's result
        of_rows += round(
            {"none": 3, "dots": 1, "full": 0}[way.remat] * _experts_per_token(model, way) * model.hidden * c
        )
    # with dots also the result of one product more, which a norm reads
    of_rows += (model.layer_variant.post_norms and way.remat == "dots") * model.hidden * c
    stash = layer.stash_bytes + tokens * of_rows
    owed, number = layer.owed_bytes, attends + has_mlp
    if not has_mlp and way.remat == "full":  # at a chunk's end heads wait for W, before and behind their rotation
        owed += tokens * (2 if model.latent_attention is None else 1) * (widths.query + 2 * widths.key) * c
        owed += tokens * widths.query * (c - 1) * ("attention.output" in float8)  # and their mix, not rounded yet
    layer = replace(
        layer, stash_bytes=stash, owed_bytes=owed, sums=(number, number), sum_bytes=tokens * model.hidden * c
    )
    if is_tiled and way.remat != "none":  # keys and values of all devices of the axis, and sums over tiles
        keys = 2 * way.part(model.num_key_value_heads) * model.attention_dim * way.rows.length // way.own.length
        sums = 2 * (model.num_heads // way.tensor) * model.attention_dim
        layer = layer.with_temporaries(tokens * (keys * c + sums * FLOAT32))
    if is_sparse and way.remat != "none":  # rows before and behind the experts, and as they travel
        rows = tokens * _experts_per_token(model, way) * (2 if way.axes.get(EXPERT, 1) > 1 else 1)
        layer = layer.with_temporaries(round(2 * rows * model.hidden * c))
    if is_sparse:  # matrices of other devices, and their gradients
        layer = layer.with_temporaries(_gathered_params(model, way) * (c + FLOAT32))
    keys_sent = _keys_sent(model, way) if attends else ()
    return way.spread(layer, way.rows.tokens / tokens, *keys_sent, *_experts_sent(model, way, is_sparse))


def _float8_products(model: LanguageModelConfig, is_sparse: bool, is_global: bool, part: str | None) -> set[str]:
    """Returns the products of a layer, or a part of it, that are in float8 in all layers of its kind."""
    layers = [
        layer
        for layer in range(model.num_layers)
        if (part == ATTENTION or model.is_sparse(layer) == is_sparse)
        and (part == MLP or model.is_global(layer) == is_global)
    ]
    if model.fp8 is None or not layers:
        return set()
    found = set(model.float8_products(layers[0])).intersection(*map(model.float8_products, layers[1:]))
    return {name for name in found if part is None or name.partition(".")[0] == part}


def _seen(way: StageRun) -> float:
    """Which part of the pairs of positions is computed: tiles above the diagonal are left out where there are some."""
    parts = way.rows.length // way.own.length
    return (2 * parts + 1) / (4 * parts) if way.is_context_cut else 1.0


def _keys_sent(model: LanguageModelConfig, way: StageRun) -> Iterator[Sent]:
    """Keys and values of other devices, in F and again in the backward, with their float32 gradients."""
    if way.is_context_cut:
        width = 2 * way.part(model.num_key_value_heads) * model.attention_dim
        numbers = way.own.num_rows * (way.rows.length - way.own.length) * width
        yield Sent(CONTEXT, numbers * way.compute_bytes, numbers * (way.compute_bytes + FLOAT32))


def _experts_sent(model: LanguageModelConfig, way: StageRun, is_sparse: bool) -> Iterator[Sent]:
    """Tokens to experts and back, in F and in the backward; without a capacity the matrices of all experts instead."""
    size, experts = way.axes.get(EXPERT, 1), model.experts
    if not is_sparse or experts is None or size == 1:
        return
    if experts.capacity_factor is None:
        num_bytes: float = _gathered_params(model, way) * way.compute_bytes
        yield Sent(EXPERT, num_bytes, num_bytes, num_bytes)
    else:
        per_token = min(experts.capacity_factor * experts.experts_per_token, size)
        num_bytes = 2 * (1 - 1 / size) * way.own.tokens * per_token * model.hidden * way.compute_bytes
        yield Sent(EXPERT, num_bytes, num_bytes)


def _gathered_params(model: LanguageModelConfig, way: StageRun) -> int:
    """Returns the parameters of other devices' experts, with which a device computes where experts have no capacity."""
    size, experts = way.axes.get(EXPERT, 1), model.experts
    if experts is None or experts.capacity_factor is not None:
        return 0
    return (size - 1) * (experts.num_experts // size) * 3 * model.hidden * (model.expert_dim // way.tensor)


def _expert_dims(model: LanguageModelConfig, way: StageRun) -> int:
    """Returns the inner widths that are computed for each token."""
    experts = model.experts
    if experts is None:
        return 0
    return round(_experts_per_token(model, way) * model.expert_dim) + (experts.shared_mlp_dim or 0)


def _experts_per_token(model: LanguageModelConfig, way: StageRun) -> float:
    """Returns how many experts are computed for a token, which may be more than are chosen."""
    experts = model.experts
    if experts is None:
        return 0.0
    if experts.capacity_factor is not None:
        return min(float(experts.num_experts), experts.capacity_factor * experts.experts_per_token)
    if way.target.platform == "cpu":  # every expert computes every token
        return float(experts.num_experts)
    if way.target.platform == "gpu":  # runs are filled up to whole blocks
        from rrfp_jax.models.experts import block_size

        pairs, tokens = way.own.tokens * experts.experts_per_token, way.own.tokens
        size = block_size(pairs, experts.num_experts)
        return (pairs + experts.num_experts * (size - 1)) // size * size / tokens
    return float(experts.experts_per_token)


def _decoder_widths(model: LanguageModelConfig, way: StageRun, is_sparse: bool) -> Widths:
    query = model.num_heads // way.tensor * model.attention_dim
    key = way.part(model.num_key_value_heads) * model.attention_dim
    widths = Widths(
        hidden=model.hidden,
        query=query,
        key=key,
        mlp=(_expert_dims(model, way) if is_sparse else model.mlp_dim) // way.tensor,
        num_heads=model.num_heads // way.tensor,
        normed_heads=(query + key) * model.qk_norm,
        mlp_kept=8 if model.layer_variant.activation == "gelu_tanh" else 6,
        biased=(query + 2 * key) * model.qkv_bias + model.hidden * model.layer_variant.output_bias,
    )
    if (latent := model.latent_attention) is None:
        return widths
    heads, normed = model.num_heads // way.tensor, (latent.query_rank or 0) + latent.kv_rank
    results = heads * (latent.query_dim + latent.plain_dim + latent.value_dim) + normed + latent.rotary_dim
    return replace(
        widths,
        normed_heads=normed,
        more_kept=normed + heads * (latent.value_dim - latent.call_dim),
        more_results=results - 3 * query,
        more_products=results + normed + heads * latent.value_dim - 4 * query,
    )


def _layer_params(model: LanguageModelConfig, way: StageRun, is_sparse: bool) -> tuple[int, int]:
    """Returns the parameters of each device, in attention and in the MLP."""
    widths, mlp, experts = _decoder_widths(model, way, is_sparse), 3 * (model.mlp_dim // way.tensor), model.experts
    variant, biases, latent = model.layer_variant, 0, model.latent_attention
    if is_sparse and experts is not None:
        own = experts.num_experts // way.axes.get(EXPERT, 1)
        inner = own * model.expert_dim + (experts.shared_mlp_dim or 0)
        mlp = 3 * (inner // way.tensor) + experts.num_experts + experts.shared_gate
        if experts.biases:
            biases += experts.num_experts + own * (2 * model.expert_dim // way.tensor + model.hidden)
        biases += experts.num_experts * (experts.bias_rate is not None)
    vectors = (widths.query + 2 * widths.key) * model.qkv_bias + 2 * model.size_per_head * model.qk_norm
    vectors += model.num_heads // way.tensor * variant.sinks + model.hidden * variant.output_bias
    num_norms = 1 + variant.post_norms
    attention = 2 * model.hidden * (widths.query + widths.key) + vectors
    if latent is not None:
        attention = latent.num_params(model.hidden, model.num_heads // way.tensor)
    return attention + model.hidden * num_norms, model.hidden * (mlp + num_norms) + biases


def encoder_layer_sizes(model: VisionLanguageConfig, way: StageRun) -> Iterator[Placed]:
    """``patches``, so many times ``vision``, and ``projector``, with a final norm before it if there is one."""
    vision, projector, sizes = model.vision, model.projector, sizes_of(model)
    c, is_cast, patches = FLOAT_BYTES[vision.compute_dtype], vision.compute_dtype != vision.param_dtype, way.own.patches
    parts = way.rows.patches / patches
    stem = dense_layer(
        (vision.patch_dim * vision.patch_frames, vision.hidden),
        sizes.encoder.patches(way.rows.patches),
        num_params=vision.num_params() - vision.num_layers_params(),
        num_rows=patches,
        remat="none",
        compute_bytes=c,
        is_cast=is_cast,
        returns_gradient=False,
    )
    pixels = patches * (vision.patch_dim * way.pixel_bytes + 8)
    stem = replace(stem, stash_bytes=pixels, leaf_bytes=pixels)
    names = ("vision.patches", *(("vision.pre_norm",) if vision.pre_norm else ()))
    yield Placed("patches", names, way.spread(stem, parts), vision.param_dtype, is_encoder=True)
    widths = _encoder_widths(vision, way)
    layer = transformer_layer(
        widths,
        sizes.encoder.layer(way.rows.patches, way.rows.patch_pairs),
        num_params=way.part(vision.num_layer_params()),
        num_tokens=patches,
        length=way.rows.patch_length,
        remat=way.remat,
        compute_bytes=c,
        is_fused=way.is_fused(
            vision.compute_dtype,
            way.rows.patch_length,
            widths,
            head_dim=vision.hidden // vision.num_heads,
            is_packed=vision.is_packed,
        ),
        is_cast=is_cast,
    )
    layer = way.spread(replace(layer, sums=(2, 2), sum_bytes=patches * vision.hidden * c), parts)
    for number in range(vision.num_layers_run):
        yield Placed("vision", (f"vision.layers.{number}",), layer, vision.param_dtype, is_encoder=True)
    features, decoder = patches // projector.patches_per_feature, model.decoder
    dims = sizes.projector.in_dim, sizes.projector.inner_dim, sizes.projector.out_dim
    last = dense_layer(
        dims,
        sizes.projector.whole(way.rows.patches // projector.patches_per_feature),
        num_params=projector.num_params(vision.hidden, decoder.hidden) + vision.final_norm * vision.num_norm_params,
        num_rows=features,
        remat=way.remat,
        compute_bytes=FLOAT_BYTES[decoder.compute_dtype],
        is_cast=decoder.compute_dtype != decoder.param_dtype,
    )
    if vision.final_norm and way.remat == "none":
        last = replace(last, stash_bytes=last.stash_bytes + patches * vision.hidden * 3 * FLOAT32)
    yield Placed("projector", ("projector",), way.spread(last, parts), decoder.param_dtype, is_encoder=True)


def _encoder_widths(vision: VisionConfig, way: StageRun) -> Widths:
    part = way.tensor if vision.num_heads % way.tensor == 0 else 1
    return Widths(
        hidden=vision.hidden,
        query=vision.hidden // part,
        key=vision.hidden // part,
        mlp=vision.mlp_dim // way.tensor,
        num_heads=vision.num_heads // part,
        is_gated=vision.gated_mlp,
        normed_heads=2 * vision.hidden * vision.qk_norm,
        mlp_kept=(6 if vision.activation == "gelu_tanh" else 4) + 2 * vision.gated_mlp,
        biased=(1 + vision.gated_mlp) * (vision.mlp_dim // way.tensor)
        + 2 * vision.hidden
        + 3 * vision.hidden // part * vision.qkv_bias,
    )
