"""Files of costs: a :class:`rrfp_jax.costs.CostBook` as JSON that people can read and write.

::

    {
      "version": 1,
      "source": "measured by rrfp profile",
      "device": {"name": "NVIDIA H100", "bytes": 80000000000, "flops": 989.4e12},
      "layers": ["embedding", ["layer", 42], "head"],
      "entries": [
        {"microbatch_size": 1, "tensor": 1, "remat": "none", "types": {
          "embedding": {"forward_ms": 0.1, "input_gradient_ms": 0.0, "weight_gradient_ms": 0.2, ...},
          "layer": {...},
          "head": {...}
        }}
      ],
      "links": {"latency_ms": 0.02, "gb_per_s": 50.0, "host_gb_per_s": 40.0},
      "machine": {"devices": [{"speed": 1.0, "bytes": null, "name": "host-a:0"}, {"speed": 0.5}],
                  "latency_ms": [[0, 0.02], [0.02, 0]], "gb_per_s": [[null, 50.0], [50.0, null]]},
      "noise": {"sigma": {"F": 0.1, "I": 0.1, "W": 0.1}}
    }

Keys are the fields of the records in :mod:`rrfp_jax.costs`; a field with a default may be left out. A
run of layers of one type is its name and their number. Where types ``layer:attention`` and ``layer:mlp`` stand beside
``layer``, plans may cut inside such layers. The section ``machine`` may stand in a file alone.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rrfp_jax.costs import CostBook, CostEntry, LinkCosts, MachineCosts, Noise
from rrfp_jax.field_rules import POSITIVE, check_fields
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.readable import shown
from rrfp_jax.record_files import read_bounded

VERSION = 1
"""Version of the files that are written; no other is read."""
_MOST_BYTES, _MOST_LAYERS = 1 << 24, 1 << 14
_SHORT_LIST = re.compile(r"\[\n\s+[^\[\]{}\n]+(,\n\s+[^\[\]{}\n]+){0,7}\n\s+\]")
"""A list of at most eight numbers and words, as it stands in indented JSON: a string has no line break."""


@dataclass(frozen=True)
class _Device:
    name: str = ""
    bytes: int | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "bytes", "flops")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    layers: list[str | tuple[str, int]]
    entries: list[CostEntry]
    source: str = ""
    device: _Device = Field(default_factory=_Device)
    tokens_per_sample: float = 0.0
    task_ms: float = 0.0
    ends: list[int] = Field(default_factory=list)
    links: LinkCosts = Field(default_factory=LinkCosts)
    machine: MachineCosts | None = None
    noise: Noise = Field(default_factory=Noise)


class _MachineFile(_File):
    """Costs of which nothing but the machine is needed."""

    version: int = VERSION
    layers: list[str | tuple[str, int]] = Field(default_factory=list)
    entries: list[CostEntry] = Field(default_factory=list)


def read_costs(path: str | Path) -> CostBook:
    """Returns the costs of a file; raises ValueError, in one sentence with the file and the key, for a file that is
    none."""
    file = _read(path, _File)
    try:
        return _book(file)
    except ValueError as error:
        raise ValueError(f"costs {path}: {error}") from None


def read_machine(path: str | Path) -> MachineCosts:
    """Returns the section ``machine`` of a file; raises ValueError, as :func:`read_costs` does, where it has none."""
    machine = _read(path, _MachineFile).machine
    if machine is None:
        raise ValueError(f"costs {path}: machine is missing: add it, or measure it (rrfp doctor --links)")
    return machine


def machine_in(path: str | Path) -> MachineCosts | None:
    """Returns the section ``machine`` of a file; None where there is no file, or none in it."""
    return _read(path, _MachineFile).machine if Path(path).exists() else None


def _read(path: str | Path, kind: type[_File]) -> _File:
    try:
        text = read_bounded(path, _MOST_BYTES).decode()
    except OSError as error:
        raise ValueError(f"costs {path} cannot be read ({error.strerror}): give the path of a JSON file") from None
    except UnicodeDecodeError:
        raise ValueError(f"costs {path} are not UTF-8 text: give the path of a JSON file") from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"costs {path}: {_sentence(error)}") from None


def write_costs(book: CostBook, path: str | Path) -> None:
    """Writes a file that :func:`read_costs` reads as the same book."""
    _write(_plain(book), path)


def write_machine(machine: MachineCosts, path: str | Path) -> None:
    """Writes the section ``machine`` into a file, whose other keys stay as they are."""
    kept = json.loads(read_bounded(path, _MOST_BYTES)) if Path(path).exists() else {}
    _write({**kept, "machine": asdict(machine)}, path)


def _write(plain: dict[str, Any], path: str | Path) -> None:
    text = json.dumps(plain, indent=2, allow_nan=False)
    # A killed process or a full disk leaves what was measured before.
    with replacing(path) as temporary:
        temporary.write_text(_SHORT_LIST.sub(_on_one_line, text) + "\n", encoding="utf-8")


def _on_one_line(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]))


def _book(file: _File) -> CostBook:
    if file.version != VERSION:
        raise ValueError(f"version is {file.version}, and this release reads {VERSION}: write the file anew")
    return CostBook(
        layers=tuple(_each_layer(file.layers)),
        entries=tuple(file.entries),
        ends=frozenset(file.ends),
        links=file.links,
        machine=file.machine,
        noise=file.noise,
        task_ms=file.task_ms,
        tokens_per_sample=file.tokens_per_sample,
        device=file.device.name,
        device_bytes=file.device.bytes,
        device_flops=file.device.flops,
        source=file.source,
    )


def _each_layer(runs: Iterable[str | tuple[str, int]]) -> Iterable[str]:
    for run in runs:
        name, number = (run, 1) if isinstance(run, str) else run
        if not 1 <= number <= _MOST_LAYERS:
            bound = "at least 1" if number < 1 else f"at most {_MOST_LAYERS}"
            raise ValueError(f"layers names {shown(number)} layers of type {shown(name)}: give {bound}")
        yield from (name,) * number


def _plain(book: CostBook) -> dict[str, Any]:
    runs = [(name, len(list(each))) for name, each in groupby(book.layers)]
    return {
        "version": VERSION,
        "source": book.source,
        "device": {"name": book.device, "bytes": book.device_bytes, "flops": book.device_flops},
        "tokens_per_sample": book.tokens_per_sample,
        "task_ms": book.task_ms,
        "layers": [name if number == 1 else [name, number] for name, number in runs],
        "ends": sorted(book.ends),
        "links": asdict(book.links),
        "machine": None if book.machine is None else asdict(book.machine),
        "noise": asdict(book.noise),
        "entries": [asdict(entry) for entry in book.entries],
    }


def _sentence(error: ValidationError) -> str:
    """Returns the first mistake, with its key."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"this is no JSON, mend it: {first['ctx']['error']}"
    place = _place(first["loc"])
    if isinstance(cause := first.get("ctx", {}).get("error"), ValueError):
        return f"{place}: {cause}" if place else str(cause)
    if first["type"].startswith("missing"):
        return f"{place} is missing: add it"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place} is no key: take it out, or mend its name"
    wanted = re.sub(r"^Input should be (a valid )?", "", first["msg"])
    return f"{place or 'all of it'} is {shown(first['input']):.60}: give {wanted}"


def _place(location: Iterable[int | str]) -> str:
    """Returns a key such as ``entries[0].types.layer.forward_ms``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part not in _OF_UNIONS]
    return "".join(parts).removeprefix(".")


_OF_UNIONS = ("str", "tuple[str, int]")
