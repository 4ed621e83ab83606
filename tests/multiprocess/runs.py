"""Small training runs of the real command, for the tests that end them badly and start them again."""

import json
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import SingleDeviceSharding

from rrfp_jax.checkpoint._arrays import ArrayName
from rrfp_jax.checkpoint._reader import check_files, open_step, read_arrays
from rrfp_jax.commands.training.config import SECTIONS
from rrfp_jax.storage import BucketPath
from tests.multiprocess.launching import Launched

QUICK_TO_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Variables of a run that is too short for fast programs to pay off."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 256, "hidden": 16, "num_layers": 4, "num_heads": 2, "mlp_dim": 16, "init_std": 0.1},
    "data": {"path": "LICENSE", "length": 16, "batch_size": 8, "num_microbatches": 4},
    "pipeline": {"num_stages": 2},
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 2},
    "run": {"steps": 20, "platform": "cpu"},
    "cluster": {"silence_deadline_s": 20, "progress_deadline_s": 60},
}


def training_config(folder: Path, **changes: Any) -> Path:
    """Write a configuration with other values for some fields, each of the first section that has it."""
    settings = {section: dict(values) for section, values in _SETTINGS.items()}
    for name, value in changes.items():
        settings[_section_of(name)][name] = value
    path = (Path(tempfile.mkdtemp()) if isinstance(folder, BucketPath) else folder) / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def _section_of(name: str) -> str:
    known = {section: {field.name for field in fields(SECTIONS[section])} for section in _SETTINGS}
    return next(section for section, names in known.items() if name in names)


@dataclass(frozen=True)
class Outcome:
    """What a run has come to."""

    losses: list[float]
    """Of every step."""
    arrays: dict[ArrayName, np.ndarray]
    """Parameters and optimizer state in its last checkpoint."""

    def assert_same(self, other: "Outcome") -> None:
        """Bit for bit."""
        assert self.losses == other.losses
        assert self.arrays.keys() == other.arrays.keys()
        for name, array in self.arrays.items():
            assert array.tobytes() == other.arrays[name].tobytes(), name

    def assert_close(self, other: "Outcome") -> None:
        """Losses, and parameters by norm, within 1e-5 relative."""
        np.testing.assert_allclose(self.losses, other.losses, rtol=1e-5)
        assert self.arrays.keys() == other.arrays.keys()
        for name, array in self.arrays.items():
            if name[1] == "params":
                distance = np.linalg.norm(array - other.arrays[name]) / np.linalg.norm(array)
                assert distance <= 1e-5, (name, distance)


def outcome_of(run: Path, num_steps: int) -> Outcome:
    """The outcome of a run that has ended after so many steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "evaluation" not in row]
    assert [row["step"] for row in rows] == list(range(num_steps))
    return Outcome([row["loss"] for row in rows], restored(run, num_steps))


def started(folder: Path, num_processes: int, settings: dict[str, Any], *options: Any, max_restarts: int) -> Launched:
    """Launches training with these settings and options of the command, in ``run`` of the folder."""
    folder.mkdir(exist_ok=True)
    command = ("train", "--config", training_config(folder, **settings), "--run-dir", folder / "run", *options)
    launcher = ("launch", "--processes", num_processes, "--max-restarts", max_restarts, "--")
    return Launched(*launcher, *command, module="rrfp_jax.commands.main", **QUICK_TO_COMPILE)


def ended(launcher: Launched, folder: Path, num_steps: int) -> Outcome:
    """Waits for a run that :func:`started` launched to succeed, and returns its outcome."""
    try:
        assert launcher.wait(400) == 0, launcher.text
    finally:
        launcher.close()
    return outcome_of(folder / "run", num_steps)


def restored(run: Path, step: int) -> dict[ArrayName, np.ndarray]:
    """Parameters and optimizer state of a committed step, whose files are all whole."""
    found = open_step(run / "checkpoints", step)
    check_files(found, 0, 1)
    device = SingleDeviceSharding(jax.devices()[0])
    specs = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=device)
        for part in found.parts.values()
        for name, dtype, shape in part.arrays
    }
    return jax.tree.map(np.asarray, read_arrays(found, specs))


def copy_run(run: Path, target: Path, *, steps: list[int]) -> None:
    """Copy a run's directory without the checkpoints of some steps."""
    left_out = [f"step_{step:08d}" for step in steps]
    if isinstance(run, BucketPath) and isinstance(target, BucketPath):
        names = [name for name in run.files() if not any(step in name for step in left_out)]
        with tempfile.TemporaryDirectory() as folder:
            run.download(Path(folder), names)
            target.upload(Path(folder), names)
    else:
        shutil.copytree(run, target, ignore=shutil.ignore_patterns(*left_out))


def committed(run: Path) -> list[int]:
    """The steps with a record, ascending."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*/commit.json"))


def is_saving(run: Path) -> bool:
    """Whether a step is being written that is not committed."""
    return any(not (data.parent / "commit.json").exists() for data in run.glob("checkpoints/step_*/data-*"))
