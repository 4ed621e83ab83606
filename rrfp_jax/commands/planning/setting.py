"""Ways to run the stages of a model, for each of which costs are measured."""

from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.costs.layer_sizes import NAMES, is_known


class Setting(NamedTuple):
    """One way, by the names that :class:`rrfp_jax.costs.CostEntry` has for it."""

    microbatch_size: int
    tensor: int
    remat: str

    @property
    def words(self) -> str:
        """For progress."""
        return f"microbatch size {self.microbatch_size}, tensor {self.tensor}, remat {self.remat}"


def every_setting(sizes: Sequence[int], tensors: Sequence[int], remats: Sequence[str]) -> list[Setting]:
    """Every combination; raises ValueError for a rematerialisation that there is not."""
    unknown = [name for name in remats if not is_known(name)]
    if unknown:
        raise ValueError(f"remat is {unknown[0]!r}: give some of {', '.join(NAMES)}")
    return [Setting(size, tensor, remat) for tensor in tensors for remat in remats for size in sizes]
