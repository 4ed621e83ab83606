"""How long a step of 1F1B takes, stage by stage: what decides between cuts whose fullest stages are alike.

A microbatch passes the stages before a stage on its way there and back, and the stage works through all of them. It
waits for the stages behind it where these take longer than the forwards that it runs ahead, and in the end longer than
the backwards that are left; with few microbatches both waits are one. So every stage tells a time that follows from
where its chunk begins and ends. A step of strict 1F1B takes at least the longest of them, and with many microbatches
usually just that, but for its messages.
"""

import numpy as np

from rrfp_jax.planning.cuts.problem import CutProblem, Floats


def step_ms_by_stage(problem: CutProblem) -> Floats:
    """Milliseconds of a step as each stage tells it [stages, first layer, behind the last].

    For one chunk per stage in order, a backward in one task, and stages that are equally fast.
    """
    stages, microbatches = problem.placement.num_stages, problem.num_microbatches
    forward_ms, both_ms = (_before(each) for each in (problem.layer_forward_ms, problem.layer_work_ms))
    task_ms = problem.costs.task_ms
    found = np.empty((stages, len(both_ms), len(both_ms)))
    for stage in range(stages):
        behind = stages - 1 - stage
        own_ms = both_ms[None, :] - both_ms[:, None] + 2 * task_ms
        own_forward_ms = forward_ms[None, :] - forward_ms[:, None] + task_ms
        passed_ms = both_ms[:, None] + 2 * stage * task_ms
        awaited_ms = both_ms[-1] - both_ms[None, :] + 2 * behind * task_ms
        ahead = min(behind, microbatches - 1)
        first_ms, last_ms = (
            np.maximum(0.0, awaited_ms - ahead * each) for each in (own_forward_ms, own_ms - own_forward_ms)
        )
        waits_ms = first_ms + last_ms if microbatches > behind + 1 else np.maximum(first_ms, last_ms)
        found[stage] = passed_ms + microbatches * own_ms + waits_ms
    return found


def _before(values: Floats) -> Floats:
    """The sum of what lies before each place."""
    return np.concatenate([[0.0], np.cumsum(values)])
