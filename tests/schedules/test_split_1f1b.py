"""1F1B and interleaved 1F1B with a split backward: by hand, in memory, and in time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, to_csv
from rrfp_jax.schedules.slots import SlotLengths, execute, per_stage

FAMILIES = {"1f1b-split": "1f1b", "interleaved-1f1b-split": "interleaved-1f1b"}
TIMES = st.floats(0.1, 3.0)


def makespan(table: ScheduleTable, request: ScheduleRequest) -> float:
    """Of strict execution with what the table was made for."""
    return execute(table, per_stage(table, SlotLengths(*request.durations_ms)), hop=request.comm_ms).makespan


def check_against_the_fused(name: str, request: ScheduleRequest) -> None:
    split, fused = build_schedule(name, request), build_schedule(FAMILIES[name], request)
    assert split.graph.split == set(range(split.graph.num_chunks))
    assert all(a <= b for a, b in zip(split.peak_activations(), fused.peak_activations(), strict=True))
    assert makespan(split, request) <= makespan(fused, request) + 1e-9


def test_one_chunk_per_stage_by_hand() -> None:
    table = build_schedule("1f1b-split", ScheduleRequest(num_stages=3, num_microbatches=4))
    assert to_csv(table) == (
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1F1,1I0,1W0,1F2,1I1,1W1,1F3,1I2,1W2,1I3,1W3\n"
        "2F0,2I0,2W0,2F1,2I1,2W1,2F2,2I2,2W2,2F3,2I3,2W3\n"
    )


def test_two_chunks_per_stage_by_hand() -> None:
    """The last stage may hold 4: 5W0 makes room for 5F1, 5W1 for 5F2, and then the gradients come first."""
    request = ScheduleRequest(num_stages=3, num_microbatches=3)
    table = build_schedule("interleaved-1f1b-split", request)
    assert to_csv(table) == (
        "0F0,0F1,0F2,3F0,3F1,3F2,3I0,3W0,3I1,0I0,3W1,0W0,3I2,0I1,3W2,0I2,0W1,0W2\n"
        "1F0,1F1,1F2,4F0,4F1,4F2,4I0,4W0,4I1,1I0,4W1,1W0,4I2,1I1,4W2,1I2,1W1,1W2\n"
        "2F0,2F1,2F2,5F0,5I0,5W0,5F1,5I1,2I0,5W1,5F2,5I2,2I1,2W0,2I2,5W2,2W1,2W2\n"
    )
    assert 2 * makespan(table, request) == 21
    assert 2 * makespan(build_schedule("interleaved-1f1b", request), request) == 24


@pytest.mark.parametrize(
    ("name", "comm_ms", "gain"),
    [
        ("1f1b-split", 0, 690 / 620),
        ("1f1b-split", 1, 730 / 634),
        ("1f1b-split", 5, 890 / 690),
        ("interleaved-1f1b-split", 0, 585 / 535),
        ("interleaved-1f1b-split", 1, 615 / 567),
        ("interleaved-1f1b-split", 5, 735 / 660),
    ],
)
def test_the_gain_over_the_fused_table_with_8_stages_and_16_microbatches(
    name: str, comm_ms: float, gain: float
) -> None:
    request = ScheduleRequest(num_stages=8, num_microbatches=16, durations_ms=(10, 10, 10), comm_ms=comm_ms)
    split, fused = build_schedule(name, request), build_schedule(FAMILIES[name], request)
    assert makespan(fused, request) / makespan(split, request) == pytest.approx(gain)
    assert split.peak_activations() == fused.peak_activations()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("comm_ms", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("num_stages", [*range(2, 9), *(pytest.param(p, marks=pytest.mark.slow) for p in range(9, 17))])
def test_it_holds_no_more_and_takes_no_longer_than_the_fused_table(name: str, comm_ms: float, num_stages: int) -> None:
    for num_microbatches in (num_stages, 2 * num_stages, 4 * num_stages):
        check_against_the_fused(
            name,
            ScheduleRequest(
                num_stages=num_stages, num_microbatches=num_microbatches, durations_ms=(10, 10, 10), comm_ms=comm_ms
            ),
        )


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*FAMILIES]),
    p=st.integers(1, 8),
    rounds=st.integers(1, 4),
    v=st.integers(2, 4),
    durations=st.tuples(TIMES, TIMES, TIMES),
    comm_ms=st.floats(0, 3),
)
def test_whatever_the_times(
    name: str, p: int, rounds: int, v: int, durations: tuple[float, float, float], comm_ms: float
) -> None:
    chunks = v if "interleaved" in name else None
    check_against_the_fused(
        name,
        ScheduleRequest(
            num_stages=p, num_microbatches=rounds * p, chunks_per_stage=chunks, durations_ms=durations, comm_ms=comm_ms
        ),
    )


@settings(max_examples=100, deadline=None)
@given(p=st.integers(1, 10), m=st.integers(1, 40), times=st.tuples(TIMES, TIMES, TIMES), part=st.floats(0, 0.5))
def test_no_order_whose_last_stage_holds_one_microbatch_is_faster(
    p: int, m: int, times: tuple[float, float, float], part: float
) -> None:
    """Its tasks of a microbatch follow each other; before them p-1 F and hops lie, and behind its last I as many I."""
    forward, input_gradient, weight_gradient = times
    hop = part * weight_gradient
    request = ScheduleRequest(num_stages=p, num_microbatches=m, durations_ms=times, comm_ms=hop)
    least = m * sum(times) + (p - 1) * (forward + input_gradient + 2 * hop)
    assert makespan(build_schedule("1f1b-split", request), request) == pytest.approx(least)
