"""Chunks made of Flax modules: of the library's own layers, of any NNX model, and of any Linen module.

Layers
    A layer's name is global: it says nothing of the chunk or stage that holds the layer. Parameters, checkpoints and
    initial values go by it, so neither initial values nor results depend on the cut. In its chunk a layer has a name of
    its own besides, so that chunks of as many layers of the same shapes are of one kind
    (:mod:`rrfp_jax.programs.chunk`). A module is split once into a static graph definition and a plain nested
    dictionary of arrays.
The library's layers
    Each is an NNX module with a builder of its own, from whose key and the layer's name its values derive
    (:func:`chunk_of`).
NNX models
    A model is traced once for shapes (:class:`_Model`). Every parameter belongs to the first layer that has it: the
    ends before the blocks, then these, then the ends behind. Any other layer that has the same ``nnx.Param``, as a tied
    head has, reads it there, so its chunk holds a copy of that layer, ``shared``. A chunk calls *pieces*: a block, or
    the model without the layers that an end does not hold.
Random streams
    In each microbatch the stream at ``blocks.3.dropout.rngs`` begins with ``fold_in(key, crc32(path))`` and count 0,
    where ``key`` is the microbatch's. Thus its numbers depend neither on the cut nor on the order of tasks.
State
    Variables that are neither parameters nor random streams are refused, since no chunk hands them on to the next
    microbatch. NumPy arrays among a model's attributes are constants, and come in as data.
"""

import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import PartitionSpec

from rrfp_jax.field_rules import typed, with_type
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR
from rrfp_jax.models.cuts import CutWords, plan_cut
from rrfp_jax.programs.chunk import ApplyLayers, Chunk, InitLayers, Params, Partition, name_number
from rrfp_jax.programs.jaxprs import open_jaxpr
from rrfp_jax.programs.remat import one_layer
from rrfp_jax.programs.sameness import identity
from rrfp_jax.programs.splitting.ir import Apply

# -- the library's layers ----------------------------------------------------------------------------------------------

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
        apply=ApplyLayers(partial(apply_modules, builders=builders, run=run), names),
        apply_evaluating=None
        if run_evaluating is None
        else ApplyLayers(partial(apply_modules, builders=builders, run=run_evaluating), names),
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


def apply_modules(
    params: Params,
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    builders: _Builders,
    run: Callable[..., Any],
    key: jax.Array | None = None,
    numbers: Any = (),
) -> Any:
    """Computes a chunk of :func:`chunk_of`."""
    del key, numbers  # no layer is random
    modules = {name: nnx.merge(_definition(config, build), params[name]) for name, build, config in builders}
    return run(modules, inputs, leaves)


# -- any NNX model -----------------------------------------------------------------------------------------------------

_Path = tuple[Any, ...]
"""Attributes and numbers in lists that lead to a variable."""
_Factory = Callable[..., Any]
"""Makes an ``nnx.Module``, called with ``rngs=nnx.Rngs(key)``: a class whose only argument is ``rngs`` will do."""


@typed
def split_nnx(
    model: nnx.Module | _Factory,
    *,
    layers: str,
    first: Callable[..., Any],
    first_holds: Sequence[str],
    last: Callable[..., Any],
    last_holds: Sequence[str],
    layer: Callable[..., Any] | None = None,
    num_chunks: int | None = None,
    layers_per_chunk: Sequence[int] | None = None,
) -> list[Chunk]:
    """Cuts an NNX model, a list of blocks between two ends, into chunks, in order.

    ``model`` is a factory, called as ``model(rngs=nnx.Rngs(key))`` where parameters are made, with the key of
    ``Pipeline.init``: in any cut they are those that the factory, under ``jit``, makes of that key. Or it is a module,
    whose own arrays are taken. ``layers`` is the path of the list, such as ``blocks`` or ``decoder.blocks``.

    ``first(model, ...)`` makes the input of the first block, ``layer(block, x, ...)`` that of the next one (None: the
    block's ``__call__``), and ``last(model, x, ...)`` the loss, ``(loss_sum, weight)``, two float32 scalars, and maybe
    a dictionary of named sums. Their further parameters without a default are the leaves of the batch that they read,
    and get one microbatch's. Both ends may be methods of the model, which has there only those layers beside the list
    that ``first_holds`` or ``last_holds`` names. A layer that both name, and an ``nnx.Param`` that both reach, is tied:
    each chunk has a copy, and the gradients of all copies are added.

    ``num_chunks`` cuts evenly; ``layers_per_chunk`` gives the number of blocks of each chunk, 0 where it holds an end
    alone. Metadata of ``nnx.with_partitioning`` cut a parameter over the axes of a stage's mesh. In evaluations modules
    are as ``model.eval()`` makes them. Nothing is allocated before a chunk's ``init``.

    Raises ValueError, with the remedy, for a model that cannot be cut so, or whose variables change in training.
    """
    traced = _Model(model, "split_nnx")
    blocks, others = traced.around(layers)
    holds = {"first": tuple(first_holds), "last": tuple(last_holds)}
    for end, names in holds.items():
        if unknown := [name for name in names if name not in others]:
            raise ValueError(
                f"{end}_holds has {unknown[0]!r}, which is no layer beside {layers!r}: name one of "
                f"{', '.join(others) or 'none'}"
            )
        if not names:
            raise ValueError(f"{end}_holds is empty: name the layers of this end, of {', '.join(others) or 'none'}")
    if unheld := [name for name in others if name not in (*holds["first"], *holds["last"])]:
        raise ValueError(f"neither end holds the layer {unheld[0]!r}: name it in first_holds or last_holds")
    by_name = {f"{layers}.{number}": block for number, block in enumerate(blocks)}
    for name in (*holds["first"], *by_name, *holds["last"]):
        traced.own(name, by_name[name] if name in by_name else others[name].value)

    def end_of(end: str, run: Callable[..., Any], num_given: int) -> _Call:
        absent = [attribute for name, attribute in others.items() if name not in holds[end]]
        run_end = partial(_run_end, run, end, tuple(attribute.name for attribute in absent))
        with _without([*absent, traced.attribute(layers)]):
            return traced.call(traced.module, "", run_end, _leaf_names(run, num_given), has_input=num_given == 2)

    begin, finish = end_of("first", first, 1), end_of("last", last, 2)
    middle = []
    for name, block in by_name.items():
        run = type(block).__call__ if layer is None else layer
        middle.append(traced.call(block, name, run, _leaf_names(run, 2), is_layer=True))
    words = CutWords(first=", ".join(holds["first"]), last=", ".join(holds["last"]), has_halves=False)
    plans = plan_cut(len(blocks), num_chunks=num_chunks, layers_per_chunk=layers_per_chunk, words=words)
    calls = [
        [*([begin] if plan.embedding else []), *(middle[n] for n in plan.layers), *([finish] if plan.head else [])]
        for plan in plans
    ]
    num_holders = Counter(name for own in calls for name in {name for call in own for name in call.layers})
    shared = {name for name, number in num_holders.items() if number > 1}
    return [traced.chunk(plan.title, own, shared) for plan, own in zip(plans, calls, strict=True)]


@typed
def chunk_from_nnx(
    module: nnx.Module | _Factory,
    run: Callable[..., Any] | None = None,
    *,
    name: str,
    leaves: Sequence[str] = (),
    prefix: str = "",
    shared: Collection[str] = (),
) -> Chunk:
    """Returns a chunk that computes an NNX module, which is given as it is or by a factory, as for :func:`split_nnx`.

    The chunk computes ``run(module, inputs, **leaves)``; None: ``module(inputs, **leaves)``, or ``module(**leaves)``
    where it has no inputs. Its outputs are those of :attr:`Chunk.apply`; ``leaves`` names the leaves of the batch that
    it reads. Its layers are the attributes of the module that have parameters, and of lists the elements, by their
    paths behind ``prefix``, such as ``vision.blocks.3``. A layer that a factory makes begins from the key with its name
    folded in. ``shared`` names layers of which other chunks hold a copy.

    Raises ValueError, with the remedy, for another module, and for one whose variables change in training.
    """
    traced = _Model(module, "chunk_from_nnx")
    for path, value in traced.layers():
        traced.own(prefix + path, value)
    call = traced.call(traced.module, prefix.rstrip("."), run or _call_module, tuple(leaves))
    return traced.chunk(name, [call], frozenset(shared), is_keyed_by_layer=True)


class _Attribute(NamedTuple):
    """An attribute of a module."""

    holder: Any
    name: str

    @property
    def value(self) -> Any:
        return getattr(self.holder, self.name)


class _Piece(NamedTuple):
    """A module that a chunk calls, without its arrays."""

    graphdef: Any
    """Its static part."""
    params: tuple[tuple[_Path, int, tuple[str, ...]], ...]
    """For each parameter its path in the module, the number of its layer among those of the call, its path in that."""
    streams: tuple[tuple[_Path, tuple[int, ...]], ...]
    """Path and shape of each key of a random stream."""
    counts: tuple[tuple[_Path, tuple[int, ...]], ...]
    """Path and shape of each count of a random stream."""
    constants: tuple[_Path, ...]
    """Paths of NumPy arrays."""


class _Call(NamedTuple):
    """A call of a piece."""

    piece: _Piece
    run: Callable[..., Any]
    layers: tuple[str, ...]
    """The layers that it reads, by their names in the model; in ``apply`` by the chunk's own."""
    leaves: tuple[str, ...]
    has_input: bool
    is_layer: bool
    """Whether it is rematerialised by itself."""
    numbers: Any
    """Numbers of its streams, and constants; in ``apply`` they come as data."""


class _Trace:
    """The trace of a model's constructor, of which each chunk runs as much as its own parameters need."""

    def __init__(self, model: Any, jaxpr: Any, paths: tuple[_Path, ...], who: str) -> None:
        self._model, self._jaxpr, self._paths, self._who = model, jaxpr, paths, who

    def values(self, paths: Sequence[_Path], key: jax.Array) -> dict[_Path, Any]:
        """Returns the initial values of variables from a typed key."""
        parts = open_jaxpr(self._jaxpr)
        if key.dtype != parts.invars[0].aval.dtype:  # a generator of random numbers other than JAX's default
            made = _flat(_made(self._model, key, self._who))
            return {path: made[path].get_value() for path in paths}
        outputs = dict(zip(self._paths, parts.outvars, strict=True))
        needed = {outputs[path] for path in paths if not isinstance(outputs[path], jex.Literal)}
        equations = []
        # tracing a constructor takes seconds where there are many layers, so it is done once for all chunks
        for equation in reversed(parts.equations):
            if not needed.isdisjoint(equation.outvars):
                needed.update(atom for atom in equation.invars if not isinstance(atom, jex.Literal))
                equations.append(equation)
        known: dict[Any, Any] = {parts.invars[0]: key, **dict(zip(parts.constvars, parts.consts, strict=True))}

        def read(atom: Any) -> Any:
            return jnp.asarray(atom.val) if isinstance(atom, jex.Literal) else known[atom]

        for each in reversed(equations):
            apply = Apply(primitive=each.primitive, params=each.params, context=each.ctx, effectful=False)
            known.update(zip(each.outvars, apply.run(*map(read, each.invars)), strict=True))
        return {path: read(outputs[path]) for path in paths}


class _Model:
    """A model whose arrays are shapes, and which layer each of its parameters belongs to."""

    def __init__(self, model: Any, who: str) -> None:
        self._given = model
        definition: Any = None
        arrays: dict[_Path, Any] = {}
        paths: list[_Path] = []

        def trace(key: jax.Array) -> list[Any]:
            nonlocal definition, arrays, paths
            module = _made(model, key, who)
            definition, state = nnx.split(module)
            found = dict(nnx.to_flat_state(state))
            _check_variables(module, found)
            arrays = {path: each for path, each in found.items() if not isinstance(each, nnx.Variable)}
            paths = [path for path in found if path not in arrays]
            return [found[path].get_value() for path in paths]

        traced = jax.jit(trace).trace(jax.eval_shape(jax.random.key, 0))
        shapes = {path: jax.ShapeDtypeStruct(each.shape, each.dtype) for path, each in arrays.items()}
        self.module = nnx.merge(definition, _nested(dict(zip(paths, traced.out_info, strict=True)) | shapes))
        found = dict(nnx.to_flat_state(nnx.split(self.module)[1]))
        self._path_of = {id(each): path for path, each in found.items()}
        self._constants = {id(found[path]): np.asarray(each) for path, each in arrays.items()}
        self._trace = _Trace(model, traced.jaxpr, tuple(paths), who)
        self._owners: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._layers: dict[str, dict[tuple[str, ...], Any]] = {}
        self._definitions: dict[Hashable, Any] = {}

    def attribute(self, path: str) -> _Attribute:
        """Returns the attribute at this path; raises ValueError where there is none."""
        value: Any = self.module
        for name in path.split("."):
            holder = value
            if name not in _attributes(holder):
                raise ValueError(
                    f"the model has no layers {path!r}, as {type(holder).__name__} has no {name!r}: name the path of "
                    f"its list of blocks, by attributes such as {', '.join(_attributes(holder)) or 'none'}"
                )
            value = getattr(holder, name)
        return _Attribute(holder, name)

    def around(self, path: str) -> tuple[list[Any], dict[str, _Attribute]]:
        """Returns the blocks of the list at this path, and by their names the other layers with parameters.

        Raises ValueError where there is no list of blocks.
        """
        value = self.attribute(path).value
        if not isinstance(value, nnx.List | list | tuple):
            raise ValueError(f"{path!r} is of type {type(value).__name__}: name a list of blocks, such as an nnx.List")
        blocks = list(value)
        for number, block in enumerate(blocks):
            if not isinstance(block, nnx.Module):
                raise ValueError(f"{path}.{number} is {type(block).__name__}: let the list hold nnx.Modules alone")
        if not blocks:
            raise ValueError(f"the list {path!r} has no blocks: name a list with at least one")
        others, holder, before = dict[str, _Attribute](), self.module, ""
        for part in path.split("."):
            for name in _attributes(holder):
                if name != part and any(isinstance(each, nnx.Param) for each in _flat(getattr(holder, name)).values()):
                    others[before + name] = _Attribute(holder, name)
            holder, before = getattr(holder, part), f"{before}{part}."
        return blocks, others

    def layers(self) -> Iterator[tuple[str, Any]]:
        """Yields the attributes of the model by their names, and of lists the elements."""
        for name in _attributes(self.module):
            value = getattr(self.module, name)
            if isinstance(value, nnx.List | list | tuple):
                yield from ((f"{name}.{number}", each) for number, each in enumerate(value))
            else:
                yield name, value

    def own(self, name: str, value: Any) -> None:
        """Gives a layer the parameters of a module, or one parameter, as far as no layer has them yet."""
        for path, each in _flat(value).items():
            if isinstance(each, nnx.Param) and id(each) not in self._owners:
                inner = tuple(map(str, path))
                self._owners[id(each)] = name, inner
                self._layers.setdefault(name, {})[inner] = each

    def call(
        self,
        module: Any,
        name: str,
        run: Callable[..., Any],
        leaves: tuple[str, ...],
        *,
        has_input: bool = True,
        is_layer: bool = False,
    ) -> _Call:
        """Returns the call of a module, which has this path in the model."""
        definition, state = nnx.split(module)
        flat = dict(nnx.to_flat_state(state))
        of_type = {kind: {p: v for p, v in flat.items() if isinstance(v, kind)} for kind in _KINDS}
        owners = {path: self._owners[id(each)] for path, each in of_type[nnx.Param].items()}
        layers = tuple(dict.fromkeys(layer for layer, _ in owners.values()))
        constants = {path: self._constants[id(each)] for path, each in flat.items() if id(each) in self._constants}
        piece = _Piece(
            # blocks that differ in nothing but their arrays have one definition, so that chunks of them are of a kind
            graphdef=self._definitions.setdefault(_kind(definition), definition),
            params=tuple((path, layers.index(layer), inner) for path, (layer, inner) in owners.items()),
            streams=tuple((path, each.get_value().shape) for path, each in of_type[nnx.RngKey].items()),
            counts=tuple((path, each.get_value().shape) for path, each in of_type[nnx.RngCount].items()),
            constants=tuple(constants),
        )
        streams = [".".join(map(str, (*([name] if name else []), *path[:-1]))) for path, _ in piece.streams]
        numbers = np.array([zlib.crc32(stream.encode()) for stream in streams], np.uint32), tuple(constants.values())
        return _Call(piece, run, layers, leaves, has_input, is_layer, numbers)

    def chunk(
        self, title: str, calls: Sequence[_Call], shared: Collection[str], *, is_keyed_by_layer: bool = False
    ) -> Chunk:
        """Returns the chunk that makes these calls in turn."""
        held = list(dict.fromkeys(name for call in calls for name in call.layers))
        names = {str(number): name for number, name in enumerate(held)}
        own = {name: number for number, name in names.items()}
        in_apply = tuple(call._replace(layers=tuple(own[name] for name in call.layers), numbers=None) for call in calls)
        specs = {name: _nested({p: _spec(v) for p, v in self._layers[name].items()}) for name in held}
        return Chunk(
            name=title,
            init=self._init(names, is_keyed_by_layer=is_keyed_by_layer),
            apply=ApplyLayers(partial(_apply_calls, calls=in_apply), names, [call.numbers for call in calls]),
            leaves=tuple(dict.fromkeys(leaf for call in calls for leaf in call.leaves)),
            shared=frozenset(shared if is_keyed_by_layer else own.keys() & shared),
            uses_key=any(call.piece.streams for call in calls),
            partition=_partition_of(specs),
        )

    def _init(self, names: dict[str, str], *, is_keyed_by_layer: bool) -> Any:
        if isinstance(self._given, nnx.Module):
            # copies on the host are passed as data, so that no program has them as constants
            given = _flat(self._given)
            values = {
                own: _nested(
                    {p: np.asarray(given[self._path_of[id(v)]].get_value()) for p, v in self._layers[name].items()}
                )
                for own, name in names.items()
            }
            return InitLayers(_init_given, names, values, each=dict.fromkeys(names, _init_given_layer))
        places = {
            name if is_keyed_by_layer else own: tuple((p, self._path_of[id(v)]) for p, v in self._layers[name].items())
            for own, name in names.items()
        }
        init = partial(_init_made, self._trace, tuple(places.items()))
        return init if is_keyed_by_layer else InitLayers(init, names)


_ARRAYS = (nnx.Variable, jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_KINDS: tuple[Any, ...] = (nnx.Param, nnx.RngKey, nnx.RngCount)
"""The variables that a chunk may have."""


def _made(model: Any, key: jax.Array, who: str) -> nnx.Module:
    """Returns the module that is given, or made; raises ValueError for anything else."""
    module = model
    is_linen = issubclass(model if isinstance(model, type) else type(model), linen.Module)
    if callable(model) and not isinstance(model, nnx.Module) and not is_linen:
        try:
            inspect.signature(model).bind(rngs=None)
        except TypeError as error:
            raise ValueError(
                f"{who} calls the function that makes the module with rngs alone ({error}): give such a function, as "
                "lambda rngs: Model(config, rngs=rngs)"
            ) from None
        with nnx.use_eager_sharding(False):  # there is no mesh yet, and a pipeline lays parameters out itself
            module = model(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        remedy = "give it to chunk_from_linen" if is_linen else "give one of the two"
        raise ValueError(
            f"{who} takes an nnx.Module, or a function that makes one, and got {with_type(module)}: {remedy}"
        )
    return module


def _check_variables(module: nnx.Module, found: Mapping[_Path, Any]) -> None:
    """Raises ValueError, naming it, for an array that is neither a parameter nor of a random stream nor NumPy's."""
    for path, each in nnx.iter_graph(module):
        if isinstance(each, jax.core.Tracer):
            raise ValueError(
                f"{_words(path)} is an array that JAX made and no nnx.Param: make this constant with NumPy, or compute "
                "it in __call__"
            )
    for path, each in found.items():
        if isinstance(each, nnx.Variable) and not isinstance(each, _KINDS):
            raise ValueError(
                f"{_words(path)} is an nnx.{type(each).__name__}, state that training would change, and chunks hold "
                "nothing but parameters: put LayerNorm or GroupNorm in place of BatchNorm, leave caches out, and make "
                "a constant with NumPy"
            )
        if isinstance(each, nnx.Variable) and isinstance(each.get_value(), jax.ShapeDtypeStruct):
            raise ValueError(f"{_words(path)} is a shape alone: give the function that makes the module, or its arrays")


def _call_module(module: Any, inputs: Any, /, **leaves: Any) -> Any:
    return module(**leaves) if inputs is None else module(inputs, **leaves)


def _run_end(
    run: Callable[..., Any], end: str, absent: Collection[str], model: Any, /, *inputs: Any, **leaves: Any
) -> Any:
    try:
        return run(model, *inputs, **leaves)
    except AttributeError as error:
        if error.name not in absent:
            raise
        raise ValueError(f"{end} reads the layer {error.name!r}: name it in {end}_holds") from error


@contextmanager
def _explicit_axes_refused() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "PartitionSpec" not in str(error):
            raise
        raise ValueError(
            "the module asks for a PartitionSpec of its values, and the axes of a stage's mesh are Auto, not Explicit: "
            f"leave it out, since the compiler follows the cut of the parameters ({error})"
        ) from error


@contextmanager
def _without(attributes: Iterable[_Attribute]) -> Iterator[None]:
    """Takes attributes away from their modules, and puts them back at the end."""
    taken = [(attribute, attribute.value) for attribute in attributes]
    try:
        for attribute, _ in taken:
            delattr(attribute.holder, attribute.name)
        yield
    finally:
        for attribute, value in taken:
            setattr(attribute.holder, attribute.name, value)


def _init_given(key: jax.Array, *, numbers: Any) -> Params:
    del key
    return dict(numbers)


def _init_given_layer(key: jax.Array, number: Any) -> Any:
    del key
    return number


def _init_made(
    trace: "_Trace",
    places: tuple[tuple[str, tuple[tuple[_Path, _Path], ...]], ...],
    key: jax.Array,
    *,
    numbers: Any = (),
) -> Params:
    del numbers
    made = trace.values([path for _, layer in places for _, path in layer], key)
    return {name: _nested({inner: made[path] for inner, path in layer}) for name, layer in places}


def _apply_calls(
    params: Params, inputs: Any, leaves: dict[str, Any], *, calls: tuple[_Call, ...], key: Any = None, numbers: Any
) -> Any:
    for call, (streams, constants) in zip(calls, numbers, strict=True):
        values = [_at(params[call.layers[number]], inner) for _, number, inner in call.piece.params]
        keys = None if key is None else [jax.random.fold_in(key, number) for number in streams]
        run = partial(_run_call, call)
        own = {name: leaves[name] for name in call.leaves}
        inputs = (one_layer(run) if call.is_layer else run)((values, keys, constants), inputs, own)
    return inputs


def _run_call(call: _Call, held: tuple[Any, Any, Any], inputs: Any, leaves: Any) -> Any:
    # the module is made inside of the layer that is rematerialised, because it counts its random numbers there
    piece, (values, keys, constants) = call.piece, held
    arrays = {path: value for (path, _, _), value in zip(piece.params, values, strict=True)}
    for number, (path, shape) in enumerate(piece.streams):
        stream = jax.random.key(0) if keys is None else keys[number]
        arrays[path] = jax.random.split(stream, shape) if shape else stream
    arrays |= {path: jnp.zeros(shape, jnp.uint32) for path, shape in piece.counts}
    arrays |= zip(piece.constants, constants, strict=True)
    module = nnx.merge(piece.graphdef, _nested(arrays))
    if keys is None:
        module.eval()
    with _explicit_axes_refused():
        outputs = call.run(module, *([inputs] if call.has_input else []), **leaves)
    if added := [path for path in _flat(module) if path not in arrays]:
        raise ValueError(
            f"the call makes the variable {_words(added[0])} of {type(module).__name__}, which nobody could read: "
            "return its value instead, or leave it out"
        )
    return outputs


def _flat(value: Any) -> dict[_Path, Any]:
    """Returns the variables and arrays of an attribute of a module by their paths, each once."""
    if isinstance(value, _ARRAYS):
        return {(): value}
    state: Any = nnx.split(value)[1]
    if not isinstance(state, nnx.State):  # a number, text, a function
        return {}
    return {path: each for path, each in nnx.to_flat_state(state) if isinstance(each, _ARRAYS)}


def _attributes(module: Any) -> list[str]:
    own = vars(module) if isinstance(module, nnx.Module) else {}
    return [name for name in own if not name.startswith("_pytree__")]


def _nested(arrays: Mapping[_Path, Any]) -> Any:
    """Returns the nested dictionary in which arrays have these paths; at the empty path the array itself."""
    root: dict[Any, Any] = {}
    for path, value in arrays.items():
        if not path:
            return value
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return root


def _at(tree: Any, path: _Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _words(path: _Path) -> str:
    return ".".join(map(str, path))


def _leaf_names(run: Callable[..., Any], num_given: int) -> tuple[str, ...]:
    """Returns the parameters of a function without a default, behind those that it is given in order."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(run).parameters.values())[num_given:]
    return tuple(each.name for each in parameters if each.kind in named and each.default is each.empty)


def _kind(value: Any) -> Hashable:
    """Returns a key that is equal for graph definitions of modules that compute the same."""
    if isinstance(value, Mapping):
        return tuple((key, _kind(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("flax.nnx"):
        return type(value), tuple(_kind(getattr(value, field.name)) for field in fields(value))
    return value if isinstance(value, jax.tree_util.PyTreeDef) else identity(value)


def _spec(param: Any) -> PartitionSpec:
    """Returns the cut that the metadata of a parameter ask for."""
    return PartitionSpec(*nnx.get_partition_spec(param).get_value())


def _partition_of(specs: dict[str, Any]) -> Partition | None:
    """Returns the ``partition`` of a chunk, given the cuts of its parameters; None where none is cut."""
    return partial(_partition, specs) if any(map(tuple, jax.tree.leaves(specs))) else None


def _partition(specs: dict[str, Any], params: Any, axes: Mapping[str, int]) -> Any:
    def there(entry: Any) -> Any:
        named = entry if isinstance(entry, tuple) else (entry,)
        # axes that the library knows may be of one device here; others are refused where they do not exist
        kept = tuple(axis for axis in named if axis in axes or axis not in (TENSOR, FSDP, EXPERT, CONTEXT, None))
        return kept if len(kept) > 1 else kept[0] if kept else None

    cut = {name: specs[name] for name in params}
    return jax.tree.map(lambda spec: PartitionSpec(*map(there, spec)), cut)


# -- any Linen module --------------------------------------------------------------------------------------------------


@typed
def chunk_from_linen(
    module: Any,
    run: Callable[..., Any] | None = None,
    *,
    name: str,
    inputs: Any = None,
    leaves: Mapping[str, Any] | None = None,
    prefix: str = "",
    shared: Collection[str] = (),
) -> Chunk:
    """Returns a chunk that computes ``module``, a ``flax.linen.Module``.

    The chunk computes ``run(module, inputs, **leaves)``; None: ``module(inputs, **leaves)``, or ``module(**leaves)``
    where it has no inputs. Its outputs are those of :attr:`Chunk.apply`. ``inputs``, the output of the chunk before,
    and ``leaves``, those of the batch that it reads by name, are ``jax.ShapeDtypeStruct`` of one microbatch, or arrays.

    Its layers are the entries of the module's ``params``, with ``prefix`` before their names; ``shared`` names those of
    which other chunks hold a copy. Without a prefix, parameters are those that ``init`` of a module with all layers
    makes of the key of ``Pipeline.init``, and the random numbers of a microbatch those of its ``apply`` with
    ``rngs={"dropout": key}``, since Linen derives both from paths. In evaluations there is no key: let Dropout be
    deterministic where ``not module.has_rng("dropout")``. Metadata of ``nn.with_partitioning`` cut a parameter over the
    axes of a stage's mesh. Nothing is allocated before the chunk's ``init``.

    Raises ValueError, with the remedy, for another module, for one that does not take these inputs, and for collections
    beside ``params``, which training would change.
    """
    if not isinstance(module, linen.Module):
        remedy = "give it to chunk_from_nnx" if isinstance(module, nnx.Module) else "give an instance of one"
        raise ValueError(f"chunk_from_linen takes a flax.linen.Module, and got {with_type(module)}: {remedy}")
    for each in jax.tree.leaves((inputs, leaves)):
        if not (hasattr(each, "shape") and hasattr(each, "dtype")):
            raise ValueError(f"inputs or leaves have {with_type(each)}: give jax.ShapeDtypeStruct, or arrays")
    specs = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), (inputs, dict(leaves or {})))
    run_linen = _with_leaves(run or _call_module)
    try:
        variables = jax.eval_shape(
            lambda key, *given: module.init({"params": key}, *given, method=run_linen),
            jax.eval_shape(jax.random.key, 0),
            *specs,
        )
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"chunk {name!r} cannot be initialised: {error}; give `run` and the inputs and leaves that it takes"
        ) from error
    params = dict(variables.pop("params", {}))
    if state := jax.tree.leaves_with_path(variables):
        collection, *_ = path = jax.tree_util.keystr(state[0][0], simple=True, separator=".").split(".")
        raise ValueError(
            f"chunk {name!r} has {'.'.join(path[1:])} in its collection {collection!r}, state that training would "
            "change, and chunks hold nothing but parameters: put LayerNorm or GroupNorm in place of BatchNorm, leave "
            "caches out, and return values in place of sow"
        )
    names = {own: prefix + own for own in params}
    cut = linen.get_partition_spec(params)
    return Chunk(
        name=name,
        init=InitLayers(partial(_init_linen, module=module, run=run_linen, specs=specs, prefix=prefix), names),
        apply=ApplyLayers(partial(_apply_linen, module=module, run=run_linen, prefix=prefix), names),
        leaves=tuple(specs[1]),
        shared=frozenset(shared),
        uses_key=True,
        partition=_partition_of({prefix + own: cut[own] for own in params}),
    )


def _with_leaves(run: Callable[..., Any]) -> Callable[..., Any]:
    # as keywords of Linen's own methods, leaves could have the names of its arguments
    return lambda module, inputs, leaves: run(module, inputs, **leaves)


def _init_linen(key: jax.Array, *, module: Any, run: Any, specs: Any, prefix: str, numbers: Any) -> Params:
    del numbers
    rngs = {"params": _with_prefix(key, prefix)}
    made = module.lazy_init(rngs, *specs, method=run, mutable=["params"])
    return dict(linen.unbox(made.get("params", {})))


def _apply_linen(
    params: Params, inputs: Any, leaves: Any, *, module: Any, run: Any, prefix: str, key: Any = None, numbers: Any = ()
) -> Any:
    del numbers
    rngs = {} if key is None else {"dropout": _with_prefix(key, prefix)}
    with _explicit_axes_refused():
        return module.apply({"params": params}, inputs, leaves, method=run, rngs=rngs)


def _with_prefix(key: jax.Array, prefix: str) -> jax.Array:
    # Linen derives numbers from paths in the module, which modules of two prefixes may have in common
    return jax.random.fold_in(key, name_number(prefix)) if prefix else key
