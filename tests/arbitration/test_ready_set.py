"""The ready set keeps positions sorted by lane and offers the first admissible of each."""

from rrfp_jax.arbitration import Window
from rrfp_jax.arbitration.ready_set import ReadySet

MICROBATCH_AT = (2, 0, 1, 0, 1)


def ready_set(*entries):
    made = ReadySet()
    for lane, position in entries:
        made.add(lane, position)
    return made


def test_empty():
    assert not ready_set()
    assert ready_set().heads(Window(1, (1, 1, 1)), MICROBATCH_AT) == (None,) * 4


def test_smallest_position_of_each_lane():
    made = ready_set((0, 4), (0, 1), (1, 3), (1, 2), (3, 0))
    assert made.heads(Window(None, (1, 1, 1)), MICROBATCH_AT) == (1, 2, None, 0)


def test_the_window_restrains_forwards_only():
    made = ready_set((0, 0), (0, 1), (1, 0), (2, 0))
    assert made.heads(Window(1, (1, 1, 1)), MICROBATCH_AT) == (1, 0, 0, None)
    full = Window(1, (1, 1, 1))
    full.start_forward(1)
    assert made.heads(full, MICROBATCH_AT) == (None, 0, 0, None)


def test_remove_and_copy():
    made = ready_set((0, 4), (0, 1))
    twin = made.copy()
    twin.remove(0, 1)
    twin.remove(0, 4)
    assert not twin
    assert made.lanes[0] == [1, 4]
