"""Write a text with images as a tokenizer does: as tokens, and as images at the places where they are seen.

The tokenizer takes the text as a whole, with the words that the model's family puts in place of an image, so that the
text has the tokens that the model's own processor would give it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rrfp_jax.data.samples import Grid, Text
from rrfp_jax.data.token_kind import TokenKind
from rrfp_jax.data.tokenizer_files import (
    first_line,
    load,
    lost_part,
    raise_unless_of_library,
    size_of,
    unknown_of,
)
from rrfp_jax.record_files import parse_json

_REMEDY = "give the tokenizer.json that came with the model"


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """The words that stand for an image in the text, as a tokenizer writes them."""

    feature: int
    """The token of each feature."""
    before: str = ""
    behind: str = ""


class TextWriter:
    """Writes the text and the images of a sample as tokens.

    Args:
        kind: the tokens; the first of its ends closes a sample.
        marks: the words that stand for an image; None: the model is shown no images.
        opens: whether a text begins with the opening tokens of the tokenizer's file, as imported models know it.

    Attributes: ``kind``; ``vocab_size``; ``end`` and ``image_token``.
    Raises ValueError, with the remedy, if the file is no tokenizer, or has no token for images.
    """

    def __init__(self, kind: TokenKind, marks: ImageTokens | None, *, opens: bool) -> None:
        assert kind.file is not None
        self.kind, self._opens, self._file = kind, opens, kind.file
        data = kind.file.read_bytes()
        self._tokenizer = load(data, str(kind.file))
        # This tokenizer tells which characters a token is of: a post-processor, which puts tokens around a text, may
        # also trim those places.
        plain = {**parse_json(data), "post_processor": None}
        self._plain = load(json.dumps(plain).encode(), str(kind.file))
        self._unknown, self.vocab_size = unknown_of(self._tokenizer), size_of(self._tokenizer)
        self.end = kind.ends[0]
        self.image_token = self.end if marks is None else marks.feature
        self._mark = None if marks is None else (marks.before, self._word(marks.feature), marks.behind)

    def _word(self, feature: int) -> str:
        word: str | None = self._tokenizer.id_to_token(feature)
        if word is None:
            raise ValueError(f"{self._file} has no token {feature}, which stands for images: {_REMEDY}")
        return word

    def parts(self, pieces: Sequence[str], answer: str, grids: Sequence[Grid], merge: int) -> list[Text | Grid]:
        """Returns the parts of a sample: ``pieces`` of a text with the images between them, and an answer at the end.

        Text of the answer counts in the loss; without an answer all text does, except the words that stand for images.
        Raises ValueError, in words that follow the name of the sample, if the tokenizer cannot write it.
        """
        text, is_image = pieces[0], [False] * len(pieces[0])
        for grid, piece in zip(grids, pieces[1:], strict=True):
            shown = self._shown(grid.num_patches // merge**2)
            text, is_image = text + shown + piece, is_image + [True] * len(shown) + [False] * len(piece)
        # A token that reaches into the answer belongs to it: it cannot be read before the answer is known.
        first = len(text) if answer else 0
        text, is_image = text + answer, [*is_image, *[False] * len(answer)]
        try:
            whole, plain = self._tokenizer.encode(text, add_special_tokens=self._opens), self._plain.encode(text)
        except BaseException as error:
            raise_unless_of_library(error)
            raise ValueError(f"cannot be written by {self._file} ({first_line(error)}): change it") from None
        if (lost := lost_part(self._tokenizer, text, plain, self._unknown)) is not None:
            raise ValueError(f"has {lost!r}, for which {self._file} has no token: take it out")
        ids = np.array(whole.ids, np.int32)
        weights = np.zeros(len(whole.ids), np.float32)
        is_own = ~np.array(whole.special_tokens_mask, bool) if self._opens else np.ones(len(whole.ids), bool)
        weights[is_own] = [end > max(first, start) and not is_image[end - 1] for start, end in plain.offsets]
        if len(ids) and ids[-1] == self.end and not is_own[-1]:  # this token closes every sample anyway
            ids, weights = ids[:-1], weights[:-1]
        return self._cut(ids, weights, grids, merge)

    def _shown(self, num_features: int) -> str:
        """Returns the words that stand in the text for an image of ``num_features`` features."""
        if self._mark is None:
            raise ValueError(f"has images, and {self._file} has no token that stands for them: leave them out")
        before, word, behind = self._mark
        return before + word * num_features + behind

    def _cut(self, tokens: np.ndarray, weights: np.ndarray, grids: Sequence[Grid], merge: int) -> list[Text | Grid]:
        """Returns stretches of one weight each, and images in place of their features."""
        sizes = [grid.num_patches // merge**2 for grid in grids]
        is_feature = tokens == self.image_token if sizes else np.zeros(len(tokens), bool)
        if is_feature.sum() != sum(sizes):
            raise ValueError(
                f"becomes {is_feature.sum()} tokens for images whose features are {sum(sizes)}: {_REMEDY}, and leave "
                "its token for images out of the text"
            )
        image = np.full(len(tokens), -1)
        image[is_feature] = np.repeat(np.arange(len(sizes)), sizes)
        changes = 1 + np.flatnonzero((np.diff(image) != 0) | (np.diff(weights) != 0))
        parts: list[Text | Grid] = []
        for start, stop in zip([0, *changes], [*changes, len(tokens)], strict=True):
            if start < stop:
                number = image[start]
                parts.append(grids[number] if number >= 0 else Text(tokens[start:stop], float(weights[start])))
        return parts

    @property
    def told(self) -> tuple[object, ...]:
        """The settings that decide the tokens of a text."""
        return self.kind.tokenizer.sha256, self.end, self._mark, self._opens

    def closing(self) -> Text:
        """Returns the part that closes a sample."""
        return Text(np.array([self.end], np.int32), 1)
