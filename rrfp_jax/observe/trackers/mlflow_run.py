"""``mlflow/``, or an MLflow server: a run of MLflow, a metric for every number of a row.

MLflow takes no rows back. A run that goes on therefore goes on there as the same run only where that holds exactly the
rows that count, which it does after an orderly end. Otherwise a new run gets all of them, and then the old one is
deleted, which MLflow can undo.

Without a server the rows lie in files. MLflow keeps that store for small and local use, and reads it where the
environment variable MLFLOW_ALLOW_FILE_STORE is ``true``, which is set here.
"""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rrfp_jax.observe.trackers.columns import Row, flat, scalars, step_of
from rrfp_jax.observe.trackers.interface import TrackedRun, Tracker

FOLDER = "mlflow"
_NAME = "mlflow"
_AT_ONCE = 800
"""Metrics of a call, of which servers take 1000; parameters 100 of at most 6000 characters."""
_PARAMS_AT_ONCE, _PARAM_CHARACTERS = 100, 6000


def start(run: TrackedRun) -> Tracker:
    """Begin a run of MLflow, or go on with one."""
    return _MlflowRun(run)


class _MlflowRun:
    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        in_folder = (run.path / FOLDER).absolute().as_uri()
        uri = run.settings.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or in_folder
        self._metric, self._client, self._run, self._uri = Metric, MlflowClient(tracking_uri=uri), run, uri
        before = run.state(_NAME)
        is_here = "run_id" in before and before.get("uri") == uri
        self._rows = run.past.digest()
        if is_here and before.get("rows") == str(self._rows):
            self._id = str(before["run_id"])
            self._client.update_run(self._id, status="RUNNING")
            self._keep(rows=None)
            return
        self._id = self._new_run()
        self._keep(rows=None)
        for metrics in _together(self._metrics(row) for row in run.past):
            self._client.log_batch(self._id, metrics=metrics)
        if is_here:
            self._client.delete_run(str(before["run_id"]))

    def write(self, row: Row) -> None:
        for metrics in _together([self._metrics(row)]):
            self._client.log_batch(self._id, metrics=metrics)
        self._rows.add(row)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")
        self._keep(rows=str(self._rows))

    def _new_run(self) -> str:
        from mlflow.entities import Param

        project = self._run.settings.project
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        run_id = str(self._client.create_run(experiment, run_name=self._run.name).info.run_id)
        params = [Param(name, str(value)[:_PARAM_CHARACTERS]) for name, value in flat(_named(self._run.config)).items()]
        for begin in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[begin : begin + _PARAMS_AT_ONCE])
        return run_id

    def _metrics(self, row: Row) -> list[Any]:
        now_ms, step = int(time.time() * 1000), step_of(row)
        return [self._metric(name, value, now_ms, step) for name, value in scalars(row).items()]

    def _keep(self, *, rows: str | None) -> None:
        """Which rows it holds is known only after an orderly end."""
        self._run.keep_state(_NAME, {"uri": self._uri, "run_id": self._id, "rows": rows})


def _named(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lists as one text, so that a parameter has the name of its field."""
    return {
        section: {name: str(value) if isinstance(value, list) else value for name, value in fields.items()}
        for section, fields in config.items()
    }


def _together(rows: Any) -> Iterator[list[Any]]:
    """The metrics of rows, in parts of which each is one call."""
    held: list[Any] = []
    for metrics in rows:
        held += metrics
        while len(held) >= _AT_ONCE:
            yield held[:_AT_ONCE]
            held = held[_AT_ONCE:]
    if held:
        yield held
