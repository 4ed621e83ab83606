"""Which arrays of one microbatch pass from program to program of a chunk, and who holds them.

From forward to backward go the :class:`Residuals`. Inputs, batch leaves and outputs among them are the caller's own
arrays, by reference (*aliased* residuals). So are, among the residuals of the weight gradient, arrays of the former and
the gradients that come and go. Programs return only arrays that they make, since they would copy any other.

Layouts are places in flat lists, fixed once the chunk has been traced.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from rrfp_jax.programs.shardings import passing
from rrfp_jax.programs.specs import Specs, num_bytes
from rrfp_jax.programs.splitting import SplitBackward


class Residuals(NamedTuple):
    """The arrays that the backward of one microbatch needs, for one backward, which takes over ``donated``."""

    donated: tuple[Any, ...] = ()
    """Values of the forward whose memory the results of the backward take over."""
    saved: tuple[Any, ...] = ()
    """The other values of the forward, which nobody else holds."""
    aliased: tuple[Any, ...] = ()
    """Inputs, batch leaves and outputs that the backward reads again; others may hold them too."""


WeightResiduals = tuple[Any, ...]
"""The arrays that the weight gradient of one microbatch needs, after its input gradient."""


@dataclass(frozen=True, kw_only=True)
class WeightResidualBytes:
    """Bytes of the weight-gradient residuals, by their holder."""

    saved: int = 0
    """Bytes of saved residuals of the forward."""
    aliased: int = 0
    """Bytes of inputs, batch leaves and outputs that the residuals of the forward kept alive."""
    gradients: int = 0
    """Bytes of gradients as they came from a successor or go to a predecessor."""
    made: int = 0
    """Bytes that the input gradient's program makes for the weight gradient."""

    @property
    def total(self) -> int:
        """All bytes between input gradient and weight gradient."""
        return self.saved + self.aliased + self.gradients + self.made


@dataclass(frozen=True, kw_only=True)
class ResidualLayout:
    """How the residuals of a forward are put together and taken apart."""

    donated: tuple[int, ...] = ()
    """The arrays made by the forward that become ``Residuals.donated``."""
    saved: tuple[int, ...] = ()
    """The arrays made by the forward that become ``Residuals.saved``."""
    aliased: tuple[int, ...] = ()
    """The leaves of ``(operands, outputs)`` that become ``Residuals.aliased``."""
    order: tuple[int, ...] = ()
    """For each residual of the split its place in ``(*donated, *saved, *aliased)``."""
    specs: Residuals = field(default_factory=Residuals)
    """Shapes, dtypes and shardings."""

    def arrays(self, donated: Sequence[Any], saved: Sequence[Any], aliased: Sequence[Any]) -> list[Any]:
        """Returns the residuals in the order in which the split's functions take them."""
        parts = (*donated, *saved, *aliased)
        return [parts[place] for place in self.order]


@dataclass(frozen=True, kw_only=True)
class WeightResidualLayout:
    """How the residuals of a weight gradient are put together."""

    leaves: tuple[int, ...] = ()
    """The leaves of ``(saved, aliased, output_grads, input_grads, made)`` that the weight gradient gets."""
    specs: WeightResiduals = ()
    """Shapes, dtypes and shardings."""
    num_bytes: WeightResidualBytes = field(default_factory=WeightResidualBytes)


def lay_out_residuals(
    split: SplitBackward,
    operands: Specs,
    *,
    results: Sequence[Any],
    outliving: Collection[int],
    boundary: Sharding | None = None,
    made_shardings: Sequence[Sharding] | None = None,
) -> ResidualLayout:
    """Lays out the residuals of a forward that makes arrays of these shardings (None: at the boundary, as all else).

    ``results`` are specs of the arrays that the backward returns at the boundary, ``outliving`` the residuals that the
    weight gradient reads after it.
    """
    sources = split.residual_sources
    made = [p for p, source in enumerate(sources) if source.origin == "made"]
    aliased = [p for p, source in enumerate(sources) if source.origin != "made"]
    specs = []
    for source, spec in zip(sources, split.residual_specs, strict=True):
        is_at_boundary = made_shardings is None or source.origin != "made"
        sharding = _passing(boundary, spec) if is_at_boundary else (made_shardings or ())[source.position]
        specs.append(_placed(spec, sharding))
    # JAX pairs donated arrays with results of their shape in order, and a backward begins with the last layer: a result
    # that takes over an array that the first layer still has to read costs a copy of it
    candidates = [p for p in reversed(made) if p not in outliving and _lies_as_passing(boundary, specs[p])]
    # only a result of equal shape and dtype can take over a buffer; donating more has no effect but a warning
    wanted = Counter((spec.shape, spec.dtype) for spec in results)
    donated = []
    for place in candidates:
        kind = (specs[place].shape, specs[place].dtype)
        if wanted[kind] > 0:
            wanted[kind] -= 1
            donated.append(place)
    saved = [p for p in made if p not in donated]
    order = [*donated, *saved, *aliased]
    offsets = {"input": 0, "output": len(jax.tree.leaves(operands))}
    return ResidualLayout(
        donated=tuple(sources[p].position for p in donated),
        saved=tuple(sources[p].position for p in saved),
        aliased=tuple(offsets[sources[p].origin] + sources[p].position for p in aliased),
        order=tuple(order.index(position) for position in range(len(order))),
        specs=Residuals(*(tuple(specs[p] for p in part) for part in (donated, saved, aliased))),
    )


def lay_out_weight_residuals(
    split: SplitBackward,
    residuals: ResidualLayout,
    output_grads: Specs,
    input_grads: Specs,
    *,
    boundary: Sharding | None = None,
    made_shardings: Sequence[Sharding] | None = None,
) -> WeightResidualLayout:
    """Lays out the weight-gradient residuals of an input gradient that makes arrays of these shardings (None: at the
    boundary).

    ``output_grads`` has one entry per gradient that the backward gets, ``input_grads`` one per gradient it sends; they
    lie at the boundary.
    """
    num_saved, num_aliased = len(residuals.specs.saved), len(residuals.specs.aliased)
    after_grads = num_saved + num_aliased + len(jax.tree.leaves(output_grads))
    after_all = after_grads + len(jax.tree.leaves(input_grads))
    sums, made = summed_leaves(split, output_grads), made_for_weights(split, output_grads)

    def leaf(origin: str, index: int) -> tuple[int, str]:
        """Returns the place of an array, and its holder."""
        if origin == "residual":
            place = residuals.order[index] - len(residuals.specs.donated)
            return place, "saved" if place < num_saved else "aliased"
        if origin == "input gradient":
            return after_grads + index, "gradients"
        if origin == "made":
            return after_all + index, "made"
        if sums:
            return after_all + len(made) - len(sums) + sums.index(index), "made"
        return num_saved + num_aliased + index, "gradients"

    leaves = [leaf(*source) for source in split.weight_residual_sources]
    at_residuals = [spec.sharding for spec in (*residuals.specs.saved, *residuals.specs.aliased)]
    at_made = [_passing(boundary, spec) for spec in made] if made_shardings is None else made_shardings
    at_grads = [_passing(boundary, spec) for spec in jax.tree.leaves((output_grads, input_grads))]
    shardings = [*at_residuals, *at_grads, *at_made]
    pairs = zip(split.weight_residual_specs, leaves, strict=True)
    specs = tuple(_placed(spec, shardings[place]) for spec, (place, _) in pairs)
    bytes_by_holder: Counter[str] = Counter()
    for (_, holder), spec in zip(leaves, specs, strict=True):
        bytes_by_holder[holder] += num_bytes(spec)
    places = tuple(place for place, _ in leaves)
    return WeightResidualLayout(leaves=places, specs=specs, num_bytes=WeightResidualBytes(**bytes_by_holder))


def summed_leaves(split: SplitBackward, output_grads: Specs) -> tuple[int, ...]:
    """Returns the indices of output-gradient leaves that the weight gradient needs and that exist only as sums of
    several successors' gradients, so that the input gradient's program has to return them."""
    if len(output_grads) < 2:
        return ()
    return tuple(source.position for source in split.weight_residual_sources if source.origin == "output gradient")


def made_for_weights(split: SplitBackward, output_grads: Specs) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shapes and dtypes of the arrays that an input gradient's program makes for the weight gradient."""
    pairs = zip(split.weight_residual_specs, split.weight_residual_sources, strict=True)
    own = [spec for spec, source in pairs if source.origin == "made"]
    return (*own, *(jax.tree.leaves(output_grads[0])[leaf] for leaf in summed_leaves(split, output_grads)))


def _placed(spec: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


def _passing(boundary: Sharding | None, spec: Any) -> Sharding | None:
    return None if boundary is None else passing(boundary, spec)


def _lies_as_passing(boundary: Sharding | None, spec: jax.ShapeDtypeStruct) -> bool:
    """Whether an array lies as one of its shape would that passes between chunks."""
    sharding, wanted = spec.sharding, _passing(boundary, spec)
    if sharding is None or wanted is None:
        return sharding is wanted
    return bool(sharding.is_equivalent_to(wanted, len(spec.shape)))
