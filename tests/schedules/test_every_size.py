"""Every table that was ever given out stays as it is: digests for all sizes, any graph, and runs of the hints.

``golden/every_size.txt`` has a line for each schedule, with its options, and number of stages: a digest for each number
of microbatches from 1 on, ``----`` where these sizes are refused. ``golden/any_graph.txt`` has the same for the
schedules of any graph, a digest for each of some random graphs, and ``golden/hint_runs.txt`` a digest of each of some
simulated runs. A digest is over the order of every stage, the placement and the graph, and what the table says of
itself as a hint. After an intended change, write them anew: ``python -m tests.schedules.test_every_size``.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rrfp_jax.core import HINTS
from rrfp_jax.schedules import (
    Edge,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    build_schedule,
    chain,
    looped,
    waves,
)
from rrfp_jax.schedules.registry import schedules_of_any_graph
from rrfp_jax.simulation import Communication, Links, Machine
from tests.simulation.helpers import by_hint, run

GOLDEN = Path(__file__).parent / "golden"
STAGES, MICROBATCHES = range(1, 9), range(1, 25)
NUM_GRAPHS = 60
NUM_RUNS = 200
UNEVEN = {"durations_ms": (1.25, 1.5, 0.75), "comm_ms": 0.375}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            *(
                "1f1b",
                "1f1b-split",
                "asymmetric-chimera",
                "bitpipe",
                "chimera",
                "dualpipe-v",
                "eager-1f1b",
                "gpipe",
                "greedy-chimera",
            ),
            *("v-half", "v-min", "zb-auto", "zb-h1", "zb-h2", "zb-v"),
        )
    },
    "eager-1f1b, window 4": ("eager-1f1b", {"window": 4}),
    "eager-1f1b, window 1": ("eager-1f1b", {"window": 1}),
    "zb-auto, uneven, memory 3": ("zb-auto", {"memory_limit": 3.0, **UNEVEN}),
    **{
        f"{name}, {v} chunks": (name, {"chunks_per_stage": v})
        for name in ("breadth-first", "interleaved-1f1b", "interleaved-1f1b-split", "hanayo", "gis")
        for v in (1, 2, 3, 4)
    },
    **{f"seq1f1b, {n} slices": ("seq1f1b", {"slices": n}) for n in (1, 2, 3, 4, 8)},
    **{
        f"slimpipe, {v} chunks, {n} slices": ("slimpipe", {"chunks_per_stage": v, "slices": n})
        for v in (1, 2, 3)
        for n in (2, 4, 8)
    },
    **{f"{name}, 3 slices": (name, {"slices": 3}) for name in ("1f1b", "gpipe", "zb-h1")},
    **{name: (name, {}) for name in ("vocabulary", "vocabulary:1")},
    "interleaved-1f1b-split, uneven": ("interleaved-1f1b-split", UNEVEN),
    **{f"gis, groups of {size}": ("gis", {"group_size": size}) for size in range(1, 9)},
}


def digest(table: ScheduleTable) -> str:
    graph, stands_for = table.graph, table.hint
    sets = [sorted(graph.split), sorted(graph.frozen)]
    what = [
        table.name,
        table.placement.stage_of_chunk,
        graph.num_microbatches,
        [tuple(edge[:4]) for edge in graph.edges],
    ]
    what += [graph.absent, sets, graph.shared, (), table.weights_fill]
    what += [graph.passes, sorted(graph.losses), graph.weights, [edge.part for edge in graph.edges]] * bool(
        graph.passes
    )
    what += [[" ".join(map(str, row)) for row in one.rows] for one in (table, stands_for) if one is not None]
    return hashlib.blake2b(repr(what).encode(), digest_size=2).hexdigest()


def at(name: str, **sizes: Any) -> str:
    try:
        return digest(build_schedule(name, ScheduleRequest(**sizes)))
    except ValueError:
        return "----"


def line(variant: str, num_stages: int, microbatches: range = MICROBATCHES) -> list[str]:
    name, options = VARIANTS[variant]
    return [at(name, num_stages=num_stages, num_microbatches=m, **options) for m in microbatches]


def any_graph(random: Random) -> tuple[PipelineGraph, Placement]:
    """A graph of up to seven chunks that leads to one loss, on any placement, with frozen chunks."""
    num_chunks = random.randint(1, 7)
    edges = []
    for source in range(num_chunks - 1):
        later = range(source + 1, num_chunks)
        targets = sorted(random.sample(later, random.randint(1, min(3, len(later)))))
        edges += [Edge(source, target, random.random() < 0.8, random.random() < 0.3) for target in targets]
    stages = [random.randint(0, 4) for _ in range(num_chunks)]
    numbers = {stage: number for number, stage in enumerate(sorted(set(stages)))}
    frozen = frozenset(chunk for chunk in range(num_chunks) if random.random() < 0.2)
    graph = PipelineGraph(num_chunks, random.randint(1, 12), tuple(edges), frozen=frozen)
    return graph, Placement(tuple(numbers[stage] for stage in stages))


def of_graphs(name: str, numbers: range = range(NUM_GRAPHS)) -> list[str]:
    digests = []
    for number in numbers:
        graph, placement = any_graph(Random(number))
        sizes = {"num_stages": placement.num_stages, "num_microbatches": graph.num_microbatches}
        digests.append(at(name, **sizes, graph=graph, placement=placement))
    return digests


def hint_run(number: int) -> str:
    """One simulated run: which task started when, on a random pipeline with random times."""
    random = Random(1000 + number)
    num_stages, m, split = random.randint(1, 5), random.randint(1, 10), random.random() < 0.5
    placement = random.choice([looped(num_stages, random.randint(1, 3)), waves(num_stages, 1)])
    graph = chain(placement.num_chunks, m, split=split)
    hint = random.choice(list(HINTS))
    communication = random.choice([Communication.ASYNC, Communication.BLOCKING])
    is_early = communication is Communication.ASYNC and random.randint(0, 1) == 1
    stages = by_hint(graph, placement, hint, window=random.randint(1, 8), certain_ahead=is_early)
    times = (random.choice([0.5, 1.0, 2.0]), random.choice([1.0, 1.5]), random.choice([0.25, 1.0]))
    machine = Machine(links=Links(latency_ms=random.choice([0.0, 0.25, 1.5])), communication=communication)
    ran = run(stages, times, machine=machine, num_steps=2)
    spans = [(span.step, span.stage, str(span.task), round(span.start_s, 9)) for span in ran.timeline.spans]
    return hashlib.blake2b(repr(spans).encode(), digest_size=4).hexdigest()


def golden(name: str) -> dict[str, list[str]]:
    rows = (row.rpartition(": ") for row in (GOLDEN / name).read_text().splitlines())
    return {what: digests.split() for what, _, digests in rows}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_small_sizes(variant: str) -> None:
    known, (first, second) = golden("every_size.txt"), (range(1, 9), range(3, 25, 7))
    for p in (1, 2, 3, 4):
        row = known[f"{variant}, {p} stages"]
        assert line(variant, p, first) == row[:8]
    row = known[f"{variant}, 5 stages"]
    assert line(variant, 5, second) == [row[m - 1] for m in second]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_size(variant: str, num_stages: int) -> None:
    assert line(variant, num_stages) == golden("every_size.txt")[f"{variant}, {num_stages} stages"]


@pytest.mark.parametrize("name", schedules_of_any_graph())
def test_any_graph(name: str) -> None:
    assert of_graphs(name) == golden("any_graph.txt")[name]


def test_some_runs_of_the_hints() -> None:
    assert [hint_run(number) for number in range(0, NUM_RUNS, 8)] == golden("hint_runs.txt")["runs"][::8]


@pytest.mark.slow
def test_all_runs_of_the_hints() -> None:
    assert [hint_run(number) for number in range(NUM_RUNS)] == golden("hint_runs.txt")["runs"]


def every_size() -> Iterator[tuple[str, list[str]]]:
    for variant in VARIANTS:
        for p in STAGES:
            yield f"{variant}, {p} stages", line(variant, p)


def write(name: str, lines: Iterator[tuple[str, list[str]]]) -> None:
    (GOLDEN / name).write_text("".join(f"{what}: {' '.join(digests)}\n" for what, digests in lines))


FILES: dict[str, Callable[[], Iterator[tuple[str, list[str]]]]] = {
    "every_size.txt": every_size,
    "any_graph.txt": lambda: ((name, of_graphs(name)) for name in schedules_of_any_graph()),
    "hint_runs.txt": lambda: iter([("runs", [hint_run(number) for number in range(NUM_RUNS)])]),
}

if __name__ == "__main__":
    for each, lines in FILES.items():
        write(each, lines())
