"""Chunks made of named layers.

A model is some chains of named layers. Each is a Flax NNX module of its own, split once into a static graph definition
and a plain nested dictionary of arrays; a chunk is some consecutive names. A name is global: it says nothing of the
chunk or stage that holds the layer. Parameters, checkpoints and initial values go by it, so neither initial values nor
the result depend on the cut.

In its chunk a layer has a name of its own besides, so that chunks of as many layers of the same shapes are of one kind
(:mod:`rrfp_jax.programs.layers`).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.layers import ApplyLayers, InitLayers, name_number

Build = Callable[[Any, nnx.Rngs], nnx.Module]
"""Makes a layer of a configuration."""
Builders = tuple[tuple[str, Build, Any], ...]
"""How to make every layer of a chunk: its name there, and of what."""


class NamedLayer(NamedTuple):
    """A layer of a chunk."""

    own: str
    """Its name in the chunk."""
    name: str
    """Its name in the model."""
    build: Build
    config: Any
    """What ``build`` makes it of, a frozen record."""


def chunk_of(
    layers: Sequence[NamedLayer],
    run: Callable[..., Any],
    title: str,
    *,
    run_evaluating: Callable[..., Any] | None = None,
    **rest: Any,
) -> Chunk:
    """A chunk of some layers; ``rest`` are fields of :class:`rrfp_jax.programs.chunk.Chunk`.

    ``run(modules, inputs, leaves)`` is what it computes; ``modules`` are its layers by own names, in order. ``run`` is
    a function of a module, or such a one with some arguments filled in by ``functools.partial``. ``run_evaluating`` is
    what evaluations compute in its place, where that differs.
    """
    builders = tuple((layer.own, layer.build, layer.config) for layer in layers)
    names = {layer.own: layer.name for layer in layers}
    numbers = {own: np.uint32(name_number(name)) for own, name in names.items()}
    apply, evaluating = (
        None if each is None else ApplyLayers(partial(_apply, builders=builders, run=each), names)
        for each in (run, run_evaluating)
    )
    assert apply is not None
    return Chunk(
        name=title,
        init=InitLayers(partial(_init, builders), names, numbers),
        apply=apply,
        apply_evaluating=evaluating,
        **rest,
    )


def module_of(layer: NamedLayer, params: Any) -> Any:
    """The module of a layer with these parameters."""
    return nnx.merge(_definition(layer.config, layer.build), params)


def _build(config: Any, build: Build, key: jax.Array) -> nnx.Module:
    return build(config, nnx.Rngs(params=key))


def _init(builders: Builders, key: jax.Array, *, numbers: dict[str, Any]) -> Params:
    modules = {name: _build(config, build, jax.random.fold_in(key, numbers[name])) for name, build, config in builders}
    return {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}


@cache
def _definition(config: Any, build: Build) -> nnx.GraphDef[Any]:
    """The static part of a layer, found without arrays: a model may be cut before JAX knows its devices."""
    key = jax.eval_shape(jax.random.key, 0)
    return nnx.graphdef(nnx.eval_shape(partial(_build, config, build), key))


def _apply(
    params: Params,
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    builders: Builders,
    run: Callable[..., Any],
    key: jax.Array | None = None,
    numbers: Any = (),
) -> Any:
    del key, numbers  # no layer is random
    modules = {name: nnx.merge(_definition(config, build), params[name]) for name, build, config in builders}
    return run(modules, inputs, leaves)
