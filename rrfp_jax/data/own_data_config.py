"""A data set of one's own, named by where it is found: a validated record, pure data."""

from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.data.held_out import A_FRACTION
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields


@dataclass(frozen=True, kw_only=True)
class OwnDataConfig:
    """A data set of one's own: anything with a length and elements by number, such as a ``grain.MapDataset``.

    Raises ValueError, with the remedy, for values that do not describe one.
    """

    object: str
    """The data set as ``package.module:NAME``, or a callable that returns it. Modules of the current folder are found
    too."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the callable, by name."""
    batch_size: int
    """Elements per step, over all microbatches."""
    num_microbatches: int
    """Equal parts into which a step's elements are cut; divides ``batch_size``."""
    pack: bool = False
    """Whether elements have ``positions`` and ``segments``, and attention stays within a segment."""
    shuffle: bool = True
    """Whether every epoch is in another order; if not, elements come by their numbers, for a data set that has shuffled
    itself."""
    held_out: float = 0.0
    """Fraction of the elements, those with the highest numbers, that are never trained on but kept for evaluation."""
    seed: int = 0
    """Decides the order of the elements."""
    max_bad_samples: int = 0
    """Number of unreadable or unfitting elements that are left out before the run saves and ends."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "batch_size", "num_microbatches")
        check_fields(self, NOT_NEGATIVE, "seed", "max_bad_samples")
        check_fields(self, A_FRACTION, "held_out")
        module, colon, name = self.object.partition(":")
        if not (module and colon and name and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))):
            raise ValueError(f"object is {self.object!r}: give package.module:NAME, for example my_data:Corpus")
        if self.batch_size % self.num_microbatches:
            larger = self.batch_size + -self.batch_size % self.num_microbatches
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.num_microbatches} microbatches: "
                f"give num_microbatches that divides it, or batch_size {larger}"
            )

    @property
    def microbatch_size(self) -> int:
        """Elements per microbatch."""
        return self.batch_size // self.num_microbatches
