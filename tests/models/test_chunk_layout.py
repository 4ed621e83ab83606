"""Layouts of chunks as text: what is read is written as the same, and bad text is refused in one sentence."""

import pytest

from rrfp_jax.models.cuts import ChunkLayout


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("Et*3|t*3|t*2L", ChunkLayout(layers=(3, 3, 2))),
        ("E|(t*2|)*3L", ChunkLayout(layers=(0, 2, 2, 2, 0))),
        ("EtL", ChunkLayout(layers=(1,))),
        ("Et@0|t@1|t@1|tL@0", ChunkLayout(layers=(1, 1, 1, 1), stages=(0, 1, 1, 0))),
        ("Pv*16|v*16p|Et*5|t*4L", ChunkLayout(layers=(5, 4), encoder_layers=(16, 16))),
        ("Pv|p|Et|tL", ChunkLayout(layers=(1, 1), encoder_layers=(1,), projector_in="own")),
        ("Pv|pEt|tL", ChunkLayout(layers=(1, 1), encoder_layers=(1,), projector_in="decoder")),
        ("t|Et|tL", ChunkLayout(layers=(1, 1, 1), embedding_chunk=1)),
        ("Et|tL|t", ChunkLayout(layers=(1, 1, 1), head_chunk=1)),
        ("Et*3<|>t*2L", ChunkLayout(layers=(3.5, 2.5))),
        ("E<|>L", ChunkLayout(layers=(0.5, 0.5))),
        ("E|<|(>t<|)*3><|>|L", ChunkLayout(layers=(0, 0.5, 2, 2, 2, 1, 0.5, 0))),
        ("Pv@0|vp@1|Et<@0|>tL@1", ChunkLayout(layers=(1.5, 1.5), encoder_layers=(1, 1), stages=(0, 1, 0, 1))),
    ],
)
def test_a_layout_is_written_as_it_was_read(text: str, layout: ChunkLayout) -> None:
    assert ChunkLayout.parse(text) == layout
    assert ChunkLayout.parse(str(layout)) == layout
    assert str(layout) == text


def test_letters_of_other_decoder_layers_count_as_layers() -> None:
    assert ChunkLayout.parse("Et*2s|sstL").layers == (3, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t|t", "has 0 times E, the embedding: give it one"),
        ("Et|L|L", "has 2 times L, the head: give it one"),
        ("4,4", "has a chunk '4,4': write the letters of its parts, as in Et.3.t.3L, or auto"),
        ("Et|tL|", "has a chunk ''"),
        ("Et@0|tL", "mark all of them with @, or none"),
        ("pEt|tL", "has a projector and no encoder"),
        ("Pv|Et|tL", "has no projector between encoder and decoder"),
        ("Pvp|Et|vtL", "mixes encoder and decoder"),
        ("Et<|tL", "has a < or > without the other: end a chunk with <, the attention of a layer, and begin the next"),
        ("Et<|L", "has a < or > without the other"),
        ("Et|>tL", "has a < or > without the other"),
        ("Et<t|>tL", "has a < or > without the other"),
        ("E<>|tL", "has a < or > without the other"),
        ("Et<*2|>tL", "has a < or > without the other"),
        ("Et>|<tL", "has a < or > without the other"),
        ("Et|tL<", "has a < or > without the other"),
        ("Pv<|>vp|EtL", "cuts a layer of the encoder: < and > are for those of the decoder"),
        ("Et|(t|)*9999(t|)*9999L", "more than 16384 chunks"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkLayout.parse(text)
