"""Maps arrays of our models to tensors of Hugging Face and back, bit by bit.

A :data:`NameTable` goes from the dotted path of an array of ours to a transform and the name of the tensor in their
files. ``N`` stands for the number of a layer and ``E`` for the number of an expert, on both sides::

    "layers.N.attention.query.kernel": (TRANSPOSED, "model.layers.N.self_attn.q_proj.weight")

Products are ``x @ kernel`` here, with ``kernel`` ``[in, out]``, and ``x @ weight.T`` there, with ``weight``
``[out, in]``. A transform only looks at an array in another way: nothing is copied but by :class:`PerExpert`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import numpy as np

TensorShape = tuple[int, ...]


class Transform(Protocol):
    """Turns an array of ours into one tensor of theirs or several, and back."""

    def their_shapes(self, ours: TensorShape) -> list[TensorShape]:
        """Returns the shapes of the tensors that an array of this shape becomes."""

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the array that these tensors become."""

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Returns the tensors that this array becomes."""


@dataclass(frozen=True)
class Unchanged:
    """The array is the same on both sides, but for axes of length 1 that stand before theirs."""

    num_leading: int = 0

    def their_shapes(self, ours: TensorShape) -> list[TensorShape]:
        """Returns our shape behind the leading axes."""
        return [(1,) * self.num_leading + ours]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor without its leading axes."""
        return theirs[0].reshape(theirs[0].shape[self.num_leading :])

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Returns the array with the leading axes."""
        return [ours.reshape(self.their_shapes(ours.shape)[0])]


@dataclass(frozen=True)
class Transposed:
    """The kernel of a product, ``[in, out]`` here and ``[out, in]`` there."""

    def their_shapes(self, ours: TensorShape) -> list[TensorShape]:
        """Returns the axes in reverse order."""
        return [ours[::-1]]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the transposed matrix."""
        return theirs[0].T

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Returns the transposed matrix."""
        return [ours.T]


@dataclass(frozen=True)
class PatchConvolution:
    """The product with patches, ``[channels * height * width, out]`` here and the kernel of a convolution there."""

    channels: int
    height: int
    width: int

    def their_shapes(self, ours: TensorShape) -> list[TensorShape]:
        """Returns the shape ``[out, channels, height, width]``."""
        return [(ours[1], self.channels, self.height, self.width)]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the kernel with the values of a patch in one axis, in the order channel, row, column."""
        return theirs[0].reshape(len(theirs[0]), -1).T

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Returns the kernel with the values of a patch in three axes."""
        return [ours.T.reshape(self.their_shapes(ours.shape)[0])]


@dataclass(frozen=True)
class PerExpert:
    """The matrices of all experts, one array ``[experts, in, out]`` here and one tensor ``[out, in]`` each there."""

    def their_shapes(self, ours: TensorShape) -> list[TensorShape]:
        """Returns one shape for each expert."""
        return [ours[:0:-1]] * ours[0]

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a copy of the matrices in one array."""
        return np.stack([matrix.T for matrix in theirs])

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Returns the matrix of each expert."""
        return [matrix.T for matrix in ours]


SAME, TRANSPOSED, PER_EXPERT = Unchanged(), Transposed(), PerExpert()
NameTable = Mapping[str, tuple[Transform, str]]
_LAYER_NUMBER = re.compile(r"(?<=\blayers\.)\d+")


class TensorMatch(NamedTuple):
    """An array of ours and the tensors that hold it in their files."""

    ours: tuple[str, ...]
    """The layer, then the path of the array in the layer."""
    shape: TensorShape
    transform: Transform
    theirs: tuple[str, ...]
    """Names of tensors: one, or one for each expert."""

    @property
    def their_shapes(self) -> list[TensorShape]:
        """The shapes of the tensors, in the order of their names."""
        return self.transform.their_shapes(self.shape)


def match_tensors(table: NameTable, shapes: Mapping[tuple[str, ...], TensorShape]) -> list[TensorMatch]:
    """Returns the tensors of every array of a model, in the order of ``shapes``, whose keys begin with the layer.

    Raises ValueError for an array that the family has no tensor for.
    """
    found = []
    for ours, shape in shapes.items():
        path = ".".join(ours)
        number = _LAYER_NUMBER.search(path)
        rule = table.get(_LAYER_NUMBER.sub("N", path))
        if rule is None:
            raise ValueError(f"{'/'.join(ours)} has no place in this family: export the model in another one")
        transform, pattern = rule
        name = pattern if number is None else pattern.replace(".N.", f".{number[0]}.")
        experts = range(len(transform.their_shapes(shape)))
        names = tuple(name.replace(".E.", f".{expert}.") for expert in experts) if ".E." in name else (name,)
        found.append(TensorMatch(ours, shape, transform, names))
    return found


def prefixed(table: NameTable, ours: str, theirs: str) -> NameTable:
    """Returns the table of a model that is part of a larger one, with these prefixes before the names."""
    return {ours + path: (transform, theirs + name) for path, (transform, name) in table.items()}


def linears_and_norms(ours: str, theirs: str, linears: Mapping[str, str], norms: Mapping[str, str]) -> NameTable:
    """Returns the table of products with kernel and bias, and of norms with scale and bias, below these prefixes."""
    table: dict[str, tuple[Transform, str]] = {}
    for own, name in linears.items():
        table[f"{ours}{own}.kernel"] = (TRANSPOSED, f"{theirs}{name}.weight")
    for own, name in norms.items():
        table[f"{ours}{own}.scale"] = (SAME, f"{theirs}{name}.weight")
    return table | {f"{ours}{own}.bias": (SAME, f"{theirs}{name}.bias") for own, name in {**linears, **norms}.items()}


def older_name(name: str, newer: Iterable[tuple[str, str]]) -> str:
    """Returns the name that a tensor had in older files; ``newer`` pairs prefixes of newer names with older ones."""
    for prefix, instead in newer:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a name fits one of the patterns, in which ``*`` stands for anything."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
