"""Texts of others in sentences: short, and without characters that a terminal would obey; numbers of bytes with their
unit."""

import pytest

from rrfp_jax.readable import format_bytes, parse_bytes, printable, sentence, shown


def test_a_value_is_shown_in_a_line_or_two() -> None:
    deep = {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}
    for value in ("x" * 3_000_000, [["a"] * 9] * 9, deep, 10**5000, 9**250, b"\0" * 999):
        assert len(shown(value)) <= 200


def test_a_short_value_is_shown_as_it_is() -> None:
    assert [shown(each) for each in (1.5, "a\x1b", None, ["b", 2])] == ["1.5", r"'a\x1b'", "None", "['b', 2]"]


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("a\x1b[2J\x07\x9b31m\r\u202e\ud800\n\tb \u00e4\u6587") == (
        "a\\x1b[2J\\x07\\x9b31m\\r\\u202e\\ud800\n\tb \u00e4\u6587"
    )


def test_a_sentence_keeps_its_beginning_and_its_remedy() -> None:
    told = sentence(f"file {'x' * 10**6} holds\n  {'some words ' * 10**5}: mend it\x1b")
    assert len(told) < 5_000
    assert told.startswith("file xxx")
    assert told.endswith(": mend it\\x1b")


@pytest.mark.parametrize(("text", "value"), [("512MiB", 512 * 2**20), ("1.5 KiB", 1536), ("7B", 7), ("2GiB", 2**31)])
def test_sizes_are_read_with_their_unit(text: str, value: int) -> None:
    assert parse_bytes(text, "window") == value


@pytest.mark.parametrize("text", ["512", "MiB", "-1GiB", "1 mb", ""])
def test_sizes_without_a_known_unit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"window is {text!r}, which is no size: write a number and a unit"):
        parse_bytes(text, "window")


def test_sizes_are_written_in_the_largest_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (0, 1, 1023, 1536, 3 * 2**30)] == ["0 B", "1 B", "1023 B", "1.5 KiB", "3 GiB"]
