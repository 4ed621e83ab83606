"""The section ``data`` of a configuration: one mapping for data of every kind, which becomes the record of its kind.

Settings of images stand in a mapping of their own, ``images``, with the names that :class:`ImageTextConfig` has.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rrfp_jax.data.image_text_config import ImageTextConfig
from rrfp_jax.data.own_data_config import OwnDataConfig
from rrfp_jax.data.text_bytes import TextConfig
from rrfp_jax.data.tokens.header import HEADER
from rrfp_jax.data.tokens_config import JsonlConfig, ParquetConfig, TokensConfig

DataSetConfig = TextConfig | TokensConfig | JsonlConfig | ParquetConfig | ImageTextConfig | OwnDataConfig
TEXT, TOKENS, JSONL, PARQUET, IMAGE_TEXT, OWN = "text", "tokens", "jsonl", "parquet", "image_text", "own"
DATA_KINDS: dict[str, type] = {
    TEXT: TextConfig,
    TOKENS: TokensConfig,
    JSONL: JsonlConfig,
    PARQUET: ParquetConfig,
    IMAGE_TEXT: ImageTextConfig,
    OWN: OwnDataConfig,
}


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
    """The field with the text of a document, in ``jsonl`` and ``parquet``. None: ``text``."""
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


_SHARED = {field.name for field in fields(DataSection)}
IMAGE_KEYS = tuple(field.name for field in fields(ImageTextConfig) if field.name not in _SHARED)


def kind_of(values: Mapping[str, Any]) -> str:
    """Returns the kind of a section's values; raises ValueError for one that is not known."""
    kind = values.get("kind")
    if kind is None:
        path = values.get("path")
        first = str(path[0] if isinstance(path, list | tuple) and path else path)
        if values.get("object") is not None:
            return OWN
        if ".parquet" in first or ".jsonl" in first:
            return PARQUET if ".parquet" in first else JSONL
        return TOKENS if path and Path(first).expanduser().joinpath(HEADER).is_file() else TEXT
    if kind not in DATA_KINDS:
        raise ValueError(f"data: kind is {kind!r}: give one of {', '.join(DATA_KINDS)}")
    return str(kind)


def record_values(values: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Returns the record of a section's kind, and the values of its fields.

    Raises ValueError, in one sentence, for a key that the kind does not take.
    """
    kind = kind_of(values)
    record, given = DATA_KINDS[kind], {key: value for key, value in values.items() if key not in ("kind", "images")}
    images = values.get("images")
    if images is not None:
        if not isinstance(images, Mapping):
            raise ValueError(f"data.images is {images!r}: give a mapping")
        if (odd := next((key for key in images if key not in IMAGE_KEYS), None)) is not None:
            raise ValueError(f"data.images has no key {odd!r}: the known ones are {', '.join(IMAGE_KEYS)}")
        given |= images
    known = {field.name for field in fields(record)}
    for key, value in list(given.items()):
        if key not in known:
            if value is not None:
                owners = [name for name, of in DATA_KINDS.items() if key in {each.name for each in fields(of)}]
                raise ValueError(f"data.{key} is for kind {' or '.join(owners)}, and the data is {kind}: leave it out")
            del given[key]
    # null stands for the default of the kind
    defaults = {field.name for field in fields(record) if field.name not in ("path", "image_size", "image_length")}
    return record, {key: value for key, value in given.items() if value is not None or key not in defaults}


def section_of(record: DataSetConfig) -> dict[str, Any]:
    """Returns the section that becomes this record, as plain values."""
    values = asdict(record)
    kind = next(kind for kind, of in DATA_KINDS.items() if type(record) is of)
    images = {key: values.pop(key) for key in IMAGE_KEYS if key in values and kind == IMAGE_TEXT}
    return {"kind": kind, **values, **({"images": images} if images else {})}
