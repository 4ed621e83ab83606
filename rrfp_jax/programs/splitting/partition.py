"""Partition of a backward into I, what the input gradient needs, and W, the rest that weight gradients need.

Rules, for straight-line nodes
------------------------------
1. What the *first* outputs (the input gradient) need is computed in I. Everything else that the *second* outputs
   (weight gradients) need is the rest.
2. A heavy node of the rest (a matrix product, say) is computed in W. A light one may go to either side, but never to
   I when something that it reads is computed in W.
3. Hence every node runs exactly once, with two exceptions that cost nothing or are not per microbatch: free nodes may
   be redone in W, and fixed values (of parameters and constants alone) never cross, each side makes its own.
4. A value crosses from I to W if W reads it and I has it. Within the rules above the set that crosses is the one with
   the fewest bytes: a minimum cut (`cut`).

Why it is exact: both programs consist of nodes of the one backward, with the same operands, in the same order. By rule
2 and the cut, each operand of a node in W is computed in W, or crosses, or is fixed.

Loops and shard maps
--------------------
A loop of which I needs some outputs and W the others is two loops: the body is partitioned by the same rules, the
values that cross become stacks of the first and slices of the second (`nested`). So each level has its own cut.

Barriers (of rematerialisation) matter to I only, where they keep the recomputation of one layer from running ahead of
the cotangents of the next. W reads what went into the barrier, so a residual crosses as it is and not as a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rrfp_jax.programs.splitting.cut import CutProblem, Partition, minimum_cut
from rrfp_jax.programs.splitting.ir import Node, Operand, Value, is_fixed, values
from rrfp_jax.programs.splitting.liveness import restrict, slice_nodes
from rrfp_jax.programs.splitting.nested import split_nest
from rrfp_jax.programs.splitting.operations import Barrier
from rrfp_jax.programs.splitting.rules import is_splittable


def partition(
    nodes: Sequence[Node],
    first: Sequence[Operand],
    second: Sequence[Operand],
    *,
    prices: Mapping[Value, int],
    late: frozenset[Value] = frozenset(),
) -> Partition:
    """Cuts `nodes` for the outputs `first` of I and `second` of W.

    `prices` names every input that is not fixed and gives the bytes that it costs when it crosses as it is. The inputs
    `late` are there in W only (what W's part of a loop carries).
    """
    live = slice_nodes(nodes, [*first, *second]).nodes
    separated, urgent = _separate(live, first)
    origins = _behind_barriers(separated)
    deferrable = [_redirect(node, origins) for node in separated if not isinstance(node.operation, Barrier)]
    wanted = [origins.get(operand, operand) for operand in second]
    problem = CutProblem(nodes=deferrable, urgent=urgent, second=wanted, prices=prices, late=late)
    crossing = minimum_cut(problem)
    in_second = slice_nodes(deferrable, wanted, given=crossing, keep_effects=False).nodes
    used = {operand for node in in_second for operand in node.inputs} | set(wanted)
    order = [*prices, *(output for node in separated for output in node.outputs)]
    chosen = [value for value in order if value in crossing and value in used]
    in_first = slice_nodes(separated, [*first, *chosen]).nodes
    return Partition(first=in_first, second=in_second, crossing=chosen, outputs=wanted)


def _separate(nodes: Sequence[Node], first: Sequence[Operand]) -> tuple[list[Node], set[Value]]:
    """Splits the loops and shard maps of which I needs a part; also returns every value that I must compute."""
    needed = set(values(first))
    urgent: set[Value] = set()
    separated: list[Node] = []
    for node in reversed(nodes):
        keep = [output in needed for output in node.outputs]
        pieces = [node]
        if any(keep) or node.operation.effectful:
            if is_splittable(node) and not all(keep) and not all(map(is_fixed, node.outputs)):
                pieces = split_nest(node, keep, partition)
            now = restrict(node, keep) if isinstance(node.operation, Barrier) else pieces[0]
            needed.update(values(now.inputs))
            urgent.update(pieces[0].outputs)
        separated.extend(reversed(pieces))
    return separated[::-1], urgent


def _behind_barriers(nodes: Sequence[Node]) -> dict[Operand, Operand]:
    """What went into a barrier, for each value that came out of one."""
    origins: dict[Operand, Operand] = {}
    for node in nodes:
        if isinstance(node.operation, Barrier):
            origins.update((o, origins.get(i, i)) for i, o in zip(node.inputs, node.outputs, strict=True))
    return origins


def _redirect(node: Node, origins: Mapping[Operand, Operand]) -> Node:
    return replace(node, inputs=tuple(origins.get(operand, operand) for operand in node.inputs))
