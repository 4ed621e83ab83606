"""What the sizes of a microbatch are to be multiples of, so that the devices of its stages' meshes share all of it.

What does not divide is whole on every device, which then repeats the work of the others. Data whose rows are padded
anyway is padded up to these instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

from rrfp_jax.field_rules import AT_LEAST_1, check_fields
from rrfp_jax.planning.unit_axes import CONTEXT, EXPERT, FSDP

ROW_AXES = (FSDP, EXPERT)
"""The axes over which the rows of a microbatch are cut."""


@dataclass(frozen=True, kw_only=True)
class CutSizes:
    """Of what each size of a microbatch is to be a multiple."""

    rows: int = 1
    length: int = 1
    """Of rows, in tokens."""
    image_rows: int = 1
    image_length: int = 1
    """Of rows of images, in features."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "rows", "length", "image_rows", "image_length")


def rounded_up(size: int, multiple: int) -> int:
    """The least multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def row_parts(mesh: Mapping[str, int]) -> int:
    """Into how many parts the rows of a microbatch are cut on a mesh."""
    return prod(mesh.get(axis, 1) for axis in ROW_AXES)


def cut_sizes(mesh: Mapping[str, int], encoder_mesh: Mapping[str, int] | None = None) -> CutSizes:
    """Those of a decoder's stages on ``mesh``, and of an encoder's on ``encoder_mesh`` (None: the same).

    A decoder deals the positions of a sequence out in twice as many pieces as ``context`` has devices
    (:mod:`rrfp_jax.models.cuts`). Features of images pass from one mesh to the other, and are cut on both.
    """
    meshes = [mesh, mesh if encoder_mesh is None else encoder_mesh]
    context = mesh.get(CONTEXT, 1)
    return CutSizes(
        rows=row_parts(mesh),
        length=2 * context if context > 1 else 1,
        image_rows=lcm(*map(row_parts, meshes)),
        image_length=lcm(*(each.get(CONTEXT, 1) for each in meshes)),
    )
