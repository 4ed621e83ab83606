"""Where the chunks of a schedule lie, and what they feed, where the model does not say so."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rrfp_jax.tasks import (
    PipelineGraph,
    Placement,
    bidirectional,
    chain,
    linear,
    looped,
    opposite_chains,
    v_shaped,
    waves,
)


@dataclass(frozen=True)
class Shape:
    """Placement and graph for numbers of stages, chunks per stage and microbatches."""

    words: str
    placement: Callable[[int, int], Placement]
    """Of stages and chunks per stage."""
    graph: Callable[[int, int, int], PipelineGraph] = lambda p, v, m: chain(p * v, m)
    """Of stages, chunks per stage and microbatches, with a whole backward."""
    chunks_per_stage: int = 2
    """Without the user's word."""
    fixed_chunks: bool = True
    """Whether that is the only number possible."""


def _waves(p: int, v: int) -> Placement:
    if v % 2:
        raise ValueError(f"waves need 2 chunks per stage each, not {v} in all: give chunks_per_stage={v + 1}")
    return waves(p, v // 2)


def place_in_unit(p: int, m: int, microbatch: int) -> tuple[int, bool, int]:
    """(unit of p microbatches, whether it goes up, number within its direction); half of a unit goes each way, and the
    last one of m microbatches may be smaller."""
    unit, place = divmod(microbatch, p)
    half = min(p, m - unit * p) // 2
    return unit, place >= half, place % half


def _check_even(p: int, m: int) -> None:
    for what, number in (("num_stages", p), ("num_microbatches", m)):
        if number % 2:
            raise ValueError(
                f"chimera sends half of the microbatches each way through the same stages, so {what} ({number}) "
                f"must be even: give {what}={number + 1}" + (f" or {number - 1}" if number > 1 else "")
            )


def _two_ways(p: int, _: int, m: int) -> PipelineGraph:
    _check_even(p, m)
    return opposite_chains(p, [i for i in range(m) if not place_in_unit(p, m, i)[1]], m)


def _alternating(p: int, _: int, m: int) -> PipelineGraph:
    _check_even(p, m)
    return opposite_chains(p, range(0, m, 2), m)


ONE_EACH = Shape("one chunk per stage", lambda p, v: linear(p), chunks_per_stage=1)
LOOPED = Shape("looped: chunk c on stage c mod p", looped, fixed_chunks=False)
V = Shape("V: stage s owns chunks s and 2p-1-s", lambda p, v: v_shaped(p))
WAVES = Shape("waves: down and up the stages, chunks_per_stage / 2 times", _waves, fixed_chunks=False)
TWO_WAYS = Shape("two copies of p chunks in opposite directions", lambda p, v: bidirectional(p), _two_ways)
ALTERNATING = replace(TWO_WAYS, graph=_alternating)
"""The same, the microbatches going each way in turn."""
ANY = Shape("looped, one chunk per stage", looped, chunks_per_stage=1, fixed_chunks=False)
"""Of a description that is registered without a shape."""
