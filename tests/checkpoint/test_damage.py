"""What is corrupt, incomplete or not ours is recognised, with one sentence, and never taken for a checkpoint."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from rrfp_jax.checkpoint import Checkpoints, Unusable
from rrfp_jax.checkpoint._records import canonical_json
from tests.checkpoint.states import bits, newest_step, opened, pieces_of, restored, save, trained

PIECES = pieces_of([["layers.0"], ["head"]], optax.sgd(1e-3))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Steps 1 and 2 are committed."""
    made = opened(tmp_path, PIECES)
    assert save(made, 1, PIECES) is None
    assert save(made, 2, PIECES) is None
    return made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def expect_refused(checkpoints: Checkpoints, sentence: str, caplog: pytest.LogCaptureFixture) -> None:
    """Step 2 is skipped with the sentence, and refused with it where it is asked for."""
    assert newest_step(checkpoints) == 1
    (record,) = caplog.records
    with pytest.raises(Unusable) as refusal:
        checkpoints.find(2)
    assert str(refusal.value) == record.getMessage()
    assert sentence in record.getMessage()
    assert "\n" not in record.getMessage()
    assert bits(restored(checkpoints, PIECES)) == bits(trained(PIECES, 1))


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink])
def test_every_file_of_a_step_is_guarded(
    checkpoints: Checkpoints,
    damage: Callable[[Path], None],
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = checkpoints.directory / "step_00000002"
    whole = tmp_path_factory.mktemp("whole") / "step"
    shutil.copytree(directory, whole)
    files = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        damage(directory / file)
        expect_refused(checkpoints, "step 2 cannot be restored from", caplog)
        caplog.clear()
        shutil.rmtree(directory)
        shutil.copytree(whole, directory)
    assert newest_step(checkpoints) == 2


def test_sentences_say_what_is_wrong(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    directory = checkpoints.directory / "step_00000002"
    commit = json.loads((directory / "commit.json").read_text())

    def refused(sentence: str) -> None:
        expect_refused(checkpoints, sentence, caplog)
        caplog.clear()

    (directory / "commit.json").write_text(json.dumps(commit)[:-9])
    refused("commit.json is damaged")
    (directory / "commit.json").write_text(json.dumps({"step": 2}))
    refused("it is no checkpoint of this package")
    commit["content"]["host"] = {"step": 3}
    (directory / "commit.json").write_text(json.dumps(commit))
    refused("commit.json is damaged")
    (directory / "commit.json").unlink()
    refused("it was never committed")
    shutil.rmtree(directory)
    shutil.copytree(checkpoints.directory / "step_00000001", directory)
    refused("it is a copy of step 1 under another name")


def commit_again(checkpoints: Checkpoints, **changes: Any) -> None:
    """Write the record of step 2 with other contents and a checksum that fits."""
    path = checkpoints.directory / "step_00000002" / "commit.json"
    content = json.loads(path.read_text())["content"] | changes
    path.write_text(json.dumps({"content": content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()}))


def test_a_later_format_is_refused(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    commit_again(checkpoints, version=99)
    expect_refused(checkpoints, "it has format version 99, this package reads 1", caplog)


@pytest.mark.parametrize(
    "text",
    [
        '{"content": {"format": "rrfp-jax checkpoint", "step": NaN}, "sha256": ""}',
        '{"content": {"format": "rrfp-jax checkpoint", "step": -Infinity}, "sha256": ""}',
        "[" * 100_000,
        '{"content": {"format": "rrfp-jax checkpoint", "host": ' + "[" * 900 + "]" * 900 + '}, "sha256": ""}',
        '{"content": {"format": "rrfp-jax checkpoint"}}',
        "1" * 5000,
        "\ud800",
        "null",
    ],
    ids=["NaN", "Infinity", "deep", "deep inside", "no checksum", "huge", "no text", "nothing"],
)
def test_a_commit_record_of_any_damage_is_named(
    checkpoints: Checkpoints, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoints.directory / "step_00000002" / "commit.json").write_bytes(text.encode(errors="surrogatepass"))
    expect_refused(checkpoints, "step 2 cannot be restored from", caplog)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "commit.json is no file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "commit.json is no file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: (path.touch(), os.truncate(path, 20 << 30)), "commit.json is too large for a record"),
    ],
    ids=["pipe", "folder", "device", "loop", "sparse"],
)
@pytest.mark.timeout(60)
def test_what_is_no_commit_record_is_neither_waited_for_nor_read(
    checkpoints: Checkpoints, make: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = checkpoints.directory / "step_00000002" / "commit.json"
    record.unlink()
    make(record)
    expect_refused(checkpoints, f"commit.json cannot be read ({reason})", caplog)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "2"},
        {"data": "../../elsewhere"},
        {"data": "/etc"},
        {"data": ["data-00"]},
        {"data": "data-00/.."},
        {"parts": {"../step_00000001/data-0/layers.0": "00"}},
        {"parts": {"..": "00"}},
        {"parts": {"/etc/passwd": "00"}},
        {"parts": {"layers.0": 3}},
        {"parts": ["layers.0"]},
        {"host": 3},
        {"layout": None},
    ],
    ids=str,
)
def test_a_commit_record_with_a_checksum_may_still_be_malformed(
    checkpoints: Checkpoints, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    commit_again(checkpoints, **changes)
    expect_refused(checkpoints, "commit.json is malformed", caplog)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": None},
        {"layers": [1]},
        {"arrays": [["layers.0"]]},
        {"arrays": [[["layers.0"], "float32", "6"]]},
        {"files": {"../../../step_00000001/commit.json": [1, 2]}},
        {"files": {"/etc/passwd": [1, 2]}},
        {"files": {"manifest.ocdbt": [1]}},
        {"files": [1]},
    ],
    ids=str,
)
def test_a_part_s_record_with_a_checksum_may_still_be_malformed(
    checkpoints: Checkpoints, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (checkpoints.directory / "step_00000002").glob("data-*/*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    commit_again(checkpoints, parts={path.stem: hashlib.sha256(path.read_bytes()).hexdigest()})
    expect_refused(checkpoints, f"{path.name} is malformed", caplog)


def test_a_layer_may_have_any_name(tmp_path: Path) -> None:
    from rrfp_jax.checkpoint._part_writer import Owner, parts_of_step

    owner = Owner(ranks=(0,), device=jax.devices()[0])
    for layer, name in (("a/b", "a%2Fb"), ("..", "%2E%2E"), (".", "%2E"), ("layers.0", "layers.0")):
        assert [part.name for part in parts_of_step({layer: owner})] == [name]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_nothing_is_changed_through_a_link(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    archive = tmp_path_factory.mktemp("archive")
    directory = checkpoints.directory / "step_00000002"
    shutil.move(directory, archive)
    directory.symlink_to(archive / "step_00000002")
    before = contents(archive)
    resumed = opened(checkpoints.directory, PIECES, keep=1)
    assert bits(restored(resumed, PIECES)) == bits(trained(PIECES, 2))
    for step in (3, 4, 5):
        assert save(resumed, step, PIECES) is None
    assert contents(archive) == before
    assert directory.is_symlink()
    assert newest_step(resumed) == 5
    assert sorted(entry.name for entry in checkpoints.directory.iterdir()) == ["step_00000002", "step_00000005"]
    assert bits(restored(resumed, PIECES, 2)) == bits(trained(PIECES, 2))
    # Nor is anything written through it, when the run comes to the same step again.
    failure = save(resumed, 2, PIECES)
    assert failure is not None
    assert f"{directory} is a symbolic link" in failure
    assert contents(archive) == before


@pytest.mark.parametrize("name", ["commit.json", "data"])
def test_links_within_a_step_are_left_alone(
    checkpoints: Checkpoints, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    archive = tmp_path_factory.mktemp("archive")
    directory = checkpoints.directory / "step_00000001"
    entry = next(directory.glob(f"{name}*"))
    shutil.move(entry, archive)
    entry.symlink_to(archive / entry.name)
    (directory / "data-00").symlink_to(archive)
    before = contents(archive)
    resumed = opened(checkpoints.directory, PIECES, keep=1)
    for step in (3, 1):
        assert save(resumed, step, PIECES) is None
    assert contents(archive) == before
    assert (directory / "data-00").is_symlink()
    assert bits(restored(resumed, PIECES, 1)) == bits(trained(PIECES, 1))


def test_a_damaged_step_is_saved_again_when_the_run_comes_back_to_it(checkpoints: Checkpoints) -> None:
    for path in (checkpoints.directory / "step_00000002").rglob("manifest.ocdbt"):
        truncate(path)
    assert newest_step(checkpoints) == 1
    checkpoints.close()
    resumed = opened(checkpoints.directory, PIECES)
    assert save(resumed, 2, PIECES) is None
    assert bits(restored(resumed, PIECES, 2)) == bits(trained(PIECES, 2))
    resumed.close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "step_00000005" / "default"
    foreign.mkdir(parents=True)
    (foreign / "array").write_text("somebody else's")
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_00000004").write_text("a file")
    unfinished = tmp_path / "step_00000006" / "data-0123abcd"
    unfinished.mkdir(parents=True)
    checkpoints = opened(tmp_path, PIECES, keep=1)
    assert not unfinished.parent.exists()
    with pytest.raises(Unusable, match="it was never committed"):
        checkpoints.find(5)
    assert checkpoints.newest() is None
    for step in (7, 8):
        assert save(checkpoints, step, PIECES) is None
    assert (foreign / "array").read_text() == "somebody else's"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step_00000004",
        "step_00000005",
        "step_00000008",
        "step_3",
    ]
    checkpoints.close()
