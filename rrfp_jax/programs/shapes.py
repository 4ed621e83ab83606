"""Shapes and dtypes as data, and those that every chunk reads and returns, derived before anything runs.

Every fault of a list of chunks is found here, with the name of the chunk in the message: leaves that
the batch does not have, chunks that do not fit together, a last chunk that returns no loss, shared parameters that
differ.
"""

import math
import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.agreement import MAX_NAME_BYTES
from rrfp_jax.programs.chunk import Chunk, Loss, microbatch_key, param_specs, trained_specs
from rrfp_jax.schedules import PipelineGraph

Specs = Any
"""A pytree of ``jax.ShapeDtypeStruct``."""


def spec_of(tree: Any) -> Specs:
    """Returns the shapes of a pytree of arrays or specs, in the dtypes that JAX computes with, without weak types.

    Raises ValueError for typed random keys, which can neither be sent nor saved.
    """

    def spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            place = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(
                f"there are typed random keys, {leaf.dtype}{list(leaf.shape)}{place}, which cannot be sent or saved: "
                "give their numbers, jax.random.key_data(key), and make keys of them with jax.random.wrap_key_data"
            )
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map_with_path(spec, tree)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is floating or complex: only such leaves have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def gradient_spec(tree: Specs) -> Specs:
    """Returns the shapes of the gradient of a pytree: the same tree, with None for leaves that have no gradient."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def accumulator_spec(params: Specs) -> Specs:
    """Returns the shapes of sums of gradients: in float32, or in float64 as the parameters, placed like these."""

    def sums(param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.promote_types(param.dtype, jnp.float32)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)

    return jax.tree.map(sums, params)


def num_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves of a pytree of arrays or specs, on one of the devices that hold them."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def pick(layers: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the layers of these names."""
    return {name: layers[name] for name in names}


def spec_text(tree: Any) -> str:
    """Returns words for error messages: ``float32[4,128]``, several leaves joined by commas."""
    return ", ".join(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(tree)) or "nothing"


# -- shapes of chunks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChunkShapes:
    """Shapes and dtypes of one chunk and one microbatch; all are pytrees of ``jax.ShapeDtypeStruct``."""

    params: dict[str, Specs]
    """The parameters by layer name."""
    inputs: tuple[Specs, ...]
    """The output of every predecessor, ascending; None for one that such a microbatch skips."""
    leaves: dict[str, jax.ShapeDtypeStruct]
    """The batch leaves that the chunk reads and the microbatch has."""
    outputs: Specs
    """The outputs of ``apply``; None where such a microbatch skips the chunk."""
    exists: bool = True
    """Whether such a microbatch runs on the chunk."""

    @property
    def read(self) -> Hashable:
        """A key that is equal for microbatches that need the same programs of the chunk."""
        read = (self.inputs, self.leaves)
        return (*jax.tree.leaves(read), jax.tree.structure(read))


def describe_chunk(chunks: Sequence[Chunk], index: int) -> str:
    """Returns words for messages: ``chunk 3 (layers 6-7)``."""
    return f"chunk {index} ({chunks[index].name})"


def derive_shapes(
    chunks: Sequence[Chunk],
    graph: PipelineGraph,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    absent: Collection[int] = (),
) -> tuple[ChunkShapes, ...]:
    """Traces one chunk of every kind, once in its life for the same inputs, and returns all shapes; computes nothing.

    ``batch`` holds the leaves of one microbatch, ``absent`` the chunks that it skips. Raises ValueError, naming the
    chunk, where chunks, graph and batch do not fit together.
    """
    if len(chunks) != graph.num_chunks:
        raise ValueError(f"{len(chunks)} chunks are given for a graph of {graph.num_chunks}: the numbers must agree")
    shapes: list[ChunkShapes] = []
    known: dict[Hashable, dict[Any, Any]] = {}
    for index, chunk in enumerate(chunks):
        params = checked_params(chunks, index)
        inputs = tuple(sent(chunks, graph, p, index, shapes[p].outputs) for p in graph.predecessors(index))
        if index in absent:
            shapes.append(ChunkShapes(params=params, inputs=inputs, leaves={}, outputs=None, exists=False))
            continue
        names = [name for name in chunk.leaves if name in batch or name not in chunk.optional_leaves]
        if missing := [name for name in names if name not in batch]:
            raise ValueError(
                f"{describe_chunk(chunks, index)} reads batch leaf {missing[0]!r}, which the batch does not have: "
                f"it has {', '.join(sorted(batch)) or 'no leaves'}"
            )
        leaves = {name: spec_of(batch[name]) for name in names}
        of_kind = known.setdefault(chunk.own.kind, chunk.known_outputs)
        outputs = _outputs(chunks, index, params, inputs, leaves, known=of_kind)
        if graph.gives_loss(index):
            _check_loss(chunks, graph, index, outputs)
        shapes.append(ChunkShapes(params=params, inputs=inputs, leaves=leaves, outputs=outputs))
    _check_layer_names(chunks, graph, shapes)
    for index, shape in enumerate(shapes):
        for target in graph.gradient_successors(index) if shape.exists else ():
            carried = sent(chunks, graph, index, target, shape.outputs)
            parts = jax.tree.leaves(carried)
            if (parts or graph.part(index, target) is None) and not any(map(is_inexact, parts)):
                raise ValueError(
                    f"{describe_chunk(chunks, index)} sends {spec_text(carried)} to chunk {target}, which has no "
                    f"gradient: write Edge({index}, {target}, carries_gradient=False)"
                )
    return tuple(shapes)


LOSS = "loss"
"""The part of the outputs that is the loss, for a chunk of :attr:`rrfp_jax.schedules.PipelineGraph.losses`."""


def part_of(outputs: Any, part: str | None) -> Any:
    """Returns a part of the outputs of a chunk, or of their shapes; None stands for the whole."""
    return outputs if part is None or outputs is None else outputs[part]


def sent(chunks: Sequence[Chunk], graph: PipelineGraph, source: int, target: int, outputs: Specs) -> Specs:
    """Returns the shapes of the part of a chunk's outputs that travels to another chunk; None if it has none.

    Raises ValueError for a part that the outputs do not have.
    """
    part = graph.part(source, target)
    if part is not None and outputs is not None and not (isinstance(outputs, dict) and part in outputs):
        has = ", ".join(outputs) if isinstance(outputs, dict) else spec_text(outputs)
        raise ValueError(
            f"edge {source} -> {target} takes part {part!r} of {describe_chunk(chunks, source)}, which returns {has}: "
            "return a dictionary with that part, or name another one"
        )
    return part_of(outputs, part)


def loss_of(graph: PipelineGraph, chunk: int, outputs: Any) -> Any:
    """Returns the loss among the outputs of a chunk that gives one."""
    return part_of(outputs, LOSS if chunk in graph.losses else None)


def arrange_inputs(inputs: tuple[Any, ...]) -> Any:
    """Returns the ``inputs`` of ``Chunk.apply``: None, the only predecessor's output, or a tuple of all."""
    if not inputs:
        return None
    return inputs[0] if len(inputs) == 1 else inputs


def holders(chunks: Sequence[Chunk], name: str) -> list[int]:
    """Returns the chunks that hold a copy of the shared layer ``name``, ascending; the first one owns it."""
    return [index for index, chunk in enumerate(chunks) if name in chunk.shared]


def model_params(params: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the whole model's parameters, or their shapes, by layer name, given those of every chunk, ascending.

    A shared layer is its lowest holder's copy.
    """
    whole: dict[str, Any] = {}
    for layers in params:
        whole |= {name: layer for name, layer in layers.items() if name not in whole}
    return whole


_STATE_REMEDY = (
    "A chunk has no state but its parameters: put LayerNorm or GroupNorm in place of BatchNorm, or freeze its layer, "
    "and take random numbers from the key of apply (uses_key=True)"
)
_CHANGING_VARIABLES = ("BatchStat", "Cache", "Intermediate", "RngCount", "RngKey", "RngState")
"""Variables of Flax NNX that hold no parameters."""


def checked_params(chunks: Sequence[Chunk], index: int) -> dict[str, Specs]:
    """Returns the shapes of a chunk's parameters; raises ValueError, naming chunk and leaf, for a leaf that cannot be
    one."""
    who = describe_chunk(chunks, index)
    params: Any = param_specs(chunks[index])
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        raise ValueError(f"{who} initialises to {type(params).__name__}: return a dictionary from layer name to arrays")
    nnx = sys.modules.get("flax.nnx")  # no variable of Flax NNX can exist before it is loaded
    kept = (
        ()
        if nnx is None
        else jax.tree.leaves_with_path(
            trained_specs(chunks[index]), is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
    )
    for path, leaf in kept:
        names = [each.__name__ for each in type(leaf).__mro__ if each.__module__.startswith("flax.")]
        if nnx is not None and isinstance(leaf, nnx.Variable) and names[0] in _CHANGING_VARIABLES:
            raise ValueError(
                f"{who} has {jax.tree_util.keystr(path)}, an nnx {names[0]}, among its parameters: it would be trained "
                f"as one, and the values that apply gives it are lost. {_STATE_REMEDY}"
            )
    frozen = chunks[index].frozen
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if not is_inexact(leaf):
            raise ValueError(
                f"{who} has the parameter {name} of type {leaf.dtype}, which has no gradient: pass it as a batch leaf "
                f"or close over it. {_STATE_REMEDY}"
            )
        if leaf.dtype.itemsize < 2 and path[0].key not in frozen:
            raise ValueError(
                f"{who} has the parameter {name} of type {leaf.dtype}, in which updates would be lost: keep it in "
                "float32 or bfloat16 and cast it in apply, or freeze its layer"
            )
    for said, named in (("shares", chunks[index].shared), ("freezes", frozen)):
        for name in sorted(named - params.keys()):
            raise ValueError(f"{who} says that it {said} {name!r}, but its layers are {', '.join(params) or 'none'}")
    return dict(spec_of(params))


def _outputs(
    chunks: Sequence[Chunk],
    index: int,
    params: Specs,
    inputs: tuple[Specs, ...],
    leaves: dict[str, Specs],
    *,
    known: dict[Any, Any],
) -> Specs:
    chunk = chunks[index]

    def apply(params: Any, inputs: Any, leaves: Any, uses_key: bool = chunk.uses_key) -> Any:
        key = microbatch_key(0, 0, 0) if uses_key else None
        return chunk.own(params, arrange_inputs(inputs), leaves, key=key, numbers=chunk.own.numbers)

    params = chunk.own.to_own(params)
    read = (*jax.tree.leaves((params, inputs, leaves)), jax.tree.structure((params, inputs, leaves)), chunk.uses_key)
    if read in known:
        return known[read]
    try:
        return known.setdefault(read, spec_of(jax.eval_shape(apply, params, inputs, leaves)))
    except Exception as error:  # a user's model may raise anything; say where, and the remedy for the usual causes
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        remedy = ""
        if isinstance(name, str) and name not in {*chunk.leaves, *params}:
            remedy = f"; name {name!r} in `leaves` if it is a leaf of the batch, or let `init` make it"
        elif not chunk.uses_key:
            with suppress(Exception):
                jax.eval_shape(partial(apply, uses_key=True), params, inputs, leaves)
                remedy = "; it reads `key`, which is None: give the chunk uses_key=True"
        named = ", ".join(f"{name} {spec_text(spec)}" for name, spec in leaves.items())
        raise ValueError(
            f"{describe_chunk(chunks, index)} cannot be applied to inputs {spec_text(inputs)} and batch leaves "
            f"{named or 'none'}: {error}{remedy}"
        ) from error


def _check_loss(chunks: Sequence[Chunk], graph: PipelineGraph, index: int, outputs: Specs) -> None:
    if index in graph.losses and not (isinstance(outputs, dict) and LOSS in outputs):
        raise ValueError(
            f"{describe_chunk(chunks, index)} gives a loss beside what others read: return a dictionary with the part "
            f"{LOSS!r}"
        )
    outputs, scalar = loss_of(graph, index, outputs), jax.ShapeDtypeStruct((), np.dtype("float32"))
    is_loss, who = isinstance(outputs, tuple) and len(outputs) in (2, 3), describe_chunk(chunks, index)
    sums: Mapping[Any, Any] | None = Loss(*outputs).named_sums if is_loss else None
    if not isinstance(sums, Mapping) or any(spec != scalar for spec in (*outputs[:2], *sums.values())):
        raise ValueError(
            f"{who} {'gives a loss' if index in graph.losses else 'has no successor'} and returns "
            f"{spec_text(outputs)}: the {'loss must be' if index in graph.losses else 'last chunk must return'} "
            "(loss_sum, weight), two float32 scalars, and may have a dictionary of named ones as a third entry"
        )
    if long := [name for name in sums if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES]:
        raise ValueError(f"{who} names a sum {long[0]!r}: give a string of at most {MAX_NAME_BYTES} bytes")


def _check_layer_names(chunks: Sequence[Chunk], graph: PipelineGraph, shapes: Sequence[ChunkShapes]) -> None:
    """Raises ValueError for layers of one name that are no copies of one parameter, or would drift apart."""
    first: dict[str, int] = {}
    for index, shape in enumerate(shapes):
        for name in shape.params:
            owner = first.setdefault(name, index)
            if owner != index:
                _check_copies(chunks, graph, shapes, name, (owner, index))
    for index, chunk in enumerate(chunks):
        for name in chunk.shared:
            if len(holders(chunks, name)) == 1:
                raise ValueError(
                    f"{describe_chunk(chunks, index)} shares {name!r} with no other chunk: drop it from `shared`"
                )


def _check_copies(
    chunks: Sequence[Chunk], graph: PipelineGraph, shapes: Sequence[ChunkShapes], name: str, pair: tuple[int, int]
) -> None:
    owner, other = pair
    who = f"{describe_chunk(chunks, owner)} and {describe_chunk(chunks, other)}"
    if not (name in chunks[owner].shared and name in chunks[other].shared):
        raise ValueError(
            f"{who} both hold a layer named {name!r}: rename one, or list it in `shared` of both if they are copies of "
            "one parameter"
        )
    here, there = shapes[owner].params[name], shapes[other].params[name]
    if here != there:
        raise ValueError(
            f"{who} share {name!r}, but it is {spec_text(here)} in one and {spec_text(there)} in the other: "
            "initialise both to the same tree, shapes and dtypes"
        )
    frozen = [index for index in pair if name in chunks[index].frozen]
    if len(frozen) == 1:
        raise ValueError(
            f"{who} share {name!r}, but it is frozen in chunk {frozen[0]} only, and the copies would drift apart: "
            "freeze it in both or in none"
        )
    if frozen:
        return
    if graph.holder(owner) not in graph.sharing(graph.holder(other)):
        raise ValueError(f"{who} share {name!r}, but the graph does not know: build it with shared=({pair},)")
    if graph.has_backward(owner) != graph.has_backward(other):
        raise ValueError(
            f"{who} share {name!r}, but a gradient reaches only one of them, and the copies would drift apart: "
            "let gradients flow to both, or give the other a layer of its own"
        )
