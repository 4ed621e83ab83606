"""Which operations are free, and which are the work that a weight gradient consists of.

Free: moves or widens data and computes nothing. Free operations may be done twice, so a program redoes them where that
lets it receive a smaller array, or one that is there anyway.

Heavy: matrix products, convolutions, scatter-adds (gradients of embeddings and of expert dispatch), and whatever we
cannot look into. A parameter's gradient is worth deferring to W only if its own part of the backward is heavy.
"""

from __future__ import annotations

from rrfp_jax.programs.splitting.ir import Block, Node
from rrfp_jax.programs.splitting.operations import Apply, Barrier, Loop, Reshard, Sharded

_FREE = frozenset(
    {
        "bitcast_convert_type",
        "broadcast_in_dim",
        "copy",
        "expand_dims",
        "iota",
        "pcast",
        "pvary",
        "random_unwrap",
        "random_wrap",
        "reshape",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
_HEAVY = frozenset(
    {
        "cholesky",
        "conv_general_dilated",
        "dot_general",
        "eigh",
        "fft",
        "lu",
        "qr",
        "ragged_dot",
        "ragged_dot_general",
        "scatter-add",
        "scatter_add",
        "select_and_scatter_add",
        "svd",
        "triangular_solve",
    }
)
_OPAQUE = frozenset({"cond", "custom_call", "ffi_call", "linear_call", "pallas_call", "run_state", "while"})
_MANTISSA_BITS = {"float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}


def is_splittable(node: Node) -> bool:
    return isinstance(node.operation, Loop | Sharded)


def is_free(node: Node) -> bool:
    """Whether the node only moves or widens data."""
    operation = node.operation
    if isinstance(operation, Loop):
        return operation.batched and all(is_free(inner) for inner in operation.body.nodes)
    if not isinstance(operation, Apply) or operation.effectful:
        return False
    if operation.name == "convert_element_type":
        return _widens(node)
    if operation.name == "reduce_precision":
        params = operation.params
        return _MANTISSA_BITS.get(str(node.outputs[0].dtype)) == (params["exponent_bits"], params["mantissa_bits"])
    return operation.name in _FREE


def _widens(node: Node) -> bool:
    (source,) = node.inputs
    dtype = getattr(source, "dtype", None)
    return dtype is None or node.outputs[0].dtype.itemsize >= dtype.itemsize


def is_heavy(node: Node) -> bool:
    """Whether the node does work that is worth deferring, or cannot be looked into."""
    operation = node.operation
    if isinstance(operation, Loop | Sharded):
        return any(is_heavy(inner) for inner in operation.body.nodes)
    return operation.name in _HEAVY or is_opaque(node)


def is_opaque(node: Node) -> bool:
    """Whether the node holds jaxprs or kernels that stay whole."""
    operation = node.operation
    if not isinstance(operation, Apply):
        return not isinstance(operation, Loop | Sharded | Barrier | Reshard)
    return operation.name in _OPAQUE or any(key.endswith("jaxpr") for key in operation.params)


def can_batch(body: Block) -> bool:
    """Whether the passes of a loop over `body` may run at once under `vmap`, which would run both sides of a `cond`."""
    for node in body.nodes:
        if isinstance(node.operation, Loop):
            if not can_batch(node.operation.body):
                return False
        elif isinstance(node.operation, Sharded) or node.operation.effectful or is_opaque(node):
            return False
    return True
