"""What travels between stages comes back as it was; what did not come from `encode` is refused."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rrfp_jax.arbitration import Message, MessageKind
from rrfp_jax.runtime.network import MalformedMessage, decode, empty_aligned, encode
from rrfp_jax.runtime.network.plain import pack, unpack
from rrfp_jax.runtime.network.wire import _DTYPES

ACTIVATION = Message(MessageKind.ACTIVATION, 1, 2, 3)


def there_and_back(payload: Any, **options: Any) -> Any:
    header, frames = encode(7, ACTIVATION, payload)
    envelope = decode(unpack(pack(header)), [bytes(frame) for frame in frames], **options)
    assert (envelope.step, envelope.message) == (7, ACTIVATION)
    return envelope.payload


def assert_same(found: Any, sent: Any) -> None:
    assert type(found) is type(sent)
    if isinstance(sent, dict):
        assert list(found) == list(sent)
        for key in sent:
            assert_same(found[key], sent[key])
    elif isinstance(sent, list | tuple):
        assert len(found) == len(sent)
        for a, b in zip(found, sent, strict=True):
            assert_same(a, b)
    elif isinstance(sent, np.ndarray):
        assert (found.dtype, found.shape) == (sent.dtype.newbyteorder("="), sent.shape)
        assert found.flags.aligned
        assert found.tobytes() == sent.astype(found.dtype).tobytes()
    else:
        assert repr(found) == repr(sent)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Any dtype that travels, 0-d and empty ones, and views with strides of all kinds."""
    dtype = _DTYPES[draw(st.sampled_from(sorted(_DTYPES)))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    count = int(np.prod(shape)) * dtype.itemsize
    # Bytes 0 and 1 are valid in every dtype, booleans and 2-bit integers too.
    raw = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.uint8)
    array = raw.view(dtype).reshape(shape)
    match draw(st.sampled_from(["plain", "transposed", "reversed", "every other", "read-only"])):
        case "transposed":
            array = array.T
        case "reversed" if array.ndim:
            array = array[::-1]
        case "every other" if array.ndim:
            array = array[..., ::2]
        case "read-only":
            array.flags.writeable = False
    return array


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8)
KEYS = st.text(max_size=8) | st.integers(-(2**31), 2**31)
PAYLOADS = st.recursive(
    SCALARS | arrays(),
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


@given(PAYLOADS)
def test_any_payload_comes_back(payload: Any) -> None:
    assert_same(there_and_back(payload), payload)


@given(arrays(), st.sampled_from([1, 16, 64]), st.integers(0, 9))
def test_arrays_are_aligned_wherever_the_frame_lies(array: np.ndarray, alignment: int, offset: int) -> None:
    header, frames = encode(0, ACTIVATION, array)
    moved = []
    for frame in frames:
        memory = empty_aligned(frame.nbytes + offset)
        memory[offset:] = np.frombuffer(frame, np.uint8)
        moved.append(memory[offset:])
    found = decode(header, moved, alignment=alignment).payload
    assert_same(found, array)
    assert not found.nbytes or found.ctypes.data % alignment == 0


def test_nothing_is_copied_where_memory_is_contiguous_and_aligned() -> None:
    sent = np.arange(1 << 20, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(1024, 1024)
    header, frames = encode(0, ACTIVATION, {"x": sent})
    assert np.shares_memory(np.frombuffer(frames[0], np.uint8), sent.view(np.uint8))
    found = decode(header, frames).payload["x"]
    assert np.shares_memory(found, sent)


@pytest.mark.parametrize("kind", list(MessageKind))
def test_every_kind_of_message_keeps_its_identity(kind: MessageKind) -> None:
    message = Message(kind, 3, 0)
    header, frames = encode(12, message, None)
    assert decode(unpack(pack(header)), frames).message == message


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (np.array([object()]), "dtype object"),
        (np.array(["text"]), "dtype <U4"),
        (np.zeros(2, "f4,i4"), "only numbers"),
        (np.zeros(2, np.longdouble), "only numbers"),
        ({1.5: 0}, "the key 1.5"),
        ({True: 0}, "the key True"),
        (ACTIVATION, "holds a Message"),
        ({"a": object()}, "holds a object"),
    ],
)
def test_what_does_not_travel_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(0, ACTIVATION, payload)


def test_a_bottomless_payload_is_refused() -> None:
    payload: list[Any] = []
    payload.append(payload)
    with pytest.raises(ValueError, match="nested more than"):
        encode(0, ACTIVATION, payload)


ARRAY = ["array", "float32", [2]]
GOOD = {"step": 0, "message": ["activation", 0, 1, 0], "tree": ARRAY}


@pytest.mark.parametrize(
    ("change", "frames"),
    [
        ({}, []),
        ({}, [b"1234567"]),
        ({}, [b"12345678", b""]),
        ({"step": None}, [b"12345678"]),
        ({"step": True}, [b"12345678"]),
        ({"message": ["activation", 0, 1]}, [b"12345678"]),
        ({"message": ["surprise", 0, 1, 0]}, [b"12345678"]),
        ({"message": ["activation", -1, 1, 0]}, [b"12345678"]),
        ({"tree": ["array", "object", [2]]}, [b"12345678"]),
        ({"tree": ["array", "float32", [-2]]}, [b"12345678"]),
        ({"tree": ["array", "float32", [2.0]]}, [b"12345678"]),
        ({"tree": ["array", "float32", [0, 2**40, 2**40]]}, []),
        ({"tree": ["array", "float32", [1] * 65]}, [b"1234"]),
        ({"tree": ["array", "float32", [2**40, 2**40]]}, [b"12345678"]),
        ({"tree": ["dict", ["a"], []]}, []),
        ({"tree": ["dict", [[]], [ARRAY]]}, [b"12345678"]),
        ({"tree": ["pickle", "cos"]}, []),
    ],
)
def test_a_malformed_header_is_refused(change: dict[str, Any], frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        decode(GOOD | change, frames)


PLAIN = st.recursive(
    SCALARS | st.binary(max_size=8) | st.sampled_from(["array", "dict", "float32", "activation"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["step", "message", "tree"]), inner),
    max_leaves=12,
)


@given(PLAIN, st.lists(st.binary(max_size=16), max_size=3))
def test_garbage_is_refused_and_does_nothing_else(header: Any, frames: list[bytes]) -> None:
    candidates = [header, GOOD | {"tree": header}, GOOD | {"message": header}]
    for candidate in candidates:
        try:
            decode(candidate, frames)
        except MalformedMessage:
            continue


@given(st.binary(max_size=200))
def test_random_bytes_are_no_header(data: bytes) -> None:
    try:
        unpack(data)
    except MalformedMessage:
        return


@pytest.mark.parametrize("data", [b"\xd4\x05x", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"", b"\x01\x02"])
def test_extensions_depth_and_false_lengths_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data)


def test_a_timestamp_is_read_as_a_number() -> None:
    assert unpack(b"\xd6\xff\x00\x00\x00\x02") == 2.0
