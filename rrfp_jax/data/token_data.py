"""Rows of token sets, shuffled anew every epoch and mixed by weight; any step's batch follows from its number.

Sample ``n`` of the run is of the source that :class:`Mixture` gives it, and there the row that the order of an epoch
(:mod:`rrfp_jax.data.sample_order`) has at its place. A source that is used up begins its next epoch while others are
still in their first. So there is no state: batch ``n`` is the same in every layout and after every restart.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import Batch, Reads
from rrfp_jax.data.held_out import TRAIN, Part
from rrfp_jax.data.sample_order import Mixture, check_step, items_at
from rrfp_jax.data.token_kind import kind_of_set
from rrfp_jax.data.token_rows import RowLayouts, token_rows
from rrfp_jax.data.tokenizer_files import tokenizer_file
from rrfp_jax.data.tokens import TokenSet
from rrfp_jax.data.tokens.header import BYTE_TOKENIZER
from rrfp_jax.data.tokens_config import TokensConfig

_READ_WHERE_NEEDED = ("tokens", "targets")  # leaves that are read from the disk, by the processes that need them


class Tokens:
    """A deterministic data set of tokens; see the module's text.

    Args:
        part: the rows that are trained on, or those that are held out; an epoch visits every row of either once.

    Attributes: ``config``; ``num_rows`` of the part; ``vocab_size``: every token is less; ``fingerprint`` of all token
    sets; ``is_packed``; ``bytes_per_token``, None where a tokenizer made them; ``token_kind``, the kind of the tokens;
    ``notes``, sentences about the token sets.

    Raises ValueError, with the remedy, if a token set cannot be used, has no row, or was made by another tokenizer than
    the configuration names or than the others were made by.
    """

    buckets = None
    """None, since all microbatches have one shape."""
    counts_once = False
    """Whether a row that has come before has no weight, as in evaluations."""

    def __init__(self, config: TokensConfig, part: Part = TRAIN) -> None:
        self.config, self.is_packed = config, config.pack
        self._sets = [TokenSet(path) for path in config.path]
        self._check_tokenizers()
        self._rows = [token_rows(tokens, config, part) for tokens in self._sets]
        weights = config.weights or [rows.num for rows in self._rows]
        self._mixture = Mixture(weights)
        self.num_rows = sum(rows.num for rows in self._rows)
        self.vocab_size = max(tokens.vocab_size for tokens in self._sets)
        is_bytes = all(tokens.header.tokenizer.sha256 is None for tokens in self._sets)
        self.bytes_per_token = 1.0 if is_bytes else None
        self.fingerprint = "; ".join(tokens.fingerprint for tokens in self._sets)
        self.token_kind = kind_of_set(self._sets[0].path, self._sets[0].header)
        notes = ((tokens.path, tokens.header.unknown_note) for tokens in self._sets)
        self.notes = [f"{path}: {note}" for path, note in notes if note is not None]

    def _check_tokenizers(self) -> None:
        names = [tokens.header.tokenizer for tokens in self._sets]
        if self.config.tokenizer is not None:
            _check_tokenizer(self.config.tokenizer, self._sets)
        other = next((number for number, name in enumerate(names) if name.sha256 != names[0].sha256), None)
        if other is not None:
            raise ValueError(
                f"token set {self._sets[other].path} was made by the tokenizer {names[other].name}, and "
                f"{self._sets[0].path} by {names[0].name}, another one: tokenize all with one tokenizer"
            )

    def batch(self, step: int, reads: Reads | None = None) -> Batch:
        """Returns the batch of ``step`` (0, 1, ...).

        It has ``tokens``, ``targets`` (int32) and ``weights`` (float32), with ``pack`` also ``positions`` and
        ``segments`` (int32).

        Each is ``[num_microbatches, microbatch_size, length]``. Of ``tokens`` and ``targets`` only the microbatches
        that are read come from the disk; a list of them has the shapes of the others. Safe to call from any thread.
        Raises BrokenData if a file is damaged.
        """
        check_step(step)
        config = self.config
        sources, numbers, again = self._places(step)
        wanted = {
            name: [reads is None or number in reads.get(name, ()) for number in range(config.num_microbatches)]
            for name in _READ_WHERE_NEEDED
        }
        rows = self._read(sources, numbers, np.any([*wanted.values()], axis=0).repeat(config.microbatch_size))
        leaves = self._layouts(sources, numbers)
        if self.counts_once:
            leaves["weights"][again] = 0
        leaves |= {"tokens": rows[:, :-1], "targets": rows[:, 1:] * (leaves["weights"] > 0)}
        shape = (config.num_microbatches, config.microbatch_size, config.length)
        whole = {name: leaf.reshape(shape) for name, leaf in leaves.items()}
        return whole | {name: _where_read(whole[name], wanted[name]) for name in wanted}

    def _places(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Returns (source, number of the row in it, whether it has come before) of every row of a batch, each
        ``[batch_size]``."""
        size, seed = self.config.batch_size, self.config.seed
        sources, numbers = self._mixture.sources(step * size, size)
        again = numbers >= np.array([rows.num for rows in self._rows])[sources]
        for source in np.unique(sources).tolist():
            own = sources == source
            numbers[own] = items_at(numbers[own], num=self._rows[source].num, seed=seed, source=source)
        return sources, numbers, again

    def _read(
        self, sources: NDArray[np.int64], numbers: NDArray[np.int64], is_read: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Returns the rows that are read, ``[batch_size, length + 1]``, with zeros in place of the others."""
        rows = np.zeros((len(sources), self.config.length + 1), np.int32)
        for source in np.unique(sources[is_read]).tolist():
            own = is_read & (sources == source)
            rows[own] = self._rows[source].tokens(numbers[own])
        return rows

    def _layouts(self, sources: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Returns the leaves that are the same in every process, ``[batch_size, length]``."""
        shape = (len(sources), self.config.length)
        if not self.is_packed:
            return {"weights": np.ones(shape, np.float32)}
        leaves = {name: np.empty(shape, np.float32 if name == "weights" else np.int32) for name in RowLayouts._fields}
        for source in np.unique(sources).tolist():
            own = sources == source
            for name, leaf in self._rows[source].layouts(numbers[own])._asdict().items():
                leaves[name][own] = leaf
        return leaves


def _where_read(leaf: NDArray[Any], is_read: Sequence[bool]) -> Any:
    """Returns the whole leaf, or a list with shapes in place of the microbatches that are not read."""
    if all(is_read):
        return leaf
    import jax

    spec = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return [part if kept else spec for part, kept in zip(leaf, is_read, strict=True)]


def _check_tokenizer(wanted: str, sets: Sequence[TokenSet]) -> None:
    """Raises ValueError if a token set was made by another tokenizer than this one."""
    digest, path = None, tokenizer_file(wanted)
    if wanted != BYTE_TOKENIZER.name:
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(
                f"cannot read the tokenizer {path} ({error.strerror}): give the path of a tokenizer.json, or bytes"
            ) from None
    for tokens in sets:
        if tokens.header.tokenizer.sha256 != digest:
            raise ValueError(
                f"token set {tokens.path} was made by the tokenizer {tokens.header.tokenizer.name}, and the "
                f"configuration names {wanted}, another one: give the one that made it, or tokenize the text anew"
            )
