"""Where a model of L decoder layers is cut into chunks.

A cut is the list of the chunks' contents in order. A chunk may hold no decoder layer as long as it holds the
embedding or the head. All errors are ValueErrors that name the numbers and the remedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """What one chunk holds."""

    layers: range
    """Global numbers of its decoder layers."""
    embedding: bool
    """Whether it reads tokens and holds the embedding."""
    head: bool
    """Whether it holds the final norm and the head and returns the loss."""

    @property
    def title(self) -> str:
        """For tables and errors: ``embedding, layers 0-1``."""
        parts = ["embedding"] if self.embedding else []
        if len(self.layers) == 1:
            parts.append(f"layer {self.layers[0]}")
        elif self.layers:
            parts.append(f"layers {self.layers[0]}-{self.layers[-1]}")
        return ", ".join(parts + ["head"] * self.head)


def plan_cut(
    num_layers: int,
    *,
    num_chunks: int | None = None,
    layers_per_chunk: Sequence[int] | None = None,
    embedding_in: int = 0,
    head_in: int = -1,
) -> list[ChunkPlan]:
    """The contents of every chunk; arguments as in :meth:`rrfp_jax.models.LanguageModel.split`."""
    counts = _layer_counts(num_layers, num_chunks, layers_per_chunk)
    embedding_chunk = _chunk_index("embedding_in", embedding_in, len(counts))
    head_chunk = _chunk_index("head_in", head_in, len(counts))
    starts = [sum(counts[:chunk]) for chunk in range(len(counts))]
    plans = [
        ChunkPlan(layers=range(start, start + count), embedding=chunk == embedding_chunk, head=chunk == head_chunk)
        for chunk, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    _check_order(counts, embedding_chunk, head_chunk)
    _check_none_empty(plans, counts)
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


def _layer_counts(num_layers: int, num_chunks: int | None, layers_per_chunk: Sequence[int] | None) -> list[int]:
    if layers_per_chunk is None:
        return _even_counts(num_layers, num_chunks)
    counts = list(layers_per_chunk)
    if num_chunks is not None and num_chunks != len(counts):
        raise ValueError(
            f"layers_per_chunk {counts} names {len(counts)} chunks and num_chunks is {num_chunks}: "
            "make them agree, or give only one of them"
        )
    if min(counts, default=0) < 0:
        raise ValueError(f"layers_per_chunk {counts} holds a negative count: give 0 or more layers for every chunk")
    if sum(counts) != num_layers:
        raise ValueError(
            f"layers_per_chunk {counts} sums to {sum(counts)} but the model has {num_layers} layers: "
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


def _check_none_empty(plans: list[ChunkPlan], counts: list[int]) -> None:
    for chunk, plan in enumerate(plans):
        if not (plan.layers or plan.embedding or plan.head):
            raise ValueError(
                f"chunk {chunk} of layers_per_chunk {counts} holds no layer, no embedding and no head: "
                "leave it out, or give it a layer"
            )
