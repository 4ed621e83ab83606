"""What microbatches' sizes are multiples of, so that meshes cut them."""

import pytest

from rrfp_jax.data.cut_sizes import CutSizes, cut_sizes, rounded_up


def test_without_meshes_every_size_will_do() -> None:
    assert cut_sizes({}) == cut_sizes({"tensor": 4}) == CutSizes()


def test_rows_and_positions_divide_over_their_axes() -> None:
    """A decoder's positions over twice their axis; what goes from encoder to decoder over the axes of both."""
    assert cut_sizes({"tensor": 2, "fsdp": 2, "expert": 3, "context": 2}) == CutSizes(
        rows=6, length=4, image_rows=6, image_length=2
    )
    assert cut_sizes({"fsdp": 4}, {"fsdp": 6, "context": 3}) == CutSizes(rows=4, image_rows=12, image_length=3)


def test_sizes_are_rounded_up() -> None:
    assert [rounded_up(size, 4) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_what_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="rows"):
        CutSizes(rows=0)
