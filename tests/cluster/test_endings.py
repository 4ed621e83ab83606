"""Which rank is to blame, from codes and times alone."""

import pytest

from rrfp_jax.cluster.launcher import Endings
from rrfp_jax.cluster.rendezvous import ProcessEnding


def endings(*known: tuple[int, int, float], num_ranks: int = 3) -> Endings:
    """From (rank, code, time)."""
    made = Endings(num_ranks)
    made.by_rank.update({rank: ProcessEnding(code=code, at_s=at_s) for rank, code, at_s in known})
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
        ([(0, 7, 1.0), (1, 8, 1.1), (2, 7, 1.2)], 8, 1),
        ([(0, 6, 1.0), (1, 7, 1.1), (2, 5, 0.9)], 7, 1),
    ],
)
def test_the_cause(known: list[tuple[int, int, float]], code: int, rank: int):
    found = endings(*known)
    assert (found.code(), found.cause()) == (code, rank)
    assert f"rank {rank} (code {code}" in found.summary()[0]


def test_what_the_launcher_ended_is_never_the_cause_while_there_is_another():
    found = endings((0, 5, 1.0), (2, 5, 1.2))
    found.by_rank[1] = ProcessEnding(code=137, at_s=0.5, by_launcher="stood still (SIGSTOP)")
    assert found.code() == 5
    assert "  rank 1: stood still (SIGSTOP): the launcher ended it (code 137, killed by SIGKILL) (by 0.5 s)" in (
        found.summary()
    )
    assert found.summary()[0] == "the run failed after 1.0 s: rank 1 stood still (SIGSTOP)"
    found.by_rank[2] = ProcessEnding(code=4, at_s=1.2)
    assert found.summary()[0] == "the run failed after 1.2 s: rank 2 (code 4, a task failed)"


def test_nobody_is_blamed_for_what_the_coordination_service_did():
    found = endings((0, 5, 1.4), (1, 134, 1.1), (2, 134, 1.2))
    found.service = ProcessEnding(code=137, at_s=1.05)
    assert found.code() == 134
    assert found.summary()[0] == (
        "the run failed after 1.1 s: the coordination service (code 137, killed by SIGKILL), without which JAX aborts "
        "all ranks"
    )
    blamed_each_other = endings((0, 5, 1.2), (1, 5, 1.1), (2, 5, 1.2))
    blamed_each_other.service = found.service
    assert blamed_each_other.code() == 134
    assert blamed_each_other.summary()[0] == found.summary()[0]
    earlier = endings((0, 4, 0.5), (1, 134, 1.1))
    earlier.service = found.service
    assert earlier.code() == 4


@pytest.mark.parametrize(("code", "is_told"), [(134, True), (127, True), (139, True), (137, False), (4, False)])
def test_what_aborts_mostly_mean_is_told(code: int, is_told: bool):
    summary = endings((0, code, 1.0), (1, 5, 1.1), (2, 5, 1.1)).summary()
    assert summary[0].startswith("the run failed after 1.0 s: rank 0")
    assert ("lack of memory or threads" in summary[-1]) == is_told


def test_all_well_and_not_heard_of():
    assert endings((0, 0, 1.0), (1, 0, 2.5), num_ranks=2).summary() == ["ranks 0-1 ended well, the last after 2.5 s"]
    assert endings((0, 0, 1.0), (1, 0, 2.5), num_ranks=2).code() == 0
    partial = endings((0, 0, 1.0), (1, 0, 2.5), num_ranks=4)
    assert (partial.missing(), partial.code()) == ([2, 3], 5)
    assert partial.summary() == ["nothing was heard of ranks 2-3; all others ended well"]


def test_a_crash_is_told_with_what_the_rank_said_last():
    found = endings((0, 134, 1.0), (1, 5, 1.1), (2, 5, 1.1))
    assert found.summary({0: "Too many open files"}.get)[-1] == "  rank 0 said last: Too many open files"
    assert "lack of memory" in found.summary({1: "it is gone"}.get)[-1]


def test_losses_that_the_others_survive_are_no_failures():
    found = endings((0, 0, 9.0), (1, 137, 2.0))
    assert found.has_failed()
    found.lost = {1: "rank 1 ended with code 137"}
    assert not found.has_failed()
    assert found.missing() == [2]
    found.by_rank[2] = ProcessEnding(code=0, at_s=9.5)
    assert (found.code(), found.cause()) == (0, None)
    assert found.summary() == [
        "ranks 0, 2 ended well, the last after 9.5 s",
        "  rank 1 was lost, and the others went on: rank 1 ended with code 137",
    ]
    found.by_rank[2] = ProcessEnding(code=4, at_s=9.5)
    assert (found.code(), found.cause()) == (4, 2)
    assert "  rank 1 was lost, and the others went on: rank 1 ended with code 137" in found.summary()


def test_a_run_of_which_all_ranks_are_lost_has_failed_for_its_first_cause():
    found = endings((0, 5, 3.0), (1, 137, 2.0), (2, 5, 3.1))
    found.lost = dict.fromkeys(range(3), "stage 1 has no replica left")
    assert (found.code(), found.cause()) == (137, 1)


def test_the_end_of_a_process_whose_rank_came_back_counts_for_nothing():
    found = endings((1, 137, 1.0))
    found.lost = {1: "rank 1 ended with code 137"}
    assert not found.has_failed()
    found.take_back({1: 1})
    found.lost = {}
    assert not found.has_failed()
    assert found.missing() == [0, 1, 2]
    found.note({1: ProcessEnding(code=137, at_s=1.0)})  # told again
    assert found.missing() == [0, 1, 2]
    found.note({1: ProcessEnding(code=4, at_s=9.0, number=1)})
    assert found.cause() == 1
    assert found.code() == 4
