"""The vocabulary of all packages: task kinds, tasks, placements and pipeline graphs.

Terms
-----
chunk
    A consecutive part of the model with its own parameters, numbered ``0..C-1`` over the whole model.
stage
    A place that runs one task at a time. A :class:`Placement` says which stage owns which chunk.
task
    One unit of work, ``Task(kind, chunk, microbatch)``; its text form is ``2F5`` (chunk 2, forward, microbatch 5).

Dependencies of one step (RRFP paper, section 3.1, generalised to graphs and to a split backward)
--------------------------------------------------------------------------------------------------
* ``F(c, m)`` waits for ``F(p, m)`` of every predecessor ``p`` of ``c`` that runs microbatch ``m``.
* ``B(c, m)``, or ``I(c, m)`` where the backward is split, waits for ``F(c, m)`` and for the backward of every
  successor that runs ``m`` and returns a gradient to ``c``.
* ``W(c, m)`` waits for ``I(c, m)``.
* ``R(c)`` waits for every ``B`` (or ``W``) of ``c`` and of the chunks that share parameters with it.
* ``U(c)`` waits for ``R(c)`` and for the decision on which the stages agree once per step.

Operations of one's own (:mod:`rrfp_jax.tasks.operations`) are tasks of further kinds, which declare the tasks before
and after them.

A frozen chunk, whose parameters never change, has no W, R and U. It has a backward only where a gradient must pass
through it, to a chunk before it that trains; otherwise it runs F alone.
"""

from rrfp_jax.tasks.graph import Absences as Absences
from rrfp_jax.tasks.graph import Edge as Edge
from rrfp_jax.tasks.graph import PipelineGraph as PipelineGraph
from rrfp_jax.tasks.graph import absences as absences
from rrfp_jax.tasks.graph import bits as bits
from rrfp_jax.tasks.graph import chain as chain
from rrfp_jax.tasks.graph import lanes_beside as lanes_beside
from rrfp_jax.tasks.graph import opposite_chains as opposite_chains
from rrfp_jax.tasks.kinds import BUILT_IN as BUILT_IN
from rrfp_jax.tasks.kinds import BUILT_IN_KINDS as BUILT_IN_KINDS
from rrfp_jax.tasks.kinds import NO_MICROBATCH as NO_MICROBATCH
from rrfp_jax.tasks.kinds import Task as Task
from rrfp_jax.tasks.kinds import TaskKind as TaskKind
from rrfp_jax.tasks.operations import COMPUTE as COMPUTE
from rrfp_jax.tasks.operations import UNRECORDED as UNRECORDED
from rrfp_jax.tasks.operations import Op as Op
from rrfp_jax.tasks.operations import Per as Per
from rrfp_jax.tasks.placements import Placement as Placement
from rrfp_jax.tasks.placements import bidirectional as bidirectional
from rrfp_jax.tasks.placements import linear as linear
from rrfp_jax.tasks.placements import looped as looped
from rrfp_jax.tasks.placements import v_shaped as v_shaped
from rrfp_jax.tasks.placements import waves as waves
