"""A chunk's functions in two parts: one that all chunks of a kind share, and the names and numbers of this chunk.

Functions that know the global names of their layers, ``layers.3`` say, differ from chunk to chunk, though they compute
the same. So a chunk may give functions that know names of their own, with the layers that they stand for, and with
numbers that come in as data (:class:`InitLayers`, :class:`ApplyLayers`). Chunks are of one kind where these functions
are the same (:mod:`rrfp_jax.programs.sameness`).
"""

import zlib
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import jax

from rrfp_jax.field_rules import check_types
from rrfp_jax.programs.sameness import identity


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

    def renamed(self, layers: dict[str, Any]) -> dict[str, Any]:
        """Returns layers, given by own names, by their names in the model."""
        return {name: layers[own] for own, name in self.names.items()}


class InitLayers(ForLayers):
    """The ``init`` of a chunk."""

    def __call__(self, key: jax.Array) -> dict[str, Any]:
        return self.renamed(self.function(key, numbers=self.numbers))


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
    """Returns the number that stands for a name in random keys.

    CRC-32 is used because it is the same in every process and Python version, which ``hash(str)`` is not.
    """
    return zlib.crc32(name.encode())


class OwnFunction:
    """A chunk's ``init`` or ``apply`` as programs take it: parameters go by the function's own names, and the numbers
    are an argument. For a function that is not written for layers, own names are the model's, and numbers are ``()``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._layers = function if isinstance(function, InitLayers | ApplyLayers) else None
        self._function = function if self._layers is None else self._layers.function
        self.numbers = () if self._layers is None else self._layers.numbers
        self.kind: Hashable = identity(function) if self._layers is None else self._layers.kind
        """Equal for chunks whose functions are the same."""

    def __call__(self, *args: Any, numbers: Any, **kwargs: Any) -> Any:
        if self._layers is None:
            return self._function(*args, **kwargs)
        return self._function(*args, **kwargs, numbers=numbers)

    def to_own(self, layers: dict[str, Any]) -> dict[str, Any]:
        """Returns layers, all or some, by the function's own names."""
        if self._layers is None:
            return layers
        return {own: layers[name] for own, name in self._layers.names.items() if name in layers}

    def to_model(self, layers: dict[str, Any]) -> dict[str, Any]:
        """Returns layers, all or some, by their names in the model."""
        if self._layers is None:
            return layers
        return {name: layers[own] for own, name in self._layers.names.items() if own in layers}


def specs_of(init: Callable[[jax.Array], Any]) -> Any:
    """Returns the shapes of the parameters that ``init`` makes, by the model's names; traced once for a kind."""
    if isinstance(init, InitLayers):
        return init.renamed(_specs_of_kind(init.kind, _Unhashed(init)))
    return _traced(init.function if isinstance(init, KeyedByLayer) else init)


class _Unhashed:
    """An argument that a cache ignores: all of them are equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashed)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=256)
def _specs_of_kind(_: Hashable, init: _Unhashed) -> Any:
    return _traced(partial(init.value.function, numbers=init.value.numbers))


def _traced(init: Callable[[jax.Array], Any]) -> Any:
    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
