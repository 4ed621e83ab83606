"""Checks that the meshes of a configuration's stages fit its model and its data, before JAX is loaded."""

import difflib
import logging
from collections.abc import Mapping
from math import prod

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR, Axes, describe_axes
from rrfp_jax.models.cuts import check_divides, check_size

_log = logging.getLogger(__name__)

_KNOWN = (TENSOR, FSDP, EXPERT, CONTEXT)
_ROWS = (FSDP, EXPERT)
"""The axes over which the rows of a microbatch are cut."""


def check_meshes(config: TrainConfig) -> None:
    """Raise ValueError for an axis over which nothing is cut, and where layers, experts, rows or positions do not
    divide. Warns of axes in an order that costs time.

    Only data whose microbatches all have the same rows are looked at. Where samples are packed, the rows of some
    microbatches may divide and those of others not; the latter are whole on every device.
    """
    layout = config.pipeline
    mesh = layout.mesh or {}
    _check_names(mesh, "mesh")
    check_divides(config.model, mesh.get(TENSOR, 1), mesh.get(EXPERT, 1))
    if config.vision is not None:
        of_encoder = layout.encoder_mesh or mesh
        _check_names(of_encoder, "encoder_mesh")
        check_size("vision.mlp_dim", config.vision.mlp_dim, of_encoder.get(TENSOR, 1))
    if config.row_length is not None:
        _check_rows(mesh, config.data.microbatch_size, config.data.num_microbatches)
        _check_positions(mesh, config.row_length)


def _check_names(mesh: Mapping[str, int], key: str) -> None:
    odd = next((name for name, size in mesh.items() if name not in _KNOWN and size > 1), None)
    if odd is not None:
        near = difflib.get_close_matches(odd, _KNOWN, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{key} has an axis {odd!r}, over which nothing of this model is cut: {meant}take {', '.join(_KNOWN[:-1])} "
            f"or {_KNOWN[-1]}"
        )
    inner = [name for name, size in mesh.items() if size > 1]
    if TENSOR in inner[1:]:
        # every layer adds up its activations over tensor, and the order of the keys says which devices do it together
        _log.warning(
            "%s names %s after %s, so devices that are no neighbours, on several hosts perhaps, add up the activations "
            "of every layer: name %s first",
            *(key, TENSOR, " and ".join(inner[: inner.index(TENSOR)]), TENSOR),
        )


def _check_rows(mesh: Mapping[str, int], num_rows: int, num_microbatches: int) -> None:
    cut = _axes(mesh, *_ROWS)
    num_parts = prod(size for _, size in cut)
    if num_rows % num_parts:
        larger = (num_rows + -num_rows % num_parts) * num_microbatches
        raise ValueError(
            f"a microbatch has {num_rows} {'row' if num_rows == 1 else 'rows'} (batch_size / num_microbatches), which "
            f"{'does' if num_rows == 1 else 'do'} not divide over {describe_axes(cut)}: give batch_size {larger}, "
            "fewer microbatches, or smaller axes"
        )


def _check_positions(mesh: Mapping[str, int], length: int) -> None:
    ((_, size),) = _axes(mesh, CONTEXT) or ((CONTEXT, 1),)
    if length % size:
        raise ValueError(
            f"length {length} does not divide over {CONTEXT} {size}: give length {length + -length % size}, or a size "
            f"of {CONTEXT} that divides {length}"
        )


def _axes(mesh: Mapping[str, int], *names: str) -> Axes:
    """Returns the axes with these names that the mesh has, with their sizes."""
    return tuple((name, size) for name, size in mesh.items() if name in names)
