"""Checks that a run may go on from a checkpoint: the values that decide the result of training must be the same."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rrfp_jax.models.vision_config import encoder_values

_DECIDING = ("model", "vision", "projector", "data", "optimizer")
_SEED = "run.seed"
_OF_FILES = ("num_microbatches", "path", "tokenizer", "cache")
_OF_SAMPLES = ("pack", "image_folder", "text_buckets", "image_buckets", "balance", "gather_text")
_LAYOUT_ONLY = {
    "text": ("num_microbatches", "path"),
    "tokens": _OF_FILES,
    "jsonl": _OF_FILES,
    "parquet": _OF_FILES,
    "image_text": (*_OF_FILES, *_OF_SAMPLES, "max_bad_samples"),
    "own": ("num_microbatches", "max_bad_samples"),
}
"""Keys of data, by its kind, that may change when a run goes on. The way in which a batch is cut and padded changes
neither its gradient nor the data that comes next; the digest of the data covers text, tokens and tokenizer, wherever
they lie."""


def check_same_training(saved: Mapping[str, Any], given: Mapping[str, Any], *, force: bool) -> list[str]:
    """Returns the differences that change the result of training, one text each.

    Raises ValueError, naming them, unless ``force`` says that they are meant.
    """
    before, now = _deciding(saved), _deciding(given)
    different = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if (before.get(name) or None) != (now.get(name) or None)  # empty is the same as not given
    ]
    if different and not force:
        raise ValueError(
            f"the checkpoint was saved by another training: {'; '.join(different)}: go back to the saved values, start "
            "over with --fresh, or go on nevertheless with --force"
        )
    return different


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that decide the result, by ``section.key``."""
    found = {_SEED: config.get("run", {}).get("seed")}
    for section in _DECIDING:
        values = {**(config.get(section) or {})}
        if values and section in ("vision", "projector"):
            record, given = encoder_values(section, values)
            values = asdict(record(**given))  # by whatever kind and overrides it is told
        values |= values.pop("images", None) or {}
        free = _LAYOUT_ONLY.get(values.get("kind", "text"), ()) if section == "data" else ("shard",)
        found |= {f"{section}.{name}": value for name, value in values.items() if name not in free}
    return found
