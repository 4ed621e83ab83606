"""Operations of layers: against a count by hand, and what training, freezing and packing change."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.costs.flops import (
    Amounts,
    CountedLayer,
    DecoderSizes,
    EncoderSizes,
    Flops,
    ProjectorSizes,
    chunk_flops,
    pairs,
    product,
    step_flops,
)

DECODER = DecoderSizes(hidden=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=20, vocab_size=50)
ENCODER = EncoderSizes(hidden=16, num_layers=5, num_heads=2, mlp_dim=64, patch_dim=12)


def test_a_decoder_layer_is_its_seven_matrices_and_attention() -> None:
    matrices = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 20
    assert DECODER.layer(10, 100) == Flops(2 * 10 * matrices, 4 * 100 * 16)
    assert DECODER.whole(10, 100).forward == 3 * DECODER.layer(10, 100).forward + 2 * 10 * 8 * 50


def test_of_experts_those_count_that_compute_a_token_and_the_router() -> None:
    sparse = replace(DECODER, num_sparse_layers=2, num_experts=16, expert_dims=12)
    attention = DECODER.layer(10, 100).with_parameters - 2 * 10 * 8 * 3 * 20
    layer = sparse.layer(10, 100, is_sparse=True)
    assert layer == Flops(attention + 2 * 10 * 8 * (3 * 12 + 16), 4 * 100 * 16)
    assert sparse.whole(10, 100).forward == 2 * layer.forward + DECODER.layer(10, 100).forward + 2 * 10 * 8 * 50


def test_an_encoder_layer_has_the_usual_form() -> None:
    n, d = 9, 16
    assert ENCODER.layer(n, n * n).forward == 24 * n * d**2 + 4 * n**2 * d
    assert ENCODER.whole(n, n * n).forward == 2 * n * 12 * d + 5 * (24 * n * d**2 + 4 * n**2 * d)


def test_a_layer_counts_what_the_compiler_counts() -> None:
    def layer(x, query, key, value, output, gate, up, down):
        q = (x @ query).reshape(10, 2, 2, 4)
        k, v = ((x @ w).reshape(10, 2, 4) for w in (key, value))
        scores = jnp.einsum("qghd,kgd->ghqk", q, k)
        x = jnp.einsum("ghqk,kgd->qghd", scores, v).reshape(10, 16) @ output
        return ((x @ gate) * (x @ up)) @ down

    shapes = [(10, 8), (8, 16), (8, 8), (8, 8), (16, 8), (8, 20), (8, 20), (20, 8)]
    compiled = jax.jit(layer).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    counted = compiled.cost_analysis()["flops"]
    expected = DECODER.layer(10, 100).forward
    assert expected <= counted <= 1.02 * expected  # it counts the gate's product by element too


def test_training_takes_three_forwards_and_freezing_leaves_out_the_parameters() -> None:
    work = Flops(100.0, 10.0)
    assert work.tasks() == (110, 120, 100)
    assert work.trained == 330
    assert work.tasks(trains=False) == (110, 120, 0)
    assert work.tasks(trains=False, has_backward=False) == (110, 0, 0)


def test_packed_sequences_attend_only_within_themselves() -> None:
    assert pairs([3, 4, 5]) == 50
    packed, alone = DECODER.layer(12, pairs([3, 4, 5])), [DECODER.layer(n, pairs([n])) for n in (3, 4, 5)]
    assert packed == alone[0] + alone[1] + alone[2]


def test_a_projector_is_two_matrices() -> None:
    sizes = ProjectorSizes(in_dim=64, inner_dim=8, out_dim=8)
    assert sizes.whole(7) == product(7, 64, 8) + product(7, 8, 8)


def test_sizes_that_no_layer_has_are_refused() -> None:
    with pytest.raises(ValueError, match="give head_dim"):
        EncoderSizes(hidden=10, num_layers=1, num_heads=3, mlp_dim=4, patch_dim=4)
    with pytest.raises(ValueError, match="mlp_dim is 0: give at least 1"):
        EncoderSizes(hidden=10, num_layers=1, num_heads=2, mlp_dim=0, patch_dim=4)


def test_the_chunks_of_a_microbatch_add_up_to_its_step() -> None:
    layers = [
        CountedLayer(lambda held: ENCODER.layer(held.patches, held.patch_pairs), trains=False, returns_gradient=False),
        CountedLayer(lambda held: ENCODER.layer(held.patches, held.patch_pairs), trains=False),
        *[CountedLayer(lambda held: DECODER.layer(held.tokens, held.pairs))] * 3,
        CountedLayer(lambda held: DECODER.head(held.tokens)),
    ]
    amounts = Amounts(tokens=12, pairs=50, patches=9, patch_pairs=81)
    encoder, first, last = chunk_flops(layers, (2, 1, 3), amounts)
    layer, head = DECODER.layer(12, 50).tasks(), DECODER.head(12).tasks()
    assert encoder == (2 * ENCODER.layer(9, 81).forward, 0, 0)
    assert first == layer
    assert last == tuple(2 * a + b for a, b in zip(layer, head, strict=True))
    assert sum(map(sum, (encoder, first, last))) == step_flops(layers, amounts)
