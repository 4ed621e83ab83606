"""Rows of a token set: where they begin, what lies in them, and that parts have nothing in common."""

import numpy as np
import pytest

from rrfp_jax.data import token_data as module
from rrfp_jax.data.config import TokensConfig
from rrfp_jax.data.token_data import row_index, token_rows
from tests.data.token_sets import token_set

LENGTH = 11
LENGTHS = [3, 5, 40, 1, 0, 7, 21, 22, 23, 9, 9, 2, *np.random.default_rng(1).integers(0, 30, size=60).tolist()]


@pytest.fixture
def tokens(tmp_path):
    return token_set(tmp_path / "set", LENGTHS)


def config(tokens, **changes):
    values = {"length": LENGTH, "batch_size": 4, "num_microbatches": 2, "held_out": 0.3}
    return TokensConfig(path=(str(tokens.path),), **(values | changes))


def starts_one_by_one(tokens, first, stop):
    """By the rule: a row takes all whole documents that fit, or as much of a long one as fits."""
    ends = [tokens.document(number)[1] for number in range(first, stop)]
    starts = [tokens.document(first)[0]]
    while starts[-1] < ends[-1]:
        fitting = [end for end in ends if starts[-1] < end <= starts[-1] + LENGTH]
        starts.append(max(fitting, default=starts[-1] + LENGTH))
    return starts


@pytest.mark.parametrize("block", [1 << 18, 23])
def test_packed_rows_hold_as_many_whole_documents_as_fit(tokens, monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    for first, stop in ((0, tokens.num_documents), (3, 50), (2, 3)):
        starts, documents = row_index(tokens, LENGTH, first, stop)
        assert starts.tolist() == starts_one_by_one(tokens, first, stop)
        assert documents.tolist() == [*map(tokens.document_at, starts[:-1].tolist()), stop]


def test_packed_rows_are_the_text_with_positions_and_segments_by_document(tokens):
    text = tokens.tokens(0, tokens.num_tokens).astype(int)
    bounds = {0, *(tokens.document(number)[1] for number in range(tokens.num_documents))}
    seen = []
    for part in ("train", "held_out"):
        rows = token_rows(tokens, config(tokens, pack=True), part)
        numbers = np.arange(rows.num)
        content, layouts = rows.tokens(numbers), rows.layouts(numbers)
        for number in numbers:
            segment = position = 0
            for place in range(LENGTH):
                if not layouts["segments"][number, place]:
                    assert not any(leaf[number, place] for leaf in layouts.values())
                    assert not content[number, place:].any()
                    continue
                at = len(seen)
                is_new = not place or at in bounds
                segment, position = segment + is_new, 0 if is_new else position + 1
                assert content[number, place] == text[at]
                assert (layouts["segments"][number, place], layouts["positions"][number, place]) == (segment, position)
                assert layouts["weights"][number, place] == (at + 1 not in bounds)
                if at + 1 not in bounds:
                    assert content[number, place + 1] == text[at + 1]
                seen.append(at)
        assert len(seen) in bounds  # parts are whole documents
    assert len(seen) == tokens.num_tokens


def test_windows_follow_each_other_and_those_held_out_share_no_token_with_the_others(tokens):
    text = tokens.tokens(0, tokens.num_tokens).astype(int).tolist()
    train, held_out = (token_rows(tokens, config(tokens), part) for part in ("train", "held_out"))
    (weights,) = train.layouts(np.arange(2)).values()
    assert weights.tolist() == [[1.0] * LENGTH] * 2
    windows = train.tokens(np.arange(train.num))
    for number, window in enumerate(windows.tolist()):
        assert window == text[number * LENGTH : (number + 1) * LENGTH + 1]
    first = train.num * LENGTH + 1
    others = held_out.tokens(np.arange(held_out.num)).tolist()
    assert others[0] == text[first : first + LENGTH + 1]
    assert others[-1] == text[first + (held_out.num - 1) * LENGTH :][: LENGTH + 1]
    assert train.num + held_out.num in (len(text) // LENGTH, len(text) // LENGTH - 1)
    assert held_out.num / train.num == pytest.approx(3 / 7, rel=0.1)


@pytest.mark.parametrize("pack", [False, True])
def test_a_set_without_a_row_is_refused(tmp_path, pack):
    small = token_set(tmp_path / "small", [7])
    changes = {"pack": pack, "length": 11 if not pack else 8}
    if not pack:
        with pytest.raises(ValueError, match=r"8 tokens in 1 documents, not enough for a row of 11: give more text"):
            token_rows(small, config(small, held_out=0, **changes), "train")
    with pytest.raises(ValueError, match=r"with held_out 0.5 not one row of .* give more text, another held_out"):
        token_rows(small, config(small, **(changes | {"held_out": 0.5})), "held_out")
    for fraction in (0, 0.5):
        with pytest.raises(ValueError, match=r"8 tokens in 1 documents, not enough for a row of 99: give more text"):
            token_rows(small, config(small, **(changes | {"held_out": fraction, "length": 99})), "train")
    with pytest.raises(ValueError, match="held_out is 0, so nothing is kept"):
        token_rows(small, config(small, held_out=0, **changes), "held_out")
