"""How the parameters of a layer are cut over the devices that share a stage, as in Megatron (Shoeybi et al. 2019).

Each device holds some attention heads, some columns of the MLP and some words of the vocabulary. Queries, keys, values,
gate, up and ``fc1`` are cut by columns, and their biases with them; attention output, down and ``fc2`` by rows, so that
attention and MLP need one sum over the devices each. Of latent attention the narrow vectors are whole. Norms, the
biases of what is summed, patches and positions are whole.

Experts are dealt out over ``expert``, and cut inside over ``tensor`` as the MLP is; the router is whole, and a shared
expert is cut over ``tensor`` alone.

Sizes that do not divide: key and value heads, or a vocabulary, that the number of devices does not divide are held
whole, and their part of the work is done on every device; so is the attention of an encoder with an odd number of
heads, such as InternViT-6B's 25, and an odd projector. Query heads of the decoder, MLP columns and experts must divide;
otherwise nearly all of the work would be repeated.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rrfp_jax.layout import EXPERT, TENSOR
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.cuts import check_divides, check_size
from rrfp_jax.models.vision_config import EncoderConfig, VisionLanguageConfig

COLUMNS, ROWS, WHOLE = PartitionSpec(None, TENSOR), PartitionSpec(TENSOR, None), PartitionSpec()
BIAS = PartitionSpec(TENSOR)
"""Cut of the bias of a product that is cut by columns."""

_LayerCut = dict[tuple[str, ...], PartitionSpec]
"""Cuts of the parameters of a layer, by their path in it; those not named are whole."""


def decoder_partition(config: LanguageModelConfig, params: Any, axes: Mapping[str, int]) -> Any:
    """Returns a ``PartitionSpec`` for every parameter of a chunk; ``params`` are their shapes by layer name.

    Raises ValueError if query heads or an MLP do not divide over ``tensor``, or experts over ``expert``.
    """
    return _specs(_decoder_cut(config, axes), params)


def vision_language_partition(config: VisionLanguageConfig, params: Any, axes: Mapping[str, int]) -> Any:
    """Returns the specs of :func:`decoder_partition` for a chunk of a model with encoders."""
    num_shards = axes.get(TENSOR, 1)
    cuts = {"decoder": _decoder_cut(config.decoder, axes)}
    for modality in config.modalities if num_shards > 1 else ():
        check_size(f"{modality.name}.mlp_dim", modality.encoder.mlp_dim, num_shards)
        cuts[modality.name] = _encoder_cut(modality.encoder, num_shards)
        inner = modality.projector.mlp_dim or config.decoder.hidden
        cuts[modality.projector_name] = {} if inner % num_shards else _product_pair("linear_1", "linear_2")
    return {name: _specs(cuts.get(name.partition(".")[0], {}), {name: layer})[name] for name, layer in params.items()}


def _decoder_cut(config: LanguageModelConfig, axes: Mapping[str, int]) -> _LayerCut:
    num_shards, num_expert_shards = axes.get(TENSOR, 1), axes.get(EXPERT, 1)
    check_divides(config, num_shards, num_expert_shards)
    cut: _LayerCut = {}
    if num_shards > 1:
        cut |= _by_columns("attention", "query")
        cut |= _by_columns("attention", "query_up") | _by_columns("attention", "kv_up")
        if config.num_key_value_heads % num_shards == 0:
            cut |= _by_columns("attention", "key") | _by_columns("attention", "value")
        by_words = config.vocab_size % num_shards == 0
        cut |= {
            ("attention", "output", "kernel"): ROWS,
            ("attention", "sinks"): BIAS,
            ("mlp", "gate", "kernel"): COLUMNS,
            ("mlp", "up", "kernel"): COLUMNS,
            ("mlp", "down", "kernel"): ROWS,
            ("table",): ROWS if by_words else WHOLE,  # of the embedding, [vocab_size, hidden]
            ("kernel",): COLUMNS if by_words else WHOLE,  # of the head, [hidden, vocab_size]
        }
    if config.experts is None:
        return cut
    first, inner = EXPERT if num_expert_shards > 1 else None, TENSOR if num_shards > 1 else None
    cut |= {
        ("mlp", "experts", "gate"): PartitionSpec(first, None, inner),
        ("mlp", "experts", "up"): PartitionSpec(first, None, inner),
        ("mlp", "experts", "down"): PartitionSpec(first, inner, None),
        ("mlp", "experts", "gate_bias"): PartitionSpec(first, inner),
        ("mlp", "experts", "up_bias"): PartitionSpec(first, inner),
        ("mlp", "experts", "down_bias"): PartitionSpec(first, None),
    }
    if num_shards > 1:
        # a shared expert computes all tokens, so the axis of experts cannot share it
        cut |= _by_columns("mlp", "shared", "gate") | _by_columns("mlp", "shared", "up")
        cut["mlp", "shared", "down", "kernel"] = ROWS
    return cut


def _encoder_cut(config: EncoderConfig, num_shards: int) -> _LayerCut:
    cut = _product_pair("mlp.fc1", "mlp.fc2") | _product_pair("mlp.gate", "mlp.down") | _by_columns("mlp", "up")
    # a head that lies on two devices would need a sum within attention
    if config.num_heads % num_shards == 0:
        for name in ("query", "key", "value"):
            cut |= _by_columns("attention", name)
        cut["attention", "output", "kernel"] = ROWS
    return cut


def _product_pair(first: str, second: str) -> _LayerCut:
    """Returns the cut of two products that needs one sum over the devices, behind the second."""
    return _by_columns(*first.split(".")) | {(*second.split("."), "kernel"): ROWS}


def _by_columns(*path: str) -> _LayerCut:
    return {(*path, "kernel"): COLUMNS, (*path, "bias"): BIAS}


def _specs(cut: _LayerCut, params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: cut.get(tuple(key.key for key in path[1:]), WHOLE), params)
