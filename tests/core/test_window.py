"""The window rule, case by case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core import Window, check_windows


def window(limit, *held, left=(2, 2, 2, 2)):
    """A window that holds some microbatches; ``left`` counts each one's unfinished tasks."""
    made = Window(limit, left)
    for microbatch in held:
        made.start_forward(microbatch)
    return made


def admitted(made):
    return [m for m in range(len(made.left)) if made.admits(m)]


@pytest.mark.parametrize(
    ("limit", "held", "expected"),
    [
        (1, (), [0]),  # the last slot is the oldest one's
        (1, (0,), [0]),
        (2, (), [0, 1, 2, 3]),  # after any of them one slot is still free
        (2, (1,), [0, 1]),
        (2, (0,), [0, 1, 2, 3]),
        (2, (0, 2), [0, 2]),
        (3, (1,), [0, 1, 2, 3]),
        (3, (1, 2), [0, 1, 2]),
        (4, (1, 2, 3), [0, 1, 2, 3]),
        (4, (1, 2), [0, 1, 2, 3]),
        (None, (1, 2), [0, 1, 2, 3]),
    ],
)
def test_admission(limit, held, expected):
    assert admitted(window(limit, *held)) == expected


def test_a_held_microbatch_leaves_after_its_last_task():
    made = window(1, 0)
    made.finish(0)
    assert (made.held, made.oldest, admitted(made)) == ({0}, 0, [0])
    made.finish(0)
    assert (made.held, made.oldest, admitted(made)) == (set(), 1, [1])


def test_the_oldest_may_finish_after_younger_ones():
    made = window(2, 1, 0)
    for _ in range(2):
        made.finish(1)
    assert (made.held, made.oldest, admitted(made)) == ({0}, 0, [0, 1, 2, 3])  # 1 has finished; nothing asks for it
    for _ in range(2):
        made.finish(0)
    assert made.oldest == 2


def test_microbatches_without_tasks_here_are_nobodys_oldest():
    assert window(1, left=(0, 0, 1)).oldest == 2
    assert window(1, left=(0, 0)).oldest == 2


def test_copies_are_independent():
    made = window(2, 1)
    twin = made.copy()
    twin.start_forward(0)
    twin.finish(1)
    assert (made.held, made.left) == ({1}, [2, 2, 2, 2])


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_whatever_is_admitted_the_oldest_finds_a_slot(limit, moves):
    """The induction of the module's proof."""
    made = Window(limit, (1,) * 6)
    started = set()
    for is_start, microbatch in moves:
        if is_start and microbatch not in started and made.admits(microbatch):
            made.start_forward(microbatch)
            started.add(microbatch)
        elif not is_start and microbatch in made.held:
            made.finish(microbatch)
        assert len(made.held) <= limit
        assert made.oldest == min((m for m in range(6) if made.left[m]), default=6)
        assert made.oldest == 6 or made.admits(made.oldest)


def test_one_number_or_one_per_stage():
    assert check_windows(3, 2) == (3, 3)
    assert check_windows((1, 2), 2) == (1, 2)


@pytest.mark.parametrize(
    ("given_windows", "what"),
    [
        ((1, 2, 3), "window has 3 numbers for 2 stages: give one number, or one for each stage"),
        (0, "window is 0: a stage must be allowed to hold at least 1 microbatch"),
        ((4, -1), "window is -1"),
    ],
)
def test_bad_windows_are_refused(given_windows, what):
    with pytest.raises(ValueError, match=what):
        check_windows(given_windows, 2)
