"""Files of others are bounded before they are read, and their JSON before it is used."""

import os
from pathlib import Path

import pytest

from rrfp_jax.record_files import parse_json, read_bounded, read_record


@pytest.mark.parametrize(
    "text", ["1", "[]", '{"a": [1, {"b": "c"}]}', "[" * 99 + "]" * 99], ids=["number", "empty", "object", "deep"]
)
def test_json_is_read_as_it_stands(text: str) -> None:
    assert str(parse_json(text)).replace("'", '"') == text
    assert parse_json(b"\xef\xbb\xbf" + text.encode()) == parse_json(text)


@pytest.mark.parametrize(
    "text",
    ids=["lists", "open", "objects"],
    argvalues=["[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900],
)
def test_json_that_is_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(text)


def test_json_of_more_values_than_memory_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 10,000,000 values"):
        parse_json("[" + "[]," * 5_000_001 + "[]]")


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it holds nothing
    for read in (read_bounded, lambda each: read_record(each, 1 << 20)):
        with pytest.raises(OSError, match=r"more than 1,048,576 bytes|too large"):
            read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is no file"):
        read_record(path)
