"""The content of trackers, read back by their own means: a list of (step, numbers by name) for each."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rrfp_jax.observe.trackers import scalars

Held = list[tuple[int, dict[str, float]]]


def of_file(run: Path) -> Held:
    """``metrics.jsonl`` itself."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], scalars(row)) for row in rows]


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
    """The run that the directory names; ``store`` where it is not in the run's directory."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store or (run / "mlflow").absolute().as_uri())
    found = client.get_run(json.loads((run / "mlflow.json").read_text())["run_id"])
    held: dict[int, dict[str, float]] = {}
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            held.setdefault(metric.step, {})[name] = metric.value  # of a step trained again, the later one
    return sorted(held.items())


def of_wandb(run: Path) -> Held:
    """All folders of the run that wait to be synced, in their order."""
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = json.loads((run / "wandb.json").read_text())["id"]
    paths = sorted((run / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    held = []
    for data in (data for path in paths for data in _log_records(path.read_bytes())):
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


READERS: dict[str, Any] = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


def by_step(rows: Held) -> Held:
    """Joins rows of one step. Services know steps, not rows."""
    merged: dict[int, dict[str, float]] = {}
    for step, row in rows:
        merged.setdefault(step, {}).update(row)
    return sorted(merged.items())


def assert_equal(tracker: str, run: Path) -> None:
    """The latest number of each name and step in a tracker is that of ``metrics.jsonl``."""
    expected, held = by_step(of_file(run)), by_step(READERS[tracker](run))
    steps, wanted_steps = [step for step, _ in held], [step for step, _ in expected]
    assert steps == wanted_steps, (steps, wanted_steps)
    rel = 1e-6 if tracker == "tensorboard" else 0.0
    for (_, row), (_, wanted) in zip(held, expected, strict=True):
        assert row.keys() == wanted.keys()
        assert all(math.isclose(row[name], wanted[name], rel_tol=rel) for name in wanted)
