"""Names of arrays in a checkpoint: the layer first, then the way to the array inside it.

A name is a tuple of texts, ``("layers.0", "params", "attention", "query")``. Stages, ranks and layouts are no part of
it, so a checkpoint fits every cut of the model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

Name = tuple[str, ...]


def name_of(path: Iterable[Any]) -> Name:
    """The name of a leaf, from its path in a pytree."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def describe(name: Name) -> str:
    """For messages: ``layers.0/params/attention/query``."""
    return "/".join(name)


def named_leaves(tree: Any) -> dict[Name, Any]:
    """The leaves of a pytree by name; raises ValueError where two have the same one."""
    named: dict[Name, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if named.setdefault(name_of(path), leaf) is not leaf:
            raise ValueError(f"two arrays have the name {describe(name_of(path))}: name them differently")
    return named


def nested(leaves: Mapping[Name, Any]) -> dict[str, Any]:
    """Named leaves as dictionaries in dictionaries, as Orbax reads and writes them.

    Orbax joins the texts of a name by dots; raises ValueError where two names become one by that.
    """
    tree: dict[str, Any] = {}
    joined: dict[str, Name] = {}
    for name, leaf in leaves.items():
        other = joined.setdefault(".".join(name), name)
        if other != name:
            raise ValueError(
                f"{describe(name)} and {describe(other)} cannot be told apart in a checkpoint, which joins names by "
                "dots: rename one"
            )
        inner = tree
        for key in name[:-1]:
            inner = inner.setdefault(key, {})
        inner[name[-1]] = leaf
    return tree
