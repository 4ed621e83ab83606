"""What a cut costs is what its layers cost."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.costs import CostBook, CostEntry, CutModel, LayerCosts, LinkCosts, ModelCosts, Noise
from rrfp_jax.schedules import linear, v_shaped

LAYER = LayerCosts(
    forward_ms=2.0,
    input_gradient_ms=2.1,
    weight_gradient_ms=1.7,
    backward_ms=3.0,
    fixed_bytes=100,
    stash_bytes=10,
    owed_bytes=4,
    temporaries_bytes=7,
    output_bytes=3,
    gradient_bytes=50,
    update_ms=0.5,
)
HEAD = LayerCosts(forward_ms=9.0, input_gradient_ms=9.0, weight_gradient_ms=9.0, stash_bytes=20, temporaries_bytes=70)


def model(num_layers: int = 6, **more: object) -> ModelCosts:
    return ModelCosts(layers=("layer",) * num_layers + ("head",), types={"layer": LAYER, "head": HEAD}, **more)  # type: ignore[arg-type]


def test_times_and_bytes_are_those_of_the_layers() -> None:
    cut = CutModel(costs=model(), counts=(3, 4), placement=linear(2), num_microbatches=5)
    np.testing.assert_allclose(cut.durations_ms[0, :, 0], [[6.0, 6.3, 5.1], [15.0, 15.3, 14.1]])
    assert cut.durations_ms.shape == (1, 2, 5, 3)
    np.testing.assert_allclose(cut.stage_work_ms, [5 * 17.4, 5 * 44.4])
    first, last = cut.chunk_bytes
    assert (first.fixed, first.stash, first.owed, first.inputs, first.output_grads) == (300, 30, 33, 0, 3)
    assert (last.stash, last.inputs, last.outputs, last.temporaries) == (50, 3, 3, 70)


def test_a_chunk_keeps_its_input_once_and_needs_more_room_for_more_layers() -> None:
    layer = replace(LAYER, kept_bytes=5, more_temporaries_bytes=2)
    costs = ModelCosts(layers=("layer",) * 6 + ("head",), types={"layer": layer, "head": HEAD})
    first, last = CutModel(costs=costs, counts=(4, 3), placement=linear(2), num_microbatches=1).chunk_bytes
    assert (first.stash, first.temporaries) == (45, 15)
    assert (last.stash, last.owed, last.temporaries) == (45, 8, 74)


def test_a_layer_that_makes_its_input_again_keeps_none_of_it() -> None:
    costs = ModelCosts(
        layers=("embedding", "layer", "layer"), types={"embedding": replace(LAYER, remade_bytes=7), "layer": LAYER}
    )
    both, _ = CutModel(costs=costs, counts=(2, 1), placement=linear(2), num_microbatches=1).chunk_bytes
    alone, _ = CutModel(costs=costs, counts=(1, 2), placement=linear(2), num_microbatches=1).chunk_bytes
    assert (both.stash, alone.stash) == (2 * LAYER.stash_bytes - 7, LAYER.stash_bytes)


def test_a_whole_backward_may_take_less_than_its_halves() -> None:
    cut = CutModel(costs=model(), counts=(3, 4), placement=linear(2), num_microbatches=1, split=False)
    np.testing.assert_allclose(cut.durations_ms[0, :, 0, 1:].sum(axis=-1), [9.0, 27.0])
    assert cut.chunk_bytes[0].owed == 0
    assert not cut.graph.split


def test_links_carry_what_chunks_hand_on() -> None:
    costs = model(links=LinkCosts(latency_ms=0.5, gb_per_s=3e-6))
    cut = CutModel(costs=costs, counts=(2, 2, 2, 1), placement=v_shaped(2), num_microbatches=1)
    assert cut.links.extra_ms == {(0, 1): 1.0, (1, 0): 1.0}
    assert cut.links.latency_ms == 0.5


def test_replicas_sum_gradients_of_each_chunk() -> None:
    costs = model(links=LinkCosts(gb_per_s=1e-6))
    cut = CutModel(costs=costs, counts=(3, 4), placement=linear(2), num_microbatches=1, replicas=2)
    assert cut.simulated_costs().reduce_ms == (150.0, 150.0)
    assert cut.simulated_costs().update_ms == (1.5, 1.5)


@pytest.mark.parametrize("counts", [(7, 0), (3, 3), (7,), (8, -1)])
def test_a_cut_loses_no_layer_and_has_no_empty_chunk(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give every chunk at least one, and all of them"):
        CutModel(costs=model(), counts=counts, placement=linear(2), num_microbatches=1)


def test_a_chunk_does_not_pass_an_end() -> None:
    with pytest.raises(ValueError, match="passes the end behind layer 2"):
        CutModel(costs=model(ends=frozenset({2})), counts=(4, 3), placement=linear(2), num_microbatches=1)


def test_a_book_says_which_costs_there_are() -> None:
    book = CostBook(layers=("layer", "head"), entries=(CostEntry(types={"layer": LAYER, "head": HEAD}),))
    assert book.at(microbatch_size=1).num_layers == 2
    with pytest.raises(ValueError, match=r"no costs are known for microbatch size 2.*take one of microbatch size 1"):
        book.at(microbatch_size=2)
    with pytest.raises(ValueError, match="lack the layer type 'head'"):
        CostBook(layers=("layer", "head"), entries=(CostEntry(types={"layer": LAYER}),))


def test_noise_has_mean_1_with_its_tail() -> None:
    noise = Noise(sigma={"F": 0.3, "W": 0.1}, tail=0.1, tail_factor=3.0)
    drawn = noise.draws(np.ones((1, 4, 50, 3)), 200, np.random.default_rng(0))
    np.testing.assert_allclose(drawn.mean(axis=(0, 1, 2)), 1.0, atol=0.02)
    assert len(np.unique(drawn[..., 1].round(9))) == 2  # I has a tail only
    with pytest.raises(ValueError, match="kind 'B'"):
        Noise(sigma={"B": 0.3})
