"""Names of the trackers, their settings, and checks that their libraries are here."""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from rrfp_jax.field_rules import Rule, check_fields

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Names of the trackers, which are those of their packages."""
WANDB_MODES = ("online", "offline")
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Kinds of stores that need all of MLflow; mlflow-skinny writes to files and servers."""
_EXTRA = "pip install 'rrfp-jax[trackers]'"

_NAME = Rule("text", lambda value: bool(value.strip()))
_MODE = Rule(" or ".join(WANDB_MODES), lambda value: value in WANDB_MODES)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Settings of the trackers."""

    project: str = "rrfp-jax"
    """The project of W&B, and the experiment of MLflow, to which the run belongs."""
    name: str | None = None
    """The run's name there; None: that of its run directory."""
    wandb_entity: str | None = None
    """The user or team of W&B; None: the one that is logged in."""
    wandb_mode: str | None = None
    """``offline`` keeps everything in the run directory, for ``wandb sync``; None: the environment variable WANDB_MODE,
    else ``online``."""
    mlflow_uri: str | None = None
    """MLflow's store or server, such as ``sqlite:////data/mlflow.db``; None: the environment variable
    MLFLOW_TRACKING_URI, else the folder ``mlflow`` in the run directory."""

    def __post_init__(self) -> None:
        check_fields(self, _NAME, "project", "name", "wandb_entity", "mlflow_uri")
        check_fields(self, _MODE, "wandb_mode")


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise ValueError, with the remedy, for a name that is no tracker or is given twice."""
    for name in names:
        if name == "csv":
            raise ValueError(
                "trackers has 'csv': metrics.jsonl has every row, and pandas.read_json(FILE, lines=True).to_csv() makes a "
                f"CSV file of it; give some of {', '.join(TRACKERS)}, or none"
            )
        if name not in TRACKERS:
            raise ValueError(f"trackers has {name!r}: give some of {', '.join(TRACKERS)}")
        if names.count(name) > 1:
            raise ValueError(f"trackers has {name} twice: give it once")


def check_installed(names: tuple[str, ...], mlflow_uri: str | None = None) -> None:
    """Raise ValueError, with the remedy, for a tracker whose library is missing; loads none.

    ``mlflow_uri`` is MLflow's store where the configuration names one, which may be a database.
    """
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"the tracker {name} is not installed: {_EXTRA}, or leave it out of trackers")
    uri = mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    kind = uri.partition(":")[0].partition("+")[0]
    if "mlflow" in names and kind in _DATABASES and find_spec("sqlalchemy") is None:
        raise ValueError(f"MLflow is to write to {kind}, for which its databases are not installed: pip install mlflow")
