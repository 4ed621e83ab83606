"""Where a model may be cut, and what a wrong cut is told."""

import pytest

from rrfp_jax.models.cuts import balanced_counts, plan_cut


def contents(plans):
    return [plan.title for plan in plans]


@pytest.mark.parametrize(
    ("num_layers", "arguments", "expected"),
    [
        (4, {"num_chunks": 2}, ["embedding, layers 0-1", "layers 2-3, head"]),
        (2, {"num_chunks": 1}, ["embedding, layers 0-1, head"]),
        (3, {"layers_per_chunk": [0, 1, 2, 0]}, ["embedding", "layer 0", "layers 1-2", "head"]),
        (3, {"layers_per_chunk": [2, 1], "num_chunks": 2, "head_in": 1}, ["embedding, layers 0-1", "layer 2, head"]),
        (3, {"layers_per_chunk": (0, 3), "embedding_in": -2}, ["embedding", "layers 0-2, head"]),
        (2, {"layers_per_chunk": [2.0, 0]}, ["embedding, layers 0-1", "head"]),
        (
            4,
            {"layers_per_chunk": [2.5, 1.5]},
            ["embedding, layers 0-1, attention of layer 2", "MLP of layer 2, layer 3, head"],
        ),
        (1, {"layers_per_chunk": [0, 0.5, 0.5, 0]}, ["embedding", "attention of layer 0", "MLP of layer 0", "head"]),
        (
            3,
            {"layers_per_chunk": [0.5, 1, 1.5]},
            [
                "embedding, attention of layer 0",
                "MLP of layer 0, attention of layer 1",
                "MLP of layer 1, layer 2, head",
            ],
        ),
    ],
)
def test_cuts(num_layers, arguments, expected):
    plans = plan_cut(num_layers, **arguments)
    assert contents(plans) == expected
    held = [(layer, plan.part(layer)) for plan in plans for layer in plan.layers]
    parts = {layer: [part for other, part in held if other == layer] for layer, _ in held}
    assert list(parts) == list(range(num_layers))
    assert all(each in ([None], ["attention", "mlp"]) for each in parts.values())


@pytest.mark.parametrize(
    ("num_layers", "arguments", "message"),
    [
        (30, {"num_chunks": 4}, r"^30 layers do not cut into 4 equal chunks: give layers_per_chunk, "
                                r"for example \[8, 8, 7, 7\]$"),
        (3, {"num_chunks": 5}, r"for example \[0, 1, 1, 1, 0\]$"),
        (1, {"num_chunks": 9}, r"cut into 1 to 3 chunks"),
        (4, {"num_chunks": 0}, r"num_chunks is 0: give at least 1"),
        (4, {}, r"give num_chunks or layers_per_chunk"),
        (4, {"layers_per_chunk": [1, 2]}, r"\[1, 2\] sums to 3 but the model has 4 layers: .*\[2, 2\]$"),
        (4, {"layers_per_chunk": []}, r"\[\] sums to 0 but the model has 4 layers: cut into 1 to 6 chunks"),
        (4, {"layers_per_chunk": [5, -1]}, r"negative"),
        (4, {"layers_per_chunk": [2, 2], "num_chunks": 3}, r"names 2 chunks and num_chunks is 3"),
        (4, {"layers_per_chunk": [2, 0, 2]}, r"chunk 1 .* holds no layer, no embedding and no head"),
        (4, {"num_chunks": 2, "embedding_in": 1}, r"embedding_in is chunk 1 but chunk 0 holds layers.*at most 0"),
        (4, {"num_chunks": 2, "head_in": 0}, r"head_in is chunk 0 but chunk 1 holds layers.*at least 1"),
        (4, {"layers_per_chunk": [4, 0], "head_in": 0}, r"chunk 1 .* holds no layer"),
        (4, {"layers_per_chunk": [2.25, 1.75]}, r"^layers_per_chunk \[2.25, 1.75\] has 2.25 layers: give "
                                                r"whole numbers, or halves, which end between attention and MLP$"),
        (4, {"layers_per_chunk": [float("nan"), 4]}, r"has nan layers"),
        (4, {"layers_per_chunk": [2.5, 1]}, r"\[2.5, 1\] sums to 3.5 but the model has 4 layers: .*\[2, 2\]$"),
        (4, {"layers_per_chunk": [2.5, 0, 1.5]}, r"chunk 1 .* holds no layer, no embedding and no head"),
        (4, {"num_chunks": 2, "head_in": 2}, r"head_in is 2 but there are 2 chunks: give -2 to 1"),
    ],
)  # fmt: skip
def test_wrong_cuts_are_refused_with_a_remedy(num_layers, arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_cut(num_layers, **arguments)


def test_every_suggested_cut_is_accepted():
    for num_layers in range(1, 9):
        for num_chunks in range(1, num_layers + 3):
            counts = balanced_counts(num_layers, num_chunks)
            assert len(plan_cut(num_layers, layers_per_chunk=counts)) == num_chunks
            assert max(counts) - min(counts) <= 1
