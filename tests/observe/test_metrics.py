"""The metrics file: strict JSON, one flushed line per object, whole again after a killed run."""

import json
import logging
import math
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.observe.metrics import MetricsFile


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_every_line_is_there_at_once(path: Path) -> None:
    with closing(MetricsFile(path)) as metrics:
        for step in range(3):
            metrics.write({"step": step, "loss": 0.5 * step})
            assert read_metrics(path) == [{"step": s, "loss": 0.5 * s} for s in range(step + 1)]


def test_continued_run_appends(path: Path) -> None:
    for step in range(3):
        with closing(MetricsFile(path)) as metrics:
            metrics.write({"step": step})
            assert metrics.dropped == b""
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_numbers_that_are_not_finite_become_null(path: Path) -> None:
    with closing(MetricsFile(path)) as metrics:
        metrics.write({"loss": math.nan, "norms": [1.0, math.inf, np.float32(-np.inf)]})
    assert path.read_text() == '{"loss": null, "norms": [1.0, null, null]}\n'


def test_numpy_values_and_nesting_are_understood(path: Path) -> None:
    with closing(MetricsFile(path)) as metrics:
        metrics.write({"a": np.int64(3), "b": np.bool_(True), "c": np.arange(3), "d": {"e": (np.float32(0.5), "ü")}})
    assert read_metrics(path) == [{"a": 3, "b": True, "c": [0, 1, 2], "d": {"e": [0.5, "ü"]}}]


def test_what_json_does_not_know_is_refused_and_nothing_is_written(path: Path) -> None:
    with closing(MetricsFile(path)) as metrics:
        metrics.write({"step": 0})
        with pytest.raises(ValueError, match=r"metrics\['state'\]\[1\] is a set: give numbers"):
            metrics.write({"step": 1, "state": [1, {2}]})
        metrics.write({"step": 2})
    assert [row["step"] for row in read_metrics(path)] == [0, 2]


@pytest.mark.parametrize(
    "partial", [b'{"step": 1, "lo', b"{", b"\x00\x00\x00", b"\x00\n", b'{"a": "\xc3', b"17", b"\n"]
)
@pytest.mark.parametrize("before", [b"", b'{"step": 0}\n', b'{"text": "' + b"x" * 9000 + b'"}\n'])
def test_partial_last_line_is_dropped(
    before: bytes, partial: bytes, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(before + partial)
    with caplog.at_level(logging.WARNING), closing(MetricsFile(path)) as metrics:
        assert metrics.dropped == partial
        metrics.write({"step": 1})
    assert "dropped a partial last line" in caplog.text
    assert path.read_bytes() == before + b'{"step": 1}\n'


def test_every_cut_of_a_file_can_be_continued(path: Path) -> None:
    path.parent.mkdir()
    whole = b'{"step": 0, "loss": 1.5}\n{"step": 1, "loss": null}\n'
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with closing(MetricsFile(path)) as metrics:
            metrics.write({"step": 2})
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["step"] for row in rows] in ([2], [0, 2], [0, 1, 2])
        # Only an object that was cut within is lost.
        assert len(rows) == 1 + (length >= whole.index(b"\n")) + (length >= len(whole) - 1)


def test_a_full_disk_costs_lines_and_not_the_run(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(MetricsFile(path)) as metrics:
        metrics.write({"step": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
        try:
            for step in (1, 2, 3):
                metrics.write({"step": step, "text": "long " * 20})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        metrics.write({"step": 4})
    assert [row["step"] for row in read_metrics(path)] == [0, 4]
    (record,) = caplog.records
    assert "takes no more lines" in record.getMessage()
