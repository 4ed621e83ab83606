"""What trackers hold, read back by their own means: a list of (step, numbers by name) for each."""

import csv
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rrfp_jax.observe.trackers.columns import scalars, step_of

Held = list[tuple[int, dict[str, float]]]


def of_file(run: Path) -> Held:
    """``metrics.jsonl`` itself."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(step_of(row), scalars(row)) for row in rows]


def of_csv(run: Path) -> Held:
    with (run / "metrics.csv").open(newline="") as file:
        lines = [
            {name: cell if name == "evaluation" else json.loads(cell) for name, cell in line.items() if cell}
            for line in csv.DictReader(file)
        ]
    return [(step_of(line), scalars(line)) for line in lines]


def of_tensorboard(run: Path) -> Held:
    """As TensorBoard shows it; rows of one step are one there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    held: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in held.setdefault(event.step, {}), f"{name} is there twice at step {event.step}"
            held[event.step][name] = event.value
    return sorted(held.items())


def of_mlflow(run: Path, store: str | None = None) -> Held:
    """Of the one run that is not deleted; ``store`` where it is not in the run's directory."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store or (run / "mlflow").absolute().as_uri())
    (experiment,) = (each for each in client.search_experiments() if each.name != "Default")
    (found,) = client.search_runs([experiment.experiment_id])
    held: dict[int, dict[str, float]] = {}
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            assert name not in held.setdefault(metric.step, {}), f"{name} is there twice at step {metric.step}"
            held[metric.step][name] = metric.value
    return sorted(held.items())


def of_wandb(run: Path) -> Held:
    """Of the one folder that waits to be synced."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    held = []
    for data in _log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("step")
            held.append((step, {name: value for name, value in row.items() if not name.startswith("_")}))
    return held


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's form, behind a head of 7 bytes: of each part checksum, length, type."""
    place, parts, block = 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READERS: dict[str, Any] = {"csv": of_csv, "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


def assert_equal(tracker: str, run: Path) -> None:
    """A tracker holds what ``metrics.jsonl`` has, row by row."""
    expected, held = of_file(run), READERS[tracker](run)
    if tracker in ("tensorboard", "mlflow"):  # they know steps, not rows
        merged: dict[int, dict[str, float]] = {}
        for step, row in expected:
            merged.setdefault(step, {}).update(row)
        expected = sorted(merged.items())
    steps, wanted_steps = [step for step, _ in held], [step for step, _ in expected]
    assert steps == wanted_steps, (steps, wanted_steps)
    rel = 1e-6 if tracker == "tensorboard" else 0.0
    for (_, row), (_, wanted) in zip(held, expected, strict=True):
        assert row.keys() == wanted.keys()
        assert all(math.isclose(row[name], wanted[name], rel_tol=rel) for name in wanted)
