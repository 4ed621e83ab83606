"""The collectives of compiled programs: as short texts that two processes can compare, and as groups of devices.

The devices of a unit must enter the same collectives in the same order, or all of them wait for ever. Every process
compiles for itself, so that another version, another partition or another model on one of them goes unnoticed until
then.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

_COLLECTIVE = re.compile(
    r"= (?P<shape>.+?) (?P<op>(?:ragged-)?all-(?:gather|reduce|to-all)|reduce-scatter|collective-(?:permute|broadcast))"
    r"(?:-start)?\([^)]*\)(?P<how>.*)"
)
_OF_NO_MATTER = re.compile(
    r", (?:channel_id=\d+|metadata=\{.*|to_apply=\S+|backend_config=\{.*|frontend_attributes=\{.*)"
)
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(?:\{(?P<listed>(?:\{[\d,]*\},?)*)\}"
    r"|\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?)"
)
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
    """Returns the groups of ``{{0,1},{2,3}}``, or the rows of an array of numbers: ``[2,2]<=[2,2]T(1,0)``."""
    if found["shape"] is None:
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found["listed"])]
        return tuple(groups) or (tuple(range(num_devices)),)
    dims = _numbers(found["dims"])
    places = np.arange(prod(dims)).reshape(dims)
    if found["order"] is not None:
        places = places.transpose(_numbers(found["order"]))
    return tuple(tuple(map(int, row)) for row in places.reshape(_numbers(found["shape"])))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def collectives(compiled: Compiled) -> tuple[str, ...]:
    """The collectives of a program in the order in which its devices enter them, each with its shape and groups."""
    found = map(_COLLECTIVE.search, (compiled.as_text() or "").splitlines())
    return tuple(f"{one['op']} {one['shape']}{_OF_NO_MATTER.sub('', one['how'])}" for one in found if one)


def joint_work(name: str, compiled: Mapping[str, Compiled], partition: Any = ()) -> dict[str, str]:
    """How the parameters of a chunk of this name lie, and the collectives of its programs, each under a name."""
    lies = {
        f"{name}, parameter {jax.tree_util.keystr(path)}": str(spec)
        for path, spec in jax.tree.leaves_with_path(partition)
    }
    return lies | {f"{name}, {title}": "; ".join(collectives(program)) for title, program in compiled.items()}
