"""List scheduling against the tables it must reproduce."""

from collections.abc import Set

import pytest

from rrfp_jax.schedules import (
    ScheduleRequest,
    ScheduleTable,
    Task,
    TaskKind,
    build_schedule,
    chain,
    linear,
    schedule_names,
)
from rrfp_jax.schedules.language.rule import list_orders
from rrfp_jax.schedules.slots import EQUAL, SlotLengths, execute


class Rows:
    """The rule that follows a table strictly, and notes what ends when."""

    def __init__(self, table: ScheduleTable) -> None:
        self.left = [list(order) for order in table.orders]
        self.ended: list[Task] = []

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        row = self.left[stage]
        return row.pop(0) if row and row[0] in ready else None

    def finished(self, task: Task) -> None:
        self.ended.append(task)


class Earliest:
    """The rule that starts whatever is there, lower microbatches first."""

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        return min(ready, key=lambda task: (task.microbatch, task.kind), default=None)

    def finished(self, task: Task) -> None:
        pass


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("hop", [0.0, 0.375])
def test_a_rule_that_follows_a_table_gives_its_rows_and_ends_tasks_as_strict_execution_does(
    name: str, hop: float
) -> None:
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
    lengths = SlotLengths(1.25, 1.5, 0.75)
    rule = Rows(table)
    assert list_orders(table.placement, table.graph, rule, length=lengths, hop=hop) == [*map(list, table.orders)]
    ends = {task: end for task, (_, end) in execute(table, lengths, hop=hop).spans.items()}
    assert [ends[task] for task in rule.ended] == sorted(ends.values())


def test_a_hop_delays_the_next_stage_only() -> None:
    without = list_orders(linear(2), chain(2, 2), Earliest(), length=EQUAL)
    assert [" ".join(map(str, order)) for order in without] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    skewed = list_orders(linear(2), chain(2, 3), Earliest(), length=EQUAL, hop=3.0)
    assert [" ".join(map(str, order)) for order in skewed] == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_a_rule_that_starts_nothing_ends_at_once() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=2))
    backwards_only = Rows(ScheduleTable.from_orders("x", table.placement, table.graph, [[Task(TaskKind.B, 0, 0)], []]))
    assert list_orders(table.placement, table.graph, backwards_only, length=EQUAL) == [[], []]


def test_lengths_whose_sums_differ_in_their_last_bits_meet_at_one_moment() -> None:
    """Three thirds and one whole end together: the stage sees both inputs, and the better one starts."""
    graph = chain(2, 4)
    lengths = SlotLengths(1 / 3, 1 / 3, 1 / 3)
    orders = list_orders(linear(2), graph, Earliest(), length=lengths)
    exact = list_orders(linear(2), graph, Earliest(), length=SlotLengths(1, 1, 1))
    assert orders == exact
