"""Which samples are held out together: those that share an image, directly or by way of others.

An image of a sample that is asked about is then never trained on. What a group is kept for follows from the names of
its own images, so data that is added elsewhere changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from posixpath import normpath
from typing import Any


def group_keys(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """For every sample, its fields given, what decides whether its group is held out.

    That is the first of the lists of images of the group, as text; of a sample without images its own text.
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
    """Words for a refusal where more than half of the samples are one group; none otherwise."""
    most = max(Counter(keys).values(), default=0)
    if most <= max(1, len(keys) // 2):
        return ""
    return f" ({most} of {len(keys)} share images with one another, so they are held out together or not at all)"


def _own_key(fields: Mapping[str, Any]) -> str:
    return "\n".join(fields.get("images", ())) or "\n".join(fields[name] for name in sorted(fields.keys() - {"images"}))


class _Groups:
    """Names that belong together (Galler and Fischer 1964)."""

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
