"""How samples of different sizes become microbatches: a validated record, pure data."""

from dataclasses import dataclass

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How samples of different sizes become microbatches.

    Raises ValueError, with the remedy, for values that do not fit together.
    """

    batch_size: int
    """Samples per step, over all microbatches."""
    num_microbatches: int
    """Parts into which a step's samples are divided; divides ``batch_size``."""
    pack: bool = True
    """Whether samples share rows, each attending to itself alone; if not, every sample has a row of its own."""
    length: int | None = None
    """Tokens per row, the most a sample may have; None: as many as the longest sample can have. Without ``pack`` the
    lengths of rows are multiples of 8."""
    image_length: int | None = None
    """Patches per row, the most an image may have; None: as many as the largest image can have."""
    text_buckets: int = 3
    """At most so many sizes of text: numbers of rows with ``pack``, else lengths of rows."""
    image_buckets: int = 3
    """At most so many numbers of rows of patches, besides none."""
    balance: bool = True
    """Whether samples are divided so that microbatches, and the shares of replicas, cost about the same; if not, in
    order. The samples of a step are the same."""
    gather_text: bool = False
    """Whether samples without images share microbatches as far as they go, so that encoders have nothing to do for
    those. Needs ``balance``."""
    seed: int = 0
    """Decides the order of the data, or the samples that are drawn."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            AT_LEAST_1,
            *("batch_size", "num_microbatches", "length", "image_length", "text_buckets", "image_buckets"),
        )
        check_fields(self, NOT_NEGATIVE, "seed")
        if self.gather_text and not self.balance:
            raise ValueError("gather_text divides samples by their costs: give balance true, or leave gather_text out")
        if self.batch_size % self.num_microbatches:
            larger = self.batch_size + -self.batch_size % self.num_microbatches
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.num_microbatches} microbatches: "
                f"give num_microbatches that divides it, or batch_size {larger}"
            )

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch, on average where they are balanced."""
        return self.batch_size // self.num_microbatches
