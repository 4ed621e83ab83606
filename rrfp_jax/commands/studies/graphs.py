"""Which chunks feed which, on which stages: the flags that simulate, emulate and levels share.

Without any of them a schedule makes its own chain. ``--encoders 2,1`` are two encoders, of two chunks and of one, whose
last chunks feed the first chunk of a decoder, each chunk on a stage of its own unless ``--stage-of-chunk`` says
otherwise. A decoder's chunk runs a microbatch without the encoders that the microbatch skips.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rrfp_jax.commands.common.ordering import Ordering
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, linear, schedule_entry
from rrfp_jax.schedules.registry import is_schedule, schedules_of_any_graph


@dataclass(frozen=True, kw_only=True)
class GraphWishes:
    """The options about the graph. Raises ValueError for sizes that no graph has."""

    encoders: tuple[int, ...] = ()
    """Chunks of each encoder."""
    frozen_encoder: bool = False
    frozen_chunks: tuple[int, ...] = ()
    stage_of_chunk: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if any(count < 1 for count in self.encoders):
            raise ValueError(f"encoders {_joined(self.encoders)} have no chunk somewhere: give each at least 1")

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said, so that the schedule makes its own chain."""
        return self == GraphWishes()


class ModelGraph(NamedTuple):
    """A pipeline of encoders and a decoder."""

    graph: PipelineGraph
    placement: Placement
    encoders: tuple[range, ...]
    """The chunks of each encoder; the decoder has all that follow."""

    @property
    def decoder(self) -> range:
        """The chunks of the decoder."""
        return range(self.encoders[-1].stop if self.encoders else 0, self.graph.num_chunks)


def make_graph(wishes: GraphWishes, *, num_stages: int, num_microbatches: int) -> ModelGraph:
    """Returns the graph and placement of these sizes; raises ValueError, with the remedy, where they do not fit."""
    if wishes.frozen_encoder and not wishes.encoders:
        raise ValueError("frozen-encoder freezes encoders, and there is none: give --encoders 1, for example")
    placement = linear(num_stages) if wishes.stage_of_chunk is None else Placement(wishes.stage_of_chunk)
    num_chunks = placement.num_chunks
    if placement.num_stages != num_stages:
        raise ValueError(
            f"stage-of-chunk {_joined(placement.stage_of_chunk)} names {placement.num_stages} stages, num-stages is "
            f"{num_stages}: give both the same number"
        )
    if sum(wishes.encoders) >= num_chunks:
        raise ValueError(
            f"encoders take {sum(wishes.encoders)} of {num_chunks} chunks, which leaves the decoder none: give more "
            "stages, or a --stage-of-chunk with more chunks"
        )
    encoders, first = [], 0
    for count in wishes.encoders:
        encoders.append(range(first, first + count))
        first += count
    edges = [Edge(c, c + 1) for chunks in (*encoders, range(first, num_chunks)) for c in chunks[:-1]]
    edges += [Edge(chunks[-1], first, is_optional=True) for chunks in encoders]
    frozen = frozenset(range(first) if wishes.frozen_encoder else ()) | frozenset(wishes.frozen_chunks)
    graph = PipelineGraph(num_chunks, num_microbatches, tuple(sorted(edges)), frozen=frozen)
    if not any(graph.trains(chunk) for chunk in range(num_chunks)):
        raise ValueError(f"frozen-chunks {_joined(sorted(frozen))} leave nothing to train: leave one of them out")
    return ModelGraph(graph, placement, tuple(encoders))


def check_fits_graph(orderings: Sequence[Ordering], *, has_graph: bool, chunks_per_stage: int | None = None) -> None:
    """Raise ValueError, with the remedy, where schedules make a pipeline of their own and there is one."""
    if not has_graph:
        return
    if chunks_per_stage is not None:
        raise ValueError(
            "chunks-per-stage makes a looped chain, and the graph is given: write --stage-of-chunk, for example "
            "0,1,0,1, in its place"
        )
    for ordering in orderings:
        name = ordering.schedule
        if name is not None and is_schedule(name) and not schedule_entry(name).any_graph:
            raise ValueError(
                f"schedule {name!r} makes a chain of chunks and its own placement, not this graph: take one of "
                f"{', '.join(schedules_of_any_graph())}, or a hint"
            )


def requested_graph(arguments: argparse.Namespace, *, num_microbatches: int) -> ModelGraph | None:
    """Returns the graph of the options; None where they leave it to the schedule. Raises ValueError with the remedy."""
    wishes = parse_graph(arguments)
    if wishes.is_empty:
        return None
    return make_graph(wishes, num_stages=arguments.num_stages, num_microbatches=num_microbatches)


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; :func:`parse_graph` reads them."""
    add = parser.add_argument_group("graph").add_argument
    add(
        "--encoders",
        "--encoder-stages",
        metavar="N|N,N,...",
        help="chunks of each encoder, of which the last feeds the decoder, each on a stage of its own (default: none)",
    )
    add("--frozen-encoder", action="store_true", help="the encoders never change: they run F alone")
    add(
        "--frozen-chunks",
        metavar="C,C,...",
        help="chunks that never change; they pass gradients on to those before them that train (default: none)",
    )
    add("--stage-of-chunk", metavar="S,S,...", help="the stage of every chunk (default: each chunk on its own)")


def parse_graph(arguments: argparse.Namespace) -> GraphWishes:
    """Returns the options about the graph; raises ValueError with the remedy."""
    stages = arguments.stage_of_chunk
    return GraphWishes(
        encoders=_numbers(arguments.encoders, "encoders", "2,1"),
        frozen_encoder=arguments.frozen_encoder,
        frozen_chunks=_numbers(arguments.frozen_chunks, "frozen-chunks", "0,1"),
        stage_of_chunk=None if stages is None else _numbers(stages, "stage-of-chunk", "0,0,1,2"),
    )


def _numbers(text: str | None, flag: str, example: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not made of whole numbers: write for example {example}") from None


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
