"""How a message between stages travels: a header of plain data, and one frame per array that is not empty.

The header holds the message's identity, the shape of the pytree (dicts, lists, tuples, None, plain scalars) and each
array's dtype and shape; frames are the arrays' own bytes, so nothing is copied on the way out, nor on the way in where
a frame is aligned.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rrfp_jax.arbitration import Message, MessageKind
from rrfp_jax.runtime.network.plain import MalformedMessage, field
from rrfp_jax.tasks import NO_MICROBATCH

_NATIVE = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _NATIVE.split()}
for _name in dir(ml_dtypes):
    _type = getattr(ml_dtypes, _name)
    if isinstance(_type, type) and issubclass(_type, np.generic):
        _DTYPES[_name] = np.dtype(_type)

_KINDS = {str(kind): kind for kind in MessageKind}
_MAX_DEPTH = 32
_MAX_NDIM = 32
_MAX_BYTES = 1 << 48
_ARRAY, _DICT, _LIST, _TUPLE, _VALUE = "array", "dict", "list", "tuple", "value"

Node = list[Any]
"""A node of the header's tree: its kind, then what belongs to that kind."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A decoded message: its identity within the run and what it carries (arrays are NumPy's, and may be read-only)."""

    step: int
    message: Message
    payload: Any


def encode(step: int, message: Message, payload: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """Turn a message into a header and frames, which share memory with the arrays of ``payload``.

    Args:
        payload: a pytree of dicts (keys are strings or integers), lists, tuples and None over arrays (NumPy's, or
            anything that NumPy can view) and plain scalars. Arrays that are not C-contiguous are copied.

    Raises:
        ValueError: for a dtype or a container that does not travel.
    """
    frames: list[memoryview] = []
    tree = _encode(payload, frames, 0)
    return {"step": step, "message": [str(message.kind), *message[1:]], "tree": tree}, frames


def decode(header: Mapping[str, Any], frames: Sequence[Any], *, alignment: int = 1) -> Envelope:
    """Rebuild a message from its header and frames (any objects with the buffer protocol).

    Args:
        alignment: bytes, a power of two. An array whose frame does not start at a multiple of it, or of what its dtype
            needs, is copied to memory that does. XLA on CPU takes memory at a multiple of 64 as it is.

    Raises:
        MalformedMessage: where header and frames are not what :func:`encode` makes.
    """
    step = field(header, "step", int)
    message = _message(field(header, "message", list))
    remaining = iter(frames)
    payload = _decode(field(header, "tree", list), remaining, alignment, 0)
    if next(remaining, None) is not None:
        raise MalformedMessage(f"{message} has more frames ({len(frames)}) than its header names")
    return Envelope(step=step, message=message, payload=payload)


def _message(fields: list[Any]) -> Message:
    match fields:
        case [str() as kind, int() as source, int() as target, int() as microbatch]:
            if kind in _KINDS and min(source, target) >= 0 and microbatch >= NO_MICROBATCH:
                return Message(_KINDS[kind], source, target, microbatch)
    raise MalformedMessage(f"{fields!r:.80} is not the identity of a message")


# -- the way out -----------------------------------------------------------------------------------------------------


def _encode(value: Any, frames: list[memoryview], depth: int) -> Node:
    if depth > _MAX_DEPTH:
        raise ValueError(f"a payload is nested more than {_MAX_DEPTH} deep: flatten it before it is sent")
    match value:
        case None | bool() | int() | float() | str() if not isinstance(value, np.generic):
            return [_VALUE, value]
        case dict():
            _check_keys(value)
            return [_DICT, list(value), [_encode(v, frames, depth + 1) for v in value.values()]]
        case tuple() if type(value) is tuple:
            return [_TUPLE, [_encode(v, frames, depth + 1) for v in value]]
        case list():
            return [_LIST, [_encode(v, frames, depth + 1) for v in value]]
    if not hasattr(value, "__array__"):
        raise ValueError(
            f"a payload holds a {type(value).__name__}, but only dicts, lists, plain tuples, None, arrays and scalars "
            "travel: send the leaves and rebuild the container from the receiver's own structure"
        )
    return _encode_array(np.asarray(value), frames)


def _check_keys(value: Mapping[Any, Any]) -> None:
    bad = [key for key in value if not isinstance(key, str | int) or isinstance(key, bool)]
    if bad:
        raise ValueError(f"a payload's dict has the key {bad[0]!r}: only strings and integers travel as keys")


def _encode_array(array: np.ndarray, frames: list[memoryview]) -> Node:
    name = array.dtype.name
    if _DTYPES.get(name) != array.dtype.newbyteorder("="):
        raise ValueError(f"an array has dtype {array.dtype}: only numbers, booleans and ml_dtypes' types travel")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.nbytes:
        # Viewed as bytes, since the buffer protocol has no formats for ml_dtypes' types.
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return [_ARRAY, name, list(array.shape)]


# -- the way in ------------------------------------------------------------------------------------------------------


def _decode(node: Any, frames: Iterator[Any], alignment: int, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise MalformedMessage(f"a payload nested more than {_MAX_DEPTH} deep")
    match node:
        case ["value", None | bool() | int() | float() | str() as value]:
            return value
        case ["dict", list() as keys, list() as children] if len(keys) == len(children) and all(map(_is_key, keys)):
            return {k: _decode(c, frames, alignment, depth + 1) for k, c in zip(keys, children, strict=True)}
        case ["list", list() as children]:
            return [_decode(child, frames, alignment, depth + 1) for child in children]
        case ["tuple", list() as children]:
            return tuple(_decode(child, frames, alignment, depth + 1) for child in children)
        case ["array", str() as name, list() as shape] if name in _DTYPES and _is_shape(shape):
            return _decode_array(_DTYPES[name], shape, frames, alignment)
    raise MalformedMessage(f"{node!r:.80} is no part of a payload")


def _is_key(key: Any) -> bool:
    return isinstance(key, str | int) and not isinstance(key, bool)


def _is_shape(shape: list[Any]) -> bool:
    return len(shape) <= _MAX_NDIM and all(type(size) is int and 0 <= size < _MAX_BYTES for size in shape)


def _decode_array(dtype: np.dtype, shape: list[int], frames: Iterator[Any], alignment: int) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.empty(_bounded(shape), dtype)
    raw = np.frombuffer(next(frames, b""), np.uint8)
    if raw.nbytes != num_bytes:
        raise MalformedMessage(f"a {dtype.name}{shape} has {num_bytes} bytes, its frame {raw.nbytes}")
    if _address(raw) % max(alignment, dtype.alignment):
        aligned = empty_aligned(num_bytes, max(alignment, dtype.alignment))
        aligned[:] = raw
        raw = aligned
    return raw.view(dtype).reshape(shape)


def _bounded(shape: list[int]) -> list[int]:
    """An empty array's other sizes are free, yet NumPy multiplies them: keep the product within its range."""
    if math.prod(size for size in shape if size) >= _MAX_BYTES:
        raise MalformedMessage(f"an empty array of shape {shape}")
    return shape


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def empty_aligned(num_bytes: int, alignment: int = 64) -> np.ndarray:
    """Uninitialised bytes (uint8 ``[num_bytes]``) that start at a multiple of ``alignment``."""
    memory = np.empty(num_bytes + alignment, np.uint8)
    start = -_address(memory) % alignment
    return memory[start : start + num_bytes]
