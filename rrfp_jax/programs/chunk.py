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
    Differences within a kind, such as names and numbers of layers, are given beside the function: see
    :mod:`rrfp_jax.programs.layers`.
outputs
    Any pytree of arrays. A chunk without successors returns ``(loss_sum, weight)``, two float32 scalars: the loss
    summed (not averaged) over the microbatch, and its weight, for example the number of tokens. It may return a third
    entry, a dictionary of further float32 scalars by name: *named sums* over the microbatch, such as a part of the loss
    that is to be seen on its own. A step reports each over its total weight. Neither they nor the weight have a
    gradient: a weight that depends on parameters divides the loss and is a constant otherwise.
frozen, and without a gradient
    Layers that are frozen, and all layers of a chunk that no gradient reaches, get no update at all: no weight decay
    either.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.field_rules import check_types, is_whole, with_type
from rrfp_jax.programs.layers import InitLayers, KeyedByLayer, OwnFunction, specs_of

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


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A consecutive part of a model with its own parameters."""

    name: str
    """The name in tables and errors, for example ``layers 0-1``."""
    init: Callable[[jax.Array], Params]
    """``init(key) -> params``, from a typed key. It is called once for every layer, with a key into which the layer's
    name is folded, and returns that layer; but an :class:`rrfp_jax.programs.layers.InitLayers` gets the key itself."""
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
        return specs_of(self.init)

    @property
    def own_init(self) -> OwnFunction:
        """The function ``init``, as programs take it."""
        return OwnFunction(self.init)

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
    numbers = [_counter(*each) for each in (("seed", seed), ("step", step), ("microbatch", microbatch))]
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(numbers[0]), numbers[1]), numbers[2])


def _counter(name: str, value: Any) -> jax.Array:
    is_array = (
        isinstance(value, jax.Array | np.ndarray) and not value.shape and jnp.issubdtype(value.dtype, jnp.integer)
    )
    if not is_array and not (is_whole(value) and 0 <= value < 2**32):
        raise ValueError(f"{name} is {with_type(value)}: give a whole number from 0 to {2**32 - 1}")
    return jnp.asarray(value, jnp.uint32)


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
