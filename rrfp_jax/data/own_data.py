"""A data set of one's own in place of ours: nothing but its length and its elements by number is asked of it.

An element is a mapping of leaves, arrays of one sample: ``tokens``, ``targets`` and ``weights``, and with ``pack``
``positions`` and ``segments``, each ``[length]`` and alike in all elements. A ``grain.MapDataset`` is one as it stands:
element ``i`` is a function of ``i`` alone there. A data set that only iterates is none, as its position would be state.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.config import OwnDataConfig
from rrfp_jax.data.dataset import Batch, BrokenData, BucketSpecs, Reads
from rrfp_jax.data.sample_order import (
    HELD_OUT,
    TRAIN,
    Part,
    items_at,
    num_trained,
    places_of_step,
    refuse_nothing_held_out,
)

_DTYPES: dict[str, type] = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
_OF_PACKED: dict[str, type] = {"positions": np.int32, "segments": np.int32}
_IDS = ("tokens", "targets")
_MOST_WEIGHT = float(np.finfo(np.float32).max)
_MOST_NUMBERS = 2**62
"""A data set that repeats itself for ever may say that it is longer."""

_Element = dict[str, NDArray[Any]]


class OwnData:
    """A deterministic data set of the elements of ``config.object``; see the module's text.

    Args:
        vocab_size: of the model; tokens and targets are less.
        part: the elements that are trained on, or those that are held out.

    Attributes: ``config``; ``num_elements`` of the part; ``vocab_size``; ``is_packed``; ``fingerprint``: its own, if it
    has a text of that name, else its length and a digest of the first element; ``counts_once``, whether an element that
    has come before has no weight, as in evaluations; ``token_kind``, None, because the data set does not say which
    tokens its numbers stand for.
    Raises ValueError, with the remedy, where there is no such object, or its first element does not fit.
    """

    counts_once = False
    token_kind = None

    def __init__(self, config: OwnDataConfig, vocab_size: int, part: Part = TRAIN) -> None:
        refuse_nothing_held_out(part, config.held_out)
        self.config, self.vocab_size, self.is_packed = config, vocab_size, config.pack
        self._dtypes = _DTYPES | (_OF_PACKED if config.pack else {})
        self._elements = _found(config)
        num_all = min(len(self._elements), _MOST_NUMBERS)
        num_train = num_trained(num_all, config.held_out)
        self._first, self.num_elements = (num_train, num_all - num_train) if part == HELD_OUT else (0, num_train)
        if not self.num_elements:
            where = "held out" if part == HELD_OUT else "left to train on"
            raise ValueError(
                f"{config.object} has {num_all} elements, and none is {where}: give more, or less held_out"
            )
        self._shape: tuple[int, ...] | None = None
        self._blank = first = self._element(0)
        self._shape = first["tokens"].shape
        self._blank = {**first, "weights": np.zeros_like(first["weights"])}
        self.fingerprint = getattr(self._elements, "fingerprint", None)
        if not isinstance(self.fingerprint, str):
            digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in first.values())).hexdigest()[:16]
            self.fingerprint = f"{num_all} elements, SHA-256 of the first {digest}"

    @property
    def buckets(self) -> list[BucketSpecs]:
        """The one shape of all microbatches."""
        import jax

        shape = (self.config.microbatch_size, *(self._shape or ()))
        return [{name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in self._dtypes.items()}]

    def batch(self, step: int, reads: Reads | None = None, left_out: Container[int] = ()) -> Batch:
        """Returns the batch of ``step`` (0, 1, ...): the leaves, ``[num_microbatches, microbatch_size, length]``.

        An element that counts nothing takes the place of each one in ``left_out``, by its number in the step. The data
        set is not asked for elements of microbatches of which nothing is read, unless they have ``segments``. Raises
        BrokenData, naming the element, if one fails or does not fit.
        """
        config = self.config
        places = places_of_step(step, config.batch_size)
        items = items_at(places, num=self.num_elements, seed=config.seed) if config.shuffle else places
        numbers, again = (items % self.num_elements).tolist(), places >= self.num_elements
        spec = self.buckets[0]
        microbatches: list[Mapping[str, Any]] = []
        for start in range(0, config.batch_size, config.microbatch_size):
            number = start // config.microbatch_size
            if reads is not None and not self.is_packed and all(number not in reads.get(n, ()) for n in self._dtypes):
                microbatches.append(spec)
                continue
            elements: list[_Element] = []
            for place in range(start, start + config.microbatch_size):
                try:
                    elements.append(self._blank if place in left_out else self._element(numbers[place]))
                except BrokenData as error:
                    error.sample = place
                    raise
            leaves = {name: np.stack([element[name] for element in elements]) for name in self._dtypes}
            if self.counts_once:
                leaves["weights"][again[start : start + config.microbatch_size]] = 0
            microbatches.append(leaves)
        batch = {name: [microbatch[name] for microbatch in microbatches] for name in self._dtypes}
        is_whole = all(microbatch is not spec for microbatch in microbatches)
        return {name: np.stack(leaf) for name, leaf in batch.items()} if is_whole else batch

    def _element(self, number: int) -> _Element:
        """Returns element ``number`` of the part, checked."""
        number += self._first
        what = f"element {number} of {self.config.object}"
        try:
            found = self._elements[number]
        except Exception as error:  # whatever somebody else's code raises
            raise BrokenData(f"{what} cannot be read ({type(error).__name__}: {error}): mend the data set") from error
        if not isinstance(found, Mapping):
            raise BrokenData(f"{what} is of type {type(found).__name__}: let it be a mapping of leaves")
        missing = [name for name in self._dtypes if name not in found]
        if missing:
            raise BrokenData(f"{what} lacks {', '.join(missing)}: it has {', '.join(map(str, found)) or 'nothing'}")
        leaves = {name: np.asarray(found[name]) for name in self._dtypes}
        shape = self._shape or leaves["tokens"].shape
        for name, leaf in leaves.items():
            if leaf.shape != shape or len(shape) != 1:
                raise BrokenData(
                    f"{what} has {name} of shape {list(leaf.shape)}: let all leaves of all elements be of one length, "
                    f"that of the first tokens, {list(shape)}"
                )
            if leaf.dtype.kind not in ("biuf" if name == "weights" else "iu"):
                raise BrokenData(f"{what} has {name} of {leaf.dtype}: give whole numbers, or numbers for weights")
        weights = leaves["weights"]
        if weights.size and not ((weights >= 0) & (weights <= _MOST_WEIGHT)).all():
            raise BrokenData(
                f"{what} has weights from {weights.min()} to {weights.max()}: give numbers that are finite, "
                "not negative, and 0 where nothing is to be predicted"
            )
        if leaves["targets"].size and leaves["targets"].min() < 0:
            raise BrokenData(
                f"{what} has the target {leaves['targets'].min()}: where nothing is to be predicted, give the weight 0 "
                "and any token as target"
            )
        for name in _IDS:
            if leaves[name].size and not 0 <= int(leaves[name].min()) <= int(leaves[name].max()) < self.vocab_size:
                raise BrokenData(
                    f"{what} has {name} from {leaves[name].min()} to {leaves[name].max()}, and the model a vocabulary "
                    f"of {self.vocab_size}: give a larger vocab_size, or other tokens"
                )
        return {name: leaf.astype(self._dtypes[name]) for name, leaf in leaves.items()}


def _found(config: OwnDataConfig) -> Any:
    """Returns the data set that the configuration names; raises ValueError where there is none."""
    module, _, name = config.object.partition(":")

    def is_pythons_own(module: str) -> bool:
        return module.partition(".")[0] in sys.stdlib_module_names

    # Python's own library holds no data set, but much that does harm when it is called.
    refusal = ValueError(
        f"object {config.object} is of Python's standard library: name a class, function or data set of yours"
    )
    if is_pythons_own(module):
        raise refusal
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if isinstance(found, type) or not hasattr(found, "__getitem__"):
            if is_pythons_own(getattr(found, "__module__", None) or "builtins"):
                raise refusal
            found = found(**config.arguments)
        elif config.arguments:
            raise ValueError("it is a data set already and takes no arguments")
    except Exception as error:  # whatever somebody else's code raises
        if error is refusal:
            raise
        raise ValueError(
            f"{config.object} cannot be had ({type(error).__name__}: {error}): mend object or arguments"
        ) from error
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(found, method)]
    if missing:
        raise ValueError(
            f"{config.object} is of type {type(found).__name__}, without {' and '.join(missing)}: give a data set with "
            "a length and elements by number, such as a grain.MapDataset"
        )
    return found
