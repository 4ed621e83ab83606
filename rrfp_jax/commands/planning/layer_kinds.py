"""The layers of decoders and encoders, with their names and what each computes and holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from rrfp_jax.commands.planning.microbatches import Rows
from rrfp_jax.commands.studies.model_pairs import decoder_sizes, sizes_of
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.encoder_config import VisionConfig
from rrfp_jax.models.vision_language_config import VisionLanguageConfig
from rrfp_jax.planning.layer_sizes import (
    LayerSizes,
    Widths,
    dense_layer,
    embedding_layer,
    head_layer,
    transformer_layer,
)

BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number, by the name of its dtype."""
FLOAT32 = BYTES["float32"]
_FUSED_HEAD_DIM = 128
"""Of the widest heads whose attention cuDNN fuses."""


class Placed(NamedTuple):
    """A layer in its place."""

    kind: str
    names: tuple[str, ...]
    """Of what it is made, as configurations freeze it."""
    sizes: LayerSizes
    param_dtype: str


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a stage runs its layers."""

    rows: Rows
    tensor: int = 1
    """Devices that share every layer."""
    remat: str = "none"
    is_cuda: bool = True
    """Whether they are NVIDIA GPUs, which fuse attention."""

    def part(self, size: int) -> int:
        """Of each device: an equal part, or all where it does not divide."""
        return size if size % self.tensor else size // self.tensor

    def is_fused(self, compute_dtype: str, head_dim: int) -> bool:
        """Whether scores stay inside a kernel, as in :func:`rrfp_jax.models.attention.implementation`."""
        fits = compute_dtype == "bfloat16" and head_dim <= _FUSED_HEAD_DIM and not head_dim % 8
        return self.is_cuda and fits


def decoder_layers(model: LanguageModelConfig, way: Way, *, packed: bool, prefix: str = "") -> Iterator[Placed]:
    """``embedding``, so many times ``layer``, and ``head`` with the final norm.

    Where some layers have experts and others have none, those that have are of kind ``sparse``.
    """
    sizes, c = decoder_sizes(model), BYTES[model.compute_dtype]
    tokens, is_cast = way.rows.tokens, model.compute_dtype != model.param_dtype
    words, stream = way.part(model.vocab_size), tokens * model.hidden * c
    embedding = embedding_layer(
        model.hidden,
        num_params=words * model.hidden,
        num_tokens=tokens,
        compute_bytes=c,
        param_bytes=BYTES[model.param_dtype],
    )
    embedding = replace(embedding, sums=(1, 0), sum_bytes=stream, returns_gradient=bool(prefix))
    yield Placed("embedding", (f"{prefix}embedding",), embedding, model.param_dtype)
    kinds = {is_sparse: _decoder_layer(model, way, is_sparse, packed=packed) for is_sparse in (False, True)}
    is_mixed = 0 < model.num_sparse_layers < model.num_layers
    for number in range(model.num_layers):
        is_sparse = model.is_sparse(number)
        kind = "sparse" if is_sparse and is_mixed else "layer"
        yield Placed(kind, (f"{prefix}layers.{number}",), kinds[is_sparse], model.param_dtype)
    head = head_layer(
        model.hidden,
        words,
        sizes.head(tokens),
        num_params=words * model.hidden + model.hidden,
        num_tokens=tokens,
        remat=way.remat,
        compute_bytes=c,
        is_cast=is_cast,
    )
    names = (f"{prefix}final_norm", f"{prefix}{'embedding' if model.tie_embeddings else 'head'}")
    yield Placed("head", names, replace(head, sums=(1, 1), sum_bytes=stream), model.param_dtype)


def _decoder_layer(model: LanguageModelConfig, way: Way, is_sparse: bool, *, packed: bool) -> LayerSizes:
    """Of the experts what a device computes, which is more than what tokens choose: see `rrfp_jax.models.experts`."""
    tokens, c = way.rows.tokens, BYTES[model.compute_dtype]
    sizes = replace(decoder_sizes(model), expert_dims=_expert_dims(model, way)) if is_sparse else decoder_sizes(model)
    layer = transformer_layer(
        _decoder_widths(model, way, is_sparse),
        sizes.layer(tokens, way.rows.pairs, is_sparse=is_sparse),
        num_params=_layer_params(model, way, is_sparse),
        num_tokens=tokens,
        length=way.rows.length,
        remat=way.remat,
        compute_bytes=c,
        is_fused=way.is_fused(model.compute_dtype, model.size_per_head),
        is_cast=model.compute_dtype != model.param_dtype,
    )
    of_rows = (8 if way.remat != "none" else model.size_per_head * FLOAT32) if packed else 0
    stash = layer.stash_bytes + tokens * of_rows  # positions and segments, or what is made of them
    return replace(layer, stash_bytes=stash, sums=(2, 2), sum_bytes=tokens * model.hidden * c)


def _expert_dims(model: LanguageModelConfig, way: Way) -> int:
    """Inner widths that are computed for each token."""
    experts = model.experts
    if experts is None:
        return 0
    if experts.capacity_factor is not None:
        number = min(float(experts.num_experts), experts.capacity_factor * experts.experts_per_token)
    else:
        number = experts.num_experts if way.is_cuda else experts.experts_per_token
    return round(number * model.expert_dim) + (experts.shared_mlp_dim or 0)


def _decoder_widths(model: LanguageModelConfig, way: Way, is_sparse: bool) -> Widths:
    query = model.num_heads // way.tensor * model.size_per_head
    key = way.part(model.num_key_value_heads) * model.size_per_head
    return Widths(
        hidden=model.hidden,
        query=query,
        key=key,
        mlp=(_expert_dims(model, way) if is_sparse else model.mlp_dim) // way.tensor,
        num_heads=model.num_heads // way.tensor,
        normed_heads=(query + key) * model.qk_norm,
        num_normed=(query + key) // model.size_per_head * model.qk_norm,
    )


def _layer_params(model: LanguageModelConfig, way: Way, is_sparse: bool) -> int:
    """Of each device."""
    widths, mlp, experts = _decoder_widths(model, way, is_sparse), 3 * (model.mlp_dim // way.tensor), model.experts
    if is_sparse and experts is not None:
        inner = experts.num_experts * model.expert_dim + (experts.shared_mlp_dim or 0)
        mlp = 3 * (inner // way.tensor) + experts.num_experts + experts.shared_gate
    matrices = model.hidden * (2 * widths.query + 2 * widths.key + mlp)
    vectors = (widths.query + 2 * widths.key) * model.qkv_bias + 2 * model.size_per_head * model.qk_norm
    return matrices + vectors + 2 * model.hidden


def encoder_layers(model: VisionLanguageConfig, way: Way) -> Iterator[Placed]:
    """``patches``, so many times ``vision``, and ``projector``, with a final norm before it if there is one."""
    vision, projector, sizes = model.vision, model.projector, sizes_of(model)
    c, is_cast, patches = BYTES[vision.compute_dtype], vision.compute_dtype != vision.param_dtype, way.rows.patches
    stem = dense_layer(
        (vision.patch_dim, vision.hidden),
        sizes.encoder.patches(patches),
        num_params=vision.num_params() - vision.num_layers_params(),
        num_rows=patches,
        remat="none",
        compute_bytes=c,
        is_cast=is_cast,
        returns_gradient=False,
    )
    stem = replace(stem, stash_bytes=patches * (vision.patch_dim * FLOAT32 + 8))  # pictures come in float32
    names = ("vision.patches", *(("vision.pre_norm",) if vision.pre_norm else ()))
    yield Placed("patches", names, stem, vision.param_dtype)
    layer = transformer_layer(
        _encoder_widths(vision, way),
        sizes.encoder.layer(patches, way.rows.patch_pairs),
        num_params=way.part(vision.num_layer_params()),
        num_tokens=patches,
        length=way.rows.patch_length,
        remat=way.remat,
        compute_bytes=c,
        is_fused=way.is_fused(vision.compute_dtype, vision.hidden // vision.num_heads),
        is_cast=is_cast,
    )
    layer = replace(layer, sums=(2, 2), sum_bytes=patches * vision.hidden * c)
    for number in range(vision.num_layers_run):
        yield Placed("vision", (f"vision.layers.{number}",), layer, vision.param_dtype)
    features, decoder = patches // projector.patches_per_feature, model.decoder
    widths = sizes.projector.in_dim, sizes.projector.inner_dim, sizes.projector.out_dim
    last = dense_layer(
        widths,
        sizes.projector.whole(features),
        num_params=projector.num_params(vision.hidden, decoder.hidden) + vision.final_norm * vision.num_norm_params,
        num_rows=features,
        remat=way.remat,
        compute_bytes=BYTES[decoder.compute_dtype],
        is_cast=decoder.compute_dtype != decoder.param_dtype,
    )
    if vision.final_norm and way.remat == "none":
        last = replace(last, stash_bytes=last.stash_bytes + patches * vision.hidden * 3 * FLOAT32)
    yield Placed("projector", ("projector",), last, decoder.param_dtype)


def _encoder_widths(vision: VisionConfig, way: Way) -> Widths:
    part = way.tensor if vision.num_heads % way.tensor == 0 else 1
    return Widths(
        hidden=vision.hidden,
        query=vision.hidden // part,
        key=vision.hidden // part,
        mlp=vision.mlp_dim // way.tensor,
        num_heads=vision.num_heads // part,
        is_gated=False,
        normed_heads=2 * vision.hidden * vision.qk_norm,
        num_normed=2 * vision.qk_norm,
        mlp_kept=6 if vision.activation == "gelu_tanh" else 4,
    )
