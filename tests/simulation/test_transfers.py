"""Communication by hand-computed cases: two stages, F 10 ms, B 20 ms, transfers 2 ms."""

import numpy as np
import pytest

from rrfp_jax.core import DecisionTimer
from rrfp_jax.schedules import ScheduleRequest, build_schedule, chain, linear, looped
from rrfp_jax.simulation import Communication, Links, Machine
from tests.simulation.helpers import by_hint, by_table, makespan_ms, run, starts_ms

FIXED = (10.0, 10.0, 10.0)


def simulated(name: str, communication: str, durations_ms=FIXED, **links):
    table = build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=2))
    machine = Machine(links=Links(**{"latency_ms": 2, **links}), communication=Communication(communication))
    return run(by_table(table), durations_ms, machine=machine)


def test_async_leaves_the_sender_free():
    assert starts_ms(simulated("1f1b", "async")) == {
        "0F0": 0, "0F1": 10, "1F0": 12, "1B0": 22, "1F1": 42, "0B0": 44, "1B1": 52, "0B1": 74
    }  # fmt: skip


def test_blocking_occupies_the_sender():
    # Stage 0 sends until 12 before 0F1, stage 1 sends its gradient until 44 before 1F1.
    assert starts_ms(simulated("1f1b", "blocking")) == {
        "0F0": 0, "0F1": 12, "1F0": 12, "1B0": 22, "1F1": 44, "0B0": 44, "1B1": 54, "0B1": 76
    }  # fmt: skip


def test_rendezvous_pairs_opposite_transfers():
    # Stage 0 waits with its activation from 22 to 42, when stage 1 has a gradient for it; both travel until 44.
    simulation = simulated("1f1b", "rendezvous")
    assert starts_ms(simulation) == {
        "0F0": 0, "0F1": 12, "1F0": 12, "1B0": 22, "1F1": 44, "0B0": 44, "1B1": 54, "0B1": 76
    }  # fmt: skip
    assert sum(w.end_s - w.start_s for w in simulation.timeline.of_stage(0).waits) == pytest.approx(0.036)


def test_rendezvous_waits_for_the_receiver():
    # GPipe's stage 0 has 0F1's output at 22; a busy stage 1 takes it only when 1F0 has ended, at 32.
    durations_ms = np.array([[[FIXED] * 2, [(20.0, 10.0, 10.0)] * 2]])
    assert starts_ms(simulated("gpipe", "blocking", durations_ms))["1F1"] == 32
    starts = starts_ms(simulated("gpipe", "rendezvous", durations_ms))
    assert starts == {"0F0": 0, "0F1": 12, "1F0": 12, "1F1": 34, "1B0": 54, "1B1": 76, "0B0": 76, "0B1": 98}


def test_contention_queues_transfers_of_a_link():
    # With transfers of 15 ms the second activation, ready at 20, waits for the link until 25.
    free = starts_ms(simulated("gpipe", "async", latency_ms=15))
    queued = starts_ms(simulated("gpipe", "async", latency_ms=15, contention=True))
    assert (free["1F1"], queued["1F1"]) == (35, 40)


def test_size_over_bandwidth_adds_to_latency():
    links = {"latency_ms": 1, "activation_bytes": 3e6, "gradient_bytes": 5e6, "bandwidth_gb_per_s": 1}
    starts = starts_ms(simulated("1f1b", "async", **links))
    assert (starts["1F0"], starts["0B0"] - starts["1B0"]) == (14, 26)


def test_extra_delay_has_a_direction():
    starts = starts_ms(simulated("1f1b", "async", extra_ms={(1, 0): 30.0}))
    assert (starts["1F0"], starts["0B0"] - starts["1B0"]) == (12, 52)


@pytest.mark.parametrize("communication", ["blocking", "rendezvous"])
@pytest.mark.parametrize("hint", ["bf", "f-priority"])
def test_a_ring_of_looped_chunks_does_not_deadlock(communication, hint):
    machine = Machine(links=Links(latency_ms=3), communication=Communication(communication))
    simulation = run(by_hint(chain(9, 6), looped(3, 3), hint, window=4), FIXED, machine=machine)
    assert len(simulation.timeline.spans) == 9 * 6 * 2


def test_free_transfers_change_nothing_unless_they_wait_for_the_receiver():
    table = build_schedule("zb-h1", ScheduleRequest(num_stages=4, num_microbatches=8))
    takes_ms = {
        communication: makespan_ms(run(by_table(table), FIXED, machine=Machine(communication=communication)))
        for communication in Communication
    }
    assert takes_ms[Communication.BLOCKING] == takes_ms[Communication.ASYNC] < takes_ms[Communication.RENDEZVOUS]


@pytest.mark.parametrize("communication", ["blocking", "rendezvous"])
def test_options_without_effect_are_refused(communication):
    with pytest.raises(ValueError, match="contention has no effect"):
        simulated("1f1b", communication, contention=True)
    with pytest.raises(ValueError, match=f"just-in-time dispatch has no meaning with {communication}"):
        Machine(communication=Communication(communication), just_in_time=DecisionTimer)
    with pytest.raises(ValueError, match="dispatch_ahead has no meaning"):
        run(
            by_hint(chain(1, 1), linear(1), certain_ahead=True),
            FIXED,
            machine=Machine(communication=Communication(communication)),
        )
