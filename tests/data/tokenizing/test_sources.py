"""Which files are tokenised, in which order, under which names."""

import os

import pytest

from rrfp_jax.data._sources import LINES, ROWS, TEXT, TEXT_SUFFIXES, find_sources


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "root"
    for name in ("b.txt", "a/z.jsonl.gz", "a/B.MD", "a.parquet", "a/x.pdf", ".hidden/h.txt", "a/.h.txt", "c.json.zst"):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).touch()
    return root


def test_files_come_by_their_relative_paths_with_their_kinds(folder):
    sources, left_out = find_sources([folder], TEXT_SUFFIXES)
    assert [(each.name, each.kind, each.compression) for each in sources] == [
        ("a.parquet", ROWS, None),
        ("a/B.MD", TEXT, None),
        ("a/z.jsonl.gz", LINES, "gzip"),
        ("b.txt", TEXT, None),
        ("c.json.zst", LINES, "zstd"),
    ]
    assert [path.name for path in left_out] == ["x.pdf"]


def test_several_inputs_keep_their_order_and_folders_give_their_names(folder):
    sources, _ = find_sources([str(folder / "b.txt"), folder / "a", folder], [".txt"])
    assert [each.name for each in sources] == [
        "b.txt",
        "a/z.jsonl.gz",
        "root/a.parquet",
        "root/a/z.jsonl.gz",
        "root/b.txt",
        "root/c.json.zst",
    ]


def test_suffixes_of_text_can_be_named(folder):
    assert [each.name for each in find_sources([folder / "a"], [".pdf"])[0]] == ["x.pdf", "z.jsonl.gz"]
    assert find_sources([folder / "a" / "x.pdf"], [".pdf"])[0][0].kind == TEXT


def test_links_to_files_of_the_folder_are_followed_and_others_named(folder):
    (folder / "c").mkdir()
    (folder / "c" / "own.txt").write_text("own")
    for link, target in (
        ("c/f.txt", "c/own.txt"),
        ("c/folder", "a"),
        ("c/loop", "c"),
        ("c/nothing.txt", "nowhere.txt"),
    ):
        (folder / link).symlink_to(folder / target)
    os.mkfifo(folder / "c" / "pipe.txt")
    sources, left_out = find_sources([folder / "c"], TEXT_SUFFIXES)
    assert [each.name for each in sources] == ["f.txt", "own.txt"]
    assert sorted(path.name for path in left_out) == ["folder", "loop", "nothing.txt", "pipe.txt"]
    (folder / "link").symlink_to(folder / "a")
    assert [each.name for each in find_sources([folder / "link"], TEXT_SUFFIXES)[0]] == ["B.MD", "z.jsonl.gz"]
    with pytest.raises(ValueError, match=r"pipe\.txt is no file, and is read several times: write what it gives"):
        find_sources([folder / "c" / "pipe.txt"], TEXT_SUFFIXES)


def test_a_link_that_leads_out_of_a_folder_is_refused_by_name(folder):
    (folder / "c" / "deeper").mkdir(parents=True)
    (folder / "secret").write_text("root:x")
    (folder / "c" / "deeper" / "f.txt").symlink_to("../../secret")
    with pytest.raises(ValueError, match=r"deeper/f\.txt is a link to .*/secret, which is not in .*c: put the"):
        find_sources([folder / "c"], TEXT_SUFFIXES)
    (folder / "named.txt").symlink_to("secret")  # whoever names a link means what it leads to
    assert find_sources([folder / "named.txt"], TEXT_SUFFIXES)[0][0].name == "named.txt"
    snapshot = folder / "cache" / "snapshots" / "1a2b" / "data"
    snapshot.mkdir(parents=True)
    (folder / "cache" / "blobs").mkdir()
    (folder / "cache" / "blobs" / "99").write_text("a text")
    (snapshot / "t.txt").symlink_to("../../../blobs/99")
    for inside in (snapshot, snapshot.parent):  # as the hub's cache has it
        assert len(find_sources([inside], TEXT_SUFFIXES)[0]) == 1
    (snapshot / "u.txt").symlink_to("../../../../secret")
    with pytest.raises(ValueError, match=r"u\.txt is a link to"):
        find_sources([snapshot], TEXT_SUFFIXES)


def test_what_cannot_be_used_is_refused(folder):
    for inputs, words in (
        ([], "there is no input"),
        ([folder / "nowhere"], "nowhere does not exist"),
        ([folder / "a/x.pdf"], r"x\.pdf is of no known kind: plain text ends in \.txt, .* \(--suffixes names others\)"),
    ):
        with pytest.raises(ValueError, match=words):
            find_sources(inputs, TEXT_SUFFIXES)
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no file of a known kind"):
        find_sources([folder / "empty"], TEXT_SUFFIXES)
