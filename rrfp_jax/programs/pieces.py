"""The accumulated gradients of a chunk, cut into pieces for replicas that add them up by messages.

There are as many pieces as replicas, and all of them have the same shapes: the gradients are laid out one after another
in flat arrays, each of which is cut into equal parts, the last one filled up with zeros. Gradients share a flat array
if they have the same dtype and are cut over the same axes of the unit's mesh; each device lays out its own shards, so
that nothing moves between devices. Shared layers have flat arrays of their own, so that chunks that hold other layers
beside them cut them alike.

Where replicas average a share of their parameters instead (:class:`rrfp_jax.core.replicas.SparseAveraging`), pieces
have the elements of one part of each parameter. A parameter in its flat form is a table with as many columns as there
are parts, the last row filled up. Each row has a random first column, and part ``k`` has of each row the element ``k``
columns further, around the end. So every element is in one part, a part has at most one of a row, whatever the mesh,
and nothing is kept to know them.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from rrfp_jax.programs.chunk import Chunk, trained_specs, whole_name
from rrfp_jax.programs.shapes import Specs, accumulator_spec, pick, spec_of
from rrfp_jax.programs.shardings import WHOLE, axes_at, axes_of_spec, param_partition, place


class GradientPiece(NamedTuple):
    """A part of the gradients of one chunk, as flat arrays."""

    own: Any
    """Parts of the layers that the chunk has alone."""
    shared: dict[str, Any]
    """Parts of each shared layer that trains, by name."""


@dataclass(frozen=True, kw_only=True)
class PieceBytes:
    """The most bytes that the pieces of one chunk take on a device of its unit, whatever comes first.

    Once the gradients are cut, one thing lies here for each piece in place of the accumulators: the piece until it is
    sent or added up, and its sum from then on. The sum of a piece that was sent comes back from a unit that has it.

    Beside these lie the pieces of others that this unit adds up, of one step at a time. A replica's gradients of the
    next step are complete once its microbatches have passed through its copy of this chunk, which begins that step
    when it has all sums of this one. So R here has added up all pieces of this step before. After a loss a unit adds up
    more pieces, each of fewer others: of 4 replicas the first of 3 that live adds up two pieces of two others, which is
    more than one of three.
    """

    piece: int = 0
    """Bytes of one piece."""
    lasting: int = 0
    """Bytes of the pieces of others, bytes that the chunk's own pieces have beyond its accumulators, and bytes of
    shares of parameters on their way: at any time, also while microbatches are in flight."""
    made: Mapping[str, int] = field(default_factory=dict)
    """By program, the bytes of results that take the place of nothing while it runs: all pieces lie beside the
    accumulators as these are cut or joined, and sums of shared layers lie beside their own piece."""


_ROW = 1024
"""Elements of a row: XLA adds up a long flat array on one core, and one of rows on several (measured on CPU: 42 ms and
5 ms for 8 MiB)."""
_MANY_ROWS = 64


@dataclass(frozen=True)
class _Flat:
    """One flat array before it is cut."""

    leaves: tuple[int, ...]
    """The gradients in it, by their number among those of its layers."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes on each device."""
    length: int
    """The number of elements of a piece on each device."""
    spec: jax.ShapeDtypeStruct
    """The shape of a piece on the whole unit."""
    partition: PartitionSpec


class PieceLayout:
    """How the gradients of chunk ``index`` are cut on a unit with these axes.

    Args:
        axes: the axes of the unit with their sizes; empty for a unit of one device.
        num_pieces: the number of pieces.
        num_parts: the number of parts of each parameter of which pieces have one, whole on each device; None: pieces
            have gradients.

    ``cut`` and ``join`` are to be traced, on each device of a unit in the manner of ``shard_map``.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        index: int,
        axes: Mapping[str, int],
        num_pieces: int,
        *,
        num_parts: int | None = None,
    ) -> None:
        params = spec_of(trained_specs(chunks[index]))
        partition = pick(param_partition(chunks, index, axes), params)
        names = tuple(sorted(chunks[index].tied))
        own = tuple(name for name in params if name not in names)
        self.num_pieces = num_pieces
        self._layers = {"": own, **{name: (name,) for name in names}}
        """The layers of each set of flat arrays; the empty name has the chunk's own."""
        sums = accumulator_spec(params)
        if num_parts is not None:
            sums, partition = part_specs(sums, num_parts), jax.tree.map(lambda _: WHOLE, sums)
        self.whole_spec = sums
        """The shapes of what is cut."""
        self._treedefs: dict[str, Any] = {
            name: jax.tree.structure(pick(sums, layers)) for name, layers in self._layers.items()
        }
        self._flats = {
            name: _flats_of(pick(sums, layers), pick(partition, layers), axes, num_pieces)
            for name, layers in self._layers.items()
        }
        self.spec = self._piece(lambda flat: flat.spec)
        """The shapes of a piece."""
        self.partition = self._piece(lambda flat: flat.partition)
        """A ``PartitionSpec`` for each array of a piece."""

    def _piece(self, of_flat: Callable[[_Flat], Any]) -> GradientPiece:
        arrays = {name: tuple(map(of_flat, flats)) for name, flats in self._flats.items()}
        return GradientPiece(arrays.pop(""), arrays)

    def at(self, boundary: Sharding) -> GradientPiece:
        """Returns the shardings of a piece on a unit with this boundary."""
        shardings: GradientPiece = place(self.partition, boundary)
        return shardings

    def cut(self, gradients: Mapping[str, Any]) -> tuple[GradientPiece, ...]:
        parts = {
            name: [_cut(flat, jax.tree.leaves(pick(gradients, layers)), self.num_pieces) for flat in self._flats[name]]
            for name, layers in self._layers.items()
        }

        def piece(number: int) -> GradientPiece:
            arrays = {name: tuple(of_flat[number] for of_flat in flats) for name, flats in parts.items()}
            return GradientPiece(arrays.pop(""), arrays)

        return tuple(map(piece, range(self.num_pieces)))

    def join(self, pieces: Sequence[GradientPiece]) -> dict[str, Any]:
        """Returns the gradients of which these are all pieces, in order."""
        gradients: dict[str, Any] = {}
        for name, flats in self._flats.items():
            leaves: list[Any] = [None] * self._treedefs[name].num_leaves
            for number, flat in enumerate(flats):
                parts = [(piece.shared[name] if name else piece.own)[number] for piece in pieces]
                for leaf, array in zip(flat.leaves, _join(flat, parts), strict=True):
                    leaves[leaf] = array
            gradients |= jax.tree.unflatten(self._treedefs[name], leaves)
        return gradients


def tied_names(chunks: Sequence[Chunk], one: int, other: int) -> tuple[str, ...]:
    """Returns the shared layers that train and that both chunks hold."""
    return tuple(sorted(chunks[one].tied & chunks[other].tied))


def _flats_of(sums: Specs, partition: Any, axes: Mapping[str, int], num_pieces: int) -> tuple[_Flat, ...]:
    groups: dict[tuple[np.dtype, tuple[str, ...]], list[tuple[int, tuple[int, ...]]]] = {}
    for number, (leaf, spec) in enumerate(zip(jax.tree.leaves(sums), jax.tree.leaves(partition), strict=True)):
        cuts = [math.prod(axes[axis] for axis in axes_at(spec, dim)) for dim in range(len(spec))]
        cuts += [1] * (len(leaf.shape) - len(cuts))
        shape = tuple(size // parts for size, parts in zip(leaf.shape, cuts, strict=True))
        # Axes in the order of the mesh: the order within a spec says how an array lies, which does not matter here.
        named = tuple(axis for axis in axes if axis in axes_of_spec(spec))
        groups.setdefault((np.dtype(leaf.dtype), named), []).append((number, shape))
    flats = []
    for (dtype, named), members in groups.items():
        numbers, shapes = zip(*members, strict=True)
        length = -(-sum(map(math.prod, shapes)) // num_pieces)
        if length > _MANY_ROWS * _ROW:
            length += -length % _ROW
        num_shards = math.prod(axes[axis] for axis in named)
        spec = jax.ShapeDtypeStruct((length * num_shards,), dtype)
        flats.append(_Flat(numbers, shapes, length, spec, PartitionSpec(named) if named else WHOLE))
    return tuple(flats)


def _cut(flat: _Flat, leaves: Sequence[Any], num_pieces: int) -> list[Any]:
    """Returns the pieces of one flat array, each made at once, so that the whole array is never made."""
    parts: list[list[Any]] = [[] for _ in range(num_pieces)]
    start = 0
    for number in flat.leaves:
        elements = leaves[number].reshape(-1)
        for piece, first, last in _spans(start, elements.size, flat.length):
            parts[piece].append(elements[first - start : last - start])
        start += elements.size
    if left := num_pieces * flat.length - start:
        filling = jnp.zeros(left, flat.spec.dtype)
        for piece, first, last in _spans(start, left, flat.length):
            parts[piece].append(filling[first - start : last - start])
    return [jnp.concatenate(own) if own else jnp.zeros(0, flat.spec.dtype) for own in parts]


def _join(flat: _Flat, pieces: Sequence[Any]) -> list[Any]:
    """Returns the gradients of one flat array, each made of the pieces in which it lies."""
    gradients, start = [], 0
    for shape in flat.shapes:
        size = math.prod(shape)
        parts = [
            pieces[piece][first - piece * flat.length : last - piece * flat.length]
            for piece, first, last in _spans(start, size, flat.length)
        ]
        whole = jnp.concatenate(parts) if parts else jnp.zeros(0, flat.spec.dtype)
        gradients.append(whole.reshape(shape))
        start += size
    return gradients


def _spans(start: int, size: int, length: int) -> list[tuple[int, int, int]]:
    """Returns the pieces over which these elements of a flat array extend, each with its first element and its end."""
    if not size:
        return []
    return [
        (piece, max(start, piece * length), min(start + size, (piece + 1) * length))
        for piece in range(start // length, (start + size - 1) // length + 1)
    ]


def in_rows(array: Any) -> Any:
    """Returns a part of a piece in a shape whose elements are quickly added up."""
    return array.reshape(-1, _ROW) if array.size > _MANY_ROWS * _ROW else array


# -- parts of parameters -----------------------------------------------------------------------------------------------


def part_specs(params: Specs, num_parts: int) -> Specs:
    """Returns the shapes of one part of each parameter, in the dtypes of accumulators."""
    flat = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((-(-leaf.size // num_parts),), leaf.dtype), params)
    specs: Specs = accumulator_spec(flat)
    return specs


def part_keys(params: Specs, seed: int) -> np.ndarray:
    """Returns a number for each parameter, by its layer and its path there, which decides its parts."""
    names = [
        f"{seed} {whole_name(layer)}{jax.tree_util.keystr(path)}"
        for layer in sorted(params)
        for path, _ in jax.tree.leaves_with_path(params[layer])
    ]
    return np.array([zlib.crc32(name.encode()) for name in names], np.uint32)


def elements_of_part(params: Any, keys: jax.Array, part: jax.Array, num_parts: int) -> Any:
    """Returns one part of each parameter, with zeros in the place of elements that the last row lacks."""

    def taken(leaf: jax.Array, key: jax.Array) -> jax.Array:
        columns = _columns(key, -(-leaf.size // num_parts), part, num_parts)
        found = jnp.take_along_axis(_rows(leaf, num_parts), columns[:, None], axis=1)[:, 0]
        return found.astype(accumulator_spec(spec_of(leaf)).dtype)

    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, [taken(leaf, keys[number]) for number, leaf in enumerate(leaves)])


def with_added_part(params: Any, differences: Any, keys: jax.Array, part: jax.Array, num_parts: int) -> Any:
    """Returns the parameters with differences added to one part of each."""

    def added(leaf: jax.Array, difference: jax.Array, key: jax.Array) -> jax.Array:
        rows = _rows(leaf, num_parts)
        columns = _columns(key, len(rows), part, num_parts)
        # A comparison with every column instead of a scatter, which CPUs run element by element.
        is_taken = columns[:, None] == jnp.arange(num_parts, dtype=columns.dtype)
        moved = (rows.astype(difference.dtype) + difference[:, None]).astype(leaf.dtype)
        return jnp.where(is_taken, moved, rows).reshape(-1)[: leaf.size].reshape(leaf.shape)

    leaves, structure = jax.tree.flatten(params)
    pairs = enumerate(zip(leaves, jax.tree.leaves(differences), strict=True))
    return jax.tree.unflatten(structure, [added(leaf, difference, keys[n]) for n, (leaf, difference) in pairs])


def _rows(leaf: jax.Array, num_parts: int) -> jax.Array:
    return jnp.pad(leaf.reshape(-1), (0, -leaf.size % num_parts)).reshape(-1, num_parts)


def _columns(key: jax.Array, num_rows: int, part: jax.Array, num_parts: int) -> jax.Array:
    """Returns the column of each row that is in a part.

    The first columns are hashes of the rows' numbers (the last steps of MurmurHash3), and not JAX's random numbers,
    whose bits go by its configuration: a checkpoint has averages under way.
    """
    mixed = jnp.arange(num_rows, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1) ^ key
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    mixed ^= mixed >> jnp.uint32(16)
    columns = (mixed % jnp.uint32(num_parts) + part.astype(jnp.uint32)) % jnp.uint32(num_parts)
    return columns.astype(jnp.int32)
