"""Keys follow from seed, step and microbatch alone."""

import jax
import numpy as np
import pytest

from rrfp_jax.programs.chunk import counters, microbatch_key


def test_equal_bits_inside_and_outside_of_jit() -> None:
    numbers = counters(2**32 - 1, 5, 7)
    inside = jax.jit(lambda n: jax.random.bits(microbatch_key(n[0], n[1], n[2]), (4,)))(numbers)
    np.testing.assert_array_equal(inside, jax.random.bits(microbatch_key(*numbers), (4,)))


def test_every_number_matters() -> None:
    cases = [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3), (1, 3, 2)]
    assert len({int(jax.random.bits(microbatch_key(*counters(*case)))) for case in cases}) == len(cases)


def test_numbers_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        counters(0, 2**32, 0)
