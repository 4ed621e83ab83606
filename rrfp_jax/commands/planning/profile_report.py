"""What a profile has found, for people and as plain data."""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.planning.profiled import Profiled

_COLUMNS = ("forward_ms", "input_gradient_ms", "weight_gradient_ms", "backward_ms", "update_ms")


def figures(profiled: Profiled) -> dict[str, Any]:
    """What JSON tells."""
    book = profiled.book
    return {
        "entries": [asdict(entry) for entry in book.entries],
        "task_ms": book.task_ms,
        "links": asdict(book.links),
        "noise": asdict(book.noise),
        "layers_off": dict(profiled.off),
        "runs": profiled.num_runs,
        "device": book.device,
    }


def show(console: Console, profiled: Profiled) -> None:
    """Print a table for each way to run, and what is common to all."""
    book = profiled.book
    headings = ("F ms", "I ms", "W ms", "B ms", "U ms", "fixed", "stash", "owed", "temporaries")
    for entry in book.entries:
        table = make_table(entry.words, "layer", *headings, numeric=True)
        for name, costs in entry.types.items():
            times = [getattr(costs, column) for column in _COLUMNS]
            sizes = (
                costs.fixed_bytes,
                costs.stash_bytes + costs.kept_bytes,
                costs.owed_bytes,
                costs.temporaries_bytes + costs.more_temporaries_bytes,
            )
            cells = ["-" if ms is None else f"{ms:.3f}" for ms in times]
            table.add_row(name, *cells, *map(format_bytes, sizes))
        console.print(table)
    for line in _words(profiled):
        console.print(line, soft_wrap=True)


def _words(profiled: Profiled) -> list[str]:
    book, off = profiled.book, profiled.off
    sigma = ", ".join(f"{kind} {value:.3f}" for kind, value in book.noise.sigma.items()) or "not known"
    links, rate = book.links, book.links.gb_per_s
    told = [f"{profiled.num_runs} tasks were timed; every task takes {book.task_ms:.3f} ms beside its layers"]
    if off:
        told[0] += "; layers added up are off by " + ", ".join(f"{kind} {share:.1%}" for kind, share in off.items())
    tail = (
        f"; {book.noise.tail:.1%} of the tasks take {book.noise.tail_factor:.1f} times as long"
        if book.noise.tail
        else ""
    )
    told.append(f"sigma of durations: {sigma}{tail}")
    told.append(
        f"links: {links.latency_ms:.3f} ms" + (f" and {rate:.2f} GB/s" if rate is not None else ", whatever the size")
    )
    return told
