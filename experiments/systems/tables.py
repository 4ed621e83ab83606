"""Tables that a study over systems prints for people."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from experiments.systems.cells import ROOM, Case, Entry
from experiments.systems.questions import PAIRS
from experiments.systems.records import System
from experiments.systems.results import Study, systems_by_hop
from experiments.systems.turnovers import Turnover
from rrfp_jax.commands.common.console import make_table
from rrfp_jax.core import STRICT
from rrfp_jax.simulation import Communication

NOT_PUBLIC = (
    "efficiencies, the rule by which communication overlaps with computation, whether memory is scaled with compute, "
    "the lengths of its slots, the number of Hanayo's waves, and its cells but for a few"
)
"""Facts of the tabular study that are not public, without which its cells cannot be repeated exactly."""
_MODES = {
    Communication.ASYNC: "async: nobody is occupied while a tensor travels",
    Communication.BLOCKING: "blocking: the sender is occupied while its tensor travels",
    Communication.RENDEZVOUS: "rendezvous: sender and receiver are occupied while a tensor travels",
}


def show_study(console: Console, study: Study) -> None:
    """Prints all tables, the systems first."""
    for line in _explain(study):
        console.print(line, soft_wrap=True)
    console.print(_systems(study), _formulas(study), _ideal(study))
    for num_stages, same in _groups(study):
        for communication in study.wishes.communications:
            console.print(_executed(study, num_stages, same, communication))
    console.print(_turnovers(study))
    if (pairs := _pairs(study)).row_count:
        console.print(pairs)
    for line in _refused(study):
        console.print(line, soft_wrap=True)


def _explain(study: Study) -> Iterator[str]:
    base = study.wishes.systems[len(study.wishes.systems) // 2]
    device, network, model = base.device, base.network, base.model
    ratios = [_ratios(study.wishes.systems, num_stages) for num_stages in study.wishes.stages]
    yield (
        f"middle system: {device.tflops:g} TFLOP/s x {device.compute_efficiency:g}, memory "
        f"{device.memory_gb_per_s:g} GB/s x {device.memory_efficiency:g} and {device.memory_latency_us:g} us, network "
        f"{network.gb_per_s:g} GB/s and {network.latency_us:g} us; others ten times slower or faster"
    )
    yield (
        f"model: {model.blocks} blocks of width {model.hidden}, cut evenly; a microbatch is {model.sequences} x "
        f"{model.sequence} tokens of {model.element_bytes} bytes; F, I and W take equally long, so B = 2F"
    )
    yield f"distinct ratios of a hop to a stage's F: {'; '.join(ratios)}"
    yield from (_MODES[communication] for communication in study.wishes.communications)
    yield (
        "paper, closed form, table: nothing communicates; strict: the table run as it is by the runtime's arbiters, in "
        "virtual time; ready, foresight: it ranks what is ready, without and with waiting for what is in sight, and no "
        f"more is held than by the table; {ROOM}: with room for {study.wishes.window} microbatches where that is more"
    )
    yield (
        "size: stages x microbatches; gain: the part of its own step by which a schedule is faster; two copies of a "
        "model (Chimera) add their gradients once per step, which is not counted"
    )
    yield f"not public of the tabular study (arXiv 2605.24006): {NOT_PUBLIC}"


def _ratios(systems: Sequence[System], num_stages: int) -> str:
    ratios = ", ".join(f"{hop.ratio:.3g}" for hop, _ in systems_by_hop(systems, num_stages))
    return f"{ratios} with {num_stages} stages"


def _systems(study: Study) -> Table:
    stages = study.wishes.stages
    headings = [f"{what}, {p} stages" for p in stages for what in ("F ms", "hop/F")]
    table = make_table("systems", "network, compute", "hop ms", *headings, "F bound by", numeric=True)
    for system in study.wishes.systems:
        cells = [text for p in stages for text in (f"{system.forward_ms(p):,.4g}", f"{system.hop(p).ratio:.3g}")]
        bound = "compute" if system.is_compute_bound else "memory"
        table.add_row(system.name, f"{system.hop_ms:,.4g}", *cells, bound)
    return table


def _formulas(study: Study) -> Table:
    title = "bubble: paper's formula / closed form of the table / table, without communication, B = 2F"
    table = _by_size(title, study)
    for num_stages, num_microbatches in study.sizes:
        cells = []
        for entry in study.wishes.entries:
            ideal = study.ideals.get(Case(entry, num_stages, num_microbatches))
            rates = [None] * 3 if ideal is None else [ideal.paper, ideal.closed_form, ideal.bubble]
            cells.append("/".join("-" if rate is None else f"{100 * max(0.0, rate):.1f}" for rate in rates))
        table.add_row(_size(num_stages, num_microbatches), *cells)
    return table


def _ideal(study: Study) -> Table:
    first = study.wishes.entries[0]
    table = _by_size(f"ideal table, without communication: gain over {first.label}, %; and peak in microbatches", study)
    for num_stages, num_microbatches in study.sizes:
        cells = []
        reference = study.ideals.get(Case(first, num_stages, num_microbatches))
        for entry in study.wishes.entries:
            ideal = study.ideals.get(Case(entry, num_stages, num_microbatches))
            gain = None if ideal is None or reference is None else reference.step / ideal.step - 1
            cells.append("-" if ideal is None else f"{_percent(gain)}, {ideal.peak:.4g}")
        table.add_row(_size(num_stages, num_microbatches), *cells)
    return table


def _groups(study: Study) -> Iterator[tuple[int, list[System]]]:
    """Yields, by number of stages, the systems that are equal to a schedule."""
    for num_stages in study.wishes.stages:
        for _, same in systems_by_hop(study.wishes.systems, num_stages):
            yield num_stages, same


def _executed(study: Study, num_stages: int, same: Sequence[System], communication: Communication) -> Table:
    """Returns a table of gains over the first schedule run strictly, so that all numbers can be compared."""
    first, hop = study.wishes.entries[0], same[0].hop(num_stages)
    names = " = ".join(system.name for system in same)
    title = f"{names}\nhop/F {hop.ratio:.3g} with {num_stages} stages, {communication.value}: gain over {first.label} "
    labels = [entry.label for entry in study.wishes.entries]
    table = make_table(f"{title}run strictly, %", "size", "order", *labels, numeric=True)
    for size in (one for one in study.sizes if one[0] == num_stages):
        reference = Case(first, *size)
        for order in study.wishes.orders:
            gains = [study.gain(Case(e, *size), order, reference, communication, hop) for e in study.wishes.entries]
            table.add_row(_size(*size) if order == STRICT else "", order, *map(_percent, gains))
    return table


def _pairs(study: Study) -> Table:
    """Returns a table of the pairs of schedules that the tabular study asks about, in every system, at its size."""
    size = (max(study.wishes.stages), min(study.wishes.microbatches))
    pairs = [cases for labels in PAIRS if (cases := study.cases_of(labels, *size))]
    modes = study.wishes.communications
    headings = [f"{one.entry.label} over {other.entry.label}, {mode.value}" for one, other in pairs for mode in modes]
    title = f"{_size(*size)}, run strictly: gain of one schedule over another, %"
    table = make_table(title, "network, compute", "hop/F", *headings, numeric=True)
    for system in study.wishes.systems if pairs else ():
        hop = system.hop(size[0])
        gains = [study.gain(one, STRICT, other, mode, hop) for one, other in pairs for mode in modes]
        table.add_row(system.name, f"{hop.ratio:.3g}", *map(_percent, gains))
    return table


def _turnovers(study: Study) -> Table:
    """Returns a table of who overtakes the schedule that is first by the ideal table; the file has the others."""
    headings = ("size", "mode", "first by table", "lead %", "overtaken by", "at hop/F")
    table = make_table(
        "where communication turns the ideal table's ranking over, run strictly", *headings, numeric=True
    )
    for size in study.sizes:
        steps = {case: ideal.step for case, ideal in study.ideals.items() if case[1:] == size}
        leader = min(steps, key=lambda case: round(steps[case], 6))
        for communication in study.wishes.communications:
            found = [t for t in study.turnovers if t.ahead == leader and t.communication is communication]
            if not found:
                table.add_row(_size(*size), communication.value, leader.entry.label, "", "nobody", "")
            for one in sorted(found, key=lambda each: each.ratio):
                table.add_row(_size(*size), communication.value, leader.entry.label, *_turnover(one, steps))
    return table


def _turnover(one: Turnover, steps: dict[Case, float]) -> tuple[str, str, str]:
    return (
        _percent(steps[one.behind] / steps[one.ahead] - 1),
        one.behind.entry.label,
        f"{one.ratio:.3g}" if one.ratio else "any",
    )


def _refused(study: Study) -> Iterator[str]:
    by_schedule: dict[Entry, list[Case]] = {}
    for case in study.refused:
        by_schedule.setdefault(case.entry, []).append(case)
    for entry, cases in by_schedule.items():
        sizes = ", ".join(_size(case.num_stages, case.num_microbatches) for case in cases)
        yield f"{entry.label} is left out at {sizes}: {study.refused[cases[0]]}"


def _by_size(title: str, study: Study) -> Table:
    labels = [entry.label for entry in study.wishes.entries]
    return make_table(title, "size", *labels, numeric=True)


def _size(num_stages: int, num_microbatches: int) -> str:
    return f"{num_stages} x {num_microbatches}"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{round(100 * part, 1) + 0.0:+.1f}"
