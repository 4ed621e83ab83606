"""The shape record: what it refuses, and the parameter count."""

import jax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, RopeScaling, language_model
from rrfp_jax.models.config import GlobalLayers, LatentAttentionConfig, LayerVariant, PredictAheadConfig
from tests.models.reference import small_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, r"num_layers is 0: give a number above 0"),
        ({"num_kv_heads": 0}, r"num_kv_heads is 0"),
        ({"init_std": float("nan")}, r"init_std is nan"),
        ({"head_dim": None, "hidden": 25}, r"hidden 25 does not divide into 6 heads: give head_dim, or hidden 30"),
        ({"head_dim": 7}, r"heads are 7 wide.*even head_dim, for example 8"),
        ({"num_kv_heads": 4}, r"6 query heads cannot share 4 .* out of \[1, 2, 3, 6\]"),
        ({"compute_dtype": "float16"}, r"compute_dtype is 'float16': give one of float32, bfloat16"),
        ({"sliding_window": 0}, r"sliding_window is 0: give a number above 0"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        small_config(**changes)


LATENT = {"kv_rank": 3, "plain_dim": 2, "rotary_dim": 2, "value_dim": 2}
SIGMOID = {"num_experts": 6, "experts_per_token": 3, "scores": "sigmoid"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatentAttentionConfig(**{**LATENT, "rotary_dim": 3}), "turns 3 dims, .* give an even rotary_dim, for"),
        (lambda: latent_model(qk_norm=True), "qk_norm is True beside latent_attention, .*: leave qk_norm out"),
        (lambda: latent_model(num_kv_heads=1), "num_kv_heads is 1 beside latent_attention"),
        (
            lambda: latent_model(sliding_window=4, global_layers=GlobalLayers(every=2)),
            "global_layers is given beside latent_attention, which has no such thing: leave global_layers out",
        ),
        (lambda: latent_model(variant=LayerVariant(sinks=True)), "variant.sinks is given beside latent_attention"),
        (lambda: latent_model(variant=LayerVariant(output_bias=True)), "variant.output_bias is given beside"),
        (lambda: latent_model(variant=LayerVariant(query_scalar=3.0)), "variant.query_scalar is given beside"),
        (lambda: latent_model(variant=LayerVariant(interleaved=True)), "variant.interleaved is given beside"),
        (lambda: LayerVariant(rotary_dim=3), "rotary_dim is 3: give an even number above 0"),
        (
            lambda: small_config(variant=LayerVariant(rotary_dim=8)),
            "variant.rotary_dim 8 is not less than the 8 dims of a head: give fewer, or leave it out",
        ),
        (lambda: latent_model(more={"score_mscale": 1.0}), "score_mscale goes by the factor of rope_scaling"),
        (
            lambda: ExpertsConfig(num_experts=6, experts_per_token=2, bias_rate=0.1),
            "bias_rate is given with scores",
        ),
        (lambda: ExpertsConfig(**SIGMOID, num_groups=4), "6 experts do not divide into 4 groups"),
        (
            lambda: ExpertsConfig(**SIGMOID, num_groups=3),
            "3 is more than the 2 experts of a token's groups",
        ),
        (lambda: ExpertsConfig(**SIGMOID, num_groups=3, groups_per_token=4), "groups_per_token 4 is more than the 3"),
        (lambda: ExpertsConfig(**{**SIGMOID, "scores": "tanh"}), "scores is 'tanh': give softmax or sigmoid"),
        (lambda: PredictAheadConfig(num_layers=0), "num_layers is 0: give at least 1"),
    ],
)
def test_parts_of_deepseek_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def latent_model(*, more=None, **changes):
    """A model with latent attention."""
    sizes = {"vocab_size": 5, "hidden": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8}
    return LanguageModelConfig(**sizes, latent_attention=LatentAttentionConfig(**LATENT, **(more or {})), **changes)


def test_heads_default_to_equal_shares():
    config = LanguageModelConfig(vocab_size=5, hidden=24, num_layers=1, num_heads=6, mlp_dim=8)
    assert (config.size_per_head, config.num_key_value_heads) == (4, 6)


def test_scaled_rotary_waves_need_two_bounds():
    with pytest.raises(ValueError, match="factor is 0: give a number above 0"):
        RopeScaling(factor=0)
    with pytest.raises(ValueError, match=r"between 4.0 and 4.0 waves: give a high_freq_factor above low_freq_factor"):
        RopeScaling(factor=8, low_freq_factor=4.0)
    with pytest.raises(ValueError, match=r"between 32.0 and 32.0 waves: give a beta_fast above beta_slow"):
        RopeScaling(kind="yarn", factor=8, original_max_positions=8, beta_slow=32.0)


def test_kinds_of_stretching_have_fields_of_their_own():
    llama = RopeScaling(factor=8)
    assert (llama.kind, llama.low_freq_factor, llama.high_freq_factor) == ("llama3", 1, 4)
    assert (llama.original_max_positions, llama.beta_fast) == (8192, None)
    with pytest.raises(ValueError, match="beta_fast is no field of the rope_scaling llama3, which has low_freq_factor"):
        RopeScaling(factor=8, beta_fast=32.0)
    with pytest.raises(ValueError, match="original_max_positions is no field of the rope_scaling linear, which has"):
        RopeScaling(kind="linear", factor=8, original_max_positions=8)
    with pytest.raises(ValueError, match="yarn has no original_max_positions: give the tokens"):
        RopeScaling(kind="yarn", factor=8)
    with pytest.raises(ValueError, match="kind is 'dynamic': give one of llama3, linear, yarn"):
        RopeScaling(kind="dynamic", factor=8)


@pytest.mark.parametrize("switches", [{}, {"tie_embeddings": True}, {"qkv_bias": True, "qk_norm": True}])
def test_num_params_counts_what_init_makes(switches):
    config = small_config(**switches)
    (chunk,) = language_model(config).split(1)
    shapes = jax.eval_shape(chunk.init, jax.random.key(0))
    assert config.num_params() == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    layer = sum(leaf.size for leaf in jax.tree.leaves(shapes["layers.1"]))
    assert config.num_layer_params() == layer
