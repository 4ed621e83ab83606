"""Adapters of low rank (LoRA, Hu et al. 2021) for the library's models: they alone train.

Layers
    The adapters of ``layers.3`` are a layer of their own, ``adapters.layers.3``, whose tree has ``lora_a`` and
    ``lora_b`` at the path of each adapted matrix. All other layers are frozen. So hardly anything else knows of
    adapters: no gradient of a frozen layer is computed, and none has accumulators or optimizer state.
Initial values
    ``lora_b`` is zero, so training begins with the model as it was. ``lora_a`` derives from the layer's name and the
    path of the matrix, in any cut.
Dropout
    A mask derives from the microbatch's key, the layer's name, the path of the matrix, and the number of the pass where
    the slices of a sequence go through a chunk one after the other.
"""

import difflib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from rrfp_jax.field_rules import typed
from rrfp_jax.models._parts import Projection
from rrfp_jax.models.config import AdaptersConfig
from rrfp_jax.models.flax_modules import NamedLayer, apply_modules, layer_module
from rrfp_jax.programs.chunk import (
    ADAPTERS,
    ApplyLayers,
    Chunk,
    InitLayers,
    Params,
    Partition,
    check_chunks,
    name_number,
    param_specs,
    whole_name,
)

_Path = tuple[str, ...]
_A, _B = "lora_a", "lora_b"


class _Matrix(NamedTuple):
    """A matrix of a layer."""

    path: _Path
    rows: int
    columns: int


class _Adapted(NamedTuple):
    """A layer as a chunk with adapters computes it."""

    layer: NamedLayer
    paths: tuple[_Path, ...]
    """Paths of its matrices with an adapter."""


@typed
def add_adapters(chunks: Sequence[Chunk], adapters: AdaptersConfig) -> list[Chunk]:
    """Returns the chunks of a model of this library with adapters beside some matrices, and all other layers frozen.

    Raises ValueError, in one sentence with the remedy, for a target that no matrix has, for a rank above a matrix's
    own, and for chunks that are none of the library's layers.
    """
    chunks = check_chunks(chunks)
    layers = [_layers_of(chunk) for chunk in chunks]
    paths = dict.fromkeys(_path_of(layer, each) for own in layers for layer in own for each in _matrices(layer))
    for target in adapters.targets:
        if not any(_is_target(target, path) for path in paths):
            parts = [path.split(".") for path in paths]
            ends = dict.fromkeys(".".join(part[start:]) for part in parts for start in range(len(part)))
            nearest = difflib.get_close_matches(target, ends, n=1, cutoff=0.0)
            raise ValueError(
                f"no matrix matches {target!r}, which is to have an adapter: "
                + (f"the nearest is {nearest[0]!r}" if nearest else "the chunks have no matrices")
            )
    num_passes = Counter[tuple[str, ...]]()
    found = []
    for chunk, own in zip(chunks, layers, strict=True):
        names = tuple(layer.name for layer in own)
        found.append(_with_adapters(chunk, own, adapters, num_passes[names]))
        num_passes[names] += 1
    return found


def merged_layer(layer: Mapping[str, Any], factors: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Returns a layer's tree with the products of ``factors``, the tree of its adapters, added to its matrices.

    ``scale`` is :attr:`AdaptersConfig.scale`. Works on arrays of NumPy and JAX; the sum is rounded once.
    """
    if _A in factors:
        kernel = layer["kernel"]
        added = kernel.astype(np.float32) + scale * (factors[_A] @ factors[_B])
        return {**layer, "kernel": added.astype(kernel.dtype)}
    return {**layer, **{name: merged_layer(layer[name], each, scale) for name, each in factors.items()}}


def merged_params(params: Mapping[str, Any], adapters: AdaptersConfig) -> dict[str, Any]:
    """Returns a model's parameters by layer name with its adapters merged, and without the layers of these."""
    return {
        name: merged_layer(layer, params.get(ADAPTERS + name, {}), adapters.scale)
        for name, layer in params.items()
        if not name.startswith(ADAPTERS)
    }


class AdapterSize(NamedTuple):
    """The adapter of a matrix."""

    path: _Path
    """The path of the matrix in its layer."""
    rows: int
    columns: int
    held: int
    """The numbers of both factors that a device holds, where several share the matrix."""


def adapter_sizes(
    chunks: Sequence[Chunk], axes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, list[AdapterSize]]:
    """Returns the adapters of each layer of a model, by the layer's name, on a mesh with these axes."""
    found: dict[str, list[AdapterSize]] = {}
    for chunk in chunks:
        specs = param_specs(chunk)
        cuts = (
            jax.tree.map(lambda _: PartitionSpec(), specs) if chunk.partition is None else chunk.partition(specs, axes)
        )
        for name in (name for name in specs if name.startswith(ADAPTERS) and name not in chunk.frozen):
            at = dict(jax.tree_util.tree_leaves_with_path(cuts[name]))
            own = [(path, spec.shape, at[path]) for path, spec in jax.tree_util.tree_leaves_with_path(specs[name])]
            for (path, (rows, rank), cut_rows), (_, (_, columns), cut_columns) in zip(own[::2], own[1::2], strict=True):
                parts = [axes.get(axis, 1) if axis else 1 for axis in (cut_rows[0], cut_columns[1])]
                held = rank * (rows // parts[0] + columns // parts[1])
                keys = tuple(key.key for key in path[:-1])
                found.setdefault(name.removeprefix(ADAPTERS), []).append(AdapterSize(keys, rows, columns, held))
    return found


# -- which matrices ----------------------------------------------------------------------------------------------------


def _layers_of(chunk: Chunk) -> list[NamedLayer]:
    """Returns the library's layers of a chunk; raises ValueError for another one."""
    apply: Any = chunk.apply
    function = apply.function if isinstance(apply, ApplyLayers) else None
    if not (isinstance(function, partial) and function.func is apply_modules):
        raise ValueError(
            f"chunk {chunk.name!r} is none of the library's layers, which alone can have adapters: give the chunks of "
            "language_model or vision_language_model, each once"
        )
    return [NamedLayer(own, apply.names[own], build, config) for own, build, config in function.keywords["builders"]]


def _path_of(layer: NamedLayer, matrix: _Matrix) -> str:
    return ".".join((whole_name(layer.name), *matrix.path))


def _is_target(target: str, path: str) -> bool:
    return (
        path == target or path.endswith(f".{target}") or fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}")
    )


def _matrices(layer: NamedLayer) -> tuple[_Matrix, ...]:
    return _matrices_of(layer.config, layer.build)


@cache
def _matrices_of(config: Any, build: Callable[..., Any]) -> tuple[_Matrix, ...]:
    """Returns the matrices of a layer that can have adapters, found without arrays."""
    key = jax.eval_shape(jax.random.key, 0)
    module = nnx.eval_shape(lambda key: build(config, nnx.Rngs(params=key)), key)
    return tuple(
        _Matrix(tuple(map(str, path)), each.in_features, each.out_features)
        for path, each in nnx.iter_modules(module)
        if isinstance(each, Projection)
    )


# -- chunks ------------------------------------------------------------------------------------------------------------


def _with_adapters(chunk: Chunk, layers: Sequence[NamedLayer], adapters: AdaptersConfig, number: int) -> Chunk:
    """Returns a chunk with adapters; ``number`` counts the chunks before it that have the same layers."""
    assert isinstance(chunk.init, InitLayers)
    frozen, adapted, names, makers = {layer.name for layer in layers}, [], dict[str, str](), dict[str, Any]()
    for layer in layers:
        matrices = [
            each for each in _matrices(layer) if any(_is_target(t, _path_of(layer, each)) for t in adapters.targets)
        ]
        for each in matrices:
            if adapters.rank > min(each.rows, each.columns):
                raise ValueError(
                    f"adapters.rank is {adapters.rank}, and {_path_of(layer, each)} has {each.rows} rows and "
                    f"{each.columns} columns: give a rank of at most {min(each.rows, each.columns)}"
                )
        paths = tuple(each.path for each in matrices)
        build = _builder(layer.build, adapters, paths) if paths else layer.build
        adapted.append(_Adapted(layer._replace(name="", build=build), paths))
        if paths:
            names[ADAPTERS + layer.own] = ADAPTERS + layer.name
            makers[ADAPTERS + layer.own] = partial(_init_factors, tuple(matrices), adapters.rank)
    if not names:
        return replace(chunk, frozen=chunk.frozen | frozen)
    assert chunk.init.each is not None
    numbers = {own: np.uint32(name_number(name)) for own, name in names.items()}
    every, known = {**chunk.init.each, **makers}, {**chunk.init.names, **names}
    is_random = adapters.dropout > 0

    def computing(apply: Any) -> ApplyLayers:
        run = apply.function.keywords["run"]
        drawn = {"layers": numbers, "pass": np.uint32(number)} if is_random else ()
        return ApplyLayers(partial(_apply, layers=tuple(adapted), run=run), known, drawn)

    return replace(
        chunk,
        init=InitLayers(partial(_init, tuple(every.items())), known, {**chunk.init.numbers, **numbers}, each=every),
        apply=computing(chunk.apply),
        apply_evaluating=None if chunk.apply_evaluating is None else computing(chunk.apply_evaluating),
        frozen=chunk.frozen | frozen,
        shared=chunk.shared | {name for name in names.values() if name.removeprefix(ADAPTERS) in chunk.shared},
        uses_key=is_random,
        partition=partial(_partition, base=chunk.partition),
    )


@cache  # so that layers of a kind have one builder, by which their modules are known
def _builder(build: Callable[..., Any], adapters: AdaptersConfig, paths: tuple[_Path, ...]) -> Callable[..., Any]:
    """Returns the function that makes a layer with adapters."""
    return partial(_build, build=build, adapters=adapters, paths=paths)


def _build(
    config: Any, rngs: nnx.Rngs, *, build: Callable[..., Any], adapters: AdaptersConfig, paths: tuple[_Path, ...]
) -> nnx.Module:
    module: nnx.Module = build(config, rngs)
    for path in paths:
        _part(module, path).adapt(adapters)
    return module


def _part(module: Any, path: _Path) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def _init(makers: tuple[tuple[str, Callable[..., Any]], ...], key: jax.Array, *, numbers: dict[str, Any]) -> Params:
    return {own: make(key, numbers[own]) for own, make in makers}


def _init_factors(matrices: tuple[_Matrix, ...], rank: int, key: jax.Array, number: Any) -> dict[str, Any]:
    """Returns the adapters of a layer as PEFT begins them: ``lora_a`` evenly within one over the root of its rows."""
    tree: dict[str, Any] = {}
    for path, rows, columns in matrices:
        bound = 1 / math.sqrt(rows)
        own = jax.random.fold_in(jax.random.fold_in(key, number), _path_number(path))
        *outer, last = path
        at = tree
        for name in outer:
            at = at.setdefault(name, {})
        at[last] = {
            _A: jax.random.uniform(own, (rows, rank), jnp.float32, -bound, bound),
            _B: jnp.zeros((rank, columns), jnp.float32),
        }
    return tree


def _path_number(path: _Path) -> int:
    return zlib.crc32(".".join(path).encode())


def _apply(
    params: Params,
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    layers: tuple[_Adapted, ...],
    run: Callable[..., Any],
    key: jax.Array | None = None,
    numbers: Any = (),
) -> Any:
    modules = {}
    for layer, paths in layers:
        own = ADAPTERS + layer.own
        module = layer_module(layer, _joined(params[layer.own], params[own]) if paths else params[layer.own])
        if key is not None and paths and numbers:
            of_layer = jax.random.fold_in(jax.random.fold_in(key, numbers["layers"][own]), numbers["pass"])
            for path in paths:
                _part(module, path).mask_key = jax.random.fold_in(of_layer, _path_number(path))
        modules[layer.own] = module
    return run(modules, inputs, leaves)


def _joined(layer: Mapping[str, Any], factors: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _joined(layer[name], each) if isinstance(each, Mapping) else each for name, each in factors.items()}
    return {**layer, **both}


def _partition(params: Params, axes: Mapping[str, int], *, base: Partition | None) -> Any:
    """Returns the base's partition, and that of each adapter: ``lora_a`` is cut as the rows of its matrix, ``lora_b``
    as the columns, so that no device needs more than its own part of the product."""
    own = {name: layer for name, layer in params.items() if not name.startswith(ADAPTERS)}
    specs = jax.tree.map(lambda _: PartitionSpec(), own) if base is None else base(own, axes)
    return {
        name: _factor_specs(layer, specs[name.removeprefix(ADAPTERS)]) if name not in own else specs[name]
        for name, layer in params.items()
    }


def _factor_specs(factors: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    if _A in factors:
        rows, columns = (*specs["kernel"], None, None)[:2]
        return {_A: PartitionSpec(rows, None), _B: PartitionSpec(None, columns)}
    return {name: _factor_specs(each, specs[name]) for name, each in factors.items()}
