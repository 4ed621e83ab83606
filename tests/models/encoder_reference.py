"""Independent encoders, projector and merge in NumPy float64, and small models that have them."""

import math
from typing import Any

import jax
import numpy as np

from rrfp_jax.models import AudioConfig, ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.models.vision_config import EncoderConfig
from rrfp_jax.programs.chunk import Params
from tests.models.reference import reference_logits, small_config, to_float64

_SIZES: dict[str, Any] = {"hidden": 16, "num_layers": 3, "num_heads": 4, "mlp_dim": 20, "init_std": 0.3}
CLIP = VisionConfig(
    **_SIZES, patch_dim=12, num_patches=9, class_token=True, patch_bias=False, pre_norm=True,
    activation="quick_gelu", final_norm=False, feature_layer=-2,
)  # fmt: skip
SIGLIP = VisionConfig(**_SIZES, patch_dim=12, num_patches=9, activation="gelu_tanh")
INTERN = VisionConfig(
    **_SIZES, patch_dim=12, num_patches=16, class_token=True, qkv_bias=False, qk_norm=True, layer_scale=0.1,
    norm="rms_norm", final_norm=False,
)  # fmt: skip
PACKED = VisionConfig(**_SIZES, patch_dim=12, max_rows=4, max_columns=4)
AUDIO = AudioConfig(**_SIZES, bins=5, frames_per_position=2, is_packed=True, norm="rms_norm")

PROJECTORS = {
    CLIP: ProjectorConfig(),
    SIGLIP: ProjectorConfig(activation="gelu_tanh"),
    INTERN: ProjectorConfig(patches_per_feature=4, row_order=True, norm=True),
    PACKED: ProjectorConfig(patches_per_feature=4, mlp_dim=18),
}
TOWERS = {"clip": CLIP, "siglip": SIGLIP, "intern": INTERN, "packed": PACKED}


def small_model(vision: VisionConfig, audio: AudioConfig | None = None, **decoder: Any) -> VisionLanguageConfig:
    """A small model with one of the towers above."""
    values = {"num_layers": 2} | decoder
    return VisionLanguageConfig(
        vision=vision, projector=PROJECTORS[vision], decoder=small_config(**values), audio=audio,
        audio_projector=ProjectorConfig(patches_per_feature=2),
    )  # fmt: skip


def make_leaves(config: VisionLanguageConfig, seed: int = 0) -> dict[str, Any]:
    """One microbatch of two packed rows: three features in the first, one in the second, and two of sounds."""
    rng = np.random.default_rng(seed)
    shape = (2, 10)
    leaves: dict[str, Any] = {
        name: rng.integers(config.decoder.vocab_size, size=shape, dtype=np.int32) for name in ("tokens", "targets")
    }
    leaves["weights"] = rng.integers(3, size=shape).astype(np.float32)
    leaves["segments"] = np.array([[1] * 6 + [2] * 4, [1] * 7 + [0] * 3], np.int32)
    leaves["positions"] = np.array([[*range(6), *range(4)], [*range(7), *range(3)]], np.int32)
    leaves["image_index"] = np.full(shape, -1, np.int32)
    leaves["image_index"][0, 1:4], leaves["image_index"][1, 2] = [0, 1, 3], 4
    vision = config.vision
    leaves["patches"] = rng.normal(size=(2, vision.num_patches or 12, vision.patch_dim)).astype(np.float32)
    if vision.is_packed:
        leaves["patch_segments"] = np.array([[1] * 8 + [2] * 4, [1] * 8 + [0] * 4], np.int32)
        leaves["patch_rows"] = rng.integers(4, size=(2, 12), dtype=np.int32)
        leaves["patch_columns"] = rng.integers(4, size=(2, 12), dtype=np.int32)
    if config.audio is not None:
        leaves["frames"] = rng.normal(size=(1, 12, config.audio.bins)).astype(np.float32)
        leaves["frame_segments"] = np.array([[3] * 4 + [1] * 8], np.int32)
        leaves["audio_index"] = np.full(shape, -1, np.int32)
        leaves["audio_index"][0, 7], leaves["audio_index"][1, 0] = 2, 0
    return leaves


def reference_model(config: VisionLanguageConfig, params: Params, leaves: dict[str, Any]) -> np.ndarray:
    """Logits ``[batch, length, vocab_size]`` of a model with its parameters by layer name."""
    params = to_float64(params)
    decoder = {name.removeprefix("decoder."): layer for name, layer in params.items()}
    x = decoder["embedding"]["table"][leaves["tokens"]]
    for modality in config.modalities:
        if modality.data_leaf not in leaves:
            continue
        features = reference_projector(
            modality.projector, params[modality.projector_name], reference_encoder(modality.encoder, params, leaves)
        ).reshape(-1, config.decoder.hidden)
        for at in np.argwhere(leaves[modality.index_leaf] >= 0):
            x[tuple(at)] = features[leaves[modality.index_leaf][tuple(at)]]
    return reference_logits(config.decoder, decoder, x, leaves)


def reference_encoder(config: EncoderConfig, params: Params, leaves: dict[str, Any]) -> np.ndarray:
    """Features ``[rows, positions, hidden]`` before the projector."""
    if isinstance(config, VisionConfig):
        name, x, segments = "vision", _patches(config, params["vision.patches"], leaves), leaves.get("patch_segments")
        if config.pre_norm:
            x = _norm(config, params["vision.pre_norm"], x)
    else:
        name, x, segments = "audio", _frames(config, params["audio.frames"], leaves), leaves["frame_segments"][:, ::2]
    for layer in range(config.num_layers_run):
        weights = params[f"{name}.layers.{layer}"]
        mixed = _attention(config, weights["attention"], _norm(config, weights["attention_norm"], x), segments)
        x = x + mixed * weights.get("attention_scale", 1)
        inner = _linear(weights["mlp"]["fc1"], _norm(config, weights["mlp_norm"], x))
        x = x + _linear(weights["mlp"]["fc2"], reference_activation(config.activation, inner)) * weights.get(
            "mlp_scale", 1
        )
    if config.final_norm:
        x = _norm(config, params[f"{name}.norm"], x)
    return x[:, 1:] if getattr(config, "class_token", False) else x


def reference_projector(config: ProjectorConfig, weights: Any, x: np.ndarray) -> np.ndarray:
    if config.row_order:
        rows, side = math.isqrt(x.shape[1]), config.side
        squares = range(0, rows, side)
        order = [(r + i) * rows + c + j for r in squares for c in squares for i in range(side) for j in range(side)]
        x = x[:, order]
    x = x.reshape(len(x), -1, config.patches_per_feature * x.shape[-1])
    if config.norm:
        x = _layer_norm(x, config.norm_eps) * weights["norm"]["scale"] + weights["norm"]["bias"]
    return _linear(weights["linear_2"], reference_activation(config.activation, _linear(weights["linear_1"], x)))


def reference_activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    if name == "gelu_tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def _patches(config: VisionConfig, weights: Any, leaves: dict[str, Any]) -> np.ndarray:
    x = _linear(weights["projection"], leaves["patches"].astype(np.float64))
    if config.is_packed:
        at = weights["row_positions"][leaves["patch_rows"]]
        return x + at + weights["column_positions"][leaves["patch_columns"]]
    if config.class_token:
        x = np.stack([np.vstack([weights["class_token"], row]) for row in x])
    return x + weights["positions"]


def _frames(config: AudioConfig, weights: Any, leaves: dict[str, Any]) -> np.ndarray:
    frames = leaves["frames"]
    pairs = np.stack([np.concatenate([row[::2], row[1::2]], axis=-1) for row in frames])
    x, half = _linear(weights["projection"], pairs.astype(np.float64)), config.hidden // 2
    for row, ids in zip(x, leaves["frame_segments"][:, ::2], strict=True):
        for i in range(len(row)):
            position = int((ids[:i] == ids[i]).sum())
            angles = position * 10_000.0 ** (-np.arange(half) / (half - 1))
            row[i] += np.concatenate([np.sin(angles), np.cos(angles)])
    return x


def _attention(config: EncoderConfig, weights: Any, x: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    rows, length, hidden = x.shape
    parts = {name: _linear(weights[name], x) for name in ("query", "key", "value")}
    if config.qk_norm:
        for name in ("query", "key"):
            parts[name] = _rms_norm(parts[name], config.norm_eps) * weights[f"{name}_norm"]["scale"]
    dim, mixed = hidden // config.num_heads, np.zeros_like(x)
    for row, head, i in np.ndindex(rows, config.num_heads, length):
        cut = slice(head * dim, (head + 1) * dim)
        seen = [j for j in range(length) if segments is None or segments[row, i] == segments[row, j]]
        probs = np.exp(parts["key"][row, seen, cut] @ parts["query"][row, i, cut] / np.sqrt(dim))
        mixed[row, i, cut] = probs / probs.sum() @ parts["value"][row, seen, cut]
    return _linear(weights["output"], mixed)


def _linear(weights: Any, x: np.ndarray) -> np.ndarray:
    return x @ weights["kernel"] + weights.get("bias", 0)


def _norm(config: EncoderConfig, weights: Any, x: np.ndarray) -> np.ndarray:
    if config.norm == "rms_norm":
        return _rms_norm(x, config.norm_eps) * weights["scale"]
    return _layer_norm(x, config.norm_eps) * weights["scale"] + weights["bias"]


def _layer_norm(x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def _rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def uneven(params: Params, seed: int = 0) -> Params:
    """Parameters away from their initial values, so that biases and scales count."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    moved = [np.asarray(leaf) + 0.1 * rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, moved)
