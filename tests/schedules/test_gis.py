"""GIS: the published figure, tables by hand, which groups are possible, and what they cost."""

import pytest

from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, chain, looped, to_csv
from rrfp_jax.schedules.language import Stage
from rrfp_jax.schedules.published import gis_group_size, gis_order
from rrfp_jax.schedules.slots import EQUAL, execute, per_stage


def table(p: int, m: int, v: int, size: int) -> ScheduleTable:
    """As the rows are, valid or not."""
    placement, graph = looped(p, v), chain(p * v, m, split=True)
    stages = (Stage(i, placement, graph, ScheduleRequest(num_stages=p, num_microbatches=m)) for i in range(p))
    return ScheduleTable.from_orders("gis", placement, graph, [gis_order(s, size).on(s) for s in stages])


def bubble(rows: ScheduleTable) -> float:
    """In passes of a chunk with F = I = W."""
    work = 3 * rows.graph.num_microbatches * len(rows.placement.chunks_of_stage[0])
    return execute(rows).timeline.sums().cost_s - work


def test_the_smallest_groups_by_hand() -> None:
    """2 stages, groups of 1: stage 0 warms up with 1 + 2 forwards, and may hold 3 chunk passes; stage 1 with 1 + 1."""
    rows = build_schedule("gis", ScheduleRequest(num_stages=2, num_microbatches=3))
    assert to_csv(rows) == (
        "0F0,2F0,0F1,2I0,2W0,2F1,0I0,0W0,0F2,2I1,2W1,2F2,0I1,0W1,2I2,2W2,0I2,0W2\n"
        "1F0,3F0,3I0,3W0,1F1,1I0,1W0,3F1,3I1,3W1,1F2,1I1,1W1,3F2,3I2,3W2,1I2,1W2\n"
    )
    assert rows.peak_activations() == (3 / 2, 2 / 2)


def test_groups_of_all_stages_by_hand() -> None:
    rows = build_schedule("gis", ScheduleRequest(num_stages=2, num_microbatches=4, group_size=2))
    assert to_csv(rows) == (
        "0F0,0F1,2F0,2F1,2I0,2W0,0F2,2I1,2W1,0F3,0I0,0W0,2F2,0I1,0W1,2F3,2I2,2W2,2I3,2W3,0I2,0W2,0I3,0W3\n"
        "1F0,1F1,3F0,3I0,3W0,3F1,3I1,3W1,1F2,1I0,1W0,1F3,1I1,1W1,3F2,3I2,3W2,3F3,3I3,3W3,1I2,1W2,1I3,1W3\n"
    )


def test_groups_of_2_on_4_stages_as_figure_6_of_the_paper_shows_them() -> None:
    """The figure numbers microbatches from 1 and tells the passes apart by colour."""
    rows = build_schedule("gis", ScheduleRequest(num_stages=4, num_microbatches=8)).orders
    first, last = ([task.microbatch + 1 for task in rows[stage]] for stage in (0, 3))
    assert "".join(map(str, first)) == "121234113224115226335446337448557668556677887788"
    assert "".join(map(str, last)) == "121112223114223334445336445556667558667778887788"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", range(1, 9))
def test_groups_from_half_of_the_stages_to_all_run_without_a_pause_and_smaller_ones_do_not(p: int, v: int) -> None:
    for size in range(1, p + 1):
        few, many = (table(p, size * groups, v, size) for groups in (2, 4))
        if 2 * size >= p:
            for rows in (few.validate(), many.validate()):
                assert bubble(rows) == 2 * (p - 1) + (v - 1) * (p - size)
                assert rows.peak_activations() == pytest.approx([(size * (v - 1) + p - s) / v for s in range(p)])
        elif 2 * size == p - 1 or (p, v, size) == (4, 2, 1):
            assert bubble(many.validate()) > bubble(few), "every round waits"
        else:
            with pytest.raises(ValueError, match="deadlocks"):
                many.validate()


def test_full_groups_hold_less_than_interleaved_1f1b_and_are_faster() -> None:
    for p, v in ((4, 2), (8, 2), (8, 4), (5, 3)):
        sizes = {"num_stages": p, "num_microbatches": 4 * p, "chunks_per_stage": v}
        gis = build_schedule("gis", ScheduleRequest(**sizes, group_size=p))
        fused = build_schedule("interleaved-1f1b", ScheduleRequest(**sizes))
        assert max(gis.peak_activations()) == p
        assert max(fused.peak_activations()) == p + (p - 1) / v
        times = [execute(one, per_stage(one, EQUAL)).makespan for one in (gis, fused)]
        assert times[1] - times[0] == pytest.approx((p - 1) / v)


def test_the_least_possible_groups_are_the_default() -> None:
    def size(p: int, m: int, asked: int | None = None) -> int:
        return gis_group_size(p, m, asked)

    assert [size(8, m) for m in (4, 8, 15, 18, 35, 40)] == [4, 4, 5, 6, 5, 4]
    assert [size(5, m) for m in (3, 4, 5, 12)] == [3, 4, 5, 3]
    assert [size(1, 7), size(2, 7), size(8, 24, 6)] == [1, 1, 6]
