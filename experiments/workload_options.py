"""Options of workloads, which simulate and emulate share, and the figures that they print about one."""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.workloads import (
    DEFAULT_SAMPLES,
    ROW_TOKENS,
    WORKLOADS,
    Drawn,
    Workload,
    best_encoder_stages,
    draw,
    in_best_order,
    mean_work,
)
from rrfp_jax.commands.common.options import offer
from rrfp_jax.commands.common.ordering import OFF, ON, parse_switch
from rrfp_jax.commands.simulate import GivenWork, WorkOptions
from rrfp_jax.commands.studies import GraphOptions, ModelGraph, make_graph, parse_graph
from rrfp_jax.models.presets import MODEL_PAIRS, model_pair

DEFAULT_PAIR = "qwen3-4b+vit-big"
DEFAULT_STEPS = 10
_ORDERED = "order"
_DETAILS = ("model_pair", "samples", "balance", "mean_forward_ms", "workload_seed")


def add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options; :func:`plan_workload` reads them."""
    add = group.add_argument
    workload = add(
        "--workload",
        metavar="NAME",
        help=f"durations and missing encoder tasks as of: {', '.join(WORKLOADS)} (default: every task takes the same)",
    )
    offer(workload, WORKLOADS)
    pair = add(
        "--model-pair",
        metavar="NAME",
        help=f"encoder and decoder of the workload: {', '.join(MODEL_PAIRS)} (default {DEFAULT_PAIR})",
    )
    offer(pair, MODEL_PAIRS)
    add(
        "--samples",
        type=int,
        metavar="N",
        help=f"samples of a microbatch of the workload (default {DEFAULT_SAMPLES}; sft-packed: as have room in "
        f"{ROW_TOKENS} tokens)",
    )
    add(
        "--balance",
        metavar=f"{ON}|{OFF}|{_ORDERED}",
        help=f"put each step's samples into microbatches of about the same cost, or as they come, or in the best order "
        f"of some that are short at both ends (default {ON})",
    )
    add(
        "--mean-forward-ms",
        type=float,
        metavar="MS",
        help="mean forward of a decoder's chunk in the workload (default 10)",
    )
    add("--workload-seed", type=int, metavar="N", help="seed of the samples drawn (default 0)")


def has_graph(arguments: argparse.Namespace) -> bool:
    """Returns whether flags settle the graph, if only by a workload, so that no schedule makes its own."""
    return arguments.workload is not None or parse_graph(arguments) != GraphOptions()


def plan_workload(arguments: argparse.Namespace, wishes: GraphOptions, *, num_steps: int | None) -> GivenWork | None:
    """Returns the given workload on the given graph; None without one. Raises ValueError with the remedy."""
    if arguments.workload is None:
        said = [f"--{name.replace('_', '-')}" for name in _DETAILS if getattr(arguments, name) is not None]
        if said:
            raise ValueError(f"{', '.join(said)} is about a workload: give --workload, for example {WORKLOADS[0]}")
        return None
    if arguments.durations is not None or arguments.durations_ms is not None:
        raise ValueError("a workload says how long tasks take: leave --durations and --durations-ms out")
    pair_name, is_ordered = arguments.model_pair or DEFAULT_PAIR, arguments.balance == _ORDERED
    workload = Workload(
        name=arguments.workload,
        pair=model_pair(pair_name),
        num_steps=DEFAULT_STEPS if num_steps is None else num_steps,
        num_microbatches=arguments.num_microbatches,
        samples=arguments.samples,
        is_balanced=is_ordered or parse_switch(arguments.balance, "balance") is not False,
        ends_for=arguments.num_stages if is_ordered else None,
        mean_forward_ms=10.0 if arguments.mean_forward_ms is None else arguments.mean_forward_ms,
        seed=arguments.workload_seed or 0,
    )
    drawn, model = on_graph(workload, wishes, num_stages=arguments.num_stages)
    return GivenWork(
        drawn.durations,
        model,
        _figures(workload, pair_name, drawn),
        _text(workload, pair_name, drawn),
        partial(in_best_order, drawn.durations) if is_ordered else None,
    )


def _read(arguments: argparse.Namespace) -> GivenWork | None:
    return plan_workload(arguments, parse_graph(arguments), num_steps=arguments.steps)


WORK_OPTIONS = WorkOptions(add=add_workload_arguments, read=_read)
"""Options of ``simulate`` for workloads."""


def on_graph(workload: Workload, wishes: GraphOptions, *, num_stages: int) -> tuple[Drawn, ModelGraph]:
    """Draws a workload; by default the encoder has its own stages, as many as make the dearest chunk cheapest."""
    workload = replace(workload, encoder_trains=not wishes.frozen_encoder)
    steps = workload.steps()
    if not wishes.encoders:
        if wishes.stage_of_chunk is not None:
            raise ValueError("stage-of-chunk leaves open which chunks are the encoder's: give --encoders too")
        count = best_encoder_stages(workload, mean_work(steps), num_stages)
        wishes = replace(wishes, encoders=(count,))
    model = make_graph(wishes, num_stages=num_stages, num_microbatches=workload.num_microbatches)
    return draw(workload, model, steps), model


def _figures(workload: Workload, pair: str, drawn: Drawn) -> dict[str, Any]:
    spread = drawn.spread
    return {
        "name": workload.name,
        "model_pair": pair,
        "is_balanced": workload.is_balanced,
        "is_ordered": workload.ends_for is not None,
        "encoder_layers": list(drawn.cut.encoder),
        "decoder_layers": list(drawn.cut.decoder),
        "encoder_cv": round(spread.encoder_cv, 6),
        "decoder_cv": round(spread.decoder_cv, 6),
        "dearest_over_mean": round(spread.dearest_over_mean, 6),
        "without_images": round(spread.without_images, 6),
    }


def _text(workload: Workload, pair: str, drawn: Drawn) -> str:
    spread, cut = drawn.spread, drawn.cut
    return (
        f"{workload.name} of {pair}, {'' if workload.is_balanced else 'not '}balanced"
        f"{'' if workload.ends_for is None else ', short at both ends and in order'}: work of a microbatch varies by "
        f"{spread.encoder_cv:.0%} in the encoder and {spread.decoder_cv:.0%} in the decoder (standard deviation over "
        f"mean), a step's dearest costs {spread.dearest_over_mean:.2f} of the mean, {spread.without_images:.1%} have "
        f"no images; layers per chunk: encoder {_counts(cut.encoder)}, decoder {_counts(cut.decoder)}"
    )


def _counts(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts))
