"""Which rank is to blame, from codes and times alone."""

import pytest

from rrfp_jax.runtime.cluster.endings import Ending, Endings


def endings(*known: tuple[int, int, float], num_ranks: int = 3) -> Endings:
    """From (rank, code, time)."""
    made = Endings(range(num_ranks))
    for rank, code, at_s in known:
        made.note(Ending(rank=rank, code=code, at_s=at_s))
    return made


@pytest.mark.parametrize(
    ("known", "code", "rank"),
    [
        ([(0, 5, 1.0), (1, 137, 1.3), (2, 5, 1.1)], 137, 1),  # seen late, since it takes a moment to be reaped
        ([(0, 6, 1.0), (1, 2, 1.2), (2, 6, 0.9)], 2, 1),
        ([(0, 5, 1.0), (1, 6, 1.2), (2, 5, 0.9)], 6, 1),
        ([(0, 4, 2.0), (1, 3, 1.9), (2, 0, 0.0)], 3, 1),  # the earliest
        ([(0, 4, 1.0), (1, 139, 1.4), (2, 4, 1.1)], 139, 1),  # connections close before a process is seen to end
        ([(0, 4, 1.0), (1, 137, 9.0), (2, 5, 1.1)], 4, 0),  # somebody killed what was left over
        ([(0, 4, 1.0), (1, 134, 1.1), (2, 143, 1.2)], 4, 0),  # aborted by JAX, terminated by a watcher
        ([(0, 0, 1.0), (1, 7, 1.1), (2, 7, 1.2)], 7, 1),
    ],
)
def test_the_cause(known: list[tuple[int, int, float]], code: int, rank: int):
    found = endings(*known)
    cause = found.cause()
    assert cause is not None
    assert (found.code(), cause.rank) == (code, rank)
    assert f"rank {rank} (code {code}" in found.summary()[0]


def test_what_the_launcher_ended_is_never_the_cause_while_there_is_another():
    found = endings((0, 5, 1.0), (2, 5, 1.2))
    found.note(Ending(rank=1, code=137, at_s=0.5, by_launcher=True, was_stopped=True))
    assert found.code() == 5
    assert "  rank 1: stood still (SIGSTOP): the launcher ended it (code 137, killed by SIGKILL) (by 0.5 s)" in (
        found.summary()
    )


def test_the_first_report_of_a_rank_stands():
    found = endings((0, 4, 1.0), (0, 137, 2.0), num_ranks=1)
    assert found.code() == 4


def test_all_well_and_not_heard_of():
    assert endings((0, 0, 1.0), (1, 0, 2.5), num_ranks=2).summary() == ["ranks 0-1 ended well, the last after 2.5 s"]
    assert endings((0, 0, 1.0), (1, 0, 2.5), num_ranks=2).code() == 0
    partial = endings((0, 0, 1.0), (1, 0, 2.5), num_ranks=4)
    assert (partial.missing(), partial.code()) == ([2, 3], 5)
    assert partial.summary() == ["nothing was heard of ranks 2-3; all others ended well"]
