"""Check before the first step that all copies of a parameter, and of an optimizer state, hold the same bits.

Replicas of a stage add up their gradients and are not brought together otherwise, so a difference at the start stays
for ever, without a word. All devices that hold the same part of the same array must agree: in other replicas, in other
processes of a unit, and on other stages where layers are tied.

Each device adds up a hash of every element that it holds, made of the element's bits and its place, so only numbers go
through the host and the network. That is one pass over an accelerator's memory; on CPU devices a core takes about 2.5 s
for a gigabyte. The processes tell each other a digest of each group of parts, and the sums themselves only if two
digests differ.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.shapes import describe_chunk, holders
from rrfp_jax.programs.stage_devices import shards_of
from rrfp_jax.runtime.model import HostedModel, HostedState
from rrfp_jax.runtime.transports.edges import is_on_host

_BLOCK = 1 << 20
"""Approximate number of elements that the host hashes at a time: the values in between take several times their
bytes."""
_REMEDY = (
    "all copies must start from the same bits: let init depend on its key alone (a generator of NumPy needs a seed), "
    "and give all processes the same settings of JAX and the same state to go on from"
)

_HOST_MEMORY = ("pinned_host", "unpinned_host")

Sums = dict[str, dict[str, int]]
"""The sums of parts of arrays. A group is a stage or tied layer together with a part such as "0 to 1/2 of dimension 1";
for each of its arrays it has the sum of this part."""


class _Part(NamedTuple):
    """The part of an array that one device holds."""

    owner: str
    """The stage and chunk, or the tied layer, that the array belongs to."""
    array: str
    data: jax.Array | np.ndarray
    where: str
    """The place of the part in the array, in a form that is the same for arrays of any shape that are cut alike."""


def check_same_state(model: HostedModel, state: HostedState, step: int) -> None:
    """Raise ValueError, in every process, if copies differ, or if processes have counted different numbers of steps.

    All processes call this function. It waits for the state's arrays.
    """
    process = model.process
    own = _sums(model, state)
    digests = {place: {group: _digest(sums) for group, sums in groups.items()} for place, groups in own.items()}
    told = process.gather("digests of the state", {"step": step, "digests": digests})
    steps = {each["step"]: rank for rank, each in sorted(told.items(), reverse=True)}
    if len(steps) > 1:
        (one, first), (other, second) = sorted(steps.items(), key=lambda each: each[1])[:2]
        raise ValueError(f"rank {second} goes on after {other} steps and rank {first} after {one}: {_REMEDY}")
    differing = _differing(groups for rank in sorted(told) for groups in told[rank]["digests"].values())
    if differing:
        suspect = {place: {g: sums for g, sums in groups.items() if g in differing} for place, groups in own.items()}
        _refuse_differences(process.gather("sums of the state", suspect))


def _differing(places: Iterator[Mapping[str, Any]]) -> set[str]:
    """Returns the groups for which two places hold different values."""
    first: dict[str, Any] = {}
    return {name for groups in places for name, value in groups.items() if first.setdefault(name, value) != value}


def _refuse_differences(told: Mapping[int, Mapping[str, Sums]]) -> None:
    """Raise ValueError with the first array of which two places hold different bits, and the number of further ones.

    There need not be such an array: units of several processes may hold the same part of some arrays, and not of all.
    """
    first: dict[tuple[str, str], tuple[str, int]] = {}
    found: dict[tuple[str, str], str] = {}
    for place, groups in ((place, groups) for rank in sorted(told) for place, groups in told[rank].items()):
        for group, sums in groups.items():
            owner = group.partition(",")[0]
            for array, value in sums.items():
                known_place, known = first.setdefault((group, array), (place, value))
                if known != value:
                    differs = f"differs between {known_place} (checksum {known:08x}) and {place} ({value:08x})"
                    found.setdefault((owner, array), f"{owner}: {array} {differs}")
    if found:
        more = f", as {len(found) - 1} more arrays do" if len(found) > 1 else ""
        raise ValueError(f"{next(iter(found.values()))}{more}; {_REMEDY}")


def _digest(sums: Mapping[str, int]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:32]


def _sums(model: HostedModel, state: HostedState) -> dict[str, Sums]:
    """Returns the sums of all parts that may have copies elsewhere, by place (a chunk of a replica, on this rank)."""
    layout, rank = model.process.layout, model.process.rank
    found: dict[str, Sums] = {}
    for number, held in state.chunks.items():
        base, replica = model.copies.base(number), model.copies.replica(number)
        stage, chunk = model.placement.stage_of_chunk[base], model.chunks[base]
        has_copies = layout.data > 1 or len(layout.ranks_of_stage(stage)) > 1
        tied = {name for name in chunk.shared if len(holders(model.chunks, name)) > 1}
        parts: list[_Part] = []
        for name, layer in held.params.items():
            if name in tied:
                parts += _parts(f"tied layer {name!r}", "parameter", layer)
            elif has_copies:
                parts += _parts(f"stage {stage}, chunk {base}", f"layer {name!r}, parameter", layer)
        if has_copies and (base not in state.shared or replica == min(model.numbers(base))):
            kept = state.shared.get(base, held.optimizer_state)
            about = f"optimizer state of {describe_chunk(model.chunks, base)},"
            parts += _parts(f"stage {stage}, chunk {base}", about, kept)
        of_replica = f" of replica {replica}" if layout.data > 1 else ""
        groups = found.setdefault(f"chunk {base}{of_replica} on rank {rank}", {})
        for part, value in zip(parts, _sums_of(parts), strict=True):
            groups.setdefault(f"{part.owner}, {part.where}", {})[part.array] = value
    return found


def _parts(owner: str, name: str, tree: Any) -> Iterator[_Part]:
    """Yields the parts of a tree's arrays that this process holds; a part that several of its devices hold comes
    once."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = f"{name} {jax.tree_util.keystr(path)}".rstrip()
        if not isinstance(leaf, jax.Array):  # restored states may hold NumPy arrays
            yield _Part(owner, array, np.asarray(leaf), "whole")
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)  # noqa: PLW2901 - the numbers behind the keys
        known = set[str]()
        for shard in shards_of(leaf):
            where = _where(shard.index, leaf.shape)
            if where not in known:
                known.add(where)
                yield _Part(owner, array, shard.data, where)


def _where(index: Sequence[slice], shape: Sequence[int]) -> str:
    ends = [
        (each.start or 0, size if each.stop is None else each.stop, size)
        for each, size in zip(index, shape, strict=True)
    ]
    cuts = [
        f"{Fraction(begin, size)} to {Fraction(end, size)} of dimension {axis}"
        for axis, (begin, end, size) in enumerate(ends)
        if end - begin < size
    ]
    return ", ".join(cuts) or "whole"


def _sums_of(parts: Sequence[_Part]) -> list[int]:
    """Returns the sum of each part, computed on the device if that computes apart from the host."""
    sums: list[Any] = [None] * len(parts)
    by_device: dict[jax.Device, list[int]] = {}
    for index, part in enumerate(parts):
        if isinstance(part.data, np.ndarray) or _lies_on_host(part.data.sharding):
            sums[index] = sum_on_host(np.asarray(part.data))
        else:
            by_device.setdefault(next(iter(part.data.devices())), []).append(index)
    for there in by_device.values():
        added = np.asarray(sums_on_device([parts[index].data for index in there]))
        for index, value in zip(there, added, strict=True):
            sums[index] = int(value)
    return sums


def _lies_on_host(sharding: jax.sharding.Sharding) -> bool:
    return is_on_host(sharding) or sharding.memory_kind in _HOST_MEMORY


@jax.jit
def sums_on_device(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of each array: one pass over it, without memory of its own."""
    return jnp.stack([_sum(array, 0, jnp) for array in arrays])


def sum_on_host(array: np.ndarray) -> int:
    """Returns the sum of an array by NumPy, which compiles nothing; equal to that of :func:`sums_on_device`."""
    flat = array.reshape(-1)
    blocks = (_sum(flat[begin : begin + _BLOCK], begin, np) for begin in range(0, flat.size, _BLOCK))
    return sum(map(int, blocks)) & 0xFFFFFFFF


def _sum(values: Any, begin: int, xp: Any) -> Any:
    """Returns the sum modulo 2**32 of a hash of each element's bits and of its place, counted from ``begin``.

    ``xp`` is NumPy or its namesake of JAX; all is wrapping 32-bit arithmetic.
    """
    low, high = _words(values, xp)
    place, stride = xp.full((1,) * values.ndim, begin & 0xFFFFFFFF, xp.uint32), 1
    for axis in reversed(range(values.ndim)):
        along = [-1 if other == axis else 1 for other in range(values.ndim)]
        line = xp.arange(values.shape[axis], dtype=xp.uint32).reshape(along)
        place = place + line * xp.uint32(stride & 0xFFFFFFFF)
        stride *= values.shape[axis]
    mixed = _mix(low + _mix(place + xp.uint32(0x9E3779B9), xp), xp)
    if high is not None:
        mixed = _mix(mixed + high, xp)
    return xp.sum(mixed, dtype=xp.uint32)


def _words(values: Any, xp: Any) -> tuple[Any, Any]:
    """Returns the bits of numbers as one or two 32-bit words."""
    dtype = np.dtype(values.dtype)
    if jnp.issubdtype(dtype, np.complexfloating):
        halves = _words(values.real, xp), _words(values.imag, xp)
        return tuple(low if high is None else low + _mix(high, xp) for low, high in halves)
    if jnp.issubdtype(dtype, np.floating):
        bits = np.dtype(f"uint{8 * dtype.itemsize}")
        values = values.view(bits)
    high = (values >> 32).astype(xp.uint32) if dtype.itemsize == 8 else None
    return values.astype(xp.uint32), high


def _mix(words: Any, xp: Any) -> Any:
    """Returns the finalizer of MurmurHash3: every bit of the result depends on every bit of the word."""
    words = (words ^ (words >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    words = (words ^ (words >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    return words ^ (words >> xp.uint32(16))
