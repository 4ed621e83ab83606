"""A cut as a line of text."""

import pytest

from rrfp_jax.planning.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.planning.cut_words import cut_in_words, legend, letters_of
from rrfp_jax.schedules import linear, looped

COSTS = LayerCosts(forward_ms=1, input_gradient_ms=1, weight_gradient_ms=1)


def cut_of(layers: list[str], *counts: int, stages: int | None = None) -> CutModel:
    placement = linear(len(counts)) if stages is None else looped(stages, len(counts) // stages)
    costs = ModelCosts(layers=tuple(layers), types=dict.fromkeys(layers, COSTS))
    return CutModel(costs=costs, counts=counts, placement=placement, num_microbatches=4)


LANGUAGE = ["embedding", *["layer"] * 18, "head"]


@pytest.mark.parametrize(
    ("counts", "words", "short"),
    [
        ((7, 6, 7), "Et*6|t*6|t*6L", "Et*6|t*6|t*6L"),
        ((1, 18, 1), "E|t*18|L", "E|t*18|L"),
        ((2, 4, 4, 4, 6), "Et|t*4|t*4|t*4|t*5L", "Et|(t*4|)*3t*5L"),
        ((20,), "Et*18L", "Et*18L"),
    ],
)
def test_every_chunk_tells_its_layers(counts, words, short):
    cut = cut_of(LANGUAGE, *counts)
    assert cut_in_words(cut) == words
    assert cut_in_words(cut, short=True) == short


def test_chunks_stand_in_the_models_order_wherever_they_lie():
    assert cut_in_words(cut_of(["x"] * 8, 2, 2, 2, 2, stages=2), short=True) == "(t*2|)*3t*2"


def test_types_get_letters_of_their_own():
    layers = ["vision_encoder", "projector", "embedding", "decoder", "lm_head"]
    assert "".join(letters_of(layers).values()) == "vpEtL"
    mixed = ["embedding", "local", "global", "global", "tail", "head"]
    assert letters_of(mixed) == {"embedding": "E", "local": "l", "global": "t", "tail": "a", "head": "L"}
    assert legend(cut_of(mixed, 3, 3)) == "E: embedding, l: local, t: global, a: tail, L: head"
    assert cut_in_words(cut_of(mixed, 3, 3)) == "Elt|taL"
