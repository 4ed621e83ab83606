"""Names of the trackers, their settings, and checks that their libraries are here."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rrfp_jax.field_rules import FieldRule, check_fields

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Names of the trackers, which are those of their packages."""
WANDB_MODES = ("online", "offline")
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Kinds of stores that need all of MLflow; mlflow-skinny writes to files and servers."""
_EXTRA = "pip install 'rrfp-jax[trackers]'"

_NAME = FieldRule("text", lambda value: bool(value.strip()))
_MODE = FieldRule(" or ".join(WANDB_MODES), lambda value: value in WANDB_MODES)


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """A tracker with its settings."""

    tracker: str
    """Name of the tracker."""
    project: str = "rrfp-jax"
    """The project of W&B, or the experiment of MLflow, to which the run belongs."""
    name: str | None = None
    """The run's name there; None: that of its run directory."""
    entity: str | None = None
    """The user or team of W&B; None: the one that is logged in."""
    mode: str | None = None
    """``offline`` keeps everything in the run directory, for ``wandb sync``; None: the environment variable WANDB_MODE,
    else ``online``."""
    uri: str | None = None
    """MLflow's store or server, such as ``sqlite:////data/mlflow.db``; None: the environment variable
    MLFLOW_TRACKING_URI, else the folder ``mlflow`` in the run directory."""

    def __post_init__(self) -> None:
        check_fields(self, _NAME, "project", "name", "entity", "uri")
        check_fields(self, _MODE, "mode")


_SETTINGS = {"tensorboard": (), "wandb": ("project", "name", "entity", "mode"), "mlflow": ("project", "name", "uri")}


def read_trackers(entries: Sequence[str | Mapping[str, Any]]) -> tuple[TrackerConfig, ...]:
    """Reads the trackers of a configuration, each a name or ``{name: {setting: value}}``.

    Raises ValueError, with the remedy, for a name that is no tracker or is given twice, and for a setting that the
    tracker does not have.
    """
    found: dict[str, TrackerConfig] = {}
    for entry in entries:
        for name, given in ({entry: None} if isinstance(entry, str) else entry).items():
            if name == "csv":
                raise ValueError(
                    "trackers has 'csv': metrics.jsonl has every row, and pandas.read_json(FILE, lines=True).to_csv() "
                    f"makes it a CSV file; give some of {', '.join(TRACKERS)}, or none"
                )
            if name not in TRACKERS:
                raise ValueError(f"trackers has {name!r}: give some of {', '.join(TRACKERS)}")
            if name in found:
                raise ValueError(f"trackers has {name} twice: give it once")
            settings = {} if given is None else given
            if not isinstance(settings, Mapping):
                raise ValueError(f"the tracker {name} has {settings!r}: give a mapping of {_settings_of(name)}")
            if (odd := next((key for key in settings if key not in _SETTINGS[name]), None)) is not None:
                raise ValueError(f"{odd!r} is no setting of the tracker {name}: it has {_settings_of(name)}")
            found[name] = TrackerConfig(tracker=name, **settings)
    return tuple(found.values())


def _settings_of(name: str) -> str:
    return ", ".join(_SETTINGS[name]) or "none"


def check_installed(trackers: Sequence[TrackerConfig]) -> None:
    """Raise ValueError, with the remedy, for a tracker whose library is missing; loads none."""
    for each in trackers:
        if find_spec(each.tracker) is None:
            raise ValueError(f"the tracker {each.tracker} is not installed: {_EXTRA}, or leave it out of trackers")
        uri = each.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        kind = uri.partition(":")[0].partition("+")[0]
        if each.tracker == "mlflow" and kind in _DATABASES and find_spec("sqlalchemy") is None:
            raise ValueError(
                f"MLflow is to write to {kind}, for which its databases are not installed: pip install mlflow"
            )
