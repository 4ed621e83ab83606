"""Cut models to order."""

from rrfp_jax.core import Ordering, StepRules
from rrfp_jax.costs import CutModel, LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.planner.order_search import FoundOrder
from rrfp_jax.schedules import Placement, linear, looped, v_shaped, waves
from rrfp_jax.simulation import Costs, simulate

PART = 12
"""Weight of a stage's activations; a number that 1, 2, 3 and 4 chunks divide."""
PLACEMENTS = {
    "linear": linear,
    "v": v_shaped,
    "looped 2": lambda p: looped(p, 2),
    "waves": lambda p: waves(p, 2),
    "looped 4": lambda p: looped(p, 4),
}


def homogeneous(placement: Placement, num_microbatches: int, *, hop_ms: float = 0.0, split: bool = True) -> CutModel:
    """Stages of F = I = W = 10 ms, cut into equal chunks; activations of a stage weigh ``PART``."""
    num_chunks = placement.num_chunks
    each = num_chunks // placement.num_stages
    layer = LayerCosts(
        forward_ms=10 / each,
        input_gradient_ms=10 / each,
        weight_gradient_ms=10 / each,
        stash_bytes=PART // each,
        owed_bytes=PART // each,
    )
    costs = ModelCosts(layers=("layer",) * num_chunks, types={"layer": layer}, links=LinkCosts(latency_ms=hop_ms))
    return CutModel(
        costs=costs,
        counts=(1,) * num_chunks,
        placement=placement,
        num_microbatches=num_microbatches,
        split=split,
    )


def simulated_makespan_ms(cut: CutModel, order: FoundOrder) -> float:
    """By the project's simulator, strictly consumed."""
    made = Ordering(schedule=order.table, consume="strict").resolve(cut.placement, cut.graph)
    run = simulate(made.arbiters(StepRules(updates=False)), Costs(durations_ms=cut.durations_ms), machine=cut.machine)
    return run.timeline.makespan_s() * 1e3
