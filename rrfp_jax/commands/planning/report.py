"""What plan prints for people: the ranking, what cut and order gave, the winner's memory, and what limits it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console
from rich.table import Table

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.planning.words import (
    bytes_or_dash,
    microbatches_in_words,
    milliseconds,
    order_in_words,
    rate,
    shape_in_words,
    share,
    step_in_words,
)
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.cut_model import cut_in_words, legend
from rrfp_jax.costs.layer_costs import NONE
from rrfp_jax.planning.search.records import Plan, Ranked, Refused

_FEW, _CHANGES = 3, 5
"""How many reasons of what does not fit are told, and how many changes of the machine, those that give most."""


def show_plan(console: Console, plan: Plan, book: CostBook, *, top: int, memory_bytes: int | None) -> None:
    """The whole report, ``book`` being the costs; ``memory_bytes`` is what each device has, if that is known."""
    shown = plan.ranking[:top]
    best = shown[0]
    console.print(_ranking(plan, shown), _cuts(shown))
    console.print(f"cuts: {legend(best.choice.cut)}; a bar ends a chunk", soft_wrap=True, markup=False)
    for line in _verdict(plan, shown):
        console.print(line, soft_wrap=True, markup=False)
    console.print(comparison(plan))
    console.print(_memory(best, memory_bytes))
    if plan.sensitivities:
        console.print(_sensitivities(plan))
    for line in (*_closing(plan), *_sources(plan, book)):
        console.print(line, soft_wrap=True, markup=False)


def show_configured(console: Console, plan: Plan, book: CostBook, *, top: int, memory_bytes: int | None) -> None:
    """The one choice of a configuration, and whether it fits."""
    best = plan.ranking[0]
    console.print(_ranking(plan, plan.ranking[:top], "as configured"))
    console.print(f"cut: {cut_in_words(best.choice.cut)} ({legend(best.choice.cut)})", soft_wrap=True, markup=False)
    console.print(_memory(best, memory_bytes))
    if memory_bytes is not None and best.forecast.peak_bytes > memory_bytes:
        over = format_bytes(best.forecast.peak_bytes - memory_bytes)
        console.print(f"DOES NOT FIT: the fullest stage needs {over} more than a device has", markup=False)
    for line in _sources(plan, book):
        console.print(line, soft_wrap=True, markup=False)


def _ranking(plan: Plan, shown: Sequence[Ranked], title: str = "") -> Table:
    """A column for each figure that is known of any."""
    columns = [(heading, [cell(ranked) for ranked in shown]) for heading, cell in _COLUMNS.items()]
    told = [(heading, cells) for heading, cells in columns if set(cells) != {""}]
    title = title or f"the best {len(shown)} of {max(len(plan.judged), len(plan.ranking))}, by {plan.objective}"
    table = make_table(title, "", *(heading for heading, _ in told), numeric=True)
    table.columns[1 + [heading for heading, _ in told].index("order")].justify = "left"
    for place in range(len(shown)):
        table.add_row(str(place + 1), *(cells[place] for _, cells in told))
    return table


_COLUMNS: Mapping[str, Callable[[Ranked], str]] = {
    "stages x data x tensor": lambda ranked: shape_in_words(ranked.choice.shape),
    "micro- batches": lambda ranked: microbatches_in_words(ranked.choice.shape),
    "order": lambda ranked: order_in_words(ranked.choice),
    "remat": lambda ranked: ranked.choice.shape.remat.replace(NONE, ""),
    "step ms": step_in_words,
    "p95 ms": lambda ranked: milliseconds(ranked.forecast.p95_ms) if ranked.forecast.error_ms else "",
    "over bound": lambda ranked: share(ranked.forecast.gap),
    "bubble": lambda ranked: share(ranked.forecast.bubble),
    "tokens/s": lambda ranked: rate(ranked.forecast.tokens_per_s),
    "MFU": lambda ranked: share(ranked.forecast.mfu),
    "fullest stage": lambda ranked: format_bytes(ranked.forecast.peak_bytes),
}


def _cuts(shown: Sequence[Ranked]) -> Table:
    table = make_table("cuts", "", "cut", "why it lost to the one before it")
    table.columns[1].no_wrap = True
    for place, ranked in enumerate(shown, start=1):
        table.add_row(str(place), cut_in_words(ranked.choice.cut, short=True), ranked.why)
    return table


def _verdict(plan: Plan, shown: Sequence[Ranked]) -> Iterator[str]:
    draws = [len(ranked.forecast.draws_ms) for ranked in shown]
    fewer = [str(place) for place, number in enumerate(draws, start=1) if number < max(draws)]
    if fewer:
        yield f"{', '.join(fewer)}: behind on the first draws of the noise, and not judged on all"
    if not plan.is_complete:
        yield "INCOMPLETE: the search was interrupted, and this is the best of what it had judged by then"
    if len(plan.ranking) > 1 and not plan.is_decided:
        first, second = (ranked.forecast for ranked in plan.ranking[:2])
        apart_ms = abs(second.step_ms - first.step_ms)
        if not first.error_ms:
            yield f"not decided: 1 and 2 are {milliseconds(apart_ms)} ms apart without noise: take either"
        else:
            yield (
                f"not decided: 1 and 2 are {milliseconds(apart_ms)} ms apart, which is within the standard error of "
                "their difference: take either, or give more --draws"
            )


def comparison(plan: Plan) -> Table:
    """What the cut and what the order gave: the same devices and costs throughout."""
    table = make_table(
        "what cut and order give",
        "",
        "step ms",
        "bound ms",
        "fullest stage",
        "over found",
        "order",
        "cut",
        numeric=True,
    )
    for column in table.columns[5:]:
        column.justify = "left"
    rows = [("even cut, best named", plan.even), ("best cut, best named", plan.named), ("found", plan.ranking[0])]
    found_ms = plan.ranking[0].forecast.step_ms
    for words, ranked in rows:
        if ranked is None:
            table.add_row(words, *["-"] * 4, "none fits" if plan.is_complete else "not judged", "-")
            continue
        forecast = ranked.forecast
        table.add_row(
            words,
            step_in_words(ranked),
            milliseconds(forecast.bound_ms),
            format_bytes(forecast.peak_bytes),
            "" if ranked is plan.ranking[0] else f"{forecast.step_ms / found_ms - 1:+.1%}",
            order_in_words(ranked.choice),
            cut_in_words(ranked.choice.cut, short=True),
        )
    return table


def _memory(best: Ranked, memory_bytes: int | None) -> Table:
    cut, stages = best.choice.cut, best.forecast.memory
    has_host = any(stage.host_peak for stage in stages)
    limited = "" if memory_bytes is None else f" of {format_bytes(memory_bytes)}"
    headings = ["stage", "layers", "work ms", "all the time", "in flight", "while it runs", "peak"]
    headings += ["free"] * (memory_bytes is not None) + ["on host"] * has_host
    table = make_table(f"memory of each stage{limited}", *headings, numeric=True)
    table.columns[1].justify = "left"
    chunks, rows = cut_in_words(cut).split("|"), []
    for stage, forecast in enumerate(stages):
        cells = [
            " ".join(chunks[chunk] for chunk in cut.placement.chunks_of_stage[stage]),
            milliseconds(cut.stage_work_ms[stage]),
            format_bytes(forecast.fixed),
            bytes_or_dash(forecast.peak - forecast.fixed - forecast.temporaries),
            bytes_or_dash(forecast.temporaries),
            format_bytes(forecast.peak),
        ]
        cells += [share(1 - forecast.peak / memory_bytes)] if memory_bytes is not None else []
        rows.append((*cells, *[bytes_or_dash(forecast.host_peak)] * has_host))
    for cells_alike, alike in groupby(enumerate(rows), key=itemgetter(1)):
        numbers = [stage for stage, _ in alike]
        table.add_row(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]), *cells_alike)
    return table


def _sensitivities(plan: Plan) -> Table:
    table = make_table("what a change of the machine would give", "change", "step ms", "gain", numeric=True)
    best = sorted(plan.sensitivities, key=lambda each: -each.gain)[:_CHANGES]
    for each in best:
        table.add_row(each.change, milliseconds(each.step_ms), f"{each.gain:+.1%}")
    return table


def _closing(plan: Plan) -> Iterator[str]:
    if plan.bottleneck:
        yield f"bottleneck: {plan.bottleneck}"
    if plan.refused:
        yield f"{len(plan.refused)} layouts do not fit, for example"
        for refused in plan.refused[:_FEW]:
            yield f"  {refused_in_words(refused)}"


def _sources(plan: Plan, book: CostBook) -> Iterator[str]:
    """What the figures come from."""
    draws = f"{plan.num_draws} draws of noise" if plan.num_draws > 1 else "no noise"
    yield f"{plan.evaluations:,} orders were timed, with {draws}, seed {plan.seed}"
    yield f"costs: {book.source or 'of an unknown source'}{f', on {book.device}' if book.device else ''}"
    if any(ranked.forecast.mfu is not None for ranked in plan.ranking):
        yield "MFU: operations of the model, without what is computed again, over what the devices' peak allows"
    yield from (f"note: {note}" for note in plan.notes)


def refused_in_words(refused: Refused) -> str:
    """What does not fit, why, and what would help."""
    change = f": {refused.change}" if refused.change else ""
    shape = refused.shape
    return f"{shape_in_words(shape)}, {microbatches_in_words(shape)}, remat {shape.remat}: {refused.reason}{change}"
