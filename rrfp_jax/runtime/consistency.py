"""Checks that all ranks compute the same: the same programs, the same state, and the same results.

Programs: the processes that share a stage compare their programs twice. Before they are compiled
(:func:`planned_work`): if a program spans several processes with GPUs, these time its kernels together while they
compile it, and wait for each other, under a key that is made of the program. Of two that differ, each would wait for
hours without a word. XLA could let each process time for itself (``--xla_gpu_shard_autotuning=false``), but then they
would choose different kernels: the same sum would differ in its last bits from device to device, and collectives might
be put in different orders. Once they are compiled (:func:`shared_work`): do all run the same collectives in the
same order?

State (:func:`check_same_state`): all copies of a parameter, and of an optimizer state, must have the same bits.
Replicas of a stage add up their gradients and are not brought together otherwise, so a difference stays for ever,
without a word. It is looked for before the first step, and before each save, where it tells of a device that has
computed wrongly. Devices that hold the same part of the same array must agree: in other replicas, in other
processes of a unit, and on other stages if layers are tied. Each device adds up a hash of every element that it holds,
made of the element's bits and its place, so only numbers go through the host and the network. That is one pass over an
accelerator's memory; on CPU devices a core takes about 2.5 s for a gigabyte.

In both checks the processes gather digests first, and details only if two digests differ; the first difference is the
error, with its ranks, in every process.

Results (:func:`result_difference`): a step that verifies runs one microbatch on all replicas, forward and backward,
under the same number and so with the same random keys. The same programs on devices of the same kind then make the
same bits. Each unit adds up its outputs, its input gradients and its gradients before R, by the same hash. The first
difference in the order of the data's way, forwards along the chunks and then back, is where a fault begins; later ones
follow from it. A verification says nothing of the steps in between, nor of R and U, whose faults show in the state.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.layout import name_unit
from rrfp_jax.programs.chunk import trained_specs
from rrfp_jax.programs.compiled import Variant
from rrfp_jax.programs.program_text import joint_work
from rrfp_jax.programs.shapes import accumulator_spec, describe_chunk, holders, pick, spec_of
from rrfp_jax.programs.shardings import all_passing, spread, unit_shardings
from rrfp_jax.programs.stage_devices import shards_of
from rrfp_jax.programs.state import layer_groups
from rrfp_jax.programs.update_functions import update_function
from rrfp_jax.runtime.model import HostedModel, HostedPrograms, HostedState, Plans
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.transports.edges import is_on_host

_Work = Mapping[str, Mapping[str, str]]
"""By the name of a unit or stage, the joint work of its processes: texts by name."""
_Sums = dict[str, dict[str, int]]
"""The sums of parts of arrays. A group is a stage or tied layer together with a part such as "0 to 1/2 of dimension 1";
for each of its arrays it has the sum of this part."""
_BLOCK = 1 << 20
"""Approximate number of elements that the host hashes at a time: the values in between take several times their
bytes."""
_REMEDY = (
    "all copies must start from the same bits: let init depend on its key alone (a generator of NumPy needs a seed), "
    "and give all processes the same settings of JAX and the same state to go on from"
)

_HOST_MEMORY = ("pinned_host", "unpinned_host")


def check_same_work(process: Process, work: Iterable[tuple[str, dict[str, str]]], name: str) -> None:
    """Raises ValueError, in every process, if two of them have different texts; narrows the difference down to a line
    of one text. All processes call it.

    Args:
        work: by the name of a unit or stage, the joint work of its processes: texts by name. Made only where a stage
            spans processes.
        name: the name of the whole of it: plans, or programs.
    """
    if process.cluster is None or not process.cluster.together or not process.layout.needs_collectives():
        return
    own = dict(work)
    whole = {where: {"": _digest(texts)} for where, texts in own.items()}
    if _difference(process.gather(f"digests of {name}", whole)) is None:
        return
    titles = {where: {title: _digest(text) for title, text in texts.items()} for where, texts in own.items()}
    found = _difference(process.gather(f"digests of each of the {name}", titles))
    assert found is not None
    where, title, ranks = found
    texts = process.gather(f"a text of {name}", own[where].get(title) if process.rank in ranks else None)
    lines = [(texts[rank] or "").split("\n") for rank in ranks]
    most = max(map(len, lines))
    number = next((n for n in range(most) if lines[0][n : n + 1] != lines[1][n : n + 1]), 0)
    shown = []
    for rank, own_lines in zip(ranks, lines, strict=True):
        value = own_lines[number].strip() if texts[rank] is not None and number < len(own_lines) else None
        if value is not None:
            value = f"{value[:160]}..." if len(value) > 160 else value or "without collectives"
        shown.append(f"{value or 'missing'} on rank {rank}")
    at = f"{title}, line {number + 1} of its text," if most > 1 else title
    raise ValueError(
        f"rank {ranks[1]} and rank {ranks[0]} share {where}, and would wait for each other for ever: {at} is "
        f"{shown[1]} and {shown[0]}; give all processes the same model, partition and packages"
    )


def planned_work(model: HostedModel, planned: Plans) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the traced programs and rules of units and stages that several processes share."""
    layout = model.process.layout
    for unit in model.process.units:
        if len(layout.ranks_of(unit)) > 1:
            replica = layout.replica_of(unit)
            device = model.process.own_device(unit)
            kind = f"{device.device_kind} ({' '.join(device.client.platform_version.split())})"
            work = {"the kind of its devices": kind}
            seen: set[Hashable] = set()
            for base in _chunks_of(model, unit):
                work |= _lowered(model, base, replica, planned[base], seen)
            yield f"stage {layout.stage_of(unit)}, replica {replica}", work
    for stage in {layout.stage_of(unit) for unit in model.process.units}:
        if len(layout.ranks_of_stage(stage)) > 1:
            bases = [base for base in model.base_chunks if model.placement.stage_of_chunk[base] == stage]
            yield (
                f"stage {stage}",
                {"rules of updates": str(model.updates)}
                | {title: text for base in bases for title, text in _lowered_updates(model, base)},
            )


def _lowered(
    model: HostedModel, base: int, replica: int, variants: Sequence[Variant], seen: set[Hashable]
) -> dict[str, str]:
    """Returns the placement of a chunk's parameters and its traced programs, except those that an earlier chunk has
    too."""
    chunk, boundary = model.chunks[base], model.grids[model.placement.stage_of_chunk[base]].unit_sharding(replica)
    shardings = unit_shardings(model.chunks, base, boundary)
    work = {
        f"{chunk.name}, parameter {jax.tree_util.keystr(path)}": str(spec)
        for path, spec in jax.tree.leaves_with_path(shardings.partition)
    }
    for number, variant in enumerate(variants):
        plan = variant.plan
        params = chunk.own.to_own(spread(variant.shapes.params, shardings.params))
        kind = (plan.kind, *(spec.sharding for spec in jax.tree.leaves(params)))
        if kind not in seen:
            seen.add(kind)
            passing = (plan.operands, plan.output_grads)
            specs = (params, *spread(passing, all_passing(boundary, passing)))
            title = f"{chunk.name}, forward and backward" + (f" ({number})" if number else "")
            work[title] = jax.jit(plan.forward_and_backward).lower(*specs).as_text()
    return work


def _lowered_updates(model: HostedModel, base: int) -> Iterator[tuple[str, str]]:
    chunk = model.chunks[base]
    params, update = spec_of(trained_specs(chunk)), jax.jit(update_function(model.optimizer, chunk.sign_rates))
    for group in layer_groups(chunk, params):
        own = pick(params, group)
        state = jax.eval_shape(model.optimizer.init, own)
        scalars = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.bool_)
        text = update.lower(own, state, accumulator_spec(own), *scalars).as_text()
        yield f"{chunk.name}, update {', '.join(group)}", text


def _chunks_of(model: HostedModel, unit: int) -> list[int]:
    layout, stage_of = model.process.layout, model.placement.stage_of_chunk
    replica = layout.replica_of(unit)
    return [
        base for base in model.base_chunks if stage_of[base] == layout.stage_of(unit) and replica in model.numbers(base)
    ]


def shared_work(model: HostedModel, programs: HostedPrograms) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the collectives of units that several processes share, and of replicas of a stage that lie in several."""
    layout, stage_of = model.process.layout, model.placement.stage_of_chunk
    for unit in model.process.units:
        if len(layout.ranks_of(unit)) > 1:
            replica = layout.replica_of(unit)
            work: dict[str, str] = {}
            for base in _chunks_of(model, unit):
                chunk = programs.chunks[model.numbers(base)[replica]]
                work |= joint_work(chunk.chunk.name, chunk.compiled)
            yield f"stage {layout.stage_of(unit)}, replica {replica}", work
    for stage in {layout.stage_of(unit) for unit in model.process.units}:
        if len(layout.ranks_of_stage(stage)) > 1 and programs.replicas:
            work = {}
            for base in model.base_chunks:
                if stage_of[base] == stage:
                    work |= joint_work(model.chunks[base].name, programs.replicas[base].compiled)
            yield f"the replicas of stage {stage}", work


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _difference(told: Mapping[int, _Work]) -> tuple[str, str, tuple[int, int]] | None:
    """Returns the first unit or stage in which two processes differ, the name of the text, and the two ranks; None if
    there is no difference."""
    first: dict[str, tuple[int, Mapping[str, str]]] = {}
    for rank, work_of_rank in told.items():
        for where, work in work_of_rank.items():
            known_rank, known = first.setdefault(where, (rank, work))
            different = next((each for each in [*known, *work] if known.get(each) != work.get(each)), None)
            if different is not None:
                return where, different, (known_rank, rank)
    return None


class _Part(NamedTuple):
    """The part of an array that one device holds."""

    owner: str
    """The stage and chunk, or the tied layer, that the array belongs to."""
    array: str
    data: jax.Array | np.ndarray
    where: str
    """The place of the part in the array, in a form that is the same for arrays of any shape that are cut alike."""


def check_same_state(model: HostedModel, state: HostedState, step: int) -> None:
    """Raises ValueError, in every process, if copies differ, or if processes have counted different numbers of steps.

    All processes call this function. It waits for the state's arrays.
    """
    if (found := state_difference(model, state, step)) is not None:
        raise ValueError(f"{found}; {_REMEDY}")


def state_difference(model: HostedModel, state: HostedState, step: int) -> str | None:
    """Returns the first difference between copies, or of the numbers of steps, in words; None if there is none.

    All processes call this function, and get the same. It waits for the state's arrays.
    """
    process = model.process
    own = _sums(model, state)
    digests = {place: {group: _digest(sums) for group, sums in groups.items()} for place, groups in own.items()}
    told = process.gather("digests of the state", {"step": step, "digests": digests})
    steps = {each["step"]: rank for rank, each in sorted(told.items(), reverse=True)}
    if len(steps) > 1:
        (one, first), (other, second) = sorted(steps.items(), key=lambda each: each[1])[:2]
        return f"rank {second} goes on after {other} steps and rank {first} after {one}"
    known, differing = dict[str, str](), set[str]()
    for each in told.values():
        for groups in each["digests"].values():
            differing |= {name for name, value in groups.items() if known.setdefault(name, value) != value}
    if differing:
        suspect = {place: {g: sums for g, sums in groups.items() if g in differing} for place, groups in own.items()}
        return _first_difference(process.gather("sums of the state", suspect))
    return None


def _first_difference(told: Mapping[int, Mapping[str, _Sums]]) -> str | None:
    """Returns the first array of which two places hold different bits, and the number of further ones; None: none does.

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
    if not found:
        return None
    more = f", as {len(found) - 1} more arrays do" if len(found) > 1 else ""
    return f"{next(iter(found.values()))}{more}"


def _sums(model: HostedModel, state: HostedState) -> dict[str, _Sums]:
    """Returns the sums of all parts that may have copies elsewhere, by place (a chunk of a replica, on this rank)."""
    layout, rank = model.process.layout, model.process.rank
    found: dict[str, _Sums] = {}
    for number, held in state.chunks.items():
        base, replica = model.copies.base(number), model.copies.replica(number)
        stage, chunk = model.placement.stage_of_chunk[base], model.chunks[base]
        # Replicas with parameters of their own add up by messages, so that each unit lies in one process.
        has_copies = model.updates.sparse is None and (layout.data > 1 or len(layout.ranks_of_stage(stage)) > 1)
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
            for place, entry in enumerate(kept):  # A group for each, since a share is not held everywhere.
                parts += _parts(f"stage {stage}, chunk {base}, entry {place}", about, {place: entry})
        of_replica = f" of replica {replica}" if layout.data > 1 else ""
        groups = found.setdefault(f"chunk {base}{of_replica} on rank {rank}", {})
        for part, value in zip(parts, _sums_of(parts)(), strict=True):
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


def _sums_of(parts: Sequence[_Part]) -> Callable[[], list[int]]:
    """Begins to add up each part, on the device if that computes apart from the host; returns a function that returns
    the sums."""
    sums: list[Any] = [None] * len(parts)
    by_device: dict[jax.Device, list[int]] = {}
    for index, part in enumerate(parts):
        data = part.data
        if isinstance(data, np.ndarray) or is_on_host(data.sharding) or data.sharding.memory_kind in _HOST_MEMORY:
            sums[index] = sum_on_host(np.asarray(part.data))
        else:
            by_device.setdefault(next(iter(data.devices())), []).append(index)
    begun = [(there, sums_on_device([parts[index].data for index in there])) for there in by_device.values()]
    for _, added in begun:
        added.copy_to_host_async()

    def take() -> list[int]:
        for there, added in begun:
            for index, value in zip(there, np.asarray(added), strict=True):
                sums[index] = int(value)
        return sums

    return take


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


# -- results -----------------------------------------------------------------------------------------------------------

OUTPUTS, INPUT_GRADIENTS, GRADIENTS = range(3)
"""The results of tasks that a verification compares, in the order of the data's way."""
_RESULTS = ("outputs", "input gradients", "parameter gradients")


class ResultSum(NamedTuple):
    """The sum of a result that a task of a verification has made, as far as it lies in this process."""

    unit: int
    result: int
    kind: str
    """The kind of the task."""
    chunk: int
    """The chunk's number in the model."""
    number: int
    """Number of copies of the microbatch of which gradients are added up; units that adopt others' have several."""
    value: int


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a verification, the same in all processes."""

    difference: str | None
    """The first difference between results, in words; None: all agree."""
    stop: bool
    """Whether a process has asked to end the run."""
    save: bool
    """Whether it is time to save the state; said once, in this step or in another."""


def begin_sum(values: Any) -> Callable[[], int]:
    """Begins to add up the bits of a tree's arrays, which may be taken over once this returns; returns a function that
    returns a sum of all parts that this process holds."""
    take = _sums_of([*_parts("", "", values)])
    return lambda: crc32(np.array(take(), np.uint32).tobytes())


def result_difference(process: Process, own: Iterable[ResultSum]) -> str | None:
    """Returns the first difference between results of the same tasks, in words; None if there is none.

    ``own`` are those of the units hosted here. All processes call this function, and get the same.
    """
    layout = process.layout
    kinds = [[unit, process.own_device(unit).device_kind] for unit in process.units]
    told = process.gather("sums of results", [kinds, [[*each] for each in own]])
    kind_of = {unit: kind for of_rank, _ in told.values() for unit, kind in of_rank}
    found: dict[tuple[Any, ...], dict[int, set[int]]] = {}
    for rank, (_, sums) in told.items():
        for each in (ResultSum(*row) for row in sums):
            way = each.chunk if each.result == OUTPUTS else -each.chunk
            member = layout.ranks_of(each.unit).index(rank)
            place = (each.result != OUTPUTS, way, each.result, each.number, member, f"{each.chunk}{each.kind}")
            found.setdefault(place, {}).setdefault(each.unit, set()).add(each.value)
    different = [place for place in sorted(found) if len(set[int]().union(*found[place].values())) > 1]
    if not different:
        return None
    place = different[0]
    values, what = found[place], f"{_RESULTS[place[2]]} in task {place[-1]}"

    def named(units: Iterable[int]) -> str:
        return " and ".join(
            f"{name_unit(unit, layout.num_stages if layout.data > 1 else None)} "
            f"({name_ranks(layout.ranks_of(unit))}, {kind_of[unit]})"
            for unit in sorted(units)
        )

    if unsteady := [unit for unit, own_values in values.items() if len(own_values) > 1]:
        return f"{named(unsteady)} made different {what} of the same inputs"
    (value, most), *_ = Counter(value for own_values in values.values() for value in own_values).most_common()
    if 2 * most > len(values):
        wrong = [unit for unit, own_values in values.items() if value not in own_values]
        return f"{named(wrong)} made other {what} than the {most} other replicas"
    return f"{named(values)} made different {what} of the same inputs"
