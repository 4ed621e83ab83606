"""RQ1: do the published speed-ups come out, and which settings do they need?

The paper's twelve settings on up to 128 consumer cards and its eight larger ones, of which the microbatch size, the
lengths of samples, the cut of the models and the share of communication are not published. So each setting is
simulated over plausible values of them, and the answer is a range. Tasks take time in proportion to the operations of
the named models' layers (:mod:`rrfp_jax.costs.flops`), samples have published lengths
(:mod:`experiments.sample_lengths`), balanced over microbatches or as they come; a transfer takes a tenth
of a mean forward, as long as one, or three times as long. Tensor parallelism changes only the ratio of these two.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from experiments.paper.pictures import draw_ranges
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.scene import peaks_above_1f1b
from experiments.paper.tables import markdown, settings_of
from experiments.workload_options import on_graph
from experiments.workloads import Workload
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES, GraphOptions, make_graph
from rrfp_jax.costs.flops import DecoderSizes
from rrfp_jax.models.presets import ModelPair, model_pair
from rrfp_jax.schedules import Absences, PipelineGraph, Placement
from rrfp_jax.simulation import Communication, Costs, Links, Machine, lognormal, simulate
from rrfp_jax.simulation.costs import Durations

GPT3 = "gpt3-large"
GPT3_SIZES = DecoderSizes(
    hidden=1536, num_layers=24, num_heads=16, num_kv_heads=16, head_dim=96, mlp_dim=4096, vocab_size=50_257
)
"""Sizes of GPT-3 Large (arXiv 2005.14165, table 2.1). An MLP of two matrices counts as one of three, 2/3 as wide."""
GPT3_TOKENS = 2048
SIGMA = 0.1
"""Sigma of the log-normal noise of tasks, beside the variation that the samples cause."""
MEAN_FORWARD_MS = 20.0
STEPS = 2


class Published(NamedTuple):
    """Published seconds per step of 1F1B, zero bubble, BF and BFW in one setting."""

    model: str
    layout: str
    stages: int
    batch: int
    seconds: tuple[float, float, float, float]

    @property
    def speed_up(self) -> float:
        """Speed-up of the better of the two hints."""
        return self.seconds[0] / min(self.seconds[2:])


PUBLISHED = (
    Published(GPT3, "TP1 PP8", 8, 64, (3.28, 2.97, 2.29, 2.10)),
    Published(GPT3, "TP1 PP16", 16, 64, (2.09, 1.74, 1.26, 1.18)),
    Published(GPT3, "TP2 PP8", 8, 64, (3.66, 3.27, 3.03, 2.81)),
    Published(GPT3, "TP2 PP16", 16, 64, (2.34, 2.03, 1.63, 1.57)),
    Published("qwen3-1.7b+vit-h", "TP1 PP8", 8, 192, (11.49, 9.91, 5.98, 5.68)),
    Published("qwen3-1.7b+vit-h", "TP1 PP16", 16, 192, (9.04, 7.40, 4.50, 4.33)),
    Published("qwen3-1.7b+vit-h", "TP2 PP8", 8, 192, (12.94, 11.86, 7.66, 7.41)),
    Published("qwen3-1.7b+vit-h", "TP2 PP16", 16, 192, (12.54, 11.95, 7.07, 6.74)),
    Published("qwen3-4b+vit-big", "TP1 PP8", 8, 192, (14.05, 12.61, 7.84, 7.52)),
    Published("qwen3-4b+vit-big", "TP1 PP16", 16, 192, (11.01, 9.98, 5.02, 4.81)),
    Published("qwen3-4b+vit-big", "TP2 PP8", 8, 96, (7.19, 6.60, 4.45, 4.19)),
    Published("qwen3-4b+vit-big", "TP2 PP16", 16, 96, (6.29, 5.99, 2.94, 2.81)),
    Published("llama3-8b+vit-5b", "TP1 PP32", 32, 64, (7.62, 6.58, 3.38, 2.75)),
    Published("llama3-8b+vit-5b", "TP2 PP16", 16, 64, (8.30, 7.84, 3.52, 3.04)),
    Published("llama3-8b+vit-5b", "TP2 PP8 DP2", 8, 64, (4.90, 4.44, 3.02, 2.77)),
    Published("qwen3-32b+internvit-6b", "64 cards (PP32?)", 32, 64, (8.03, 7.35, 4.46, 4.37)),
    Published("qwen3-32b+internvit-6b", "64 cards (PP16?)", 16, 64, (8.39, 7.66, 5.19, 4.66)),
    Published("qwen3-32b+internvit-6b", "64 cards (PP8?)", 8, 64, (5.14, 4.90, 4.06, 3.74)),
    Published("llama3-70b+vit-22b", "128 cards (PP32?)", 32, 64, (8.72, 7.94, 5.16, 4.76)),
    Published("llama3-70b+vit-22b", "128 cards (PP16?)", 16, 64, (7.23, 6.67, 4.71, 4.63)),
)
"""Settings of section 7.1 of the paper, with a question mark where it does not give the layout."""
BLOCKING, ZERO_BUBBLE = "1f1b strict, blocking", "zb-h1 strict, blocking"
ASYNC, BF, BFW, GUIDED = "1f1b strict", "bf, window 32", "bfw, window 32", "1f1b-split + foresight"
METHODS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    BLOCKING: ({"schedule": "1f1b", "consume": "strict"}, "blocking"),
    ZERO_BUBBLE: ({"schedule": "zb-h1", "consume": "strict"}, "blocking"),
    ASYNC: ({"schedule": "1f1b", "consume": "strict"}, "async"),
    BF: ({"hint": "bf", "window": 32}, "async"),
    BFW: ({"hint": "bfw", "window": 32}, "async"),
    GUIDED: ({"schedule": "1f1b-split"}, "async"),
}
PARTS = (0.1, 1.0, 3.0)
"""Durations of a transfer, in mean forwards."""


def cells(quick: bool) -> Sequence[Cell]:
    """Returns a cell for each model and number of stages, however many settings have them."""
    batches: dict[tuple[str, int], int] = {}
    for one in PUBLISHED:
        batches[one.model, one.stages] = max(one.batch, batches.get((one.model, one.stages), 0))
    return [
        {"model": model, "stages": p, "microbatches": m, "balance": balance, "transfer": part, "seed": seed}
        for (model, p), batch in batches.items()
        for m in sorted({2 * p, min(batch, 64 if quick else batch)})
        for balance in (("even",) if model == GPT3 else ("balanced", "as they come"))
        for part in PARTS
        for seed in range(1, 2 if quick else 4)
    ]


class Drawn(NamedTuple):
    """A model on its stages, and the durations of its tasks."""

    graph: PipelineGraph
    placement: Placement
    durations_ms: Durations
    absent: Sequence[Absences]
    num_encoder_chunks: int = 0
    """Number of chunks before the decoder's."""


def measure(cell: Cell) -> Measured:
    """Measures all methods on the same samples and noise."""
    return compare(draw(cell), cell)


def compare(drawn: Drawn, cell: Cell) -> Measured:
    """Measures all methods on the draws of a cell."""
    links = Links(latency_ms=float(cell["transfer"]) * MEAN_FORWARD_MS)
    rows: list[dict[str, Value]] = []
    for name, (words, communication) in METHODS.items():
        order = OrderingOptions(**words).resolve(
            num_stages=int(cell["stages"]),
            num_microbatches=int(cell["microbatches"]),
            placement=drawn.placement,
            graph=drawn.graph,
        )
        run = simulate(
            order.arbiters(RULES),
            Costs(durations_ms=drawn.durations_ms),
            machine=Machine(links=links, communication=Communication(communication)),
            num_steps=len(drawn.durations_ms),
            absent=drawn.absent,
        )
        makespans_s = [run.timeline.of_step(step).makespan_s() for step in range(len(drawn.durations_ms))]
        busy = sum(run.timeline.work_s()) / (sum(makespans_s) * order.placement.num_stages)
        rows.append(
            {
                "method": name,
                "step_ms": round(fmean(makespans_s) * 1e3, 6),
                "compute_share": round(busy, 4),
                "above_1f1b": peaks_above_1f1b(run.timeline, order),
            }
        )
    return rows


def draw(cell: Cell) -> Drawn:
    """Returns the samples and the noise of a cell."""
    if cell["model"] != GPT3:
        return draw_pair(model_pair(str(cell["model"])), cell)
    p, m = int(cell["stages"]), int(cell["microbatches"])
    graph, placement, _ = make_graph(GraphOptions(), num_stages=p, num_microbatches=m)
    rng = np.random.default_rng(int(cell["seed"]))
    return Drawn(graph, placement, lognormal(_of_language_model(p, m), SIGMA, rng), ())


def draw_pair(pair: ModelPair, cell: Cell) -> Drawn:
    """Returns the samples and the noise of a cell with an encoder and a decoder."""
    workload = Workload(
        name="sft-single",
        pair=pair,
        num_steps=STEPS,
        num_microbatches=int(cell["microbatches"]),
        is_balanced=cell["balance"] == "balanced",
        mean_forward_ms=MEAN_FORWARD_MS,
        seed=int(cell["seed"]),
    )
    drawn, model = on_graph(workload, GraphOptions(), num_stages=int(cell["stages"]))
    durations_ms = lognormal(drawn.durations.durations_ms, SIGMA, np.random.default_rng(int(cell["seed"])))
    return Drawn(model.graph, model.placement, durations_ms, drawn.durations.absent, model.decoder.start)


def _of_language_model(num_stages: int, num_microbatches: int) -> Durations:
    """Returns durations of layers that are dealt out evenly, a remainder to the first stages, the head to the last."""
    layers, tokens = GPT3_SIZES.num_layers, GPT3_TOKENS
    layer = GPT3_SIZES.layer(tokens, tokens**2)
    counts = [layers // num_stages + (stage < layers % num_stages) for stage in range(num_stages)]
    stages = [layer * count for count in counts]
    stages[-1] += GPT3_SIZES.head(tokens)
    flops = np.array([list(stage.tasks()) for stage in stages])
    per_stage_ms = flops * (MEAN_FORWARD_MS / flops[:, 0].mean())
    shape = (STEPS, num_stages, num_microbatches, 3)
    durations_ms: Durations = np.broadcast_to(per_stage_ms[None, :, None, :], shape).copy()
    return durations_ms


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: the range of each setting beside the published figure."""
    lines, ranges, inside = [], {}, []
    for one in PUBLISHED:
        of_setting = selected(rows, model=one.model, stages=one.stages)
        if not of_setting:
            continue
        best, no_blocking = _of_better_hint(of_setting), _of_better_hint(of_setting, ASYNC)
        guided = _speed_ups(of_setting, GUIDED, ASYNC)
        inside.append(min(best) <= one.speed_up <= max(best))
        shares = [float(row["compute_share"]) for row in selected(of_setting, method=BLOCKING)]
        label = f"{one.model}, {one.layout}"
        ranges[label] = (min(best), max(best), one.speed_up)
        lines.append(
            [
                label,
                f"{one.speed_up:.2f}",
                _range(best),
                "yes" if inside[-1] else "no",
                _range(no_blocking),
                _range(guided),
                f"{min(shares):.0%} to {max(shares):.0%}",
            ]
        )
    headings = [
        "setting",
        "published",
        "bf or bfw in 32, of blocking 1F1B",
        "inside",
        "of asynchronous 1F1B",
        "1f1b-split + foresight, of asynchronous 1F1B",
        "blocking 1F1B computes",
    ]
    above = max(float(row["above_1f1b"]) for row in selected(rows, method=GUIDED))
    return "\n\n".join(
        [
            markdown(headings, lines),
            draw_ranges(ranges, folder / "endtoend.png", "times as fast as blocking strict 1F1B"),
            _finding(rows, inside),
            _own_regime(rows),
            f"*Memory*: bf and bfw may hold 32 microbatches; the table with foresight never held more than strict 1F1B "
            f"(by {above:g} activations at most).",
            "*Not known*, and so varied: microbatches per pipeline (twice the stages, or the batch up to the largest "
            "measured), balancing, transfers of 0.1, 1 and 3 mean forwards. Not varied: cuts are balanced by "
            "operations, noise of tasks is 10%. *Threats*: simulated; cards, links and their contention are not.",
        ]
    )


def _finding(rows: Rows, inside: Sequence[bool]) -> str:
    by_part = {part: _of_better_hint(selected(rows, transfer=part)) for part in PARTS}
    ranges = "; ".join(f"{part:g} forwards: {_range(found)}" for part, found in by_part.items())
    return (
        f"{sum(inside)} of {len(inside)} published speed-ups lie inside the range. What decides most is how long a "
        f"transfer takes, by its length {ranges}. Asynchronous transfers alone make {_range(_speed_ups(rows, ASYNC))} "
        "times the speed of blocking 1F1B, the wider window and the hint the rest; within the memory of 1F1B a table "
        f"with foresight makes {_range(_speed_ups(rows, GUIDED))}."
    )


def _own_regime(rows: Rows) -> str:
    """Returns a text on whether, and where, the best published speed-ups come out, with images and without."""
    parts = []
    for name, is_language in (("language models", True), ("images and text", False)):
        of_kind = [row for row in rows if (row["model"] == GPT3) is is_language]
        there = {(row["model"], int(row["stages"])) for row in of_kind}
        settings = [one for one in PUBLISHED if (one.model, one.stages) in there]
        best = max(settings, key=lambda one: one.speed_up)
        own = selected(of_kind, model=best.model, stages=best.stages)
        by_part = {part: _of_better_hint(selected(own, transfer=part)) for part in PARTS}
        enough = [part for part, found in by_part.items() if max(found) >= best.speed_up]
        short, all_of_kind = by_part[PARTS[0]], _of_better_hint(of_kind)
        takes = (
            f"it comes out where a transfer takes {enough[0]:g} forwards or more, and blocking 1F1B computes "
            f"{_least_share(own, enough[0]):.0%} of the time or less"
            if enough
            else "it does not come out under any of these assumptions"
        )
        parts.append(
            f"with {name} the best published speed-up is {best.speed_up:.2f} ({best.model}, {best.layout}); "
            f"simulated, that setting has {_range(_of_better_hint(own))}, {_range(short)} with transfers of "
            f"{PARTS[0]:g} forwards, and all settings {_range(all_of_kind)}: {takes}"
        )
    return (
        "*In the paper's own regime* (blocking strict 1F1B as the baseline, a window of 32, asynchronous transfers on "
        f"our side alone) {'; '.join(parts)}. Beside a baseline whose transfers overlap, too, no setting has more than "
        f"{max(_of_better_hint(rows, ASYNC)):.2f}, with 32 microbatches held, and none more than "
        f"{max(_speed_ups(rows, GUIDED, ASYNC)):.2f} within the memory of 1F1B."
    )


def _least_share(rows: Rows, part: float) -> float:
    """Returns the largest fraction of time that blocking 1F1B computes, with transfers at least so long."""
    blocking = selected(rows, method=BLOCKING)
    return max(float(row["compute_share"]) for row in blocking if float(row["transfer"]) >= part)


def _speed_ups(rows: Rows, method: str, base: str = BLOCKING) -> list[float]:
    scene_of = settings_of(QUESTION.settings)
    first = {scene_of(row): float(row["step_ms"]) for row in selected(rows, method=base)}
    return [first[scene_of(row)] / float(row["step_ms"]) for row in selected(rows, method=method)]


def _of_better_hint(rows: Rows, base: str = BLOCKING) -> list[float]:
    return list(map(max, _speed_ups(rows, BF, base), _speed_ups(rows, BFW, base)))


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


QUESTION = Question(
    name="endtoend",
    title="Do the published speed-ups come out? (RQ1)",
    settings=("model", "stages", "microbatches", "balance", "transfer", "seed"),
    figures=("method", "step_ms", "compute_share", "above_1f1b"),
    cells=cells,
    measure=measure,
    write=write,
)
