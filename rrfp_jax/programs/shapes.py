"""The shapes that every chunk reads and returns, derived before anything runs.

Every fault of a list of chunks is found here, with the name of the chunk in the message: leaves that
the batch does not have, chunks that do not fit together, a last chunk that returns no loss, shared parameters that
differ.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from rrfp_jax.programs.agreement import MAX_NAME_BYTES
from rrfp_jax.programs.chunk import Chunk, Loss, microbatch_key, param_specs, trained_specs
from rrfp_jax.programs.specs import Specs, is_inexact, spec_of, spec_text
from rrfp_jax.schedules import PipelineGraph


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
        inputs = tuple(shapes[p].outputs for p in graph.predecessors(index))
        if index in absent:
            shapes.append(ChunkShapes(params=params, inputs=inputs, leaves={}, outputs=None, exists=False))
            continue
        leaves = _leaves(chunks, index, batch)
        of_kind = known.setdefault(chunk.own.kind, chunk.known_outputs)
        outputs = _outputs(chunks, index, params, inputs, leaves, known=of_kind)
        if not graph.successors(index):
            _check_loss(chunks, index, outputs)
        shapes.append(ChunkShapes(params=params, inputs=inputs, leaves=leaves, outputs=outputs))
    _check_layer_names(chunks, graph, shapes)
    _check_gradient_edges(chunks, graph, shapes)
    return tuple(shapes)


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


def checked_params(chunks: Sequence[Chunk], index: int) -> dict[str, Specs]:
    """Returns the shapes of a chunk's parameters; raises ValueError, naming chunk and leaf, for a leaf that cannot be
    one."""
    who = describe_chunk(chunks, index)
    params: Any = param_specs(chunks[index])
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        raise ValueError(f"{who} initialises to {type(params).__name__}: return a dictionary from layer name to arrays")
    for variable, kind in _variables(trained_specs(chunks[index])):
        if kind in _CHANGING_VARIABLES:
            raise ValueError(
                f"{who} has {variable}, an nnx {kind}, among its parameters: it would be trained as one, and the "
                f"values that apply gives it are lost. {_STATE_REMEDY}"
            )
    frozen = chunks[index].frozen
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
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
    for said, names in (("shares", chunks[index].shared), ("freezes", chunks[index].frozen)):
        for name in sorted(names - params.keys()):
            raise ValueError(f"{who} says that it {said} {name!r}, but its layers are {', '.join(params) or 'none'}")
    return dict(spec_of(params))


_STATE_REMEDY = (
    "A chunk has no state but its parameters: put LayerNorm or GroupNorm in place of BatchNorm, or freeze its layer, "
    "and take random numbers from the key of apply (uses_key=True)"
)
_CHANGING_VARIABLES = ("BatchStat", "Cache", "Intermediate", "RngCount", "RngKey", "RngState")
"""Variables of Flax NNX that hold no parameters."""


def _variables(params: Any) -> list[tuple[str, str]]:
    """Returns the paths of Flax NNX's variables in a tree, each with the name of its class there."""
    nnx = sys.modules.get("flax.nnx")  # no variable can exist before it is loaded
    if nnx is None:
        return []
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    variables = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, nnx.Variable)]
    kinds = [next(k.__name__ for k in type(leaf).__mro__ if k.__module__.startswith("flax.")) for _, leaf in variables]
    return [(path, kind) for (path, _), kind in zip(variables, kinds, strict=True)]


def _leaves(
    chunks: Sequence[Chunk], index: int, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    names = [name for name in chunks[index].leaves if name in batch or name not in chunks[index].optional_leaves]
    for name in names:
        if name not in batch:
            raise ValueError(
                f"{describe_chunk(chunks, index)} reads batch leaf {name!r}, which the batch does not have: "
                f"it has {', '.join(sorted(batch)) or 'no leaves'}"
            )
    return {name: spec_of(batch[name]) for name in names}


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
    except Exception as error:  # a user's model may raise anything; say where
        named = ", ".join(f"{name} {spec_text(spec)}" for name, spec in leaves.items())
        remedy = _remedy(chunk, apply, (params, inputs, leaves), error)
        raise ValueError(
            f"{describe_chunk(chunks, index)} cannot be applied to inputs {spec_text(inputs)} and batch leaves "
            f"{named or 'none'}: {error}{remedy and f'; {remedy}'}"
        ) from error


def _remedy(chunk: Chunk, apply: Callable[..., Any], read: tuple[Any, ...], error: Exception) -> str:
    """Returns the remedy for an error with one of the usual causes; otherwise an empty text."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(name, str) and name not in {*chunk.leaves, *read[0]}:
        return f"name {name!r} in `leaves` if it is a leaf of the batch, or let `init` make it"
    if not chunk.uses_key:
        with suppress(Exception):
            jax.eval_shape(partial(apply, uses_key=True), *read)
            return "it reads `key`, which is None: give the chunk uses_key=True"
    return ""


def _check_loss(chunks: Sequence[Chunk], index: int, outputs: Specs) -> None:
    scalar = jax.ShapeDtypeStruct((), np.dtype("float32"))
    is_loss, who = isinstance(outputs, tuple) and len(outputs) in (2, 3), describe_chunk(chunks, index)
    sums: Mapping[Any, Any] | None = Loss(*outputs).named_sums if is_loss else None
    if not isinstance(sums, Mapping) or any(spec != scalar for spec in (*outputs[:2], *sums.values())):
        raise ValueError(
            f"{who} has no successor and returns {spec_text(outputs)}: the last chunk must return (loss_sum, weight), "
            "two float32 scalars, and may return a dictionary of named ones as a third entry"
        )
    if long := [name for name in sums if not isinstance(name, str) or len(name.encode()) > MAX_NAME_BYTES]:
        raise ValueError(f"{who} names a sum {long[0]!r}: give a string of at most {MAX_NAME_BYTES} bytes")


def _check_layer_names(chunks: Sequence[Chunk], graph: PipelineGraph, shapes: Sequence[ChunkShapes]) -> None:
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
    _check_frozen_alike(chunks, name, who, pair)
    if name in chunks[owner].frozen:
        return
    if owner not in graph.sharing(other):
        raise ValueError(f"{who} share {name!r}, but the graph does not know: build it with shared=({pair},)")
    if graph.has_backward(owner) != graph.has_backward(other):
        raise ValueError(
            f"{who} share {name!r}, but a gradient reaches only one of them, and the copies would drift apart: "
            "let gradients flow to both, or give the other a layer of its own"
        )


def _check_frozen_alike(chunks: Sequence[Chunk], name: str, who: str, pair: tuple[int, int]) -> None:
    frozen = [index for index in pair if name in chunks[index].frozen]
    if len(frozen) == 1:
        raise ValueError(
            f"{who} share {name!r}, but it is frozen in chunk {frozen[0]} only, and the copies would drift apart: "
            "freeze it in both or in none"
        )


def _check_gradient_edges(chunks: Sequence[Chunk], graph: PipelineGraph, shapes: Sequence[ChunkShapes]) -> None:
    for index, shape in enumerate(shapes):
        has_gradient = shape.exists and graph.gradient_successors(index)
        if has_gradient and not any(is_inexact(leaf) for leaf in jax.tree.leaves(shape.outputs)):
            target = graph.gradient_successors(index)[0]
            raise ValueError(
                f"{describe_chunk(chunks, index)} sends {spec_text(shape.outputs)} to chunk {target}, which has no "
                f"gradient: write Edge({index}, {target}, carries_gradient=False)"
            )
