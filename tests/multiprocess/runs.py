"""Small training runs of the real command, for the tests that end them badly and start them again."""

from pathlib import Path
from typing import Any

import yaml

_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 256, "hidden": 16, "num_layers": 4, "num_heads": 2, "mlp_dim": 16, "init_std": 0.1},
    "data": {"path": "README.md", "length": 16, "batch_size": 8, "num_microbatches": 4},
    "pipeline": {"num_stages": 2, "progress_deadline_s": 60},
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 2},
    "run": {"steps": 20, "platform": "cpu"},
    "cluster": {"silence_deadline_s": 20},
}


def training_config(folder: Path, **changes: Any) -> Path:
    """Write a configuration with other values for some fields, whose names are unique, and return its path."""
    settings = {section: dict(values) for section, values in _SETTINGS.items()}
    for name, value in changes.items():
        settings[_section_of(name)][name] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def _section_of(name: str) -> str:
    from dataclasses import fields

    from experiments.config import SECTIONS

    (section,) = (section for section, record in SECTIONS.items() if name in {field.name for field in fields(record)})
    return section
