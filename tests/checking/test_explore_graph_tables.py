"""Tables of graphs with encoders explored: strictly and with foresight, with steps that lack images."""

from dataclasses import replace
from itertools import product

import pytest

from rrfp_jax.core import Agreement, StepRules
from rrfp_jax.schedules import Placement, ScheduleRequest, build_schedule, linear
from tests.checking.guided import by_table
from tests.model_checker import explore
from tests.model_checker.catalogue import optional_graphs, skipped

WITH_UPDATES = StepRules(agreement=Agreement.LOSS)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", optional_graphs(1))
def test_no_interleaving_is_stuck(name, schedule):
    graph = optional_graphs(2)[name]
    together = Placement((*[0] * (graph.num_chunks - 1), 1))
    some, all_text = skipped(graph, [1]), skipped(graph, [0, 1])
    for placement, lacking in product((linear(graph.num_chunks), together), [(some, all_text), (all_text, ())]):
        request = ScheduleRequest(num_stages=placement.num_stages, num_microbatches=2, graph=graph, placement=placement)
        table = build_schedule(schedule, request)
        guided = by_table(table, absences=lacking, rules=WITH_UPDATES)
        strict = replace(guided, policies=table.orders, footprints=(), foresight=None)
        assert explore(strict).num_states > 2
        assert explore(guided).num_states > 2
