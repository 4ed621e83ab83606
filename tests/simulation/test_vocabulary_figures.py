"""Shards of the vocabulary beside the published artefact's measured iterations (arXiv 2411.05288).

``measured/vocabulary_stages.csv`` holds, for each iteration, the measured times of the passes on every stage, and these
are all that is simulated: messages, hosts and the optimizer take no time here. They are the 0.5 to 1.8% that plain 1F1B
lacks beside its measured iterations, and so do shards. The two passes of a head are not measured apart. A head computes
logits before its last barrier, and with one barrier the gradient of the stream too, which are one and two of three
equally large products of matrices.
"""

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.core import Agreement, StepRules
from rrfp_jax.core.ordering import Ordering
from rrfp_jax.schedules import ScheduleRequest, build_schedule, chain, linear, vocabulary_sharded
from rrfp_jax.schedules.published import heads_first
from rrfp_jax.simulation import Costs, simulate

P, M = 8, 128
PATH = Path(__file__).parent / "measured" / "vocabulary_stages.csv"
ROWS = {
    f"{row['variant']}, {row['vocabulary']}": row
    for row in csv.DictReader(line for line in PATH.read_text().splitlines() if not line.startswith("#"))
}
BARRIERS = {"vocab": 1, "synctwice": 2}
IN_SHARDS = [name for name in ROWS if name.split(",")[0] in BARRIERS]
LOSS_MS = 0.01


@cache
def made(barriers, fan_out=None):
    graph, placement = (
        vocabulary_sharded(P, M, barriers=barriers, fan_out=fan_out) if barriers else (chain(P, M), linear(P))
    )
    request = ScheduleRequest(num_stages=P, num_microbatches=M, graph=graph, placement=placement)
    return build_schedule(heads_first if barriers else "1f1b", request)


def simulated(row, table, barriers, **options):
    """The simulated time beside the measured one, minus 1."""
    graph, placement = table.graph, table.placement
    names = ("forward_us", "backward_us", "head_us", "embedding_forward_us", "embedding_backward_us")
    forward, backward, head, first, back = (np.array(row[name].split(), float) / 1e3 for name in names)
    before = 2 / 3 if barriers == 1 else 1 / 3
    of_chunk = dict.fromkeys(range(graph.num_chunks), (LOSS_MS, LOSS_MS))  # the loss, and those that hand the stream on
    of_chunk |= {P * bool(barriers) + s: (forward[s], backward[s]) for s in range(P)}
    if barriers:
        of_chunk |= {s: (first[s], back[s]) for s in range(P)}
        of_chunk |= {graph.num_chunks - 1 - P + s: (head[s] * before, head[s] * (1 - before)) for s in range(P)}
    durations = np.zeros((1, graph.num_chunks, M, 3))
    for chunk, times in of_chunk.items():
        durations[0, chunk, :, :2] = times
    order = Ordering(schedule=table, **options).resolve(placement, graph)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.NONE))
    makespan_s = simulate(arbiters, Costs(durations_ms=durations)).timeline.makespan_s()
    return makespan_s * 1e3 / float(row["iteration_ms"]) - 1


@pytest.mark.parametrize("name", [name for name in ROWS if name not in IN_SHARDS])
def test_plain_1f1b_takes_the_measured_time(name):
    assert -0.018 < simulated(ROWS[name], made(0), 0, consume="strict") < 0


def check(name, **options):
    barriers = BARRIERS[name.split(",")[0]]
    table = made(barriers)
    assert [int(peak) for peak in table.peak_activations()] == [P - s + barriers for s in range(P)]
    assert -0.018 < simulated(ROWS[name], table, barriers, **options) < 0


@pytest.mark.parametrize("name", IN_SHARDS)
@pytest.mark.one_in(3)
def test_shards_take_the_measured_time(name):
    """Within what plain 1F1B lacks, whatever the vocabulary, in the published memory."""
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_SHARDS)
def test_shards_in_strict_order_take_the_measured_time(name):
    check(name, consume="strict")
