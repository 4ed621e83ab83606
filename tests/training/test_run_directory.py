"""A run's folder: what it holds, that files appear whole, and that a check creates nothing."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from rrfp_jax.runtime import WaitForReport
from rrfp_jax.schedules import Task
from rrfp_jax.schedules.timeline import Span, Timeline
from rrfp_jax.storage import located
from rrfp_jax.training import run_directory
from rrfp_jax.training.run_directory import RunDirectory, RunRows, new_run_path

TIMELINE = Timeline(1, [Span(0, 0, Task.parse("0F0"), 0.0, 1.0)])


def test_every_file_of_a_run(tmp_path):
    directory = RunDirectory(tmp_path / "deep" / "run")
    directory.check()
    assert not (tmp_path / "deep").exists()
    assert directory.leftovers() == []
    directory.start({"run": {"steps": 2}})
    with directory.tracked_metrics({}, first_step=0) as metrics:
        metrics.write({"step": 0})
        metrics.write({"step": 1})
    directory.write_timeline(TIMELINE, "bf")
    failure = directory.write_failure(WaitForReport(summary="stuck", stages=()))
    directory.write_failure(WaitForReport(summary="all others seem lost", stages=()))
    assert yaml.safe_load((directory.path / "config.yaml").read_text()) == {"run": {"steps": 2}}
    assert json.loads(failure.read_text())["summary"] == "stuck"
    names = {"config.yaml", "metrics.jsonl", "timeline.png", "trace.json", "failure.json"}
    assert {path.name for path in directory.path.iterdir()} == set(directory.leftovers()) == names

    directory.check()
    directory.start({"run": {"steps": 3}}, from_step=1)
    assert {path.name for path in directory.path.iterdir()} == names - {"failure.json"}
    assert (directory.path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    directory.clear()
    assert list(directory.path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    directory.start({"steps": 1})

    def half(self, text, encoding):
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left"):
        directory.start({"steps": 2})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.timeout(60)
def test_pipes_and_devices_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"metrics.jsonl is a pipe or a device: name a file"):
        RunDirectory(tmp_path).check()
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(ValueError, match=r"cannot be made \(run.lock is no file\)"):
        RunDirectory(tmp_path).hold()


def test_rows_that_a_link_shows_are_copied_and_left_as_they_are(tmp_path):
    archived = tmp_path / "archive.jsonl"
    archived.write_text('{"step": 0}\n{"step": 1}\n{"st')
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    (directory.path / "metrics.jsonl").symlink_to(archived)
    directory.start({}, from_step=1)
    with directory.tracked_metrics({}, first_step=0) as metrics:
        metrics.write({"step": 1, "loss": 2.0})
    assert archived.read_text() == '{"step": 0}\n{"step": 1}\n{"st'
    assert (directory.path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "is a file: name a folder"), ("file/run", "is no folder"), ("run", "metrics.jsonl is a folder")],
)
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, place, message):
    (tmp_path / "file").touch()
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        RunDirectory(tmp_path / place).check()


def test_protected_folders_and_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").touch()
    refused = {tmp_path}
    monkeypatch.setattr(run_directory.os, "access", lambda path, mode: Path(path) not in refused)
    for directory in (tmp_path, tmp_path / "new" / "run"):
        with pytest.raises(ValueError, match="nothing can be written"):
            RunDirectory(directory).check()
    refused = {tmp_path / "metrics.jsonl"}
    with pytest.raises(ValueError, match="write-protected"):
        RunDirectory(tmp_path).check()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_place_where_nothing_can_be_made_is_refused_whatever_its_rights():
    for place in (Path("/proc/run"), Path("/proc/deep/run")):
        with pytest.raises(ValueError, match=r"nothing can be made in /proc \(.*\), so name another folder"):
            RunDirectory(place).check()


def test_a_picture_that_cannot_be_made_is_named_and_left_out(tmp_path, caplog, monkeypatch):
    (tmp_path / "trace.json").mkdir()
    directory = RunDirectory(tmp_path)
    directory.write_timeline(TIMELINE, "bf")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{tmp_path / 'trace.json'} is left out: ")
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert directory.written() == ["timeline.png"]

    from rrfp_jax.observe import picture

    def fail(*_):
        raise RuntimeError("no fonts\nat all")

    monkeypatch.setattr(picture, "draw_timelines", fail)
    (tmp_path / "trace.json").rmdir()
    directory.write_timeline(TIMELINE, "bf")
    assert caplog.records[-1].getMessage() == f"{tmp_path / 'timeline.png'} is left out: no fonts at all"
    assert (tmp_path / "trace.json").stat().st_size > 100


def test_damaged_rows_are_set_aside(tmp_path, caplog):
    directory = RunDirectory(tmp_path)
    rows = [b'{"step": 0}', b"\0\0\0\0\0\0", b'{"loss": 3}', b'{"step": "one"}', b'{"step": 1}', b"[" * 9999]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows) + b'\n{"step": 2}\n')
    directory.start({}, from_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 0}\n{"step": 1}\n'
    aside = b"\n".join([*rows[1:4], rows[5]]) + b"\n"
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == aside
    (record,) = caplog.records
    assert f"{tmp_path / 'metrics.jsonl'}: line 2, 3, 4, 6 is damaged, and set aside" in record.getMessage()
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + bytes(6))
    directory.start({}, from_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 0}\n'
    assert "metrics.jsonl.damaged" in directory.leftovers()


def test_one_run_at_a_time_holds_a_directory(tmp_path):
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.hold()
    first.start({"steps": 1})
    with pytest.raises(ValueError, match=rf"run is in use: process {os.getpid()} on .* holds it since .* UTC; wait"):
        second.hold(to_clear=True)
    second.lock.release()
    assert (tmp_path / "run" / "run.lock").exists()
    first.lock.release()
    second.hold(to_clear=True)
    second.clear()
    second.lock.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_nothing_is_removed_through_a_link(tmp_path):
    disk, run = tmp_path / "disk", tmp_path / "run"
    for folder in (disk, run):
        folder.mkdir()
    (disk / "precious").touch()
    (run / "config.yaml").write_text("a: 1")
    (run / "checkpoints").symlink_to(disk)
    directory = RunDirectory(run)
    with pytest.raises(ValueError, match=rf"checkpoints is a symbolic link to {disk}, and nothing is removed through"):
        directory.hold(to_clear=True)
    assert {path.name for path in run.iterdir()} == {"config.yaml", "checkpoints"}
    assert (disk / "precious").exists()
    directory = RunDirectory(run)
    directory.hold()  # which is no matter where nothing is to be removed
    directory.lock.release()


def test_new_paths_do_not_exist_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime(2024, 5, 6, 7, 8, 9)
    first = new_run_path("debug", now)
    assert first == Path("runs/debug-20240506-070809")
    assert not first.exists()
    first.mkdir(parents=True)
    second = new_run_path("debug", now)
    assert second.name == "debug-20240506-070809-2"
    second.mkdir()
    assert new_run_path("debug", now).name == "debug-20240506-070809-3"


@pytest.mark.parametrize("num_written", range(5))
@pytest.mark.parametrize("num_kept", [1, 3, 5])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_next_rank_goes_on_with_the_rows_where_the_first_one_was_lost(tmp_path, num_written, num_kept, is_cut):
    """The first has written some of the rows, the last of them perhaps in part; none is missing, none comes twice. It
    may have been ahead, or lost at the end, or write again."""
    directory, first = RunDirectory(tmp_path), {"rank": 0}

    def rows_of(rank: int) -> RunRows:
        def open_metrics(step):
            return directory.tracked_metrics({}, first_step=step or 0)

        return RunRows(directory.path / "metrics.jsonl", lambda: first["rank"] == rank, open_metrics)

    rows = [{"step": step, "idle_s": {"fill": 0.5}, "bubble_fraction": 0.5} for step in range(3)]
    rows.insert(2, {"step": 1, "evaluation": "held out", "loss": 2.0})
    lost = rows_of(0)
    for row in rows[:num_written]:
        lost.write(row)
    if is_cut:
        with (directory.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1, "idle')
    rows.append({"step": 3, "idle_s": {}})
    with rows_of(1) as next_one:
        for row in rows[:num_kept]:
            next_one.write(row)
        first["rank"] = 1
        for row in rows[num_kept:]:
            next_one.write(row)
    lost.write({"step": 2, "idle_s": {}})  # It was only stopped.
    lost.__exit__(None, None, None)
    written = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("evaluation")) for row in written] == [
        *((0, None), (1, None), (1, "held out"), (2, None), (3, None))
    ]  # fmt: skip
    if num_kept == 3:  # Another rank does not know what the stages did together.
        known = [row["bubble_fraction"] for row in written if row["step"] < 3 and "evaluation" not in row]
        num_known = sum("evaluation" not in row for row in rows[:num_written])
        assert known == [0.5] * num_known + [None] * (3 - num_known)


def test_a_run_in_an_object_store_has_its_files_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = located("memory://runs/mine")
    directory = RunDirectory(place)
    directory.check()
    assert not place.exists()
    directory.hold()
    with pytest.raises(ValueError, match=r"memory://runs/mine is in use"):
        RunDirectory("memory://runs/mine").hold()
    directory.start({"run": {"steps": 2}})
    with directory.tracked_metrics({}, first_step=0) as metrics:
        metrics.write({"step": 0})
        directory.send()
        assert (place / "metrics.jsonl").read_text() == '{"step": 0}\n'
        metrics.write({"step": 1})
    failure = directory.write_failure(WaitForReport(summary="stuck", stages=()))
    assert json.loads(failure.read_text())["summary"] == "stuck"
    (place / "checkpoints" / "a").write_bytes(b"")
    directory.close()
    names = ["checkpoints", "config.yaml", "failure.json", "metrics.jsonl", "run.lock"]
    assert [path.name for path in place.iterdir()] == names

    # On another host, which has rows of some other time.
    (directory.path / "metrics.jsonl").write_text('{"step": 7}\n')
    (directory.path / "stale").write_text("")
    other = RunDirectory(place)
    other.hold()
    assert sorted(path.name for path in other.path.iterdir()) == names[1:4]
    assert sorted(other.leftovers()) == names[:4]
    other.start({"run": {"steps": 3}}, from_step=1)
    other.send()
    assert (place / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert not (place / "failure.json").exists()
    third = RunDirectory(place)  # takes over when the first is lost
    (third.path / "metrics.jsonl").write_text('{"step": 7}\n')
    (third.path / "trace.json").write_text("of another run")
    third.send()
    assert (place / "metrics.jsonl").read_text() == '{"step": 0}\n'
    third.fetch_metrics()
    with (third.path / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 1}\n')
    third.send()
    assert (place / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    assert not (place / "trace.json").exists()
    (third.path / "trace.json").unlink()
    other.clear()
    other.close()
    assert [path.name for path in place.iterdir()] == ["run.lock"]
    place.remove_tree()
