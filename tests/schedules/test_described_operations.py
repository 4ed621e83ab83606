"""Descriptions with operations of one's own: named in streams, or put where their own lead says."""

import re
from dataclasses import replace

import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import Op, ScheduleRequest, ScheduleTable, build_schedule, with_operations
from rrfp_jax.schedules.language import B, F, Stage, TaskOrder, nothing, rounds, rule, stream
from rrfp_jax.schedules.registry import ScheduleEntry
from rrfp_jax.schedules.request import ONE_EACH
from rrfp_jax.simulation import Costs, constant, simulate

REQUEST = ScheduleRequest(num_stages=4, num_microbatches=12)
OUT = Op("O", after="F", lane="d2h", frees=1.0, ms=5.0, chunks=frozenset({0}))
BACK = Op("L", after=OUT, before="B", lane="h2d", holds=1.0, ms=5.0, chunks=frozenset({0}))


def plain(s: Stage) -> TaskOrder:
    return rounds(F.ahead(s.p - 1 - s.i), B)


def offloaded(s: Stage) -> TaskOrder:
    """Every activation of the first stage goes out right behind its F, and comes back one round before its B."""
    warm_up = s.p - 1 - s.i
    if s.i > 0:
        return plain(s)
    return rounds(F.ahead(warm_up), stream(OUT).ahead(warm_up), stream(BACK).ahead(1), B)


def table(describe, **facts: object) -> ScheduleTable:
    return ScheduleEntry(name="mine", describe=describe, **{"shape": ONE_EACH} | facts).table(REQUEST)


def step_ms(found: ScheduleTable) -> float:
    order = Ordering(schedule=found, consume="strict").resolve(found.placement, found.graph)
    rules = StepRules(updates=False, agreement=Agreement.NONE)
    costs = Costs(durations_ms=constant((10, 10, 10), order.graph))
    return simulate(order.arbiters(rules), costs).timeline.makespan_s() * 1e3


def test_an_operation_stands_where_its_stream_puts_it() -> None:
    found = table(offloaded, ops=(OUT, BACK))
    assert " ".join(map(str, found.orders[0][:13])) == "0F0 0O0 0F1 0O1 0F2 0O2 0L0 0F3 0O3 0L1 0B0 0F4 0O4"
    assert found.graph.ops == (OUT, BACK)
    assert found.peak_activations() == (2, 3, 2, 1)
    assert table(plain).peak_activations() == (4, 3, 2, 1)
    assert step_ms(found) == step_ms(table(plain)) == 450


def test_one_that_is_not_named_is_put_where_its_own_lead_says() -> None:
    found = table(plain, ops=(OUT, BACK))
    by_hand = with_operations(build_schedule("1f1b", REQUEST), (OUT, BACK))
    assert (found.rows, found.graph) == (by_hand.rows, by_hand.graph)
    one_each = {"shape": ONE_EACH, "ops": (OUT, BACK)}
    assert len(table(lambda s: rule(B, F).frozen(under_way=4), **one_each).orders[0]) == 4 * 12


@pytest.mark.parametrize(
    ("describe", "words"),
    [
        (lambda s: rounds(stream("OO")) + plain(s), "no microbatch has a task of kind 'OO': did you mean O?"),
        (
            lambda s: plain(s) + (nothing if s.i else stream(OUT) * 3),
            "stage 0 leaves out 0O3, 0O4, 0O5, 0O6, 0O7 and 4",
        ),
        (lambda s: rounds(stream(OUT)) + plain(s), "stage 0 runs 0O0 before 0F0, for which it waits; exchange them"),
    ],
)
def test_mistakes_with_operations(describe, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        table(describe, ops=(replace(OUT, frees=0.0),))


def test_operations_may_depend_on_the_sizes() -> None:
    def lent(s: Stage) -> tuple[Op, ...]:
        return tuple(replace(op, pairs=frozenset((0, m) for m in range(1, s.m, 2))) for op in (OUT, BACK))

    def bpipe(s: Stage) -> TaskOrder:
        far = (stream(OUT).ahead(s.p - 1), stream(BACK).ahead(1)) if s.i == 0 else ()
        return rounds(F.ahead(s.p - 1 - s.i), *far, B)

    entry = ScheduleEntry(name="mine", describe=bpipe, shape=ONE_EACH, ops=lent)
    for m, moved in ((4, 2), (9, 4)):
        found = entry.table(replace(REQUEST, num_microbatches=m))
        assert [str(task) for task in found.orders[0] if task.kind == "O"] == [f"0O{2 * n + 1}" for n in range(moved)]
    with pytest.raises(ValueError, match="schedule 'mine' has 'O' among its operations: give"):
        table(bpipe, ops=lambda s: ("O",))
    with pytest.raises(ValueError, match="schedule 'mine', stage 0: ZeroDivisionError in line"):
        table(bpipe, ops=lambda s: 1 // 0)
