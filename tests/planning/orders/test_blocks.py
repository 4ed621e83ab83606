"""Building blocks that nobody has named."""

import pytest

from rrfp_jax.planning.orders.blocks import blocks, try_blocks
from rrfp_jax.planning.orders.found import Pool
from rrfp_jax.planning.orders.problem import problem_of
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear, looped, v_shaped
from tests.planning.orders.cuts import PART, PLACEMENTS, homogeneous


def test_published_blocks_are_among_them() -> None:
    of_v = {block.forwards + block.backs for block in blocks(v_shaped(8))}
    half = (*(2 * i for i in range(8)), *(22 - i for i in reversed(range(8))))
    assert any(block[:16] == half for block in of_v)
    assert list(blocks(linear(4)))
    assert list(blocks(looped(4, 2)))


@pytest.mark.parametrize(("name", "memory", "named"), [("v", 4, "v-min"), ("v", 5, "v-half"), ("waves", 4, "v-min")])
def test_packed_they_are_no_slower_than_the_named_ones_in_their_memory(name: str, memory: int, named: str) -> None:
    p, m = 8, 16
    cut = homogeneous(PLACEMENTS[name](p), m)
    pool = Pool(problem_of(cut, [memory * PART] * p))
    try_blocks(cut, pool, lambda: pool.evaluations < 4)
    plain = homogeneous(v_shaped(p), m)
    rival = Pool(problem_of(plain, [memory * PART] * p))
    table = build_schedule(named, ScheduleRequest(num_stages=p, num_microbatches=m))
    candidate = rival.offer(rival.problem.numbered(table.orders), named)
    assert candidate is not None
    assert pool.best[0].makespan <= candidate.makespan
    assert max(pool.best[0].peak) <= memory * PART


def test_many_microbatches_repeat_the_middle_of_few() -> None:
    cut = homogeneous(PLACEMENTS["v"](4), 40)
    pool = Pool(problem_of(cut, [4 * PART] * 4))
    try_blocks(cut, pool, lambda: pool.evaluations < 12)
    best = pool.found()[0]
    best.table.validate()
    assert best.gap < 0.02
