"""What `auto` takes between real processes, tried by an exchange between neighbours: both ends the same."""

from typing import Any

import pytest

from tests.multiprocess.launching import launched

SMALL = ("--num-stages", "3", "--num-microbatches", "4", "--durations-ms", "0,0,0", "--steps", "2")
LARGE_ARRAYS = (*SMALL, "--activation-bytes", str(1 << 20))


def run(*arguments: str, program: str = "probing", **variables: str) -> tuple[int, str, list[str]]:
    """The exit code, all that was printed, and what each rank said it takes."""
    with launched("--processes", 3, "--", program, *arguments, **variables) as launcher:
        code = launcher.wait()
        said = sorted(line for line in launcher.lines if "by transfer:" in line)
        return code, launcher.text, said


@pytest.mark.slow
def test_on_cpu_auto_takes_sockets_and_says_why() -> None:
    code, text, _ = run(*LARGE_ARRAYS, program="experiments.emulate")
    assert code == 0
    line = "arrays between processes go through sockets: devices share the host's memory, where they are the fastest"
    assert text.count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", pytest.param("transfer", marks=pytest.mark.slow)])
def test_where_all_neighbours_fetch_what_was_offered_arrays_go_by_transfer(transport: str) -> None:
    code, text, said = run(*LARGE_ARRAYS, "--transport", transport)
    assert code == 0, text
    assert [line.rpartition("] ")[2] for line in said] == [f"by transfer: {ranks}" for ranks in ([1], [0, 2], [1])]
    assert text.count("go from device to device (transfer, not encrypted), tried between all neighbours") == 1


HANGING: dict[str, Any] = {"HANGS": "2", "DEADLINE_S": "3"}


@pytest.mark.slow
def test_where_one_side_hangs_both_ends_take_sockets() -> None:
    code, text, said = run(*LARGE_ARRAYS, **HANGING)
    assert code == 0, text
    assert [line.rpartition("] ")[2] for line in said] == [f"by transfer: {ranks}" for ranks in ([1], [0], [])]
    assert (
        "arrays between processes go from device to device (transfer, not encrypted), but through sockets between "
        "ranks 1-2: rank 2 could not fetch from rank 1: no answer within 3 s"
    ) in text


@pytest.mark.slow
def test_a_transfer_that_was_asked_for_and_does_not_work_ends_the_start() -> None:
    code, text, _ = run(*LARGE_ARRAYS, "--transport", "transfer", **HANGING)
    assert code == 6
    assert "transport transfer does not work between rank 1 and rank 2: rank 2 could not fetch" in text
    assert "give transport auto" in text
