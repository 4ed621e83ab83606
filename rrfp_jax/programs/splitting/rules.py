"""Which operations are free, which are heavy, and which weight gradients are too light to defer.

Free: moves or widens data and computes nothing. Free operations may be done twice, so a program redoes them where that
lets it receive a smaller array, or one that is there anyway.

Heavy: matrix products, convolutions, scatter-adds (gradients of embeddings and of expert dispatch), and opaque
operations. Deferring a parameter's gradient to W pays only if its own part of the backward, the nodes that the input
gradient does not need, is heavy. Otherwise (biases, norm scales, sums) W would have to be handed an activation or
cotangent merely to sum it: such gradients are *light*, are made in I and cross as they are. A weight gradient is not
light downstream of a heavy node that I does not need: a forward walk marks values, through loops to a fixed point of
their carries.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.programs.splitting.ir import (
    Apply,
    Block,
    Loop,
    Node,
    Operand,
    Sharded,
    Var,
    close_over_carries,
    loop_parts,
    sharded_parts,
    slice_nodes,
)

_FREE = frozenset([
    *("bitcast_convert_type", "broadcast_in_dim", "copy", "expand_dims", "iota", "pcast", "pvary", "random_unwrap"),
    *("random_wrap", "reshape", "squeeze", "stop_gradient", "transpose"),
])  # fmt: skip
_HEAVY = frozenset([
    *("cholesky", "conv_general_dilated", "dot_general", "eigh", "fft", "lu", "qr", "ragged_dot", "ragged_dot_general"),
    *("scatter-add", "scatter_add", "select_and_scatter_add", "svd", "triangular_solve"),
])  # fmt: skip
_OPAQUE = frozenset({"cond", "custom_call", "ffi_call", "linear_call", "pallas_call", "run_state", "while"})
_FLOAT_BITS = {"float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of exponent and mantissa by dtype."""


def is_free(node: Node) -> bool:
    """Whether the node only moves or widens data."""
    operation = node.operation
    if isinstance(operation, Loop):
        return operation.batched and all(is_free(inner) for inner in operation.body.nodes)
    if not isinstance(operation, Apply) or operation.effectful:
        return False
    if operation.name == "convert_element_type":
        dtype = getattr(node.inputs[0], "dtype", None)
        return dtype is None or node.outputs[0].dtype.itemsize >= dtype.itemsize
    if operation.name == "reduce_precision":
        params = operation.params
        return _FLOAT_BITS.get(str(node.outputs[0].dtype)) == (params["exponent_bits"], params["mantissa_bits"])
    return operation.name in _FREE


def is_heavy(node: Node) -> bool:
    """Whether the node does work that is worth deferring, or is opaque."""
    operation = node.operation
    if isinstance(operation, Loop | Sharded):
        return any(is_heavy(inner) for inner in operation.body.nodes)
    return operation.name in _HEAVY or _is_opaque(node)


def _is_opaque(node: Node) -> bool:
    """Whether the node holds jaxprs or kernels that stay whole."""
    operation = node.operation
    if not isinstance(operation, Apply):
        return False
    return operation.name in _OPAQUE or any(key.endswith("jaxpr") for key in operation.params)


def can_batch(body: Block) -> bool:
    """Whether the passes of a loop over `body` may run at once under `vmap`, which would run both sides of a `cond`."""
    for node in body.nodes:
        if isinstance(node.operation, Loop):
            if not can_batch(node.operation.body):
                return False
        elif isinstance(node.operation, Sharded) or node.operation.effectful or _is_opaque(node):
            return False
    return True


def light_outputs(nodes: Sequence[Node], first: Sequence[Operand], second: Sequence[Operand]) -> list[bool]:
    """Says for each output of `second` whether it needs no heavy node beyond those that `first` need."""
    marked: set[Operand] = set()
    _mark(nodes, slice_nodes(nodes, first).needed, marked)
    return [operand not in marked for operand in second]


def _mark(nodes: Sequence[Node], needed: set[Var], marked: set[Operand]) -> None:
    """Adds to `marked` the values that have a heavy node outside the slice `needed` above them."""
    for node in nodes:
        keep = [output in needed for output in node.outputs]
        operation = node.operation
        if isinstance(operation, Loop):
            parts = loop_parts(node, operation)
            needed_inside = close_over_carries(parts, operation, keep)[1].needed if any(keep) else set[Var]()
            inner: set[Operand] = {e.inner for e in (*parts.constants, *parts.slices) if e.outer in marked}
            inner |= {carry.before for carry in parts.carries if carry.start in marked}
            while True:
                _mark(operation.body.nodes, needed_inside, inner)
                # a pass reads the carries that the pass before has made of marked values
                more = {carry.before for carry in parts.carries if carry.after in inner} - inner
                if not more:
                    break
                inner |= more
            results = zip(operation.body.outputs, node.outputs, strict=True)
            marked.update(outer for after, outer in results if after in inner)
        elif isinstance(operation, Sharded):
            shards = sharded_parts(node, operation)
            wanted = [outlet.inner for outlet, kept in zip(shards.outlets, keep, strict=True) if kept]
            needed_inside = slice_nodes(operation.body.nodes, wanted).needed if wanted else set[Var]()
            inner = {inlet.inner for inlet in shards.inlets if inlet.outer in marked}
            _mark(operation.body.nodes, needed_inside, inner)
            marked.update(outlet.outer for outlet in shards.outlets if outlet.inner in inner)
        elif not any(keep) and (is_heavy(node) or any(operand in marked for operand in node.inputs)):
            marked.update(node.outputs)
