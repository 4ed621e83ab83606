"""The shape of a language model: one validated record with its parts, pure data.

The record never mentions the cut into chunks, devices or training, so that it describes the model of a checkpoint
whatever layout trained it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax.field_rules import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    FieldRule,
    check_fields,
    check_types,
    fill_fields,
    matches,
    nearest_name,
)

DTYPES = ("float32", "bfloat16")
"""Names that ``param_dtype`` and ``compute_dtype`` accept. (float16 would need loss scaling.)"""

ABOVE_0 = FieldRule("a number above 0", lambda value: value > 0)
_FINITE_ABOVE_0 = FieldRule("a number above 0", lambda value: 0 < value < math.inf)

_HEAD = "head"
"""The name of the head's products, also where it is the table of embeddings."""

LLAMA3_ROPE, LINEAR_ROPE, YARN_ROPE = "llama3", "linear", "yarn"
SOFTMAX, SIGMOID = "softmax", "sigmoid"
"""Names that ``experts.scores`` accepts."""
ROPE_KINDS: dict[str, dict[str, Any]] = {
    LLAMA3_ROPE: {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192},
    LINEAR_ROPE: {},
    YARN_ROPE: {
        "original_max_positions": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "truncate": True,
    },
}
"""The fields that each kind of :class:`RopeScaling` has beside ``factor``, and the values that null stands for."""


MLP_ACTIVATIONS = ("silu", "gelu_tanh")
"""Names that ``activation`` of a :class:`LayerVariant` accepts."""


def check_dtypes(config: object) -> None:
    """Raises ValueError if ``param_dtype`` or ``compute_dtype`` of a model's record is not known."""
    for name in ("param_dtype", "compute_dtype"):
        if getattr(config, name) not in DTYPES:
            raise ValueError(f"{name} is {getattr(config, name)!r}: give one of {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretches rotary embeddings to longer texts than the weights were first trained on.

    ``kind`` is the ``rope_type`` of Hugging Face. The *turns* of a wave are how often it fits into
    ``original_max_positions``.

    ========  =========================================================================================================
    llama3    waves of at least ``high_freq_factor`` turns stay, those of at most ``low_freq_factor`` become ``factor``
              times as long; between the two the change is linear in the turns (Llama 3.1)
    linear    all waves become ``factor`` times as long (Chen et al. 2023)
    yarn      waves of at least ``beta_fast`` turns stay, those of at most ``beta_slow`` become ``factor`` times as
              long; between the two the change is linear in the number of the wave, with ``truncate`` from its whole
              number at or before the one bound to that at or behind the other. Queries and keys are multiplied by
              ``attention_factor`` (Peng et al. 2023; Qwen 2.5 beyond 32768 tokens)
    ========  =========================================================================================================

    Raises ValueError, with the remedy, for a field that the kind does not have and for a value out of range.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    factor: float
    """How many times longer the longest waves become."""
    kind: str = LLAMA3_ROPE
    """``llama3``, ``linear`` or ``yarn``."""
    low_freq_factor: float | None = None
    """Number of turns up to which a wave of ``llama3`` is stretched in full; None: 1."""
    high_freq_factor: float | None = None
    """Number of turns from which on a wave of ``llama3`` is not stretched; None: 4."""
    original_max_positions: int | None = None
    """Length of the texts of the first training, in tokens; None: 8192 of ``llama3``; ``yarn`` needs it."""
    beta_fast: float | None = None
    """Number of turns from which on a wave of ``yarn`` is not stretched; None: 32."""
    beta_slow: float | None = None
    """Number of turns up to which a wave of ``yarn`` is stretched in full; None: 1."""
    attention_factor: float | None = None
    """Factor of queries and keys; None: ``0.1 * log(factor) + 1``, or 1 for a ``factor`` below 1."""
    truncate: bool | None = None
    """Whether the bounds of ``yarn`` are whole numbers of waves; None: they are."""

    def __post_init__(self) -> None:
        check_types(self)
        fill_fields(self, "kind", "rope_scaling", ROPE_KINDS)
        names = dict.fromkeys(name for fields in ROPE_KINDS.values() for name in fields)
        del names["truncate"]
        check_fields(self, _FINITE_ABOVE_0, "factor", *names)
        for kind, low, high in (
            (LLAMA3_ROPE, "low_freq_factor", "high_freq_factor"),
            (YARN_ROPE, "beta_slow", "beta_fast"),
        ):
            if self.kind == kind and getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"rope_scaling stretches between {getattr(self, low)} and {getattr(self, high)} waves: give a "
                    f"{high} above {low}"
                )
        if self.kind == YARN_ROPE:
            if self.original_max_positions is None:
                raise ValueError(
                    "rope_scaling yarn has no original_max_positions: give the tokens of the first training's texts"
                )
            if self.attention_factor is None:
                object.__setattr__(self, "attention_factor", 0.1 * math.log(max(self.factor, 1.0)) + 1.0)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that the kind has beside ``factor``, by name."""
        return {field: getattr(self, field) for field in ROPE_KINDS[self.kind]}


@dataclass(frozen=True, kw_only=True)
class GlobalLayers:
    """Layers whose tokens attend to all tokens before them, among layers with a ``sliding_window``.

    Gemma 3 has ``every: 6`` and rotary embeddings of their own, GPT-OSS ``every: 2``.

    Raises ValueError, with the remedy, for values that do not describe such layers.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    every: int | None = None
    """Distance of these layers, the first of which is layer ``every - 1``. None: ``layers`` names them."""
    layers: tuple[int, ...] | None = None
    """Their numbers, counted from 0. None: they follow from ``every``."""
    rope_theta: float | None = None
    """Base of their rotary wavelengths. None: wavelengths and scaling are those of the other layers."""
    rope_scaling: RopeScaling | None = None
    """How the wavelengths of ``rope_theta`` are stretched; None: not at all."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "every")
        check_fields(self, ABOVE_0, "rope_theta")
        if (self.every is None) == (self.layers is None):
            raise ValueError("global_layers are named by every or by layers: give one of the two")
        if self.rope_theta is None and self.rope_scaling is not None:
            raise ValueError("global_layers.rope_scaling stretches the waves of its own rope_theta: give that too")

    def has(self, layer: int) -> bool:
        """Returns whether decoder layer ``layer``, counted from 0, is one of them."""
        return layer in self.layers if self.layers is not None else (layer + 1) % (self.every or 1) == 0


@dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """Properties of the layers of some families that Llama has not.

    Gemma 3 is ``activation: gelu_tanh`` with ``norm_offset``, ``post_norms``, ``scaled_embedding`` and a
    ``query_scalar``; GPT-OSS has ``sinks`` and ``output_bias``; GLM-4 has ``rotary_dim``, ``interleaved`` and
    ``post_norms``; the decoder of Qwen2.5-VL has ``rope_sections``.

    Raises ValueError, with the remedy, for an activation that is not known and for numbers out of range.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    activation: str = "silu"
    """The function of the MLP's gate: ``silu`` or ``gelu_tanh``."""
    norm_offset: bool = False
    """Whether norms multiply by 1 plus their scale, which then begins at 0."""
    post_norms: bool = False
    """Whether the results of attention and MLP pass a norm too before they are added to the stream."""
    scaled_embedding: bool = False
    """Whether the vectors of tokens are multiplied by the root of ``hidden``."""
    query_scalar: float | None = None
    """Number by whose root the products of queries and keys are divided; None: the width of a head."""
    sinks: bool = False
    """Whether the softmax of each head has one score more, which is learned and has no value."""
    output_bias: bool = False
    """Whether the product behind attention has a bias."""
    rotary_dim: int | None = None
    """Number of the first dims of a head that positions turn, even; None: all."""
    interleaved: bool = False
    """Whether a rotary embedding turns neighbouring dims; false: dims half of all turned ones apart."""
    rope_sections: tuple[int, ...] | None = None
    """Numbers of rotary wavelengths, of all in turn, that turn by a token's place in time, by its row and by its
    column: three places that differ within an image. None: a token has one place."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, _FINITE_ABOVE_0, "query_scalar")
        check_fields(
            self, FieldRule("an even number above 0", lambda value: value > 0 and value % 2 == 0), "rotary_dim"
        )
        if self.activation not in MLP_ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}: give one of {', '.join(MLP_ACTIVATIONS)}")
        if self.rope_sections is not None and (len(self.rope_sections) != 3 or min(self.rope_sections) < 0):
            raise ValueError(f"rope_sections is {list(self.rope_sections)}: give three numbers of wavelengths")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts in place of the MLP of some or all layers, of which a router chooses a few for each token.

    Mixtral is ``renormalise: true``, and its softmax over the chosen experts alone is the same number for number as
    one over all that is renormalised. Qwen3-MoE's ``norm_topk_prob`` is ``renormalise``, its ``decoder_sparse_step``
    is ``every``, its ``mlp_only_layers`` are ``dense_layers``. Shared experts are Qwen2-MoE's and DeepSeek's.
    DeepSeek-V3 chooses by ``sigmoid`` scores, in groups, with a bias that balances without a loss; its
    ``routed_scaling_factor`` is ``scale``, its ``first_k_dense_replace`` first layers are ``dense_layers``.

    Raises ValueError, with the remedy, for values that do not describe experts.
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
    scores: str = SOFTMAX
    """How a score is made of a logit: ``softmax`` over all experts, or ``sigmoid`` of each by itself."""
    scale: float = 1.0
    """Factor of the weights of a token's experts, after all else."""
    num_groups: int = 1
    """Number of groups of neighbouring experts, of equal size; only with ``sigmoid``."""
    groups_per_token: int = 1
    """Number of groups among whose experts a token chooses: those whose two highest scores have the highest sum."""
    bias_rate: float | None = None
    """Step by which a bias of each expert rises after every optimizer step if fewer tokens chose it than the average,
    and falls if more did; it is added to scores where experts are chosen, not to weights; 0: the bias is there and
    stays, null: there is none."""
    shared_mlp_dim: int | None = None
    """Inner width of the expert that computes every token beside the chosen ones; several shared experts are one that
    is as wide as all of them. None: there is none."""
    biases: bool = False
    """Whether the router and the experts' products have biases, as in GPT-OSS."""
    swiglu_limit: float | None = None
    """Bound of an expert's two inner products, of which the gate's is bounded above only, in the SwiGLU of GPT-OSS,
    ``gate * sigmoid(1.702 * gate) * (up + 1)``. None: SwiGLU as it is."""
    shared_gate: bool = False
    """Whether the shared expert's result is weighted by a sigmoid of a product with the token, as in Qwen2-MoE."""
    every: int = 1
    """Distance of sparse layers, the first of which is layer ``every - 1``; 1: all layers are sparse."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP all the same, counted from 0."""
    capacity_factor: float | None = None
    """How many times its equal share of each row's tokens an expert takes at most; tokens that come later in the row
    go past it, and only the residual stream carries them on. None: no token is dropped."""
    balance_coefficient: float = 0.0
    """Weight of the load-balancing loss; 0: none."""
    z_coefficient: float = 0.0
    """Weight of the router's z-loss, which keeps scores small; 0: none."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "num_experts", "experts_per_token", "mlp_dim", "shared_mlp_dim", "every")
        check_fields(self, AT_LEAST_1, "num_groups", "groups_per_token")
        check_fields(self, POSITIVE, "capacity_factor", "scale", "swiglu_limit")
        check_fields(self, NOT_NEGATIVE, "balance_coefficient", "z_coefficient", "bias_rate")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the {self.num_experts} experts: "
                f"give at most {self.num_experts}"
            )
        if self.scores not in (SOFTMAX, SIGMOID):
            raise ValueError(f"scores is {self.scores!r}: give {SOFTMAX} or {SIGMOID}")
        self._check_groups()
        if self.shared_gate and self.shared_mlp_dim is None:
            raise ValueError("shared_gate is given without a shared expert: give shared_mlp_dim, or leave it out")

    def _check_groups(self) -> None:
        if self.scores == SOFTMAX and (self.num_groups > 1 or self.bias_rate is not None):
            name = "num_groups" if self.num_groups > 1 else "bias_rate"
            raise ValueError(f"{name} is given with scores {SOFTMAX}: give scores {SIGMOID}, or leave {name} out")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not divide into {self.num_groups} groups: give num_groups that divides "
                "num_experts"
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"groups_per_token {self.groups_per_token} is more than the {self.num_groups} groups: give at most "
                f"{self.num_groups}"
            )
        most = self.groups_per_token * (self.num_experts // self.num_groups)
        if self.experts_per_token > most:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the {most} experts of a token's groups: give "
                f"at most {most}, or more groups_per_token"
            )

    def check_layers(self, num_layers: int) -> None:
        """Raises ValueError unless some of ``num_layers`` layers are sparse and all of ``dense_layers`` exist."""
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
        """Returns whether decoder layer ``layer``, counted from 0 over the whole model, has experts."""
        return (layer + 1) % self.every == 0 and layer not in self.dense_layers

    def capacity(self, length: int) -> int:
        """Returns how many tokens of a row of ``length`` tokens an expert takes; at most all of them."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.capacity_factor * self.experts_per_token * length / self.num_experts))


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention of DeepSeek-V2 and V3: keys and values of all heads are products of one narrow
    vector, and positions are in dims of their own, whose key all heads share.

    The names in Hugging Face's files are ``q_lora_rank``, ``kv_lora_rank``, ``qk_nope_head_dim``,
    ``qk_rope_head_dim``, ``v_head_dim``, ``rope_interleave`` and ``mscale_all_dim``.

    Raises ValueError, with the remedy, for values that do not describe such attention.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    query_rank: int | None = None
    """Width of the vector of which queries are made; null: they are products of the layer's input."""
    kv_rank: int
    """Width of the vector of which keys and values are made."""
    plain_dim: int
    """Dims of a query head, and of a key head, that no position turns."""
    rotary_dim: int
    """Dims of a query head that positions turn, even, and the width of the key that all heads share."""
    value_dim: int
    """Width of a value head."""
    interleaved: bool = True
    """Whether a rotary embedding turns neighbouring dims, as published; false: dims half the width apart."""
    score_mscale: float = 0.0
    """Scores are multiplied by the square of ``0.1 * score_mscale * log(factor) + 1``, with the ``factor`` of
    ``rope_scaling``."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "query_rank", "kv_rank", "plain_dim", "rotary_dim", "value_dim")
        check_fields(self, NOT_NEGATIVE, "score_mscale")
        if self.rotary_dim % 2:
            raise ValueError(
                f"latent_attention turns {self.rotary_dim} dims, and rotary embeddings turn pairs: give an even "
                f"rotary_dim, for example {self.rotary_dim + 1}"
            )

    @property
    def query_dim(self) -> int:
        """Width of a query head, and of a key head."""
        return self.plain_dim + self.rotary_dim

    @property
    def call_dim(self) -> int:
        """Width of all heads where they come together."""
        return max(self.query_dim, self.value_dim)

    def score_factor(self, scaling: RopeScaling | None) -> float:
        """Returns the factor of scores beside one over the root of the width of a head."""
        growth = 0.0 if scaling is None else 0.1 * self.score_mscale * math.log(max(scaling.factor, 1.0))
        return (growth + 1.0) ** 2

    def num_params(self, hidden: int, num_heads: int) -> int:
        """Returns the number of parameters of the attention of a layer."""
        return self.num_product_params(hidden, num_heads) + (self.query_rank or 0) + self.kv_rank

    def num_product_params(self, hidden: int, num_heads: int) -> int:
        """Returns the number of parameters without those of norms."""
        queries, keys_and_values = num_heads * self.query_dim, num_heads * (self.plain_dim + self.value_dim)
        of_queries = hidden * queries if self.query_rank is None else self.query_rank * (hidden + queries)
        of_keys = hidden * self.rotary_dim + self.kv_rank * (hidden + keys_and_values)
        return of_queries + of_keys + num_heads * self.value_dim * hidden


@dataclass(frozen=True, kw_only=True)
class PredictAheadConfig:
    """Multi-token prediction of DeepSeek-V3: layers behind the model that predict tokens further ahead, one more each.

    Raises ValueError, with the remedy, for values that do not describe such layers.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    num_layers: int = 1
    """Number of such layers, and of tokens behind the next one that are predicted."""
    loss_weight: float = 0.3
    """Weight of their losses in that of training, shared out equally."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "num_layers")
        check_fields(self, POSITIVE, "loss_weight")


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Matrix products whose operands are rounded to float8; see :mod:`rrfp_jax.models.float8`.

    They are, by name, ``query``, ``key``, ``value`` and ``output`` of ``layers.N.attention``; ``gate``, ``up`` and
    ``down`` of ``layers.N.mlp``, or of ``layers.N.mlp.shared`` where a layer has experts; and ``head``.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a key that is not known is an error in files too

    exclude: tuple[str, ...] = ()
    """The products that stay in ``compute_dtype``: by name, by the beginning of names up to a dot, or by a glob for
    either, such as ``head``, ``layers.0``, ``*.down``, ``layers.*.attention``."""

    def __post_init__(self) -> None:
        check_types(self)


def _excludes(pattern: str, name: str) -> bool:
    return matches(pattern, name) or matches(f"{pattern}.*", name)  # layers.*.attention: all products in it


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """A decoder in the manner of Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

    The switches ``rope_scaling``, ``qkv_bias``, ``qk_norm`` and ``sliding_window`` make it Llama 3.1, Qwen 2.5, Qwen 3
    and Mistral; ``experts`` makes it Mixtral and Qwen3-MoE, with ``latent_attention`` DeepSeek-V3; ``global_layers``
    and ``variant`` make it Gemma 3, with ``experts`` GPT-OSS; ``variant`` alone makes it GLM-4.

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
    """Whether queries and keys pass an RMSNorm over each head before their rotary embedding, as in Qwen 3."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, itself and those before it; None: all before it."""
    global_layers: GlobalLayers | None = None
    """Layers that have no ``sliding_window`` where the others have one, as in Gemma 3; None: there are none."""
    variant: LayerVariant | None = None
    """Properties of layers that Llama's have not, as in Gemma 3, GPT-OSS and GLM-4; None: there are none."""
    latent_attention: LatentAttentionConfig | None = None
    """Attention whose keys and values are products of one narrow vector, as in DeepSeek-V3; null: each has a product of
    its own."""
    experts: ExpertsConfig | None = None
    """Experts in place of the MLP of some layers or all; None: every layer has a plain one."""
    predict_ahead: PredictAheadConfig | None = None
    """Layers that predict tokens further ahead, for one more loss, as in DeepSeek-V3; null: none."""
    norm_eps: float = 1e-5
    """Number that RMSNorm adds to the mean square."""
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
    fp8: Float8Config | None = None
    """The matrix products in float8: ``{}`` for all but those of experts, ``{exclude: [head, layers.0]}`` for fewer.
    None: none."""

    def __post_init__(self) -> None:
        check_types(self)
        positive = ("vocab_size", "hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        check_fields(self, ABOVE_0, *positive, "rope_theta", "norm_eps", "init_std", "sliding_window")
        check_fields(self, NOT_NEGATIVE, "z_loss")
        if self.latent_attention is not None:
            self._check_latent(self.latent_attention)
        elif self.head_dim is None and self.hidden % self.num_heads:
            raise ValueError(
                f"hidden {self.hidden} does not divide into {self.num_heads} heads: give head_dim, "
                f"or hidden {self.hidden + -self.hidden % self.num_heads}"
            )
        self._check_rotary()
        if self.num_heads % self.num_key_value_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key and value heads equally: "
                f"give num_kv_heads out of {divisors}"
            )
        if self.experts is not None:
            self.experts.check_layers(self.num_layers)
        if self.global_layers is not None:
            if self.sliding_window is None:
                raise ValueError("global_layers are given without a sliding_window of the others: give both or none")
            absent = [layer for layer in self.global_layers.layers or () if not 0 <= layer < self.num_layers]
            if absent:
                raise ValueError(
                    f"global_layers.layers names layer {absent[0]} of {self.num_layers}: give numbers from 0 to "
                    f"{self.num_layers - 1}"
                )
        if self.variant == LayerVariant():  # two files may say the same by a mapping and by leaving it out
            object.__setattr__(self, "variant", None)
        if self.experts is not None and self.layer_variant.activation != "silu":
            raise ValueError("variant.activation is that of a plain MLP, and experts have silu: leave one of them out")
        if self.fp8 is not None:
            if self.latent_attention is not None or self.predict_ahead is not None:
                raise ValueError("fp8 is not for models with latent_attention or predict_ahead: leave it out")
            self._check_excluded(self.fp8.exclude)
        check_dtypes(self)

    def _check_rotary(self) -> None:
        if (self.layer_variant.rotary_dim or 0) >= self.size_per_head:
            raise ValueError(
                f"variant.rotary_dim {self.rotary_dim} is not less than the {self.size_per_head} dims of a head: give "
                "fewer, or leave it out, which turns all"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"heads are {self.size_per_head} wide, and rotary embeddings turn pairs: "
                f"give an even head_dim, for example {self.size_per_head + 1}"
            )
        sections = self.layer_variant.rope_sections
        if sections is not None and 2 * sum(sections) != self.rotary_dim:
            raise ValueError(
                f"variant.rope_sections {list(sections)} are {sum(sections)} wavelengths, and heads of "
                f"{self.rotary_dim} have {self.rotary_dim // 2}: give sections that add up to that"
            )

    def _check_latent(self, latent: LatentAttentionConfig) -> None:
        given = {
            "head_dim": self.head_dim not in (None, latent.query_dim),
            "num_kv_heads": self.num_kv_heads not in (None, self.num_heads),
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
        }
        for name, is_given in given.items():
            if is_given:
                raise ValueError(
                    f"{name} is {getattr(self, name)} beside latent_attention, which has heads and norms of its own: "
                    f"leave {name} out"
                )
        absent = {
            "global_layers": self.global_layers is not None,
            "variant.query_scalar": self.layer_variant.query_scalar is not None,
            "variant.sinks": self.layer_variant.sinks,
            "variant.rope_sections": self.layer_variant.rope_sections is not None,
            "variant.output_bias": self.layer_variant.output_bias,
            "variant.rotary_dim": self.layer_variant.rotary_dim is not None,
            "variant.interleaved": self.layer_variant.interleaved,
        }
        for name, is_given in absent.items():
            if is_given:
                raise ValueError(f"{name} is given beside latent_attention, which has no such thing: leave {name} out")
        if latent.score_mscale and self.rope_scaling is None:
            raise ValueError(
                "latent_attention.score_mscale goes by the factor of rope_scaling, which is not given: give it, or "
                "leave score_mscale out"
            )

    def _check_excluded(self, patterns: tuple[str, ...]) -> None:
        layers = {f"layers.{layer}": self._products(layer) for layer in range(self.num_layers)}
        names = [f"{layer}.{product}" for layer, products in layers.items() for product in products]
        for pattern in patterns:
            if not any(_excludes(pattern, name) for name in (*names, _HEAD)):
                near = nearest_name(pattern, [*names, _HEAD])
                raise ValueError(f"no product matches {pattern!r}, which fp8.exclude names: {near}")
        if not any(map(self.float8_products, range(self.num_layers))) and not self.has_float8_head:
            raise ValueError("fp8.exclude leaves no product in float8: exclude fewer, or leave fp8 out")

    @property
    def size_per_head(self) -> int:
        """Width of a query head, and of a key head."""
        if self.latent_attention is not None:
            return self.latent_attention.query_dim
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention_dim(self) -> int:
        """Width of queries, keys and values where attention computes scores and sums."""
        return self.size_per_head if self.latent_attention is None else self.latent_attention.call_dim

    @property
    def rotary_dim(self) -> int:
        """Number of dims of a head that positions turn."""
        if self.latent_attention is not None:
            return self.latent_attention.rotary_dim
        return self.layer_variant.rotary_dim or self.size_per_head

    @property
    def num_key_value_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def layer_variant(self) -> LayerVariant:
        """``variant``, or that of Llama."""
        return self.variant or LayerVariant()

    def is_global(self, layer: int) -> bool:
        """Returns whether decoder layer ``layer``, counted from 0, is one of ``global_layers``."""
        return self.global_layers is not None and self.global_layers.has(layer)

    def window(self, *, is_global: bool) -> int | None:
        """Returns the window of the layers of a kind, global or other."""
        return None if is_global else self.sliding_window

    def rope(self, *, is_global: bool) -> tuple[float, RopeScaling | None]:
        """Returns base and scaling of the rotary wavelengths of the layers of a kind, global or other."""
        own = self.global_layers
        if is_global and own is not None and own.rope_theta is not None:
            return own.rope_theta, own.rope_scaling
        return self.rope_theta, self.rope_scaling

    def is_sparse(self, layer: int) -> bool:
        """Returns whether decoder layer ``layer``, counted from 0, has experts."""
        return self.experts is not None and self.experts.is_sparse(layer)

    def _products(self, layer: int) -> tuple[str, ...]:
        """Returns the names, within a layer, of the products that can be in float8."""
        mlp = tuple(f"mlp.{name}" for name in ("gate", "up", "down"))
        if self.experts is not None and self.is_sparse(layer):
            mlp = () if self.experts.shared_mlp_dim is None else tuple(n.replace(".", ".shared.") for n in mlp)
        return (*(f"attention.{name}" for name in ("query", "key", "value", "output")), *mlp)

    def float8_products(self, layer: int) -> tuple[str, ...]:
        """Returns the names, within decoder layer ``layer``, of its products in float8: ``attention.query`` and so
        on."""
        if self.fp8 is None:
            return ()
        excluded = self.fp8.exclude
        return tuple(
            name for name in self._products(layer) if not any(_excludes(p, f"layers.{layer}.{name}") for p in excluded)
        )

    def with_layers(self, num_layers: int) -> "LanguageModelConfig":
        """Returns the model with another number of layers, which all have the first one's products in float8."""
        if self.fp8 is None:
            return replace(self, num_layers=num_layers)
        others = [f"layers.*.{name}" for name in self._products(0) if name not in self.float8_products(0)]
        exclude = (*others, *(() if self.has_float8_head else (_HEAD,)))
        return replace(self, num_layers=num_layers, fp8=Float8Config(exclude=exclude))

    @property
    def has_float8_head(self) -> bool:
        """Whether the head's products are in float8."""
        return self.fp8 is not None and not any(_excludes(pattern, _HEAD) for pattern in self.fp8.exclude)

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
        """Whether routers add to the loss. Chunks then pass their sum on beside the residual stream."""
        return self.experts is not None and bool(self.experts.balance_coefficient or self.experts.z_coefficient)

    @property
    def counts_routes(self) -> bool:
        """Whether training has to know which tokens routers count: for their loss, or for the loads of experts."""
        return self.has_router_loss or (self.experts is not None and self.experts.bias_rate is not None)

    def num_layer_params(self, layer: int = 0, *, active: bool = False) -> int:
        """Returns the number of parameters of a decoder layer, with ``active`` only of those that compute a token."""
        queries = self.num_heads * self.size_per_head
        keys_and_values = 2 * self.num_key_value_heads * self.size_per_head
        attention = self.hidden * (2 * queries + keys_and_values)
        attention += (queries + keys_and_values) * self.qkv_bias + 2 * self.size_per_head * self.qk_norm
        attention += self.num_heads * self.layer_variant.sinks + self.hidden * self.layer_variant.output_bias
        if self.latent_attention is not None:
            attention = self.latent_attention.num_params(self.hidden, self.num_heads)
        mlp = 3 * self.hidden * self.mlp_dim
        if self.experts is not None and self.experts.is_sparse(layer):
            count = self.experts.experts_per_token if active else self.experts.num_experts
            matrices = 3 * (count * self.expert_dim + (self.experts.shared_mlp_dim or 0))
            mlp = self.hidden * (matrices + self.experts.num_experts + self.experts.shared_gate)
            mlp += (self.experts.num_experts + count * (2 * self.expert_dim + self.hidden)) * self.experts.biases
            mlp += self.experts.num_experts * (self.experts.bias_rate is not None)
        return attention + mlp + (2 + 2 * self.layer_variant.post_norms) * self.hidden

    @property
    def num_layers_ahead(self) -> int:
        """Number of layers that predict further ahead; they are numbered on from the others."""
        return 0 if self.predict_ahead is None else self.predict_ahead.num_layers

    @property
    def num_sparse_layers_ahead(self) -> int:
        """Number of these that have experts."""
        return sum(map(self.is_sparse, range(self.num_layers, self.num_layers + self.num_layers_ahead)))

    def num_ahead_params(self, *, active: bool = False) -> int:
        """Returns the number of parameters of the layers that predict further ahead."""
        own = 2 * self.hidden**2 + 3 * self.hidden
        layers = range(self.num_layers, self.num_layers + self.num_layers_ahead)
        return sum(own + self.num_layer_params(layer, active=active) for layer in layers)

    def num_params(self, *, active: bool = False) -> int:
        """Returns the number of parameters of the whole model, tied embeddings counted once.

        ``active`` counts of the experts of each layer only as many as compute a token, as names like 30B-A3B do.
        """
        layers = sum(self.num_layer_params(layer, active=active) for layer in range(self.num_layers))
        tables = 1 if self.tie_embeddings else 2
        return layers + tables * self.vocab_size * self.hidden + self.hidden + self.num_ahead_params(active=active)


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig:
    """Adapters of low rank (LoRA): they alone train, beside matrices of a model whose own layers are frozen.

    A matrix product ``x @ kernel`` becomes ``x @ kernel + alpha / rank * (dropout(x) @ lora_a @ lora_b)``
    (Hu et al. 2021).

    Raises ValueError, with the remedy, for numbers that describe no adapter.
    """

    rank: int
    """The number of columns of ``lora_a`` and of rows of ``lora_b``."""
    alpha: float | None = None
    """The factor of the adapters' products, over the rank. None: the rank, so that the factor is 1."""
    targets: tuple[str, ...] = ("query", "value")
    """The matrices that get an adapter, by the ends of their paths behind a dot, such as ``query`` or
    ``attention.query``, or globs such as ``layers.[0-7].mlp.*``."""
    dropout: float = 0.0
    """The part of the inputs that training hides from the adapters."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "rank")
        check_fields(self, _FINITE_ABOVE_0, "alpha")
        check_fields(self, FieldRule("0 or more, and less than 1", lambda value: 0 <= value < 1), "dropout")
        if not self.targets:
            raise ValueError("targets names no matrix: give some, such as [query, value]")

    @property
    def scale(self) -> float:
        """The factor of the adapters' products."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
