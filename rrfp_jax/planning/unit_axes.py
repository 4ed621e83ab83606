"""The axes of a stage's mesh: their names, sizes and order."""

from collections.abc import Mapping
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from rrfp_jax.bounded_text import shown

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
    """Those of a mesh that have several devices and share no matrices."""
    return {name: size for name, size in (mesh or {}).items() if name != TENSOR and size > 1}


def with_tensor(mesh: Mapping[str, int] | None, tensor: int) -> dict[str, int]:
    """The mesh with so many devices along ``tensor``, which is innermost where it was not named."""
    named = {TENSOR: tensor} if mesh is None or TENSOR not in mesh else {}
    return named | {name: tensor if name == TENSOR else size for name, size in (mesh or {}).items()}


def spans(mesh: Mapping[str, int]) -> dict[str, int]:
    """By axis, over how many neighbouring devices its groups stretch."""
    return dict(zip(mesh, accumulate(mesh.values(), mul), strict=True))


def num_devices(axes: Axes) -> int:
    """Of a mesh with these axes."""
    return prod(size for _, size in axes)


def describe_axes(axes: Axes) -> str:
    """For messages: ``tensor 2 x fsdp 4``; of axes of one device only the first one is named."""
    shown = [axis for axis in axes if axis[1] > 1] or list(axes[:1])
    return " x ".join(f"{name} {size}" for name, size in shown)


def with_axes_in_order(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain data of a section ``pipeline`` with its meshes as lists: meshes with axes in another order are
    other meshes, though mappings of the same entries are equal."""
    meshes = {name: mesh for name in ("mesh", "encoder_mesh") if (mesh := pipeline.get(name)) is not None}
    return {**pipeline, **{name: [list(axis) for axis in mesh.items()] for name, mesh in meshes.items()}}
