"""RQ6: how much does a larger vision encoder gain?

The paper's speed-up over blocking strict 1F1B grows from 1.73 to 2.16 with a larger encoder before the same decoder.
Here one decoder has encoders of four sizes; layers are cut so that stages cost about the same, whatever the encoder, so
that only the part of the work grows whose amount varies from sample to sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from experiments.paper import endtoend
from experiments.paper.endtoend import ASYNC, BF, BFW, BLOCKING, GUIDED
from experiments.paper.pictures import draw_bars
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.tables import geometric_mean, interval, markdown, settings_of
from rrfp_jax.models.presets import ModelPair, model_pair

DECODER = "qwen3-1.7b+vit-h"
"""Name of the pair that the decoder is taken from."""
ENCODERS = {
    "vit-h": "qwen3-1.7b+vit-h",
    "vit-big": "qwen3-4b+vit-big",
    "vit-5b": "llama3-8b+vit-5b",
    "vit-22b": "llama3-70b+vit-22b",
}
"""Names of the pairs that encoders are taken from, small to large."""
THEIRS = (1.73, 2.16)


def pair(encoder: str) -> ModelPair:
    """Returns the decoder behind an encoder of another pair."""
    decoder, other = model_pair(DECODER), model_pair(ENCODERS[encoder])
    hidden = decoder.decoder.hidden
    return replace(decoder, encoder=other.encoder, projector=replace(other.projector, inner_dim=hidden, out_dim=hidden))


def cells(quick: bool) -> Sequence[Cell]:
    """Returns cells of eight stages, with short and with long transfers, balanced and as samples come."""
    return [
        {
            "encoder": encoder,
            "stages": 8,
            "microbatches": 32 if quick else 64,
            "balance": balance,
            "transfer": transfer,
            "seed": seed,
        }
        for encoder in ENCODERS
        for balance in ("balanced", "as they come")
        for transfer in endtoend.PARTS[:2]
        for seed in range(1, 3 if quick else 9)
    ]


def measure(cell: Cell) -> Measured:
    """Measures all methods of RQ1 on the same samples and noise."""
    drawn = endtoend.draw_pair(pair(str(cell["encoder"])), cell)
    of_encoder = drawn.durations_ms[:, : drawn.num_encoder_chunks].sum() / drawn.durations_ms.sum()
    return [{**row, "encoder_share": round(float(of_encoder), 4)} for row in endtoend.compare(drawn, cell)]


def speed_ups(rows: Rows, method: str, base: str = BLOCKING) -> list[float]:
    """Returns the speed relative to ``base`` in each cell."""
    cell_of = settings_of(QUESTION.settings)
    first = {cell_of(row): float(row["step_ms"]) for row in selected(rows, method=base)}
    return [first[cell_of(row)] / float(row["step_ms"]) for row in selected(rows, method=method)]


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: a row for each encoder."""
    lines, bars, shares = [], {}, []
    for encoder in ENCODERS:
        some = selected(rows, encoder=encoder)
        share = fmean(float(row["encoder_share"]) for row in some)
        shares.append(share)
        lines.append(
            [
                encoder,
                f"{share:.0%}",
                *(interval(speed_ups(some, method)) for method in (ASYNC, BF, BFW)),
                interval(speed_ups(some, GUIDED, ASYNC)),
            ]
        )
        bars[encoder] = geometric_mean(speed_ups(some, BFW))
    names = ["encoder", "its part of the work"]
    names += [f"{method}, of blocking 1F1B" for method in (ASYNC, BF, BFW)] + [f"{GUIDED}, of asynchronous 1F1B"]
    by_balance = {
        balance: [geometric_mean(speed_ups(selected(rows, encoder=e, balance=balance), BFW)) for e in ENCODERS]
        for balance in ("balanced", "as they come")
    }
    first, *_, last = bars.values()
    return "\n\n".join(
        [
            markdown(names, lines),
            draw_bars(
                {"bfw in a window of 32": bars}, folder / "encoders.png", "times as fast as blocking strict 1F1B"
            ),
            f"From the smallest encoder ({shares[0]:.0%} of the work) to the largest ({shares[-1]:.0%}) the speed-up "
            f"of bfw over blocking 1F1B goes from {first:.2f} to {last:.2f}: balanced from "
            f"{by_balance['balanced'][0]:.2f} to {by_balance['balanced'][-1]:.2f}, as samples come from "
            f"{by_balance['as they come'][0]:.2f} to {by_balance['as they come'][-1]:.2f}. The paper's goes from "
            f"{THEIRS[0]} to {THEIRS[1]}; how its encoders were cut into stages it does not say.",
            "*Threats*: simulated; layers are cut anew for each encoder, where a cut that is kept would leave the "
            "stages of a larger one slower than all others.",
        ]
    )


QUESTION = Question(
    name="encoders",
    title="A larger encoder? (RQ6)",
    settings=("encoder", "stages", "microbatches", "balance", "transfer", "seed"),
    figures=("method", "step_ms", "compute_share", "above_1f1b", "encoder_share"),
    cells=cells,
    measure=measure,
    write=write,
)
