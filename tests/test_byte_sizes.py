"""Numbers of bytes are read and written with their unit."""

import pytest

from rrfp_jax.byte_sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(("text", "value"), [("512MiB", 512 * 2**20), ("1.5 KiB", 1536), ("7B", 7), ("2GiB", 2**31)])
def test_sizes_are_read_with_their_unit(text: str, value: int) -> None:
    assert parse_bytes(text, "window") == value


@pytest.mark.parametrize("text", ["512", "MiB", "-1GiB", "1 mb", ""])
def test_sizes_without_a_known_unit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"window is {text!r}, which is no size: write a number and a unit"):
        parse_bytes(text, "window")


def test_sizes_are_written_in_the_largest_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (0, 1, 1023, 1536, 3 * 2**30)] == ["0 B", "1 B", "1023 B", "1.5 KiB", "3 GiB"]
