"""An independent decoder in NumPy float64, and helpers that run a list of chunks as a whole model."""

from typing import Any

import jax
import numpy as np

from rrfp_jax.models import LanguageModelConfig, RopeScaling, language_model
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
    params = to_float64(params)
    logits = reference_logits(config, params, params["embedding"]["table"][leaves["tokens"]], leaves)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probs, leaves["targets"][..., None], axis=-1)[..., 0]
    return float(-(picked * leaves["weights"]).sum()), float(leaves["weights"].sum())


def reference_logits(config: LanguageModelConfig, params: Params, x: np.ndarray, leaves: dict[str, Any]) -> np.ndarray:
    """Logits of the vectors ``x`` ``[batch, length, hidden]``; rows are packed if ``leaves`` have ``segments``."""
    at = {name: leaves[name] for name in ("positions", "segments") if name in leaves}
    variant = config.layer_variant
    if variant.scaled_embedding:
        x = x * config.hidden**0.5
    for layer in range(config.num_layers):
        weights = params[f"layers.{layer}"]
        for part in ("attention", "mlp"):
            result = _norm(config, x, weights[f"{part}_norm"]["scale"])
            if part == "attention":
                result = reference_attention(config, weights["attention"], result, **at, layer=layer)
            else:
                result = _mlp(config, weights["mlp"], result)
            x = x + (_norm(config, result, weights[f"{part}_post_norm"]["scale"]) if variant.post_norms else result)
    head = params["embedding"]["table"].T if config.tie_embeddings else params["head"]["kernel"]
    return _norm(config, x, params["final_norm"]["scale"]) @ head


def to_float64(params: Params) -> Params:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def reference_attention(
    config: LanguageModelConfig,
    weights: dict[str, Any],
    x: np.ndarray,
    positions: np.ndarray | None = None,
    segments: np.ndarray | None = None,
    layer: int = 0,
) -> np.ndarray:
    """Causal grouped-query attention of ``x`` ``[batch, length, hidden]``, head by head and token by token."""
    batch, length, _ = x.shape
    dim, weights = config.size_per_head, to_float64(weights)
    positions = np.broadcast_to(np.arange(length), (batch, length)) if positions is None else positions
    segments = np.zeros((batch, length)) if segments is None else segments
    is_global = config.is_global(layer)
    window = length if is_global else config.sliding_window or length
    theta, scaling = config.rope_theta, config.rope_scaling
    if is_global and config.global_layers.rope_theta:
        theta, scaling = config.global_layers.rope_theta, config.global_layers.rope_scaling
    heads = {}
    for name in ("query", "key", "value"):
        heads[name] = (x @ weights[name]["kernel"] + weights[name].get("bias", 0)).reshape(batch, length, -1, dim)
        if config.qk_norm and name != "value":
            heads[name] = _norm(config, heads[name], weights[f"{name}_norm"]["scale"])
        for b, t, head in np.ndindex(heads[name].shape[:3] if name != "value" else (0, 0, 0)):
            turned = heads[name][b, t, head, : config.rotary_dim]  # a view, whose neighbours become pairs of halves
            order = np.arange(config.rotary_dim)
            if config.layer_variant.interleaved:
                order = np.concatenate([order[::2], order[1::2]])
            turned[order] = reference_rotate(turned[order], positions[b, t], theta, scaling)
    mixed = np.zeros_like(heads["query"])
    for b, head, t in np.ndindex(batch, config.num_heads, length):
        group = head // (config.num_heads // config.num_key_value_heads)
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and t - s < window]
        scores = heads["key"][b, seen, group] @ heads["query"][b, t, head]
        probs = np.exp(scores / np.sqrt(config.layer_variant.query_scalar or dim))
        total = probs.sum() + (np.exp(weights["sinks"][head]) if "sinks" in weights else 0)
        mixed[b, t, head] = (probs / total) @ heads["value"][b, seen, group]
    return mixed.reshape(batch, length, -1) @ weights["output"]["kernel"] + weights["output"].get("bias", 0)


def reference_rotate(vector: np.ndarray, position: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """The rotary embedding as a product of complex numbers."""
    half = len(vector) // 2
    angles = [_stretched(theta ** (-i / half), i, half, theta, scaling) for i in range(half)]
    factor = 1 if scaling is None or scaling.kind != "yarn" else scaling.attention_factor
    product = factor * (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * np.array(angles))
    return np.concatenate([product.real, product.imag])


def _stretched(turn: float, number: int, half: int, theta: float, scaling: RopeScaling | None) -> float:
    """Radians per token of one wave, in the cases of the published definitions."""
    if scaling is None:
        return turn
    if scaling.kind == "linear":
        return turn / scaling.factor
    if scaling.kind == "yarn":
        return _stretched_by_yarn(turn, number, half, theta, scaling)
    wavelength = 2 * np.pi / turn
    if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
        return turn
    if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
        return turn / scaling.factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * turn / scaling.factor + smooth * turn


def _stretched_by_yarn(turn: float, number: int, half: int, theta: float, scaling: RopeScaling) -> float:
    """Where a wave of so many turns would stand among all waves decides, rounded outwards."""
    first, last = (
        np.log(scaling.original_max_positions / (2 * np.pi * turns)) / np.log(theta) * half
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    first, last = max(np.floor(first), 0), min(np.ceil(last), 2 * half - 1)
    if number <= first:
        return turn
    if number >= last:
        return turn / scaling.factor
    stretched = (number - first) / (last - first)
    return stretched * turn / scaling.factor + (1 - stretched) * turn


def _norm(config: LanguageModelConfig, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * (config.layer_variant.norm_offset + scale)


def _mlp(config: LanguageModelConfig, weights: dict[str, Any], x: np.ndarray) -> np.ndarray:
    gate = x @ weights["gate"]["kernel"]
    if config.layer_variant.activation == "gelu_tanh":
        gate = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    else:
        gate = gate / (1 + np.exp(-gate))
    return (gate * (x @ weights["up"]["kernel"])) @ weights["down"]["kernel"]
