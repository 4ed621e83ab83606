"""Where a sequence is cut into slices that take equally long, against the best cut of all."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, product

import pytest

from rrfp_jax.models.cuts import SequenceSlices, slice_lengths

SHARES = (0.0, 0.05, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0)


def best_cut(costs: Sequence[float], number: int) -> tuple[float, list[tuple[int, int]]]:
    """The least time of the longest slice, and for every end but the last the places where such a cut may have it.

    ``costs`` has the time of the tokens before each place."""
    length = len(costs) - 1
    longest = list(costs)
    for q in range(2, number + 1):
        longest = [
            min((max(longest[k], costs[end] - costs[k]) for k in range(q - 1, end)), default=float("inf"))
            for end in range(length + 1)
        ]
    limit, latest, earliest = longest[length] + 1e-12, [0], [length]
    for _ in range(number - 1):
        latest.append(max(end for end in range(length + 1) if costs[end] - costs[latest[-1]] <= limit))
        earliest.append(min(end for end in range(length + 1) if costs[earliest[-1]] - costs[end] <= limit))
    return limit, list(zip(reversed(earliest[1:]), latest[1:], strict=True))


@pytest.mark.parametrize(
    ("length", "number"), [(24, 2), (31, 3), (64, 4), (97, 6), (128, 8), (101, 10), (160, 12), (200, 16)]
)
def test_a_cut_is_the_best_or_within_a_token_of_it(length: int, number: int) -> None:
    for share, is_triangle in product(SHARES, (False, True)):
        pairs = [n * (n + is_triangle) for n in range(length + 1)]
        costs = [(1 - share) * n / length + share * pairs[n] / pairs[-1] for n in range(length + 1)]
        limit, places = best_cut(costs, number)
        bounds = [*accumulate(slice_lengths(length, number, attention_share=share), initial=0)]
        assert all(low - 1 <= end <= high + 1 for end, (low, high) in zip(bounds[1:-1], places, strict=True))
        longest = max(costs[end] - costs[start] for start, end in pairwise(bounds))
        # Pairs are counted as the square of tokens: where a token looks at itself too, that is nearly so.
        assert longest <= limit + is_triangle * max(b - a for a, b in pairwise(costs))
        assert is_triangle or all(low <= end <= high for end, (low, high) in zip(bounds[1:-1], places, strict=True))


def test_a_cut_is_rounded_to_tiles_and_the_last_slice_has_the_rest() -> None:
    assert slice_lengths(8192, 4, attention_share=0.5, multiple=128) == (3072, 2048, 1664, 1408)
    assert slice_lengths(1000, 4, multiple=128) == (256, 256, 256, 232)
    assert slice_lengths(100, 1, attention_share=0.5, multiple=128) == (100,)
    assert SequenceSlices(4, multiple=128).bounds(8192) == (0, 2048, 4096, 6144, 8192)


def test_attentions_share_grows_with_the_sequence() -> None:
    """At this length half of a token's time goes to the pairs that a causal mask leaves."""
    assert SequenceSlices(4, pair_cost=2 / 8192, multiple=128).bounds(8192) == (0, 3072, 5120, 6784, 8192)
    shares = [SequenceSlices(2, pair_cost=2 / 8192).bounds(length)[1] / length for length in (1024, 8192, 65536)]
    assert shares == sorted(shares)


def test_slices_below_a_tile_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^8 slices of 1000 tokens leave one with 104, .* 128: give at most 4, or longer"
    ):
        slice_lengths(1000, 8, attention_share=0.3, multiple=128)
    with pytest.raises(ValueError, match=r"^2 slices of 100 tokens .* give at most 1, or longer sequences"):
        slice_lengths(100, 2, multiple=128)
    for number, share in ((0, 0.5), (2, 1.5)):
        with pytest.raises(ValueError, match=f"num_slices is {number} and attention_share {share}: give at least 1"):
            slice_lengths(100, number, attention_share=share)
