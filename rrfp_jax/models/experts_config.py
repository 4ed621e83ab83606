"""The shape of a mixture of experts: pure data, as a part of a language model's record."""

import math
from dataclasses import dataclass

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, check_fields, check_types


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts in place of the MLP of some or all layers, of which a router chooses a few for each token.

    Mixtral is ``renormalise: true``, and its softmax over the chosen experts alone is the same number for number as
    one over all that is renormalised. Qwen3-MoE's ``norm_topk_prob`` is ``renormalise``, its ``decoder_sparse_step``
    is ``every``, its ``mlp_only_layers`` are ``dense_layers``. Shared experts are Qwen2-MoE's and DeepSeek's.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    num_experts: int
    """Number of experts of a sparse layer."""
    experts_per_token: int
    """Number of experts that compute a token: those with the highest scores (top-k)."""
    mlp_dim: int | None = None
    """Inner width of an expert. None: the model's ``mlp_dim``."""
    renormalise: bool = True
    """Whether the scores of a token's experts are divided by their sum, so that they add up to 1."""
    shared_mlp_dim: int | None = None
    """Inner width of the expert that computes every token beside the chosen ones; several shared experts are one that
    is as wide as all of them. None: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's result is weighted by a sigmoid of a product with the token, as in Qwen2-MoE."""
    every: int = 1
    """Every so many-th layer is sparse, the first such being layer ``every - 1``; 1: all."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP all the same, counted from 0."""
    capacity_factor: float | None = None
    """How many times its equal share of each row's tokens an expert takes at most; what comes later in the row goes
    past it, and only the residual stream carries it on. None: no token is dropped."""
    balance_coefficient: float = 0.0
    """Weight of the load-balancing loss; 0: none."""
    z_coefficient: float = 0.0
    """Weight of the router's z-loss, which keeps scores small; 0: none."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "num_experts", "experts_per_token", "mlp_dim", "shared_mlp_dim", "every")
        check_fields(self, POSITIVE, "capacity_factor")
        check_fields(self, NOT_NEGATIVE, "balance_coefficient", "z_coefficient")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the {self.num_experts} experts: "
                f"give at most {self.num_experts}"
            )
        if self.shared_gate and self.shared_mlp_dim is None:
            raise ValueError("shared_gate is given without a shared expert: give shared_mlp_dim, or leave it out")

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError unless some of so many layers are sparse, and all that are named exist."""
        absent = [layer for layer in self.dense_layers if not 0 <= layer < num_layers]
        if absent:
            raise ValueError(
                f"experts.dense_layers names layer {absent[0]} of {num_layers}: give numbers from 0 to {num_layers - 1}"
            )
        if not any(map(self.is_sparse, range(num_layers))):
            raise ValueError(
                f"none of the {num_layers} layers has experts: give a smaller experts.every than {self.every}, fewer "
                "dense_layers, or leave experts out"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer ``layer``, counted from 0 over the whole model, has experts."""
        return (layer + 1) % self.every == 0 and layer not in self.dense_layers

    @property
    def has_loss(self) -> bool:
        """Whether the routers add to the loss."""
        return bool(self.balance_coefficient or self.z_coefficient)

    def capacity(self, length: int) -> int:
        """How many tokens of a row of this length an expert takes; at most all of them."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.capacity_factor * self.experts_per_token * length / self.num_experts))
