"""Maps arrays of our models to tensors of Hugging Face and back, bit by bit.

A :data:`NameTable` goes from the dotted path of an array of ours to a transform and the name of the tensor in their
files. ``N`` stands for the number of a layer and ``E`` for the number of an expert, on both sides::

    "layers.N.attention.query.kernel": (TRANSPOSED, "model.layers.N.self_attn.q_proj.weight")

Products are ``x @ kernel`` here, with ``kernel`` ``[in, out]``, and ``x @ weight.T`` there, with ``weight``
``[out, in]``. Most transforms only look at an array in another way; those of several arrays or tensors copy them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

import numpy as np

TensorShape = tuple[int, ...]


class Transform(NamedTuple):
    """Three functions that turn an array of ours into one tensor of theirs or several, and back."""

    their_shapes: Callable[[TensorShape], list[TensorShape]]
    """The shapes of the tensors that an array of this shape becomes."""
    to_ours: Callable[[Sequence[np.ndarray]], np.ndarray]
    """The array that these tensors become."""
    to_theirs: Callable[[np.ndarray], list[np.ndarray]]
    """The tensors that this array becomes; of one that shares its tensor with others, see :attr:`joined`."""
    joined: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None
    """The one tensor that several arrays become, in the order of their names. None: none shares a tensor."""
    dtype: str | None = None
    """The dtype on both sides, whatever that of the model is; None: the model's."""


SAME = Transform(lambda ours: [ours], lambda theirs: theirs[0], lambda ours: [ours])
"""The array is the same on both sides."""
TRANSPOSED = Transform(lambda ours: [ours[::-1]], lambda theirs: theirs[0].T, lambda ours: [ours.T])
"""The kernel of a product, ``[in, out]`` here and ``[out, in]`` there."""
SAME_FLOAT32, TRANSPOSED_FLOAT32 = (each._replace(dtype="float32") for each in (SAME, TRANSPOSED))
"""The same, in float32 also where the model is in bfloat16."""
PER_EXPERT = Transform(
    lambda ours: [ours[:0:-1]] * ours[0],
    lambda theirs: np.stack([matrix.T for matrix in theirs]),
    lambda ours: [matrix.T for matrix in ours],
)
"""The matrices of all experts, one array ``[experts, in, out]`` here and one tensor ``[out, in]`` each there."""


@cache
def every_second(first: int) -> Transform:
    """Returns the transform of an array that is every second column of a tensor, from number ``first`` on."""
    return Transform(
        lambda ours: [(*ours[:-1], 2 * ours[-1])],
        lambda theirs: theirs[0][..., first::2],
        lambda ours: [],
        lambda arrays: np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1),
    )


@cache
def part_of_joined(number: int, order: tuple[int, ...]) -> Transform:
    """Returns the transform of an array that is part ``number`` of the rows of a tensor, as :data:`TRANSPOSED`.

    ``order`` has, in the order of parts, the places of their arrays among those of the tensor by the order of names.
    """
    return Transform(
        lambda ours: [(len(order) * ours[-1], *ours[:-1])],
        lambda theirs: np.split(theirs[0], len(order))[number].T,
        lambda ours: [],
        lambda arrays: np.concatenate([arrays[place].T for place in order]),
    )


@cache  # so that equal ones compare as equal
def with_leading_axes(num: int) -> Transform:
    """Returns the transform of arrays before which ``num`` axes of length 1 stand in their files."""
    return Transform(
        lambda ours: [(1,) * num + ours],
        lambda theirs: theirs[0].reshape(theirs[0].shape[num:]),
        lambda ours: [ours.reshape((1,) * num + ours.shape)],
    )


@cache
def patch_kernel(channels: int, height: int, width: int) -> Transform:
    """Returns the transform of the product with patches, ``[channels * height * width, out]`` here and the kernel of a
    convolution there, ``[out, channels, height, width]``."""
    return Transform(
        lambda ours: [(ours[1], channels, height, width)],
        lambda theirs: theirs[0].reshape(len(theirs[0]), -1).T,
        lambda ours: [ours.T.reshape(-1, channels, height, width)],
    )


@cache
def video_kernel(channels: int, frames: int, size: int) -> Transform:
    """Returns the transform of the product with patches of several frames, ``[frames * channels * size * size, out]``
    here and the kernel of a convolution there, ``[out, channels, frames, size, size]``."""
    return Transform(
        lambda ours: [(ours[1], channels, frames, size, size)],
        lambda theirs: theirs[0].swapaxes(1, 2).reshape(len(theirs[0]), -1).T,
        lambda ours: [ours.T.reshape(-1, frames, channels, size, size).swapaxes(1, 2)],
    )


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


PEFT = "base_model.model."
"""The prefix of a model's modules in the files of PEFT."""
_PEFT_FACTORS = {"lora_a": ".lora_A.weight", "lora_b": ".lora_B.weight"}


def match_adapters(table: NameTable, shapes: Mapping[tuple[str, ...], TensorShape]) -> list[TensorMatch]:
    """Returns the tensors in which PEFT keeps every array of the adapters among ``shapes``, as :func:`match_tensors`
    does for those of the model."""
    from rrfp_jax.programs.chunk import ADAPTERS  # loads JAX

    found = []
    for ours, shape in shapes.items():
        if ours[0].startswith(ADAPTERS):
            matrix = (ours[0].removeprefix(ADAPTERS), *ours[1:-1], "kernel")
            (match,) = match_tensors(table, {matrix: shape})
            name = PEFT + match.theirs[0].removesuffix(".weight") + _PEFT_FACTORS[ours[-1]]
            found.append(TensorMatch(ours, shape, TRANSPOSED, (name,)))
    return found


def short_targets(paths: Sequence[str], all_paths: Iterable[str]) -> list[str]:
    """Returns targets that stand for these matrices and no other: a path's last name where all of that name are among
    them, and else the whole path."""
    others = {path.rpartition(".")[2] for path in all_paths if path not in set(paths)}
    ends = {path: path.rpartition(".")[2] for path in paths}
    return list(dict.fromkeys(path if end in others else end for path, end in ends.items()))


def by_tensor(matches: Iterable[TensorMatch]) -> list[list[TensorMatch]]:
    """Returns the matches, those of one tensor together, in the order of their first."""
    groups: dict[tuple[str, ...], list[TensorMatch]] = {}
    for match in matches:
        groups.setdefault(match.theirs, []).append(match)
    return list(groups.values())


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
