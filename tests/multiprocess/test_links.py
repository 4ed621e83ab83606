"""The links between ranks, measured by real processes."""

import json
from itertools import permutations
from math import isfinite
from pathlib import Path

import pytest

from rrfp_jax.costs import DeviceCosts, MachineCosts
from rrfp_jax.planner.cost_file import read_machine, write_machine
from tests.multiprocess.launching import launched


@pytest.mark.slow
def test_every_link_between_the_ranks_is_measured_and_read_back(tmp_path: Path) -> None:
    path, number = tmp_path / "machine.json", 3
    speeds = tuple(DeviceCosts(speed=speed, name="mine") for speed in (1.0, 0.5, 1.0))
    write_machine(MachineCosts(devices=speeds), path)
    with launched("--processes", number, "--", "doctor", "--links", path, "--json") as launcher:
        assert launcher.wait(120) == 0, launcher.text
    machine = read_machine(path)
    assert json.loads(launcher.stdout[-1])["output"] == str(path)
    assert machine.devices == speeds
    for here, there in permutations(range(number), 2):
        latency_ms, rate = machine.latency_ms[here][there], machine.gb_per_s[here][there]
        assert 0 < latency_ms < 1000
        assert rate is not None
        assert isfinite(rate)
        assert rate > 0
