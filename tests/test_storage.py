"""Paths in object stores: what they are, what is refused and why; the store is fsspec's in memory."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry  # type: ignore[import-untyped]

from rrfp_jax.storage import BucketPath, _store, check_bucket, local_copy, located, read_stored


@pytest.fixture
def bucket() -> Iterator[BucketPath]:
    path = located("memory://bucket/folder")
    assert isinstance(path, BucketPath)
    yield path
    path.remove_tree()


@pytest.mark.parametrize("text", ["runs/mine", "/runs/mine", "~/mine", "c:/mine", ".", "a:b/c"])
def test_a_local_path_stays_one(text: str) -> None:
    assert type(located(text)) is type(Path())
    assert located(text) == Path(text)


def test_the_name_of_a_bucket_survives_every_way_that_paths_go() -> None:
    path = located("s3://bucket/a//b/")
    assert str(path) == "s3://bucket/a/b"
    assert located(Path("s3://bucket/a/b")) == located(str(path)) == path == located(path)
    assert str(path / "c.json") == "s3://bucket/a/b/c.json"
    assert str((path / "c").relative_to(path)) == "c"
    assert (path / "c").is_relative_to(path)
    assert str(path.with_name("d")) == "s3://bucket/a/d"
    assert path.absolute() == path.resolve() == path.expanduser() == path
    assert len({path, located("s3://bucket/a/b")}) == 1
    with pytest.raises(ValueError, match=r"s3://bucket/a/b is in an object store, and only a local file does here"):
        path.__fspath__()


def test_objects_are_files_and_what_is_above_them_are_folders(bucket: BucketPath) -> None:
    assert not bucket.exists()
    with pytest.raises(FileNotFoundError):
        list(bucket.iterdir())
    (bucket / "folder" / "a.json").write_bytes(b'{"a": 1}')
    (bucket / "b.bin").put(b"0123456789", create=True)
    assert bucket.is_dir()
    assert not bucket.is_file()
    assert [path.name for path in bucket.iterdir()] == ["b.bin", "folder"]
    assert [str(path) for path in bucket.glob("f*/*.json")] == [f"{bucket}/folder/a.json"]
    assert bucket.files() == {"b.bin": 10, "folder/a.json": 8}
    assert (bucket / "folder" / "a.json").read_text() == '{"a": 1}'
    with (bucket / "b.bin").open("rb") as file:
        assert (file.read(3), file.read(), file.seek(5), file.read(2)) == (b"012", b"3456789", 5, b"56")
    assert (bucket / "b.bin").read_range(2, 4) == b"23"
    with pytest.raises(OSError, match="shorter"):
        (bucket / "b.bin").read_range(8, 12)
    data, status = read_stored(bucket / "b.bin")
    assert (data, status.st_size) == (b"0123456789", 10)
    with pytest.raises(OSError, match="too large"):
        read_stored(bucket / "b.bin", 9)
    assert local_copy(bucket).joinpath("folder", "a.json").read_bytes() == b'{"a": 1}'
    with pytest.raises(ValueError, match="written as a whole"):
        (bucket / "c").open("wb")
    (bucket / "b.bin").unlink()
    (bucket / "b.bin").unlink(missing_ok=True)
    assert [path.name for path in bucket.iterdir()] == ["folder"]


def test_what_is_made_once_is_made_by_one(bucket: BucketPath) -> None:
    path = bucket / "record"
    path.put(b"mine", create=True)
    path.put(b"mine", create=True)  # the same request, sent twice
    with pytest.raises(FileExistsError):
        path.put(b"another's", create=True)
    assert path.read_bytes() == b"mine"


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    _store.cache_clear()
    for scheme in ("s3", "gs"):
        monkeypatch.delitem(_registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for scheme, extra in (("s3", "s3"), ("gs", "gcs")):
        with pytest.raises(ValueError, match=rf"another package: pip install 'rrfp-jax\[{extra}\]'$"):
            located(f"{scheme}://bucket/run").exists()
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(ValueError, match=r"pip install adlfs$"):
        located("abfs://container/run").exists()
    with pytest.raises(ValueError, match="begins no path that is known here"):
        located("xyz://bucket/run").exists()


def test_a_bucket_without_rights_is_refused_in_one_sentence(
    bucket: BucketPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = type(_store("memory", 0))
    check_bucket(bucket, "run_dir")
    assert not bucket.exists()
    with monkeypatch.context() as patch:
        patch.setattr(store, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(PermissionError("Forbidden")))
        with pytest.raises(ValueError, match=r"run_dir memory://bucket/folder cannot be used \(.*Forbidden\)\): check"):
            check_bucket(bucket, "run_dir")
    pipe = store.pipe_file
    with monkeypatch.context() as patch:
        patch.setattr(store, "pipe_file", lambda self, path, data, mode: pipe(self, path, data))
        with pytest.raises(ValueError, match="has no conditional writes"):
            check_bucket(bucket, "run_dir")
    assert not bucket.exists()
