"""Steps that evaluate: forwards alone between two steps that train, and what a stage follows while it runs one.

Whether a step evaluates is data of its start (:attr:`rrfp_jax.core.events.StepStarted.evaluates`). Its graph is
that of training with no edge that carries a gradient and with no chunk that trains
(:meth:`rrfp_jax.schedules.PipelineGraph.evaluating`), for as many batches as one such step runs: the pipeline fills
and drains once for all of them. Nothing is updated; the stages agree on the loss alone.

Order
-----
Forwards keep nothing for a backward, so no table, footprint or window of training has a meaning here. Whatever training
follows, a stage evaluates by readiness, the larger chunk first, which finishes what has begun. Each chunk runs at most
:data:`OUTPUTS_AHEAD` outputs ahead of those that read it (:mod:`rrfp_jax.core.read_ahead`), so that inboxes stay
small. The window is as large as the step and refuses nothing.

Why nothing can deadlock
------------------------
Within the step it is the argument of the read-ahead under a window, with the smallest microbatch first and in
topological order within; a limit of 1 suffices for it. Between steps nothing is left: a stage ends the step when all
its tasks have, and a chunk when all its outputs have been taken. So the next step begins where it would have begun
without; messages of it that come early are kept, as ever.
"""

from typing import TYPE_CHECKING

from rrfp_jax.core.consumption import ready
from rrfp_jax.core.hints import BF_DEEP
from rrfp_jax.core.plan import Agreement, StepRules
from rrfp_jax.core.read_ahead import AheadBound
from rrfp_jax.schedules import PipelineGraph

if TYPE_CHECKING:
    from rrfp_jax.core.stage_setup import StageSetup

OUTPUTS_AHEAD = 4
"""How many outputs of a chunk may wait for their readers: one is read, one arrives, and two even out delays."""
CONSUMPTION = ready(BF_DEEP)
"""How stages pick their tasks while they evaluate."""


def evaluation_rules(rules: StepRules) -> StepRules:
    """What a step that evaluates consists of, where training follows ``rules``."""
    return StepRules(updates=False, agreement=Agreement.LOSS, tree_degree=rules.tree_degree)


def outputs_ahead(graph: PipelineGraph, limit: int = OUTPUTS_AHEAD) -> tuple[AheadBound, ...]:
    """The bound of every chunk that others read; ``graph`` is the one of evaluation."""
    return tuple(AheadBound(chunk=c, limit=limit) for c in range(graph.num_chunks) if graph.reads_ahead(c))


def evaluation_setup(setup: "StageSetup") -> "StageSetup":
    """What the stage is made of while it evaluates."""
    graph = setup.graph.evaluating(setup.evaluation_batches)
    own = setup.placement.chunks_of_stage[setup.stage]
    return type(setup)(
        graph,
        setup.placement,
        setup.stage,
        consumption=CONSUMPTION,
        window=graph.num_microbatches,
        rules=evaluation_rules(setup.rules),
        certain_ahead=setup.certain_ahead,
        read_ahead=tuple(bound for bound in outputs_ahead(graph) if bound.chunk in own),
    )
