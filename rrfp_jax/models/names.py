"""Names of the layers, and the random key that a name stands for.

A layer's name is global: it says nothing of the chunk or stage that holds the layer. Parameters, checkpoints and
initial values go by it, so none of them depends on the cut.
"""

import zlib

import jax

EMBEDDING = "embedding"
"""The token embedding; with tied embeddings also the copy in the head's chunk."""
FINAL_NORM = "final_norm"
"""The RMSNorm before the head; always in the head's chunk."""
HEAD = "head"
"""The output matrix; absent with tied embeddings."""


def layer_name(layer: int) -> str:
    """The name of decoder layer ``layer``, counted from 0 over the whole model: ``layers.<layer>``."""
    return f"layers.{layer}"


def layer_key(key: jax.Array, name: str) -> jax.Array:
    """The typed key of the layer called ``name``.

    CRC-32 is used because it is the same in every process and Python version, which ``hash(str)`` is not.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
