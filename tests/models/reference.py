"""An independent decoder in NumPy float64, and helpers that run a list of chunks as a whole model."""

from typing import Any

import jax
import numpy as np

from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.programs.chunk import Chunk, Params


def small_config(**changes: Any) -> LanguageModelConfig:
    """Four small layers with grouped queries and heads that are not hidden / num_heads wide."""
    values: dict[str, Any] = {
        "vocab_size": 37,
        "hidden": 24,
        "num_layers": 4,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 40,
        "init_std": 0.2,
    }
    return LanguageModelConfig(**(values | changes))


def make_leaves(config: LanguageModelConfig, *, batch: int = 3, length: int = 11, seed: int = 0) -> dict[str, Any]:
    """One microbatch, with weights that differ from token to token."""
    rng = np.random.default_rng(seed)
    shape = (batch, length)
    return {
        "tokens": rng.integers(config.vocab_size, size=shape, dtype=np.int32),
        "targets": rng.integers(config.vocab_size, size=shape, dtype=np.int32),
        "weights": rng.integers(3, size=shape).astype(np.float32),
    }


def cut(config: LanguageModelConfig, layers_per_chunk: list[int], seed: int = 0) -> tuple[list[Chunk], list[Params]]:
    """The chunks of a cut and their initial parameters."""
    chunks = language_model(config).split(layers_per_chunk=layers_per_chunk)
    return chunks, [chunk.init(jax.random.key(seed)) for chunk in chunks]


def run_chunks(chunks: list[Chunk], params: list[Params], leaves: dict[str, Any]) -> Any:
    """The whole model as the composition of its chunks, each given only the leaves that it declares."""
    outputs = None
    for chunk, chunk_params in zip(chunks, params, strict=True):
        outputs = chunk.apply(chunk_params, outputs, {name: leaves[name] for name in chunk.leaves}, key=None)
    return outputs


def reference_loss(config: LanguageModelConfig, params: Params, leaves: dict[str, Any]) -> tuple[float, float]:
    """Loss sum and weight in NumPy float64, written from the papers, token by token where that is clearest."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embedding"]["table"][leaves["tokens"]]
    for layer in range(config.num_layers):
        weights = params[f"layers.{layer}"]
        x = x + reference_attention(config, weights["attention"], _norm(config, x, weights["attention_norm"]["scale"]))
        x = x + _mlp(weights["mlp"], _norm(config, x, weights["mlp_norm"]["scale"]))
    head = params["embedding"]["table"].T if config.tie_embeddings else params["head"]["kernel"]
    logits = _norm(config, x, params["final_norm"]["scale"]) @ head
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probs, leaves["targets"][..., None], axis=-1)[..., 0]
    return float(-(picked * leaves["weights"]).sum()), float(leaves["weights"].sum())


def reference_attention(config: LanguageModelConfig, weights: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Causal grouped-query attention of ``x`` ``[batch, length, hidden]``, head by head and token by token."""
    batch, length, _ = x.shape
    dim = config.size_per_head
    kernel = {name: np.asarray(weights[name]["kernel"], np.float64) for name in weights}
    query = (x @ kernel["query"]).reshape(batch, length, config.num_heads, dim)
    key = (x @ kernel["key"]).reshape(batch, length, config.num_key_value_heads, dim)
    value = (x @ kernel["value"]).reshape(batch, length, config.num_key_value_heads, dim)
    mixed = np.zeros_like(query)
    for b, head, t in np.ndindex(batch, config.num_heads, length):
        group = head // (config.num_heads // config.num_key_value_heads)
        turned = reference_rotate(query[b, t, head], t, config.rope_theta)
        scores = [turned @ reference_rotate(key[b, s, group], s, config.rope_theta) for s in range(t + 1)]
        probs = np.exp(np.array(scores) / np.sqrt(dim))
        mixed[b, t, head] = (probs / probs.sum()) @ value[b, : t + 1, group]
    return mixed.reshape(batch, length, -1) @ kernel["output"]


def reference_rotate(vector: np.ndarray, position: int, theta: float) -> np.ndarray:
    """The rotary embedding as a product of complex numbers."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def _norm(config: LanguageModelConfig, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale


def _mlp(weights: dict[str, Any], x: np.ndarray) -> np.ndarray:
    gate = x @ weights["gate"]["kernel"]
    return (gate / (1 + np.exp(-gate)) * (x @ weights["up"]["kernel"])) @ weights["down"]["kernel"]
