"""A run's key: how it reaches a process, what is refused, and what is derived from it."""

import os
import stat
from pathlib import Path

import pytest

from rrfp_jax.cluster import KEY_FILE_VARIABLE, KEY_VARIABLE, RunKey


def test_a_key_comes_back_from_the_environment_and_from_a_private_file(tmp_path: Path) -> None:
    key, path = RunKey.generate(), tmp_path / "key"
    assert RunKey.from_environment(key.environment()).text() == key.text()
    key.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKey.from_environment({KEY_FILE_VARIABLE: str(path)}).text() == key.text()
    with pytest.raises(ValueError, match="exists"):
        key.write(path)


def test_a_key_that_cannot_be_written_leaves_nothing_in_the_way(tmp_path: Path, monkeypatch) -> None:
    path, fdopen = tmp_path / "key", os.fdopen

    def full(descriptor: int, *arguments: str, **options: str) -> object:
        os.close(descriptor)
        return fdopen(os.open("/dev/full", os.O_WRONLY), *arguments, **options)

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(ValueError, match=r"key cannot be written \(No space left on device\): make room"):
        RunKey.generate().write(path)
    assert not path.exists()
    with pytest.raises(ValueError, match=r"missing/key cannot be written \(No such file or directory\): name another"):
        RunKey.generate().write(tmp_path / "missing" / "key")


def test_roles_have_keys_of_their_own_which_all_processes_agree_on() -> None:
    key = RunKey.generate()
    again = RunKey.from_text(key.text())
    assert key.pair("rank 0") == again.pair("rank 0")
    assert len({key.pair("rank 0"), key.pair("rank 1"), RunKey.generate().pair("rank 0")}) == 3
    assert key.expand("arrays", 32) not in (key.expand("other", 32), RunKey.generate().expand("arrays", 32))


def test_printing_a_key_does_not_give_it_away() -> None:
    key = RunKey.generate()
    assert key.text() not in f"{key} {key!r}"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, f"no run key: set {KEY_VARIABLE}"),
        ({KEY_VARIABLE: ""}, "no run key"),
        ({KEY_VARIABLE: "x", KEY_FILE_VARIABLE: "y"}, "both .* keep one"),
        ({KEY_VARIABLE: "not base64!"}, f"{KEY_VARIABLE} is not base64"),
        ({KEY_VARIABLE: "clé"}, f"{KEY_VARIABLE} is not base64"),
        ({KEY_VARIABLE: "c2hvcnQ="}, f"{KEY_VARIABLE} is malformed: a run key has 32 bytes, this one 5"),
        ({KEY_FILE_VARIABLE: "/nowhere/key"}, "/nowhere/key .* cannot be read .No such file"),
    ],
)
def test_a_missing_or_malformed_key_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RunKey.from_environment(environ)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    RunKey.generate().write(path)
    os.chmod(path, mode)
    with pytest.raises(ValueError, match=f"only its owner may read, .* chmod 600 {path}"):
        RunKey.from_file(path)


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(ValueError, match=r"must be a regular file, it has mode p.*: rrfp launch --new-key FILE makes"):
        RunKey.from_file(tmp_path / "key")
