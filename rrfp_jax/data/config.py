"""The section ``data`` of a configuration, and the record that it becomes for each kind of data.

All records are pure data, checked when they are made; :class:`DataSection` explains the fields that have its names, and
a record those that mean more for its kind. The section is one mapping for data of every kind; settings of
images stand in a mapping of their own, ``images``, with the names that :class:`ImageTextConfig` has.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rrfp_jax.data._sources import SAVED
from rrfp_jax.data.tokens import HEADER, megatron_prefix
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, FieldRule, check_fields
from rrfp_jax.storage import BucketPath, located

_FRACTION = FieldRule("0 or more, and less than 1", lambda value: 0 <= value < 1)
_MOST_PIXELS = 178_956_970  # a file of a few kilobytes may have as many, and they fill a gigabyte


@dataclass(frozen=True, kw_only=True)
class _BatchedData:
    """The fields that data of every kind has; raises ValueError, with the remedy, for values that do not fit."""

    batch_size: int
    num_microbatches: int
    held_out: float = 0.0
    """Fraction of the data that is never trained on but kept for evaluation: the end of the data, or, of text with
    images, the samples that a checksum picks."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "batch_size", "num_microbatches")
        check_fields(self, NOT_NEGATIVE, "seed")
        check_fields(self, _FRACTION, "held_out")
        if self.batch_size % self.num_microbatches:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            larger = self.batch_size + -self.batch_size % self.num_microbatches
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {self.num_microbatches} microbatches: "
                f"give num_microbatches out of {divisors}, or batch_size {larger}"
            )

    @property
    def microbatch_size(self) -> int:
        """Rows or samples per microbatch; on average where samples are balanced."""
        return self.batch_size // self.num_microbatches


@dataclass(frozen=True, kw_only=True)
class TextConfig(_BatchedData):
    """A data set of the bytes of plain text."""

    path: str | None = None
    suffixes: tuple[str, ...] = (".py", ".txt", ".md", ".rst")
    max_bytes: int = 64 * 2**20
    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, AT_LEAST_1, "max_bytes", "length")
        if not self.suffixes:
            raise ValueError("suffixes is empty, so no file would be read: give at least one, for example '.txt'")


@dataclass(frozen=True, kw_only=True)
class RowsConfig(_BatchedData):
    """How the tokens of documents become rows of one length."""

    length: int
    pack: bool = False
    """Whether rows hold whole documents, each attending to itself alone; a longer document is cut. If not, rows
    follow each other in the text, and attention goes across documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, AT_LEAST_1, "length")


@dataclass(frozen=True, kw_only=True)
class TokensConfig(RowsConfig):
    """Token sets that ``rrfp tokenize`` has written, or token files of Megatron-LM, one or a mixture of several."""

    path: tuple[str, ...]
    weights: tuple[float, ...] | None = None
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
class _TextFilesConfig(RowsConfig):
    """Files of documents that are tokenised at the first start, once for all runs on this host."""

    path: tuple[str, ...]
    column: str = "text"
    tokenizer: str | None = None
    """A tokenizer.json or a folder that has one; ``bytes``: none, tokens are the bytes of the text. None: the tokenizer
    of the model in ``run.init_from``; without such a model, bytes."""
    end_of_document: str | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path is empty: give at least one file, folder or pattern")
        if self.tokenizer == "train":
            raise ValueError("tokenizer is train: make one with rrfp tokenize --tokenizer train, and name its file")


@dataclass(frozen=True, kw_only=True)
class JsonlConfig(_TextFilesConfig):
    """JSON lines with a document each, plain or compressed, tokenised at the first start and kept."""


@dataclass(frozen=True, kw_only=True)
class ParquetConfig(_TextFilesConfig):
    """Parquet files, or data sets that Hugging Face's library has saved, with a document in each row, tokenised at the
    first start and kept."""


@dataclass(frozen=True, kw_only=True)
class ImageTextConfig(_BatchedData):
    """A data set of text with images, and how samples of different sizes become microbatches."""

    path: str
    image_folder: str | None = None
    """The folder to which the paths of images are relative; None: the folder of the JSONL file."""
    tokenizer: str | None = None
    """A tokenizer.json or a folder that has one; ``bytes``: none, tokens are the bytes of the text. None: the tokenizer
    of the model in ``run.init_from``, which also names the tokens for an image; without such a model, bytes."""
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
    channels: int = 3
    """3: images are RGB; 1: grey."""
    patch_size: int = 14
    """Pixels of a patch along each side."""
    merge: int = 2
    """So many patches along each side make one image feature, which takes one position of the text."""
    image_size: int | None = None
    """Pixels of each side to which all images are resized; None: each keeps its own size, rounded to whole features."""
    row_order: bool = False
    """Whether the patches of images of one ``image_size`` come row by row, for a model that merges them itself. If not,
    the patches of a feature are consecutive."""
    max_patches: int = 1024
    """An image of its own size that has more patches is made smaller."""
    min_patches: int | None = None
    """An image of its own size that has fewer patches is made larger, and sizes are those of Qwen's image processor,
    whose ``min_pixels`` and ``max_pixels`` are this and ``max_patches`` times ``patch_size**2``. None: none is."""
    max_pixels: int = 64 * 2**20
    """An image file with more is refused."""
    max_bad_samples: int = 0
    """Number of samples with an unreadable line or image that are left out before the run saves and ends."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels, which are 0 to 1, by the encoder: one number for all channels, or one for each."""
    std: tuple[float, ...] = (0.5,)
    """Divides the pixels after ``mean`` is subtracted: one number for all channels, or one for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, AT_LEAST_1, "length", "image_length", "text_buckets", "image_buckets")
        check_fields(self, AT_LEAST_1, "patch_size", "merge", "image_size", "max_patches", "min_patches", "max_pixels")
        check_fields(self, NOT_NEGATIVE, "max_bad_samples")
        if self.gather_text and not self.balance:
            raise ValueError("gather_text divides samples by their costs: give balance true, or leave gather_text out")
        if self.max_pixels > _MOST_PIXELS:
            raise ValueError(
                f"max_pixels is {self.max_pixels}, and small files may fill the memory: give at most {_MOST_PIXELS}"
            )
        if self.channels not in {1, 3}:
            raise ValueError(f"channels is {self.channels}: give 3 for colours or 1 for grey")
        if self.row_order and self.image_size is None:
            raise ValueError("row_order is for images of one size: give image_size, or leave row_order out")
        if self.max_patches < self.merge**2:
            raise ValueError(f"max_patches is {self.max_patches}: give at least {self.merge**2}, one feature")
        if (self.min_patches or 0) > self.max_patches:
            raise ValueError(f"min_patches is {self.min_patches}: give at most max_patches, {self.max_patches}")
        if self.image_size is not None:
            block = self.patch_size * self.merge
            if self.image_size % block:
                raise ValueError(
                    f"image_size is {self.image_size}: give a multiple of {block}, patch_size x merge, for example "
                    f"{self.image_size + -self.image_size % block}"
                )
            num_patches = (self.image_size // self.patch_size) ** 2
            if self.image_length not in {None, num_patches}:
                raise ValueError(
                    f"image_length is {self.image_length}, and images of one size have a row each, of {num_patches} "
                    f"patches: give {num_patches}, or leave image_length out"
                )
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in {1, self.channels}:
                raise ValueError(f"{name} has {len(getattr(self, name))} numbers: give 1, or {self.channels}")
        if min(self.std) <= 0:
            raise ValueError(f"std is {min(self.std)}: give positive numbers")


@dataclass(frozen=True, kw_only=True)
class OwnDataConfig(_BatchedData):
    """A data set of one's own: anything with a length and elements by number, such as a ``grain.MapDataset``."""

    object: str
    arguments: dict[str, Any] = field(default_factory=dict)
    pack: bool = False
    """Whether elements have ``positions`` and ``segments``, and attention stays within a segment."""
    shuffle: bool = True
    """Whether every epoch is in another order; if not, elements come by their numbers, for a data set that has shuffled
    itself."""
    max_bad_samples: int = 0
    """Number of unreadable or unfitting elements that are left out before the run saves and ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, NOT_NEGATIVE, "max_bad_samples")
        module, colon, name = self.object.partition(":")
        if not (module and colon and name and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))):
            raise ValueError(f"object is {self.object!r}: give package.module:NAME, for example my_data:Corpus")


DataSetConfig = TextConfig | TokensConfig | JsonlConfig | ParquetConfig | ImageTextConfig | OwnDataConfig
DATA_KINDS: dict[str, type] = {
    "text": TextConfig,
    "tokens": TokensConfig,
    "jsonl": JsonlConfig,
    "parquet": ParquetConfig,
    "image_text": ImageTextConfig,
    "own": OwnDataConfig,
}
"""The record of each kind of data."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The data that the model is trained on. Each kind takes some of the keys."""

    kind: str | None = None
    """The kind of the data: ``text``, files whose bytes are tokens; ``tokens``, the output of ``rrfp tokenize``;
    ``jsonl`` and ``parquet``, documents that are tokenised at the first start; ``image_text``, JSON lines of text with
    images; ``own``, a data set in your code. None: as ``path`` tells, else ``text``."""
    path: str | None = None
    """The place of the data: a text file or a folder (``text``; null is the running Python's own standard library); the
    folders of token sets, which are mixed (``tokens``); files, folders or patterns such as ``data/*.jsonl`` (``jsonl``,
    ``parquet``); a JSON lines file (``image_text``). Several places are a list."""
    length: int | None = None
    """The number of tokens per row. ``image_text`` may leave it out for rows as long as its longest sample."""
    batch_size: int
    """The number of rows or samples per step, over all microbatches."""
    num_microbatches: int
    """The number of parts into which a step's rows are cut; divides ``batch_size``."""
    pack: bool | None = None
    """Whether rows hold several whole documents or samples, each attending to itself alone. None: true for
    ``image_text``, else false."""
    held_out: float = 0.0
    """The fraction of the data that is never trained on but kept for evaluation."""
    seed: int = 0
    """The number that decides the order of the data."""
    max_bad_samples: int | None = None
    """The number of unreadable samples of ``image_text`` or ``own`` that are left out before the run saves and ends.
    None: 0."""
    suffixes: tuple[str, ...] | None = None
    """The endings of the files that ``text`` reads from a folder. None: .py, .txt, .md and .rst."""
    max_bytes: int | None = None
    """The most bytes that ``text`` reads: files in order of their names, the last one in part. None: 64 MiB."""
    weights: tuple[float, ...] | None = None
    """The share of the rows that each token set gives, up to a common factor. None: in proportion to their sizes."""
    tokenizer: str | None = None
    """The tokenizer: a tokenizer.json, or a folder that has one; ``bytes``: tokens are the bytes of the text. None:
    that of the model in ``run.init_from``, or that of the token sets; without such a model, bytes."""
    column: str | None = None
    """The field with the text of a document, or the messages of a chat, of ``jsonl`` and ``parquet``. None: text."""
    end_of_document: str | None = None
    """The token that closes documents of ``jsonl`` and ``parquet``. None: as tokenizer_config.json says, or a usual
    one."""
    cache: str | None = None
    """The folder that keeps the tokens of ``jsonl`` and ``parquet`` for later starts. None: ``rrfp/tokens`` in the
    user's cache folder."""
    object: str | None = None
    """The data set of ``own``, or a function that returns it, as ``package.module:NAME``."""
    arguments: dict[str, Any] | None = None
    """The arguments with which ``object`` is called, by name. None: none."""
    shuffle: bool | None = None
    """Whether every epoch of ``own`` is in another order. None: true."""
    images: dict[str, Any] | None = None
    """The settings of ``image_text``: how images become patches (``image_folder``, ``image_size``, ``patch_size``,
    ``merge``, ``channels``, ``row_order``, ``max_patches``, ``max_pixels``, ``mean``, ``std``), and how samples become
    microbatches (``image_length``, ``text_buckets``, ``image_buckets``, ``balance``, ``gather_text``). None: the
    defaults."""


_SECTION_KEYS = {field.name for field in fields(DataSection)}
_IMAGE_KEYS = tuple(field.name for field in fields(ImageTextConfig) if field.name not in _SECTION_KEYS)


def kind_of(values: Mapping[str, Any]) -> str:
    """Returns the kind of a section's values; raises ValueError for one that is not known."""
    kind = values.get("kind")
    if kind is None:
        path = values.get("path")
        first = str(path[0] if isinstance(path, list | tuple) and path else path)
        if values.get("object") is not None:
            return "own"
        if ".jsonl" in first:
            return "jsonl"
        if ".parquet" in first or ".arrow" in first or Path(first).expanduser().joinpath(SAVED).is_file():
            return "parquet"
        is_set = bool(path) and located(first).expanduser().joinpath(HEADER).is_file()
        return "tokens" if is_set or (path and megatron_prefix(first) is not None) else "text"
    if kind not in DATA_KINDS:
        raise ValueError(f"data: kind is {kind!r}: give one of {', '.join(DATA_KINDS)}")
    return str(kind)


def record_values(values: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Returns the record of a section's kind, and the values of its fields.

    Raises ValueError, in one sentence, for a key that the kind does not take.
    """
    kind = kind_of(values)
    paths = values.get("path")
    for path in paths if isinstance(paths, list | tuple) else (paths,):
        if kind not in ("tokens", "own") and isinstance(path, str) and isinstance(located(path), BucketPath):
            raise ValueError(
                f"data: path is {path}, and of an object store only token sets are read (kind tokens): make one with "
                "rrfp tokenize, or copy the file to a disk"
            )
    record, given = DATA_KINDS[kind], {key: value for key, value in values.items() if key not in ("kind", "images")}
    images = values.get("images")
    if images is not None:
        if not isinstance(images, Mapping):
            raise ValueError(f"data.images is {images!r}: give a mapping")
        if (odd := next((key for key in images if key not in _IMAGE_KEYS), None)) is not None:
            raise ValueError(f"data.images has no key {odd!r}: the known ones are {', '.join(_IMAGE_KEYS)}")
        given |= images
    known = {field.name for field in fields(record)}
    for key, value in list(given.items()):
        if key not in known:
            if value is not None:
                owners = [name for name, of in DATA_KINDS.items() if key in {each.name for each in fields(of)}]
                raise ValueError(f"data.{key} is for kind {' or '.join(owners)}, and the data is {kind}: leave it out")
            del given[key]
    # null stands for the default of the kind, but these three have a meaning of their own for it
    defaults = known - {"path", "image_size", "image_length"}
    return record, {key: value for key, value in given.items() if value is not None or key not in defaults}


def section_of(record: DataSetConfig) -> dict[str, Any]:
    """Returns the section that becomes this record, as plain values."""
    values = asdict(record)
    kind = next(kind for kind, of in DATA_KINDS.items() if type(record) is of)
    images = {key: values.pop(key) for key in _IMAGE_KEYS if key in values and kind == "image_text"}
    return {"kind": kind, **values, **({"images": images} if images else {})}
