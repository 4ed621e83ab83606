"""Chunks made of named layers.

A model is one chain of named layers, or several. Each is a Flax NNX module of its own, split once into a static graph
definition and a plain nested dictionary of arrays; a chunk is some consecutive names. A name is global: it says nothing
of the chunk or stage that holds the layer. Parameters, checkpoints and initial values go by it, so neither initial
values nor the result depend on the cut.

In its chunk a layer has a name of its own besides, so that chunks of as many layers of the same shapes are of one kind
(:mod:`rrfp_jax.programs.chunk`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from rrfp_jax.programs.chunk import ApplyLayers, Chunk, InitLayers, Params, name_number

_LayerBuilder = Callable[[Any, nnx.Rngs], nnx.Module]
"""Makes a layer from a configuration."""
_Builders = tuple[tuple[str, _LayerBuilder, Any], ...]
"""Own name, builder and configuration of every layer of a chunk."""


class NamedLayer(NamedTuple):
    """A layer of a chunk."""

    own: str
    """Its name in the chunk."""
    name: str
    """Its name in the model."""
    build: _LayerBuilder
    config: Any
    """The argument of ``build``, a frozen record."""


def chunk_of(
    layers: Sequence[NamedLayer],
    run: Callable[..., Any],
    title: str,
    *,
    run_evaluating: Callable[..., Any] | None = None,
    **rest: Any,
) -> Chunk:
    """Returns a chunk of some layers; ``rest`` are fields of :class:`rrfp_jax.programs.chunk.Chunk`.

    The chunk computes ``run(modules, inputs, leaves)``; ``modules`` are its layers by own names, in order. ``run`` is a
    function of a module, or such a one with some arguments filled in by ``functools.partial``: chunks of one kind
    compare equal by it. Evaluations compute ``run_evaluating`` in its place, if it is given.
    """
    builders = tuple((layer.own, layer.build, layer.config) for layer in layers)
    names = {layer.own: layer.name for layer in layers}
    numbers = {own: np.uint32(name_number(name)) for own, name in names.items()}
    return Chunk(
        name=title,
        init=InitLayers(partial(_init, builders), names, numbers, each=dict(_makers(builders))),
        apply=ApplyLayers(partial(_apply, builders=builders, run=run), names),
        apply_evaluating=None
        if run_evaluating is None
        else ApplyLayers(partial(_apply, builders=builders, run=run_evaluating), names),
        **rest,
    )


def layer_module(layer: NamedLayer, params: Any) -> Any:
    """Returns the module of a layer with these parameters."""
    return nnx.merge(_definition(layer.config, layer.build), params)


def _build(config: Any, build: _LayerBuilder, key: jax.Array) -> nnx.Module:
    return build(config, nnx.Rngs(params=key))


def _init(builders: _Builders, key: jax.Array, *, numbers: dict[str, Any]) -> Params:
    return {name: make(key, numbers[name]) for name, make in _makers(builders)}


def _makers(builders: _Builders) -> Iterator[tuple[str, Callable[[jax.Array, Any], Any]]]:
    return ((name, partial(_init_layer, config, build)) for name, build, config in builders)


def _init_layer(config: Any, build: _LayerBuilder, key: jax.Array, number: Any) -> Any:
    # the key comes from the layer's name in the model, so that initial values do not depend on the cut
    return nnx.to_pure_dict(nnx.state(_build(config, build, jax.random.fold_in(key, number))))


@cache
def _definition(config: Any, build: _LayerBuilder) -> nnx.GraphDef[Any]:
    """Returns the static part of a layer, found without arrays: a model may be cut before JAX knows its devices."""
    key = jax.eval_shape(jax.random.key, 0)
    return nnx.graphdef(nnx.eval_shape(partial(_build, config, build), key))


def _apply(
    params: Params,
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    builders: _Builders,
    run: Callable[..., Any],
    key: jax.Array | None = None,
    numbers: Any = (),
) -> Any:
    del key, numbers  # no layer is random
    modules = {name: nnx.merge(_definition(config, build), params[name]) for name, build, config in builders}
    return run(modules, inputs, leaves)
