"""The orders in which the stages of a simulated pipeline ran their tasks, to be told again on other costs.

Two simulations of an order that decides by readiness differ by other decisions as well as by other costs, and by more
than a small change of the costs. The same decisions show what the change alone does.
"""

from collections.abc import Callable

import numpy as np

from rrfp_jax.costs import CutModel
from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.judging import Judge
from rrfp_jax.planning.search.strict_times import Times, Walk, strict_times_ms
from rrfp_jax.simulation import simulate


def with_same_decisions(one: Candidate, judge: Judge, num_draws: int) -> Callable[[CutModel], Times]:
    """Tells step times [draws] of other costs on the same cut, for so many of the draws that it was chosen by.

    Each step begins as its stages have ended the one before. A stage starts each task as soon as it can: not later, as
    where it held another one for it.
    """
    cut = one.choice.cut
    steps_ms = judge.steps_ms(cut, num_draws)
    learning_ms = cut.durations_ms if judge.noise.is_none else steps_ms[:0]  # else the first step is without noise
    durations_ms = np.concatenate([learning_ms, steps_ms])
    costs = cut.simulated_costs(durations_ms)
    run = simulate(judge.fresh_arbiters(one), costs, machine=cut.machine, num_steps=len(durations_ms))
    walks = [
        Walk.along([span.task for span in step.spans if span.task.microbatch >= 0], one.order.graph, cut.placement)
        for step in run.timeline.by_step()[1:]
    ]

    def times_ms(changed: CutModel) -> Times:
        steps_ms = judge.steps_ms(changed, num_draws)[-len(walks) :]
        return np.concatenate(
            [strict_times_ms(changed, walk, step_ms[None]) for walk, step_ms in zip(walks, steps_ms, strict=True)]
        )

    return times_ms
