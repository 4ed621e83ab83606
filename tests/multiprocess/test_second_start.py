"""A second start of four ranks compiles nothing on any of them, and takes at most half as long."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import launched
from tests.multiprocess.runs import training_config

NUM_RANKS = 4


@pytest.mark.slow
def test_a_second_start_of_four_ranks_compiles_nothing(tmp_path: Path) -> None:
    config = training_config(
        tmp_path,
        hidden=96,
        num_layers=4,
        num_heads=4,
        mlp_dim=256,
        num_stages=NUM_RANKS,
        steps=2,
        checkpoint_minutes=None,
    )
    first, second = (_start(config, tmp_path / name) for name in ("first", "second"))
    print("first", first, "second", second)
    assert all(_num_compiled(rank) > 0 for rank in first)
    assert [_num_compiled(rank) for rank in second] == [0] * NUM_RANKS
    assert [rank["cache_hits"] for rank in second] == [rank["compile_requests_use_cache"] for rank in first]
    assert max(rank["seconds"] for rank in second) <= 0.5 * max(rank["seconds"] for rank in first)


def _start(config: Path, folder: Path) -> list[dict[str, Any]]:
    """What every rank has written down."""
    folder.mkdir()
    programs = folder.parent / "programs"
    command = ("counting_train", "--config", config, "--run-dir", folder / "run")
    arguments = ("--processes", NUM_RANKS, "--", *command)
    with launched(*arguments, COUNTS=str(folder), RRFP_COMPILE_CACHE=str(programs)) as run:
        assert run.wait(300) == 0, run.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(NUM_RANKS)]


def _num_compiled(rank: dict[str, Any]) -> int:
    return int(rank["compile_requests_use_cache"] - rank["cache_hits"])
