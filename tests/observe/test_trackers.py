"""Trackers hold the numbers of the metrics file, also after a resume; a tracker that fails is left out."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.observe import trackers
from rrfp_jax.observe.trackers import TRACKERS, TrackedMetrics, check_installed, flat, read_trackers, scalars
from rrfp_jax.training.run_directory import RunDirectory
from tests.observe.tracker_reading import READERS, assert_equal, by_step, of_file, of_mlflow

SLOW_TO_LOAD = ("wandb", "mlflow")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW_TO_LOAD else ()) for name in TRACKERS]
CONFIG = {"model": {"hidden": 8, "layers": [1, 2]}, "run": {"steps": 10, "trackers": ["wandb"]}}


def row(step: int, attempt: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5 / (step + 3) + attempt / 7,
        "grad_norm": None if step == 2 else 0.1 * step,
        "skipped": step == 2,
        "idle_s": {"fill": 0.25, "input": step / 3},
        "peak_memory_bytes": [7, 2**40 + 1],
    }


def held_out(step: int) -> dict[str, Any]:
    return {"step": step, "evaluation": "held-out", "loss": 1.5, "perplexity": 4.48}


def train(path: Path, tracker: str, steps: range, attempt: int = 0, **settings: Any) -> None:
    """A run from the first of these steps on, which evaluates at every third."""
    directory = RunDirectory(path)
    directory.start(CONFIG, from_step=steps.start)
    entry = {tracker: settings | ({"mode": "offline"} if tracker == "wandb" else {})}
    with directory.tracked_metrics(CONFIG, read_trackers([entry]), first_step=steps.start) as metrics:
        if steps.start == 0:
            metrics.write(held_out(-1))  # before anything is trained
        for step in steps:
            metrics.write(row(step, attempt))
            if step % 3 == 2:
                metrics.write(held_out(step))


@pytest.mark.parametrize("tracker", EACH)
def test_rows_are_those_of_the_file_also_after_a_resume(tracker: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, tracker, range(4))
    assert_equal(tracker, run)
    train(run, tracker, range(4, 7))  # as after SIGTERM
    assert_equal(tracker, run)
    train(run, tracker, range(5, 9), attempt=1)  # as after a failure: 5 and 6 are trained again
    assert_equal(tracker, run)
    assert [step for step, _ in of_file(run)] == [-1, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]


@pytest.mark.parametrize("tracker", EACH)
def test_a_run_that_starts_over_for_want_of_a_checkpoint_begins_anew(tracker: str, tmp_path: Path) -> None:
    train(tmp_path, tracker, range(3))
    train(tmp_path, tracker, range(2), attempt=1)
    assert_equal(tracker, tmp_path)
    assert [step for step, _ in of_file(tmp_path)] == [-1, 0, 1]


@pytest.mark.parametrize("tracker", EACH)
def test_a_tracker_that_comes_later_gets_the_rows_from_then_on(tracker: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.start(CONFIG)
    with directory.tracked_metrics({}, first_step=0) as metrics:
        for step in range(3):
            metrics.write(row(step))
    train(tmp_path, tracker, range(3, 5))
    assert [step for step, _ in by_step(READERS[tracker](tmp_path))] == [3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of SQLAlchemy, which MLflow calls
def test_mlflow_holds_the_same_in_a_database(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny knows no databases")
    pytest.importorskip("alembic", reason="likewise")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    from mlflow import MlflowClient

    MlflowClient(tracking_uri=store).search_experiments()  # makes the tables, which takes seconds
    for steps, attempt in ((range(4), 0), (range(4, 7), 0), (range(5, 9), 1)):
        train(tmp_path / "run", "mlflow", steps, attempt, uri=store)
        assert of_mlflow(tmp_path / "run", store) == by_step(of_file(tmp_path / "run"))


@pytest.mark.slow
def test_mlflow_knows_the_configuration_and_how_the_run_ended(tmp_path: Path) -> None:
    train(tmp_path / "mine", "mlflow", range(2), project="p")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mine" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("p")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {
        "model/hidden": "8",
        "model/layers": "[1, 2]",
        "run/steps": "10",
        "run/trackers": "['wandb']",
    }


class Faulty:
    """A tracker that does as it is told, and notes what it gets."""

    def __init__(self, fails_at: int | None = None, hangs_at: int | None = None) -> None:
        self.rows: list[int] = []
        self._fails_at, self._hangs_at, self.let_go = fails_at, hangs_at, threading.Event()
        self.closed: bool | None = None

    def write(self, row: Any) -> None:
        if row["step"] == self._fails_at:
            raise OSError("no route to\n the server")
        if row["step"] == self._hangs_at:
            self.let_go.wait()
        self.rows.append(row["step"])

    def close(self, *, failed: bool) -> None:
        self.closed = failed


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Faulty], TrackedMetrics]:
    def open_with(tracker: Faulty) -> TrackedMetrics:
        monkeypatch.setattr(trackers, "SERVICES", {"wandb": lambda run: tracker})
        monkeypatch.setattr(trackers, "_CLOSE_S", 0.2)
        directory = RunDirectory(tmp_path)
        directory.start(CONFIG)
        return directory.tracked_metrics(CONFIG, read_trackers(["wandb"]), first_step=0)

    return open_with


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    faulty: Callable[[Faulty], TrackedMetrics], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Faulty(fails_at=1)
    with caplog.at_level(logging.WARNING), faulty(tracker) as metrics:
        for step in range(4):
            metrics.write(row(step))
    assert [record.getMessage() for record in caplog.records] == [
        "the tracker wandb is left out from here on: no route to the server"
    ]
    assert tracker.rows == [0]
    assert len(of_file(tmp_path)) == 4


def test_a_tracker_that_hangs_holds_up_neither_the_loop_nor_the_end(
    faulty: Callable[[Faulty], TrackedMetrics], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Faulty(hangs_at=1)
    with caplog.at_level(logging.WARNING), faulty(tracker) as metrics:
        for step in range(4):
            metrics.write(row(step))
    assert [record.getMessage() for record in caplog.records] == [
        "the tracker wandb is left out from here on: it has not taken the last rows in time"
    ]
    assert len(of_file(tmp_path)) == 4
    tracker.let_go.set()


def test_a_slow_tracker_has_all_rows_when_the_run_ends_and_hears_of_a_failure(
    faulty: Callable[[Faulty], TrackedMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Faulty()
    monkeypatch.setattr(tracker, "write", lambda row: (time.sleep(0.005), tracker.rows.append(row["step"])))
    metrics = faulty(tracker)
    for step in range(20):
        metrics.write(row(step))
    metrics.__exit__(RuntimeError, RuntimeError("a rank was lost"), None)
    assert tracker.rows == list(range(20))
    assert tracker.closed is True


def test_names_are_flat_and_numbers_of_evaluations_have_their_set_s() -> None:
    assert dict(flat({"a": {"b": [1, {"c": None}]}, "d": "x"})) == {"a/b/0": 1, "a/b/1/c": None, "d": "x"}
    assert scalars({"step": 3, "loss": 1, "skipped": True, "grad_norm": None}) == {"loss": 1.0, "skipped": 1.0}
    assert scalars(held_out(3)) == {"evaluation/held-out/loss": 1.5, "evaluation/held-out/perplexity": 4.48}


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="trackers has 'tensorbord': give some of tensorboard, wandb, mlflow"):
        read_trackers(("tensorbord",))
    with pytest.raises(ValueError, match="wandb twice"):
        read_trackers(("wandb", "wandb"))
    with pytest.raises(ValueError, match=r"trackers has 'csv': metrics\.jsonl has every row"):
        read_trackers(("csv",))
    with pytest.raises(ValueError, match="mode is sometimes: give online or offline"):
        read_trackers([{"wandb": {"mode": "sometimes"}}])
    with pytest.raises(ValueError, match="'mode' is no setting of the tracker mlflow: it has project, name, uri"):
        read_trackers([{"mlflow": {"mode": "offline"}}])
    monkeypatch.setattr("rrfp_jax.observe.trackers.find_spec", lambda name: None)
    check_installed(())
    with pytest.raises(ValueError, match=r"tracker wandb is not installed: pip install 'rrfp-jax\[trackers\]'"):
        check_installed(read_trackers(("wandb",)))
    monkeypatch.setattr("rrfp_jax.observe.trackers.find_spec", lambda name: name if name == "mlflow" else None)
    check_installed(read_trackers([{"mlflow": {"uri": "http://elsewhere:5000"}}]))
    with pytest.raises(ValueError, match=r"to write to sqlite, for which .* not installed: pip install mlflow$"):
        check_installed(read_trackers([{"mlflow": {"uri": "sqlite:////data/mlflow.db"}}]))
