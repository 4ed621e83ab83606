"""The network of a run of 64 processes: few descriptors each, and whoever is killed is soon named by all others.

Members import the network alone; each has connections to its neighbours in the control tree and in a chain of stages.
"""

import signal
import statistics
import time
from collections.abc import Iterator, Sequence

import pytest

from rrfp_jax.tree import children, parent
from tests.runtime.network.mesh import Process, processes

NUM_RANKS = 64
MAX_FILES = 60
NUM_STRIKES = 5
"""Of each kind, so 20 in all."""
LATEST_S = 20.0
MEDIAN_S = 1.0


def strikes(kind: str) -> list[tuple[int, ...]]:
    """Whom to kill at once, NUM_STRIKES times; all others stay, so nobody is killed twice."""
    inner = [rank for rank in range(1, NUM_RANKS) if children(rank, NUM_RANKS)]
    leaves = [rank for rank in range(1, NUM_RANKS) if not children(rank, NUM_RANKS)]
    pairs = [(rank, above) for rank in inner if (above := parent(rank))]
    chosen = {"leaf": [(rank,) for rank in leaves], "inner": [(rank,) for rank in inner], "pair": pairs, "root": [(0,)]}
    return chosen[kind]


def others_name(members: Sequence[Process], gone: set[int], struck: Sequence[int]) -> float:
    """Kill some ranks: the seconds until the last of those who are left has named them."""
    for rank in struck:
        members[rank].signal(signal.SIGKILL)
    started_s = time.monotonic()
    gone.update(struck)
    for rank, member in enumerate(members):
        if rank not in gone:
            named = {member.wait_for("lost", LATEST_S)[1] for _ in struck}
            assert named == set(struck), (rank, struck)
    return time.monotonic() - started_s


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[list[Process], set[int]]]:
    """64 members and who of them is gone."""
    with processes(NUM_RANKS, is_sparse=True, silence_deadline_s=120.0) as members:
        yield members, set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_few_descriptors_and_no_jax(run: tuple[list[Process], set[int]]) -> None:
    members, _ = run
    for member in members:
        member.tell("files")
    answers = [member.wait_for("files", LATEST_S) for member in members]
    most = max(files for _, files, _ in answers)
    print(f"\ndescriptors of {NUM_RANKS} ranks: {min(files for _, files, _ in answers)} to {most}", end=" ")
    assert most <= MAX_FILES
    assert not any(name.partition(".")[0] in {"jax", "jaxlib", "flax"} for _, _, modules in answers for name in modules)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["leaf", "inner", "pair", "root"])
def test_whoever_is_killed_is_named_by_all_others(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    taken_s = []
    for struck in strikes(kind)[:NUM_STRIKES] if kind != "root" else [(0,)] * NUM_STRIKES:
        with processes(NUM_RANKS, is_sparse=True, silence_deadline_s=120.0) as members:
            taken_s.append(others_name(members, set(), struck))
    with capsys.disabled():
        print(f"\n{kind}: {' '.join(f'{seconds:.2f}' for seconds in taken_s)} s", end=" ")
    assert statistics.median(taken_s) < MEDIAN_S
