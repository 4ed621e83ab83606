"""From files to a token set: the tokens of a plain loop, whatever the pieces, the workers, or who was killed."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rrfp_jax.data import _documents, _pieces, tokenizing
from rrfp_jax.data.tokenizing import TokenizeOptions, Worker, tokenize
from rrfp_jax.data.tokens import TokenSet

STORIES = [f"Story {n}: the lazy dog, again.\nAnd süß it was." * (n % 4) for n in range(23)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Dozens of pieces of a few kilobytes; workers in this process."""
    monkeypatch.setattr(_documents, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(_documents, "_NEAR_BYTES", 32)
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 256)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "more").mkdir(parents=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in STORIES)
    (root / "a.jsonl").write_text(rows)
    with pa.CompressedOutputStream(str(root / "b.jsonl.gz"), "gzip") as file:
        file.write(rows.encode())
    (root / "more/c.txt").write_text("".join(STORIES))
    (root / "more/d.txt").write_text("")
    (root / "more/e.md").write_text("# short")
    pq.write_table(pa.table({"text": STORIES}), root / "z.parquet", row_group_size=5)
    return root


EXPECTED = [*STORIES, *STORIES, "".join(STORIES), "", "# short", *STORIES]


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def documents(path):
    with TokenSet(path) as tokens:
        tokens.check()
        bounds = (tokens.document(number) for number in range(tokens.num_documents))
        return [tokens.tokens(start, stop).tolist() for start, stop in bounds]


def test_bytes_are_those_of_the_texts(folder, tmp_path):
    header = tokenize([folder], tmp_path / "set", workers=1)
    assert (header.tokenizer.name, header.vocab_size, header.text_column) == ("bytes", 256, "text")
    assert [bytes(each) for each in documents(tmp_path / "set")] == [text.encode() + b"\0" for text in EXPECTED]
    assert sorted(contents(tmp_path / "set")) == ["documents.bin", "header.json", "sources.jsonl", "tokens.bin"]
    told = [json.loads(line) for line in (tmp_path / "set/sources.jsonl").read_text().splitlines()]
    assert [(each["name"], each["num_documents"]) for each in told] == [
        ("a.jsonl", 23),
        ("b.jsonl.gz", 23),
        ("more/c.txt", 1),
        ("more/d.txt", 1),
        ("more/e.md", 1),
        ("z.parquet", 23),
    ]
    assert told[4]["num_bytes"] == 7
    assert not (tmp_path / "set.unfinished").exists()


def test_tokens_are_those_of_the_library(folder, tmp_path, tokenizer_file, byte_level):
    header = tokenize([folder], tmp_path / "set", TokenizeOptions(tokenizer=str(tokenizer_file)), workers=1)
    assert (header.dtype, header.vocab_size, header.end_of_document) == ("uint16", 300, 0)
    assert documents(tmp_path / "set") == [[*byte_level.encode(text).ids, 0] for text in EXPECTED]
    assert (tmp_path / "set/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    with TokenSet(tmp_path / "set") as tokens:
        assert tokens.decode(tokens.tokens(*tokens.document(3))) == STORIES[3] + "<|endoftext|>"


def test_neither_pieces_nor_folders_nor_workers_change_a_byte(folder, tmp_path, monkeypatch):
    options = TokenizeOptions(tokenizer="train", vocab_size=280)
    tokenize([folder], tmp_path / "set", options, workers=1)
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere" / "by_another_name")
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 64)
    tokenize([elsewhere], tmp_path / "one", options, workers=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "set")
    monkeypatch.setattr(_documents, "SEGMENT_BYTES", 1 << 20)  # as in other processes
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 1 << 20)
    tokenize([elsewhere], tmp_path / "two", options, workers=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "set")


class Killed(BaseException):
    """In the middle."""


def test_who_was_killed_goes_on_with_what_was_done(folder, tmp_path, monkeypatch, tokenizer_file):
    options = TokenizeOptions(tokenizer=str(tokenizer_file))
    tokenize([folder], tmp_path / "whole", options, workers=1)
    done, do = [], Worker.do

    def some(self, piece):
        if len(done) in (5, 9):
            done.append(None)
            raise Killed
        done.append(piece.key)
        return do(self, piece)

    monkeypatch.setattr(Worker, "do", some)
    for _ in range(2):
        with pytest.raises(Killed):
            tokenize([folder], tmp_path / "set", options, workers=1)
        assert not (tmp_path / "set").exists()
    kept = sorted((tmp_path / "set.unfinished/pieces").iterdir())
    assert len(kept) == 8
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    kept[1].write_bytes(b"nothing")
    tokenize([folder], tmp_path / "set", options, workers=1)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")
    keys = [key for key in done if key is not None]
    assert len(keys) == len(set(keys)) + 2, "two were damaged, all others made once"


def test_what_is_kept_of_another_tokenizer_or_text_is_not_used(folder, tmp_path, monkeypatch, tokenizer_file):
    do = Worker.do

    def stop(self, piece):
        if len(list((tmp_path / "set.unfinished/pieces").iterdir())) == 9:
            raise Killed
        return do(self, piece)

    with monkeypatch.context() as context:
        context.setattr(Worker, "do", stop)
        with pytest.raises(Killed):
            tokenize([folder], tmp_path / "set", workers=1)
    (folder / "a.jsonl").write_text('{"text": "other"}\n')
    options = TokenizeOptions(tokenizer=str(tokenizer_file))
    tokenize([folder], tmp_path / "set", options, workers=1)
    tokenize([folder], tmp_path / "fresh", options, workers=1)
    assert contents(tmp_path / "set") == contents(tmp_path / "fresh")


def test_special_tokens_in_texts_are_text_unless_they_are_to_be_read(tmp_path, tokenizer_file):
    (tmp_path / "a.txt").write_text("a<|other|>b<|endoftext|>")
    name = str(tokenizer_file)
    tokenize([tmp_path / "a.txt"], tmp_path / "plain", TokenizeOptions(tokenizer=name), workers=1)
    tokenize([tmp_path / "a.txt"], tmp_path / "read", TokenizeOptions(tokenizer=name, reads_special=True), workers=1)
    (plain,), (read,) = documents(tmp_path / "plain"), documents(tmp_path / "read")
    assert 1 not in plain
    assert plain.index(0) == len(plain) - 1
    assert [number for number in read if number < 2] == [1, 0, 0]
    named = TokenizeOptions(tokenizer=name, end_of_document="<|other|>")
    assert tokenize([tmp_path / "a.txt"], tmp_path / "named", named, workers=1).end_of_document == 1


def test_a_vocabulary_beyond_two_bytes_takes_four(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"w0": 0, "w1": 1, "w69999": 69_999, "</s>": 70_000}  # numbers may have gaps
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w69999 w1 unknown")
    options = TokenizeOptions(tokenizer=str(tmp_path / "words.json"))
    header = tokenize([tmp_path / "a.txt"], tmp_path / "set", options, workers=1)
    assert (header.dtype, header.vocab_size, header.tokenizer.name) == ("uint32", 70_001, "words.json")
    assert documents(tmp_path / "set") == [[69999, 1, 0, 70_000]]


def test_a_large_text_gives_a_tokenizer_by_a_part_of_it(folder, tmp_path):
    heard = []

    def hear(part, done, total):
        heard.append((part, done, total))

    options = TokenizeOptions(tokenizer="train", vocab_size=270, train_bytes=900)
    tokenize([folder], tmp_path / "set", options, workers=1, progress=hear)
    for part in ("reading", "training", "tokenizing", "writing"):
        steps = [(done, total) for each, done, total in heard if each == part]
        assert steps[0][0] <= steps[-1][0] == steps[-1][1]
    assert 0 < heard[[part for part, *_ in heard].index("training")][2] <= 900


def refused(words, *arguments, out=None, **options):
    with pytest.raises(ValueError, match=words) as caught:
        tokenize(*arguments, TokenizeOptions(**options), workers=1)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_tokenised_is_refused_and_leaves_nothing(folder, tmp_path):
    out = tmp_path / "out"
    (folder / "a.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    refused(r"a\.jsonl, line 2 has no column 'text'", [folder], out)
    (tmp_path / "blank.jsonl").write_text("\n \n")
    refused(r"blank\.jsonl and what else was named hold no document", [tmp_path / "blank.jsonl"], out)
    assert not (tmp_path / "out.unfinished").exists()
    (tmp_path / "empty.txt").touch()
    refused(r"the input holds no text \(.*empty\.txt\)", [tmp_path / "empty.txt"], out)
    refused("does not exist", [tmp_path / "nowhere"], out)
    assert not out.exists()
    text = tmp_path / "a.txt"
    text.write_text("a")
    refused("tokenizer .*no.json does not exist", [text], out, tokenizer=str(tmp_path / "no.json"))
    refused(
        "tokenizer /dev/zero cannot be read .it has more than 134,217,728 bytes.", [text], out, tokenizer="/dev/zero"
    )
    (tmp_path / "bad.json").write_text("{}")
    refused(r"bad\.json is no file of the tokenizers library", [text], out, tokenizer=str(tmp_path / "bad.json"))
    assert not (tmp_path / "out.unfinished").exists() or os.listdir(tmp_path / "out.unfinished/pieces")


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[END]": 1}, unk_token="a"))
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "a.txt").write_text("a")
    model, out = str(tmp_path / "model"), tmp_path / "out"
    refused("does not say which token closes a document.*--end-of-document", [tmp_path / "a.txt"], out, tokenizer=model)
    refused(
        r"has no token '\[STOP\]'.*--end-of-document",
        [tmp_path / "a.txt"],
        out,
        tokenizer=model,
        end_of_document="[STOP]",
    )
    for token in ("[END]", {"content": "[END]"}):
        (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        tokenize([tmp_path / "a.txt"], out, TokenizeOptions(tokenizer=model), workers=1)
        assert documents(out) == [[0, 1]]
        shutil.rmtree(out)


def characters(path, unknown=None, **normal):
    """A tokenizer of the letters a to y alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["</s>", *([] if unknown is None else [unknown]), *"abcdefghijklmnopqrstuvwxy"]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, value in normal.items():
        setattr(tokenizer, name, value)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


@pytest.mark.parametrize("text", ["the Fox", "a z", "nine\tÄpfel", "\U0001f600"])
def test_characters_that_would_vanish_are_refused_by_file_and_letter(tmp_path, text):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "fine.txt").write_text("fine")
    (texts / "text.txt").write_text(text)
    lost = next(letter for letter in text if not letter.isspace() and letter not in "abcdefghijklmnopqrstuvwxy")
    words = (
        rf"text\.txt: the tokenizer has no token for '{lost}', which would vanish: take a tokenizer for any character"
    )
    refused(words, [texts], tmp_path / "out", tokenizer=characters(tmp_path / "small"))


def test_what_a_tokenizer_leaves_out_on_purpose_is_not_lost(tmp_path):
    from tokenizers import normalizers

    normal = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    (tmp_path / "text.txt").write_text("Cafe\u0301 OLE\u0301 \u00e9")
    options = TokenizeOptions(tokenizer=characters(tmp_path / "small", normalizer=normal))
    tokenize([tmp_path / "text.txt"], tmp_path / "out", options, workers=1)
    assert len(documents(tmp_path / "out")[0]) == 9


def test_how_much_of_a_text_is_unknown_is_counted(tmp_path):
    (tmp_path / "text.txt").write_text("abc Z abc")
    tokenizer = characters(tmp_path / "small", unknown="<unk>")
    header = tokenize([tmp_path / "text.txt"], tmp_path / "out", TokenizeOptions(tokenizer=tokenizer), workers=1)
    assert header.num_unknown == 1
    assert "1 tokens (14.29%) stand for what the tokenizer does not know" in header.unknown_note
    assert TokenSet(tmp_path / "out").header == header
    (tmp_path / "text.txt").write_text("abc abc")
    known = tokenize([tmp_path / "text.txt"], tmp_path / "known", TokenizeOptions(tokenizer=tokenizer), workers=1)
    assert (known.num_unknown, known.unknown_note) == (None, None)
    assert "num_unknown" not in (tmp_path / "known" / "header.json").read_text()


def test_the_end_of_a_text_is_what_the_files_beside_the_tokenizer_say(tmp_path):
    from tokenizers import Tokenizer, models

    model = tmp_path / "model"
    model.mkdir()
    names = {"a": 0, "</s>": 1, "<|other|>": 2}
    Tokenizer(models.WordLevel(names, unk_token="a")).save(str(model / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a")

    def end():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        options = TokenizeOptions(tokenizer=str(model))
        return tokenize([tmp_path / "a.txt"], tmp_path / "out", options, workers=1).end_of_document

    assert end() == 1  # a usual one
    (model / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 2}}))
    assert end() == 2
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert end() == 0
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|other|>"}))
    assert end() == 2
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</never>"}))
    with pytest.raises(
        ValueError, match=r"says that eos_token is '</never>', which .*tokenizer\.json does not have: mend"
    ):
        end()
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    with pytest.raises(ValueError, match=r"ends at token 7, which .*tokenizer\.json does not have: give files that"):
        end()


def test_what_stands_there_is_neither_overwritten_nor_mixed_up(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    tokenize([folder], out, workers=1)
    before = contents(out)
    refused(r"out exists: name another --out", [folder], out)
    assert contents(out) == before
    (tmp_path / "mine.unfinished").mkdir()
    (tmp_path / "mine.unfinished/thesis").touch()
    refused("mine.unfinished is no unfinished token set: move it away", [folder], tmp_path / "mine")
    assert os.listdir(tmp_path / "mine.unfinished") == ["thesis"]


def test_two_at_once_and_a_file_that_changes_are_refused(folder, tmp_path):
    out = tmp_path / "out"

    def meddle(part, done, total):
        if part == "tokenizing" and done == total:
            refused("another process is writing .*out", [folder], out)
            (folder / "more/e.md").write_text("# longer")

    with pytest.raises(ValueError, match=r"e\.md was changed while it was read: start again"):
        tokenize([folder], out, workers=1, progress=meddle)
    assert not out.exists()
    tokenize([folder], out, workers=1)
    assert [bytes(each) for each in documents(out)][48] == b"# longer\0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 300}, "vocab_size is that of a tokenizer that is made"),
        ({"tokenizer": "train", "vocab_size": 256}, "vocab_size is 256: give at least 257"),
        ({"tokenizer": "train", "end_of_document": "</s>"}, "leave it out with tokenizer train"),
        ({"reads_special": True}, "tokenizer bytes reads no special tokens"),
        ({"suffixes": ()}, "suffixes is empty"),
        ({"train_bytes": 0}, "train_bytes is 0: give at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        TokenizeOptions(**options)


def test_the_environment_is_left_as_it_was(folder, tmp_path, monkeypatch, tokenizer_file):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenize([folder], tmp_path / "set", TokenizeOptions(tokenizer=str(tokenizer_file)), workers=1)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_documents_are_whole_where_a_text_goes_over_many_pieces(tmp_path):
    text = "word " * 2000
    (tmp_path / "a.txt").write_text(text)
    tokenize([tmp_path / "a.txt"], tmp_path / "set", workers=1)
    with TokenSet(tmp_path / "set") as tokens:
        assert tokens.num_documents == 1
        assert np.array_equal(tokens.tokens(0, len(text)), np.frombuffer(text.encode(), np.uint8))


def test_the_tokens_of_a_piece_are_written_some_at_a_time(folder, tmp_path, monkeypatch, tokenizer_file):
    options = TokenizeOptions(tokenizer=str(tokenizer_file))
    tokenize([folder], tmp_path / "whole", options, workers=1)
    monkeypatch.setattr(tokenizing, "_BLOCK_TOKENS", 10)
    monkeypatch.setattr(tokenizing, "_BATCH_TEXTS", 1)
    tokenize([folder], tmp_path / "set", options, workers=1)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_on_which_the_tokenizers_pattern_gives_up_is_named(tmp_path, tokenizer_file, workers):
    """The library panics then, and its PanicException is no Exception."""
    made = json.loads(tokenizer_file.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "slow.json").write_text(json.dumps(made | {"pre_tokenizer": pattern}))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in ["b", "c", "a" * 4000 + "!", "d"])
    (tmp_path / "a.jsonl").write_text(rows + '{"text": "e"}\n' * 50)
    options = TokenizeOptions(tokenizer=str(tmp_path / "slow.json"))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3: the tokenizer slow\.json cannot encode the text \(Onig: "):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", options, workers=workers)


def test_a_tokenizer_that_writes_millions_of_letters_for_one_is_refused(tmp_path, tokenizer_file):
    made = json.loads(tokenizer_file.read_text())
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}
    made["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 4}
    (tmp_path / "many.json").write_text(json.dumps(made))
    (tmp_path / "a.txt").write_text("a")
    options = TokenizeOptions(tokenizer=str(tmp_path / "many.json"))
    with pytest.raises(ValueError, match=r"many\.json writes 16777216 letters for one"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", options, workers=1)
