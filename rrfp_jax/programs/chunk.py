"""The chunk of a model: the one interface on which models and programs agree.

A chunk is a pair of pure functions, ``init`` and ``apply``, and a few words on the data that they read. Model code
knows nothing of pipelines; programs know nothing of models.

Conventions
-----------
params
    A dictionary from layer name to an arbitrary pytree of arrays, all of which are parameters: floating, and reached by
    a gradient unless their layer is frozen. There is no other state, such as running statistics or counters; a pipeline
    refuses any that it finds. Layer names are unique over the whole model, except those in ``shared``, which name
    copies of one and the same parameter (tied embeddings): they start from the copy of the lowest chunk, their
    gradients are summed over the copies, and norms count them once.
parts of a layer
    A chunk that holds a part of a layer names it ``LAYER:PART``, ``layers.3:mlp`` say. Its tree is a dictionary, and
    has of the whole layer's tree the arrays of the part, at their paths there. So names stay unique. Whoever knows the
    model by layers sees ``layers.3``: optimizers, patterns of frozen layers, checkpoints, users who ask for parameters.
    A part starts from the key of its layer, so that ``init`` may make the whole layer and return the part.
    Shards are parts too: of every array of the layer they have some rows or columns (:class:`LayerShard`).
inputs
    None for a chunk without predecessor, the predecessor's output where there is exactly one, else a tuple of the
    outputs in ascending order of predecessor chunk. For a microbatch that skips a predecessor, its place holds zeros;
    or None, where the edge is optional (:class:`rrfp_jax.schedules.Edge`).
leaves
    A dictionary from batch leaf name to the array of one microbatch: they are read where they are needed and never
    travel from chunk to chunk. A microbatch without some leaf skips the chunks that read it, and the chunks that only
    these feed; but a chunk runs without a leaf that it calls optional, which is then missing in the dictionary.
mesh
    ``apply`` is traced with the abstract mesh of the unit that will run it, if that has several devices, so that it may
    call ``jax.shard_map`` over axes that ``jax.sharding.get_abstract_mesh()`` has. Shapes are derived without any.
key
    A typed random key that depends on (seed, step, microbatch) only. A chunk folds in its global layer numbers itself,
    so that the randomness of a layer does not depend on where the model is cut.
kinds
    Chunks that compute the same function of parameters of the same shapes are of one kind, and share their programs.
    Functions that know the global names of their layers, ``layers.3`` say, differ from chunk to chunk though they
    compute the same; so a chunk may give functions that know names of their own, beside the layers that they stand
    for, and numbers that come in as data: :class:`InitLayers`, :class:`ApplyLayers`.
outputs
    Any pytree of arrays. A chunk without successors returns ``(loss_sum, weight)``, two float32 scalars: the loss
    summed (not averaged) over the microbatch, and its weight, for example the number of tokens. It may return a third
    entry, a dictionary of further float32 scalars by name: *named sums* over the microbatch, such as a part of the loss
    that is to be seen on its own. A step reports each over its total weight. Neither they nor the weight have a
    gradient: a weight that depends on parameters divides the loss and is a constant otherwise.
steps by sign
    A parameter that ``sign_rates`` names is not the optimizer's: after each step it goes by a fixed rate against the
    sign of its gradient, which may be any quantity that is summed over a step, such as how many tokens chose an expert.
frozen, and without a gradient
    Layers that are frozen, and all layers of a chunk that no gradient reaches, get no update at all: no weight decay
    either.
"""

import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.field_rules import check_types, is_whole, with_type
from rrfp_jax.programs.sameness import identity

Params = dict[str, Any]
"""Parameters of a chunk: layer name -> pytree of arrays."""
Partition = Callable[[Any, Mapping[str, int]], Any]
"""``partition(params, axes)``: for parameters of these shapes on a unit whose mesh has these axes, with their sizes, a
tree with one ``jax.sharding.PartitionSpec`` per parameter. It may name any of the axes at a dimension that they divide;
what is not named is whole. It changes where parameters lie, never what is computed."""
LeafCheck = Callable[[Mapping[str, Any], str], None]
"""``check(leaves, name)``: raises ValueError where the leaves of a microbatch do not fit together. It gets all leaves
of the microbatch, NumPy arrays, or ``jax.ShapeDtypeStruct`` of what is not here; ``name`` says which it is."""
LeafOrder = Callable[[int], np.ndarray]
"""From how many positions a leaf ``[rows, positions, ...]`` has, to which of them stands at each place. Compared by
``==``."""


class Loss(NamedTuple):
    """The outputs of a chunk without successors: ``Loss(*outputs)``."""

    loss_sum: Any
    weight: Any
    named_sums: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class ForLayers:
    """A function of a chunk, written for layers by names of its own, and which layers of the model they are.

    ``init=InitLayers(init, names, numbers)`` and ``apply=ApplyLayers(apply, names, numbers)`` are the functions of a
    chunk like any other. Chunks whose ``function`` is the same are of one kind, whatever names and numbers they have.
    """

    function: Callable[..., Any]
    """``init(key, *, numbers)``, or ``apply(params, inputs, leaves, *, key, numbers)``; both know own names only."""
    names: dict[str, str]
    """The names of layers in the model by those that ``function`` knows."""
    numbers: Any = ()
    """A pytree of NumPy arrays that tells this chunk from others of its kind: for example the numbers of its layers,
    from which random keys derive. They have the same shapes for all chunks of a kind."""

    def __post_init__(self) -> None:
        check_types(self)

    @cached_property
    def kind(self) -> Hashable:
        """Equal for functions that differ in names and in the values of their numbers alone."""
        numbers = tuple((number.shape, number.dtype) for number in jax.tree.leaves(self.numbers))
        return identity(self.function), tuple(self.names), numbers, jax.tree.structure(self.numbers)


@dataclass(frozen=True, eq=False)
class InitLayers(ForLayers):
    """The ``init`` of a chunk."""

    each: Mapping[str, Callable[[jax.Array, Any], Any]] | None = None
    """For every own name the function that returns this layer alone from the key and ``numbers[name]``. Layers whose
    functions are the same share a program: XLA takes seconds for the random numbers of a layer on a GPU. None:
    ``function`` makes all layers in one program."""

    def __call__(self, key: jax.Array) -> dict[str, Any]:
        layers = self.function(key, numbers=self.numbers)
        return {name: layers[own] for own, name in self.names.items()}


class ApplyLayers(ForLayers):
    """The ``apply`` of a chunk."""

    def __call__(self, params: dict[str, Any], inputs: Any, leaves: Any, *, key: Any = None) -> Any:
        own = {own: params[name] for own, name in self.names.items()}
        return self.function(own, inputs, leaves, key=key, numbers=self.numbers)


_of_one_layer: ContextVar[bool] = ContextVar("of_one_layer", default=False)


@dataclass(frozen=True)
class KeyedByLayer:
    """The ``init`` of a chunk that knows no numbers, with a random key of its own for every layer.

    All chunks get one key. So that layers of equal shapes do not start from equal values, ``function`` is called once
    for every layer, with the layer's name folded into the key, and only that layer of its result is taken. It is the
    layer's name, not the chunk's, so the values do not depend on where the model is cut; for the same reason an
    ``init`` that calls those of other chunks hands them the key of the layer, into which they fold no name again.
    """

    function: Callable[[jax.Array], dict[str, Any]]

    def __call__(self, key: jax.Array) -> dict[str, Any]:
        if _of_one_layer.get():
            return self.function(key)
        names = _traced(self.function)
        token = _of_one_layer.set(True)
        try:
            return {name: self.function(jax.random.fold_in(key, name_number(name)))[name] for name in names}
        finally:
            _of_one_layer.reset(token)


def name_number(name: str) -> int:
    """Returns the number that stands for a layer's name in random keys, the same for all parts of a layer.

    CRC-32 is used because it is the same in every process and Python version, which ``hash(str)`` is not.
    """
    return zlib.crc32(whole_name(name).encode())


# -- parts of a layer --------------------------------------------------------------------------------------------------


def part_name(layer: str, part: str) -> str:
    """Returns the name of a part of a layer, for example ``layers.3:mlp``."""
    return f"{layer}:{part}"


class LayerShard(NamedTuple):
    """Which part of its layer a shard is: neighbouring rows of every array of it, or columns. Shards have equally many
    of them, or one fewer."""

    number: int
    """The number of the shard, from 0."""
    num_shards: int
    axis: int = 0
    """The dimension along which arrays are cut: 0, or -1 for columns."""

    def name(self, layer: str) -> str:
        """Returns the name of the shard of this layer: ``head:columns 2 of 4``."""
        return part_name(layer, f"{_WAYS[self.axis]} {self.number + 1} of {self.num_shards}")

    def bounds(self, size: int) -> tuple[int, int]:
        """Returns the first of its rows or columns, of ``size`` in all, and that behind the last one."""
        return self.number * size // self.num_shards, (self.number + 1) * size // self.num_shards


_WAYS = {0: "rows", -1: "columns"}
_SHARD = re.compile(r"[^:]+:(rows|columns) ([1-9]\d*) of ([1-9]\d*)")


def shard_named(name: str) -> LayerShard | None:
    """Returns which shard of its layer the name stands for, or None."""
    found = _SHARD.fullmatch(name)
    return None if found is None else LayerShard(int(found[2]) - 1, int(found[3]), 0 if found[1] == "rows" else -1)


def first_shards(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layers without all shards of a layer but the first that is there."""
    firsts: dict[str, str] = {}
    for name in layers:
        firsts.setdefault(whole_name(name), name)
    return {n: layer for n, layer in layers.items() if shard_named(n) is None or firsts[whole_name(n)] == n}


ADAPTERS = "adapters."
"""The prefix of layers that hold the adapters of other layers: ``adapters.layers.3`` those of ``layers.3``."""


def whole_name(name: str) -> str:
    """Returns the name of the layer of which this is a part, or the layer itself."""
    return name.partition(":")[0] or name


def whole_layers(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters, or a tree like them, with the parts of each layer joined under the layer's name.

    Several shards of a layer are joined on the host. Raises ValueError for parts that both have something at the same
    path, and for a part beside its whole layer.
    """
    whole: dict[str, Any] = {}
    for name, layer in _with_joined_shards(layers).items():
        own = whole_name(name)
        whole[own] = _joined(None if own in layers else whole[own], layer, own) if own in whole else layer
    return whole


def _with_joined_shards(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layers with all shards of one that are there in the place of the first of them, joined."""
    found: dict[str, Any] = {}
    for name, layer in layers.items():
        if (shard := shard_named(name)) is None:
            found[name] = layer
            continue
        of_layer = {s: n for n in layers if whole_name(n) == whole_name(name) and (s := shard_named(n)) is not None}
        alike = [n for s, n in sorted(of_layer.items()) if s[1:] == shard[1:]]
        if name == min(alike, key=list(layers).index):
            found[name] = jax.tree.map(partial(_end_to_end, shard.axis), *(layers[n] for n in alike))
    return found


def _end_to_end(axis: int, *arrays: Any) -> Any:
    shape = arrays[0].shape
    if len(arrays) == 1 or not shape:
        return arrays[0]
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        sizes = list(shape)
        sizes[axis] = sum(each.shape[axis] for each in arrays)
        return jax.ShapeDtypeStruct(tuple(sizes), arrays[0].dtype)
    return np.concatenate([np.asarray(each) for each in arrays], axis=axis)


def _joined(one: Any, other: Any, path: str) -> Any:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        raise ValueError(
            f"two layers have {path!r} in common, as a colon in a name stands before a part of a layer: name layers "
            "without colons"
        )
    both = {key: _joined(value, other[key], f"{path}.{key}") for key, value in one.items() if key in other}
    return {**one, **other, **both}


def parts_of(whole: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what whole layers have at the paths of ``parts``, by the names of these."""
    return {
        name: whole[name] if name == whole_name(name) else _like(whole[whole_name(name)], part)
        for name, part in parts.items()
    }


def _like(whole: Any, part: Any) -> Any:
    if not isinstance(part, Mapping):
        return whole
    return {key: _like(whole[key], value) for key, value in part.items()}


class LayerMaker(NamedTuple):
    """A function that makes some layers of a chunk."""

    names: tuple[str, ...]
    """Their own names."""
    kind: Hashable
    """Equal for makers whose functions are the same."""
    make: Callable[[jax.Array, Any], list[Any]]
    """From the key and ``numbers`` to the parameters of each of ``names``."""
    numbers: Any


class OwnFunction:
    """A chunk's ``init`` or ``apply`` as programs take it: parameters go by the function's own names, and the numbers
    are an argument. For a function that is not written for layers, own names are the model's, and numbers are ``()``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        layers = function if isinstance(function, InitLayers | ApplyLayers) else None
        self._function = function if layers is None else layers.function
        self.names: dict[str, str] | None = None if layers is None else layers.names
        """The model's names of layers by the function's own; None: the function knows no names of its own."""
        self._each = layers.each if isinstance(layers, InitLayers) else None
        self.numbers: Any = () if layers is None else layers.numbers
        self.kind: Hashable = identity(function) if layers is None else layers.kind
        """Equal for chunks whose functions are the same."""

    def __call__(self, *args: Any, numbers: Any, **kwargs: Any) -> Any:
        if self.names is None:
            return self._function(*args, **kwargs)
        return self._function(*args, **kwargs, numbers=numbers)

    def makers(self, names: tuple[str, ...]) -> list[LayerMaker]:
        """Returns what together makes the layers of these own names: one maker for each layer where it is known how a
        layer is made alone, else one for all."""
        if self._each is None:
            return [LayerMaker(names, (self.kind, names), partial(self._all, names), self.numbers)]
        return [
            LayerMaker((name,), identity(self._each[name]), partial(_alone, self._each[name]), self.numbers[name])
            for name in names
        ]

    def _all(self, names: tuple[str, ...], key: jax.Array, numbers: Any) -> list[Any]:
        layers = self(key, numbers=numbers)
        return [layers[name] for name in names]

    def to_own(self, layers: dict[str, Any]) -> dict[str, Any]:
        """Returns layers, all or some, by the function's own names."""
        if self.names is None:
            return layers
        return {own: layers[name] for own, name in self.names.items() if name in layers}

    def to_model(self, layers: dict[str, Any]) -> dict[str, Any]:
        """Returns layers, all or some, by their names in the model."""
        if self.names is None:
            return layers
        return {name: layers[own] for own, name in self.names.items() if own in layers}


def _alone(make: Callable[[jax.Array, Any], Any], key: jax.Array, number: Any) -> list[Any]:
    return [make(key, number)]


_specs_of_kinds: dict[Hashable, Any] = {}
"""Shapes of parameters by the kind of the ``init`` that makes them; emptied once it has 256 entries."""


def _traced(init: Callable[[jax.Array], Any]) -> Any:
    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A consecutive part of a model with its own parameters."""

    name: str
    """The name in tables and errors, for example ``layers 0-1``."""
    init: Callable[[jax.Array], Params]
    """``init(key) -> params``, from a typed key. It is called once for every layer, with a key into which the layer's
    name is folded, and returns that layer; but an :class:`InitLayers` gets the key itself."""
    apply: Callable[..., Any]
    """The forward, ``apply(params, inputs, leaves, *, key) -> outputs``."""
    leaves: tuple[str, ...] = ()
    """Names of the batch leaves that ``apply`` reads."""
    leaf_orders: Mapping[str, LeafOrder] = field(default_factory=dict)
    """The order of positions, for leaves that ``apply`` reads in another order than the batch has them: the pipeline
    reorders them as it copies the batch."""
    optional_leaves: frozenset[str] = frozenset()
    """The names among ``leaves`` without which it runs as well."""
    check_leaves: LeafCheck | None = None
    """A check of every microbatch before a step begins, where this chunk runs: compiled programs cannot refuse numbers
    that mean nothing."""
    frozen: frozenset[str] = frozenset()
    """Top-level names of ``params`` that never change: they get no gradient, accumulator or optimizer state."""
    shared: frozenset[str] = frozenset()
    """Top-level names of ``params`` of which other chunks hold a copy under the same name."""
    gives_loss: bool = False
    """Whether ``apply`` returns a dictionary of parts, of which ``loss`` is the loss and edges name the others. A chunk
    that nobody reads returns a loss in any case."""
    sign_rates: Mapping[str, float] = field(default_factory=dict)
    """Steps of parameters that go against the sign of their gradient, by the last name of the parameter's path. The
    gradient counts in the norm, so it should be tiny."""
    uses_key: bool = False
    """Whether ``apply`` reads ``key``; otherwise it gets None, as all do in evaluations, where nothing is random."""
    apply_evaluating: Callable[..., Any] | None = None
    """The forward of evaluations, for named sums that training has no use for; None: ``apply``."""
    partition: Partition | None = None
    """How ``params`` are cut over the devices that share a stage; None: every device holds all of them."""

    @property
    def tied(self) -> frozenset[str]:
        """The names among ``shared`` that change: the gradients of their copies are added up."""
        return self.shared - self.frozen

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("optional_leaves", "leaf_orders"):
            if unknown := sorted(set(getattr(self, name)) - set(self.leaves)):
                raise ValueError(
                    f"{name} of chunk {self.name!r} has {unknown[0]!r}, which it does not read: its leaves are "
                    f"{', '.join(self.leaves) or 'none'}"
                )
        if not isinstance(self.init, InitLayers | KeyedByLayer):
            object.__setattr__(self, "init", KeyedByLayer(self.init))

    @cached_property
    def _param_specs(self) -> Any:
        init = self.init
        if not isinstance(init, InitLayers):
            return _traced(init.function if isinstance(init, KeyedByLayer) else init)
        # a model of many layers asks once for each kind, since every trace takes milliseconds
        if (specs := _specs_of_kinds.get(init.kind)) is None:
            if len(_specs_of_kinds) >= 256:
                _specs_of_kinds.clear()
            specs = _specs_of_kinds[init.kind] = _traced(partial(init.function, numbers=init.numbers))
        return OwnFunction(init).to_model(specs)

    @cached_property
    def own(self) -> OwnFunction:
        """The function ``apply``, as programs take it."""
        return OwnFunction(self.apply)

    @cached_property
    def known_outputs(self) -> dict[Any, Any]:
        """The cache of :func:`rrfp_jax.programs.shapes.derive_shapes`: output shapes by the shapes that were read."""
        return {}


def as_evaluated(chunk: Chunk) -> Chunk:
    """Returns the chunk as evaluations run it, where ``key`` is None."""
    if not chunk.uses_key and chunk.apply_evaluating is None:
        return chunk
    return replace(chunk, uses_key=False, apply=chunk.apply_evaluating or chunk.apply, apply_evaluating=None)


def param_specs(chunk: Chunk) -> dict[str, Any]:
    """Returns shapes and dtypes of a chunk's parameters; touches no device, and traces ``init`` once for a kind."""
    try:
        specs: dict[str, Any] = chunk._param_specs
    except TypeError as error:  # for text, for example; JAX names its place
        raise ValueError(
            f"chunk {chunk.name!r} cannot be initialised: {error}; return arrays, and close over what is none"
        ) from error
    return specs


def trained_specs(chunk: Chunk) -> dict[str, Any]:
    """Returns shapes and dtypes of the parameters of layers that are not frozen."""
    specs = param_specs(chunk)
    return {name: layer for name, layer in specs.items() if name not in chunk.frozen} if chunk.frozen else specs


def microbatch_key(
    seed: jax.typing.ArrayLike, step: jax.typing.ArrayLike, microbatch: jax.typing.ArrayLike
) -> jax.Array:
    """Returns the typed key of one microbatch of one step; all arguments are unsigned 32-bit scalars.

    The key depends on the computation, never on the order in which it happens to run: ``microbatch`` counts over the
    whole step, not within a replica. Works inside and outside of jit, with equal bits. Raises ValueError for other
    numbers.
    """
    numbers, given = [], dict[str, Any](seed=seed, step=step, microbatch=microbatch)
    for name, value in given.items():
        is_array = isinstance(value, jax.Array | np.ndarray) and not value.shape
        if not (is_array and jnp.issubdtype(value.dtype, jnp.integer)) and not (is_whole(value) and 0 <= value < 2**32):
            raise ValueError(f"{name} is {with_type(value)}: give a whole number from 0 to {2**32 - 1}")
        numbers.append(jnp.asarray(value, jnp.uint32))
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(numbers[0]), numbers[1]), numbers[2])


def check_chunks(chunks: Any) -> tuple[Chunk, ...]:
    """Returns the chunks as a tuple; raises ValueError for anything else."""
    given = tuple(chunks) if isinstance(chunks, Iterable) else (chunks,)
    if not all(isinstance(chunk, Chunk) for chunk in given):
        raise ValueError(f"chunks is {with_type(chunks)}: give a list of Chunks")
    return given


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that does not fit 32 bits."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} does not fit 32 bits: give a number from 0 to {2**32 - 1}")


def counters(seed: int, step: int, microbatch: int) -> np.ndarray:
    """Returns the three numbers behind a key, as the ``uint32[3]`` array that programs take."""
    return np.array((seed, step, microbatch), np.uint32)
