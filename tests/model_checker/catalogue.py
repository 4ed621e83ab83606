"""The small pipelines that the tests explore completely: graphs, windows and hints of one size.

Two equivalences keep the product small without leaving anything out.

* A window of at least the number of microbatches never refuses a forward: before microbatch m starts, a stage holds at
  most the other microbatches. If one slot is free, all the others are held or have finished, so the oldest unfinished
  one is held or is m itself. All such windows are one class; the larger numbers stand for it here, so they are run too.
* Hints that order a stage's lanes alike and choose among them alike make the same arbiter, whatever their names: with
  one chunk per stage, ``bf`` and ``bf-deep`` are one hint. Such settings are explored once.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import factorial
from typing import TypeVar

from rrfp_jax.core import HINTS, Agreement, AheadBound, Hint, StepRules, ready, schedule_hint, stage_plan
from rrfp_jax.schedules import (
    Absences,
    Edge,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    absences,
    build_schedule,
    chain,
    schedule_names,
)
from tests.model_checker.setting import Policy, Setting

T = TypeVar("T")

PIPELINE_ONLY = StepRules(updates=False, agreement=Agreement.NONE)
"""Steps of F, B, I and W tasks alone."""
LARGEST_WINDOW = 4


def nth_permutation(items: Iterable[T], number: int) -> tuple[T, ...]:
    """The permutation of the given number, modulo how many there are; randomness comes in as the number."""
    left = list(items)
    chosen: list[T] = []
    number %= factorial(len(left))
    while left:
        place, number = divmod(number, factorial(len(left) - 1))
        chosen.append(left.pop(place))
    return tuple(chosen)


def small_graphs(num_chunks: int, num_microbatches: int, *, split: bool = False) -> dict[str, PipelineGraph]:
    """Chains and fork-join graphs of this size, by name."""
    graphs = {"chain": chain(num_chunks, num_microbatches, split=split)}
    splits = frozenset(range(num_chunks)) if split else frozenset[int]()

    def graph(
        edges: Sequence[tuple[int, int]], absent: Iterable[tuple[int, int]] = (), frozen: Iterable[tuple[int, int]] = ()
    ) -> PipelineGraph:
        return PipelineGraph(
            num_chunks,
            num_microbatches,
            tuple(Edge(*edge, edge not in frozen) for edge in edges),
            absent=absences(absent),
            split=splits,
        )

    if num_chunks >= 2:
        edges = [(c, c + 1) for c in range(num_chunks - 1)]
        graphs["frozen first chunk"] = graph(edges, frozen=edges[:1])
    if num_chunks >= 3:
        first, second, edges = two_encoders(num_chunks)
        graphs["two encoders"] = graph(edges)
        skipped = [(c, 0) for c in second] + [(c, 1) for c in first if num_microbatches > 1]
        graphs["two encoders, some skipped"] = graph(edges, absent=skipped)
        graphs["two encoders, one frozen"] = graph(edges, frozen=[edge for edge in edges if edge[0] in second])
    if num_chunks >= 4:
        edges = [(0, 1), (0, 2), (1, num_chunks - 1), (2, 3), *((c, c + 1) for c in range(3, num_chunks - 1))]
        graphs["fork and join"] = graph(sorted(set(edges)))
    return graphs


def optional_graphs(num_microbatches: int, *, split: bool = False) -> dict[str, PipelineGraph]:
    """Graphs whose last chunks run without some inputs, by name; frozen chunks before and behind what trains."""

    def graph(*edges: Edge, frozen: Iterable[int] = ()) -> PipelineGraph:
        num_chunks = 1 + max(edge.target for edge in edges)
        splits = frozenset(range(num_chunks)) if split else frozenset[int]()
        return PipelineGraph(num_chunks, num_microbatches, edges, split=splits, frozen=frozenset(frozen))

    encoder, projector = Edge(0, 1, is_optional=True), (Edge(0, 1), Edge(1, 2, is_optional=True))
    two = (Edge(0, 2, is_optional=True), Edge(1, 2, is_optional=True))
    return {
        "encoder": graph(encoder),
        "frozen encoder": graph(encoder, frozen=[0]),
        "frozen decoder": graph(encoder, frozen=[1]),
        "two encoders": graph(*two),
        "two encoders, one frozen": graph(*two, frozen=[0]),
        "projector": graph(*projector, frozen=[0]),
        "projector alone trains": graph(*projector, frozen=[0, 2]),
        "encoder into the middle": graph(Edge(0, 2), Edge(1, 2, is_optional=True), frozen=[1]),
        "everything behind is frozen": graph(encoder, Edge(1, 2), frozen=[1, 2]),
    }


def skipped(graph: PipelineGraph, microbatches: Iterable[int], encoders: Iterable[int] | None = None) -> Absences:
    """The pairs of microbatches that skip some encoders, sources of optional edges, with all before them.

    ``encoders`` None: all of them.
    """
    optional = {edge.source for edge in graph.edges if edge.is_optional}
    without = set(optional if encoders is None else encoders)
    for chunk in reversed(range(graph.num_chunks)):
        readers = graph.successors(chunk)
        if readers and set(readers) <= without:
            without.add(chunk)
    return absences((chunk, m) for chunk in without for m in microbatches)


def two_encoders(num_chunks: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """The chunks of two encoders, interleaved, and the edges that lead through them into one decoder."""
    num_encoding = 4 if num_chunks >= 6 else 2
    first, second = list(range(0, num_encoding, 2)), list(range(1, num_encoding, 2))
    decoder = list(range(num_encoding, num_chunks))
    ways = [[*first, decoder[0]], [*second, decoder[0]], decoder]
    return first, second, sorted({edge for way in ways for edge in pairwise(way)})


def table_hints(graph: PipelineGraph, placement: Placement, numbers: Iterable[int]) -> Iterator[tuple[Hint, ...]]:
    """One hint per stage: from every schedule that fits, from numbered permutations, and from these with gaps."""
    for table in fitting_tables(graph, placement):
        yield tuple(schedule_hint(order) for order in table.orders)
    for number in numbers:
        rows = [
            nth_permutation(graph.tasks(chunks), number * (1 + s)) for s, chunks in enumerate(placement.chunks_of_stage)
        ]
        yield tuple(schedule_hint(row) for row in rows)
        yield tuple(schedule_hint(row[::3]) for row in rows)


def fitting_tables(graph: PipelineGraph, placement: Placement) -> Iterator[ScheduleTable]:
    """The registered schedules of this very graph and placement."""
    per_stage = len(placement.chunks_of_stage[0])
    for name in schedule_names():
        request = ScheduleRequest(
            num_stages=placement.num_stages, num_microbatches=graph.num_microbatches, chunks_per_stage=per_stage
        )
        try:
            table = build_schedule(name, request)
        except ValueError:
            continue
        if table.graph == graph and table.placement == placement:
            yield table


def all_hints(graph: PipelineGraph, placement: Placement, numbers: Iterable[int]) -> list[tuple[Hint, ...]]:
    """Every hint of this pipeline, one per stage, those that make the same arbiters once."""
    named = ((hint,) * placement.num_stages for hint in HINTS.values())
    distinct: dict[Hashable, tuple[Hint, ...]] = {}
    for hints in (*named, *table_hints(graph, placement, numbers)):
        distinct.setdefault(tuple(_ranking(graph, placement, s, hint) for s, hint in enumerate(hints)), hints)
    return list(distinct.values())


def all_windows(placement: Placement, num_microbatches: int) -> list[tuple[int, ...]]:
    """Windows from 1 to 4 on every stage, one of each class."""
    classes = [*range(1, min(num_microbatches, LARGEST_WINDOW)), LARGEST_WINDOW]
    return list(product(classes, repeat=placement.num_stages))


def small_settings(
    graph: PipelineGraph, placement: Placement, rules: StepRules, *, numbers: Iterable[int]
) -> Iterator[list[Setting]]:
    """Every hint and every window of a pipeline: a list per hint, whose settings share most of their automata."""
    windows = all_windows(placement, graph.num_microbatches)
    for policies in all_hints(graph, placement, numbers):
        yield [
            Setting(graph=graph, placement=placement, windows=window, policies=policies, rules=rules)
            for window in windows
        ]


def ahead_settings(
    graph: PipelineGraph, placement: Placement, rules: StepRules, *, limits: Sequence[int] = (1, 2)
) -> Iterator[list[Setting]]:
    """Every named hint, every window and bounds of read-ahead for a graph with chunks that run F only."""
    chunks = [c for c in range(graph.num_chunks) if graph.reads_ahead(c)]
    for policies in all_hints(graph, placement, ()):
        yield [
            Setting(
                graph=graph,
                placement=placement,
                windows=windows,
                policies=policies,
                rules=rules,
                read_ahead=tuple(AheadBound(chunk=c, limit=limit) for c, limit in zip(chunks, of_chunks, strict=True)),
            )
            for of_chunks in product(limits, repeat=len(chunks))
            for windows in all_windows(placement, graph.num_microbatches)
        ]


def evaluation_settings(
    graph: PipelineGraph, placement: Placement, rules: StepRules, *, num_batches: int = 1
) -> Iterator[list[Setting]]:
    """Evaluations before, between and behind steps that train, with every named hint and every strict table."""
    steps = (frozenset({1}), frozenset({0}), frozenset({1, 2}))
    tables = [tuple(table.orders) for table in fitting_tables(graph, placement)]
    of_stages: list[tuple[Policy, ...]] = [*all_hints(graph, placement, ()), *tables]
    for policies in of_stages:
        yield [
            Setting(
                graph=graph,
                placement=placement,
                windows=(1,) * placement.num_stages,
                policies=policies,
                rules=rules,
                absences=((),) * (2 + (len(evaluates) > 1) + (1 in evaluates)),
                evaluates=evaluates,
                evaluation_batches=num_batches,
            )
            for evaluates in steps
        ]


def _ranking(graph: PipelineGraph, placement: Placement, stage: int, hint: Hint) -> Hashable:
    """What a stage's choices depend on. The named hints never compare across lanes; table hints may."""
    plan = stage_plan(graph, placement, stage, PIPELINE_ONLY)
    order = ready(hint).order(plan)
    if hint in HINTS.values():
        order = tuple(sorted(order, key=lambda node: plan.lanes[node]))
    return (order, hint.choose, hint.initial)
