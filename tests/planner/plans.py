"""Plans made by hand, for tests of what is done with one."""

from dataclasses import replace

from rrfp_jax.core import Ordering
from rrfp_jax.costs import CutModel, LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.costs.layer_costs import halves_of
from rrfp_jax.planner.records import Forecast, Plan, PlanChoice, PlanShape, Ranked, Refused
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, linear, looped

MIB = 2**20
LAYER = LayerCosts(
    forward_ms=2.0,
    input_gradient_ms=2.0,
    weight_gradient_ms=2.0,
    fixed_bytes=40 * MIB,
    stash_bytes=8 * MIB,
    owed_bytes=4 * MIB,
    temporaries_bytes=6 * MIB,
    output_bytes=MIB,
)
TYPES = {
    "embedding": replace(LAYER, forward_ms=0.2, input_gradient_ms=0.0, weight_gradient_ms=0.4, stash_bytes=MIB),
    "layer": LAYER,
    "head": replace(LAYER, forward_ms=5.0, input_gradient_ms=5.0, weight_gradient_ms=5.0, fixed_bytes=90 * MIB),
}


def costs_of(num_layers: int) -> ModelCosts:
    """A language model of so many layers between its ends."""
    layers = ("embedding", *("layer",) * num_layers, "head")
    return ModelCosts(layers=layers, types=TYPES, links=LinkCosts(latency_ms=0.1))


def table_of(name: str, num_stages: int, num_microbatches: int, chunks_per_stage: int | None = None) -> ScheduleTable:
    """A schedule's table."""
    request = ScheduleRequest(
        num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=chunks_per_stage
    )
    return build_schedule(name, request)


def choice_of(
    *counts: int,
    ordering: Ordering,
    order_name: str = "1f1b",
    num_stages: int | None = None,
    num_microbatches: int = 8,
    is_even: bool = False,
    is_searched: bool = False,
    cut_layers: tuple[int, ...] = (),
    **shape: object,
) -> PlanChoice:
    """A cut of :func:`costs_of` its layers, of which some are in halves, in an order."""
    stages = num_stages or len(counts)
    placement = linear(stages) if ordering.schedule is None else ordering.schedule.placement
    if ordering.schedule is None and len(counts) > stages:
        placement = looped(stages, len(counts) // stages)
    costs = costs_of(sum(counts) - 2 - len(cut_layers))
    if cut_layers:
        costs = replace(costs, types=TYPES | dict.fromkeys(halves_of("layer"), LAYER.at_speed(2)))
    cut = CutModel(
        costs=costs.in_halves(cut_layers),
        counts=counts,
        placement=placement,
        num_microbatches=num_microbatches,
        split=bool(ordering.schedule.graph.split) if ordering.schedule else False,
    )
    return PlanChoice(
        shape=PlanShape(num_stages=stages, num_microbatches=num_microbatches, **shape),
        cut=cut,
        is_even=is_even,
        ordering=ordering,
        order_name=order_name,
        is_searched=is_searched,
    )


def ranked_of(choice: PlanChoice, step_ms: float, why: str = "", **forecast: object) -> Ranked:
    """A choice with a forecast of this step time."""
    figures = {
        "step_ms": step_ms,
        "p95_ms": step_ms * 1.05,
        "sd_ms": step_ms * 0.01,
        "error_ms": 0.0,
        "nominal_ms": step_ms,
        "bound_ms": step_ms * 0.97,
        "bubble": 0.12,
        "samples_per_s": choice.shape.batch_size / step_ms * 1e3,
        "tokens_per_s": choice.shape.batch_size / step_ms * 1e3 * 128,
        "mfu": 0.41,
    }
    return Ranked(choice=choice, forecast=Forecast(**figures | forecast), why=why)


def made_plan(**changes: object) -> Plan:
    """Three choices of four stages for ten layers between embedding and head."""
    uneven, even = (4, 3, 3, 2), (3, 3, 3, 3)
    searched = Ordering(schedule=table_of("zb-h1", 4, 8), consume="strict")
    named = Ordering(schedule=table_of("1f1b", 4, 8))
    found = ranked_of(
        choice_of(*uneven, ordering=searched, order_name="searched", is_searched=True), 201.25, bound_ms=195.0
    )
    best_named = ranked_of(choice_of(*uneven, ordering=named), 214.0, "6.3% slower: more of it is bubble")
    even_named = ranked_of(choice_of(*even, ordering=named, is_even=True), 240.5, "19.5% slower: stage 3 has more work")
    plan = Plan(
        ranking=(found, best_named, even_named),
        is_decided=True,
        even=even_named,
        named=best_named,
        refused=(
            Refused(shape=PlanShape(num_stages=2, num_microbatches=8), reason="stage 0 needs 2 GiB", change="window 2"),
        ),
        evaluations=1234,
        notes=("costs are analytic: no device was measured",),
    )
    return replace(plan, **changes)
