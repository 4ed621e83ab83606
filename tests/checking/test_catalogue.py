"""The catalogue of small pipelines holds what it says."""

from itertools import permutations

import pytest

from rrfp_jax.core import HINTS, StepRules
from rrfp_jax.schedules import Task, chain, linear, looped
from tests.model_checker import Setting
from tests.model_checker.catalogue import (
    PIPELINE_ONLY,
    all_hints,
    all_windows,
    nth_permutation,
    small_graphs,
    small_settings,
    two_encoders,
)


def test_nth_permutation_numbers_all_permutations():
    assert {nth_permutation("abcd", n) for n in range(24)} == set(permutations("abcd"))
    assert nth_permutation("abcd", 24) == nth_permutation("abcd", 0) == tuple("abcd")


@pytest.mark.parametrize(("num_microbatches", "classes"), [(1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4])])
def test_one_window_of_each_class(num_microbatches, classes):
    assert all_windows(linear(1), num_microbatches) == [(w,) for w in classes]
    assert len(all_windows(linear(3), num_microbatches)) == len(classes) ** 3


def test_hints_that_coincide_count_once():
    """bfw ranks as bf does; with one chunk per stage bf-deep has nothing to rank differently."""
    one_chunk = all_hints(chain(2, 3), linear(2), ())
    two_chunks = all_hints(chain(4, 3), looped(2, 2), ())
    assert [name for name, h in HINTS.items() if (h, h) not in one_chunk] == ["bfw", "bf-deep"]
    assert [name for name, h in HINTS.items() if (h, h) not in two_chunks] == ["bfw"]


def test_permutations_come_whole_and_with_gaps():
    without, with_one = (len(all_hints(chain(2, 3), linear(2), n)) for n in ((), (10**12 + 39,)))
    assert with_one == without + 2


def test_two_encoders_feed_one_decoder():
    assert two_encoders(3) == ([0], [1], [(0, 2), (1, 2)])
    assert two_encoders(6) == ([0, 2], [1, 3], [(0, 2), (1, 3), (2, 4), (3, 4), (4, 5)])


def test_graphs_of_each_size():
    assert list(small_graphs(1, 3)) == ["chain"]
    assert len(small_graphs(3, 3)) == 5
    graphs = small_graphs(6, 3)
    assert [graphs["two encoders, one frozen"].has_backward(c) for c in range(6)] == [True, False] * 2 + [True] * 2
    assert not graphs["frozen first chunk"].has_backward(0)
    assert not graphs["two encoders, some skipped"].exists(1, 0)
    assert graphs["fork and join"].predecessors(5) == (1, 4)


def test_settings_cover_the_product():
    lists = list(small_settings(chain(3, 3), linear(3), PIPELINE_ONLY, numbers=(1,)))
    assert [len(settings) for settings in lists] == [27] * len(all_hints(chain(3, 3), linear(3), (1,)))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"policies": (HINTS["bf"],)}, "1 policies for 2 stages: give one for each stage"),
        ({"windows": (1,)}, "window has 1 numbers for 2 stages"),
        ({"windows": (1, 0)}, "window is 0"),
        ({"absences": ()}, "no step would run"),
    ],
)
def test_bad_settings_are_refused(change, what):
    good = {"graph": chain(2, 2), "placement": linear(2), "windows": (1, 1), "policies": (HINTS["bf"],) * 2}
    with pytest.raises(ValueError, match=what):
        Setting(**good | change)


def test_a_setting_describes_itself():
    setting = Setting(
        graph=small_graphs(3, 2)["two encoders, one frozen"],
        placement=linear(3),
        windows=(1, 2, 3),
        policies=(HINTS["bf"], HINTS["fb"], (Task.parse("2F0"),)),
        rules=StepRules(ordered=True),
    )
    assert str(setting) == (
        "3 stages, chunks on stages (0, 1, 2), 2 microbatches, edges 0->2 1=>2, windows (1, 2, 3), "
        "hint bf, fb, strict, ordered accumulation, agreement all, 1 step"
    )
