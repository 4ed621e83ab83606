"""When a stage is handed its next task: the words that users say."""

import pytest

from rrfp_jax.core import Dispatch, dispatch_of
from rrfp_jax.core.dispatch import parse_dispatch


@pytest.mark.parametrize(
    ("value", "on_host", "elsewhere"),
    [
        ("auto", Dispatch(certain=True), Dispatch(just_in_time=True, certain=True)),
        ("just-in-time", *(Dispatch(just_in_time=True, certain=True),) * 2),
        ("certain", Dispatch(certain=True), Dispatch(certain=True)),
        (0, Dispatch(), Dispatch()),
    ],
)
def test_what_may_be_said(value: int | str, on_host: Dispatch, elsewhere: Dispatch) -> None:
    assert dispatch_of(value, on_host=True) == on_host
    assert dispatch_of(value, on_host=False) == elsewhere
    assert parse_dispatch(str(value)) == value


@pytest.mark.parametrize("value", [-1, 1, 2, "later", "", True, False, 0.0, None])
def test_anything_else_is_refused_with_the_remedy(value: object) -> None:
    match = r"^dispatch_ahead is .*: give auto, just-in-time \(in place of a number of tasks\), certain, pairs, or 0$"
    with pytest.raises(ValueError, match=match):
        dispatch_of(value, on_host=True)  # type: ignore[arg-type]
