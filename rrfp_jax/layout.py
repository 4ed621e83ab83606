"""The layout of a run: stages, replicas and the devices of each, dealt out to ranks in order.

A *unit* is one replica of one stage: a stage of its own with an arbiter of its own, on the devices of a mesh with named
axes, ``tensor`` and others. Devices are numbered with the first of these axes innermost, then data, then stages (or
stages, then data, ``by_replica``), and dealt out to the ranks (processes) in that order, the same number to each. So a
rank may host several units, and a unit may span several ranks, which then form its *group*.

Control messages travel along a tree over places 0 to n - 1, the ranks of a run or of a group, with place 0 as the root.
With degree d the children of place i are ``d * i + 1`` to ``d * i + d``, as in a heap. So every place computes its
neighbours from its own number, has at most d + 1 of them, and a message passes at most log_d(n) places each way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import prod
from operator import mul
from typing import Any

from rrfp_jax.field_rules import AT_LEAST_1, check_fields, check_types
from rrfp_jax.readable import shown

TENSOR, FSDP, EXPERT, CONTEXT = "tensor", "fsdp", "expert", "context"
"""Axes whose names have a meaning: see :mod:`rrfp_jax.programs.shardings`."""
_RESERVED = ("data", "stage")
"""Axes of the pipeline itself."""

_MOST_DEVICES = 1 << 16

Axes = tuple[tuple[str, int], ...]
"""Names and sizes, innermost first: neighbours along the first one are neighbouring devices."""


def checked_axes(mesh: Mapping[str, int]) -> Axes:
    """The axes of a mesh that was given as a mapping, innermost first.

    Raises ValueError for a name that is none or stands for something else, and for sizes below 1.
    """
    for name, size in mesh.items():
        if not name.isidentifier() or name in _RESERVED:
            raise ValueError(
                f"mesh has an axis {name!r}: take another name, for example {TENSOR}, {FSDP}, {EXPERT} or {CONTEXT}; "
                f"{' and '.join(_RESERVED)} are the pipeline's own"
            )
        if size < 1:
            raise ValueError(f"mesh has {size} devices along {name}: give at least 1")
        if size > _MOST_DEVICES:
            raise ValueError(f"mesh has {shown(size)} devices along {name}: give at most {_MOST_DEVICES}")
    return tuple(mesh.items())


def other_axes(mesh: Mapping[str, int] | None) -> dict[str, int]:
    """Returns the axes of a mesh that have several devices and share no matrices."""
    return {name: size for name, size in (mesh or {}).items() if name != TENSOR and size > 1}


def with_tensor(mesh: Mapping[str, int] | None, tensor: int) -> dict[str, int]:
    """The mesh with so many devices along ``tensor``, which is innermost where it was not named."""
    named = {TENSOR: tensor} if mesh is None or TENSOR not in mesh else {}
    return named | {name: tensor if name == TENSOR else size for name, size in (mesh or {}).items()}


def spans(mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns for each axis the number of neighbouring devices over which its groups stretch."""
    return dict(zip(mesh, accumulate(mesh.values(), mul), strict=True))


def num_devices(axes: Axes) -> int:
    """Returns the number of devices of a mesh with these axes."""
    return prod(size for _, size in axes)


def check_device_order(order: Sequence[int], number: int, unit_size: int) -> None:
    """Raises ValueError unless these are all devices of a run, once each, those of a unit in a row."""
    if sorted(order) != [*range(number)]:
        raise ValueError(
            f"devices {shown(','.join(map(str, order)))} are no order of {number} devices: name each of 0 to "
            f"{number - 1} once, in the order in which stages take them"
        )
    for first in range(0, number, unit_size):
        own = tuple(order[first : first + unit_size])
        if own != tuple(range(own[0], own[0] + unit_size)):
            raise ValueError(
                f"devices {', '.join(map(str, own))} would share a stage, which needs {unit_size} that follow each "
                "other: name such ones in a row"
            )


def describe_axes(axes: Axes) -> str:
    """Returns the axes in words, as ``tensor 2 x fsdp 4``; where all have one device, the first one alone."""
    shown = [axis for axis in axes if axis[1] > 1] or list(axes[:1])
    return " x ".join(f"{name} {size}" for name, size in shown)


def with_axes_in_order(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain data of a section ``pipeline`` with its meshes as lists: meshes with axes in another order are
    other meshes, though mappings of the same entries are equal."""
    meshes = {name: mesh for name in ("mesh", "encoder_mesh") if (mesh := pipeline.get(name)) is not None}
    return {**pipeline, **{name: [list(axis) for axis in mesh.items()] for name, mesh in meshes.items()}}


def name_unit(unit: int, num_stages: int | None) -> str:
    """Returns a unit in words: ``stage 1, replica 0``; without replicas (None) units are stages, ``stage 1``."""
    if num_stages is None:
        return f"stage {unit}"
    return f"stage {unit % num_stages}, replica {unit // num_stages}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of parallelism and the number of processes. Raises ValueError where they do not fit together."""

    num_stages: int
    data: int = 1
    """Replicas of the whole pipeline, each with its own share of the microbatches."""
    tensor: int = 1
    """Devices that share each layer of a stage: a mesh of this axis alone, or the one in ``mesh``."""
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] = ()
    """All axes over the devices of a unit with their sizes, innermost first; where stages have different ones, those of
    each stage, of equally many devices; empty: ``tensor`` alone."""
    num_ranks: int = 1
    """Number of processes."""
    by_replica: bool = False
    """Whether neighbouring ranks hold the stages of a replica, so that a lost host takes as few replicas of each stage
    as can be; else they hold the replicas of a stage, whose collectives then stay within a host."""
    order: tuple[int, ...] = ()
    """All devices in the order in which units take them, those of a unit in a row; empty: by their numbers."""
    replicas: tuple[int, ...] = ()
    """The replicas of each stage where some have fewer than ``data``, the others; empty: all have as many."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, AT_LEAST_1, "num_stages", "data", "tensor", "num_ranks")
        if self.mesh and self.tensor > 1:
            raise ValueError(f"tensor is {self.tensor} beside a mesh: give it in mesh alone")
        if len(self.axes_of_stage) != self.num_stages:
            raise ValueError(
                f"{len(self.axes_of_stage)} meshes are given for {self.num_stages} stages: give one for each"
            )
        sizes = [num_devices(axes) for axes in self.axes_of_stage]
        odd = next((stage for stage, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            raise ValueError(
                f"stage 0 has {describe_axes(self.axes_of_stage[0])}, {sizes[0]} devices, and stage {odd} "
                f"{describe_axes(self.axes_of_stage[odd])}, {sizes[odd]}: give all stages equally many"
            )
        if self.replicas and (len(self.replicas) != self.num_stages or min(self.replicas) < 1):
            raise ValueError(
                f"replicas are {shown(self.replicas)}: give 1 or more for each of {self.num_stages} stages"
            )
        if self.replicas and max(self.replicas) != self.data:
            raise ValueError(
                f"data is {self.data}, and stages have up to {(most := max(self.replicas))} replicas: give data {most}"
            )
        if self.num_devices % self.num_ranks:
            raise ValueError(
                f"{self.num_stages} stages x {self._data_in_words} x {self.axes} need {self.num_devices} devices, "
                f"which cannot be dealt out evenly to {self.num_ranks} processes: start a number of processes that "
                f"divides {self.num_devices}"
            )
        if self.order:
            check_device_order(self.order, self.num_devices, self.unit_size)

    @property
    def num_units(self) -> int:
        """Number of units, also of those that are absent."""
        return self.num_stages * self.data

    @cached_property
    def absent(self) -> tuple[int, ...]:
        """The units that no device holds, as their stages have fewer replicas than others; ascending."""
        if not self.replicas:
            return ()
        units = range(self.num_units)
        return tuple(unit for unit in units if self.replica_of(unit) >= self.replicas[self.stage_of(unit)])

    @cached_property
    def axes_of_stage(self) -> tuple[Axes, ...]:
        """The axes over the devices of each stage's units, innermost first."""
        mesh = self.mesh or {TENSOR: self.tensor}
        return tuple(map(checked_axes, [mesh] * self.num_stages if isinstance(mesh, Mapping) else mesh))

    @property
    def unit_size(self) -> int:
        """Devices of a unit."""
        return num_devices(self.axes_of_stage[0])

    @property
    def axes(self) -> str:
        """The axes of all stages, for messages."""
        return " or ".join(dict.fromkeys(map(describe_axes, self.axes_of_stage)))

    @property
    def num_devices(self) -> int:
        return (self.num_units - len(self.absent)) * self.unit_size

    @property
    def devices_per_rank(self) -> int:
        return self.num_devices // self.num_ranks

    def unit(self, stage: int, replica: int) -> int:
        """The number of a unit; replica 0 comes first, so that without data parallelism units are stages."""
        return replica * self.num_stages + stage

    def stage_of(self, unit: int) -> int:
        return unit % self.num_stages

    def replica_of(self, unit: int) -> int:
        return unit // self.num_stages

    @property
    def stages_of_replica(self) -> int | None:
        """Number of stages of each replica, for :func:`name_unit`; None if there is only one replica."""
        return self.num_stages if self.data > 1 else None

    def devices_of(self, unit: int) -> tuple[int, ...]:
        """The global numbers of a unit's devices, the first axis of its mesh innermost; none of one that is absent."""
        if unit in self.absent:
            return ()
        first = self._place_of[unit] * self.unit_size
        if self.order:
            return self.order[first : first + self.unit_size]
        return tuple(range(first, first + self.unit_size))

    def rank_of_device(self, device: int) -> int:
        return device // self.devices_per_rank

    def ranks_of(self, unit: int) -> tuple[int, ...]:
        """The ranks that hold a unit's devices, ascending; the first one leads the group."""
        return self._ranks_of[unit]

    def units_of(self, rank: int) -> tuple[int, ...]:
        """The units of which a rank holds devices, ascending."""
        return tuple(unit for unit in range(self.num_units) if rank in self._ranks_of[unit])

    def units_of_stage(self, stage: int) -> tuple[int, ...]:
        """All replicas of a stage."""
        return tuple(self.unit(stage, replica) for replica in range(self.data))

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold devices of any replica of a stage, ascending."""
        return tuple(sorted({rank for unit in self.units_of_stage(stage) for rank in self._ranks_of[unit]}))

    def needs_collectives(self, *, sums_by_messages: bool = False) -> bool:
        """Returns whether some program runs over devices of several processes: those of a unit, or those of all
        replicas of a stage, unless these add up their gradients by messages."""
        if sums_by_messages:
            return any(len(self.ranks_of(unit)) > 1 for unit in range(self.num_units))
        return any(len(self.ranks_of_stage(stage)) > 1 for stage in range(self.num_stages))

    def shared_devices(self, rank: int, num_devices: int) -> tuple[int, ...]:
        """Returns, for each device that the layout asks of a rank, the one of its ``num_devices`` that stands for it.

        Where these are fewer, stages share them evenly, consecutive ones together; the devices of one stage are apart.
        Raises ValueError where they are too few even for that.
        """
        wanted = range(rank * self.devices_per_rank, (rank + 1) * self.devices_per_rank)
        if num_devices >= len(wanted):
            return tuple(range(len(wanted)))
        if self.order or self.replicas:
            raise ValueError(
                f"rank {rank} has {num_devices} devices for {len(wanted)} of the run: name an order of devices, or "
                "replicas of each stage, only where stages share none"
            )
        per_stage = self.unit_size * (1 if self.by_replica else self.data)
        stages = [len(list(devices)) for _, devices in groupby(wanted, lambda device: device // per_stage)]
        num_sets = num_devices // max(stages)
        if not num_sets:
            raise ValueError(
                f"rank {rank} has {num_devices} devices, and stages may share them, but data {self.data} x "
                f"{self.axes} need {max(stages)} of their own: lower these degrees, or give more devices"
            )
        firsts = [number * num_sets // len(stages) * max(stages) for number in range(len(stages))]
        return tuple(first + i for first, size in zip(firsts, stages, strict=True) for i in range(size))

    @cached_property
    def _place_of(self) -> Mapping[int, int]:
        """The place of each unit among those that take devices in turn."""
        units = [unit for unit in range(self.num_units) if unit not in self.absent]
        if not self.by_replica:
            units.sort(key=lambda unit: (self.stage_of(unit), self.replica_of(unit)))
        return {unit: place for place, unit in enumerate(units)}

    @property
    def _data_in_words(self) -> str:
        return f"data {','.join(map(str, self.replicas)) or self.data}"

    @cached_property
    def _ranks_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(dict.fromkeys(self.rank_of_device(device) for device in self.devices_of(unit)))
            for unit in range(self.num_units)
        )

    def describe(self) -> str:
        """Returns the layout in words, as ``2 stages x data 2 x tensor 2 on 4 processes``."""
        processes = "process" if self.num_ranks == 1 else "processes"
        return f"{self.num_stages} stages x {self._data_in_words} x {self.axes} on {self.num_ranks} {processes}"


CONTROL_DEGREE = 4
"""The largest number of children of a place: a wider tree is less deep, and busier at each place."""


def parent(place: int, degree: int = CONTROL_DEGREE) -> int | None:
    """Returns the place above; None for 0, the root."""
    return (place - 1) // degree if place else None


def children(place: int, num_places: int, degree: int = CONTROL_DEGREE) -> range:
    """Returns the places right below, ascending."""
    first = degree * place + 1
    return range(min(first, num_places), min(first + degree, num_places))


@dataclass(frozen=True)
class ControlTree:
    """The place of one rank in the tree of the ranks that live: ``parent`` is None on the root, the first of them."""

    rank: int
    living: tuple[int, ...]
    """The ranks that live, those first that have been there longest."""

    @property
    def is_root(self) -> bool:
        return self.rank == self.living[0]

    @cached_property
    def parent(self) -> int | None:
        above = parent(self.living.index(self.rank))
        return None if above is None else self.living[above]

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The ranks right below, ascending."""
        return tuple(self.living[place] for place in children(self.living.index(self.rank), len(self.living)))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The rank above, if there is one, and the ranks right below."""
        return (*(() if self.parent is None else (self.parent,)), *self.children)


def whole_tree(rank: int, num_ranks: int) -> ControlTree:
    """Returns the place of a rank while all ranks live."""
    return ControlTree(rank, tuple(range(num_ranks)))
