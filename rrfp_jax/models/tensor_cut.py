"""How the layers of a language model are cut over the devices that share a stage, as in Megatron (Shoeybi et al. 2019).

Each device holds some attention heads, some columns of the MLP and some words of the vocabulary. Queries, keys, values,
gate and up are cut by columns, attention output and down by rows, so that attention and MLP need one sum over the
devices each. Norms are whole.

What does not divide: key and value heads, or a vocabulary, that the number of devices does not divide are held whole,
and their part of the work is done on every device. Query heads and MLP columns must divide; otherwise nearly all of the
work would be repeated.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from rrfp_jax.models.config import LanguageModelConfig

COLUMNS, ROWS, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None), PartitionSpec()


def partition(config: LanguageModelConfig, params: Any, num_shards: int) -> Any:
    """A ``PartitionSpec`` for every parameter of a chunk, ``params`` being their shapes by layer name.

    Raises ValueError where query heads or the MLP do not divide by ``num_shards``.
    """
    check_divides(config, num_shards)
    heads = COLUMNS if config.num_key_value_heads % num_shards == 0 else WHOLE
    by_words = config.vocab_size % num_shards == 0
    cut = {
        ("attention", "query", "kernel"): COLUMNS,
        ("attention", "key", "kernel"): heads,
        ("attention", "value", "kernel"): heads,
        ("attention", "output", "kernel"): ROWS,
        ("mlp", "gate", "kernel"): COLUMNS,
        ("mlp", "up", "kernel"): COLUMNS,
        ("mlp", "down", "kernel"): ROWS,
        ("table",): ROWS if by_words else WHOLE,  # of the embedding, [vocab_size, hidden]
        ("kernel",): COLUMNS if by_words else WHOLE,  # of the head, [hidden, vocab_size]
    }
    return jax.tree.map_with_path(lambda path, _: cut.get(tuple(key.key for key in path[1:]), WHOLE), params)


def check_divides(config: LanguageModelConfig, num_shards: int) -> None:
    """Raise ValueError unless ``num_shards`` devices can share the model's layers."""
    for name in ("num_heads", "mlp_dim"):
        size = getattr(config, name)
        if size % num_shards:
            raise ValueError(
                f"{name} {size} does not divide over tensor {num_shards}: give a tensor degree that divides {size}, "
                f"or {name} {size + -size % num_shards}"
            )
