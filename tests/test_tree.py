"""The control tree: one root, parents and children that agree, and a depth that grows as the logarithm."""

import pytest

from rrfp_jax.tree import CONTROL_DEGREE, children, parent


@pytest.mark.parametrize("degree", [1, 2, 3, CONTROL_DEGREE, 8])
@pytest.mark.parametrize("num_places", [1, 2, 5, 6, 21, 22, 100])
def test_every_place_but_the_root_has_one_parent_that_knows_it(num_places: int, degree: int) -> None:
    below = [child for place in range(num_places) for child in children(place, num_places, degree)]
    assert below == list(range(1, num_places))
    assert parent(0, degree) is None
    for place in range(num_places):
        assert len(children(place, num_places, degree)) <= degree
        for child in children(place, num_places, degree):
            assert parent(child, degree) == place


def test_the_way_to_the_root_is_short() -> None:
    depth, place = 0, 4095
    while (above := parent(place)) is not None:
        depth, place = depth + 1, above
    assert depth == 6
