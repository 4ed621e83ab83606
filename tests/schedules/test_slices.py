"""Sequences in slices: their graph, and the published schedules of slices, by formula and with uneven slices."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest

from rrfp_jax.models.cuts import slice_lengths
from rrfp_jax.schedules import (
    KEYS,
    STREAM,
    Edge,
    PipelineGraph,
    ScheduleRequest,
    ScheduleTable,
    Task,
    build_schedule,
    chain,
    linear,
    sliced_chain,
)
from rrfp_jax.schedules.slots import BACKWARD_AS_FORWARD, EQUAL, SlotLengths, execute, per_stage

F1_B2 = SlotLengths(1, 1, 1)


def table(name: str, p: int, m: int, n: int, **more: Any) -> ScheduleTable:
    return build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m, slices=n, **more))


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_a_slice_feeds_its_own_of_the_next_chunk_and_all_later_ones() -> None:
    graph = sliced_chain(chain(2, 4), 3)
    stream = {Edge(q, 3 + q, part=STREAM) for q in range(3)}
    keys = {Edge(c + q, c + r, part=KEYS) for c in (0, 3) for q, r in ((0, 1), (0, 2), (1, 2))}
    assert set(graph.edges) == stream | keys
    assert graph.passes == ((0, 1, 2), (3, 4, 5))
    assert [graph.gives_loss(c) for c in range(6)] == [False] * 3 + [True] * 3
    assert graph.losses == {3, 4}, "nobody reads the last slice of the last chunk"
    assert graph.kept_per_microbatch((0, 1, 2)) == graph.memory_unit == 3
    assert [str(task) for task in graph.dependencies(Task.parse("4B2"))] == ["4F2", "5B2"]
    assert [str(task) for task in graph.dependencies(Task.parse("0B2"))] == ["0F2", "1B2", "2B2", "3B2"]
    assert [str(task) for task in graph.accumulations(0)[:4]] == ["2B0", "1B0", "0B0", "2B1"]


def test_the_facts_of_a_chunk_are_those_of_its_slices() -> None:
    base = PipelineGraph(
        3,
        4,
        chain(3, 4).edges,
        absent=((0, 1), (1, 1), (2, 1)),
        split=frozenset({1, 2}),
        shared=((0, 2),),
        frozen=frozenset({1}),
        weights=(1, 2, 3),
    )
    graph = sliced_chain(base, 2, lengths=(3, 1))
    assert graph.split == {2, 3, 4, 5}
    assert graph.frozen == {2, 3}
    assert graph.absent == tuple((node, 1) for node in range(6))
    assert graph.shared == ((0, 4),)
    assert graph.sharing(4) == (0, 4)
    assert graph.losses == {4}, "the next slice reads its keys"
    assert graph.weights == (0.75, 0.25, 1.5, 0.5, 2.25, 0.75)
    assert Edge(2, 3, part=KEYS) in graph.edges
    assert graph.gives_loss(4)
    assert graph.gives_loss(5)
    assert sliced_chain(base, 1) is base


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sliced_chain(chain(2, 1), 0), "a sequence has 0 slices: give 1 to 256"),
        (lambda: sliced_chain(chain(2, 1), 257), "a sequence has 257 slices: give 1 to 256"),
        (lambda: sliced_chain(chain(2, 1), 2, lengths=(1,)), "2 slices have the lengths (1,): give each slice a"),
        (lambda: sliced_chain(chain(2, 1), 2, lengths=(1, 0)), "give each slice a length above 0"),
        (lambda: sliced_chain(PipelineGraph(3, 1, (Edge(0, 2), Edge(1, 2))), 2), "forks or joins: run its sequences"),
        (lambda: sliced_chain(sliced_chain(chain(2, 1), 2), 2), "forks or joins"),
        (lambda: sliced_chain(replace(chain(2, 1), passes=((0, 1),)), 2), "cut the graph of whole sequences"),
    ],
)
def test_slices_that_cannot_be_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_an_order_that_adds_passes_up_the_wrong_way_is_not_deterministic() -> None:
    """Chunks without attention may run their slices in any order, but gradients are added up in one."""
    graph = replace(sliced_chain(chain(1, 2), 2), edges=(), losses=frozenset())
    placement = linear(1).repeated(2)

    def made(row: str) -> ScheduleTable:
        return ScheduleTable.from_orders("mine", placement, graph, [map(Task.parse, row.split())]).validate()

    made("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1").check_accumulation()
    with pytest.raises(ValueError, match="runs 0B0 before 1B0, and deterministic runs"):
        made("0F0 1F0 0B0 1B0 0F1 1F1 1B1 0B1").check_accumulation()
    with pytest.raises(ValueError, match="runs 1B1 before 0B0, and deterministic runs"):
        made("0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1").check_accumulation()


# -- tables of equal slices --------------------------------------------------------------------------------------------


def check_seq1f1b(p: int, m: int, n: int) -> None:
    found = table("seq1f1b", p, m, n)
    found.check_accumulation()
    held = [round(peak * n, 9) for peak in found.peak_activations()]
    assert held == [min(p - 1 - s + n, m * n) for s in range(p)]
    for lengths in (EQUAL, BACKWARD_AS_FORWARD):
        whole = lengths.forward + lengths.input_gradient + lengths.weight_gradient
        took = execute(found, per_stage(found, lengths)).makespan
        assert took - m * whole == pytest.approx((p - 1) * whole / n, abs=1e-9)


SIZES = [*product(range(2, 9), range(1, 17), range(1, 9))]


@pytest.mark.parametrize(("p", "m", "n"), SIZES[::61])
def test_seq1f1b_fills_and_drains_by_slices(p: int, m: int, n: int) -> None:
    check_seq1f1b(p, m, n)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(2, 9))
def test_seq1f1b_of_every_size(p: int) -> None:
    for _, m, n in (size for size in SIZES if size[0] == p):
        check_seq1f1b(p, m, n)


def test_whole_sequences_are_1f1b() -> None:
    whole = table("1f1b", 4, 8, 1)
    for name in ("seq1f1b", "slimpipe"):
        assert table(name, 4, 8, 1, chunks_per_stage=1).orders == whole.orders


def test_gpipe_of_slices_is_terapipe() -> None:
    """All slices forth, then all back (arXiv 2102.07988), in an n-th of the time that GPipe takes to fill and drain."""
    found = table("gpipe", 4, 3, 5)
    assert execute(found, per_stage(found, F1_B2)).makespan == pytest.approx(9 + 9 / 5)
    assert found.peak_activations() == pytest.approx((3, 3, 3, 3))


def check_slimpipe(p: int, v: int, n: int, m: int) -> None:
    found = table("slimpipe", p, m, n, chunks_per_stage=v)
    found.check_accumulation()
    peaks = [min(m, 1 + 2 * (p - 1 - s) / (n * v)) for s in range(p)]
    assert found.peak_activations() == pytest.approx(peaks)
    if n >= p:
        took = execute(found, per_stage(found, F1_B2)).makespan
        assert took - 3 * m == pytest.approx((p - 1) * 3 / (n * v), abs=1e-9)


@pytest.mark.parametrize(("p", "v", "n", "m"), [(2, 2, 1, 3), (4, 2, 4, 4), (4, 2, 8, 4), (3, 3, 4, 1), (6, 4, 5, 3)])
def test_slimpipe_holds_little_more_than_one_sequence(p: int, v: int, n: int, m: int) -> None:
    check_slimpipe(p, v, n, m)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(2, 9))
def test_slimpipe_of_every_size(p: int) -> None:
    for v, n, m in product((2, 3, 4), range(max(1, p - 1), 17, 3), (1, 2, 3, 8)):
        check_slimpipe(p, v, n, m)


@pytest.mark.parametrize(
    ("p", "v", "n", "share"),
    [(4, 2, 4, 0.4375), (4, 2, 8, 0.34375), (8, 2, 8, 0.234375), (4, 4, 8, 0.296875), (8, 4, 16, 0.15234375)],
)
def test_slimpipes_published_share_of_a_sequences_activations(p: int, v: int, n: int, share: float) -> None:
    """(1 + 2 (p - 1) / (n v)) / p of all that is kept of one sequence on all stages."""
    assert max(table("slimpipe", p, 4, n, chunks_per_stage=v).peak_activations()) / p == pytest.approx(share)


# -- uneven slices -----------------------------------------------------------------------------------------------------


def costs(n: int, share: float, *, is_balanced: bool) -> Sequence[float]:
    """The time of each slice where attention takes this share of a whole sequence's, cut finely."""
    tokens = 1 << 20
    ends = accumulate(slice_lengths(tokens, n, attention_share=share if is_balanced else 0.0), initial=0)
    along = [(1 - share) * end / tokens + share * (end / tokens) ** 2 for end in ends]
    return [after - before for before, after in pairwise(along)]


@pytest.mark.parametrize(
    ("p", "m", "n", "share", "equal", "balanced"),
    [
        (8, 8, 4, 0.2, 33.1875, 29.25),
        (8, 16, 4, 0.2, 60.7875, 53.25),
        (4, 8, 4, 0.2, 29.7375, 26.25),
        (8, 8, 4, 0.5, 39.09375, 29.25),
        (8, 16, 4, 0.5, 72.09375, 53.25),
        (4, 8, 4, 0.5, 34.96875, 26.25),
        (6, 5, 3, 0.5, 25 + 2 / 3, 20),
    ],
)
def test_slices_that_take_equally_long_are_quicker(
    p: int, m: int, n: int, share: float, equal: float, balanced: float
) -> None:
    found = table("seq1f1b", p, m, n)
    assert balanced == 3 * (m + (p - 1) / n)
    for is_balanced, expected in ((False, equal), (True, balanced)):
        times = costs(n, share, is_balanced=is_balanced)
        took = execute(found, lambda task, times=times: F1_B2(task) * times[task.chunk % n])  # type: ignore[misc]
        assert took.makespan == pytest.approx(expected, rel=1e-5)
