"""How the layers of a model are cut over the devices that share a stage, as in Megatron (Shoeybi et al. 2019).

Each device holds some attention heads, some columns of the MLP and some words of the vocabulary. Queries, keys, values,
gate, up and ``fc1`` are cut by columns, and their biases with them; attention output, down and ``fc2`` by rows, so that
attention and MLP need one sum over the devices each. Norms, the biases of what is summed, patches and positions are
whole.

What does not divide: key and value heads, or a vocabulary, that the number of devices does not divide are held whole,
and their part of the work is done on every device; so is the attention of an encoder with an odd number of heads, such
as InternViT-6B's 25, and an odd projector. Query heads of the decoder and MLP columns must divide; otherwise nearly all
of the work would be repeated.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.encoder_config import EncoderConfig
from rrfp_jax.models.vision_language_config import Modality, VisionLanguageConfig

COLUMNS, ROWS, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None), PartitionSpec()
BIAS = PartitionSpec("tensor")
"""Of a product that is cut by columns."""

Cut = dict[tuple[str, ...], PartitionSpec]
"""Where the parameters of a layer lie, by their path in it; those not named are whole."""


def partition(config: LanguageModelConfig, params: Any, num_shards: int) -> Any:
    """A ``PartitionSpec`` for every parameter of a chunk, ``params`` being their shapes by layer name.

    Raises ValueError where query heads or the MLP do not divide by ``num_shards``.
    """
    check_divides(config, num_shards)
    return _placed(_decoder_cut(config, num_shards), params)


def partition_vision_language(config: VisionLanguageConfig, params: Any, num_shards: int) -> Any:
    """The same for a chunk of a model with encoders."""
    check_divides(config.decoder, num_shards)
    cuts = {"decoder": _decoder_cut(config.decoder, num_shards)}
    for modality in config.modalities:
        check_encoder_divides(modality, num_shards)
        cuts[modality.name] = _encoder_cut(modality.encoder, num_shards)
        inner = modality.projector.mlp_dim or config.decoder.hidden
        cuts[modality.projector_name] = {} if inner % num_shards else _product_pair("linear_1", "linear_2")
    return {name: _placed(cuts[name.partition(".")[0]], {name: layer})[name] for name, layer in params.items()}


def check_divides(config: LanguageModelConfig, num_shards: int) -> None:
    """Raise ValueError unless ``num_shards`` devices can share the model's layers."""
    for name in ("num_heads", "mlp_dim"):
        _check_size(name, getattr(config, name), num_shards)


def check_encoder_divides(modality: Modality, num_shards: int) -> None:
    """Raise ValueError unless ``num_shards`` devices can share the encoder's layers."""
    _check_size(f"{modality.name}.mlp_dim", modality.encoder.mlp_dim, num_shards)


def _check_size(name: str, size: int, num_shards: int) -> None:
    if size % num_shards:
        raise ValueError(
            f"{name} {size} does not divide over tensor {num_shards}: give a tensor degree that divides {size}, "
            f"or {name} {size + -size % num_shards}"
        )


def _decoder_cut(config: LanguageModelConfig, num_shards: int) -> Cut:
    divides = config.num_key_value_heads % num_shards == 0
    by_words = config.vocab_size % num_shards == 0
    return {
        **_by_columns("attention", "query"),
        **(_by_columns("attention", "key") | _by_columns("attention", "value") if divides else {}),
        ("attention", "output", "kernel"): ROWS,
        ("mlp", "gate", "kernel"): COLUMNS,
        ("mlp", "up", "kernel"): COLUMNS,
        ("mlp", "down", "kernel"): ROWS,
        ("table",): ROWS if by_words else WHOLE,  # of the embedding, [vocab_size, hidden]
        ("kernel",): COLUMNS if by_words else WHOLE,  # of the head, [hidden, vocab_size]
    }


def _encoder_cut(config: EncoderConfig, num_shards: int) -> Cut:
    cut = _product_pair("mlp.fc1", "mlp.fc2")
    if config.num_heads % num_shards == 0:
        for name in ("query", "key", "value"):
            cut |= _by_columns("attention", name)
        cut["attention", "output", "kernel"] = ROWS
    return cut


def _product_pair(first: str, second: str) -> Cut:
    """Two products with what stands between them cut: one sum over the devices, behind the second."""
    return _by_columns(*first.split(".")) | {(*second.split("."), "kernel"): ROWS}


def _by_columns(*path: str) -> Cut:
    return {(*path, "kernel"): COLUMNS, (*path, "bias"): BIAS}


def _placed(cut: Cut, params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: cut.get(tuple(key.key for key in path[1:]), WHOLE), params)
