"""Formulas against ideal tables: equal where they hold, an upper bound for memory everywhere."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.schedules import ScheduleRequest, build_schedule, schedule_names
from rrfp_jax.schedules.formulas import BUBBLES, PEAKS, Sizes, bubble_formulas, compare, peak_formula
from rrfp_jax.schedules.slots import BACKWARD_AS_FORWARD, EQUAL, SlotLengths, execute, per_stage

LENGTHS = [EQUAL, BACKWARD_AS_FORWARD, *(SlotLengths(*three) for three in ((1.2, 1.1, 0.7), (1, 1, 0.5), (2, 1, 1)))]
ESTIMATES = {("v-half", True), ("v-min", True), ("dualpipe-v", True), ("hanayo", True)}
"""Published bubble formulas that the tables do not match: asymptotic ones, and two that
experiments/paper/schedules.md discusses."""


def request(name: str, num_stages: int, num_microbatches: int, loops: int) -> ScheduleRequest:
    """A request that the schedule accepts, near the wanted sizes."""
    chunks = {"breadth-first": loops, "hanayo": 2 * loops}.get(name)
    if "interleaved" in name or name == "gis":
        chunks = loops + 1
        num_microbatches = max(1, num_microbatches // num_stages) * num_stages
    if name == "bitpipe":
        num_stages, num_microbatches = 2 * num_stages, 2 * num_stages * max(1, num_microbatches // num_stages // 2)
    if "chimera" in name:
        num_stages, num_microbatches = 2 * num_stages, 2 * num_microbatches
    if name == "dualpipe-v":
        num_microbatches += 2 * num_stages
    return ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=chunks)


@pytest.mark.one_in(2)
@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(1, 8), m=st.integers(1, 24), loops=st.integers(1, 3), lengths=st.sampled_from(LENGTHS), data=st.data()
)
@pytest.mark.parametrize("name", schedule_names())
def test_generated_tables_are_valid_and_obey_their_formulas(
    name: str, p: int, m: int, loops: int, lengths: SlotLengths, data: st.DataObject
) -> None:
    wanted = request(name, p, m, loops)
    if name == "eager-1f1b" and data.draw(st.booleans()):
        steps = data.draw(st.lists(st.integers(0, 3), min_size=p - 1, max_size=p - 1))
        windows = tuple(accumulate(steps, initial=data.draw(st.integers(1, 3))))[::-1]
        wanted = ScheduleRequest(num_stages=p, num_microbatches=m, window=windows)
    table = build_schedule(name, wanted)
    sizes = Sizes.of(name, wanted, lengths)
    formula = peak_formula(name)
    if formula is not None:
        bounds = [formula.peak(sizes, stage) for stage in range(sizes.p)]
        peaks = table.peak_activations()
        assert all(peak <= bound + 1e-9 for peak, bound in zip(peaks, bounds, strict=True))
        if formula.where.holds(sizes):
            largest = formula.where.text.endswith("largest stage")
            assert max(peaks) == max(bounds) if largest else peaks == pytest.approx(bounds)
    rate = execute(table, per_stage(table, lengths)).timeline.bubble_fraction()
    for bubble in bubble_formulas(name):
        expected = bubble.rate(sizes)
        if expected is not None and (name, bubble.published) not in ESTIMATES:
            assert rate == pytest.approx(expected, abs=1e-9), bubble.text


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(1, 6),
    m=st.integers(1, 16),
    limit=st.floats(1, 20),
    frees=st.sampled_from([0.0, 0.3, 1.0]),
    comm=st.sampled_from([0.0, 0.2]),
    lengths=st.sampled_from(LENGTHS),
)
def test_the_automatic_schedule_stays_within_its_memory(
    p: int, m: int, limit: float, frees: float, comm: float, lengths: SlotLengths
) -> None:
    durations = (lengths.forward, lengths.input_gradient, lengths.weight_gradient)
    table = build_schedule(
        "zb-auto",
        ScheduleRequest(
            num_stages=p,
            num_microbatches=m,
            durations_ms=durations,
            comm_ms=comm,
            memory_limit=limit,
            input_gradient_frees=frees,
        ),
    )
    change = {"F": 1.0, "I": -frees, "W": frees - 1.0}
    for order in table.orders:
        held = peak = 0.0
        for task in order:
            held += change[task.kind]
            peak = max(peak, held)
        assert peak <= limit + 1e-6


def test_every_formula_belongs_to_a_schedule_and_says_when_it_holds() -> None:
    for formulas in (BUBBLES, PEAKS):
        assert {formula.schedule for formula in formulas} <= set(schedule_names())
        assert all(formula.text and formula.where.text for formula in formulas)


def test_hanayos_formula_overstates_the_bubble_of_the_ideal_table() -> None:
    row = compare("hanayo", ScheduleRequest(num_stages=8, num_microbatches=8), EQUAL)
    assert row.published_rate == pytest.approx(14 / 31)
    assert row.fitted_rate == row.table_rate == pytest.approx(14 / 38)


def test_serialised_dualpipe_v_has_less_bubble_than_its_formula_with_pairs_that_gain_nothing() -> None:
    row = compare("dualpipe-v", ScheduleRequest(num_stages=8, num_microbatches=16), EQUAL)
    assert row.published_rate == pytest.approx(7 / 55)
    assert row.table_rate == pytest.approx(3.5 / 51.5)
