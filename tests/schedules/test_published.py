"""Published figures, reproduced from the tables."""

import csv
from pathlib import Path
from statistics import fmean

import pytest

from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, schedule_entry
from rrfp_jax.schedules.language import B, F, Stage, rule
from rrfp_jax.schedules.language.rule import Frozen
from rrfp_jax.schedules.registry import table_of
from rrfp_jax.schedules.slots import BACKWARD_AS_FORWARD, EQUAL, SlotLengths, SlotTable, execute, per_stage

GOLDEN = Path(__file__).parents[2] / "experiments" / "paper" / "published" / "zero_bubble.csv"


def zero_bubble_rows() -> list[dict[str, str]]:
    with GOLDEN.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def measured(row: dict[str, str], name: str, memory_limit: float | None = None) -> SlotTable:
    """A schedule with a row's measured times."""
    forward, backward, weight = (float(row[key]) for key in ("forward_ms", "backward_ms", "weight_ms"))
    request = ScheduleRequest(
        num_stages=int(row["num_stages"]),
        num_microbatches=int(row["num_microbatches"]),
        durations_ms=(forward, backward, weight),
        comm_ms=float(row["comm_ms"]),
        memory_limit=memory_limit,
    )
    return execute(build_schedule(name, request), SlotLengths(forward, backward, weight), hop=request.comm_ms)


@pytest.mark.parametrize("row", zero_bubble_rows(), ids=lambda row: f"{row['model']}-{row['num_microbatches']}")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_the_zero_bubble_papers_rates_to_four_decimals(name: str, row: dict[str, str]) -> None:
    assert f"{measured(row, name).timeline.bubble_fraction():.4f}" == row[f"bubble_{name.replace('-', '_')}"]


@pytest.mark.parametrize("row", zero_bubble_rows(), ids=lambda row: f"{row['model']}-{row['num_microbatches']}")
def test_the_automatic_schedule_beats_the_handcrafted_ones_at_their_memory(row: dict[str, str]) -> None:
    h1, h2 = measured(row, "zb-h1"), measured(row, "zb-h2")
    assert measured(row, "zb-auto", memory_limit=8).timeline.bubble_fraction() <= h1.timeline.bubble_fraction() + 1e-12
    assert measured(row, "zb-auto", memory_limit=15).timeline.bubble_fraction() <= h2.timeline.bubble_fraction() + 1e-12
    rates = [measured(row, "zb-auto", memory_limit=limit).timeline.bubble_fraction() for limit in (8, 12, 16, 24)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("num_stages", [*range(2, 13), 16])
def test_controllable_memory_peaks_and_bubbles(num_stages: int) -> None:
    p, m = num_stages, 2 * num_stages + 1
    one_f_one_b = 6 * (p - 1)  # in slots of half a stage
    peaks = {"zb-v": p, "v-half": (p + 2) // 2, "v-min": (p + 4) // 3}
    parts = {"zb-v": 0.0, "v-half": 1 / 2, "v-min": 2 / 3}
    for name, peak in peaks.items():
        table = build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m))
        assert max(table.peak_activations()) == peak
        bubble = execute(table).timeline.sums().cost_s - 6 * m
        assert bubble <= parts[name] * one_f_one_b, "the published part of 1F1B's bubble"
        assert bubble >= parts[name] * one_f_one_b - 4, "only boundary effects save more"


def greedy_chimera(under_way: int) -> ScheduleTable:
    """The greedy merge with fewer microbatches under way than the schedule itself has."""

    def described(s: Stage) -> Frozen:
        return rule(B, F, key=("microbatch", "-chunk")).frozen(lengths=EQUAL, under_way=under_way)

    request = ScheduleRequest(num_stages=8, num_microbatches=16)
    return table_of("greedy", described, schedule_entry("greedy-chimera").stages(request))


def test_chimera_with_8_stages_and_16_microbatches_16_or_26_percent() -> None:
    published = build_schedule("chimera", ScheduleRequest(num_stages=8, num_microbatches=16))
    assert fmean(execute(published, BACKWARD_AS_FORWARD).timeline.stage_bubbles()) == pytest.approx(6 / 38), (
        "16%: the formula, B = F"
    )
    assert fmean(execute(published, EQUAL).timeline.stage_bubbles()) == pytest.approx(18 / 66), (
        "27%: the same order, B = 2F"
    )
    registered = build_schedule("greedy-chimera", ScheduleRequest(num_stages=8, num_microbatches=16))
    for table in (registered, *map(greedy_chimera, (10, 12, 16))):
        greedy = execute(table, EQUAL)
        assert greedy.makespan == 65, "26%: a greedy merge, B = 2F"
        assert f"{fmean(greedy.timeline.stage_bubbles()):.2f}" == "0.26"


def test_hanayo_with_two_waves_is_14_percent_faster_than_chimera_at_8_stages_and_8_microbatches() -> None:
    chimera = build_schedule("chimera", ScheduleRequest(num_stages=8, num_microbatches=8))
    makespans = {"chimera": execute(chimera, per_stage(chimera, EQUAL)).makespan}
    for chunks in (2, 4):
        request = ScheduleRequest(num_stages=8, num_microbatches=8, chunks_per_stage=chunks)
        hanayo = build_schedule("hanayo", request)
        makespans[f"hanayo, {chunks // 2} waves"] = execute(hanayo, per_stage(hanayo, EQUAL)).makespan
    assert makespans == {"chimera": 36.0, "hanayo, 1 waves": 38.0, "hanayo, 2 waves": 31.0}


@pytest.mark.parametrize(
    ("p", "m", "lengths", "rate"),
    [
        *((4, 4, BACKWARD_AS_FORWARD, "0.1111"), (8, 8, BACKWARD_AS_FORWARD, "0.1579")),
        *((8, 16, BACKWARD_AS_FORWARD, "0.0857"), (8, 32, BACKWARD_AS_FORWARD, "0.0448")),
        *((4, 4, EQUAL, "0.1429"), (8, 8, EQUAL, "0.2000")),
    ],
)
def test_bitpipes_bubbles_to_four_decimals_and_its_activations(p: int, m: int, lengths: SlotLengths, rate: str) -> None:
    """Peaks count four chunks, two of each copy, as one microbatch: the stages in the middle hold as many as there are
    stages, the outer ones less."""
    table = build_schedule("bitpipe", ScheduleRequest(num_stages=p, num_microbatches=m))
    assert f"{execute(table, per_stage(table, lengths)).timeline.bubble_fraction():.4f}" == rate
    outer = {4: (3.5, 4), 8: (6.5, 7, 7.5, 8)}[p]
    assert table.peak_activations() == (*outer, *outer[::-1])


def test_an_asymmetric_cut_lowers_only_the_outer_stages_and_never_wins_in_ideal_slots() -> None:
    request = ScheduleRequest(num_stages=8, num_microbatches=16)
    even = build_schedule("chimera", request)
    cut = (1, 1, 1, 1, 2, 2, 2, 2) * 2
    uneven = build_schedule("asymmetric-chimera", request)
    assert uneven.peak_activations(cut) == pytest.approx((4, 16 / 3, 20 / 3, 8, 8, 20 / 3, 16 / 3, 4))
    assert max(uneven.peak_activations(cut)) == max(even.peak_activations()) == 8
    for lengths in (EQUAL, BACKWARD_AS_FORWARD):
        ratio = execute(uneven, per_stage(uneven, lengths, cut)).makespan / execute(even, lengths).makespan
        assert ratio >= 1 - 1e-9
