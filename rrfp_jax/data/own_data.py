"""A data set of one's own in place of ours: its elements by number, or one after the other.

An element is a mapping of leaves, arrays of one sample: ``tokens``, ``targets`` and ``weights``, and with ``pack``
``positions`` and ``segments``, each ``[length]`` and alike in all elements. A ``grain.MapDataset`` is one as it stands:
element ``i`` is a function of ``i`` alone there.

A data set that only iterates must give the same elements in every process and after every start. Where its iterators
have ``get_state`` and ``set_state``, as those of ``grain.IterDataset``, checkpoints carry the state of the next step;
without, a run that goes on draws all elements before its own once more.
"""

import base64
import hashlib
import importlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
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

_KEPT_STEPS = 32

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
        is_endless = isinstance(self._elements, _Drawn)
        if is_endless and config.held_out:
            raise ValueError(
                f"{config.object} only iterates: leave held_out out, and give evaluations a set of their own"
            )
        self._is_shuffled = config.shuffle and not is_endless
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
            self.fingerprint = f"{'' if is_endless else num_all} elements, SHA-256 of the first {digest}".lstrip()

    def state_at(self, step: int) -> Any:
        """Returns the state, as plain data, of a data set that iterates before it gives the batch of ``step``, one of
        the last; None if it has none."""
        return self._elements.states.get(step * self.config.batch_size) if isinstance(self._elements, _Drawn) else None

    def go_on(self, step: int, state: Any) -> None:
        """Takes the state of :meth:`state_at`, so that the next batch is that of ``step``."""
        if isinstance(self._elements, _Drawn) and state is not None:
            self._elements.go_on(step * self.config.batch_size, state)

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
        items = items_at(places, num=self.num_elements, seed=config.seed) if self._is_shuffled else places
        numbers = (items % self.num_elements).tolist()
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
                again = places >= (
                    self._elements.num_in_epoch if isinstance(self._elements, _Drawn) else self.num_elements
                )
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
    make: Callable[..., Any] | None = None
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if isinstance(found, type) or not (hasattr(found, "__getitem__") or hasattr(found, "__iter__")):
            if is_pythons_own(getattr(found, "__module__", None) or "builtins"):
                raise refusal
            make = found
            found = make(**config.arguments)
        elif config.arguments:
            raise ValueError("it is a data set already and takes no arguments")
    except Exception as error:  # whatever somebody else's code raises
        if error is refusal:
            raise
        raise ValueError(
            f"{config.object} cannot be had ({type(error).__name__}: {error}): mend object or arguments"
        ) from error
    if all(hasattr(found, method) for method in ("__len__", "__getitem__")):
        return found
    if hasattr(found, "__iter__"):
        # A generator runs once, and the function that made it makes another.
        is_once = make is not None and isinstance(found, Iterator)
        return _Drawn(partial(make, **config.arguments) if make is not None and is_once else found.__iter__, config)
    raise ValueError(
        f"{config.object} is of type {type(found).__name__}, without __len__ and __getitem__, and without __iter__: "
        "give a data set with elements by number, such as a grain.MapDataset, or one that iterates"
    )


class _Drawn:
    """The elements of a data set that iterates, by their numbers over all epochs. Safe to use from any thread.

    Threads make batches ahead, not always in order, and the first batch is also read for its shapes. So the elements of
    the last steps are kept; for earlier ones the data set begins anew.

    Args:
        make: makes an iterator over the elements of an epoch.

    Attributes: ``states``, the states of the iterator before the first elements of the last steps, by their numbers;
    ``num_in_epoch``, infinite until the end of the data set was seen.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], config: OwnDataConfig) -> None:
        self._make, self._config, self._lock = make, config, threading.Lock()
        self.num_in_epoch, self._kept = math.inf, dict[int, Any]()
        self._begin(make())

    def __len__(self) -> int:
        return _MOST_NUMBERS

    def _begin(self, iterator: Iterator[Any]) -> None:
        self._iterator: Any = iterator
        self._next = 0
        self._error: Exception | None = None
        self._kept = {number: each for number, each in self._kept.items() if number < self._config.batch_size}
        self.states = dict[int, Any]()

    def _another(self) -> Iterator[Any]:
        if (iterator := self._make()) is self._iterator:
            raise ValueError("an iterator cannot begin anew: name a class or a function that makes it")
        return iterator

    def go_on(self, number: int, state: Any) -> None:
        """Takes the state that the iterator had before element ``number``."""
        with self._lock:
            # The first batch stays, which is also read in the middle of a run, for its shapes.
            while self._next < self._config.batch_size:
                self._draw()
            self._begin(self._another())
            self._next = number
            self._iterator.set_state(base64.b64decode(state["base64"]) if "base64" in state else state["plain"])

    def __getitem__(self, number: int) -> Any:
        with self._lock:
            if number < self._next and number not in self._kept:
                self._begin(self._another())
            while self._next <= number:
                # An iterator that has failed has lost its place, so nothing behind that is read.
                if self._error is not None:
                    raise self._error
                try:
                    self._draw()
                except Exception as error:
                    self._error = error
                    raise
            return self._kept[number]

    def _draw(self) -> None:
        size, number = self._config.batch_size, self._next
        if number % size == 0 and hasattr(self._iterator, "get_state"):
            state = self._iterator.get_state()
            is_bytes = isinstance(state, bytes)
            # a copy, since the iterator goes on, in the form in which checkpoints have it
            self.states[number] = json.loads(
                json.dumps({"base64": base64.b64encode(state).decode()} if is_bytes else {"plain": state})
            )
        for _ in range(2):
            try:
                self._kept[number] = next(self._iterator)
                break
            except StopIteration:
                self.num_in_epoch = min(self.num_in_epoch, number)
                self._iterator = self._another()
        else:
            raise ValueError("it has no elements")
        self._next += 1
        if self._next % size == 0:
            for old in range(max(size, self._next - (_KEPT_STEPS + 1) * size), self._next - _KEPT_STEPS * size):
                self._kept.pop(old, None)
                self.states.pop(old, None)
