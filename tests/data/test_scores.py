"""Exact match and character error rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.data.scores import character_error_rate, edit_distance, exact_match, lines_of

WORD = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("read", "written", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_known_distances(read, written, distance):
    assert edit_distance(read, written) == distance


@given(WORD, WORD, WORD)
def test_it_is_a_distance(one, two, three):
    assert edit_distance(one, two) == edit_distance(two, one) <= max(len(one), len(two))
    assert (edit_distance(one, two) == 0) == (one == two)
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)
    assert abs(len(one) - len(two)) <= edit_distance(one, two)


@given(WORD, st.integers(0, 6), st.sampled_from("abcx"))
def test_one_edit_is_one_edit(word, at, letter):
    assert edit_distance(word, word[:at] + letter + word[at:]) == 1
    if at < len(word):
        assert edit_distance(word, word[:at] + word[at + 1 :]) == 1


def test_rates_are_over_all_words_together():
    assert character_error_rate(["abcd", "x"], ["abcx", "y"]) == pytest.approx(2 / 5)
    assert character_error_rate(["abcd"], ["a"]) == 3
    assert exact_match(["ab", "cd", "ef"], ["ab", "cx", "ef"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="there is nothing to score"):
        exact_match([], [])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        exact_match(["a"], ["a", "b"])


def test_lines_are_taken_from_generated_tokens():
    tokens = np.array(list(b"ab\nc\n\xff"), np.int32)
    assert lines_of(tokens, 2) == ["ab", "c"]
    assert lines_of(tokens, 1) == ["ab"]
    assert lines_of(tokens[:4], 3) == ["ab", "c", ""]
