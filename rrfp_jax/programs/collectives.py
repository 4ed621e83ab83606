"""The collectives of compiled programs: as short texts that two processes can compare, and as groups of devices.

The devices of a unit must enter the same collectives in the same order, or all of them wait for ever. Every process
compiles for itself, so that another version, another partition or another model on one of them goes unnoticed until
then.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
from jax.stages import Compiled

from rrfp_jax.programs.program_text import ProgramText

_OF_NO_MATTER = re.compile(
    r", (?:channel_id=\d+|metadata=\{.*|to_apply=[^\s,]+|backend_config=\{.*|frontend_attributes=\{.*)"
)
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(?:\{(?P<listed>(?:\{[\d,]*\},?)*)\}"
    r"|\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]+)\] \{(?P<axes>[^}]*)\})"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")
SUM, ALL_TO_ALL, PERMUTE = "sum", "all-to-all", "permute"
"""The kinds of connections: gathering and scattering use those of sums."""


class Exchange(NamedTuple):
    """Devices that are connected in one way, by their places on the mesh of a program."""

    kind: str
    """One of :data:`SUM`, :data:`ALL_TO_ALL`, :data:`PERMUTE`."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices; pairs of sender and receiver for :data:`PERMUTE`."""


def exchanges(programs: Iterable[Compiled], num_devices: int) -> list[Exchange]:
    """Returns the connections that programs on so many devices use, each once, in an order of their own."""
    found = set()
    for line in {line for program in programs for line in collectives(program)}:
        op, groups = line.partition(" ")[0], _GROUPS.search(line)
        kind = PERMUTE if op == "collective-permute" else ALL_TO_ALL if op.endswith("all-to-all") else SUM
        found.add(Exchange(kind, _groups(groups, num_devices) if groups else (tuple(range(num_devices)),)))
    return sorted(each for each in found if any(len(group) > 1 for group in each.groups))


def _groups(found: re.Match[str], num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups, however the compiler has written them.

    ``{{0,1},{2,3}}`` lists them, ``[2,2]<=[2,2]T(1,0)`` are the rows of an array of all numbers, transposed, and
    ``mesh['x'=2,'y'=2] {'y'}`` those who differ along some axes of a mesh, or along a part of one: ``'y':(1)2``.
    """
    if found["mesh"] is not None:
        rows = _along_axes(found["mesh"], found["axes"])
    elif found["shape"] is not None:
        dims, order = _numbers(found["dims"]), found["order"]
        places = np.arange(prod(dims)).reshape(dims).transpose(None if order is None else _numbers(order))
        rows = places.reshape(_numbers(found["shape"]))
    else:
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found["listed"])]
        return tuple(groups) or (tuple(range(num_devices)),)
    return tuple(tuple(map(int, row)) for row in rows)


def _along_axes(mesh: str, axes: str) -> np.ndarray:
    wanted = {axis["name"]: axis for axis in _AXIS.finditer(axes)}
    dims: list[int] = []
    at: dict[str, int] = {}
    for axis in _AXIS.finditer(mesh):
        name, size = axis["name"], int(axis["size"])
        before, part = 1, size
        if name in wanted and wanted[name]["part"] is not None:
            before, part = int(wanted[name]["before"]), int(wanted[name]["part"])
        at[name] = len(dims) + 1
        dims += [before, part, size // (before * part)]
    inner = [at[name] for name in wanted]
    outer = [dim for dim in range(len(dims)) if dim not in inner]
    return np.arange(prod(dims)).reshape(dims).transpose(*outer, *inner).reshape(-1, prod(dims[dim] for dim in inner))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def collectives(compiled: Compiled) -> tuple[str, ...]:
    """The collectives of a program in the order in which its devices enter them, each with its shape and groups."""
    found = ProgramText(compiled.as_text() or "").each_collective()
    return tuple(f"{kind} {shape}{_OF_NO_MATTER.sub('', how)}" for kind, shape, how in found)


def joint_work(name: str, compiled: Mapping[str, Compiled]) -> dict[str, str]:
    """The collectives of the programs of a chunk of this name, each under a name."""
    return {f"{name}, {title}": "; ".join(collectives(program)) for title, program in compiled.items()}
