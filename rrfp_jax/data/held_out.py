"""The part of a data set that is trained on, and the part that is held out for evaluation.

A part is held out at the end of the data, or by a checksum of each sample. Samples that share an image, directly or by
way of others, are held out together, so an image of a sample that is asked about is never trained on. The fate of a
group follows from the names of its own images, so data that is added elsewhere changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from posixpath import normpath
from typing import Any, Literal
from zlib import crc32

from rrfp_jax.field_rules import FieldRule

Part = Literal["train", "held_out"]
TRAIN: Part = "train"
HELD_OUT: Part = "held_out"

A_FRACTION = FieldRule("0 or more, and less than 1", lambda value: 0 <= value < 1)


def num_trained(num: int, held_out: float) -> int:
    """Returns how many of ``num`` items are trained on where the fraction ``held_out``, rounded up, is held out."""
    return int(num * (1 - Fraction(str(held_out))))


def is_held_out(key: str, fraction: float) -> bool:
    """Returns whether the sample with this key is held out: by the key's CRC-32 alone, so the same in every run and on
    every machine, whatever else the data holds."""
    return crc32(key.encode(errors="surrogatepass")) < fraction * 2**32


def refuse_nothing_held_out(part: Part, held_out: float) -> None:
    """Raise ValueError where the part that is held out is asked for, and none is."""
    if part == HELD_OUT and not held_out:
        raise ValueError("held_out is 0, so nothing is kept for evaluation: give a fraction, for example 0.01")


def group_keys(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns for every sample, given by its fields, the key that decides whether its group is held out.

    The key is the first of the lists of images of the group, as text; of a sample without images its own text.
    """
    samples = list(samples)
    groups = _Groups()
    for fields in samples:
        groups.join([normpath(name) for name in fields.get("images", ())])
    keys = [_own_key(fields) for fields in samples]
    first: dict[str, str] = {}
    found = [groups.root(normpath(fields["images"][0])) if fields.get("images") else None for fields in samples]
    for root, key in zip(found, keys, strict=True):
        if root is not None:
            first[root] = min(first.get(root, key), key)
    return [key if root is None else first[root] for root, key in zip(found, keys, strict=True)]


def most_together(keys: Sequence[str]) -> str:
    """Returns words for a refusal where more than half of the samples are one group; empty otherwise."""
    most = max(Counter(keys).values(), default=0)
    if most <= max(1, len(keys) // 2):
        return ""
    return f" ({most} of {len(keys)} share images with one another, so they are held out together or not at all)"


def _own_key(fields: Mapping[str, Any]) -> str:
    return "\n".join(fields.get("images", ())) or "\n".join(fields[name] for name in sorted(fields.keys() - {"images"}))


class _Groups:
    """Names that belong together, as a disjoint-set forest (Galler and Fischer 1964)."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def join(self, names: Sequence[str]) -> None:
        for name in names:
            self._above[self.root(name)] = self.root(names[0])

    def root(self, name: str) -> str:
        above = self._above.setdefault(name, name)
        while above != name:
            self._above[name] = self._above[above]
            name, above = above, self._above[above]
        return name
