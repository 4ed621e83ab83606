"""Where a model of L layers is cut into chunks.

A cut is the list of the chunks' contents in order. A chunk may hold no layer as long as it holds one of the model's
ends: the embedding or the head of a decoder, what makes vectors of pictures or what makes features of these. All errors
are ValueErrors that name the numbers and the remedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CutWords(NamedTuple):
    """What the parts of a cut are called."""

    counts: str = "layers_per_chunk"
    """The argument with the number of layers of every chunk."""
    first: str = "embedding"
    """What stands before the first layer."""
    last: str = "head"
    """What stands behind the last one."""


DECODER = CutWords()


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """What one chunk holds."""

    layers: range
    """Global numbers of its layers."""
    embedding: bool
    """Whether it holds what stands before the first layer: in a decoder the embedding, which reads tokens."""
    head: bool
    """Whether it holds what stands behind the last: in a decoder the final norm and the head, which gives the loss."""
    words: CutWords = DECODER
    """What these are called."""

    @property
    def title(self) -> str:
        """For tables and errors: ``embedding, layers 0-1``."""
        parts = [self.words.first] if self.embedding and self.words.first else []
        if len(self.layers) == 1:
            parts.append(f"layer {self.layers[0]}")
        elif self.layers:
            parts.append(f"layers {self.layers[0]}-{self.layers[-1]}")
        return ", ".join(parts + [self.words.last] * bool(self.head and self.words.last))


def plan_cut(
    num_layers: int,
    *,
    num_chunks: int | None = None,
    layers_per_chunk: Sequence[int] | None = None,
    embedding_in: int = 0,
    head_in: int = -1,
    words: CutWords = DECODER,
) -> list[ChunkPlan]:
    """The contents of every chunk; arguments as in :meth:`rrfp_jax.models.LanguageModel.split`."""
    counts = _layer_counts(num_layers, num_chunks, layers_per_chunk, words.counts)
    embedding_chunk = _chunk_index("embedding_in", embedding_in, len(counts))
    head_chunk = _chunk_index("head_in", head_in, len(counts))
    starts = [sum(counts[:chunk]) for chunk in range(len(counts))]
    plans = [
        ChunkPlan(
            layers=range(start, start + count),
            embedding=chunk == embedding_chunk,
            head=chunk == head_chunk,
            words=words,
        )
        for chunk, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    _check_order(counts, embedding_chunk, head_chunk)
    _check_none_empty(plans, counts, words)
    return plans


def balanced_counts(num_layers: int, num_chunks: int) -> list[int]:
    """Layer counts as equal as possible, the larger ones first; sums to ``num_layers``.

    With fewer layers than chunks the inner chunks get them, since the outer ones hold the embedding and the head.
    """
    if num_layers < num_chunks:
        first = min(1, num_chunks - num_layers - 1)
        return [int(first <= chunk < first + num_layers) for chunk in range(num_chunks)]
    share, larger = divmod(num_layers, num_chunks)
    return [share + (chunk < larger) for chunk in range(num_chunks)]


def _layer_counts(
    num_layers: int, num_chunks: int | None, layers_per_chunk: Sequence[int] | None, name: str
) -> list[int]:
    if layers_per_chunk is None:
        return _even_counts(num_layers, num_chunks)
    counts = list(layers_per_chunk)
    if num_chunks is not None and num_chunks != len(counts):
        raise ValueError(
            f"{name} {counts} names {len(counts)} chunks and num_chunks is {num_chunks}: "
            "make them agree, or give only one of them"
        )
    if min(counts, default=0) < 0:
        raise ValueError(f"{name} {counts} holds a negative count: give 0 or more layers for every chunk")
    if sum(counts) != num_layers:
        raise ValueError(
            f"{name} {counts} sums to {sum(counts)} but the model has {num_layers} layers: "
            + _example(num_layers, len(counts), "make the counts add up")
        )
    return counts


def _even_counts(num_layers: int, num_chunks: int | None) -> list[int]:
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


def _example(num_layers: int, num_chunks: int, remedy: str) -> str:
    most = num_layers + 2
    if not 1 <= num_chunks <= most:
        return f"cut into 1 to {most} chunks (every layer, the embedding and the head alone)"
    return f"{remedy}, for example {balanced_counts(num_layers, num_chunks)}"


def _chunk_index(name: str, index: int, num_chunks: int) -> int:
    if not -num_chunks <= index < num_chunks:
        raise ValueError(f"{name} is {index} but there are {num_chunks} chunks: give {-num_chunks} to {num_chunks - 1}")
    return index % num_chunks


def _check_order(counts: list[int], embedding_chunk: int, head_chunk: int) -> None:
    with_layers = [chunk for chunk, count in enumerate(counts) if count]
    first, last = with_layers[0], with_layers[-1]
    if embedding_chunk > first:
        raise ValueError(
            f"embedding_in is chunk {embedding_chunk} but chunk {first} holds layers that need its output: "
            f"give embedding_in at most {first}"
        )
    if head_chunk < last:
        raise ValueError(
            f"head_in is chunk {head_chunk} but chunk {last} holds layers that come before the head: "
            f"give head_in at least {last}"
        )


def _check_none_empty(plans: list[ChunkPlan], counts: list[int], words: CutWords) -> None:
    *parts, last = ["layer", *(end for end in (words.first, words.last) if end)]
    lacks = f"{', '.join(f'no {part}' for part in parts)} and no {last}" if parts else f"no {last}"
    for chunk, plan in enumerate(plans):
        if not (plan.layers or (plan.embedding and words.first) or (plan.head and words.last)):
            raise ValueError(
                f"chunk {chunk} of {words.counts} {counts} holds {lacks}: leave it out, or give it a layer"
            )
