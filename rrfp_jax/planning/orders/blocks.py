"""Building blocks, enumerated (Qi et al., controllable memory, arXiv 2405.15362).

A block says in which slot each F and I of one microbatch starts; every so many slots the next microbatch follows. A
slot is the time of any task. From chunk to chunk a microbatch takes 1 to 4 slots: so many where it goes down the stages
and so many where it goes up, other numbers on its way back, some between its last F and its first I, and some where it
turns back on a stage. A block is possible if no two of its passes meet on a stage; what it holds follows from the time
between F and I. V-Half and V-Min are two of them. Each is packed: squeezed in warm-up and drain, W in free slots.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from rrfp_jax.planning.costs import CutModel
from rrfp_jax.planning.orders.found import Pool
from rrfp_jax.planning.orders.problem import Problem, Rows, problem_of
from rrfp_jax.planning.orders.reducing import extended_starts
from rrfp_jax.planning.orders.replay import replay
from rrfp_jax.schedules import Placement, Task, TaskKind
from rrfp_jax.schedules.language.blocks import pack_blocks
from rrfp_jax.schedules.language.stage import Stage
from rrfp_jax.schedules.request import ScheduleRequest

_STEPS = (1, 2, 3, 4)
_TURNS = (1, 2)
_COST = 15
"""Of packing, in evaluations of the same tasks."""


@dataclass(frozen=True)
class Block:
    """Of each chunk the slots in which F and I of microbatch 0 start."""

    forwards: tuple[int, ...]
    backs: tuple[int, ...]
    words: str

    @property
    def held_slots(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """By chunk: from the start of F to the end of a W right behind I."""
        slots: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array(self.backs) - np.array(self.forwards) + 2
        return slots


@lru_cache(maxsize=64)  # every cut on a placement has the same
def blocks(placement: Placement) -> tuple[Block, ...]:
    """All that are possible."""
    return tuple(_blocks(placement))


def _blocks(placement: Placement) -> Iterator[Block]:
    stage_of, period = placement.stage_of_chunk, slots_per_microbatch(placement)
    goes_up = any(b < a for a, b in pairwise(stage_of) if abs(b - a) == 1)
    legs = (_STEPS,) * 4 if goes_up else (_STEPS, (1,), _STEPS, (1,))
    for (down, up, back_up, back_down), gap, turn in product(product(*legs), range(1, period + 1), _TURNS):
        forwards, backs = [0], [0]
        for before, after in pairwise(stage_of):
            is_up = after == before - 1
            forwards.append(forwards[-1] + (1 if after == before else up if is_up else down))
            backs.append(backs[-1] + (turn if after == before else back_up if is_up else back_down))
        # backwards come the same way in reverse, from the last F on
        last = forwards[-1] + gap + backs[-1]
        found = tuple(forwards), tuple(last - back for back in backs)
        if all(_are_apart(chunks, *found, period) for chunks in placement.chunks_of_stage):
            words = f"block of {down} {up} forth and {back_up} {back_down} back, {gap} between, {turn} where it turns"
            yield Block(*found, words)


def _are_apart(chunks: tuple[int, ...], forwards: tuple[int, ...], backs: tuple[int, ...], period: int) -> bool:
    slots = {start[chunk] % period for chunk in chunks for start in (forwards, backs)}
    return len(slots) == 2 * len(chunks)


def slots_per_microbatch(placement: Placement) -> int:
    """F, I and W of each chunk of a stage."""
    return 3 * max(map(len, placement.chunks_of_stage))


def try_blocks(cut: CutModel, pool: Pool, goes_on: Callable[[], bool]) -> None:
    """Pack those that memory has room for, the ones first that use most of it."""
    if not cut.split:
        return
    packer = _Packer(cut, pool.problem)
    fitting = [(share, block) for block in blocks(cut.placement) if (share := _share(pool.problem, block)) <= 1]
    seen = set[float]()
    for share, block in sorted(fitting, key=lambda one: -one[0]):
        if share in seen:
            continue
        if not goes_on():
            return
        seen.add(share)
        pool.count(_COST * packer.slots.num_tasks)
        rows = packer.rows(block)
        if rows is not None:
            pool.offer(rows, block.words)


def _share(problem: Problem, block: Block) -> float:
    """Of its room that the fullest stage needs on average."""
    period, m = slots_per_microbatch(problem.placement), problem.num_microbatches
    held = block.held_slots * np.array([problem.weights[chunk * m] for chunk in range(problem.num_chunks)]) / period
    shares = [
        float(held[list(chunks)].sum()) / room if room > 0 else 2.0
        for room, chunks in zip(problem.room, problem.placement.chunks_of_stage, strict=True)
    ]
    return round(max(shares), 6)


class _Packer:
    """Packs blocks with few microbatches, and repeats their middle for all."""

    def __init__(self, cut: CutModel, problem: Problem) -> None:
        p, m = cut.placement.num_stages, cut.num_microbatches
        self.problem = problem
        self.few = replace(cut, num_microbatches=min(m, 3 * p)) if m > 4 * p else cut
        small = problem_of(self.few)
        self.slots = replace(small, durations=[1] * small.num_tasks, delays=[0] * small.num_tasks, host=0)
        request = ScheduleRequest(num_stages=p, num_microbatches=self.few.num_microbatches)
        self.stage = Stage(0, cut.placement, self.few.graph, request)

    def rows(self, block: Block) -> Rows | None:
        """None where they would deadlock."""
        period = slots_per_microbatch(self.few.placement)
        few = self.few.num_microbatches
        starts: list[dict[Task, float]] = [
            {
                Task(kind, chunk, m): first[chunk] + period * m
                for chunk in chunks
                for kind, first in ((TaskKind.F, block.forwards), (TaskKind.I, block.backs))
                for m in range(few)
            }
            for chunks in self.few.placement.chunks_of_stage
        ]
        rows = self.slots.numbered(pack_blocks(self.stage, starts))
        if few == self.problem.num_microbatches:
            return rows
        run = replay(self.slots, rows)
        if run is None:
            return None
        times = extended_starts(np.array(run.starts, np.float64), few, self.problem, period).tolist()
        all_rows: Rows = [[] for _ in rows]
        for task in sorted(range(self.problem.num_tasks), key=times.__getitem__):
            all_rows[self.problem.stages[task]].append(task)
        return all_rows
