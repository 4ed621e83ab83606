"""``metrics.jsonl`` and the trackers that get its rows: TensorBoard, Weights & Biases and MLflow.

A tracker never ends a run, and never slows its loop: each works on a thread of its own. A failure is named in one
warning, and the tracker is left out from then on. All rows are handed over before the process ends, however it ends,
within a bounded time.

Numbers have flat names there. A list becomes ``peak_memory_bytes/0``, ``peak_memory_bytes/1`` ..., an object
``idle_s/fill``. A row that an evaluation writes names its set under ``evaluation``; its numbers become
``evaluation/NAME/loss``. ``step`` stays ``step``.

A run that goes on goes on in the same run of its service, and every number carries its step. Steps that are trained
again replace the earlier ones in TensorBoard; W&B and MLflow take nothing back and hold both. Only ``metrics.jsonl`` is
exact to the row.
"""

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, cast

from rrfp_jax.field_rules import FieldRule, check_fields
from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.record_files import parse_json, read_record

_SETTINGS = {"tensorboard": (), "wandb": ("project", "name", "entity", "mode"), "mlflow": ("project", "name", "uri")}
TRACKERS = tuple(_SETTINGS)
"""Names of the trackers, which are those of their packages."""
TRACKER_FILES = ("tensorboard", "wandb", "wandb.json", "mlflow", "mlflow.json")
"""Names of everything that trackers leave in the run directory."""
STEP, EVALUATION = "step", "evaluation"
Row = Mapping[str, Any]
"""One object of ``metrics.jsonl``, of plain JSON values."""

_MODES = ("online", "offline")
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Kinds of stores that need all of MLflow; mlflow-skinny writes to files and servers."""
_START_S = 20.0
"""How long a run waits for its trackers before the first step."""
_CLOSE_S, _CLOSE_AFTER_FAILURE_S = 20.0, 4.0
"""How long a run waits at its end. After a failure the process is ended within some seconds, so it waits less."""
_MOST_ROWS = 20_000
"""Rows that may wait for a tracker. One that is further behind stands still."""
_QUEUED = 1000
"""Events that TensorBoard's writer holds before it writes them."""
_FINISH_S = 15.0
"""How long W&B may upload at the end. The rest stays on the disk, for ``wandb sync``."""
_METRICS_AT_ONCE = 800
"""Metrics of one call to MLflow, whose servers take 1000."""
_PARAMS_AT_ONCE, _PARAM_CHARACTERS = 100, 6000
"""MLflow's limits for the parameters of one call and for the text of one parameter."""
_log = logging.getLogger(__name__)


# -- settings ----------------------------------------------------------------------------------------------------------


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
        is_text = FieldRule("text", lambda value: bool(value.strip()))
        check_fields(self, is_text, "project", "name", "entity", "uri")
        check_fields(self, FieldRule(" or ".join(_MODES), lambda value: value in _MODES), "mode")


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
            settings, known = {} if given is None else given, ", ".join(_SETTINGS[name]) or "none"
            if not isinstance(settings, Mapping):
                raise ValueError(f"the tracker {name} has {settings!r}: give a mapping of {known}")
            if (odd := next((key for key in settings if key not in _SETTINGS[name]), None)) is not None:
                raise ValueError(f"{odd!r} is no setting of the tracker {name}: it has {known}")
            found[name] = TrackerConfig(tracker=name, **settings)
    return tuple(found.values())


def check_installed(trackers: Sequence[TrackerConfig]) -> None:
    """Raise ValueError, with the remedy, for a tracker whose library is missing; loads none."""
    for each in trackers:
        if find_spec(each.tracker) is None:
            raise ValueError(
                f"the tracker {each.tracker} is not installed: pip install 'rrfp-jax[trackers]', or leave it out of "
                "trackers"
            )
        uri = each.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        kind = uri.partition(":")[0].partition("+")[0]
        if each.tracker == "mlflow" and kind in _DATABASES and find_spec("sqlalchemy") is None:
            raise ValueError(
                f"MLflow is to write to {kind}, for which its databases are not installed: pip install mlflow"
            )


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

    def state(self) -> dict[str, Any]:
        """Returns the data that the tracker kept for this start; none if the run begins or its file is damaged."""
        if self.first_step < 0:
            return {}
        try:
            state = parse_json(read_record(self.path / f"{self.settings.tracker}.json")[0])
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def keep_state(self, state: Mapping[str, Any]) -> None:
        """Keeps plain data for the tracker's next start."""
        with replacing(self.path / f"{self.settings.tracker}.json") as path:
            path.write_text(json.dumps(dict(state)), encoding="utf-8")


# -- services ----------------------------------------------------------------------------------------------------------


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of a row that is no object or list, with its flat name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flat(item, f"{name}/{index}")
    else:
        yield name, value


def scalars(row: Row) -> dict[str, float]:
    """Returns the numbers of a row by their names, without the step. True is 1; null and text are left out."""
    prefix = f"{EVALUATION}/{row[EVALUATION]}/" if EVALUATION in row else ""
    return {
        f"{prefix}{name}": float(value)
        for name, value in flat(row)
        if name not in (STEP, EVALUATION) and isinstance(value, int | float)
    }


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
        run_id = str(run.state().get("id") or secrets.token_hex(4))
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
        run.keep_state({"id": run_id})

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
        from mlflow.entities import Metric, Param

        in_folder = (run.path / "mlflow").absolute().as_uri()
        uri = run.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or in_folder
        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        before, project = run.state(), run.settings.project
        if "run_id" in before and before.get("uri") == uri:
            self._id = str(before["run_id"])
            self._client.update_run(self._id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        # A list is one text here, so that a parameter has the name of its field.
        texts = {
            section: {name: str(value) if isinstance(value, list) else value for name, value in fields.items()}
            for section, fields in run.config.items()
        }
        params = [Param(name, str(value)[:_PARAM_CHARACTERS]) for name, value in flat(texts)]
        for begin in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[begin : begin + _PARAMS_AT_ONCE])
        run.keep_state({"uri": uri, "run_id": self._id})

    def write(self, row: Row) -> None:
        now_ms, step = int(time.time() * 1000), int(row[STEP])
        metrics = [self._metric(name, value, now_ms, step) for name, value in scalars(row).items()]
        for begin in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _METRICS_AT_ONCE])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


SERVICES: Mapping[str, Callable[[TrackedRun], Any]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}
"""Starts a tracker, by its name. The service's library is loaded by the thread that calls it, which also makes all
later calls: ``write(row)``, after an exception of which the tracker is left out, and ``close(failed=...)``, which
returns once all rows are written."""


# -- rows --------------------------------------------------------------------------------------------------------------


class TrackedMetrics:
    """Writes every row to the file, and hands it to all trackers.

    As a context manager it closes all of them, in less time where an exception leaves the block.

    Args:
        file: the metrics file, closed here.
        runs: the facts about the run for each tracker, with its settings.
    """

    def __init__(self, file: MetricsFile, runs: Sequence[TrackedRun]) -> None:
        self._file = file
        self._trackers = [_TrackerThread(run) for run in runs]
        # The imports of a tracker would slow the first steps.
        until_s = time.monotonic() + _START_S
        for tracker in self._trackers:
            tracker.has_started.wait(max(0.0, until_s - time.monotonic()))

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one row, as :meth:`MetricsFile.write`."""
        row = self._file.write(values)
        for tracker in self._trackers:
            tracker.put(row)

    def close(self, *, failed: bool = False) -> None:
        """Blocks until all rows are written. A tracker that takes too long is left behind."""
        self._file.close()
        for tracker in self._trackers:
            tracker.rows.put(failed)
        until_s = time.monotonic() + (_CLOSE_AFTER_FAILURE_S if failed else _CLOSE_S)
        for tracker in self._trackers:
            tracker.join(until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class _TrackerThread:
    """Starts a tracker on a thread of its own and gives it rows in their order."""

    def __init__(self, run: TrackedRun) -> None:
        self._name = run.settings.tracker
        self.rows: SimpleQueue[Row | bool] = SimpleQueue()
        """Rows, and at the end whether the run has failed."""
        self.has_started = threading.Event()
        """Set once the tracker takes rows, or is left out."""
        self._is_left_out = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"tracker {self._name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Hands a row over and returns at once."""
        if self._is_left_out.is_set():
            return
        if self.rows.qsize() >= _MOST_ROWS:
            self._leave_out(f"{_MOST_ROWS} rows wait for it")
        self.rows.put(row)

    def join(self, until_s: float) -> None:
        """Blocks until all rows are written, at most until ``until_s`` (``time.monotonic``), and then leaves the
        tracker behind."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._leave_out("it has not taken the last rows in time")

    def _work(self, run: TrackedRun) -> None:
        try:
            tracker = SERVICES[self._name](run)
            self.has_started.set()
            while not isinstance(row := self.rows.get(), bool) and not self._is_left_out.is_set():
                tracker.write(row)
            tracker.close(failed=row is True)
        except (Exception, SystemExit) as error:  # libraries may raise anything
            self._leave_out(" ".join(str(error).split()) or repr(error))
        self.has_started.set()

    def _leave_out(self, reason: str) -> None:
        if not self._is_left_out.is_set():
            self._is_left_out.set()
            _log.warning("the tracker %s is left out from here on: %s", self._name, reason)
