"""Placements: which stage owns which chunk."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from rrfp_jax.bounded_text import shown
from rrfp_jax.field_rules import MOST, check_types, typed

_MOST_TOLD = 8


@dataclass(frozen=True)
class Placement:
    """Which stage owns which chunk.

    ``stage_of_chunk[c]`` is the stage of chunk ``c``. Every stage from 0 to the largest one owns at least one chunk.
    """

    stage_of_chunk: tuple[int, ...]

    def __post_init__(self) -> None:
        check_types(self)
        if not self.stage_of_chunk:
            raise ValueError("a placement needs at least one chunk")
        if min(self.stage_of_chunk) < 0:
            raise ValueError(
                f"placement {shown(self.stage_of_chunk)} has a stage below 0: number the stages from 0 without gaps"
            )
        used = set(self.stage_of_chunk)
        gaps = (stage for stage in range(self.num_stages) if stage not in used)
        unused = list(islice(gaps, _MOST_TOLD))  # only a few: the largest number may be any
        if unused:
            raise ValueError(
                f"placement {shown(self.stage_of_chunk)} leaves stages {unused} without a chunk: "
                "number the stages from 0 without gaps"
            )

    @property
    def num_chunks(self) -> int:
        return len(self.stage_of_chunk)

    @cached_property
    def num_stages(self) -> int:
        return max(self.stage_of_chunk) + 1

    @cached_property
    def chunks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each stage, ascending."""
        chunks: list[list[int]] = [[] for _ in range(self.num_stages)]
        for chunk, stage in enumerate(self.stage_of_chunk):
            chunks[stage].append(chunk)
        return tuple(map(tuple, chunks))


@typed
def linear(num_stages: int) -> Placement:
    """Returns the placement with one chunk per stage, in order."""
    return looped(num_stages, chunks_per_stage=1)


@typed
def looped(num_stages: int, chunks_per_stage: int) -> Placement:
    """Returns the interleaved placement: chunk ``c`` on stage ``c mod num_stages``."""
    _check_sizes(num_stages, "chunks_per_stage", chunks_per_stage)
    return Placement(tuple(range(num_stages)) * chunks_per_stage)


@typed
def v_shaped(num_stages: int) -> Placement:
    """Returns two chunks per stage, down and back up: chunks ``c`` and ``2 * num_stages - 1 - c`` share a stage."""
    return waves(num_stages, num_waves=1)


@typed
def waves(num_stages: int, num_waves: int) -> Placement:
    """Returns ``2 * num_waves`` chunks per stage, zigzag: down the stages, back up, down again (Hanayo, SC'23)."""
    _check_sizes(num_stages, "num_waves", num_waves)
    down = tuple(range(num_stages))
    return Placement((down + down[::-1]) * num_waves)


@typed
def bidirectional(num_stages: int) -> Placement:
    """Returns the placement of two copies of the model in opposite directions (Chimera, SC'21).

    Chunks ``0..num_stages-1`` go down the stages; their copies ``num_stages..2*num_stages-1`` go up.
    """
    return v_shaped(num_stages)


def _check_sizes(num_stages: int, name: str, number: int) -> None:
    if num_stages < 1 or number < 1:
        raise ValueError(f"num_stages ({num_stages}) and {name} ({number}) must both be at least 1")
    if num_stages * number > MOST:
        raise ValueError(f"num_stages ({num_stages}) and {name} ({number}) multiply to more than {MOST:,} chunks")
