"""Makes gradients of parameters in the dtype in which they are added up, in the product itself.

The gradient of a float32 parameter that is cast to bfloat16 for a product is a product in bfloat16, then a cast back to
float32. Products add up in float32 anyway. So the rounding in between is left out: the product makes float32, and the
compiler can add it to the accumulator in the same kernel, where it would write the rounded gradient and read it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import get_abstract_mesh

from rrfp_jax.layout import other_axes
from rrfp_jax.programs.splitting.ir import Apply, Node, Operand, Var, variables
from rrfp_jax.programs.target import current_target

_MOVES = frozenset({"reshape", "squeeze", "expand_dims", "transpose"})
"""The operations that may stand between a product and the cast: they move elements, of any dtype."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _LoneProduct(Apply):
    """A product that is not joined with others that read the same operand.

    XLA joins such products on GPUs (those of queries, keys and values, say), and then adds their parts to the
    accumulators in kernels of their own.
    """

    def run(self, *arrays: Any) -> Sequence[Any]:
        return super().run(*jax.lax.optimization_barrier(arrays))


def widens() -> bool:
    """Whether products that are gradients of parameters make float32 in what is being traced.

    Where devices hold other rows each, they add up their gradients for every microbatch: rounded ones are half the
    bytes. XLA has no products of bfloat16 that make float32 for some shapes on CPUs.
    """
    return current_target().platform != "cpu" and not other_axes(get_abstract_mesh().shape)


def widen_products(nodes: Sequence[Node], gradients: Sequence[Operand]) -> tuple[list[Node], list[Operand]]:
    """Returns nodes and ``gradients`` in which products have the wider dtype to which they would be cast.

    A value that is read elsewhere too stays as it is, and so do the products of a loop's passes.
    """
    makers: dict[Operand, Node] = {output: node for node in nodes for output in node.outputs}
    readers: Counter[Operand] = Counter(operand for node in nodes for operand in variables(node.inputs))
    readers.update(variables(gradients))
    renewed: dict[Node, Node | None] = {}
    results: list[Operand] = []
    for gradient in gradients:
        shown = gradient
        for node in _chain(gradient, makers, readers):
            operation, made = node.operation, node.outputs[0]
            assert isinstance(operation, Apply)
            assert isinstance(gradient, Var)
            if operation.name == "convert_element_type":
                renewed[node] = None
                continue
            wide = Var(made.shape, gradient.dtype, fixed=made.fixed, varying=made.varying)
            if operation.name == "dot_general":
                params = {**operation.params, "preferred_element_type": np.dtype(gradient.dtype)}
                product = _LoneProduct(**vars(operation) | {"params": params})
                renewed[node] = Node(product, node.inputs, (wide,))
            else:
                renewed[node] = Node(operation, (shown,), (wide,))
            shown = wide
        results.append(shown)
    return [new for node in nodes if (new := renewed.get(node, node)) is not None], results


def _chain(gradient: Operand, makers: Mapping[Operand, Node], readers: Mapping[Operand, int]) -> list[Node]:
    """Returns the nodes from a product to the gradient, with one cast to its dtype among them; none without such."""
    chain: list[Node] = []
    shown, casts = gradient, 0
    while (node := makers.get(shown)) is not None and readers[shown] == 1 and isinstance(node.operation, Apply):
        chain.append(node)
        if node.operation.name == "dot_general":
            dtypes = {operand.dtype for operand in variables(node.inputs)}
            return chain[::-1] if casts == 1 and dtypes == {node.outputs[0].dtype} else []
        if node.operation.name == "convert_element_type":
            source = str(getattr(node.inputs[0], "dtype", None))
            casts += source in ("bfloat16", "float16") and str(node.outputs[0].dtype) == "float32"
        elif node.operation.name not in _MOVES:
            return []
        (shown,) = node.inputs
    return []
