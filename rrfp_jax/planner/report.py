"""A plan for people and as plain data: the ranking, the gains of cut and order, and the winner's memory.

Plain data are in milliseconds, bytes and shares of 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.common.console import make_table
from rrfp_jax.core import READY, STRICT
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.cut_model import cut_in_words, legend, letters_of
from rrfp_jax.costs.layer_costs import NONE
from rrfp_jax.planner.records import Plan, PlanChoice, PlanShape, Ranked, Refused
from rrfp_jax.readable import format_bytes

_FEW = 3
"""Number of shapes that do not fit and whose reason is told."""


def show_plan(
    console: Console, plan: Plan, book: CostBook, *, top: int, memory_bytes: int | None, is_configured: bool = False
) -> None:
    """Prints the whole report; ``memory_bytes`` is the memory of each device, if that is known.

    Of the one choice of a configuration (``is_configured``) it tells in place of a ranking whether it fits.
    """
    shown = plan.ranking[:top]
    cut = shown[0].choice.cut
    parts: list[Table | str] = [_ranking(plan, shown, "as configured" if is_configured else "")]
    if is_configured:
        parts += [f"cut: {cut_in_words(cut)} ({legend(cut)})", _memory(shown[0], memory_bytes)]
        if memory_bytes is not None and shown[0].choice.peak_bytes > memory_bytes:
            over = format_bytes(shown[0].choice.peak_bytes - memory_bytes)
            parts.append(f"DOES NOT FIT: the fullest stage needs {over} more than a device has")
    else:
        parts += [_cuts(shown), f"cuts: {legend(cut)}; a bar ends a chunk", *_verdict(plan, shown)]
        parts += [f"why it won: {'; '.join(plan.why)}"] * bool(plan.why)
        parts += [f"  {_alternative_in_words(ranked)}" for ranked in plan.alternatives]
        parts += [_comparison(plan), _memory(shown[0], memory_bytes)]
    if plan.refused:
        parts.append(f"{len(plan.refused)} layouts do not fit, for example")
        parts += [f"  {refused_in_words(refused)}" for refused in plan.refused[:_FEW]]
    for part in [*parts, *_sources(plan, book)]:
        console.print(part, soft_wrap=isinstance(part, str), markup=False)


def _ranking(plan: Plan, shown: Sequence[Ranked], title: str = "") -> Table:
    """Returns a table with a column for each figure that is known of any choice."""
    cells = [_cells(ranked) for ranked in shown]
    headings = [heading for heading in cells[0] if any(each[heading] for each in cells)]
    title = title or f"the best {len(shown)} of {plan.num_judged}"
    table = make_table(title, "", *headings, numeric=True)
    table.columns[1 + headings.index("order")].justify = "left"
    for place, each in enumerate(cells, start=1):
        table.add_row(str(place), *(each[heading] for heading in headings))
    return table


def _cells(ranked: Ranked) -> dict[str, str]:
    choice, forecast = ranked.choice, ranked.forecast
    tokens_per_s = forecast.tokens_per_s
    return {
        "stages x data x tensor": shape_in_words(choice.shape),
        "micro- batches": _microbatches_in_words(choice.shape),
        "order": order_in_words(choice),
        "remat": "" if set(choice.remats) == {NONE} else _runs(choice.remats),
        "step ms": _step_in_words(ranked),
        "p95 ms": milliseconds(forecast.p95_ms) if forecast.error_ms else "",
        "over bound": _percent(forecast.gap),
        "bubble": _percent(forecast.bubble),
        "tokens/s": f"{tokens_per_s:,.{0 if tokens_per_s >= 10 else 2}f}" if tokens_per_s else "",
        "MFU": _percent(forecast.mfu),
        "fullest stage": format_bytes(choice.peak_bytes),
    }


def _cuts(shown: Sequence[Ranked]) -> Table:
    devices = [ranked.choice.devices for ranked in shown]
    differ = ["devices"] * any(devices)
    table = make_table("cuts", "", "cut", *differ, "what it loses to the best, and why")
    table.columns[1].no_wrap = True
    for place, (ranked, of_stages) in enumerate(zip(shown, devices, strict=True), start=1):
        told = " ".join(",".join(map(str, numbers)) for numbers in of_stages)
        table.add_row(str(place), cut_in_words(ranked.choice.cut, short=True), *[told for _ in differ], ranked.why)
    return table


def _verdict(plan: Plan, shown: Sequence[Ranked]) -> Iterator[str]:
    draws = [len(ranked.forecast.draws_ms) for ranked in shown]
    fewer = [str(place) for place, number in enumerate(draws, start=1) if number < max(draws)]
    if fewer:
        yield f"{', '.join(fewer)}: behind on the first draws of the noise, and not judged on all"
    if len(plan.ranking) > 1 and not plan.is_decided:
        first, second = (ranked.forecast for ranked in plan.ranking[:2])
        apart_ms = abs(second.step_ms - first.step_ms)
        within = ", which is within the standard error of their difference" if first.error_ms else " without noise"
        yield f"not decided: 1 and 2 are {milliseconds(apart_ms)} ms apart{within}: take either"


def _comparison(plan: Plan) -> Table:
    """Returns the gains of the cut and of the order, on the same devices and costs throughout."""
    headings = ("step ms", "bound ms", "fullest stage", "over found", "order", "cut")
    table = make_table("what cut and order give", "", *headings, numeric=True)
    for column in table.columns[5:]:
        column.justify = "left"
    rows = [("even cut, best named", plan.even), ("best cut, best named", plan.named), ("found", plan.ranking[0])]
    found_ms = plan.ranking[0].forecast.step_ms
    for words, ranked in rows:
        if ranked is None:
            table.add_row(words, *["-"] * 4, "none fits", "-")
            continue
        forecast = ranked.forecast
        table.add_row(
            words,
            _step_in_words(ranked),
            milliseconds(forecast.bound_ms),
            format_bytes(ranked.choice.peak_bytes),
            "" if ranked is plan.ranking[0] else f"{forecast.step_ms / found_ms - 1:+.1%}",
            order_in_words(ranked.choice),
            cut_in_words(ranked.choice.cut, short=True),
        )
    return table


def _memory(best: Ranked, memory_bytes: int | None) -> Table:
    cut, stages, limits = best.choice.cut, best.choice.memory, best.choice.cut.limits(memory_bytes)
    limited = f" of {format_bytes(limits[0])}" if limits[0] and len(set(limits)) == 1 else ""
    headings = ["stage", "layers", "work ms", "all the time", "in flight", "while it runs", "peak"]
    if any(limits):
        headings.append("free")
    table = make_table(f"memory of each stage{limited}", *headings, numeric=True)
    table.columns[1].justify = "left"
    chunks, rows = cut_in_words(cut).split("|"), []
    for stage, forecast in enumerate(stages):
        cells = [
            " ".join(chunks[chunk] for chunk in cut.placement.chunks_of_stage[stage]),
            milliseconds(cut.stage_work_ms[stage]),
            format_bytes(forecast.fixed),
            _bytes_or_dash(forecast.peak - forecast.fixed - forecast.temporaries),
            _bytes_or_dash(forecast.temporaries),
            format_bytes(forecast.peak),
        ]
        if any(limits):
            cells.append(_percent(1 - forecast.peak / limit if (limit := limits[stage]) else None))
        rows.append(cells)
    for cells_alike, alike in groupby(enumerate(rows), key=itemgetter(1)):  # equal stages share a row
        numbers = [stage for stage, _ in alike]
        table.add_row(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]), *cells_alike)
    return table


def _sources(plan: Plan, book: CostBook) -> Iterator[str]:
    draws = f"{plan.num_draws} draws of noise" if plan.num_draws > 1 else "no noise"
    yield f"{plan.evaluations:,} orders were timed, with {draws}"
    yield f"costs: {book.source or 'of an unknown source'}{f', on {book.device}' if book.device else ''}"
    if any(ranked.forecast.mfu is not None for ranked in plan.ranking):
        yield "MFU: operations of the model, without what is computed again, over what the devices' peak allows"
    yield from (f"note: {note}" for note in plan.notes)


# -- words -------------------------------------------------------------------------------------------------------------


def _alternative_in_words(ranked: Ranked) -> str:
    kind, loss = ranked.why.split(": ", 1)
    choice = ranked.choice
    told = f"{shape_in_words(choice.shape)}, {_microbatches_in_words(choice.shape)}, {order_in_words(choice)}, "
    return f"{kind}, {told}{cut_in_words(choice.cut, short=True)}: {loss}"


def _runs(words: Sequence[str]) -> str:
    """Returns ``full*2 none*6``; the word alone where all are equal."""
    runs = [(word, len(list(run))) for word, run in groupby(words)]
    return " ".join(word if len(runs) == 1 else f"{word}*{number}" for word, number in runs)


def refused_in_words(refused: Refused) -> str:
    """Returns a shape that does not fit, the reason, and the changes that would help."""
    change = f": {refused.change}" if refused.change else ""
    shape = refused.shape
    return f"{shape_in_words(shape)}, {_microbatches_in_words(shape)}, remat {shape.remat}: {refused.reason}{change}"


def shape_in_words(shape: PlanShape) -> str:
    """Returns ``8 x 2 x 1``: stages, replicas, devices that share a layer; with other axes ``8 x 2 x 1 x fsdp 4``."""
    data = ",".join(map(str, shape.replicas)) or shape.data
    return " x ".join([f"{shape.num_stages} x {data} x {shape.tensor}", *(f"{a} {n}" for a, n in shape.mesh)])


def _microbatches_in_words(shape: PlanShape) -> str:
    return f"{shape.num_microbatches} of {shape.microbatch_size}"


def order_in_words(choice: PlanChoice) -> str:
    """Returns ``zb-h1 strict``, ``1f1b with foresight``, ``bfw, window 8``, ``offloaded strict, offload on 0,1``."""
    ordering = choice.ordering
    words = choice.order_name
    if ordering.schedule is not None and ordering.follows_table:
        by_readiness = READY if ordering.foresight is False else "with foresight"
        words += f" {STRICT if ordering.consume == STRICT else by_readiness}"
    if any(choice.moved_of_stage):
        words += f", offload on {','.join(str(stage) for stage, moved in enumerate(choice.moved_of_stage) if moved)}"
    if ordering.window is not None:
        windows = (ordering.window,) if isinstance(ordering.window, int | str) else ordering.window
        words += f", window {','.join(map(str, windows[:1] if len(set(windows)) == 1 else windows))}"
    if ordering.footprint is False and ordering.is_guided:
        words += ", no footprint"
    return words


def _step_in_words(ranked: Ranked) -> str:
    """Returns ``1,229.1 ± 0.3``: milliseconds, with the standard error where there is one."""
    step_ms, error_ms = ranked.forecast.step_ms, ranked.forecast.error_ms
    error = f"{error_ms:.1g}" if error_ms < 10 else f"{error_ms:,.0f}"
    return f"{milliseconds(step_ms)} ± {error}" if error_ms else milliseconds(step_ms)


def milliseconds(value: float) -> str:
    """Returns a number with as many digits as four significant ones need, at most three behind the point."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"


def _bytes_or_dash(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _percent(value: float | None) -> str:
    """Returns a share in percent; nothing where it is not known."""
    return "" if value is None else f"{value:.1%}"


# -- plain data --------------------------------------------------------------------------------------------------------


def plan_as_json(plan: Plan, book: CostBook, *, top: int) -> dict[str, Any]:
    """Returns the plan with the first ``top`` of its ranking, and the source of its figures."""
    return {
        "ranking": [_ranked_as_json(ranked) for ranked in plan.ranking[:top]],
        "is_decided": plan.is_decided,
        "even_cut_best_named": None if plan.even is None else _ranked_as_json(plan.even),
        "best_cut_best_named": None if plan.named is None else _ranked_as_json(plan.named),
        "why": [*plan.why],
        "alternatives": [_ranked_as_json(ranked) for ranked in plan.alternatives],
        "refused": [{**asdict(each.shape), "reason": each.reason, "change": each.change} for each in plan.refused],
        "evaluations": plan.evaluations,
        "num_draws": plan.num_draws,
        "costs": {
            "source": book.source,
            "device": book.device,
            "letters": letters_of([*book.layers, *book.entries[0].types]),
        },
        "notes": [*plan.notes],
    }


def _ranked_as_json(ranked: Ranked) -> dict[str, Any]:
    choice, forecast = ranked.choice, ranked.forecast
    ordering, cut = choice.ordering, choice.cut
    is_guided, figures = ordering.is_guided, asdict(forecast)
    del figures["draws_ms"]
    return {
        **asdict(choice.shape),
        "devices": choice.shape.num_devices,
        "batch_size": choice.shape.batch_size,
        "layout": cut_in_words(cut),
        "is_even": choice.is_even,
        "layers_of_chunk": [*cut.layer_counts],
        "stage_of_chunk": [*cut.placement.stage_of_chunk],
        "remat_of_stage": [*choice.remats],
        "moved_of_stage": [*choice.moved_of_stage],
        "devices_of_stage": [[*numbers] for numbers in choice.devices],
        "order": order_in_words(choice),
        "order_name": choice.order_name,
        "is_searched": choice.is_searched,
        "split_backward": cut.split,
        "consume": ordering.consume,
        "window": [*ordering.window] if isinstance(ordering.window, tuple) else ordering.window,
        "footprint": ordering.has_footprint if is_guided else None,
        "foresight": ordering.foresight is not False if is_guided else None,
        **figures,
        "gap": forecast.gap,
        "peak_bytes": choice.peak_bytes,
        "memory": [
            {
                "peak": stage.peak,
                "fixed": stage.fixed,
                "in_flight": stage.peak - stage.fixed - stage.temporaries,
                "temporaries": stage.temporaries,
            }
            for stage in choice.memory
        ],
        "stage_work_ms": [*cut.stage_work_ms],
        "why": ranked.why,
    }
