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

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KINDS = {str(kind): kind for kind in MessageKind}
_MAX_DEPTH = 32
_MAX_NDIM = 32
_MAX_BYTES = 1 << 48
_SCALARS = (type(None), bool, int, float, str)
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
    kind = type(value)
    if kind is np.ndarray:
        return _encode_array(value, frames)
    if kind in _SCALARS:
        return [_VALUE, value]
    if depth > _MAX_DEPTH:
        raise ValueError(f"a payload is nested more than {_MAX_DEPTH} deep: flatten it before it is sent")
    if kind is dict:
        _check_keys(value)
        return [_DICT, list(value), [_encode(v, frames, depth + 1) for v in value.values()]]
    if kind is tuple or kind is list:
        return [_TUPLE if kind is tuple else _LIST, [_encode(v, frames, depth + 1) for v in value]]
    if not hasattr(value, "__array__"):
        raise ValueError(
            f"a payload holds a {kind.__name__}, but only dicts, lists, plain tuples, None, arrays and scalars "
            "travel: send the leaves and rebuild the container from the receiver's own structure"
        )
    return _encode_array(np.asarray(value), frames)


def _check_keys(value: Mapping[Any, Any]) -> None:
    bad = [key for key in value if type(key) not in (str, int)]
    if bad:
        raise ValueError(f"a payload's dict has the key {bad[0]!r}: only strings and integers travel as keys")


def _encode_array(array: np.ndarray, frames: list[memoryview]) -> Node:
    name = _NAMES.get(array.dtype)
    if name is None:
        array = array.astype(array.dtype.newbyteorder("="))
        name = _NAMES.get(array.dtype)
        if name is None:
            raise ValueError(f"an array has dtype {array.dtype}: only numbers, booleans and ml_dtypes' types travel")
    if array.nbytes:
        # Viewed as bytes, since the buffer protocol has no formats for ml_dtypes' types.
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return [_ARRAY, name, list(array.shape)]


# -- the way in ------------------------------------------------------------------------------------------------------


def _decode(node: Any, frames: Iterator[Any], alignment: int, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise MalformedMessage(f"a payload nested more than {_MAX_DEPTH} deep")
    kind = node[0] if isinstance(node, list) and node else None
    if kind == _ARRAY and len(node) == 3:
        return _decode_array(node[1], node[2], frames, alignment)
    if kind == _VALUE and len(node) == 2 and type(node[1]) in _SCALARS:
        return node[1]
    children = node[-1] if kind in (_DICT, _LIST, _TUPLE) else None
    if isinstance(children, list):
        values = [_decode(child, frames, alignment, depth + 1) for child in children]
        if kind == _DICT and len(node) == 3 and _are_keys(node[1], len(values)):
            return dict(zip(node[1], values, strict=True))
        if kind != _DICT and len(node) == 2:
            return values if kind == _LIST else tuple(values)
    raise MalformedMessage(f"{node!r:.80} is no part of a payload")


def _are_keys(keys: Any, count: int) -> bool:
    return isinstance(keys, list) and len(keys) == count and all(type(key) in (str, int) for key in keys)


def _decode_array(name: Any, shape: Any, frames: Iterator[Any], alignment: int) -> np.ndarray:
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or not _is_shape(shape):
        raise MalformedMessage(f"{name!r:.40} {shape!r:.40} is no array")
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.empty(shape, dtype)
    frame = memoryview(next(frames, b""))
    if frame.nbytes != num_bytes:
        raise MalformedMessage(f"a {dtype.name}{shape} has {num_bytes} bytes, its frame {frame.nbytes}")
    array = np.frombuffer(frame, dtype)
    if not array.flags.aligned or (alignment > 1 and _address(array) % alignment):
        moved = empty_aligned(num_bytes, max(alignment, dtype.alignment))
        moved[:] = np.frombuffer(frame, np.uint8)
        array = moved.view(dtype)
    return array.reshape(shape)


def _is_shape(shape: Any) -> bool:
    """Sizes that NumPy can multiply, also where another is zero."""
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM:
        return False
    product = 1
    for size in shape:
        if type(size) is not int or size < 0:
            return False
        product *= size or 1
    return product < _MAX_BYTES


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def empty_aligned(num_bytes: int, alignment: int = 64) -> np.ndarray:
    """Uninitialised bytes (uint8 ``[num_bytes]``) that start at a multiple of ``alignment``."""
    memory = np.empty(num_bytes + alignment, np.uint8)
    start = -_address(memory) % alignment
    return memory[start : start + num_bytes]
