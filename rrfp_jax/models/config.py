"""The shape of a language model: one validated record, pure data.

It never mentions the cut into chunks, devices or training, so that the same record describes the model of a
checkpoint whatever layout it was trained in.
"""

from dataclasses import dataclass

from rrfp_jax.field_rules import NOT_NEGATIVE, Rule, check_fields, check_types
from rrfp_jax.models.experts_config import ExpertsConfig
from rrfp_jax.models.rope_scaling import RopeScaling

DTYPES = ("float32", "bfloat16")
"""Names that ``param_dtype`` and ``compute_dtype`` accept. (float16 would need loss scaling.)"""

ABOVE_0 = Rule("a number above 0", lambda value: value > 0)


def check_dtypes(config: object) -> None:
    """Raise ValueError where ``param_dtype`` or ``compute_dtype`` of a model's record is not known."""
    for name in ("param_dtype", "compute_dtype"):
        if getattr(config, name) not in DTYPES:
            raise ValueError(f"{name} is {getattr(config, name)!r}: give one of {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """A decoder in the manner of Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

    The switches ``rope_scaling``, ``qkv_bias``, ``qk_norm`` and ``sliding_window`` make it Llama 3.1, Qwen 2.5, Qwen 3
    and Mistral; ``experts`` makes it Mixtral and Qwen3-MoE.

    Raises ValueError, with the remedy, for values that do not describe a model.
    """

    vocab_size: int
    """Number of token ids; tokens are integers in ``[0, vocab_size)``."""
    hidden: int
    """Width of the residual stream."""
    num_layers: int
    """Number of decoder layers, embedding and head not counted."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key and value heads; it divides ``num_heads``. None: as many as ``num_heads``."""
    head_dim: int | None = None
    """Width of a head, even. None: ``hidden / num_heads``."""
    mlp_dim: int
    """Inner width of the gated MLP."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """How the rotary wavelengths are stretched, as in Llama 3.1 or by YaRN; None: not at all."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen 2.5."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm over each head before they are turned, as in Qwen 3."""
    sliding_window: int | None = None
    """Number of tokens that a token looks at, itself and those before it; None: all before it."""
    experts: ExpertsConfig | None = None
    """Experts in place of the MLP of some layers or all; None: every layer has a plain one."""
    norm_eps: float = 1e-5
    """What RMSNorm adds to the mean square."""
    tie_embeddings: bool = False
    """Whether the head uses the transposed embedding table instead of a matrix of its own."""
    z_loss: float = 0.0
    """Weight of the square of the logarithm of each token's softmax normaliser, which the loss of training then has
    beside the cross entropy, as in PaLM (1e-4 there); 0: none."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices. Those that write to the residual stream get
    ``init_std / sqrt(2 * num_layers)`` (Radford et al. 2019, section 2.3)."""
    param_dtype: str = "float32"
    """Dtype in which parameters are kept and updated (master weights)."""
    compute_dtype: str = "float32"
    """Dtype of matrix products and of activations between layers and chunks. Norm statistics, softmax, logits and
    loss are float32 whatever it is."""

    def __post_init__(self) -> None:
        check_types(self)
        positive = ("vocab_size", "hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        check_fields(self, ABOVE_0, *positive, "rope_theta", "norm_eps", "init_std", "sliding_window")
        check_fields(self, NOT_NEGATIVE, "z_loss")
        self._check_heads()
        if self.experts is not None:
            self.experts.check_layers(self.num_layers)
        check_dtypes(self)

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden % self.num_heads:
            raise ValueError(
                f"hidden {self.hidden} does not divide into {self.num_heads} heads: give head_dim, "
                f"or hidden {self.hidden + -self.hidden % self.num_heads}"
            )
        if self.size_per_head % 2:
            raise ValueError(
                f"heads are {self.size_per_head} wide, and rotary embeddings turn pairs: "
                f"give an even head_dim, for example {self.size_per_head + 1}"
            )
        if self.num_heads % self.num_key_value_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key and value heads equally: "
                f"give num_kv_heads out of {divisors}"
            )

    @property
    def size_per_head(self) -> int:
        """Width of a head."""
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer ``layer``, counted from 0, has experts."""
        return self.experts is not None and self.experts.is_sparse(layer)

    @property
    def num_sparse_layers(self) -> int:
        """Number of decoder layers that have experts."""
        return sum(map(self.is_sparse, range(self.num_layers)))

    @property
    def expert_dim(self) -> int:
        """Inner width of an expert."""
        return self.mlp_dim if self.experts is None or self.experts.mlp_dim is None else self.experts.mlp_dim

    @property
    def has_router_loss(self) -> bool:
        """Whether routers add to the loss; what passes between chunks then has their sum beside the residual stream."""
        return self.experts is not None and self.experts.has_loss

    def num_layer_params(self, layer: int = 0, *, active: bool = False) -> int:
        """Number of parameters of a decoder layer; ``active``: of those that a token is multiplied with."""
        queries = self.num_heads * self.size_per_head
        keys_and_values = 2 * self.num_key_value_heads * self.size_per_head
        attention = self.hidden * (2 * queries + keys_and_values)
        attention += (queries + keys_and_values) * self.qkv_bias + 2 * self.size_per_head * self.qk_norm
        return attention + self._num_mlp_params(layer, active=active) + 2 * self.hidden

    def _num_mlp_params(self, layer: int, *, active: bool) -> int:
        if self.experts is None or not self.experts.is_sparse(layer):
            return 3 * self.hidden * self.mlp_dim
        count = self.experts.experts_per_token if active else self.experts.num_experts
        matrices = 3 * (count * self.expert_dim + (self.experts.shared_mlp_dim or 0))
        return self.hidden * (matrices + self.experts.num_experts + self.experts.shared_gate)

    def num_params(self, *, active: bool = False) -> int:
        """Number of parameters of the whole model, tied embeddings counted once.

        ``active`` counts of the experts of each layer only as many as compute a token, as names like 30B-A3B do.
        """
        layers = sum(self.num_layer_params(layer, active=active) for layer in range(self.num_layers))
        tables = 1 if self.tie_embeddings else 2
        return layers + tables * self.vocab_size * self.hidden + self.hidden
