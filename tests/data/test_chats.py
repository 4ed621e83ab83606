"""Chats as data sets: written by the tokenizer's template, and trained on in the assistant's turns only."""

import json

import numpy as np
import pytest

from rrfp_jax.data.config import JsonlConfig, ParquetConfig
from rrfp_jax.data.text_files import tokens_of_files
from rrfp_jax.data.tokenizing import TokenizeOptions, tokenize
from rrfp_jax.data.tokens import TokenSet, TokenSetWriter
from tests.data.chats import CHAT, TEMPLATES, random_chat, save_tokenizer, unmarked, write_chats

ROWS = {"column": "messages", "length": 64, "batch_size": 4, "num_microbatches": 2, "pack": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_chats(tmp_path / "chats.jsonl", [random_chat(seed) for seed in range(12)])
    save_tokenizer(tmp_path / "model", "chatml")
    return tmp_path


def found(folder, *, kind=JsonlConfig, name="chats.jsonl", tokenizer="model", part="train", told=None, **changes):
    config = kind(path=(str(folder / name),), tokenizer=str(folder / tokenizer), **(ROWS | changes))
    return tokens_of_files(config, part, say=[].append if told is None else told.append)


def documents(tokens):
    """Returns tokens and whether each counts, for every chat."""
    places = [tokens.document(number) for number in range(tokens.num_documents)]
    return [(tokens.tokens(*at), tokens.counted(np.array(at[:1]), at[1] - at[0])[0]) for at in places]


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("chatml", ("<|im_end|>", "<|im_end|>")),
        ("llama", ("<|eot_id|>", "<|eot_id|>")),
        ("mistral", ("</s>", "</s>")),
        ("gemma", ("<end_of_turn>", "<end_of_turn>")),
        ("phi", ("<|end|>\n", "<|end|>\n")),
    ],
)
def test_the_assistants_turns_count_and_nothing_else(tmp_path, family, ends, is_marked):
    template = TEMPLATES[family] if is_marked else unmarked(TEMPLATES[family])
    save_tokenizer(tmp_path / "model", family, template)
    write_chats(tmp_path / "chats.jsonl", [CHAT])
    options = TokenizeOptions(tokenizer=str(tmp_path / "model"), column="messages")
    header = tokenize([tmp_path / "chats.jsonl"], tmp_path / "set", options, workers=1)
    with TokenSet(tmp_path / "set") as tokens:
        ((ids, counted),) = documents(tokens)
        told = tokens.decode(ids[counted])
        assert "spider" in tokens.decode(ids[~counted])
    if not is_marked:  # what follows the end of a turn belongs to it, as nothing says otherwise
        more = {"chatml": "\n", "gemma": "\n"}.get(family, "")
        ends = [end + more for end in ends]
        ends[-1] += "<|endoftext|>" if family == "phi" else ""
    space = " " if family == "mistral" else ""
    assert told == f"{space}Eight.{ends[0]}{space}Six, and two wings. 🪰{ends[1]}"
    assert header.num_counted == counted.sum()
    assert f"{counted.sum()} tokens" in header.counted_note


@pytest.mark.parametrize("pack", [True, False])
def test_weights_are_those_of_the_targets_that_count(folder, pack):
    data = found(folder, pack=pack)
    ids, counted = map(np.concatenate, zip(*documents(data._sets[0]), strict=True))
    assert 0.1 < counted.mean() < 0.9
    seen = 0
    for step in range(-(-data.num_rows // 4)):
        batch = {name: np.asarray(leaf).reshape(4, 64) for name, leaf in data.batch(step).items()}
        for row in range(4):
            tokens, targets, weights = (batch[name][row] for name in ("tokens", "targets", "weights"))
            length = np.count_nonzero(batch["segments"][row]) if pack else 64
            matches = [at for at in range(len(ids) - length + 1) if (ids[at : at + length] == tokens[:length]).all()]
            # the last place of a document predicts nothing where rows hold whole documents
            wanted = [
                np.pad(counted[at + 1 : at + 1 + length], (0, 65))[:64] * (np.arange(64) < length) for at in matches
            ]
            if pack:
                last = np.diff(batch["segments"][row], append=0) != 0
                last[-1] &= length < 64
                wanted = [each & ~last for each in wanted]
            assert any((each == weights).all() for each in wanted)
            assert (targets[weights == 0] == 0).all()
            seen += weights.sum()
    assert seen > 0.5 * counted.sum()


def test_parquet_gives_the_same_and_held_out_chats_are_others(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    chats = [random_chat(seed) for seed in range(12)]
    table = pa.table({"messages": [[each | {"name": None} for each in chat] for chat in chats], "id": range(12)})
    pq.write_table(table, folder / "chats.parquet", row_group_size=5)
    of_lines, of_rows = found(folder), found(folder, kind=ParquetConfig, name="chats.parquet")
    pairs = zip(documents(of_lines._sets[0]), documents(of_rows._sets[0]), strict=True)
    assert all((a == b).all() for pair in pairs for a, b in zip(*pair, strict=True))
    held_out = found(folder, held_out=0.3, part="held_out")
    assert 0 < held_out.num_rows < of_lines.num_rows
    assert held_out.batch(0)["weights"].sum() > 0


def test_a_changed_template_gives_another_token_set(folder):
    told = []
    first = found(folder, told=told)
    assert found(folder, told=told).fingerprint == first.fingerprint
    assert len(told) == 1
    assert "are of the assistant's turns" in first.notes[0]
    save_tokenizer(folder / "model", "chatml", TEMPLATES["chatml"].replace("'<|im_end|>\\n'", "'<|im_end|>'"))
    assert found(folder, told=told).fingerprint != first.fingerprint
    assert len(told) == 2


def test_any_number_of_tokens_is_marked_and_damage_is_seen(tmp_path):
    chance = np.random.default_rng(0)
    sizes = chance.integers(1, 20, 40)
    counted = chance.random(sizes.sum()) < 0.4
    with TokenSetWriter(tmp_path / "set", vocab_size=256, end_of_document=0, is_chat=True) as writer:
        for size, some in zip(sizes.tolist(), np.split(counted, np.cumsum(sizes)[:-1]), strict=True):
            writer.append(np.ones(size, np.uint8), np.array([size]), some)
        assert writer.finish().num_counted == counted.sum()
    with TokenSet(tmp_path / "set") as tokens:
        tokens.check()
        starts = chance.integers(0, len(counted) + 1, 50)
        for length in (0, 1, 7, 8, 33, 1000):
            wanted = [np.pad(counted[start : start + length], (0, length))[:length] for start in starts.tolist()]
            assert (tokens.counted(starts, length) == wanted).all()
    stored = (tmp_path / "set" / "counted.bin").read_bytes()
    (tmp_path / "set" / "counted.bin").write_bytes(bytes([stored[0] ^ 1]) + stored[1:])
    with TokenSet(tmp_path / "set") as tokens, pytest.raises(ValueError, match=r"counted.bin is damaged"):
        tokens.check()
    (tmp_path / "set" / "counted.bin").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*counted.bin"):
        TokenSet(tmp_path / "set")


ANSWER = {"role": "assistant", "content": "Six."}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "Hi"}, r"line 13 has 'Hi' in column 'messages' where a list of messages is expected"),
        ({"messages": []}, r"line 13 has \[\] in column 'messages' where a list of messages"),
        (
            {"messages": [{"from": "human", "value": "Hi"}]},
            r"line 13 has the message \{'from': 'human', .* role and content",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"line 13 has the message .* role and content is expected: mend",
        ),
        ({"messages": [ANSWER], "tools": "none"}, r"line 13 has 'none' in column 'tools' where a list of objects"),
        ({"chat": [ANSWER]}, r"line 13 has no column 'messages' \(it has chat\)"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"line 13 has half a character in column 'messages'"),
        (
            {"messages": [ANSWER, {"role": "user", "content": [1]}]},
            r"line 13 does not fit the chat template in .*jinja \(",
        ),
    ],
)
def test_a_row_that_is_no_chat_is_refused_by_file_and_row(folder, row, message):
    with (folder / "chats.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"chats.jsonl, {message}") as refusal:
        found(folder)
    assert "\n" not in str(refusal.value)
    assert not [*(folder / "cache").rglob("header.json")]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no\nsystem') }}",
            r"line 1 does not fit the chat template in .*jinja \(no system\): mend",
        ),
        (
            "{% for m in messages %}",
            r"chat template in .*chat_template.jinja is none \(line 1: .*'endfor'.*\): mend it",
        ),
        ("{{ messages[0].content.__class__.mro() }}", r"line 1 does not fit .*unsafe"),
        (
            "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}",
            r"writes none of them",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            r"line 1 cannot be cut into turns",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", r"writes more than 33,554,432 characters"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(folder, template, message):
    save_tokenizer(folder / "model", "chatml", template)
    with pytest.raises(ValueError, match=message) as refusal:
        found(folder)
    assert "\n" not in str(refusal.value)


def test_chats_without_a_template_or_an_answer_are_refused(folder):
    (folder / "model" / "chat_template.jinja").rename(folder / "aside")
    with pytest.raises(
        ValueError, match=r"tokenizer.json has no chat template: put the chat_template.jinja of a model"
    ):
        found(folder)
    with pytest.raises(ValueError, match=r"has chats in column 'messages', and tokenizer bytes has no chat template"):
        tokens_of_files(JsonlConfig(path=(str(folder / "chats.jsonl"),), **ROWS), say=print)
    options = TokenizeOptions(tokenizer="train", column="messages")
    with pytest.raises(ValueError, match=r"tokenizer train has no chat template"):
        tokenize([folder / "chats.jsonl"], folder / "set", options, workers=1)
    (folder / "aside").rename(folder / "model" / "chat_template.jinja")
    write_chats(folder / "chats.jsonl", [CHAT[:2], CHAT[1:2]])
    with pytest.raises(ValueError, match=r"no chat in .*chats.jsonl .* has a turn of the role assistant"):
        found(folder)
    write_chats(folder / "chats.jsonl", [["Hi"]])
    with pytest.raises(ValueError, match=r"line 1 has a list in column 'messages' where text is expected"):
        found(folder)
    (folder / "plain.txt").write_text("text")
    write_chats(folder / "chats.jsonl", [CHAT])
    options = TokenizeOptions(tokenizer=str(folder / "model"), column="messages")
    with pytest.raises(ValueError, match=r"chats.jsonl has chats, and .*plain.txt is plain text"):
        tokenize([folder / "chats.jsonl", folder / "plain.txt"], folder / "set", options, workers=1)


@pytest.mark.slow
def test_several_processes_write_the_same_bytes(tmp_path):
    save_tokenizer(tmp_path / "model", "llama")
    chats = [random_chat(seed) for seed in range(3000)]
    write_chats(tmp_path / "chats.jsonl", chats * 8)
    options = TokenizeOptions(tokenizer=str(tmp_path / "model"), column="messages")
    tokenize([tmp_path / "chats.jsonl"], tmp_path / "one", options, workers=1)
    tokenize([tmp_path / "chats.jsonl"], tmp_path / "two", options, workers=2)
    for name in ("tokens.bin", "documents.bin", "counted.bin", "header.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    with TokenSet(tmp_path / "two") as tokens:
        assert tokens.num_documents == 24_000
