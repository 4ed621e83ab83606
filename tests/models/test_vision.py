"""Pictures that come as bytes become the numbers that they would be as floats."""

from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.data.packing import Grid, places_of
from rrfp_jax.models import VisionConfig, vision_language_model
from rrfp_jax.models.encoder import PixelScale, patch_places
from tests.models.encoder_reference import CLIP, PACKED, make_leaves, small_model

SCALES = [PixelScale((0.5,), (0.5,)), PixelScale((0.48, 0.46, 0.41), (0.27, 0.26, 0.28)), PixelScale((0.4,), (1, 2, 3))]


def normal(patches: np.ndarray, scale: PixelScale) -> np.ndarray:
    """As the pixels of an image file are normalised, channel by channel; float32."""
    pixels = patches.reshape(*patches.shape[:-1], 3, -1).astype(np.float32) / np.float32(255)
    mean, std = (np.array(each, np.float32)[:, None] for each in scale)
    return ((pixels - mean) / std).reshape(patches.shape)


@pytest.mark.parametrize("scale", SCALES)
def test_bytes_are_scaled_on_the_device(scale: PixelScale) -> None:
    patches = np.random.default_rng(0).integers(0, 256, (2, 5, 12), np.uint8)
    patches[0, 0, :2] = 0, 255
    scaled = jax.jit(scale.scaled)(patches)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, normal(patches, scale), rtol=1e-6, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("vision", [CLIP, PACKED], ids=["equal", "packed"])
def test_an_encoder_reads_bytes_as_it_reads_floats(vision: Any) -> None:
    model, scale = small_model(vision), SCALES[1]
    leaves = make_leaves(model)
    bytes_ = np.random.default_rng(1).integers(0, 256, leaves["patches"].shape, np.uint8)
    chunk = vision_language_model(model).split(pixels=scale).chunks[0]
    params = chunk.init(jax.random.key(0))

    def loss(params: Any, patches: Any) -> jax.Array:
        own = {name: leaves[name] for name in chunk.leaves} | {"patches": patches}
        return (chunk.apply(params, None, own, key=None) ** 2).sum()

    by_bytes, by_floats = (
        jax.jit(jax.value_and_grad(loss))(params, patches) for patches in (bytes_, normal(bytes_, scale))
    )
    np.testing.assert_allclose(by_bytes[0], by_floats[0], rtol=1e-6)
    grads, expected = (jax.tree.leaves(each) for _, each in (by_bytes, by_floats))
    largest = max(np.abs(grad).max() for grad in expected)
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, other, rtol=0, atol=2e-6 * largest)


def test_windows_have_ids_of_their_own() -> None:
    grids, window = [[Grid(6, 10), Grid(4, 4), Grid(2, 2)], [Grid(12, 2), Grid(2, 12)]], 4
    leaves = np.zeros((3, 2, 88), np.int32)
    for row, images in enumerate(grids):
        start = 0
        for segment, grid in enumerate(images, 1):
            at = slice(start, start := start + grid.num_patches)
            leaves[0, row, at], leaves[1:, row, at] = segment, places_of(grid, 2)
    config = VisionConfig(hidden=8, num_layers=1, num_heads=2, mlp_dim=8, patch_dim=4, rotary_theta=10.0, window=window)
    found = np.asarray(patch_places(config, *leaves).windows)
    places = np.stack([leaves[0], leaves[1] // window, leaves[2] // window], -1)
    for row in range(2):
        is_same = (places[row, :, None] == places[row]).all(-1)
        assert ((found[row, :, None] == found[row]) == is_same).all()
    assert ((found == 0) == (leaves[0] == 0)).all()
    assert found.max() <= 88


def test_bytes_that_no_scale_is_given_for_are_refused() -> None:
    model = small_model(CLIP)
    leaves = make_leaves(model)
    chunk = vision_language_model(model).split().chunks[0]
    own = {name: leaves[name] for name in chunk.leaves} | {"patches": np.zeros(leaves["patches"].shape, np.uint8)}
    with pytest.raises(ValueError, match="patches are bytes: give them as floats, or say by `pixels`"):
        chunk.apply(chunk.init(jax.random.key(0)), None, own, key=None)
