"""What the programs of a chunk do together with other processes, as short texts that two processes can compare.

The devices of a unit must enter the same collectives in the same order, or all of them wait for ever. Every process
compiles for itself, so that another version, another partition or another model on one of them goes unnoticed until
then.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.stages import Compiled

_COLLECTIVE = re.compile(
    r"= (?P<shape>.+?) (?P<op>(?:ragged-)?all-(?:gather|reduce|to-all)|reduce-scatter|collective-(?:permute|broadcast))"
    r"(?:-start)?\([^)]*\)(?P<how>.*)"
)
_OF_NO_MATTER = re.compile(
    r", (?:channel_id=\d+|metadata=\{.*|to_apply=\S+|backend_config=\{.*|frontend_attributes=\{.*)"
)


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
