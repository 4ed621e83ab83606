"""Speeds of devices and links between them, as they are measured and written down."""

import json
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from rrfp_jax.costs import DeviceCosts, LinkCosts, MachineCosts
from rrfp_jax.layout import Layout
from rrfp_jax.planner import measuring, profile
from rrfp_jax.planner.cost_file import machine_in, read_costs, write_machine
from rrfp_jax.planner.measuring import chunk_times, device_speeds, measured_host_gb_per_s, tour
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.schedules.timeline import Span, Timeline
from tests.commands.running import run_command, sentence
from tests.planner.test_profile import TINY


@pytest.mark.parametrize("number", range(1, 9))
def test_a_tour_takes_every_link_once_in_each_direction(number: int) -> None:
    way = tour(number)
    assert way[0] == way[-1] == 0
    assert sorted(pairwise(way)) == sorted(permutations(range(number), 2))


def test_speeds_are_relative_to_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(Layout(num_stages=1))
    alike = device_speeds(process, "float32")
    assert alike[0].speed == 1.0
    assert all(0 < each.speed < 100 for each in alike)
    rates = iter((200.0, 100.0, *(400.0 for _ in alike)))
    monkeypatch.setattr(measuring, "_products_per_s", lambda *_: next(rates))
    assert [each.speed for each in device_speeds(process, "float32")][:3] == [1.0, 0.5, 2.0]


def test_copies_to_the_host_are_measured_and_may_differ_by_device() -> None:
    rate = measured_host_gb_per_s(jax.local_devices()[0])
    assert rate is None or 0.01 < rate < 10_000
    machine = MachineCosts(devices=tuple(DeviceCosts(host_gb_per_s=each) for each in (8.0, None, 4.0)))
    links = LinkCosts(host_gb_per_s=6.0)
    rates = [machine.link(group, group, links).host_gb_per_s for group in ((0,), (1,), (0, 1), (0, 1, 2))]
    assert rates == [8.0, 6.0, 6.0, 4.0]
    assert machine.link((0, 1), (0, 1), LinkCosts()).host_gb_per_s is None, "not known of all"


def test_times_of_layers_are_those_of_a_device_of_speed_1() -> None:
    spans = [Span(0, chunk, Task(TaskKind.F, chunk, 0), 0.0, 0.010 * (1 + chunk), ()) for chunk in range(2)]
    times = chunk_times(Timeline(2, spans), (("layer",), ("layer",)), (1.0, 0.5))
    assert [each.medians_ms["F"] for each in times] == pytest.approx([10.0, 10.0])


@pytest.mark.slow
def test_a_profile_tells_devices_that_differ_and_keeps_the_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = tmp_path / "tiny.yaml", tmp_path / "costs.json"
    config.write_text(yaml.safe_dump(TINY))
    monkeypatch.setattr(profile, "_enter", lambda *_: Process(Layout(num_stages=1)))
    arguments = ["--config", str(config), "--repeats", "1", "--output", str(out)]

    def profiled(*speeds: float) -> Any:
        devices = tuple(DeviceCosts(speed=speed, name=str(place)) for place, speed in enumerate(speeds))
        monkeypatch.setattr(measuring, "device_speeds", lambda *_: devices)
        assert profile.main(arguments) == 0
        return read_costs(out).machine

    assert profiled(1.0, 1.1) is None, "by chance"
    assert [each.speed for each in profiled(1.0, 0.5).devices] == [1.0, 0.5]
    links = ((0.0, 0.1), (0.1, 0.0))
    write_machine(MachineCosts(devices=(DeviceCosts(), DeviceCosts()), latency_ms=links), out)
    assert profiled(1.0, 0.5).latency_ms == links
    assert [each.speed for each in profiled(1.0, 1.1).devices] == [1.0, 1.0], "the file has a machine"
    assert profiled(1.0, 0.5, 0.5).latency_ms == (), "another machine"


def test_links_are_between_ranks_and_in_a_file_of_costs(tmp_path: Path) -> None:
    assert machine_in(tmp_path / "none.json") is None
    told = sentence(run_command("doctor", "--links", tmp_path / "links.json"))
    assert "--links is for several ranks: start them with rrfp launch --processes N -- doctor --links" in told
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"links": {"latency_ms": 1.0}}))
    assert machine_in(other) is None
    other.write_text(json.dumps([]))
    with pytest.raises(ValueError, match="give an object"):
        machine_in(other)
