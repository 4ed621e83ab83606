"""What plan prints with ``--json``: plain data, in milliseconds, bytes and shares of 1."""

from dataclasses import asdict
from typing import Any

from rrfp_jax.commands.planning.words import order_in_words
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.cut_model import cut_in_words, letters_of
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.planning.search.records import Choice, Plan, Ranked, Refused


def plan_as_json(plan: Plan, book: CostBook, *, top: int) -> dict[str, Any]:
    """The plan, with as many of its ranking as ``top``, and what all of it was worked out from."""
    return {
        "ranking": [ranked_as_json(ranked) for ranked in plan.ranking[:top]],
        "is_decided": plan.is_decided,
        "is_complete": plan.is_complete,
        "even_cut_best_named": None if plan.even is None else ranked_as_json(plan.even),
        "best_cut_best_named": None if plan.named is None else ranked_as_json(plan.named),
        "bottleneck": plan.bottleneck,
        "sensitivities": [asdict(each) for each in plan.sensitivities],
        "refused": [refused_as_json(refused) for refused in plan.refused],
        "objective": plan.objective,
        "evaluations": plan.evaluations,
        "num_draws": plan.num_draws,
        "seed": plan.seed,
        "costs": {"source": book.source, "device": book.device, "letters": letters_of(book.layers)},
        "notes": [*plan.notes],
    }


def ranked_as_json(ranked: Ranked) -> dict[str, Any]:
    """A choice with its forecast."""
    forecast = ranked.forecast
    return {
        **_choice(ranked.choice),
        "step_ms": forecast.step_ms,
        "p95_ms": forecast.p95_ms,
        "sd_ms": forecast.sd_ms,
        "error_ms": forecast.error_ms,
        "nominal_ms": forecast.nominal_ms,
        "bound_ms": forecast.bound_ms,
        "gap": forecast.gap,
        "bubble": forecast.bubble,
        "samples_per_s": forecast.samples_per_s,
        "tokens_per_s": forecast.tokens_per_s,
        "mfu": forecast.mfu,
        "peak_bytes": forecast.peak_bytes,
        "memory": [_stage(stage) for stage in forecast.memory],
        "stage_work_ms": [*ranked.choice.cut.stage_work_ms],
        "why": ranked.why,
    }


def refused_as_json(refused: Refused) -> dict[str, Any]:
    """A layout that does not fit."""
    return {**asdict(refused.shape), "reason": refused.reason, "change": refused.change}


def _choice(choice: Choice) -> dict[str, Any]:
    ordering = choice.ordering
    is_guided = ordering.is_guided
    return {
        **asdict(choice.shape),
        "devices": choice.shape.num_devices,
        "batch_size": choice.shape.batch_size,
        "layout": cut_in_words(choice.cut),
        "is_even": choice.is_even,
        "layers_of_chunk": [*choice.cut.counts],
        "stage_of_chunk": [*choice.cut.placement.stage_of_chunk],
        "order": order_in_words(choice),
        "order_name": choice.order_name,
        "is_searched": choice.is_searched,
        "split_backward": choice.cut.split,
        "consume": ordering.consume,
        "window": [*ordering.window] if isinstance(ordering.window, tuple) else ordering.window,
        "footprint": ordering.has_footprint if is_guided else None,
        "foresight": ordering.foresight is not False if is_guided else None,
        "offload": choice.offload,
    }


def _stage(stage: StageForecast) -> dict[str, int]:
    return {
        "peak": stage.peak,
        "fixed": stage.fixed,
        "in_flight": stage.peak - stage.fixed - stage.temporaries,
        "temporaries": stage.temporaries,
        "host": stage.host_peak,
    }
