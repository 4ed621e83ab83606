"""Configuration of text that is cut into rows of one length, from token sets, JSON lines or Parquet."""

from dataclasses import dataclass

from rrfp_jax.data.held_out import A_FRACTION
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, check_fields


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """How the tokens of documents become rows, and rows batches.

    Raises ValueError, with the remedy, for values that do not fit together.
    """

    length: int
    """Tokens per row."""
    batch_size: int
    """Rows per step, over all microbatches."""
    num_microbatches: int
    """Equal parts into which a step's rows are cut; divides ``batch_size``."""
    pack: bool = False
    """Whether rows hold whole documents, each attending to itself alone; a longer document is cut. If not, rows
    follow each other in the text, and attention goes across documents."""
    held_out: float = 0.0
    """Fraction of the text, at the end of each token set, that is never trained on but kept for evaluation."""
    seed: int = 0
    """Decides the order of the rows."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "length", "batch_size", "num_microbatches")
        check_fields(self, NOT_NEGATIVE, "seed")
        check_fields(self, A_FRACTION, "held_out")
        if self.batch_size % self.num_microbatches:
            larger = self.batch_size + -self.batch_size % self.num_microbatches
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.num_microbatches} microbatches: "
                f"give num_microbatches that divides it, or batch_size {larger}"
            )

    @property
    def microbatch_size(self) -> int:
        """Rows per microbatch."""
        return self.batch_size // self.num_microbatches


@dataclass(frozen=True, kw_only=True)
class TokensConfig(RowsConfig):
    """Token sets that ``rrfp tokenize`` has written, one or a mixture of several."""

    path: tuple[str, ...]
    """The folder of a token set, or several, which are mixed."""
    weights: tuple[float, ...] | None = None
    """The share of the rows that each token set gives, up to a common factor. None: as many as it has, so that all are
    gone through equally often."""
    tokenizer: str | None = None
    """The tokenizer that must have made the tokens: its file, or ``bytes``. None: whatever the token sets name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path is empty: give the folder of a token set, or several")
        if self.weights is not None:
            if len(self.weights) != len(self.path):
                raise ValueError(
                    f"weights has {len(self.weights)} numbers for {len(self.path)} token sets: give one for each"
                )
            if not all(0 < weight < float("inf") for weight in self.weights):
                raise ValueError(f"weights is {list(self.weights)}: give numbers above 0, and leave out what has 0")


@dataclass(frozen=True, kw_only=True)
class TextFilesConfig(RowsConfig):
    """Files of documents that are tokenised at the first start, once for all runs on this host."""

    path: tuple[str, ...]
    """Files, folders, or patterns such as ``data/*.jsonl``."""
    column: str = "text"
    """The field that holds the text of a document."""
    tokenizer: str | None = None
    """A tokenizer.json or a folder that has one; ``bytes``: none, tokens are the bytes of the text. None: the tokenizer
    of the model in ``run.init_from``; without such a model, bytes."""
    end_of_document: str | None = None
    """The token of the tokenizer that closes documents. None: the one that its folder's tokenizer_config.json names, or
    a usual one."""
    cache: str | None = None
    """Folder that keeps the tokens for later starts. None: ``rrfp/tokens`` in the user's cache folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path is empty: give at least one file, folder or pattern")
        if self.tokenizer == "train":
            raise ValueError("tokenizer is train: make one with rrfp tokenize --tokenizer train, and name its file")


@dataclass(frozen=True, kw_only=True)
class JsonlConfig(TextFilesConfig):
    """JSON lines with a document each, plain or compressed, tokenised at the first start and kept."""


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(TextFilesConfig):
    """Parquet files with a document in each row, tokenised at the first start and kept."""
