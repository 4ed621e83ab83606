"""Which chunks a microbatch skips, and which leaves it may lack."""

from typing import Any

import pytest

from rrfp_jax.programs.batches import absent_chunks, leaves_to_lack
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import Edge, PipelineGraph


def nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("only leaves and edges count here")


def reads(*leaves: str, optional: tuple[str, ...] = ()) -> Chunk:
    return Chunk(
        name="-", init=nothing, apply=nothing, leaves=(*leaves, *optional), optional_leaves=frozenset(optional)
    )


def graph(*edges: Edge) -> PipelineGraph:
    return PipelineGraph(1 + max(edge.target for edge in edges), 1, edges)


ENCODER = graph(Edge(0, 1), Edge(1, 2, is_optional=True))


def test_an_encoder_may_lack_what_only_a_later_chunk_of_it_reads() -> None:
    chunks = [reads("patches"), reads("segments"), reads("tokens", optional=("index",))]
    assert leaves_to_lack(chunks, ENCODER) == {"patches", "segments", "index"}
    assert absent_chunks(chunks, ENCODER, ["tokens"]) == {0, 1}
    with pytest.raises(ValueError, match="nothing follows chunk 0"):
        absent_chunks(chunks, ENCODER, ["tokens", "patches"])


def test_a_leaf_that_the_last_chunk_reads_too_is_needed() -> None:
    chunks = [reads("patches"), reads("segments"), reads("tokens", "segments")]
    assert leaves_to_lack(chunks, ENCODER) == {"patches"}
    assert not leaves_to_lack([reads("tokens"), reads("segments"), reads("tokens")], ENCODER)


def test_a_chunk_without_leaves_cannot_be_skipped_by_lacking_any() -> None:
    assert not leaves_to_lack([reads(), reads("segments"), reads("tokens")], ENCODER)
