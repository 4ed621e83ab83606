"""Plain data as bytes and back: msgpack without extension types, with limits, and never anything that runs code."""

from typing import Any

import msgpack

MAX_HEADER_BYTES = 1 << 20
"""The largest header that is read; arrays travel in frames of their own."""


class MalformedMessage(ValueError):
    """What arrived is not what a peer of this run sends; the message is dropped, and the run goes on."""


def pack(value: Any, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Encode None, booleans, integers, floats, strings, bytes, lists and dicts of these.

    Raises:
        ValueError: for another type, an integer beyond 64 bits, or more than ``max_bytes``.
    """
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"a header holds plain data only (numbers, strings, lists and dicts), this one does not: {error}"
        ) from error
    if len(packed) > max_bytes:
        raise ValueError(f"a header has {len(packed)} bytes, at most {max_bytes} travel: put data into frames")
    return packed


def unpack(data: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES) -> Any:
    """Decode what :func:`pack` wrote; tuples come back as lists.

    Raises:
        MalformedMessage: for anything else.
    """
    if len(data) > max_bytes:
        raise MalformedMessage(f"a header of {len(data)} bytes, at most {max_bytes} are read")
    try:
        # timestamp=1 turns msgpack's only built-in extension into a plain float.
        return msgpack.unpackb(data, raw=False, strict_map_key=False, timestamp=1, ext_hook=_refuse_extension)
    except Exception as error:  # the parser raises errors of many types on garbage, RecursionError among them
        raise MalformedMessage(f"a header that is not msgpack: {type(error).__name__}: {error}") from error


def _refuse_extension(code: int, _: bytes) -> Any:
    raise MalformedMessage(f"extension type {code}, which no peer of this run sends")


def field(header: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """``header[name]``, checked to be of ``kind`` (a boolean is no integer).

    Raises:
        MalformedMessage: where ``header`` is no dict, or the field is missing or of another type.
    """
    value = header.get(name) if isinstance(header, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise MalformedMessage(f"field '{name}' is {value!r:.60}, expected {kind}")
    return value
