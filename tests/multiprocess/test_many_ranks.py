"""The network of a run of 64 processes: few descriptors each, and whoever is killed is soon named by all others.

Members import the network alone; each has connections to its neighbours in the control tree and in a chain of stages.
"""

import signal
import statistics
import time
from collections.abc import Sequence

import pytest

from rrfp_jax.layout import children, parent
from tests.cluster.mesh import Process, processes

NUM_RANKS = 64
MAX_FILES = 60
NUM_RUNS = 20
"""In each, some of every kind are killed one after another; the root once."""
LATEST_S = 20.0
MEDIAN_S = 1.0
STRIKES = {
    "leaf": [(63,), (17,), (35,), (50,), (28,)],
    "inner node": [(4,), (7,), (10,), (12,), (15,)],
    "inner node and its parent": [(5, 1), (9, 2), (13, 3)],
    "root": [(0,)],
}


def others_name(members: Sequence[Process], gone: set[int], struck: Sequence[int]) -> float:
    """Kill some ranks: the seconds until the last of those who are left has named them, and nobody else."""
    started_s = time.monotonic()
    for rank in struck:
        members[rank].signal(signal.SIGKILL)
    gone.update(struck)
    for rank, member in enumerate(members):
        if rank not in gone:
            named = {member.wait_for("lost", LATEST_S)[1] for _ in struck}
            assert named == set(struck), (rank, struck)
    return time.monotonic() - started_s


def test_the_strikes_are_what_they_are_called() -> None:
    assert not any(children(rank, NUM_RANKS) for (rank,) in STRIKES["leaf"])
    assert all(children(rank, NUM_RANKS) for (rank,) in STRIKES["inner node"])
    for rank, above in STRIKES["inner node and its parent"]:
        assert children(rank, NUM_RANKS)
        assert parent(rank) == above
    struck = [rank for strikes in STRIKES.values() for each in strikes for rank in each]
    assert len(set(struck)) == len(struck)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_few_descriptors_and_no_jax(capsys: pytest.CaptureFixture[str]) -> None:
    with processes(NUM_RANKS, is_sparse=True, silence_deadline_s=120.0) as members:
        for member in members:
            member.tell("files")
        answers = [member.wait_for("files", LATEST_S) for member in members]
    files = [number for _, number, _ in answers]
    with capsys.disabled():
        print(f"\nopen files of each of {NUM_RANKS} ranks: {min(files)} to {max(files)}", end=" ")
    assert max(files) <= MAX_FILES
    assert not any(name.partition(".")[0] in {"jax", "jaxlib", "flax"} for _, _, names in answers for name in names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whoever_is_killed_is_named_by_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    taken_s: dict[str, list[float]] = {kind: [] for kind in STRIKES}
    for _ in range(NUM_RUNS):
        with processes(NUM_RANKS, is_sparse=True, silence_deadline_s=120.0) as members:
            gone: set[int] = set()
            for kind, strikes in STRIKES.items():
                taken_s[kind] += [others_name(members, gone, struck) for struck in strikes]
            told = [event for rank, member in enumerate(members) if rank not in gone for event in member.drain()]
            assert told == []
    with capsys.disabled():
        for kind, seconds in taken_s.items():
            middle = statistics.median(seconds)
            print(f"\n{kind}: {middle:.2f} s in the median of {len(seconds)}, at most {max(seconds):.2f} s", end=" ")
    assert all(statistics.median(seconds) < MEDIAN_S for seconds in taken_s.values())
