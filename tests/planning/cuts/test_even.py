"""Even cuts deal layers out evenly and count no ends."""

import pytest

from rrfp_jax.planning.costs import LayerCosts, ModelCosts
from rrfp_jax.planning.cuts import even_cut
from rrfp_jax.schedules import linear, looped, v_shaped

LAYER = LayerCosts(forward_ms=1.0, input_gradient_ms=1.0, weight_gradient_ms=1.0)


def model(names: tuple[str, ...], *ends: int) -> ModelCosts:
    return ModelCosts(layers=names, types=dict.fromkeys(names, LAYER), ends=frozenset(ends))


DECODER = ("embedding", *["layer"] * 10, "head")
WITH_ENCODER = ("patches", *["vision"] * 12, "projector", "embedding", *["layer"] * 16, "head")


@pytest.mark.parametrize(
    ("names", "placement", "counts"),
    [
        (DECODER, linear(5), (3, 2, 2, 2, 3)),
        (DECODER, linear(4), (4, 3, 2, 3)),
        (DECODER, v_shaped(2), (4, 3, 2, 3)),
        (DECODER, linear(1), (12,)),
        (DECODER, linear(11), (2, *[1] * 10)),
        (DECODER, looped(6, 2), (1,) * 12),
        (("layer",) * 7, linear(3), (3, 2, 2)),
        (("one", "two", "three"), linear(2), (2, 1)),
    ],
)
def test_layers_are_dealt_out_evenly(names: tuple[str, ...], placement, counts: tuple[int, ...]) -> None:
    assert even_cut(model(names), placement, 4).counts == counts


def test_parts_get_chunks_by_their_layers() -> None:
    costs = model(WITH_ENCODER, 13)
    assert even_cut(costs, linear(7), 4).counts == (5, 4, 5, 5, 4, 4, 5)
    assert even_cut(costs, linear(2), 4).counts == (14, 18)
    with pytest.raises(ValueError, match="2 parts that share no chunk, and 1 chunks"):
        even_cut(costs, linear(1), 4)


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="12 layers, ends included, do not fill 13 chunks"):
        even_cut(model(DECODER), linear(13), 4)
