"""Every document is read once, wherever spans begin, and what is no text is named by file and row."""

import gzip
import json
import os
import re
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rrfp_jax.data import BrokenData, _documents, _sources
from rrfp_jax.data._documents import TextSpan, parts_in
from rrfp_jax.data._pieces import survey
from rrfp_jax.data._sources import TEXT_SUFFIXES, files_forgotten, find_sources

TEXTS = ["one", "", "two\nlines", "süß " * 9, "x" * 70, "\u2028last\\"]


@pytest.fixture(autouse=True)
def forget():
    with files_forgotten():
        yield


def write(path, data):
    """Compressed as the name says."""
    kind = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}.get(path.suffix)
    if kind is None:
        path.write_bytes(data)
    else:
        with pa.CompressedOutputStream(str(path), kind) as file:
            file.write(data)
    return path


def surveyed(path, column="text"):
    (found,) = survey(find_sources([path], TEXT_SUFFIXES)[0], column, 1, lambda _: None)
    return found


def read(path, *cuts, column="text"):
    """The documents of a file, read in spans between the cuts."""
    source, length = surveyed(path, column).source, surveyed(path, column).length
    bounds = [0, *cuts, length]
    documents, text = [], ""
    for start, stop in pairwise(bounds):
        for part in parts_in(TextSpan(source, start, stop, length), column):
            text += part.text
            if part.is_last:
                documents.append(text)
                text = ""
    assert text == ""
    return documents


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zeros", [0, 1, 9, 512, 3 << 20])
@pytest.mark.parametrize("members", [1, 3])
def test_zeros_behind_a_gzip_file_are_no_damage(tmp_path, zeros, members):
    line = b'{"text": "%s"}\n' % (b"x" * 300_000)
    data = b"".join(gzip.compress(line * 5) for _ in range(members))
    path = write_raw(tmp_path / "a.jsonl.gz", data + bytes(zeros))
    assert read(path) == ["x" * 300_000] * 5 * members


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n \n"])
@pytest.mark.one_in(3)
def test_lines_are_read_once_wherever_spans_begin(tmp_path, suffix, ending, monkeypatch):
    monkeypatch.setattr(_sources, "BLOCK_BYTES", 7)
    data = ending.join(json.dumps({"n": 1, "text": text}) for text in TEXTS).encode()
    for end in (b"", ending.encode()):
        path = write(tmp_path / f"a.jsonl{suffix}", data + end)
        with files_forgotten():
            for cut in range(1, len(data), 5 if suffix else 1):
                assert read(path, cut) == TEXTS
            assert read(path, *range(1, len(data), 3)) == TEXTS


def test_a_compressed_file_is_begun_anew_where_one_goes_far_back(tmp_path, monkeypatch):
    monkeypatch.setattr(_sources, "_KEPT_BYTES", 16)
    monkeypatch.setattr(_sources, "BLOCK_BYTES", 8)
    data = os.urandom(400).hex().encode()
    stream = _sources.bytes_of(str(write(tmp_path / "a.gz", data)), "gzip")
    for start in (0, 100, 99, 300, 290, 5, 799, 800, 900, 0):
        assert stream.read(start, 50) == data[start : start + 50]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_of_text_is_one_document_wherever_spans_begin(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(_documents, "SEGMENT_BYTES", 16)
    monkeypatch.setattr(_documents, "_NEAR_BYTES", 12)
    for text in ("Süß ist der\nMorgen, und" * 9, "ö" * 33, "x", "", "\n" * 40):
        path = write(tmp_path / f"a.txt{suffix}", text.encode())
        for step in (16, 48):
            with files_forgotten():
                assert read(path, *range(step, len(text.encode()), step)) == [text]


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert read(write(tmp_path / "a.txt", mark + b"a\xef\xbb\xbf")) == ["a\ufeff"]
    assert read(write(tmp_path / "b.txt", mark)) == [""]
    assert read(write(tmp_path / "a.jsonl", mark + GOOD + GOOD)) == ["a", "a"]
    refused(write_raw(tmp_path / "c.txt", mark + b"ab\xffc"), "is no text in UTF-8 (byte 0xff at 5)")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_are_read_once_wherever_spans_begin(tmp_path, kind):
    table = pa.table({"n": range(len(TEXTS) * 3), "body": pa.array(TEXTS * 3, pa.string()).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    for cut in (1, 4, 7, 17):
        assert read(tmp_path / "a.parquet", cut, column="body") == TEXTS * 3


def refused(path, words, column="text"):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read(path, column=column)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message


GOOD = b'{"text": "a"}\n\n'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "line 3 is no JSON (Expecting ',' delimiter"),
        (b'{"text": "\xff"}', "line 3 is no JSON (its bytes are not UTF-8): mend or remove it"),
        ('{"text": "a"}'.encode("utf-16"), "line 3 is no JSON (its bytes are not UTF-8)"),
        (b'["text"]', "line 3 is a list where an object is expected: a line holds one object"),
        (b"[\n{}\n]", "(char 1)): a line holds one object, so write those of a list"),
        (b'{\n"text": "a"\n}', "(char 1)): a line holds one object"),
        (b'{"body": "a", "n": 1}', "line 3 has no column 'text' (it has body, n): name one with --column"),
        (b"{}", "line 3 has no column 'text' (it has none)"),
        (b'{"text": null}', "line 3 has null in column 'text' where text is expected"),
        (b'{"text": 3}', "line 3 has a number in column 'text'"),
        (b'{"text": "\\ud800"}', "line 3 has half a character in column 'text'"),
        (b"[" * 100_000, "line 3 is no JSON"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path, line, words):
    refused(write(tmp_path / "a.jsonl", GOOD + line + b"\n" + GOOD), words)
    refused(write(tmp_path / "a.jsonl.gz", GOOD + line), words)


def test_a_row_or_column_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), path, row_group_size=1)
    refused(path, "row 1 (from 0) has null in column 'text'")
    refused(path, "has int64 in column 'n' where text is expected: name another --column", "n")
    refused(path, "has no column 'body' (it has text, n): name one with --column", "body")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    refused(path, "has several columns 'text': rename them, or name another --column")


def test_a_damaged_file_is_named(tmp_path):
    data = gzip.compress(GOOD * 1000)
    refused(write_raw(tmp_path / "a.jsonl.gz", data[:-9]), "is damaged (Compressed file ended before")
    refused(write_raw(tmp_path / "a.jsonl.gz", data + b"nothing"), "is damaged (")
    refused(write_raw(tmp_path / "a.jsonl.gz", b"nothing"), "is damaged (")
    refused(write_raw(tmp_path / "a.jsonl.gz", b""), "is damaged (it is empty)")
    refused(write_raw(tmp_path / "a.parquet", b"PAR1nothingPAR1"), "cannot be read (")
    refused(write_raw(tmp_path / "a.txt", b"ab\xffc"), "is no text in UTF-8 (byte 0xff at 2)")
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 50}), path, compression=None, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56
    refused(write_raw(path, bytes(data)), "is damaged (at row 0 or behind")


def write_raw(path, data):
    path.write_bytes(data)
    return path


def test_broken_data_is_what_is_raised(tmp_path):
    with pytest.raises(BrokenData):
        read(write(tmp_path / "a.jsonl", b"1"))


def test_a_document_of_a_line_or_row_is_bounded_and_named(tmp_path):
    long = b'{"text": "' + b"a" * (33 << 20) + b'"}\n'
    for name in ("a.jsonl", "a.jsonl.gz"):
        refused(write(tmp_path / name, GOOD + long + GOOD), "line 3 has more than 33,554,432 bytes: split it, or write")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b" * (33 << 20)]}), path)
    refused(path, "row 1 (from 0) has 34,603,008 bytes of text, more than a document")


def test_rows_that_unfold_without_end_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["a" * 100_000] * 2000)}), path, compression="zstd", use_dictionary=True)
    assert path.stat().st_size < 1000
    refused(path, "and those before repeat themselves without end")


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_rows_are_read_in_every_encoding(tmp_path, encoding):
    table = pa.table({"text": TEXTS * 300})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding={"text": encoding})
    assert read(tmp_path / "a.parquet", 5) == TEXTS * 300


def test_a_page_whose_checksum_does_not_fit_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    text = ["".join(map(chr, range(65, 91))) + str(n) for n in range(500)]
    pq.write_table(pa.table({"text": text}), path, compression=None, use_dictionary=False, write_page_checksum=True)
    assert read(path) == text
    data = bytearray(path.read_bytes())
    place = data.index(b"XYZ250")
    data[place] ^= 1
    refused(write_raw(tmp_path / "b.parquet", bytes(data)), "is damaged (at row 0 or behind")
