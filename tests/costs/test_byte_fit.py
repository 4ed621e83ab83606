"""Bytes of layers found again in what chunks of them hold."""

from dataclasses import replace

from rrfp_jax.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.costs.fitting import ChunkParts, fit_bytes, fit_links
from rrfp_jax.schedules import linear

EMBEDDING = ChunkParts(layer="embedding", count=1, fixed=500, gradient=100, stash=2, kept_inputs=0, owed=12, outputs=10)
HEAD = ChunkParts(layer="head", count=1, fixed=600, gradient=110, stash=75, kept_inputs=10, owed=40, outputs=8)


def layers(count: int, *, stash: int = 70, kept: int = 0) -> ChunkParts:
    return ChunkParts(
        layer="layer",
        count=count,
        fixed=1000 * count + 4,
        gradient=250 * count,
        stash=stash * count + kept,
        kept_inputs=kept,
        owed=30 * count,
        outputs=10,
        temporaries={"forward": 50 + 5 * count, "input_gradient": 20 + 9 * count},
        step_temporaries=7,
    )


def test_layers_that_add_up() -> None:
    found = fit_bytes([EMBEDDING, layers(1), layers(3), HEAD])
    assert found["layer"] == {
        "fixed_bytes": 1004,
        "gradient_bytes": 250,
        "owed_bytes": 30,
        "output_bytes": 10,
        "stash_bytes": 70,
        "kept_bytes": 0,
        "step_temporaries_bytes": 7,
        "temporaries_bytes": 46,
        "more_temporaries_bytes": 9,
    }
    assert (found["head"]["stash_bytes"], found["head"]["kept_bytes"]) == (75, 0)


def test_where_layers_are_computed_again_an_end_lasts_as_they_do() -> None:
    parts = [EMBEDDING, layers(1), layers(3), HEAD]
    kept, again = fit_bytes(parts), fit_bytes(parts, recomputes=True)
    assert again["layer"] == kept["layer"]
    alone, more = kept["head"]["temporaries_bytes"], again["head"]["more_temporaries_bytes"]
    assert more == round(alone * 9 / (9 + 46))
    assert again["head"]["temporaries_bytes"] + more == alone


def test_an_input_that_a_chunk_keeps_counts_once() -> None:
    found = fit_bytes([EMBEDDING, layers(1, stash=0, kept=10), layers(3, stash=0, kept=10), HEAD])
    assert (found["layer"]["stash_bytes"], found["layer"]["kept_bytes"]) == (0, 10)
    assert (found["head"]["stash_bytes"], found["head"]["kept_bytes"]) == (65, 10)
    times = {"forward_ms": 1.0, "input_gradient_ms": 1.0, "weight_gradient_ms": 1.0}
    types = {name: LayerCosts(**times, **sizes) for name, sizes in found.items()}
    model = ModelCosts(layers=("embedding", *("layer",) * 5, "head"), types=types)
    cut = CutModel(costs=model, counts=(4, 3), placement=linear(2), num_microbatches=1)
    assert [chunk.stash for chunk in cut.chunk_bytes] == [2, 75]


def test_no_program_needs_more_room_than_is_foreseen() -> None:
    found = fit_bytes([layers(1), layers(3)])["layer"]
    for count in range(1, 9):
        needed = max(layers(count).temporaries.values())
        assert needed <= found["temporaries_bytes"] + count * found["more_temporaries_bytes"]


def test_split_and_whole_backwards_make_one_forecast() -> None:
    whole = [replace(layers(count), owed=0, temporaries={"backward": 400 * count}) for count in (1, 3)]
    found = fit_bytes([layers(1), layers(3), *whole])["layer"]
    assert (found["owed_bytes"], found["more_temporaries_bytes"], found["split_temporaries_bytes"]) == (30, 400, 9)
    costs = LayerCosts(forward_ms=1.0, input_gradient_ms=1.0, weight_gradient_ms=1.0, **found)
    model = ModelCosts(layers=("layer",) * 6, types={"layer": costs})
    for is_split, needed in ((True, max(layers(4).temporaries.values())), (False, 1600)):
        cut = CutModel(costs=model, counts=(2, 4), placement=linear(2), num_microbatches=1, split=is_split)
        assert needed <= cut.chunk_bytes[1].temporaries <= needed + 50
        assert cut.chunk_bytes[0].temporaries >= 800  # whose W does the whole backward


def test_links_of_several_sizes_have_a_latency_and_a_rate() -> None:
    links = fit_links([(1e6, 1.5), (2e6, 2.5), (4e6, 4.5)], control_ms=0.5)
    assert (round(links.latency_ms, 6), round(links.gb_per_s or 0, 6), links.control_ms) == (0.5, 1.0, 0.5)
    assert fit_links([(1e6, 0.7)]).transfer_ms(1e6) == 0.7
    assert fit_links([], control_ms=0.2).latency_ms == 0.2
