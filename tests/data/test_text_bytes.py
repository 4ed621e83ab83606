"""Batches: their content, their order, and that the step number is the whole position."""

from pathlib import Path

import numpy as np
import pytest

from rrfp_jax.data import TextBytes, TextConfig
from rrfp_jax.data.text_bytes import corpus_files, read_corpus


@pytest.fixture
def text(tmp_path):
    """1,001 bytes, so that 100 windows of 10 can be told apart by their content."""
    path = tmp_path / "text.bin"
    path.write_bytes(np.random.default_rng(0).integers(256, size=1000, dtype=np.uint8).tobytes())
    return path


def dataset(path, **changes):
    values = {"length": 10, "batch_size": 12, "num_microbatches": 4, "seed": 3}
    return TextBytes(TextConfig(path=str(path), **(values | changes)))


def windows(batch):
    return [row.tobytes() for row in batch["tokens"].reshape(-1, batch["tokens"].shape[-1])]


def test_texts_differ_in_their_fingerprints_whatever_their_names(text, tmp_path):
    same, other = tmp_path / "same.bin", tmp_path / "other.bin"
    same.write_bytes(text.read_bytes())
    other.write_bytes(text.read_bytes()[::-1])
    assert dataset(text).fingerprint == dataset(same).fingerprint != dataset(other).fingerprint
    assert dataset(text).fingerprint.startswith("1001 bytes, SHA-256 ")


def test_shapes_dtypes_and_targets(text):
    data = dataset(text)
    batch = data.batch(0)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in batch.items()} == {
        "tokens": ((4, 3, 10), "int32"),
        "targets": ((4, 3, 10), "int32"),
        "weights": ((4, 3, 10), "float32"),
    }
    content = text.read_bytes() + b"\0"
    for tokens, targets in zip(batch["tokens"].reshape(-1, 10), batch["targets"].reshape(-1, 10), strict=True):
        start = content.index(bytes(tokens.tolist()))
        assert start % 10 == 0
        assert bytes(targets.tolist()) == content[start + 1 : start + 11]
    assert (batch["weights"] == 1).all()


def test_every_window_comes_once_per_epoch_also_across_batches(text):
    data = dataset(text)
    assert (data.num_bytes, data.num_windows) == (1001, 100)
    seen = [window for step in range(25) for window in windows(data.batch(step))]
    assert len(seen) == 300
    epochs = [seen[start : start + 100] for start in (0, 100, 200)]
    assert all(len(set(epoch)) == 100 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_depends_on_seed_and_step_alone(text):
    first, second = dataset(text), dataset(text)
    later = [windows(first.batch(step)) for step in range(10)]
    assert windows(second.batch(9)) == later[9]
    assert windows(second.batch(2)) == later[2]
    assert windows(dataset(text, seed=4).batch(0)) != later[0]


def test_sequences_do_not_depend_on_the_number_of_microbatches(text):
    assert windows(dataset(text).batch(5)) == windows(dataset(text, num_microbatches=1).batch(5))


def test_the_order_is_the_same_for_ever(text):
    """Pinned: another order would make resumed runs see other data."""
    data = dataset(text)
    content = text.read_bytes()
    starts = [content.index(bytes(row.tolist())) // 10 for row in data.batch(9)["tokens"].reshape(-1, 10)]
    assert starts == [40, 58, 99, 89, 74, 23, 91, 69, 68, 6, 13, 0]


def test_too_little_text_is_refused(text):
    with pytest.raises(ValueError, match=r"hold 100 sequences of length 10 to train on, fewer than .* 2021 b"):
        dataset(text, batch_size=202, num_microbatches=1)
    text.write_bytes(b"")
    with pytest.raises(ValueError, match=r"^1 bytes of text hold 0 sequences"):
        dataset(text)


def test_one_batch_may_be_a_whole_epoch(text):
    assert len(set(windows(dataset(text, batch_size=100).batch(7)))) == 100


def test_a_negative_step_is_refused(text):
    with pytest.raises(ValueError, match=r"step is -1"):
        dataset(text).batch(-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 10},
            r"batch_size 10 does not divide into 4 microbatches: .* \[1, 2, 5, 10\], or batch_size 12",
        ),
        ({"length": 0}, r"length is 0: give at least 1"),
        ({"seed": -1}, r"seed is -1: give 0 or more"),
        ({"suffixes": ()}, r"suffixes is empty"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(text, changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(text, **changes)


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
