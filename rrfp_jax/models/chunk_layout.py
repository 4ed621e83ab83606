"""A model's cut into chunks as one line of text, in the manner of Megatron's pipeline layouts.

``Et*3|t*3|t*2L`` are three chunks: the embedding with three layers, three layers, and two layers with the head. A bar
ends a chunk, ``t*3`` stands for ``ttt``, and ``(t*3|)*6`` for six equal chunks. ``rrfp plan`` prints this form, and
``pipeline.layout`` of a configuration takes it.

=======  ====================================================
letter   part of the model
=======  ====================================================
``P``    patches, the part before the encoder's layers
``v``    a layer of the encoder
``p``    the projector
``E``    the embedding
``L``    the head, which gives the loss
other    a layer of the decoder; ``t`` where all are of a kind
=======  ====================================================

The encoder's chunks come first. ``@2`` behind a chunk puts it on stage 2; without such marks the chunks lie on the
stages in turn.
"""

import re
from dataclasses import dataclass
from itertools import groupby

from rrfp_jax.models.encoder_config import DECODER, ENCODER, OWN_CHUNK

_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_CHUNK = re.compile(r"((?:[A-Za-z](?:\*\d{1,5})?)+)(?:@(\d{1,4}))?")
_RUN = re.compile(r"([A-Za-z])(?:\*(\d+))?")
_MOST_CHUNKS = 1 << 14
_ENDS, _OF_ENCODER = "EL", "Pv"


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """The parts of the model that each chunk holds, and the stages of the chunks. All fields None: an even cut."""

    layers: tuple[int, ...] | None = None
    """Decoder layers of each of the decoder's chunks."""
    embedding_chunk: int = 0
    """Number, among the decoder's chunks, of the one with the embedding."""
    head_chunk: int = -1
    """Number, among the decoder's chunks, of the one with the head; -1 is the last one."""
    encoder_layers: tuple[int, ...] | None = None
    """Layers of each of the encoder's chunks; None: the model has no encoder, or an even cut."""
    projector_in: str = ENCODER
    """Place of the projector: ``encoder``, ``own`` or ``decoder``."""
    stages: tuple[int, ...] | None = None
    """Stage of every chunk, the encoder's first; None: the chunks lie on the stages in turn."""

    @classmethod
    def parse(cls, text: str) -> "ChunkLayout":
        """Reads a layout. Raises ValueError, in one sentence with the remedy, for text that is none."""
        chunks = [_read_chunk(text, chunk) for chunk in _expanded(text).split("|")]
        letters, marks = [each[0] for each in chunks], [each[1] for each in chunks]
        for letter, part in (("E", "embedding"), ("L", "head")):
            if (count := sum(chunk.count(letter) for chunk in letters)) != 1:
                raise ValueError(f"layout {text!r} has {count} times {letter}, the {part}: give it one")
        if None in marks and any(mark is not None for mark in marks):
            raise ValueError(f"layout {text!r} puts some chunks on stages: mark all of them with @, or none")
        num_encoder, projector_in = _encoder_of(text, letters)
        behind = num_encoder + (projector_in == OWN_CHUNK)
        decoder = letters[behind:]
        heads = next(number for number, chunk in enumerate(decoder) if "L" in chunk)
        return cls(
            layers=tuple(sum(letter not in "EPLp" for letter in chunk) for chunk in decoder),
            embedding_chunk=next(number for number, chunk in enumerate(decoder) if "E" in chunk),
            head_chunk=-1 if heads == len(decoder) - 1 else heads,
            encoder_layers=tuple(chunk.count("v") for chunk in letters[:num_encoder]) if num_encoder else None,
            projector_in=projector_in,
            stages=tuple(mark for mark in marks if mark is not None) or None,
        )

    def __str__(self) -> str:
        """Returns the text that :meth:`parse` reads as the same, with equal chunks written once."""
        assert self.layers is not None
        encoder = ["P" * (not number) + _times("v", count) for number, count in enumerate(self.encoder_layers or ())]
        if encoder and self.projector_in == ENCODER:
            encoder[-1] += "p"
        own = ["p"] if encoder and self.projector_in == OWN_CHUNK else []
        last = self.head_chunk % len(self.layers)
        decoder = [
            "E" * (number == self.embedding_chunk) + _times("t", count) + "L" * (number == last)
            for number, count in enumerate(self.layers)
        ]
        if encoder and self.projector_in == DECODER:
            decoder[0] = "p" + decoder[0]
        chunks = [*encoder, *own, *decoder]
        if self.stages is not None:
            chunks = [f"{chunk}@{stage}" for chunk, stage in zip(chunks, self.stages, strict=True)]
        runs = [(chunk, len(list(run))) for chunk, run in groupby(chunks[:-1])]
        return "".join(f"({chunk}|)*{n}" if n > 2 else f"{chunk}|" * n for chunk, n in runs) + chunks[-1]


def _expanded(text: str) -> str:
    """Returns a layout with ``(t|)*3`` written out."""
    if sum(int(times) for _, times in _GROUP.findall(text)) > _MOST_CHUNKS:
        raise ValueError(f"layout {text!r:.200} has more than {_MOST_CHUNKS} chunks: give fewer")
    return _GROUP.sub(lambda group: group[1] * int(group[2]), text.replace(" ", ""))


def _read_chunk(text: str, chunk: str) -> tuple[str, int | None]:
    """Returns the letters of a chunk, one for each part, and the stage behind ``@``."""
    found = _CHUNK.fullmatch(chunk)
    if found is None:
        raise ValueError(
            f"layout {text!r:.200} has a chunk {chunk!r:.200}: write the letters of its parts, as in Et*3|t*3L, or auto"
        )
    letters = "".join(letter * int(times or 1) for letter, times in _RUN.findall(found[1]))
    return letters, None if found[2] is None else int(found[2])


def _encoder_of(text: str, letters: list[str]) -> tuple[int, str]:
    """Returns how many chunks are the encoder's, without a projector of its own, and the projector's place."""
    is_encoder = [bool(set(chunk) & set(_OF_ENCODER)) for chunk in letters]
    num_encoder = sum(is_encoder)
    if not num_encoder:
        if any("p" in chunk for chunk in letters):
            raise ValueError(f"layout {text!r} has a projector and no encoder: begin with P and layers v")
        return 0, ENCODER
    mixed = [chunk for chunk in letters[:num_encoder] if set(chunk) - set(_OF_ENCODER) - {"p"}]
    if mixed or not all(is_encoder[:num_encoder]) or not letters[0].startswith("P"):
        raise ValueError(f"layout {text!r} mixes encoder and decoder: give the encoder's chunks first, from P to p")
    projectors = [number for number, chunk in enumerate(letters) if "p" in chunk]
    if len(projectors) != 1 or not num_encoder - 1 <= projectors[0] <= num_encoder:
        raise ValueError(f"layout {text!r} has no projector between encoder and decoder: give one p there")
    if projectors[0] < num_encoder:
        return num_encoder, ENCODER
    return num_encoder, OWN_CHUNK if letters[num_encoder] == "p" else DECODER


def _times(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}" if count else ""
