"""Settings of pipelines with operations, such as copies to and from elsewhere; their rows, and their memory."""

from dataclasses import replace
from itertools import accumulate

from rrfp_jax.core import HINTS, ForesightRules, schedule_hint
from rrfp_jax.schedules import Op
from tests.model_checker import Setting
from tests.model_checker.catalogue import PIPELINE_ONLY
from tests.model_checker.operations import Operations

TWO, ONE = ("d2h", "h2d"), ("copy", "copy")
"""The engines of an offload and of a reload."""


def offload(pairs=None, *, lanes=TWO, part=1.0, lead=1):
    """Activations, or parts of them, go elsewhere behind F and come back before B."""
    out = Op("O", after="F", lane=lanes[0], frees=part, pairs=pairs)
    return out, Op("L", after=out, before="B", lane=lanes[1], holds=part, lead=lead, pairs=pairs)


def recompute(part=0.5):
    """F keeps less, and the rest is made again before B, among the stage's other tasks."""
    return (Op("C", after="F", before="B", holds=part),)


def with_ops(graph, ops):
    return replace(graph, ops=tuple(ops))


def moves_memory(graph):
    return any(op.holds or op.frees for op in graph.ops)


def peak(graph, row):
    """The most units that a row holds."""
    effect = Operations(graph).effect
    changes = (change for task in row for takes, frees in [effect(task)] for change in (takes, -frees))
    return max(accumulate(changes), default=0)


def limits(graph, rows, extra=0):
    """The rows' own peaks, and so many activations more."""
    return tuple(max(1, peak(graph, row) + extra * Operations(graph).unit) for row in rows)


def strictly(graph, placement, rows, *, extra=0, **more):
    return Setting(
        graph=graph,
        placement=placement,
        windows=(1,) * placement.num_stages,
        policies=tuple(map(tuple, rows)),
        rules=more.pop("rules", PIPELINE_ONLY),
        footprints=limits(graph, rows, extra) if moves_memory(graph) else (),
        **more,
    )


def by_row(graph, placement, rows, *, foresight=True, **more):
    """A table ranks what is ready."""
    rules = ForesightRules() if foresight else None
    footprints = limits(graph, rows, more.pop("extra", 0))
    setting = strictly(graph, placement, rows, **more)
    policies = tuple(map(schedule_hint, rows))
    return replace(setting, policies=policies, foresight=rules, footprints=footprints)


def by_hint(graph, placement, name="bf", *, window=1, **more):
    """No table: memory is reserved microbatch by microbatch, for so many of them."""
    unit = Operations(graph).unit
    passes = [graph.passes_per_microbatch(chunks) for chunks in placement.chunks_of_stage]
    return Setting(
        graph=graph,
        placement=placement,
        windows=(window,) * placement.num_stages,
        policies=(HINTS[name],) * placement.num_stages,
        rules=more.pop("rules", PIPELINE_ONLY),
        footprints=tuple(window * unit * each for each in passes) if moves_memory(graph) else (),
        **more,
    )
