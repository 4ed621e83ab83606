"""Long texts are cut where tokenizers cut anyway, at places that depend on the text alone."""

import pytest

from rrfp_jax.data import _documents
from rrfp_jax.data._documents import cut_near, cut_text, segments

PROSE = "".join(f"Line {n} of it, süß.\n\n  and more\nof that\t\n" for n in range(60))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_documents, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(_documents, "_NEAR_BYTES", 48)


def read_from(data):
    return lambda start, size: data[start : start + size]


@pytest.mark.parametrize(
    ("text", "position", "place"),
    [
        ("one two\nthree four\nfive", 4, 8),
        ("one two\nthree four\nfive", 8, 8),
        ("one two\nthree four\nfive", 9, 19),
        ("one\n\ntwo\n three\nfour", 1, 16),
        ("one\n\ntwo", 1, 5),
        ("one two three", 5, 7),
        ("ööööö", 3, 4),
        ("one", 0, 0),
        ("one", 3, 3),
        ("one", 9, 3),
    ],
)
def test_the_place_is_the_best_one_near(text, position, place):
    data = text.encode()
    assert cut_near(read_from(data), position, len(data)) == place


@pytest.mark.parametrize("text", [PROSE, "ß" * 500, "x" * 500, "a b " * 200, "\n" * 300, "𝄞" * 17])
def test_parts_make_the_text_whatever_it_is(text):
    assert "".join(cut_text(text)) == text
    data = text.encode()
    for step in (64, 128, 320):
        cuts = [
            part
            for start in range(0, len(data), step)
            for part in segments(read_from(data), start, min(start + step, len(data)), len(data))
        ]
        assert b"".join(part for _, part in cuts) == data
        assert [begin for begin, _ in cuts] == [sum(len(part) for _, part in cuts[:n]) for n in range(len(cuts))]
        assert all(part.decode() for _, part in cuts)


def test_a_byte_level_tokenizer_makes_the_same_tokens_of_the_parts(byte_level):
    assert len(cut_text(PROSE)) > 10
    apart = [number for part in cut_text(PROSE) for number in byte_level.encode(part).ids]
    assert apart == byte_level.encode(PROSE).ids
