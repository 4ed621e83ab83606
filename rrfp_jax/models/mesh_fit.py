"""Whether the devices of a stage's mesh can share a model's layers: pure numbers, known before JAX is loaded.

What does not divide is mostly held whole (:mod:`rrfp_jax.models.tensor_cut`); what is refused here would make the
devices repeat nearly all of the work.
"""

from rrfp_jax.layout import EXPERT, TENSOR
from rrfp_jax.models.config import LanguageModelConfig


def check_divides(config: LanguageModelConfig, num_shards: int, num_expert_shards: int = 1) -> None:
    """Raise ValueError unless ``num_shards`` devices can share the model's layers, and so many others its experts."""
    check_size("num_heads", config.num_heads, num_shards)
    if config.num_sparse_layers < config.num_layers:
        check_size("mlp_dim", config.mlp_dim, num_shards)
    if config.experts is not None:
        check_size("mlp_dim" if config.experts.mlp_dim is None else "experts.mlp_dim", config.expert_dim, num_shards)
        check_size("experts.shared_mlp_dim", config.experts.shared_mlp_dim or 0, num_shards)
        check_size("experts.num_experts", config.experts.num_experts, num_expert_shards, EXPERT)


def check_encoder_divides(name: str, mlp_dim: int, num_shards: int) -> None:
    """Raise ValueError unless ``num_shards`` devices can share the layers of the encoder of this name."""
    check_size(f"{name}.mlp_dim", mlp_dim, num_shards)


def check_size(name: str, size: int, num_shards: int, axis: str = TENSOR) -> None:
    """Raise ValueError unless a size divides over an axis."""
    if size % num_shards:
        degree = "tensor degree" if axis == TENSOR else f"degree of {axis}"
        raise ValueError(
            f"{name} {size} does not divide over {axis} {num_shards}: give a {degree} that divides {size}, "
            f"or {name} {size + -size % num_shards}"
        )
