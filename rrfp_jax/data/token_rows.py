"""The rows that a token set is cut into, each found by its number.

*Windows* follow each other in the text and are all full; a document may begin in one and end in another.

*Packed rows* hold whole documents, in their order, as many as fit; the rest of the row is padding. A document that is
longer than a row is cut, and its last part shares a row with the next ones. So a row is a stretch of the text too, and
one number says where it begins: the index has that and the first document of each row, 16 bytes for thousands of
tokens, made by one pass over the ends of documents.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.held_out import HELD_OUT, TRAIN, Part, num_trained, refuse_nothing_held_out
from rrfp_jax.data.tokens import TokenSet
from rrfp_jax.data.tokens_config import RowsConfig

_BLOCK = 1 << 18  # documents whose ends are read at a time


class RowLayouts(NamedTuple):
    """The places of documents in rows; all arrays are ``[rows, length]``."""

    positions: NDArray[np.int32]
    """Positions from 0 in each document; 0 in padding."""
    segments: NDArray[np.int32]
    """Numbers of documents in the row, from 1; 0 is padding."""
    weights: NDArray[np.float32]
    """Weights of targets: 1 if the next token is of the same document, else 0."""


class _Windows:
    """Rows of ``length`` tokens of a part, one after the other; ``num`` of them. The first begins at token
    ``_first``."""

    def __init__(self, tokens: TokenSet, config: RowsConfig, part: Part) -> None:
        self._tokens, self._length, self._first = tokens, config.length, 0
        # The last token of the last window still needs a target.
        self.num = num_trained(max(0, tokens.num_tokens - 1) // config.length, config.held_out)
        if part == HELD_OUT:
            self._first = self.num * config.length + 1  # the token before is the target of the last window trained on
            self.num = max(0, tokens.num_tokens - self._first - 1) // config.length

    def tokens(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the rows of these numbers with the token after each, ``[rows, length + 1]``; padding is 0."""
        return self._tokens.windows(self._first + numbers * self._length, self._length + 1).astype(np.int32)

    def layouts(self, numbers: NDArray[np.int64]) -> RowLayouts | None:  # noqa: ARG002
        """Returns None, since windows go on across documents."""
        return None


class _PackedRows:
    """Rows of whole documents of a part, ``num`` of them.

    ``_starts`` ``[rows + 1]`` has the beginning of each row and the end of the part; ``_documents`` ``[rows + 1]`` the
    first document of each row, and one more than the last document.
    """

    def __init__(self, tokens: TokenSet, config: RowsConfig, part: Part) -> None:
        self._tokens, self._length = tokens, config.length
        # The first document that begins in the last fraction of the tokens, and all after it, are held out.
        num_train = num_trained(tokens.num_tokens, config.held_out)
        first_held_out = tokens.num_documents
        if num_train < tokens.num_tokens:
            first_held_out = tokens.document_at(num_train)
            first_held_out += tokens.document(first_held_out)[0] < num_train
        first, stop = (0, first_held_out) if part == TRAIN else (first_held_out, tokens.num_documents)
        starts, documents = row_index(tokens, config.length, first, stop)
        self._starts, self._documents = starts, documents
        self.num = len(starts) - 1

    def tokens(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        starts, stops = self._starts[numbers], self._starts[numbers + 1]
        rows = np.zeros((len(numbers), self._length + 1), np.int32)
        is_inside = starts + self._length < self._tokens.num_tokens
        rows[is_inside] = self._tokens.windows(starts[is_inside], self._length + 1)
        for row in np.flatnonzero(~is_inside).tolist():
            own = self._tokens.tokens(int(starts[row]), self._tokens.num_tokens)
            rows[row, : len(own)] = own
        is_padding = np.arange(self._length + 1) >= (stops - starts)[:, None]
        is_padding[:, -1] = stops - starts < self._length  # rows that are not full end with a document
        rows[is_padding] = 0
        return rows

    def layouts(self, numbers: NDArray[np.int64]) -> RowLayouts:
        """Returns the places of documents in the rows of these numbers."""
        places = np.arange(self._length, dtype=np.int32)
        is_token = places < (self._starts[numbers + 1] - self._starts[numbers])[:, None]
        begins = np.zeros((len(numbers), self._length + 1), bool)
        begins[:, 0] = True
        for row, number in enumerate(numbers.tolist()):
            begins[row, self._ends(number)] = True
        begins, is_last = begins[:, :-1], begins[:, 1:]
        positions = places - np.maximum.accumulate(np.where(begins, places, np.int32(0)), axis=1)
        return RowLayouts(
            positions=positions * is_token,
            segments=np.cumsum(begins, axis=1, dtype=np.int32) * is_token,
            weights=(is_token & ~is_last).astype(np.float32),
        )

    def _ends(self, number: int) -> NDArray[np.int64]:
        """Returns the places in a row where documents end."""
        first, following = self._documents[number : number + 2].tolist()
        # The document that the next row begins with may begin in this one.
        ends = self._tokens.document_ends(first, min(following + 1, self._tokens.num_documents))
        ends = ends - self._starts[number]
        return ends[(ends > 0) & (ends <= self._length)]


def row_index(tokens: TokenSet, length: int, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns beginnings and first documents of the rows of documents ``first`` to ``stop - 1``, ``[rows + 1]`` each.

    The last beginning is the end of all rows, the last document is ``stop``.

    Raises BrokenData if ends of documents do not ascend.
    """
    starts, documents = [], []
    end = tokens.document(first - 1)[1] if first else 0
    at = first
    while at < stop:
        until = min(stop, at + max(_BLOCK, 2 * length))
        ends = tokens.document_ends(at, until)
        begins = np.concatenate([[end], ends[:-1]])
        last_pieces = begins + (ends - begins - 1) // length * length
        following = np.searchsorted(ends, last_pieces + length, side="right")
        leaders = _chain(following.tolist(), is_all=until == stop)
        own = np.array(leaders[: None if until == stop else -1])
        num_pieces = (last_pieces[own] - begins[own]) // length + 1
        piece = np.arange(num_pieces.sum()) - (np.cumsum(num_pieces) - num_pieces).repeat(num_pieces)
        starts.append(begins[own].repeat(num_pieces) + piece * length)
        documents.append((own + at).repeat(num_pieces))
        if until == stop:
            end = int(ends[-1])
            break
        end = int(begins[leaders[-1]])  # of that row documents of the next block may be part
        at += leaders[-1]
    return np.concatenate([*starts, [end]]).astype(np.int64), np.concatenate([*documents, [stop]]).astype(np.int64)


def _chain(following: list[int], *, is_all: bool) -> list[int]:
    """Returns the documents that begin rows, each found from the one before.

    Without ``is_all`` the last begins a row that may hold more documents than these.
    """
    leaders = [0]
    while (further := following[leaders[-1]]) < len(following):
        leaders.append(further)
    assert is_all or len(leaders) > 1
    return leaders


TokenRows = _Windows | _PackedRows


def token_rows(tokens: TokenSet, config: RowsConfig, part: Part) -> TokenRows:
    """Returns the rows of a part; raises ValueError, with the remedy, if there is none, or none to train on is full."""
    refuse_nothing_held_out(part, config.held_out)
    rows = (_PackedRows if config.pack else _Windows)(tokens, config, part)
    is_too_short = part == TRAIN and tokens.num_tokens < config.length  # however the text is packed
    if rows.num and not is_too_short:
        return rows
    held = f"token set {tokens.path} has {tokens.num_tokens} tokens in {tokens.num_documents} documents"
    if not config.held_out or is_too_short:
        raise ValueError(f"{held}, not enough for a row of {config.length}: give more text, or a smaller length")
    where = "held out" if part == HELD_OUT else "left to train on"
    raise ValueError(
        f"{held}, and with held_out {config.held_out} not one row of {config.length} is {where}: give more text, "
        "another held_out, or a smaller length"
    )
