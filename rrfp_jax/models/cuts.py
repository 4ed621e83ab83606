"""How a model is cut: its layers into chunks, its sequences over devices, its matrices over devices. Pure numbers.

Chunks
    A cut is the list of the chunks' contents in order. A chunk may hold no layer as long as it holds one of the model's
    ends: the embedding or the head of a decoder, the first or the last layer of an encoder. It may begin or end inside
    a layer of a decoder, between its attention and its MLP.

Sequences, over the mesh axis ``context``
    Every device holds equally many positions. Under a causal mask late positions attend to more than early ones. So a
    sequence is cut into twice as many pieces as there are devices, and device ``i`` of ``n`` holds the pieces ``i`` and
    ``2 n - 1 - i``, an early one and a late one: all have ``2 n + 1`` pairs of pieces to compute, where pieces in their
    natural order would make the last device compute ``4 n`` pairs' worth (the zig-zag of Llama 3's and of other ring
    attentions). With a sliding window most tokens attend to equally many others anyway, and only near neighbours need
    each other's keys; there positions keep their order as soon as that is less work.

Matrices, over the mesh axes ``tensor`` and ``expert``
    Sizes that do not divide are mostly held whole (:mod:`rrfp_jax.models._tensor_cut`); a size is refused here if the
    devices would repeat nearly all of the work.

All errors are ValueErrors that name the numbers and the remedy. Nothing here imports JAX, so that bad input is refused
before it is loaded.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from math import ceil, floor, sqrt
from typing import NamedTuple

import numpy as np

from rrfp_jax.costs.layer_costs import HALVES
from rrfp_jax.layout import EXPERT, TENSOR
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.vision_config import DECODER, ENCODER, OWN_CHUNK

# -- layers into chunks ------------------------------------------------------------------------------------------------


class CutWords(NamedTuple):
    """Names of the parts of a cut, for titles and errors."""

    counts: str = "layers_per_chunk"
    """The argument with the number of layers of every chunk."""
    first: str = "embedding"
    """The part before the first layer."""
    last: str = "head"
    """The part behind the last layer."""
    has_halves: bool = True
    """Whether a layer may be cut between its attention and its MLP."""


ATTENTION, MLP = HALVES
"""The two parts of a decoder layer: each with its norm, and added to the residual stream."""
_DECODER_WORDS = CutWords()


@dataclass(frozen=True, kw_only=True)
class ChunkContents:
    """The layers and ends of the model that one chunk holds."""

    layers: range
    """Global numbers of its layers, those that it holds a part of among them."""
    embedding: bool
    """Whether it holds the part before the first layer: in a decoder the embedding, which reads tokens."""
    head: bool
    """Whether it holds the part behind the last layer: in a decoder the final norm and the head, which gives the
    loss."""
    words: CutWords = _DECODER_WORDS
    """Names of these parts."""
    begins_inside: bool = False
    """Whether it holds the MLP alone of its first layer."""
    ends_inside: bool = False
    """Whether it holds the attention alone of its last layer."""

    def part(self, layer: int) -> str | None:
        """Returns the part of a layer that it holds, :data:`ATTENTION` or :data:`MLP`; None: the whole layer."""
        if self.begins_inside and layer == self.layers[0]:
            return MLP
        return ATTENTION if self.ends_inside and layer == self.layers[-1] else None

    @property
    def title(self) -> str:
        """The contents in words, for tables and errors: ``embedding, layers 0-1, attention of layer 2``."""
        parts = [self.words.first] if self.embedding and self.words.first else []
        whole = self.layers[self.begins_inside : len(self.layers) - self.ends_inside]
        if self.begins_inside:
            parts.append(f"MLP of layer {self.layers[0]}")
        if len(whole) == 1:
            parts.append(f"layer {whole[0]}")
        elif whole:
            parts.append(f"layers {whole[0]}-{whole[-1]}")
        if self.ends_inside:
            parts.append(f"attention of layer {self.layers[-1]}")
        if self.head and self.words.last:
            parts.append(self.words.last)
        return ", ".join(parts)


def plan_cut(
    num_layers: int,
    *,
    num_chunks: int | None = None,
    layers_per_chunk: Sequence[float] | None = None,
    embedding_in: int = 0,
    head_in: int = -1,
    words: CutWords = _DECODER_WORDS,
) -> list[ChunkContents]:
    """Returns the contents of every chunk; arguments as in :meth:`rrfp_jax.models.LanguageModel.split`."""
    counts = _layer_counts(num_layers, num_chunks, layers_per_chunk, words)
    for name, index in (("embedding_in", embedding_in), ("head_in", head_in)):
        if not -len(counts) <= index < len(counts):
            raise ValueError(
                f"{name} is {index} but there are {len(counts)} chunks: give {-len(counts)} to {len(counts) - 1}"
            )
    # both ends may have chunks of their own, but no layer may lie outside of them
    embedding_chunk, head_chunk = embedding_in % len(counts), head_in % len(counts)
    with_layers = [chunk for chunk, count in enumerate(counts) if count]
    if embedding_chunk > with_layers[0]:
        raise ValueError(
            f"embedding_in is chunk {embedding_chunk} but chunk {with_layers[0]} holds layers that need its output: "
            f"give embedding_in at most {with_layers[0]}"
        )
    if head_chunk < with_layers[-1]:
        raise ValueError(
            f"head_in is chunk {head_chunk} but chunk {with_layers[-1]} holds layers that come before the head: "
            f"give head_in at least {with_layers[-1]}"
        )

    plans, start = [], 0.0
    *parts, last = ["layer", *(end for end in (words.first, words.last) if end)]
    lacks = f"{', '.join(f'no {part}' for part in parts)} and no {last}" if parts else f"no {last}"
    for chunk, count in enumerate(counts):
        embedding, head = chunk == embedding_chunk, chunk == head_chunk
        # an encoder may have no part at an end, so that its outermost chunks are empty too
        if not (count or (embedding and words.first) or (head and words.last)):
            raise ValueError(
                f"chunk {chunk} of {words.counts} {counts} holds {lacks}: leave it out, or give it a layer"
            )
        stop = start + count
        plans.append(
            ChunkContents(
                layers=range(math.floor(start), math.ceil(stop)),
                embedding=embedding,
                head=head,
                words=words,
                begins_inside=start % 1 > 0,
                ends_inside=stop % 1 > 0,
            )
        )
        start = stop
    return plans


def balanced_counts(num_layers: int, num_chunks: int) -> list[int]:
    """Returns layer counts as equal as possible, the larger ones first; they sum to ``num_layers``.

    With fewer layers than chunks the inner chunks get them, since the outer ones hold the embedding and the head.
    """
    if num_layers < num_chunks:
        first = min(1, num_chunks - num_layers - 1)
        return [int(first <= chunk < first + num_layers) for chunk in range(num_chunks)]
    share, larger = divmod(num_layers, num_chunks)
    return [share + (chunk < larger) for chunk in range(num_chunks)]


def _layer_counts(
    num_layers: int, num_chunks: int | None, layers_per_chunk: Sequence[float] | None, words: CutWords
) -> list[float]:
    name = words.counts
    if layers_per_chunk is None:
        if num_chunks is None:
            raise ValueError("the cut is not given: give num_chunks or layers_per_chunk")
        if num_chunks < 1:
            raise ValueError(f"num_chunks is {num_chunks}: give at least 1")
        if num_layers % num_chunks:
            raise ValueError(
                f"{num_layers} layers do not cut into {num_chunks} equal chunks: "
                + _example(num_layers, num_chunks, "give layers_per_chunk")
            )
        return [num_layers // num_chunks] * num_chunks
    counts = [_whole_or_half(count) for count in layers_per_chunk]
    if num_chunks is not None and num_chunks != len(counts):
        raise ValueError(
            f"{name} {counts} names {len(counts)} chunks and num_chunks is {num_chunks}: "
            "make them agree, or give only one of them"
        )
    if min(counts, default=0) < 0:
        raise ValueError(f"{name} {counts} holds a negative count: give 0 or more layers for every chunk")
    if odd := [count for count in counts if count % (0.5 if words.has_halves else 1)]:
        remedy = "or halves, which end between attention and MLP" if words.has_halves else "as no layer is cut here"
        raise ValueError(f"{name} {counts} has {odd[0]} layers: give whole numbers, {remedy}")
    if sum(counts) != num_layers:
        raise ValueError(
            f"{name} {counts} sums to {sum(counts)} but the model has {num_layers} layers: "
            + _example(num_layers, len(counts), "make the counts add up")
        )
    return counts


def _whole_or_half(count: float) -> float:
    """Returns a number of layers as it is written: ``2`` for 2.0."""
    return int(count) if count == count // 1 else count


def _example(num_layers: int, num_chunks: int, remedy: str) -> str:
    most = num_layers + 2
    if not 1 <= num_chunks <= most:
        return f"cut into 1 to {most} chunks (every layer, the embedding and the head alone)"
    return f"{remedy}, for example {balanced_counts(num_layers, num_chunks)}"


# -- sequences over devices --------------------------------------------------------------------------------------------

GATHER, RING, AUTO_CONTEXT = "gather", "ring", "auto"
CONTEXT_ATTENTIONS = (AUTO_CONTEXT, GATHER, RING)
"""How keys and values reach the queries of other devices; see :mod:`rrfp_jax.models._context_attention`."""


@dataclass(frozen=True, kw_only=True)
class ContextCut:
    """The number of devices over which sequences are cut, and how attention works across the cuts."""

    devices: int
    """Size of the mesh axis ``context`` of all stages with decoder layers."""
    attention: str = AUTO_CONTEXT
    """One of :data:`CONTEXT_ATTENTIONS`."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"a context is cut over {self.devices} devices: give at least 1")
        if self.attention not in CONTEXT_ATTENTIONS:
            raise ValueError(f"context_attention is {self.attention!r}: give one of {', '.join(CONTEXT_ATTENTIONS)}")


@dataclass(frozen=True)
class SequenceOrder:
    """The order in which the positions of a sequence lie on the devices, for layers with this sliding window."""

    devices: int
    window: int | None

    def num_hops(self, length: int) -> int:
        """Returns from how many of the devices before it one needs keys, where positions keep their order."""
        reach = length - 1 if self.window is None else self.window - 1
        return min(self.devices - 1, -(-reach // (length // self.devices)))

    def is_balanced(self, length: int) -> bool:
        """Returns whether devices get an early and a late piece; otherwise positions keep their order."""
        if self.devices == 1 or length % (2 * self.devices):
            return False
        return 4 * (self.num_hops(length) + 1) > 2 * self.devices + 1

    def __call__(self, length: int) -> np.ndarray:
        """Returns the natural position of the token at each place, int32 ``[length]``."""
        return _balanced(length, self.devices) if self.is_balanced(length) else np.arange(length, dtype=np.int32)


@lru_cache(maxsize=64)
def _balanced(length: int, devices: int) -> np.ndarray:
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    order = np.concatenate([np.concatenate([pieces[i], pieces[2 * devices - 1 - i]]) for i in range(devices)])
    order.flags.writeable = False  # all callers share the cached array
    return order


def sequence_order(config: LanguageModelConfig, cut: ContextCut | None) -> SequenceOrder | None:
    """Returns the order of a model's positions on the devices, one for all of its layers; None: they are not cut."""
    if cut is None:
        return None
    # global layers have by far the most to compute, so they decide
    return SequenceOrder(cut.devices, config.sliding_window if config.global_layers is None else None)


# -- slices of a sequence ----------------------------------------------------------------------------------------------


def slice_lengths(length: int, num_slices: int, *, attention_share: float = 0.0, multiple: int = 1) -> tuple[int, ...]:
    """Returns the lengths of slices of a causal sequence that take equally long, all but the last one multiples.

    ``attention_share`` is the part of a layer's time that attention takes in the whole sequence; with 0 the slices have
    equal lengths. ``multiple`` is the tile of the attention's kernel, times the devices over which it is cut. Raises
    ValueError for a slice shorter than that.
    """
    if num_slices < 1 or not 0 <= attention_share <= 1:
        raise ValueError(
            f"num_slices is {num_slices} and attention_share {attention_share}: give at least 1, and a part of 0 to 1"
        )
    lengths = _slice_lengths(length, num_slices, attention_share, multiple)
    if num_slices > 1 and min(lengths) < multiple:
        fewer = range(min(num_slices, length // multiple), 1, -1)
        fit = (n for n in fewer if min(_slice_lengths(length, n, attention_share, multiple)) >= multiple)
        raise ValueError(
            f"{num_slices} slices of {length} tokens leave one with {min(lengths)}, and the kernels' tile has "
            f"{multiple}: give at most {next(fit, 1)}, or longer sequences"
        )
    return lengths


@lru_cache(maxsize=64)
def _slice_lengths(length: int, num_slices: int, share: float, multiple: int) -> tuple[int, ...]:
    """Returns the lengths whose longest slice takes least; of these cuts the one nearest to equal times."""
    tiles, near = length / multiple, 1e-9

    def place(part: float) -> float:
        """Returns the tiles before the place at which this part of the work is done."""
        # The root of (1 - a) x + a x² = part, written so that it is exact where attention takes no time.
        return part and 2 * part / (1 - share + sqrt((1 - share) ** 2 + 4 * share * part)) * tiles

    def done(end: int) -> float:
        return (1 - share) * end / length + share * (end / length) ** 2

    def latest(start: int, most: float) -> int:
        """Returns the last place at which a slice may end that begins here and takes at most so much."""
        end = place(done(start) + most) + near
        return length if end >= tiles else floor(end) * multiple

    middles = [round(place(q / num_slices)) * multiple for q in range(1, num_slices)]
    # Rounding alone makes slices up to a tile longer than need be: bisect how much the longest must take.
    low, high = 1 / num_slices, max(done(end) - done(start) for start, end in pairwise([0, *middles, length]))
    for _ in range(40):
        most, end = (low + high) / 2, 0
        for _ in range(num_slices):
            end = latest(end, most)
        low, high = (low, most) if end == length else (most, high)
    high, earliest = high * (1 + near), [length]
    for _ in middles:
        earliest.append(ceil(place(max(0.0, done(earliest[-1]) - high)) - near) * multiple)
    ends = [0]
    for middle, first in zip(middles, reversed(earliest[1:]), strict=True):
        ends.append(min(max(middle, first), latest(ends[-1], high)))
    return tuple(end - start for start, end in pairwise([*ends, length]))


@dataclass(frozen=True)
class SequenceSlices:
    """How every sequence is cut into slices, which pass the chunks one after the other."""

    number: int
    """How many there are."""
    pair_cost: float = 0.0
    """The work of attention for a pair of tokens, in parts of all other work for a token, for slices that take equally
    long. 0: they have equal lengths."""
    multiple: int = 1
    """All lengths but the last are multiples of this: the tile of kernels."""

    def bounds(self, length: int) -> tuple[int, ...]:
        """Returns the position at which each slice of a sequence begins, and the length behind."""
        attention = self.pair_cost * length / 2  # a causal mask leaves half of the pairs
        share = attention / (1 + attention)
        return (0, *accumulate(slice_lengths(length, self.number, attention_share=share, multiple=self.multiple)))


# -- matrices over devices ---------------------------------------------------------------------------------------------


def check_divides(config: LanguageModelConfig, num_shards: int, num_expert_shards: int = 1) -> None:
    """Raises ValueError unless ``num_shards`` devices can share the model's layers and ``num_expert_shards`` its
    experts."""
    check_size("num_heads", config.num_heads, num_shards)
    if config.num_sparse_layers < config.num_layers:
        check_size("mlp_dim", config.mlp_dim, num_shards)
    if config.experts is not None:
        check_size("mlp_dim" if config.experts.mlp_dim is None else "experts.mlp_dim", config.expert_dim, num_shards)
        check_size("experts.shared_mlp_dim", config.experts.shared_mlp_dim or 0, num_shards)
        check_size("experts.num_experts", config.experts.num_experts, num_expert_shards, EXPERT)


def check_size(name: str, size: int, num_shards: int, axis: str = TENSOR) -> None:
    """Raises ValueError unless a size of the model divides over an axis of the mesh."""
    if size % num_shards:
        degree = "tensor degree" if axis == TENSOR else f"degree of {axis}"
        raise ValueError(
            f"{name} {size} does not divide over {axis} {num_shards}: give a {degree} that divides {size}, "
            f"or {name} {size + -size % num_shards}"
        )


# -- chunks as a line of text ------------------------------------------------------------------------------------------

_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_CHUNK = re.compile(r"((?:[A-Za-z<>](?:\*\d{1,5})?)+)(?:@(\d{1,4}))?")
_RUN = re.compile(r"([A-Za-z<>])(?:\*(\d+))?")
_MOST_CHUNKS = 1 << 14
_OF_ENCODER, _SIGNS = "Pv", "<>"


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """The parts of the model that each chunk holds, and the stages of the chunks. All fields None: an even cut.

    Its text is one line in the manner of Megatron's pipeline layouts:

    ``Et*3|t*3|t*2L`` are three chunks: the embedding with three layers, three layers, and two layers with the head. A
    bar ends a chunk, ``t*3`` stands for ``ttt``, and ``(t*3|)*6`` for six equal chunks. ``rrfp plan`` prints this form,
    and ``pipeline.layout`` of a configuration takes it.

    =======  ====================================================
    letter   part of the model
    =======  ====================================================
    ``P``    patches, the part before the encoder's layers
    ``v``    a layer of the encoder
    ``p``    the projector
    ``E``    the embedding
    ``L``    the head, which gives the loss
    ``<``    the attention of a layer of the decoder, at a chunk's end
    ``>``    its MLP, at the beginning of the next chunk
    other    a layer of the decoder; ``t`` where all are of a kind
    =======  ====================================================

    ``Et*3<|>t*2L`` cuts inside layer 3. The encoder's chunks come first. ``@2`` behind a chunk puts it on stage 2;
    without such marks the chunks lie on the stages in turn.
    """

    layers: tuple[float, ...] | None = None
    """Decoder layers of each of the decoder's chunks, with halves where one ends inside a layer."""
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
            layers=_decoder_layers(text, decoder),
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
        begins = [start % 1 > 0 for start in accumulate(self.layers, initial=0.0)]  # and one more, where the last ends
        decoder = [
            "E" * (number == self.embedding_chunk)
            + ">" * begins[number]
            + _times("t", int(count - (begins[number] + begins[number + 1]) / 2))
            + "<" * begins[number + 1]
            + "L" * (number == last)
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


def _decoder_layers(text: str, decoder: list[str]) -> tuple[float, ...]:
    """Returns how many layers each of the decoder's chunks has."""
    counts, is_cut = list[float](), False
    for chunk in [*decoder, ""]:
        layers = "".join(letter for letter in chunk if letter not in "EPLp")
        begins, ends = layers.startswith(">"), layers.endswith("<")
        whole = layers[begins : len(layers) - ends]
        if begins != is_cut or set(whole) & set(_SIGNS):
            raise ValueError(
                f"layout {text!r:.200} has a < or > without the other: end a chunk with <, the attention of a layer, "
                "and begin the next with >, its MLP, as in Et*3<|>t*2L"
            )
        counts.append(_whole_or_half(len(whole) + (begins + ends) / 2))
        is_cut = ends
    return tuple(counts[:-1])


def _encoder_of(text: str, letters: list[str]) -> tuple[int, str]:
    """Returns how many chunks are the encoder's, without a projector of its own, and the projector's place."""
    is_encoder = [bool(set(chunk) & set(_OF_ENCODER)) for chunk in letters]
    num_encoder = sum(is_encoder)
    if not num_encoder:
        if any("p" in chunk for chunk in letters):
            raise ValueError(f"layout {text!r} has a projector and no encoder: begin with P and layers v")
        return 0, ENCODER
    if any(set(chunk) & set(_SIGNS) for chunk in letters[:num_encoder]):
        raise ValueError(f"layout {text!r:.200} cuts a layer of the encoder: < and > are for those of the decoder")
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
