"""Token sets: what is written is read, documents are found at any place, and whatever is wrong is one sentence."""

import json
import os
import re
from bisect import bisect_right

import numpy as np
import pytest

from rrfp_jax.data import BrokenData
from rrfp_jax.data.tokens import TokenSet, write_token_set


def drawn_documents(num, vocab_size, longest=9, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, size=size).tolist() for size in rng.integers(0, longest, size=num)]


def flat(documents, end=0):
    return [token for document in documents for token in (*document, end)]


@pytest.fixture
def written(tmp_path):
    write_token_set(tmp_path / "set", [[1, 2, 3], [], [4]])
    return tmp_path / "set"


def edit_header(folder, **changes):
    path = folder / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_are_read_as_they_were_written(tmp_path, vocab_size, dtype):
    documents = [*drawn_documents(50, vocab_size), [vocab_size - 1]]
    header = write_token_set(tmp_path / "set", documents, vocab_size=vocab_size)
    with TokenSet(tmp_path / "set") as tokens:
        everything = flat(documents)
        assert tokens.header == header
        assert (tokens.num_tokens, tokens.num_documents) == (len(everything), 51)
        assert tokens.tokens(0, tokens.num_tokens).tolist() == everything
        assert tokens.tokens(7, 7).shape == (0,)
        starts = np.array([5, 0, len(everything) - 4])
        windows = tokens.windows(starts, 4)
        assert windows.dtype == dtype
        assert windows.tolist() == [everything[start : start + 4] for start in starts]
        tokens.check()


@pytest.mark.parametrize("num", [1, 2, 61])
def test_documents_are_found_at_every_place(tmp_path, num):
    documents = drawn_documents(num, 256)
    write_token_set(tmp_path / "set", documents)
    bounds = np.cumsum([0, *(len(document) + 1 for document in documents)]).tolist()
    with TokenSet(tmp_path / "set") as tokens:
        for position in range(tokens.num_tokens):
            number = bisect_right(bounds, position) - 1
            assert tokens.document_at(position) == number
            assert tokens.document(number) == (bounds[number], bounds[number + 1])
        for start in range(0, tokens.num_tokens, 7):
            for stop in range(start + 1, tokens.num_tokens + 1, 13):
                first, last = tokens.document_at(start), tokens.document_at(stop - 1)
                assert tokens.document_ends(first, last + 1).tolist() == bounds[first + 1 : last + 2]


def test_nothing_is_read_outside_the_set(written):
    with TokenSet(written) as tokens:
        for start, stop in ((-1, 2), (0, 8), (8, 8), (3, 2)):
            with pytest.raises(IndexError):
                tokens.tokens(start, stop)
        for bad in (-1, 7):
            with pytest.raises(IndexError):
                tokens.document_at(bad)
        for bad in (-1, 3):
            with pytest.raises(IndexError):
                tokens.document(bad)
        with pytest.raises(IndexError):
            tokens.document_ends(2, 4)


def test_an_empty_set_is_one(tmp_path):
    write_token_set(tmp_path / "set", [])
    with TokenSet(tmp_path / "set") as tokens:
        assert (tokens.num_tokens, tokens.num_documents) == (0, 0)
        assert tokens.tokens(0, 0).tolist() == []


def test_bytes_are_shown_as_text(tmp_path):
    write_token_set(tmp_path / "set", [list("süß".encode())])
    with TokenSet(tmp_path / "set") as tokens:
        assert tokens.decode(tokens.tokens(*tokens.document(0))) == "süß\0"


def test_the_same_documents_give_the_same_bytes_and_others_another_fingerprint(tmp_path):
    for name, documents in {"a": [[1, 2]], "b": [[1, 2]], "c": [[1, 3]]}.items():
        write_token_set(tmp_path / name, documents)
    a, b, c = (TokenSet(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c
    assert (tmp_path / "a/header.json").read_bytes() == (tmp_path / "b/header.json").read_bytes()


def test_five_billion_tokens_cost_no_memory(tmp_path):
    write_token_set(tmp_path / "set", [[1]] * 3)
    num_tokens, num_documents = 5 * 10**9, 10**5
    ends = np.arange(1, num_documents + 1, dtype=np.int64) * (num_tokens // num_documents)
    (tmp_path / "set/documents.bin").write_bytes(ends.astype("<u8").tobytes())
    os.truncate(tmp_path / "set/tokens.bin", 2 * num_tokens)
    edit_header(
        tmp_path / "set",
        num_tokens=num_tokens,
        num_documents=num_documents,
        tokens={"num_bytes": 2 * num_tokens, "sha256": ""},
        documents={"num_bytes": 8 * num_documents, "sha256": ""},
    )
    before = resident_bytes()
    with TokenSet(tmp_path / "set") as tokens:
        starts = np.random.default_rng(0).integers(0, num_tokens - 2049, size=20_000)
        for some in np.split(starts, 100):
            assert tokens.windows(some, 2049).shape == (200, 2049)
            for start in some[:5].tolist():
                assert tokens.document_at(start) == start // 50_000
    assert resident_bytes() - before < 50 * 2**20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refused(folder, *words, error=ValueError):
    with pytest.raises(error) as caught:
        TokenSet(folder).check()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_what_is_no_token_set_is_refused(tmp_path, written):
    refused(tmp_path / "nowhere", "nowhere does not exist", "rrfp tokenize")
    refused(tmp_path, "is no token set, for it has no header.json")
    edit_header(written, version=3)
    refused(written, "header.json is of version 3, and this program reads 1 and 2")
    edit_header(written, version=1, format="other")
    refused(written, "header.json is damaged (it does not say")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int7"}, "dtype is 'int7'"),
        ({"num_tokens": "many"}, "num_tokens of TokenSetHeader is 'many'"),
        ({"num_tokens": 6}, "tokens.bin has 14 bytes where 12 are expected"),
        ({"end_of_document": 256}, "end_of_document is 256, outside the vocabulary of 256"),
        ({"vocab_size": 2**17}, "more than uint16 can hold"),
        ({"extra": 1}, "an object with"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(written, change, words):
    edit_header(written, **change)
    refused(written, "header.json is damaged", words)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_file_that_is_cut_short_or_missing_is_refused(written, name):
    size = (written / name).stat().st_size
    os.truncate(written / name, size - 1)
    refused(written, f"{name} is damaged ({size - 1} bytes where its header says {size})", "rrfp tokenize")
    (written / name).unlink()
    refused(written, f"cannot read {written / name} (No such file or directory)")


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_changed_byte_shows_in_the_digest(written, name):
    data = bytearray((written / name).read_bytes())
    data[0] ^= 1
    (written / name).write_bytes(bytes(data))
    refused(written, f"{name} is damaged (its SHA-256 is not the header's)", error=BrokenData)


def test_ends_that_do_not_fit_are_refused(written):
    (written / "documents.bin").write_bytes(np.array([4, 2, 7], "<u8").tobytes())
    with TokenSet(written) as tokens, pytest.raises(BrokenData, match=r"documents\.bin is damaged \(ends that do not"):
        tokens.document_ends(0, 3)
    with TokenSet(written) as tokens, pytest.raises(BrokenData, match="ends that do not ascend"):
        tokens.document(1)
    (written / "documents.bin").write_bytes(np.array([4, 5, 6], "<u8").tobytes())
    refused(written, "documents.bin is damaged (the last document ends at 6 of 7 tokens)")


def test_a_token_outside_the_vocabulary_is_refused_where_it_is_read(tmp_path):
    write_token_set(tmp_path / "set", [[1, 2], [9, 1]], vocab_size=10)
    edit_header(tmp_path / "set", vocab_size=9)
    with TokenSet(tmp_path / "set") as tokens:
        assert tokens.tokens(0, 3).tolist() == [1, 2, 0]
        with pytest.raises(BrokenData, match=r"tokens\.bin is damaged \(token 9 at 3, in a vocabulary of 9\)"):
            tokens.windows(np.array([0, 2]), 3)
    with pytest.raises(ValueError, match="document 1 has tokens outside the vocabulary of 9"):
        write_token_set(tmp_path / "other", [[1], [9]], vocab_size=9)
    assert os.listdir(tmp_path) == ["set"]


def test_another_tokenizer_is_refused(tmp_path, written):
    write_token_set(tmp_path / "other", [[1]], tokenizer=b"{}")
    TokenSet(tmp_path / "other").close()
    (tmp_path / "other/tokenizer.json").write_bytes(b"{ }")
    refused(
        tmp_path / "other", "tokenizer.json is another tokenizer than the one that made the tokens", "SHA-256 44136fa3"
    )
    (tmp_path / "other/tokenizer.json").unlink()
    refused(tmp_path / "other", "tokenizer.json is missing")
    (written / "tokenizer.json").write_bytes(b"{}")
    refused(written, "whose tokens are bytes")


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(written):
    with TokenSet(written) as tokens:
        os.truncate(written / "tokens.bin", 4)
        with pytest.raises(BrokenData, match=re.escape("tokens.bin has become shorter")):
            tokens.tokens(1, 5)
    with pytest.raises(ValueError, match="was closed"):
        tokens.tokens(0, 1)


def test_what_stands_there_is_not_overwritten(written):
    with pytest.raises(ValueError, match=r"set exists: name another folder"):
        write_token_set(written, [[1]])
