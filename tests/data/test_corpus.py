"""Which files are read, in which order, and what goes wrong."""

from pathlib import Path

import pytest

from rrfp_jax.data.corpus import corpus_files, read_corpus


@pytest.fixture
def folder(tmp_path):
    for name, text in {"b.txt": "bee", "a/z.py": "zed", "a/b.md": "em", "a/x.bin": "no", ".hidden/h.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_come_in_the_order_of_their_relative_paths(folder):
    files = corpus_files(str(folder), (".txt", ".py", ".md"))
    assert [file.relative_to(folder).as_posix() for file in files] == ["a/b.md", "a/z.py", "b.txt"]
    text = read_corpus(str(folder), suffixes=(".txt", ".py", ".md"), max_bytes=100)
    assert text.tobytes() == b"em\0zed\0bee\0"


@pytest.mark.parametrize("max_bytes", [1, 2, 3, 5, 7, 11])
def test_the_cap_takes_the_first_bytes(folder, max_bytes):
    text = read_corpus(str(folder), suffixes=(".txt", ".py", ".md"), max_bytes=max_bytes)
    assert text.tobytes() == b"em\0zed\0bee\0"[:max_bytes]


def test_a_single_file_is_read_whatever_its_suffix(folder):
    assert read_corpus(str(folder / "a/x.bin"), suffixes=(".txt",), max_bytes=100).tobytes() == b"no\0"


def test_the_default_is_the_standard_library_without_its_tests():
    files = corpus_files(None, (".py",))
    names = {file.name for file in files}
    assert {"argparse.py", "zipfile.py"} & names
    assert not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & {p for f in files for p in f.parts}
    assert read_corpus(None, suffixes=(".py",), max_bytes=10_000).size == 10_000


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist: give an existing file or folder"):
        corpus_files(str(tmp_path / "nowhere"), (".txt",))


def test_a_folder_without_such_files_is_refused(folder):
    with pytest.raises(ValueError, match=r"holds no file ending in \.rst, \.tex: give another folder"):
        corpus_files(str(folder), (".rst", ".tex"))


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything, so take the permission away by hand
    with pytest.raises(ValueError, match=r"cannot read .*b\.txt \(Permission denied\): make it readable"):
        read_corpus(str(folder), suffixes=(".txt",), max_bytes=100)


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("own")
    (folder / "b.txt").symlink_to("a.txt")
    assert [file.name for file in corpus_files(str(folder), (".txt",))] == ["a.txt", "b.txt"]
    (tmp_path / "secret").write_text("root:x")
    (folder / "c.txt").symlink_to("../secret")
    with pytest.raises(
        ValueError, match=r"c\.txt is a link to .*/secret, which is not in .*texts: put the file itself"
    ):
        corpus_files(str(folder), (".txt",))
    assert corpus_files(str(folder / "c.txt"), (".txt",))  # whoever names a link means what it leads to
