"""Devices that wait for inputs by themselves, in virtual time: launches are hidden that nothing else could hide."""

import numpy as np
import pytest

from rrfp_jax.core import DecisionTimer, Ordering, StepRules
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.simulation import Communication, Costs, Machine, constant, for_steps, lognormal, simulate

NUM_STEPS = 6


def run(name, *, host_ms, awaits_inputs, record=False):
    per_stage = 2 if name == "interleaved-1f1b" else 1
    request = ScheduleRequest(num_stages=4, num_microbatches=16, chunks_per_stage=per_stage)
    table = build_schedule(name, request)
    order = Ordering(schedule=table).resolve(table.placement, table.graph)
    steady = for_steps(constant((2.0, 2.0, 2.0), order.graph), NUM_STEPS)
    costs = Costs(durations_ms=lognormal(steady, 0.5, np.random.default_rng(3)))
    machine = Machine(dispatch_overhead_ms=host_ms, just_in_time=DecisionTimer, awaits_inputs=awaits_inputs)
    arbiters = order.arbiters(StepRules(updates=False), certain_ahead=True)
    return order, simulate(arbiters, costs, machine=machine, num_steps=NUM_STEPS, record_events=record)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_less_than_half_of_what_the_host_costs_is_left(name):
    free_ms = run(name, host_ms=0.0, awaits_inputs=False)[1].step_ends_ms[-1]
    without_ms = run(name, host_ms=0.3, awaits_inputs=False)[1].step_ends_ms[-1]
    with_ms = run(name, host_ms=0.3, awaits_inputs=True)[1].step_ends_ms[-1]
    assert with_ms - free_ms < (without_ms - free_ms) / 2


def test_nothing_begins_before_its_inputs_and_logs_replay():
    order, simulation = run("1f1b", host_ms=0.3, awaits_inputs=True, record=True)
    spans = {(span.step, span.task): span for span in simulation.timeline.spans}
    assert len(spans) == NUM_STEPS * len(list(order.graph.tasks()))
    for (step, task), span in spans.items():
        for dependency in order.graph.dependencies(task):
            assert spans[step, dependency].end_s <= span.start_s + 1e-12
    for arbiter, log in zip(order.arbiters(StepRules(updates=False), certain_ahead=True), simulation.logs, strict=True):
        assert all(tuple(arbiter.handle(event)) == answer for event, answer in log)


def test_it_has_no_meaning_where_senders_wait():
    with pytest.raises(ValueError, match="launches before the input have no meaning"):
        Machine(communication=Communication.BLOCKING, awaits_inputs=True)
