"""The shares of the cores that the ranks of a node get, and what happens where a system refuses them."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.cluster import child_processes, child_script
from rrfp_jax.cluster.child_processes import rank_cores
from rrfp_jax.cluster.config import LaunchSettings

CORES = st.lists(st.integers(0, 300), min_size=1, max_size=64, unique=True)


def dealt_out(cores: list[int], num_ranks: int) -> list[tuple[int, ...]]:
    """What each rank gets of these cores, where the system says nothing of how they lie."""
    unknown = patch.object(child_processes, "_TOPOLOGY", "/no/such/{}")
    with unknown, patch.object(os, "sched_getaffinity", lambda _: set(cores)):
        return rank_cores("cores", num_ranks)


@given(cores=CORES, data=st.data())
def test_enough_cores_are_all_shared_out_evenly_and_in_order(cores: list[int], data: st.DataObject):
    dealt = dealt_out(cores, data.draw(st.integers(1, len(cores)), label="num_ranks"))
    assert [core for share in dealt for core in share] == sorted(cores)  # all of them, each once, neighbours together
    sizes = [len(share) for share in dealt]
    assert max(sizes) - min(sizes) <= 1


@given(cores=CORES, num_more=st.integers(1, 40))
def test_ranks_take_too_few_cores_in_turn(cores: list[int], num_more: int):
    dealt = dealt_out(cores, len(cores) + num_more)
    assert len(dealt) == len(cores) + num_more
    assert all(share == (sorted(cores)[rank % len(cores)],) for rank, share in enumerate(dealt))


def describe(folder: Path, sockets: dict[int, int], siblings: dict[int, str]) -> str:
    for core, socket in sockets.items():
        place = folder / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{socket}\n")
        (place / "thread_siblings_list").write_text(f"{siblings[core]}\n")
    return str(folder / "cpu{}" / "topology")


def test_hardware_threads_of_a_core_and_cores_of_a_socket_stay_together(tmp_path: Path, monkeypatch):
    sockets = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1, 7: 1}
    siblings = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    monkeypatch.setattr(child_processes, "_TOPOLOGY", describe(tmp_path / "a", sockets, siblings))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert rank_cores("cores", 4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert rank_cores("cores", 2) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    odd_ones = {core: core % 2 for core in range(4)}  # numbered from socket to socket
    topology = describe(tmp_path / "b", odd_ones, {core: f"{core}" for core in odd_ones})
    monkeypatch.setattr(child_processes, "_TOPOLOGY", topology)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert rank_cores("cores", 2) == [(0, 2), (1, 3)]
    monkeypatch.setattr(child_processes, "_TOPOLOGY", "/no/such/{}")
    assert rank_cores("cores", 2) == [(0, 1), (2, 3)]


def test_only_what_the_launcher_may_use_is_shared_out(monkeypatch):
    monkeypatch.setattr(child_processes, "_TOPOLOGY", "/no/such/{}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 9, 2})
    assert rank_cores("cores", 2) == [(2,), (5, 9)]
    assert rank_cores("cores", 4) == [(2,), (5,), (9,), (2,)]
    assert rank_cores("none", 2) == [(), ()]
    assert rank_cores("cores", 0) == []  # a supervisor's


def test_systems_that_bind_no_processes_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert rank_cores("cores", 3) == [(), (), ()]


def test_unknown_bindings_are_refused():
    with pytest.raises(ValueError, match="bind is 'sockets': give cores, none"):
        LaunchSettings(command=("m",), num_processes=1, bind="sockets")


def test_a_refused_binding_keeps_no_rank_from_starting(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    asked = []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: asked.append(cores))
    child_script.bind_to_cores({0})
    assert asked == [{0}]
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    child_script.bind_to_cores({0})


@pytest.mark.parametrize("is_bound", [True, False])
def test_threads_of_the_program_inherit_the_binding(is_bound: bool):
    cores = str(min(os.sched_getaffinity(0))) if is_bound else child_script.UNBOUND
    policy = "SCHED_BATCH" if is_bound else "SCHED_OTHER"
    shown = (
        "import os, threading; "
        f"show = lambda: print(sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0) == os.{policy}); "
        "thread = threading.Thread(target=show); thread.start(); thread.join()"
    )
    script = [sys.executable, "-I", "-S", child_script.__file__, str(os.getpid()), cores]
    ended = subprocess.run([*script, sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    expected = [int(cores)] if is_bound else sorted(os.sched_getaffinity(0))
    assert ended.stdout == f"{expected} True\n"
