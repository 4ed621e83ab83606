"""From costs to a ranking: tables and hints on the best sites, compared on common draws of the noise.

1. Every shape that the search space allows is laid out in every way, cut best and evenly, and named tables are timed on
   it, kept to, as far as lower bounds leave a chance (:mod:`rrfp_jax.planner.sites`).
2. On the best of these sites a search looks for orders without a name (:mod:`rrfp_jax.planner.order_search`).
   On the best that are short of memory, another looks for orders of tasks and copies to the host together.
3. The best tables in every way to consume them, and hints, are compared: all on few draws, fewer and fewer candidates
   on more (:func:`compare_candidates`).
4. The best are told with their forecasts, why the first won, and why each other lost to it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations
from math import inf
from statistics import fmean
from typing import TypeVar

import numpy as np

from rrfp_jax.core import READY, STRICT, Ordering, StepRules
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.cut_model import letters_of
from rrfp_jax.costs.forecast import ChunkBytes, forecast_memory
from rrfp_jax.costs.layer_costs import LayerCosts
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.planner.best_cut import best_cut, cut_inside
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.judging import ROUNDING, Judge, draws_for, step_bound_ms
from rrfp_jax.planner.list_scheduler import memory_for_activations
from rrfp_jax.planner.order_search import copies_of, slots_with_copies
from rrfp_jax.planner.reasons import Reasons, Refusals
from rrfp_jax.planner.records import LINEAR, MIXED, Forecast, Plan, PlanChoice, PlanShape, Point, Ranked, Refused
from rrfp_jax.planner.search_space import (
    PointCosts,
    SearchSpace,
    check_machine,
    points_of,
    refused_without_points,
    shapes_of,
)
from rrfp_jax.planner.sites import Sites, TriedTable, cut_for_replicas, hints_for, is_large, is_short
from rrfp_jax.readable import format_bytes
from rrfp_jax.schedules import Op, ScheduleRequest, build_schedule, linear
from rrfp_jax.simulation import Costs, find_optimum, lower_bound, simulate

_FIRST_DRAWS = 16
"""Draws by which tables are compared."""
_SEARCHED_SITES = 3
"""Best sites on which orders without a name are searched for."""
_OFFLOADED_SITES = 2
"""Best sites short of memory on which orders with copies to the host are searched for."""
_SMALL = 8_000
"""Tasks of all named tables that are tried in every way to consume them; of those without a name half as many."""
_MOST_REFUSED = 12
"""Shapes that do not fit and whose reason is told."""
_TABLES, _HINT_SITES = 3, 3
"""The least number of tables that are tried in every way where there is noise, and the sites on which hints are."""
_ROUNDS = ((2, 12), (8, 5), (32, 2))
"""Draws of each round of a comparison, and the simulated candidates that stay in it."""
_KEPT_TO = 2
"""Candidates that keep to a table and stay to the end."""
_FEW_DRAWS = 4
"""The least number of draws of a forecast."""
_RECUT, _WORTH_CUTTING = 4, 0.01
"""Best cuts, and orders of each, in whose place cuts inside layers are tried, and the part of a step that these must
gain."""
_WORTH_SHARDS, _SHARD_STEPS = 0.01, 3
"""The part of a step that shards of the vocabulary must gain to be proposed, and the steps that are simulated."""
_ALTERNATIVES = 3
"""Alternatives to the best that are told, each of a kind of its own."""
_UNEQUAL, _NEAR, _FAR = 12, 1.15, 2.0
"""Ways to deal out devices that differ to different numbers of replicas which are judged, how much longer than the best
one they may seem to take, and how much before the order of devices is looked for."""
_IMPROVED, _SIMULATED_TASKS = 3, 30_000
"""The best of these that exchanges of devices and layers may improve, and the tasks that are simulated for that."""
_T = TypeVar("_T")
SearchProgress = Callable[[str, int, int, float], None]
"""Hears what a search does, how many steps of it are done, of how many, and the milliseconds per sample of the best so
far; infinite where nothing fits yet."""


def make_plan(
    book: CostBook,
    space: SearchSpace,
    *,
    seed: int = 0,
    draws: int | None = None,
    progress: SearchProgress = lambda doing, done, total, best_ms: None,
) -> Plan:
    """Returns the best ways to run a model on the devices of a search space, ranked.

    The same costs, space and seed give the same plan. ``draws`` is the number of draws of the noise by which the last
    candidates are judged (None: :func:`~rrfp_jax.planner.judging.draws_for`). Raises ValueError where costs and space
    contradict each other.
    """
    return _Search(book, space, seed, draws).plan(progress)


def with_optimum(plan: Plan, book: CostBook, space: SearchSpace, seconds: float) -> Plan:
    """Returns a plan with the solver's order of the best choice's cut in front, where it fits and takes less time.

    Where memory is short and activations can move to the host, half of the seconds is for orders with such copies. A
    note tells how good any order of that cut can be, within as many activations as
    memory holds. Raises ImportError without OR-tools, naming the extra.
    """
    choice, memory_bytes = plan.ranking[0].choice, space.memory_bytes or book.device_bytes
    cut, table = choice.cut, choice.ordering.schedule
    available = memory_for_activations(cut, cut.limits(memory_bytes))
    weights = [sum(cut.chunk_bytes[c].per_microbatch for c in chunks) for chunks in cut.placement.chunks_of_stage]
    slots = tuple(
        cut.num_microbatches if not weight or room == inf else max(1, min(cut.num_microbatches, int(room // weight)))
        for room, weight in zip(available, weights, strict=True)
    )
    moves, copies = slots_with_copies(cut, memory_bytes), copies_of(cut)
    asked: list[tuple[tuple[int, ...], tuple[Op, Op] | None]] = [(slots, None)]
    if copies is not None and moves is not None and is_short(cut, memory_bytes):
        asked.append((moves, copies))
    lengths_ms, links = cut.task_lengths_ms, cut.links
    least_ms = lower_bound(cut.graph, cut.placement, lengths_ms, links=links).total_ms
    judge, notes, best = Judge(book.noise, plan.num_draws, 0), list(plan.notes), choice
    for held, ways in asked:
        found = find_optimum(
            cut.graph,
            cut.placement,
            lengths_ms,
            links=links,
            slots=held,
            copies=ways,
            tables=[table] if table is not None and (ways or not table.graph.ops) else (),
            time_limit_s=seconds / len(asked),
        )
        least = "proven to be the least" if found.is_proven else f"and none takes less than {found.at_least_ms:.4g} ms"
        notes.append(
            f"the solver's order{' with copies to the host' if ways else ''} takes {found.makespan_ms:.4g} ms from the "
            f"first task to the last, {least} on this cut where stages hold {','.join(map(str, held))} microbatches"
        )
        ordering = Ordering(schedule=replace(found.table, name="optimum"), consume=STRICT)
        one = replace(choice, ordering=ordering, order_name="optimum", is_searched=True)
        if one.fits(memory_bytes) and judge.difference(best, one, plan.num_draws)[0] < 0:
            best = one
        if found.makespan_ms <= least_ms * (1 + ROUNDING):  # copies would buy nothing
            break
    plan = replace(plan, notes=tuple(notes))
    if best is choice:
        return plan
    reasons = Reasons(book, space, judge, memory_bytes, (), _FEW_DRAWS)

    def behind(ranked: Ranked, kind: str = "") -> Ranked:
        return replace(ranked, why=kind + reasons.why_lost(best, ranked.choice))

    return replace(
        plan,
        ranking=(Ranked(choice=best, forecast=forecast(best, book, judge)), *map(behind, plan.ranking))[: space.top],
        why=reasons.why_won(best, None if plan.even is None else plan.even.choice),
        alternatives=tuple(behind(each, each.why.split(": ")[0] + ": ") for each in plan.alternatives),
    )


def compare_candidates(candidates: list[PlanChoice], judge: Judge) -> list[PlanChoice]:
    """Returns the candidates, the best first; those that lost early stand behind those that lost late.

    All are compared by their means on the same first draws, so that differences have a small error; each round takes
    more draws and keeps fewer candidates. A candidate that keeps to a table takes no simulation, so the best of these
    are known by all draws and stay to the end.
    """

    def placed(some: list[PlanChoice], num_draws: int) -> list[PlanChoice]:
        # Of choices that differ by rounding alone one without copies is the best, and the one that takes least memory.
        keys = [(float(f"{judge.standing(one, num_draws):.9g}"), any(one.moved_of_stage)) for one in some]
        alike = Counter(keys)
        ranked = [
            (key, one.peak_bytes if alike[key] > 1 else 0, place)  # a forecast of memory takes long
            for place, (key, one) in enumerate(zip(keys, some, strict=True))
        ]
        return [some[place] for *_, place in sorted(ranked)]

    if judge.noise.is_none:
        return placed(candidates, 1)
    kept_to = placed([one for one in candidates if one.is_strict], judge.num_draws)[:_KEPT_TO]
    left, lost = candidates, list[PlanChoice]()
    for num_draws, number in _ROUNDS:
        found = placed(left, min(num_draws, judge.num_draws))
        ahead = [one for one in found if one not in kept_to][:number]
        left = [one for one in found if one in ahead or one in kept_to]
        lost = [one for one in found if one not in left] + lost
    return placed(left, judge.num_draws) + lost


def forecast(one: PlanChoice, book: CostBook, judge: Judge, num_draws: int | None = None) -> Forecast:
    """Returns the forecast of a candidate by the first draws (None: by all)."""
    draws_ms = judge.draws_ms(one, num_draws or judge.num_draws)
    shape, cut, nominal_ms = one.shape, one.cut, judge.nominal_ms(one)
    step_ms, number = float(draws_ms.mean()), len(draws_ms)
    sd_ms = float(draws_ms.std(ddof=1)) if number > 1 else 0.0
    samples_per_s = shape.batch_size / step_ms * 1e3
    flops = (
        sum(cut.costs.of(layer).flops for layer in range(cut.costs.num_layers)) * shape.num_microbatches * shape.data
    )
    peak = book.device_flops
    speeds = [speed for of_stage in cut.speeds_of_stage for speed in of_stage]
    return Forecast(
        step_ms=step_ms,
        p95_ms=float(np.quantile(draws_ms, 0.95)),
        sd_ms=sd_ms,
        error_ms=sd_ms / number**0.5,
        nominal_ms=nominal_ms,
        bound_ms=step_bound_ms(cut),
        bubble=max(0.0, 1 - _of_average_unit(cut) / nominal_ms),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * book.tokens_per_sample or None,
        mfu=flops / (shape.num_devices * fmean(speeds) * peak * step_ms / 1e3) if peak and flops else None,
        draws_ms=tuple(map(float, draws_ms)) if number > 1 else (),
    )


def _nearest(choices: list[PlanChoice]) -> list[tuple[str, PlanChoice]]:
    """Returns the best choices of each kind by which they differ from the first, and the kind, then further ones;
    choices come the best first."""
    found, further = list[tuple[str, PlanChoice]](), list[tuple[str, PlanChoice]]()
    for one in choices[1:]:
        first, known = choices[0], {kind for kind, _ in found}
        if (one.shape.num_stages, one.shape.data, one.shape.tensor) != (
            first.shape.num_stages,
            first.shape.data,
            first.shape.tensor,
        ):
            kind = "other stages and replicas"
        elif one.shape != first.shape or one.remats != first.remats:
            kind = "other microbatches or rematerialisation"
        elif one.devices != first.devices:
            kind = "other devices of stages"
        elif (one.cut.placement, one.cut.counts) != (first.cut.placement, first.cut.counts):
            kind = "another cut"
        elif any(one.moved_of_stage) != any(first.moved_of_stage):
            kind = "copies to the host" if any(one.moved_of_stage) else "no copies to the host"
        else:
            kind = "another order"
        (further if kind in known else found).append((kind, one))
    return [*found, *further][:_ALTERNATIVES]


def _best_of(some: list[_T], worth: Callable[[_T], float], number: int, near: float) -> list[_T]:
    """Returns the best ``number`` of some, as far as they are near the best of all and can be at all."""
    found = sorted((worth(one), place) for place, one in enumerate(some))[:number]
    return [some[place] for value, place in found if value < inf and value <= found[0][0] * near]


def _widened(one: PlanChoice) -> tuple[int, ...]:
    """Returns the windows of a hint, times the replicas that each stage stands for."""
    most, windows = one.shape.data, one.order.windows
    return tuple(window * -(-most // number) for window, number in zip(windows, one.shape.replicas, strict=True))


def _of_average_unit(cut: CutModel) -> float:
    """Returns the milliseconds of work of an average replica of a stage."""
    works_ms = [
        ms * min(speeds) / speed
        for ms, speeds in zip(cut.stage_work_ms, cut.speeds_of_stage, strict=True)
        for speed in speeds
    ]
    return sum(works_ms) / len(works_ms)


# -- shards of the vocabulary ------------------------------------------------------------------------------------------


def shards_note(best: PlanChoice, book: CostBook, judge: Judge, memory_bytes: int | None) -> tuple[str, ...]:
    """Returns a sentence with the options of a run with embedding and head in shards on all stages, on the devices of
    the best choice; none where that does not gain a hundredth without noise, or does not fit."""
    shape, p, m, letters = best.shape, best.shape.num_stages, best.shape.num_microbatches, letters_of(book.layers)
    if p < 2 or shape.replicas or shape.remat == MIXED or book.machine is not None or book.ends:
        return ()
    if (letters[book.layers[0]], letters[book.layers[-1]]) != ("E", "L") or len(book.layers) < p + 2:
        return ()
    target_ms = judge.nominal_ms(best) * (1 - _WORTH_SHARDS)
    costs = book.at(microbatch_size=shape.microbatch_size, tensor=shape.tensor, remat=shape.remat)
    works_ms = [costs.of(layer).work_ms(split=False) for layer in range(costs.num_layers)]
    if m * sum(works_ms) / p > target_ms:  # even stages that are always busy take as long
        return ()
    cut = best_cut(replace(costs, layers=costs.layers[1:-1]), linear(p), m, split=False, replicas=shape.data)
    first, last = costs.of(0), costs.of(costs.num_layers - 1)
    table = build_schedule("vocabulary", ScheduleRequest(num_stages=p, num_microbatches=m))
    sizes, found = _shard_sizes(cut, first, last), list[tuple[float, str, int]]()
    extra_ms = costs.links.transfer_ms(first.output_bytes) - costs.links.latency_ms
    links = replace(cut.links, extra_ms=dict.fromkeys(permutations(range(p), 2), extra_ms))
    for consume, words in ((STRICT, STRICT), (READY, "foresight")):
        order = Ordering(schedule=table, consume=consume).resolve(table.placement, table.graph)
        peak = max(stage.peak for stage in forecast_memory(order, sizes, m))
        if memory_bytes is None or peak <= memory_bytes:
            timed, machine = _shard_times(cut, first, last), replace(cut.machine, links=links)
            run = simulate(order.arbiters(StepRules()), timed, machine=machine, num_steps=_SHARD_STEPS)
            found.append((run.step_ms[-1], words, peak))
    if not found or min(found)[0] > target_ms:
        return ()
    step_ms, words, peak = min(found)
    layout = "null" if len({*cut.counts}) == 1 else f"'{ChunkLayout(layers=cut.counts)}'"
    gain = 1 - step_ms / judge.nominal_ms(best)
    return (
        f"embedding and head in shards on all stages take {step_ms:.4g} ms, {gain:.1%} less than 1 without noise, and "
        f"{format_bytes(peak)} on the fullest stage: rrfp train, configured as 1, with --schedule vocabulary --layout "
        f"{layout} --consume {words} --hint null --window null --backward null --chunks-per-stage null",
    )


def _shard_times(cut: CutModel, first: LayerCosts, last: LayerCosts) -> Costs:
    """Returns the times of the graph of :func:`rrfp_jax.schedules.vocabulary_sharded`, given the cut of the layers
    between embedding and head. Shards take a part of what is cut; the loss only joins a few numbers."""
    p, m, chain = cut.placement.num_stages, cut.num_microbatches, cut.simulated_costs()
    embedding, head = (np.broadcast_to(np.array(each.task_ms(split=False)) / p, (p, m, 3)) for each in (first, last))
    sums_ms = [cut.costs.links.sum_ms(each.gradient_bytes / p, cut.replicas_of_stage[0]) for each in (first, last)]
    assert isinstance(chain.reduce_ms, tuple)
    assert isinstance(chain.update_ms, tuple)
    return Costs(
        durations_ms=np.concatenate((embedding, cut.durations_ms[0], head, np.zeros((1, m, 3))))[None],
        reduce_ms=(*[sums_ms[0]] * p, *chain.reduce_ms, *[sums_ms[1]] * p, 0.0),
        update_ms=(*[first.update_ms / p] * p, *chain.update_ms, *[last.update_ms / p] * p, 0.0),
    )


def _shard_sizes(cut: CutModel, first: LayerCosts, last: LayerCosts) -> dict[int, ChunkBytes]:
    """Returns the bytes of the same chunks. A head keeps the stream, and the gradient that it has made of it."""
    p, stream = cut.placement.num_stages, first.output_bytes

    def shard(whole: LayerCosts, **sizes: int) -> ChunkBytes:
        none = {"stash": 0, "owed": 0, "inputs": 0, "output_grads": 0}
        temporaries = {"temporaries": whole.temporaries_bytes, "step_temporaries": whole.step_temporaries_bytes}
        return ChunkBytes(**none | {"fixed": whole.fixed_bytes // p, "outputs": stream} | temporaries | sizes)

    layers = [replace(each, inputs=each.inputs or p * stream, output_grads=stream) for each in cut.chunk_bytes]
    embeddings, heads = [shard(first, output_grads=stream)] * p, [shard(last, stash=2 * stream, inputs=stream)] * p
    loss = ChunkBytes(fixed=0, stash=0, owed=0, inputs=0, output_grads=0, outputs=0, temporaries=0)
    return dict(enumerate([*embeddings, *layers, *heads, loss]))


class _Search:
    def __init__(self, book: CostBook, space: SearchSpace, seed: int, draws: int | None) -> None:
        self.book, self.space = book, space
        self.memory_bytes = space.memory_bytes or book.device_bytes
        devices = book.machine.devices if book.machine else ()
        self._has_limits = self.memory_bytes is not None or any(device.bytes for device in devices)
        check_machine(book, space)
        self.shapes = shapes_of(book, space)
        self.judge = Judge(book.noise, draws or draws_for(self.shapes), seed)
        self.costs = PointCosts(book, space)
        self.sites = Sites(self.costs, self.judge, self.memory_bytes, _FIRST_DRAWS)
        self.refused: list[Refused] = []
        self._hints_tried: list[PlanChoice] = []

    def plan(self, progress: SearchProgress) -> Plan:
        for shape in (shape for shape in self.shapes if not shape.replicas):
            points = list(points_of(shape, self.book, self.space))
            if not points:
                self.refused.append(refused_without_points(shape, self.book))
            for point in points:
                for order in self.costs.orders(shape):
                    self.sites.add(replace(point, order=order))
        total = len(self.sites.waiting)
        for _ in self.sites.look():
            progress("tables", total - len(self.sites.waiting), total, self.sites.best)
        if self.space.schedules is None:
            for number, _ in enumerate(self.sites.search(_SEARCHED_SITES)):
                progress("orders", number + 1, _SEARCHED_SITES, self.sites.best)
            if STRICT in self.space.consumptions:
                for number, _ in enumerate(self.sites.offload(_OFFLOADED_SITES)):
                    progress("copies to the host", number + 1, _OFFLOADED_SITES, self.sites.best)
        best = compare_candidates([*self._pool(), *self._unequal()], self.judge)
        return self._ranked([*self._inside_layers(best), *best])

    # -- candidates ----------------------------------------------------------------------------------------------------

    def _pool(self) -> list[PlanChoice]:
        """Returns the candidates to compare: the best tables that fit, evenly cut ones too, and hints."""
        may_fit = [table for table in self.sites.tables if table.may_fit(self.memory_bytes)]
        by_value = sorted(may_fit, key=lambda table: table.value)
        named = [table for table in by_value if not table.is_searched]
        searched = [table for table in by_value if table.is_searched]
        best = [*self._ways(named, _SMALL), *self._ways(searched, _SMALL // 2)]
        best += [one for one in self._ways([table for table in named if table.is_even], 0) if one not in best]
        return best if self._is_proven else best + self._hints()

    @property
    def _is_proven(self) -> bool:
        """Whether nothing on any site can be quicker than some table, kept to. Then only kept tables are compared."""
        if not self.book.noise.is_none or STRICT not in self.space.consumptions:
            return False
        return self.sites.best <= self.sites.least * (1 + ROUNDING)

    def _ways(self, tables: list[TriedTable], num_tasks: int) -> list[PlanChoice]:
        """Returns all ways to consume the first tables that fit: of one table at least, with noise of a few, and of
        further ones up to ``num_tasks`` tasks together."""
        found: list[PlanChoice] = []
        is_proven = self._is_proven
        wanted = 1 if not num_tasks or self.book.noise.is_none else _TABLES
        for table in tables:
            ways = [one for one in table.fitting(self.space, self.memory_bytes) if one.is_strict or not is_proven]
            if ways:
                found += ways
                wanted -= 1
                num_tasks -= sum(map(len, table.table.orders))
            if wanted <= 0 and num_tasks <= 0:
                break
        return found

    def _unequal(self) -> list[PlanChoice]:
        """Returns hints where stages have different numbers of replicas, if that is asked for."""
        found = list[tuple[PlanChoice, Point]]()
        for point in self._unequal_points():
            costs, shape = self.costs.of(point), point.shape
            for split in (True, False):
                try:
                    cuts = [cut_for_replicas(costs, shape, self.memory_bytes, split=split)]
                except ValueError:  # ends of parts leave no such cut
                    continue
                if point.order:
                    counts = self.costs.deals(shape).counts(point.order)
                    cuts += [replace(cut, counts=counts) for cut in cuts if cut.counts != counts]
                found += [(one, point) for cut in cuts for one in self._unequal_hints(point, cut)]
        choices = [one for one, _ in found]
        if self.book.machine is not None:
            found.sort(key=lambda each: self._simulated(each[0]))
            left = _SIMULATED_TASKS
            for one, point in found[:_IMPROVED]:
                better, left = self._improved(one, point, left)
                choices += [better] if better is not one else []
        return choices

    def _simulated(self, one: PlanChoice) -> float:
        """Returns milliseconds per sample without noise."""
        return self.judge.nominal_ms(one) / one.shape.batch_size

    def _improved(self, best: PlanChoice, point: Point, left: int) -> tuple[PlanChoice, int]:
        """Returns the choice to which exchanges of devices, and transfers of a layer between neighbours, lead as long
        as one helps in simulation, and how many tasks may still be simulated."""
        is_better = True
        while is_better:
            is_better = False
            for other, cut in self._neighbours(point, best.cut):
                for one in self._unequal_hints(other, cut):
                    if left > 0 and one.order_name == best.order_name:
                        left -= len(cut.counts) * cut.num_microbatches * one.shape.data
                        if self._simulated(one) < self._simulated(best) * (1 - ROUNDING):
                            best, point, is_better = one, other, True
        return best, left

    def _neighbours(self, point: Point, cut: CutModel) -> Iterator[tuple[Point, CutModel]]:
        """Yields a cut with two of its devices exchanged, or with a layer in the chunk beside its own."""
        deals = self.costs.deals(point.shape)
        for a, b in combinations(range(len(point.order)), 2):
            order = list(point.order)
            order[a], order[b] = order[b], order[a]
            other = replace(point, order=tuple(order))
            if deals.step_ms(other.order) <= deals.step_ms(point.order) * _NEAR:
                yield other, replace(cut, costs=self.costs.of(other))
        for giver, taker in permutations(range(len(cut.counts)), 2):
            counts = list(cut.counts)
            counts[giver] -= 1
            counts[taker] += 1
            with suppress(ValueError):  # an empty chunk, or one that passes an end
                yield point, replace(cut, counts=tuple(counts))

    def _unequal_points(self) -> list[Point]:
        """Returns the shapes with different numbers of replicas, where devices differ the most promising ones, with
        their devices."""
        shapes = [shape for shape in self.shapes if shape.replicas and len(self.book.ends) < shape.num_stages]
        deals, is_alike = self.costs.deals, self.book.machine is None
        if not is_alike:

            def quick_ms(shape: PlanShape) -> float:
                return deals(shape).quick_ms() / shape.batch_size

            shapes = _best_of(shapes, quick_ms, 2 * _UNEQUAL, _FAR)
        points = [
            Point(shape=shape, family=LINEAR, chunks=1, order=order)
            for shape in shapes
            for order in self.costs.orders(shape)
        ]
        if is_alike:
            return points

        def least_ms(point: Point) -> float:
            return deals(point.shape).step_ms(point.order) / point.shape.batch_size

        return _best_of(points, least_ms, _UNEQUAL, _NEAR)

    def _unequal_hints(self, point: Point, cut: CutModel) -> list[PlanChoice]:
        """Returns the hints on a cut, with as large windows as fit."""
        found = list[PlanChoice]()
        for one in hints_for(point, cut, self.space, self.memory_bytes, is_even=False):
            # A stage for several replicas may hold as much as these would, where memory suffices.
            wide = replace(one, ordering=replace(one.ordering, window=_widened(one)))
            found += [each for each in (wide, one) if each.fits(self.memory_bytes)][:1]
        return found

    def _inside_layers(self, best: list[PlanChoice]) -> list[PlanChoice]:
        """Returns choices with cuts inside layers, in the places of the best, that take clearly less time than any of
        these: plans stay simple where that gains little."""
        of_cuts = dict[int, list[PlanChoice]]()
        for one in best:
            # Copies to the host, and different replicas, have been worked out for their cut.
            is_simple = not one.shape.replicas and not any(one.moved_of_stage)
            if is_simple and (id(one.cut) in of_cuts or len(of_cuts) < _RECUT):
                of_cuts.setdefault(id(one.cut), []).append(one)

        def quick(some: list[PlanChoice]) -> list[PlanChoice]:
            """Returns those that keep to a table: without noise they are as good as any, and quickly timed."""
            return [one for one in some if one.is_strict and self.book.noise.is_none] or some

        recut = list[tuple[float, CutModel, list[PlanChoice]]]()
        for choices in of_cuts.values():
            first = choices[0]
            limits = first.cut.limits(self.memory_bytes)
            cut = cut_inside(first.cut, None if set(limits) == {None} else MemoryBudget.of_order(first.order, limits))
            if cut is not None:
                recut.append((step_bound_ms(cut) / first.shape.batch_size, cut, choices))
        found = list[PlanChoice]()
        least = self.judge.standing(best[0], self.judge.num_draws) * (1 - _WORTH_CUTTING) if best else 0.0
        to_beat = least
        for bound, cut, choices in sorted(recut, key=lambda each: each[0]):
            if bound > to_beat:
                break
            ways = [replace(one, cut=cut, is_even=False) for one in quick(choices)[:_RECUT]]
            if self.space.schedules is None:
                ways += quick(self._ways(self.sites.tables_on(choices[0].shape, cut), 0))
            fitting = [one for one in ways if one.fits(self.memory_bytes)]
            found += fitting
            if self.book.noise.is_none:  # the bounds of the cuts that follow spare their search
                to_beat = min([to_beat, *(self.judge.standing(one, 1) for one in fitting)])
        ahead = compare_candidates(found, self.judge)
        return [one for one in ahead if self.judge.standing(one, self.judge.num_draws) <= least]

    def _hints(self) -> list[PlanChoice]:
        """Returns hints on the sites with the best bounds, and on those of shapes for which there is no table."""
        with_table = {table.point.shape for table in self.sites.tables if table.has_fit}
        for place, site in enumerate(sorted(self.sites.opened, key=lambda site: site.least)):
            few = is_large(site.point)
            if place < (1 if few else _HINT_SITES) or site.point.shape not in with_table:
                for cut, is_even in site.cuts[: 1 if few else 2]:
                    self._hints_tried += hints_for(site.point, cut, self.space, self.memory_bytes, is_even=is_even)
        return self._hints_tried

    # -- the plan ------------------------------------------------------------------------------------------------------

    def _ranked(self, best: list[PlanChoice]) -> Plan:
        distinct: dict[object, PlanChoice] = {}  # of each order on a cut the best way to consume it
        for one in best:
            distinct.setdefault(
                (one.shape, one.cut.placement, one.cut.counts, one.remats, one.devices, one.order_name), one
            )
        top = list(distinct.values())[: self.space.top]
        reasons = Reasons(self.book, self.space, self.judge, self.memory_bytes, self.sites.tables, _FEW_DRAWS)
        ranking = [self._told(one) for one in top]
        ranking[1:] = [replace(ranked, why=reasons.why_lost(top[0], ranked.choice)) for ranked in ranking[1:]]
        named = [one for one in best if not one.is_searched]
        even = [one for one in named if one.is_even]
        is_decided, notes = bool(top), []
        if len(top) > 1:
            ahead, error = self.judge.difference(top[0], top[1], self.judge.num_draws)
            is_decided = ahead > error
        if not self._has_limits:
            notes.append("how much memory a device has is not known, so nothing is refused for lack of it")
        if top and self.space.schedules is None:
            notes += shards_note(top[0], self.book, self.judge, self.memory_bytes)
        if self.book.noise.is_none:
            notes.append("the costs do not say how durations vary, so all times are those of a step without noise")
        return Plan(
            ranking=tuple(ranking),
            is_decided=is_decided,
            refused=tuple(self._refused()),
            even=self._told(even[0]) if even else None,
            named=self._told(named[0]) if named else None,
            why=reasons.why_won(top[0], even[0] if even else None) if top else (),
            alternatives=tuple(
                replace(self._told(one), why=f"{kind}: {reasons.why_lost(top[0], one)}")
                for kind, one in _nearest(list(distinct.values()))
            ),
            num_judged=len(distinct),
            evaluations=self.judge.evaluations,
            num_draws=self.judge.num_draws,
            notes=tuple(notes),
        )

    def _told(self, one: PlanChoice) -> Ranked:
        # One that lost early is told by the draws by which it lost: they say enough, and are known already.
        num_draws = max(_FEW_DRAWS, self.judge.num_known(one))
        return Ranked(choice=one, forecast=forecast(one, self.book, self.judge, num_draws))

    def _refused(self) -> list[Refused]:
        """Returns shapes of which nothing fits."""
        fitting = {table.point.shape for table in self.sites.tables if table.has_fit}
        fitting |= {one.shape for one in self._hints_tried}
        short = [*self.sites.refused, *(table.point.shape for table in self.sites.tables)]
        lacking = [shape for shape in dict.fromkeys(short) if shape not in fitting and shape.remat != MIXED]
        found = list(self.refused)
        if self._has_limits:
            refusals = Refusals(self.costs, self.memory_bytes)
            found += [refusals.refused(shape) for shape in lacking[:_MOST_REFUSED]]
        distinct = {(each.shape.num_stages, each.shape.data, each.shape.tensor, each.reason): each for each in found}
        return list(distinct.values())
