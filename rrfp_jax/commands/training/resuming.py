"""Whether a run may go on from what an earlier one has saved: what decides the result of training must be the same."""

from collections.abc import Iterator, Mapping
from typing import Any

from rrfp_jax.commands.training.config import DATA_SETS

_DECIDING = ("model", "vision", "projector", *DATA_SETS, "optimizer")
_DECIDING_FIELDS = {"pipeline": ("clip_norm", "skip_nonfinite", "freeze"), "run": ("seed",)}
_OF_SAMPLES = ("num_microbatches", "max_bad_samples", "pack", "text_buckets", "image_buckets", "balance", "gather_text")
_OF_FILES = ("num_microbatches", "path", "tokenizer", "cache", "wait_minutes")
_LAYOUT_ONLY = {
    "data": ("num_microbatches", "path"),
    "image_text": (*_OF_SAMPLES, "path", "image_folder", "tokenizer"),
    "tokens": ("num_microbatches", "path", "tokenizer"),
    "jsonl": _OF_FILES,
    "parquet": _OF_FILES,
    "own_data": ("num_microbatches", "max_bad_samples"),
}
"""Fields that may change when a run goes on. The way in which a batch is cut and padded changes neither its gradient
nor the data that comes next; the digest of the data covers text, tokens and tokenizer, wherever they lie."""
_ONLY_IF_SAVED = "data.text"
"""Earlier checkpoints do not tell the text."""
_EARLIER = {"optimizer.name": "adamw", "optimizer.schedule": "cosine", "projector.bias": True}
"""What checkpoints were saved with that do not tell it."""
_EARLIER_INSIDE = {"model.rope_scaling": {"kind": "llama3"}}
"""The same of records inside of sections."""


def check_same_training(saved: Mapping[str, Any], given: Mapping[str, Any], *, force: bool) -> list[str]:
    """The differences that change what is trained, one text each.

    Raises ValueError, naming them, unless ``force`` says that they are meant.
    """
    names = {*_names(saved), *_names(given)}
    if _at(saved, _ONLY_IF_SAVED) is None:
        names.discard(_ONLY_IF_SAVED)
    different = [
        f"{name} was {_at(saved, name)!r} and is {_at(given, name)!r}"
        for name in sorted(names)
        if (_at(saved, name) or None) != (_at(given, name) or None)  # what is empty, earlier checkpoints do not tell
    ]
    if different and not force:
        raise ValueError(
            f"the checkpoint was saved by another training: {'; '.join(different)}: go back to the saved values, start "
            "over with --fresh, or go on nevertheless with --force"
        )
    return different


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    for section in _DECIDING:
        for name in config.get(section, {}):
            if name not in _LAYOUT_ONLY.get(section, ()):
                yield f"{section}.{name}"
    for section, names in _DECIDING_FIELDS.items():
        yield from (f"{section}.{name}" for name in names)


def _at(config: Mapping[str, Any], name: str) -> Any:
    section, _, field = name.partition(".")
    value = config.get(section, {}).get(field, _EARLIER.get(name))
    if name in _EARLIER_INSIDE and isinstance(value, Mapping):
        return {**_EARLIER_INSIDE[name], **{inner: each for inner, each in value.items() if each is not None}}
    return value
