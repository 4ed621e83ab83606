"""Records of encoders and projectors: what they refuse, and parameter counts."""

from dataclasses import replace

import jax
import pytest

from rrfp_jax.models import ProjectorConfig, VisionConfig, vision_language_model
from rrfp_jax.models.vision_config import encoder_section, encoder_values
from rrfp_jax.programs.chunk import param_specs
from tests.models.encoder_reference import AUDIO, CLIP, INTERN, PACKED, SIGLIP, TOWERS, small_model

QWEN = VisionConfig(
    **{"hidden": 16, "num_layers": 3, "num_heads": 2, "mlp_dim": 20, "patch_dim": 12, "patch_frames": 2},
    **{"gated_mlp": True, "activation": "silu", "norm": "rms_norm", "patch_bias": False},
    **{"rotary_theta": 10_000.0, "window": 8, "global_layers": (1,)},
)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SIGLIP, {"num_heads": 0}, r"num_heads is 0: give a number above 0"),
        (SIGLIP, {"num_heads": 3}, r"hidden 16 does not divide into 3 heads: give hidden 18"),
        (SIGLIP, {"activation": "relu"}, r"activation is 'relu': give one of gelu, gelu_tanh, quick_gelu"),
        (SIGLIP, {"norm": "batch"}, r"norm is 'batch': give one of layer_norm, rms_norm"),
        (SIGLIP, {"param_dtype": "float16"}, r"param_dtype is 'float16'"),
        (CLIP, {"feature_layer": 0}, r"feature_layer is 0 but the encoder has 3 layers: give -3 to -1"),
        (CLIP, {"final_norm": True}, r"features of layer -2 pass no final norm: give final_norm false"),
        (SIGLIP, {"max_rows": 3}, r"give num_patches for equal images, or both max_rows and max_columns"),
        (PACKED, {"max_rows": None}, r"give num_patches for equal images, or both max_rows and max_columns"),
        (PACKED, {"class_token": True}, r"packed rows .* no place for a class token"),
        (QWEN, {"num_patches": 4}, r"rotary_theta is for packed images of any size: leave num_patches or grid out"),
        (QWEN, {"num_heads": 8}, r"heads are 2 wide, and rotary_theta turns two halves of pairs: give a multiple of 4"),
        (QWEN, {"global_layers": (3,)}, r"global_layers names layer 3 of 3: give numbers of layers from 0 on"),
        (QWEN, {"window": None}, r"global_layers is for layers with a window"),
        (SIGLIP, {"window": 2}, r"a window goes by the rows and columns of packed images: leave it out"),
        (AUDIO, {"bins": 0}, r"bins is 0"),
        (AUDIO, {"hidden": 15, "num_heads": 3}, r"hidden is 15 and positions are pairs"),
        (ProjectorConfig(), {"patches_per_feature": 3, "row_order": True}, r"3 patches make no square"),
        (ProjectorConfig(), {"activation": ""}, r"activation is ''"),
        (small_model(SIGLIP), {"projector": ProjectorConfig(patches_per_feature=2)},
         r"9 patches do not divide into features of 2: give num_patches 10"),
        (small_model(SIGLIP), {"vision": replace(SIGLIP, num_patches=8),
                               "projector": ProjectorConfig(patches_per_feature=4, row_order=True)},
         r"8 patches are no square image that divides into squares of 4: give num_patches 4"),
        (small_model(PACKED), {"projector": ProjectorConfig(row_order=True)}, r"packed images .* block by block"),
        (small_model(PACKED), {"audio_projector": ProjectorConfig(row_order=True)}, r"frames have no rows"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_a_remedy(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_a_tower_with_rotary_positions_counts_and_has_a_section():
    config = replace(small_model(PACKED), vision=QWEN)
    layers = {}
    for chunk in vision_language_model(config).split(projector_in="own").chunks:
        layers |= param_specs(chunk)
    assert config.num_params() == sum(leaf.size for leaf in jax.tree.leaves(layers))
    section = encoder_section("vision", QWEN)
    assert (section["kind"], section["overrides"]) == ("qwen", {"global_layers": [1]})
    record, values = encoder_values("vision", section)
    assert record(**values | {"global_layers": (1,)}) == QWEN


@pytest.mark.parametrize("tower", TOWERS)
def test_num_params_counts_what_init_makes(tower):
    config = small_model(TOWERS[tower], AUDIO, qkv_bias=True, qk_norm=True)
    layers = {}
    for chunk in vision_language_model(config).split(projector_in="own").chunks:
        layers |= param_specs(chunk)
    assert config.num_params() == sum(leaf.size for leaf in jax.tree.leaves(layers))
    layer = sum(leaf.size for leaf in jax.tree.leaves(layers["vision.layers.0"]))
    assert config.vision.num_layer_params() == layer


def test_an_audio_encoder_counts():
    with_audio, without = (small_model(INTERN, audio).num_params() for audio in (AUDIO, None))
    projector = small_model(INTERN).audio_projector.num_params(AUDIO.hidden, 24)
    assert with_audio - without == AUDIO.num_params() + projector
