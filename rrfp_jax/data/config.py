"""What a data set reads and how it cuts it into batches: one validated record, pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A byte-level text data set.

    Raises ValueError, with the remedy, for values that do not describe one.
    """

    path: str | None = None
    """A text file, or a folder that is searched recursively. None: the running Python's own standard library."""
    suffixes: tuple[str, ...] = (".py", ".txt", ".md", ".rst")
    """Endings of the files that are read from a folder."""
    max_bytes: int = 64 * 2**20
    """How much text is read at most, in bytes: the files in order of their names, the last one in part."""
    length: int
    """Tokens per sequence; a token is a byte."""
    batch_size: int
    """Sequences per step, over all microbatches."""
    num_microbatches: int
    """Equal parts into which a step's sequences are cut; divides ``batch_size``."""
    seed: int = 0
    """Decides the order of the sequences."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "length", "batch_size", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        if not self.suffixes:
            raise ValueError("suffixes is empty, so no file would be read: give at least one, for example '.txt'")
        if self.batch_size % self.num_microbatches:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            larger = self.batch_size + -self.batch_size % self.num_microbatches
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.num_microbatches} microbatches: "
                f"give num_microbatches out of {divisors}, or batch_size {larger}"
            )

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.batch_size // self.num_microbatches
