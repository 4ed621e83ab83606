"""Costs in files: what is written is read as the same, and what does not fit is told in one sentence."""

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.costs import CostBook, CostEntry, DeviceCosts, LayerCosts, LinkCosts, MachineCosts, Noise
from rrfp_jax.planner.cost_file import read_costs, read_machine, write_costs, write_machine

LAYER = LayerCosts(
    forward_ms=0.1, input_gradient_ms=0.2, weight_gradient_ms=0.1, backward_ms=0.25, stash_bytes=2**33, flops=1e13
)
HEAD = LayerCosts(forward_ms=1.0, input_gradient_ms=1.0, weight_gradient_ms=1.0)
BOOK = CostBook(
    layers=("embedding", *["layer"] * 42, "head"),
    ends=frozenset({3, 40}),
    entries=(
        CostEntry(types={"embedding": HEAD, "layer": LAYER, "head": HEAD}),
        CostEntry(types={"embedding": HEAD, "layer": LAYER, "head": HEAD}, microbatch_size=2, tensor=4, remat="full"),
    ),
    links=LinkCosts(latency_ms=0.1, gb_per_s=50.0, host_gb_per_s=20.0),
    machine=MachineCosts(
        devices=(DeviceCosts(name="a"), DeviceCosts(speed=0.5, bytes=10**9, host_gb_per_s=10.0)),
        latency_ms=((0.0, 0.02), (0.03, 0.0)),
        gb_per_s=((None, 50.0), (25.0, None)),
    ),
    noise=Noise.alike(0.2),
    task_ms=0.01,
    tokens_per_sample=128.0,
    device="a device",
    device_bytes=10**10,
    device_flops=1e15,
    source="made up",
)


@pytest.mark.parametrize("book", [BOOK, CostBook(layers=("layer",), entries=(CostEntry(types={"layer": LAYER}),))])
def test_what_is_written_is_read_as_the_same(book: CostBook, tmp_path: Path) -> None:
    write_costs(book, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == book


def test_people_can_read_it(tmp_path: Path) -> None:
    write_costs(BOOK, tmp_path / "costs.json")
    text = (tmp_path / "costs.json").read_text()
    assert '["layer", 42]' in text
    assert '"ends": [3, 40]' in text
    assert json.loads(text)["entries"][1]["types"]["layer"]["forward_ms"] == 0.1


SHORT: dict[str, Any] = {
    "version": 1,
    "layers": [["layer", 2], "head"],
    "entries": [
        {
            "types": {
                name: {"forward_ms": 1, "input_gradient_ms": 1, "weight_gradient_ms": 1} for name in ("layer", "head")
            }
        }
    ],
}


def test_the_machine_may_stand_alone_or_join_the_costs(tmp_path: Path) -> None:
    assert BOOK.machine is not None
    write_machine(BOOK.machine, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == BOOK.machine
    write_costs(BOOK, tmp_path / "costs.json")
    other = MachineCosts(devices=(DeviceCosts(speed=2.0),))
    write_machine(other, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == replace(BOOK, machine=other)


DEVICES = [{"speed": 1.0}, {"speed": 0.5}]
"""Of a machine that is refused for something else."""


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"devices": []}, "machine: the machine has no device: name at least one"),
        ({"devices": [{"speed": 0}]}, "machine.devices[0]: speed is 0.0: give a positive number"),
        ({"devices": [{"speed": -1}]}, "machine.devices[0]: speed is -1.0: give a positive number"),
        ({"devices": [{"bytes": 0}]}, "machine.devices[0]: bytes is 0: give a positive number"),
        (
            {"devices": DEVICES, "latency_ms": [[0, 1]]},
            "latency_ms has 1 rows of 2 numbers: give 2 rows of 2, as there are 2 devices",
        ),
        (
            {"devices": DEVICES, "gb_per_s": [[None, 1], [1]]},
            "gb_per_s has 2 rows of 1, 2 numbers: give 2 rows of 2, as there are 2 devices",
        ),
        (
            {"devices": DEVICES, "latency_ms": [[0, -1], [1, 0]]},
            "latency_ms from device 0 to device 1 is -1.0: give 0 or more",
        ),
        (
            {"devices": DEVICES, "gb_per_s": [[None, 1], [0, None]]},
            "gb_per_s from device 1 to device 0 is 0.0: give a positive number",
        ),
        (
            {"devices": DEVICES, "latency_ms": [[0, float("inf")], [1, 0]]},
            "latency_ms from device 0 to device 1 is inf: give 0 or more",
        ),
        (
            {"devices": DEVICES, "latency_ms": [[0, float("nan")], [1, 0]]},
            "latency_ms from device 0 to device 1 is nan: give 0 or more",
        ),
        ({"devices": DEVICES, "links": []}, "machine.links is no key: take it out, or mend its name"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(machine: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": machine}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_machine(path)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, {**SHORT, "machine": machine})


def test_a_file_without_a_machine_is_refused(tmp_path: Path) -> None:
    read(tmp_path, SHORT)
    with pytest.raises(ValueError, match="machine is missing: add it"):
        read_machine(tmp_path / "costs.json")


def test_what_has_a_default_may_be_left_out(tmp_path: Path) -> None:
    book = read(tmp_path, SHORT)
    assert book.layers == ("layer", "layer", "head")
    assert book.at(microbatch_size=1).of(2).forward_ms == 1


def read(folder: Path, content: Any) -> CostBook:
    path = folder / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_costs(path)


def changed(*keys: Any, to: Any) -> Any:
    content = json.loads(json.dumps(SHORT))
    held = content
    for key in keys[:-1]:
        held = held[key]
    held[keys[-1]] = to
    return content


LAYER_KEYS = ("entries", 0, "types", "layer")
TYPES = SHORT["entries"][0]["types"]
NO_TIME = {"forward_ms": 0, "input_gradient_ms": 0, "weight_gradient_ms": 0}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "this is no JSON, mend it"),
        ([], "all of it is []: give"),
        ({"version": 1, "layers": ["layer"]}, "entries is missing: add it"),
        (changed("version", to=2), "version is 2, and this release reads 1: write the file anew"),
        (changed("color", to=2), "color is no key: take it out, or mend its name"),
        (changed(*LAYER_KEYS, "forward", to=2), "entries[0].types.layer.forward is no key"),
        (changed(*LAYER_KEYS, "forward_ms", to="2"), "entries[0].types.layer.forward_ms is '2': give number"),
        (changed(*LAYER_KEYS, "forward_ms", to=-1), "entries[0].types.layer: forward_ms is -1.0: give 0 or more"),
        (changed(*LAYER_KEYS, "stash_bytes", to=1.5), "entries[0].types.layer.stash_bytes is 1.5: give"),
        (changed(*LAYER_KEYS, to={"forward_ms": 1}), "entries[0].types.layer.input_gradient_ms is missing: add it"),
        (changed("entries", to=[]), "the costs have no entry"),
        (changed("entries", to=SHORT["entries"] * 2), "two entries are for microbatch size 1, tensor 1, remat none"),
        (changed("layers", to=["layer", "vision"]), "the costs lack the layer type 'vision'"),
        (changed("layers", to=[["layer", 0]]), "layers names 0 layers of type 'layer': give at least 1"),
        (
            changed("layers", to=[["layer", 10**9]]),
            "layers names 1000000000 layers of type 'layer': give at most",
        ),
        (changed("layers", to=[3]), "layers[0] is 3: give"),
        (changed("links", to={"gb_per_s": 0}), "links: gb_per_s is 0.0: give a positive number"),
        (changed("links", to={"host_gb_per_s": -1}), "links: host_gb_per_s is -1.0: give a positive number"),
        (changed("device", to={"bytes": 0}), "device: bytes is 0: give a positive number"),
        (changed("noise", to={"sigma": {"F": -1}}), "noise: sigma -1.0 of kind 'F'"),
        (changed("noise", to={"sigma": {"F": 9}}), "noise: sigma 9.0 of kind 'F': give 0 to 5"),
        (changed("noise", to={"tail": 1, "tail_factor": 0}), "noise: tail 1.0, 0.0: no task takes any time"),
        (
            changed("entries", 0, "types", to=dict.fromkeys(TYPES, NO_TIME)),
            "no layer takes any time for microbatch size 1, tensor 1, remat none",
        ),
        (changed("ends", to=[7]), "a chunk cannot end behind layer 7 of 3"),
    ],
)
def test_what_does_not_fit_is_one_sentence(content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"costs {tmp_path / 'costs.json'}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_costs(tmp_path / "absent.json")


def test_a_full_disk_leaves_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    machine = MachineCosts(devices=(DeviceCosts(), DeviceCosts(speed=0.5)))
    write_machine(machine, path)

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match="No space left"):
        write_machine(MachineCosts(devices=(DeviceCosts(),)), path)
    assert read_machine(path) == machine
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]
