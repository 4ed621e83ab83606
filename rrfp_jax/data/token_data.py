"""Rows of token sets, shuffled anew every epoch and mixed by weight; any step's batch follows from its number.

Sample ``n`` of the run is of the source that :class:`Mixture` gives it, and there the row that the order of an epoch
(:mod:`rrfp_jax.data.sample_order`) has at its place. A source that is used up begins its next epoch while others are
still in their first. So there is no state: batch ``n`` is the same in every layout and after every restart.

A token set is cut into rows, each found by its number. *Windows* follow each other in the text and are all full; a
document may begin in one and end in another. *Packed rows* hold whole documents, in their order, as many as fit; the
rest of the row is padding. A document that is longer than a row is cut, and its last part shares a row with the next
ones. So a row is a stretch of the text too, and one number says where it begins: the index has that and the first
document of each row, 16 bytes for thousands of tokens, made by one pass over the ends of documents.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.config import RowsConfig, TokensConfig
from rrfp_jax.data.dataset import Batch, BrokenData, Reads
from rrfp_jax.data.sample_order import (
    HELD_OUT,
    TRAIN,
    Mixture,
    Part,
    items_at,
    num_trained,
    places_of_step,
    refuse_nothing_held_out,
)
from rrfp_jax.data.tokenizer_files import BYTE_TOKENIZER_FILE, kind_of_tokens, read_tokenizer, tokenizer_file
from rrfp_jax.data.tokens import (
    BYTE_TOKENIZER,
    FileDigest,
    SizedFile,
    TokenSet,
    TokenSetHeader,
    megatron_prefix,
)

_READ_WHERE_NEEDED = ("tokens", "targets")  # leaves that are read from the disk, by the processes that need them
_BLOCK = 1 << 18  # documents whose ends are read at a time


class Tokens:
    """A deterministic data set of tokens; see the module's text.

    Args:
        part: the rows that are trained on, or those that are held out; an epoch visits every row of either once.

    Attributes: ``config``; ``num_rows`` of the part; ``vocab_size``: every token is less; ``fingerprint`` of all token
    sets; ``is_packed``; ``bytes_per_token``, None where a tokenizer made them; ``token_kind``, the kind of the tokens;
    ``notes``, sentences about the token sets; ``counts_once``, whether a row that has come before has no weight, as in
    evaluations; ``buckets``, None, since all microbatches have one shape.

    Raises ValueError, with the remedy, if a token set cannot be used, has no row, or was made by another tokenizer than
    the configuration names or than the others were made by.
    """

    buckets = None
    counts_once = False

    def __init__(self, config: TokensConfig, part: Part = TRAIN) -> None:
        self.config, self.is_packed = config, config.pack
        self._sets = [
            TokenSet(path) if megatron_prefix(path) is None else MegatronTokens(path, config.tokenizer)
            for path in config.path
        ]
        self._check_tokenizers()
        self._rows = [token_rows(tokens, config, part) for tokens in self._sets]
        self._mixture = Mixture(config.weights or [rows.num for rows in self._rows])
        self.num_rows = sum(rows.num for rows in self._rows)
        headers = [tokens.header for tokens in self._sets]
        self.vocab_size = max(header.vocab_size for header in headers)
        self.bytes_per_token = 1.0 if all(header.tokenizer.sha256 is None for header in headers) else None
        self.fingerprint = "; ".join(tokens.fingerprint for tokens in self._sets)
        self.token_kind = kind_of_tokens(config.path[0], config.tokenizer)
        self.notes = [f"{each.path}: {note}" for each in self._sets for note in each.notes]

    def _check_tokenizers(self) -> None:
        """Raises ValueError if a token set was made by another tokenizer than the given one, or than the first."""
        wanted, first = self.config.tokenizer, self._sets[0]
        if wanted is not None:
            digest, path = None, tokenizer_file(wanted)
            if wanted != BYTE_TOKENIZER.name:
                try:
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                except OSError as error:
                    raise ValueError(
                        f"cannot read the tokenizer {path} ({error.strerror}): give the path of a tokenizer.json, or "
                        "bytes"
                    ) from None
            for tokens in self._sets:
                if tokens.header.tokenizer.sha256 != digest:
                    raise ValueError(
                        f"token set {tokens.path} was made by the tokenizer {tokens.header.tokenizer.name}, and the "
                        f"configuration names {wanted}, another one: give the one that made it, or tokenize the text "
                        "anew"
                    )
        for tokens in self._sets:
            if tokens.header.tokenizer.sha256 != first.header.tokenizer.sha256:
                raise ValueError(
                    f"token set {tokens.path} was made by the tokenizer {tokens.header.tokenizer.name}, and "
                    f"{first.path} by {first.header.tokenizer.name}, another one: tokenize all with one tokenizer"
                )

    def batch(self, step: int, reads: Reads | None = None) -> Batch:
        """Returns the batch of ``step`` (0, 1, ...).

        It has ``tokens``, ``targets`` (int32) and ``weights`` (float32), with ``pack`` also ``positions`` and
        ``segments`` (int32).

        Each is ``[num_microbatches, microbatch_size, length]``. Of ``tokens`` and ``targets`` only the microbatches
        that are read come from the disk; a list of them has the shapes of the others. Safe to call from any thread.
        Raises BrokenData if a file is damaged.
        """
        config, size = self.config, self.config.batch_size
        sources, numbers = self._mixture.sources(int(places_of_step(step, size)[0]), size)
        wanted = {
            name: [reads is None or number in reads.get(name, ()) for number in range(config.num_microbatches)]
            for name in _READ_WHERE_NEEDED
        }
        is_read = np.any([*wanted.values()], axis=0).repeat(config.microbatch_size)
        rows = np.zeros((size, config.length + 1), np.int32)
        leaves: dict[str, NDArray[Any]] = {}
        for source in np.unique(sources).tolist():
            own, of_source = sources == source, self._rows[source]
            items = items_at(numbers[own], num=of_source.num, seed=config.seed, source=source)
            layouts = of_source.layouts(items)
            if self.counts_once:
                layouts["weights"][numbers[own] >= of_source.num] = 0
            for name, leaf in layouts.items():
                leaves.setdefault(name, np.zeros((size, config.length), leaf.dtype))[own] = leaf
            if is_read[own].any():
                rows[own & is_read] = of_source.tokens(items[is_read[own]])
        leaves |= {"tokens": rows[:, :-1], "targets": rows[:, 1:] * (leaves["weights"] > 0)}
        shape = (config.num_microbatches, config.microbatch_size, config.length)
        batch: Batch = {name: leaf.reshape(shape) for name, leaf in leaves.items()}
        for name, is_kept in wanted.items():
            if not all(is_kept):
                import jax

                spec = jax.ShapeDtypeStruct(shape[1:], batch[name].dtype)
                batch[name] = [part if kept else spec for part, kept in zip(batch[name], is_kept, strict=True)]
        return batch


# -- files of Megatron-LM ----------------------------------------------------------------------------------------------

_MAGIC = b"MMIDIDX\x00\x00"
_COUNTS = np.dtype([("magic", "V9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_DTYPES = {4: "uint32", 8: "uint16"}  # 4 is int32, in which no token is below 0


class MegatronTokens(TokenSet):
    """The tokens of ``PREFIX.bin`` and ``PREFIX.idx`` as Megatron-LM's ``preprocess_data.py`` writes them.

    ``PREFIX.idx`` has the number of sequences, that of documents plus 1, then the tokens of each sequence (int32), its
    place in ``PREFIX.bin`` (int64, in bytes), and the first sequence of each document (int64), that of the end behind.

    Args:
        path: the prefix or one of the two files.
        tokenizer: the tokenizer.json that made the tokens, or ``bytes``: the files do not say.

    Raises ValueError as :class:`TokenSet` does, and where ``tokenizer`` is None.
    """

    remedy = "write it anew with Megatron's preprocess_data.py, or name the tokenizer that made it"

    def __init__(self, path: str | os.PathLike[str], tokenizer: str | None) -> None:
        prefix = megatron_prefix(path)
        assert prefix is not None
        self.path, index, file = prefix, Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        if tokenizer is None:
            raise ValueError(f"{index} does not say which tokenizer made its tokens: give it with data.tokenizer")
        made_by = BYTE_TOKENIZER_FILE if tokenizer == BYTE_TOKENIZER.name else read_tokenizer(tokenizer, None)
        try:
            num_bytes, size = index.stat().st_size, file.stat().st_size
            with index.open("rb") as opened:
                start = opened.read(_COUNTS.itemsize)
                digest = FileDigest.of_file(index)
        except OSError as error:
            raise ValueError(f"cannot read {error.filename} ({error.strerror}): give both files of Megatron") from None
        counts = np.frombuffer(start, _COUNTS)[0] if len(start) == _COUNTS.itemsize else None
        if counts is None or counts["magic"].tobytes() != _MAGIC or counts["version"] != 1:
            raise ValueError(f"{index} is no index of Megatron's token files: {self.remedy}")
        sequences, listed = int(counts["sequences"]), int(counts["documents"])
        if num_bytes != _COUNTS.itemsize + 12 * sequences + 8 * listed:
            raise ValueError(f"{index} is damaged ({num_bytes} bytes for {sequences} sequences): {self.remedy}")
        dtype = _DTYPES.get(int(counts["dtype"]))
        if dtype is None:
            raise ValueError(f"{index} has tokens of dtype {counts['dtype']}: write them as uint16 (8) or int32 (4)")
        if size % np.dtype(dtype).itemsize:
            raise ValueError(f"{file} is damaged ({size} bytes, and no whole number of {dtype} tokens): {self.remedy}")
        self.num_tokens, self.num_documents = size // np.dtype(dtype).itemsize, max(0, listed - 1)
        self.header = TokenSetHeader(
            dtype=dtype,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            vocab_size=made_by.vocab_size,
            end_of_document=made_by.end_of_document,
            tokenizer=kind_of_tokens(path, tokenizer).tokenizer,
            tokens=FileDigest(size, ""),  # too large to be read at every start
            documents=FileDigest(8 * self.num_documents, ""),
            sources=None,
            text_column=None,
        )
        self.fingerprint = f"{self.num_tokens} tokens, SHA-256 {digest.sha256[:16]}"
        self._tokens, self._ends, self._counted = SizedFile(file, size), SizedFile(index, num_bytes), None
        self._places, self._firsts = _COUNTS.itemsize + 4 * sequences, _COUNTS.itemsize + 12 * sequences
        self._num_sequences, self._tokenizer_file = sequences, tokenizer_file(tokenizer)
        first = self.document_ends(0, 1) if self.num_documents else ()
        closes = [int(self.tokens(end - 1, end)[0]) == self.header.end_of_document for end in first]
        self.notes = []
        if not all(closes):
            self.notes = [
                f"its first document does not end in token {self.header.end_of_document}, which closes texts: write it "
                "with --append-eod if the model shall learn to end one"
            ]

    def document_ends(self, first: int, stop: int) -> NDArray[np.int64]:
        if not 0 <= first <= stop <= self.num_documents:
            raise IndexError(f"{self.path} has {self.num_documents} documents, and not {first} to {stop}")
        sequences = self._read(self._firsts, first + 1, stop - first)
        if not len(sequences):
            return sequences
        # The end of a document is the place of the first sequence behind it, and behind the last one the file ends.
        low, high = int(sequences.min()), int(sequences.max())
        if 0 <= low <= high <= self._num_sequences:
            places = self._read(self._places, low, min(high + 1, self._num_sequences) - low)
            if high == self._num_sequences:
                places = np.append(places, self.header.tokens.num_bytes)
            ends = places[sequences - low] // np.dtype(self.header.dtype).itemsize
            if (ends[1:] > ends[:-1]).all() and 0 < ends[0] <= ends[-1] <= self.num_tokens:
                return ends
        raise BrokenData(f"{self.path}.idx is damaged (ends of documents that do not ascend): {self.remedy}")

    def _read(self, start: int, first: int, number: int) -> NDArray[np.int64]:
        """Returns some numbers of an array of the index that begins at byte ``start``."""
        stored = bytearray(8 * number)
        self._ends.read_into(memoryview(stored), start + 8 * first)
        return np.frombuffer(stored, "<i8").astype(np.int64)


# ---------------------------------------------------------------------------------------------------------------- rows


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

    def layouts(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Returns ``weights`` ``[rows, length]``: 1 where the next token counts; windows go on across documents."""
        starts = self._first + numbers * self._length
        return {"weights": self._tokens.counted(starts + 1, self._length).astype(np.float32)}


class _PackedRows:
    """Rows of whole documents of a part, ``num`` of them.

    ``_starts`` ``[rows + 1]`` has the beginning of each row and the end of the part; ``_documents`` ``[rows + 1]`` the
    first document of each row, and one more than the last document.
    """

    def __init__(self, tokens: TokenSet, config: RowsConfig, part: Part) -> None:
        self._tokens, self._length = tokens, config.length
        # The first document that begins in the last fraction of the tokens, and all after it, are held out. Where none
        # begins there, as with few documents, it is the last one, unless that is the only one.
        num_train = num_trained(tokens.num_tokens, config.held_out)
        first_held_out = tokens.num_documents
        if num_train < tokens.num_tokens:
            first_held_out = tokens.document_at(num_train)
            begins_before = tokens.document(first_held_out)[0] < num_train
            first_held_out += begins_before and not 0 < first_held_out == tokens.num_documents - 1
        first, stop = (0, first_held_out) if part == TRAIN else (first_held_out, tokens.num_documents)
        self._starts, self._documents = row_index(tokens, config.length, first, stop)
        self.num = len(self._starts) - 1

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

    def layouts(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Returns the places of documents in the rows of these numbers, each ``[rows, length]``.

        ``positions``, int32, count from 0 in each document; ``segments``, int32, number the documents of a row from 1;
        ``weights``, float32, are 1 if the next token is of the same document and counts. All are 0 in padding.
        """
        places = np.arange(self._length, dtype=np.int32)
        is_token = places < (self._starts[numbers + 1] - self._starts[numbers])[:, None]
        begins = np.zeros((len(numbers), self._length + 1), bool)
        begins[:, 0] = True
        for row, number in enumerate(numbers.tolist()):
            first, following = self._documents[number : number + 2].tolist()
            # The document that the next row begins with may begin in this one.
            ends = self._tokens.document_ends(first, min(following + 1, self._tokens.num_documents))
            ends = ends - self._starts[number]
            begins[row, ends[(ends > 0) & (ends <= self._length)]] = True
        begins, is_last = begins[:, :-1], begins[:, 1:]
        is_counted = self._tokens.counted(self._starts[numbers] + 1, self._length)
        positions = places - np.maximum.accumulate(np.where(begins, places, np.int32(0)), axis=1)
        return {
            "positions": positions * is_token,
            "segments": np.cumsum(begins, axis=1, dtype=np.int32) * is_token,
            "weights": (is_token & ~is_last & is_counted).astype(np.float32),
        }


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
        # Each document that begins a row is found from the one before it.
        following = np.searchsorted(ends, last_pieces + length, side="right").tolist()
        leaders = [0]
        while (further := following[leaders[-1]]) < len(following):
            leaders.append(further)
        # The last one begins a row that documents of the next block may share.
        own = np.array(leaders if until == stop else leaders[:-1])
        num_pieces = (last_pieces[own] - begins[own]) // length + 1
        piece = np.arange(num_pieces.sum()) - (np.cumsum(num_pieces) - num_pieces).repeat(num_pieces)
        starts.append(begins[own].repeat(num_pieces) + piece * length)
        documents.append((own + at).repeat(num_pieces))
        if until == stop:
            end = int(ends[-1])
            break
        assert len(leaders) > 1, "a block has documents enough for more than a row"
        end = int(begins[leaders[-1]])
        at += leaders[-1]
    return np.concatenate([*starts, [end]]).astype(np.int64), np.concatenate([*documents, [stop]]).astype(np.int64)


def token_rows(tokens: TokenSet, config: RowsConfig, part: Part) -> _Windows | _PackedRows:
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
