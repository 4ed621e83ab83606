"""What an index leaf that does not fit its pictures is told, before a step."""

import jax
import numpy as np
import pytest

from rrfp_jax.models import check_image_index, vision_language_model
from tests.models.encoder_reference import AUDIO, INTERN, PACKED, make_leaves, small_model

OF_PACKED = small_model(PACKED, AUDIO)


def changed(name, value, at=(0, 0)):
    leaves = make_leaves(OF_PACKED)
    leaves[name][at] = value
    return leaves


@pytest.mark.parametrize("config", [OF_PACKED, small_model(INTERN)])
def test_what_fits_passes(config):
    leaves = make_leaves(config)
    check_image_index(config, leaves)
    of_text = {name: leaves[name] for name in ("tokens", "targets", "weights")}
    check_image_index(config, of_text)
    check_image_index(config, of_text | {"image_index": np.full((2, 10), -1, np.int32)})


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (changed("image_index", 6), r"^image_index of sample 3 names feature 6 but the patches give 6 \(2 x 3\): give "
                                    r"numbers from 0 to 5, and -1 for none$"),
        (changed("image_index", 5), r"feature 5, which is padding: name features whose patch_segments"),
        (changed("audio_index", 3), r"audio_index .* names feature 3 but the frames give 3 \(1 x 3\)"),
        (make_leaves(OF_PACKED) | {"image_index": np.zeros((2, 9), np.int32)}, r"shape \(2, 9\), the tokens \(2, 10\)"),
        ({name: leaf for name, leaf in make_leaves(OF_PACKED).items() if name != "patches"},
         r"image_index .* names feature 4 but there are no patches: give -1 everywhere, or patches"),
        ({name: leaf for name, leaf in make_leaves(OF_PACKED).items() if name != "audio_index"},
         r"audio_index of sample 3 is missing although there are frames"),
        (changed("patch_columns", 4), r"^patch_columns of sample 3 go from 0 to 4, but max_columns is 4: give "
                                      r"numbers from 0 to 3, or a larger max_columns$"),
        (changed("patch_rows", -1), r"^patch_rows of sample 3 go from -1 to 3"),
        (make_leaves(OF_PACKED) | {"patches": np.zeros((1, 10, 12))}, r"features of 4 patches, which do not divide 10"),
    ],
)  # fmt: skip
def test_what_does_not_is_refused_in_one_sentence(leaves, message):
    with pytest.raises(ValueError, match=message):
        check_image_index(OF_PACKED, leaves, "sample 3")


def test_what_is_not_here_is_not_asked_for_its_numbers():
    """Another process has the pixels: their shape alone still says how many features there are."""
    leaves = changed("image_index", 6)
    leaves["patches"] = jax.ShapeDtypeStruct(leaves["patches"].shape, leaves["patches"].dtype)
    leaves |= {name: jax.ShapeDtypeStruct(leaves[name].shape, np.int32) for name in ("patch_segments", "patch_rows")}
    with pytest.raises(ValueError, match=r"names feature 6 but the patches give 6"):
        check_image_index(OF_PACKED, leaves)
    leaves["image_index"] = jax.ShapeDtypeStruct((2, 10), np.int32)
    check_image_index(OF_PACKED, leaves)


def test_the_chunks_that_read_them_ask():
    graph = vision_language_model(OF_PACKED).split(encoder_layers_per_chunk=[1, 2], decoder_layers_per_chunk=[1, 1])
    asking = {chunk.name: chunk.check_leaves for chunk in graph.chunks if chunk.check_leaves is not None}
    assert [number for number, chunk in enumerate(graph.chunks) if chunk.check_leaves is not None] == [
        graph.parts["vision"][0],
        graph.parts["decoder"][0],
    ]
    places, index = asking.values()
    with pytest.raises(ValueError, match="patch_rows of microbatch 7"):
        places(changed("patch_rows", 4), "microbatch 7")
    with pytest.raises(ValueError, match="image_index of microbatch 7"):
        index(changed("image_index", 6), "microbatch 7")
