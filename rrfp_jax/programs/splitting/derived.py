"""Values that are fixed for a step and cost work: casts of weights to a narrower type, merged or normalised matrices.

They are derived from parameters alone, so one copy serves all microbatches between two updates. Free nodes are not
worth a copy; the values that `hoisted` picks are those made by a node that is not free and read by one that is not both
fixed and unfree, that is, where the fixed part of a program meets the rest. What is made of constants alone (masks,
position tables) is left to the compiler, which folds it into each program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rrfp_jax.programs.splitting.ir import Node, Operand, Value, is_fixed, values
from rrfp_jax.programs.splitting.rules import is_free


def hoisted(nodes: Sequence[Node], outputs: Iterable[Operand], params: Iterable[Value]) -> list[Value]:
    """The values worth a copy, of `nodes` in order that lead from `params` (and inputs) to `outputs`."""
    reached = set(params)
    for node in nodes:
        if reached.intersection(values(node.inputs)):
            reached.update(output for output in node.outputs if output.fixed)
    costly = [node for node in nodes if node.outputs and all(map(is_fixed, node.outputs)) and not is_free(node)]
    inner = set(costly)
    read = {operand for node in nodes if node not in inner for operand in values(node.inputs)} | set(values(outputs))
    wanted = read & reached
    return list(dict.fromkeys(output for node in costly for output in node.outputs if output in wanted))
