"""Waves have the bits with which published weights were trained, those of transformers."""

import math

import numpy as np
import pytest

from rrfp_jax.models._decoder import inv_freq
from rrfp_jax.models.config import RopeScaling

# bits of inv_freq as transformers 5.23 computes it on a CPU, by the wave's number
THEIRS = [
    (1e4, 12, None, dict(enumerate([
        1065353216, 1055761980, 1046256949, 1036831949, 1027481237, 1018199494, 1008981770, 999823482, 990720361,
        981668463, 972249692, 962717863]))),
    (1e4, 8, RopeScaling(kind="linear", factor=3.3), dict(enumerate([
        1050355402, 1036271804, 1022901776, 1008533655, 994482188, 981152805, 966713355, 952694404]))),
    (5e5, 64, RopeScaling(factor=8.0), {
        0: 1065353216, 7: 1047774305, 20: 1015523779, 28: 995260192, 30: 984863005, 33: 967045384, 36: 950223245,
        40: 940558584, 50: 915670731, 63: 883213055}),
    (1e6, 64, RopeScaling(kind="yarn", factor=4.0, original_max_positions=32768), {
        0: 1065353216, 7: 1046607925, 20: 1012562930, 28: 988955103, 30: 982221319, 33: 971774312, 36: 960271294,
        40: 943355731, 50: 917259037, 63: 883330636}),
]  # fmt: skip


@pytest.mark.parametrize(("theta", "half", "scaling", "bits"), THEIRS, ids=["plain", "linear", "llama3", "yarn"])
def test_waves_have_the_bits_of_published_weights(theta, half, scaling, bits):
    waves = inv_freq(half, theta, scaling)
    assert waves.dtype == np.float32
    ours = waves.view(np.int32)
    assert {number: int(ours[number]) for number in bits} == bits


@pytest.mark.parametrize("theta", [1e4, 5e5, 12345.678, 5e7])
@pytest.mark.parametrize("half", [1, 7, 64, 128])
def test_waves_are_those_of_the_formula(theta, half):
    exact = np.exp(-np.arange(half) / half * math.log(theta))
    np.testing.assert_allclose(inv_freq(half, theta), exact, rtol=1.5e-7 + 6e-8 * math.log(theta))
