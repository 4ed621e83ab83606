"""Pairs of tasks that run as one program: published lengths, orders by readiness under noise, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.core import (
    Agreement,
    DecisionTimer,
    GroupProtocol,
    Ordering,
    StageArbiter,
    StageSetup,
    StepRules,
    hint_by_name,
    ready,
)
from rrfp_jax.runtime.operations import offload, recomputed
from rrfp_jax.schedules import (
    Pair,
    ScheduleRequest,
    ScheduleTable,
    Task,
    build_schedule,
    chain,
    linear,
    read_csv,
    write_csv,
)
from rrfp_jax.schedules.language import B, F, I, Stage, owed, pair
from rrfp_jax.simulation import Costs, Machine, constant, simulate
from rrfp_jax.simulation.costs import lognormal
from tests.simulation.helpers import starts_ms

RULES = StepRules(updates=False, agreement=Agreement.NONE)
EVEN, UNEVEN = (1.0, 1.0, 1.0, 0.2), (1.0, 1.1, 0.8, 0.3)
"""F, I and W of a chunk, and the collectives of F or I."""
SIZES = [(4, 16), (4, 32), (8, 32)]
TIMES = pytest.mark.parametrize("times", [EVEN, UNEVEN], ids=["even", "uneven"])


def length_ms(
    name: str,
    size: tuple[int, int],
    times: tuple[float, float, float, float],
    *,
    pairs: bool = True,
    sigma: float = 0.0,
    draws: int = 1,
    **words: object,
) -> float:
    """The mean length of a step in which all chunks take the same times."""
    chunks = {"chunks_per_stage": 2} if name.startswith("interleaved") else {}
    table = build_schedule(name, ScheduleRequest(num_stages=size[0], num_microbatches=size[1], **chunks))
    order = Ordering(schedule=table, **words).resolve(table.placement, table.graph)
    total_ms = 0.0
    for draw in range(draws):
        durations_ms = lognormal(constant(times[:3], order.graph), sigma, np.random.default_rng(draw))
        costs = Costs(durations_ms=durations_ms, collectives_ms=times[3])
        total_ms += simulate(order.arbiters(RULES, pairs=pairs), costs).step_ends_ms[-1]
    return total_ms / draws


@TIMES
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_interleaved_1f1b_pays_for_all_collectives(p: int, m: int, times: tuple[float, float, float, float]) -> None:
    f, i, w, t = times
    expected_ms = 2 * m * (f + i + w) + (p - 1) * (f + t + i + w) + 2 * m * t
    took_ms = length_ms("interleaved-1f1b", (p, m), times, pairs=False, consume="strict")
    assert took_ms == pytest.approx(expected_ms)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_stp_hides_all_but_the_published_ones(p: int, m: int) -> None:
    f, i, w, t = EVEN
    published_ms = 2 * m * (f + i + w) + (p - 1) * (f + t + i - w) + (2 * p + 1) * t
    took_ms = length_ms("stp", (p, m), EVEN, consume="strict")
    assert took_ms == pytest.approx(published_ms - t)
    assert length_ms("stp", (p, m), EVEN, consume="strict", pairs=False) > took_ms + m * t


def test_stp_beside_interleaved_1f1b() -> None:
    assert length_ms("stp", (8, 32), EVEN, consume="strict") == pytest.approx(203.6)
    assert length_ms("interleaved-1f1b", (8, 32), EVEN, consume="strict") == pytest.approx(227.2)


@TIMES
def test_readiness_bears_noise_better_than_the_row(times: tuple[float, float, float, float]) -> None:
    p, m = 8, 32
    ideal_ms = 2 * m * sum(times[:3])
    noise = {"sigma": 0.3, "draws": 6}
    strict_ms = length_ms("stp", (p, m), times, consume="strict", **noise)
    ready_ms = length_ms("stp", (p, m), times, window=2 * p + 2, **noise)
    assert strict_ms / ideal_ms > 1.18
    assert ready_ms / ideal_ms <= (1.16 if times is EVEN else 1.18)
    assert ready_ms < strict_ms
    # The order of zb-v, which knows no pairs, gains as much from them.
    alone_ms = length_ms("zb-v", (p, m), times, pairs=False, **noise)
    assert length_ms("zb-v", (p, m), times, window=2 * p, **noise) < 0.96 * alone_ms


def test_a_pair_lasts_as_long_as_both_and_hides_what_each_would_wait_for() -> None:
    arbiter = StageArbiter(
        StageSetup(
            chain(1, 2, split=True),
            linear(1),
            0,
            consumption=ready(hint_by_name("bf")),
            window=2,
            rules=RULES,
            pairs=True,
        )
    )
    costs = Costs(durations_ms=constant((3.0, 2.0, 1.0), arbiter.graph), collectives_ms=0.5)
    simulation = simulate([arbiter], costs)
    # F alone; I with the second F, each drawn as half; I with the first W; W.
    assert starts_ms(simulation) == {"0F0": 0, "0I0": 3.5, "0F1": 6, "0I1": 8.5, "0W0": 10, "0W1": 11.5}
    assert simulation.step_ends_ms[-1] == pytest.approx(12.5)


def test_the_host_hides_behind_pairs_too() -> None:
    table = build_schedule("stp", ScheduleRequest(num_stages=4, num_microbatches=16))
    order = Ordering(schedule=table, consume="strict").resolve(table.placement, table.graph)
    took_ms = []
    for just_in_time in (None, DecisionTimer):
        machine = Machine(dispatch_overhead_ms=0.1, just_in_time=just_in_time)
        costs = Costs(durations_ms=constant((2.0, 2.0, 2.0), table.graph), collectives_ms=0.4)
        simulation = simulate(order.arbiters(RULES, pairs=True), costs, machine=machine, num_steps=4)
        took_ms.append(simulation.step_ms[-1])
    assert 202.4 < took_ms[1] < 206 < took_ms[0]


def test_durations_are_learnt_in_halves() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=8))
    order = Ordering(schedule=table).resolve(table.placement, table.graph)
    arbiters = order.arbiters(RULES, pairs=True)
    simulate(arbiters, Costs(durations_ms=constant((2.0, 2.0, 2.0), table.graph)))
    (estimates,) = [arbiter.estimates() for arbiter in arbiters[1:]]
    assert estimates is not None
    assert all(0.001 < seconds < 0.0045 for seconds in estimates.durations_s.values())


# -- tables and the language -------------------------------------------------------------------------------------------


def table_of(rows: list[str], *pairs: str, split: bool = False) -> ScheduleTable:
    graph = chain(len(rows), 2, split=split)
    orders = [map(Task.parse, row.split()) for row in rows]
    table = ScheduleTable.from_orders("mine", linear(len(rows)), graph, orders)
    return replace(table, pairs=frozenset(Pair(*map(Task.parse, each.split())) for each in pairs))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (table_of(["0F0 0F1 0B0 0B1"], "0F0 0B0"), "0B0 is paired with 0F0, so put it right behind that"),
        (table_of(["0F0 0F1 0B0 0B1"], "0B0 0B1"), "0B0 and 0B1 are no pair"),
        (
            table_of(["0F0 0F1 0B0 0B1"], "0F0 0F1", "0F1 0B0"),
            "are no pair: join F with F, B, I or W, or I with W, once",
        ),
        (table_of(["0F0 0B0 0F1 0B1"], "0F0 0B0"), "0B0 waits for 0F0, so the two cannot run as one program"),
        (
            table_of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "0F1 0B0", "1B0 1F1"),
            "can finish with one task after the other, but not in pairs: on stage 0 0F1 and its partner wait",
        ),
    ],
)
def test_pairs_that_cannot_run_are_refused(table: ScheduleTable, told: str) -> None:
    with pytest.raises(ValueError, match="table 'mine'") as error:
        table.validate()
    assert told in str(error.value)
    replace(table, pairs=frozenset()).validate()


def test_the_two_halves_of_a_backward_are_a_pair() -> None:
    table = table_of(["0F0 0I0 0W0 0F1 0I1 0W1"], "0I0 0W0", split=True).validate()
    order = Ordering(schedule=table, consume="strict").resolve(table.placement, table.graph)
    costs = Costs(durations_ms=constant((3.0, 2.0, 1.0), table.graph), collectives_ms=0.5)
    assert simulate(order.arbiters(RULES, pairs=True), costs).step_ends_ms[-1] == pytest.approx(13.5)


def test_the_language_joins_the_first_two_tasks() -> None:
    def mine(s: Stage) -> object:
        return F[0] * 2 + pair(F[0] + B[0]) + pair(B[0]) + pair(I[0]) + owed.rest

    request = ScheduleRequest(num_stages=1, num_microbatches=3)
    split = replace(request, graph=chain(1, 3, split=True), placement=linear(1))
    table = build_schedule(mine, split)
    assert " ".join(map(str, table.orders[0])) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    assert {f"{a} {b}" for a, b in table.pairs} == {"0F2 0I0", "0I1 0W1"}
    with pytest.raises(ValueError, match="3 is no order: join the tasks of one, such as pair"):
        build_schedule(lambda _: pair(3), request)


@pytest.mark.parametrize("name", ["stp", "dualpipe-v"])
def test_a_file_keeps_pairs(name: str, tmp_path) -> None:
    table = build_schedule(name, ScheduleRequest(num_stages=3, num_microbatches=9))
    assert table.pairs
    write_csv(table, tmp_path / f"{name}.csv")
    assert read_csv(tmp_path / f"{name}.csv") == table


@pytest.mark.parametrize("name", ["stp", "dualpipe-v"])
def test_a_table_with_operations_names_no_pairs(name: str) -> None:
    table = build_schedule(name, ScheduleRequest(num_stages=3, num_microbatches=9))
    remade = recomputed(table, 0.9, lead=0, ms=1.0)
    assert not remade.pairs
    assert [task for task in remade.orders[0] if task in table.orders[0]] == list(table.orders[0])
    assert not offload(table, 3, copy_ms=1.0).pairs


def test_what_does_not_go_with_pairs_is_refused() -> None:
    graph = chain(2, 2)
    setup = StageSetup(graph, linear(2), 0, consumption=ready(hint_by_name("bf")), window=2, pairs=True)
    with pytest.raises(ValueError, match="pairs are chosen when the stage is free"):
        replace(setup, certain_ahead=True)
    with pytest.raises(ValueError, match="do not go with pairs, which end before the stage chooses again"):
        replace(setup, delay=1)
    order = Ordering(hint="bf").resolve(linear(2), graph)
    with pytest.raises(ValueError, match="for pairs take group_protocol leader"):
        order.arbiters(RULES, pairs=True, members={0: (0, 2), 1: (0, 1)}, protocol=GroupProtocol.PROPOSE)
    with pytest.raises(ValueError, match="collectives_ms is -1: give 0 or more"):
        Costs(durations_ms=constant((1.0, 1.0, 1.0), graph), collectives_ms=-1)
