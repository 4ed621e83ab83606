"""Small tables of every schedule, kept as files that can be compared with the papers' figures by eye.

Each file is the ideal slot table with F = I = W = 1 (so a full backward fills two cells). After an intended change,
look at the difference and write them anew: ``python tests/schedules/test_golden.py``.
"""

from pathlib import Path

import pytest

from rrfp_jax.schedules import ScheduleRequest, build_schedule, schedule_names, to_csv
from rrfp_jax.schedules.slots import execute

GOLDEN = Path(__file__).parent / "golden"


def text(name: str) -> str:
    return to_csv(execute(build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))).aligned())


@pytest.mark.parametrize("name", schedule_names())
def test_the_table_is_the_golden_one(name: str) -> None:
    assert text(name) == (GOLDEN / f"{name}_4x8.csv").read_text()


def test_1f1b_as_everybody_draws_it() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=3, num_microbatches=4))
    assert to_csv(table) == (
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
    )


def test_interleaved_1f1b_as_megatron_runs_it() -> None:
    table = build_schedule("interleaved-1f1b", ScheduleRequest(num_stages=2, num_microbatches=4))
    assert to_csv(table) == (
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n"
    )


def test_chimera_as_its_figure_shows_it() -> None:
    table = build_schedule("chimera", ScheduleRequest(num_stages=4, num_microbatches=4))
    assert to_csv(table) == (
        "0F0,0F1,7F2,7B2,7F3,7B3,0B0,0B1\n"
        "1F0,6F2,1F1,6F3,6B2,1B0,6B3,1B1\n"
        "5F2,2F0,5F3,2F1,2B0,5B2,2B1,5B3\n"
        "4F2,4F3,3F0,3B0,3F1,3B1,4B2,4B3\n"
    )


def test_bitpipe_as_its_figure_shows_it() -> None:
    """The figure numbers the microbatches that go down 1 and 2, here 0 and 2, and those that go up 3 and 4."""
    table = build_schedule("bitpipe", ScheduleRequest(num_stages=4, num_microbatches=4))
    assert to_csv(table) == (
        "0F0,0F2,11F1,12F1,11F3,12F3,7F0,7B0,7F2,7B2,12B1,11B1,12B3,11B3,0B0,0B2\n"
        "1F0,10F1,1F2,10F3,13F1,6F0,13F3,6F2,6B0,13B1,6B2,13B3,10B1,1B0,10B3,1B2\n"
        "9F1,2F0,9F3,2F2,5F0,14F1,5F2,14F3,14B1,5B0,14B3,5B2,2B0,9B1,2B2,9B3\n"
        "8F1,8F3,3F0,4F0,3F2,4F2,15F1,15B1,15F3,15B3,4B0,3B0,4B2,3B2,8B1,8B3\n"
    )


if __name__ == "__main__":
    for each in schedule_names():
        (GOLDEN / f"{each}_4x8.csv").write_text(text(each))
