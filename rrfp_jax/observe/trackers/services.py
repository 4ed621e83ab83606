"""TensorBoard, Weights & Biases and MLflow as takers of a run's rows, and the flat names that numbers have there.

A list becomes ``peak_memory_bytes/0``, ``peak_memory_bytes/1`` ..., an object ``idle_s/fill``. A row that an evaluation
writes names its set under ``evaluation``; its numbers become ``evaluation/NAME/loss``. ``step`` stays ``step``.

A run that goes on goes on in the same run of its service, and every number carries its step. Steps that are trained
again replace the earlier ones in TensorBoard; W&B and MLflow take nothing back and hold both. Only ``metrics.jsonl`` is
exact to the row.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.trackers.config import TrackerConfig
from rrfp_jax.record_files import parse_json, read_record

STEP, EVALUATION = "step", "evaluation"
TRACKER_FILES = ("tensorboard", "wandb", "wandb.json", "mlflow", "mlflow.json")
"""Names of everything that trackers leave in the run directory."""
Row = Mapping[str, Any]
"""One object of ``metrics.jsonl``, of plain JSON values."""

_QUEUED = 1000
"""Events that TensorBoard's writer holds before it writes them."""
_FINISH_S = 15.0
"""How long W&B may upload at the end. The rest stays on the disk, for ``wandb sync``."""
_METRICS_AT_ONCE = 800
"""Metrics of one call to MLflow, whose servers take 1000."""
_PARAMS_AT_ONCE, _PARAM_CHARACTERS = 100, 6000
"""MLflow's limits for the parameters of one call and for the text of one parameter."""


class Tracker(Protocol):
    """Takes the rows of a run. All calls come from the tracker's own thread."""

    def write(self, row: Row) -> None:
        """Takes the next row. An exception has the tracker left out from then on."""

    def close(self, *, failed: bool) -> None:
        """Returns once all rows are written; the run has ended, or ``failed``."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The facts that a tracker gets about its run."""

    path: Path
    """The run's directory."""
    config: Mapping[str, Any]
    """Resolved configuration, as plain data by section."""
    first_step: int
    """Step of the first row to come; -1 where the run begins with its first step."""
    settings: TrackerConfig
    """Settings of the tracker."""

    @property
    def name(self) -> str:
        """The run's name for people."""
        return self.settings.name or self.path.absolute().name

    def state(self, tracker: str) -> dict[str, Any]:
        """Returns the data that a tracker kept for this start; none if the run begins or its file is damaged."""
        if self.first_step < 0:
            return {}
        try:
            state = parse_json(read_record(self.path / f"{tracker}.json")[0])
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def keep_state(self, tracker: str, state: Mapping[str, Any]) -> None:
        """Keeps plain data for the next start."""
        with replacing(self.path / f"{tracker}.json") as path:
            path.write_text(json.dumps(dict(state)), encoding="utf-8")


def flat(row: Row) -> dict[str, Any]:
    """Returns every value of a row that is no object or list, by its flat name."""
    return dict(_flat(row, ""))


def scalars(row: Row) -> dict[str, float]:
    """Returns the numbers of a row by their names, without the step. True is 1; null and text are left out."""
    prefix = f"{EVALUATION}/{row[EVALUATION]}/" if EVALUATION in row else ""
    return {
        f"{prefix}{name}": float(value)
        for name, value in flat(row).items()
        if name not in (STEP, EVALUATION) and isinstance(value, int | float)
    }


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}/{index}")
    else:
        yield name, value


class _TensorBoard:
    """Writes an event file into ``tensorboard/``, with a scalar in single precision for every number of a row."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder, self._event = run.path / "tensorboard", event_pb2.Event
        has_earlier_files = any(folder.glob("*tfevents*"))
        self._writer = EventFileWriter(str(folder), max_queue_size=_QUEUED)
        if has_earlier_files:
            # By this mark TensorBoard forgets these and later steps of the earlier files.
            mark = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=run.first_step, session_log=mark))
        self._writer.flush()

    def write(self, row: Row) -> None:
        event = self._event(wall_time=time.time(), step=int(row[STEP]))
        for name, value in scalars(row).items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - event files know no outcome
        self._writer.close()


class _Wandb:
    """Logs a history row for every row, online or into ``wandb/``; the charts have ``step`` as their axis.

    Raises RuntimeError where nobody is logged in.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = run.settings.mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and wandb.api.api_key is None:  # it would ask for one on a terminal
            raise RuntimeError("nobody is logged in: run `wandb login`, or give {wandb: {mode: offline}} in trackers")
        run_id = str(run.state("wandb").get("id") or secrets.token_hex(4))
        quiet = wandb.Settings(
            mode=cast(Any, mode),
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            finish_timeout=_FINISH_S,
        )
        self._wandb: Any = wandb.init(
            project=run.settings.project,
            entity=run.settings.entity,
            name=run.name,
            id=run_id,
            resume="allow" if mode == "online" else None,  # offline every start keeps a folder of the same run
            dir=str(run.path),
            config=dict(run.config),
            settings=quiet,
        )
        self._wandb.define_metric("*", step_metric=STEP)
        run.keep_state("wandb", {"id": run_id})

    def write(self, row: Row) -> None:
        self._wandb.log({STEP: int(row[STEP]), **scalars(row)})

    def close(self, *, failed: bool) -> None:
        import wandb

        self._wandb.finish(exit_code=int(failed))
        wandb.teardown(exit_code=int(failed))  # W&B's own process has written its files only when that has ended


class _Mlflow:
    """Logs a metric for every number of a row, to a server or into the files of ``mlflow/``.

    MLflow keeps its file store for small and local use, and reads it where the environment variable
    MLFLOW_ALLOW_FILE_STORE is ``true``, which is set here.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        in_folder = (run.path / "mlflow").absolute().as_uri()
        uri = run.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or in_folder
        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        before = run.state("mlflow")
        if "run_id" in before and before.get("uri") == uri:
            self._id = str(before["run_id"])
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._new_run(run)
            run.keep_state("mlflow", {"uri": uri, "run_id": self._id})

    def write(self, row: Row) -> None:
        now_ms, step = int(time.time() * 1000), int(row[STEP])
        metrics = [self._metric(name, value, now_ms, step) for name, value in scalars(row).items()]
        for begin in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _METRICS_AT_ONCE])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")

    def _new_run(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        project = run.settings.project
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        # A list is one text here, so that a parameter has the name of its field.
        texts = {
            section: {name: str(value) if isinstance(value, list) else value for name, value in fields.items()}
            for section, fields in run.config.items()
        }
        params = [Param(name, str(value)[:_PARAM_CHARACTERS]) for name, value in flat(texts).items()]
        for begin in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[begin : begin + _PARAMS_AT_ONCE])
        return run_id


SERVICES: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}
"""Starts a tracker, by its name. The service's library is loaded by the thread that calls it."""
