"""Batches of token sets: a function of the step's number, in every layout, mixed by weight; in little memory."""

import hashlib
import shutil
import time

import numpy as np
import psutil
import pytest

from rrfp_jax.data import BrokenData, Tokens, TokensConfig
from rrfp_jax.data.dataset import contents_of
from tests.data.token_sets import VOCAB, sparse_set, token_set

LENGTH = 12


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for seed, name in enumerate("ab"):
        token_set(folder / name, np.random.default_rng(seed).integers(4, 11, size=90).tolist(), seed)
    return folder


def data(sets, *names, part="train", **changes):
    values = {"length": LENGTH, "batch_size": 6, "num_microbatches": 3, "seed": 5}
    return Tokens(TokensConfig(path=tuple(str(sets / name) for name in names or "a"), **(values | changes)), part)


def rows(batch):
    return [row.tobytes() for row in np.asarray(batch["tokens"]).reshape(-1, LENGTH)]


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_visits_every_row_once_and_parts_have_no_row_in_common(sets, pack):
    parts = []
    for part in ("train", "held_out"):
        found = data(sets, part=part, pack=pack, held_out=0.25, batch_size=1, num_microbatches=1)
        seen = [rows(found.batch(step))[0] for step in range(found.num_rows)]
        assert len(set(seen)) == found.num_rows
        assert [rows(found.batch(found.num_rows + step))[0] for step in range(found.num_rows)] != seen
        parts.append(set(seen))
    assert not parts[0] & parts[1]


@pytest.mark.parametrize("pack", [False, True])
def test_a_set_that_is_evaluated_counts_each_row_once(sets, pack):
    """Also where a source is shorter than its weight has it."""
    found = data(sets, "a", "b", pack=pack, weights=(1.0, 3.0), batch_size=1, num_microbatches=1)
    found.counts_once = True
    counted = [batch["tokens"].tobytes() for step in range(400) if (batch := found.batch(step))["weights"].any()]
    assert len(counted) == len(set(counted)) == found.num_rows


@pytest.mark.parametrize("pack", [False, True])
def test_a_batch_is_the_same_for_any_number_of_microbatches_and_whatever_is_read(sets, pack):
    whole = data(sets, "a", "b", pack=pack).batch(7)
    cut = data(sets, "a", "b", pack=pack, num_microbatches=2).batch(7)
    reads = {"tokens": range(1, 2), "targets": range(1, 3), "weights": range(0)}
    part = data(sets, "a", "b", pack=pack).batch(7, reads)
    for name, leaf in whole.items():
        assert (leaf.reshape(cut[name].shape) == cut[name]).all()
        assert leaf.dtype == (np.float32 if name == "weights" else np.int32)
        for number in range(3):
            if name not in reads or number in reads[name] or name == "weights":
                assert (part[name][number] == leaf[number]).all()
            else:
                assert not isinstance(part[name][number], np.ndarray)
                assert (part[name][number].shape, part[name][number].dtype) == (leaf[number].shape, leaf.dtype)
    assert contents_of(part).tokens == contents_of(whole).tokens
    assert set(whole) == {"tokens", "targets", "weights"} | ({"positions", "segments"} if pack else set())


def test_files_are_read_for_what_is_read_only(sets, monkeypatch):
    found = data(sets)
    asked = []
    windows = found._sets[0].windows
    monkeypatch.setattr(
        found._sets[0], "windows", lambda starts, length: asked.append(len(starts)) or windows(starts, length)
    )
    found.batch(0, {"tokens": range(1), "targets": range(0)})
    found.batch(0, {})
    assert asked == [2]


def test_sources_have_their_shares_and_begin_anew_when_they_are_used_up(sets):
    both = data(sets, "a", "b", weights=(3, 1), batch_size=8, num_microbatches=1)
    alone = [data(sets, name, batch_size=1, num_microbatches=1) for name in "ab"]
    own = [{rows(each.batch(step))[0] for step in range(each.num_rows)} for each in alone]
    num_steps = 3 * max(map(len, own))
    seen = [row for step in range(num_steps) for row in rows(both.batch(step))]
    of_first = np.cumsum([row in own[0] for row in seen])
    assert abs(of_first - 0.75 * np.arange(1, len(seen) + 1)).max() <= 0.5
    first = [row for row in seen if row in own[0]]
    assert set(first[: len(own[0])]) == own[0] == set(first[len(own[0]) : 2 * len(own[0])])
    by_size = data(sets, "a", "b", batch_size=8, num_microbatches=1)
    assert by_size.num_rows == sum(map(len, own))


def test_the_fingerprint_is_that_of_the_tokens_wherever_they_lie(sets, tmp_path):
    shutil.copytree(sets / "a", tmp_path / "copy")
    assert data(sets).fingerprint == data(tmp_path, "copy").fingerprint != data(sets, "b").fingerprint


def test_another_tokenizer_is_refused(sets, tmp_path):
    token_set(tmp_path / "a", [20, 20])
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    header = (tmp_path / "a" / "header.json").read_text()
    digest = hashlib.sha256(b"{}").hexdigest()
    named = header.replace('"name": "bytes"', '"name": "mine"').replace('"sha256": null', f'"sha256": "{digest}"')
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "header.json").write_text(named)
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    data(tmp_path, "a", tokenizer="bytes")
    data(tmp_path, "b", tokenizer=str(other))
    with pytest.raises(ValueError, match=r"was made by the tokenizer bytes, and the configuration names .*, another"):
        data(tmp_path, "a", tokenizer=str(other))
    with pytest.raises(ValueError, match=r"b was made by the tokenizer mine, and .*a by bytes, another one"):
        data(tmp_path, "a", "b")
    with pytest.raises(ValueError, match=r"cannot read the tokenizer .*: give the path of a tokenizer.json, or bytes"):
        data(tmp_path, "a", tokenizer=str(tmp_path / "none.json"))


def test_a_damaged_token_is_named(tmp_path):
    tokens = token_set(tmp_path / "a", [40])
    file = tmp_path / "a" / "tokens.bin"
    file.write_bytes(file.read_bytes()[:50] + b"\xff\xff" + file.read_bytes()[52:])
    with pytest.raises(BrokenData, match=rf"tokens.bin is damaged \(token 65535 at 25, in a vocabulary of {VOCAB}\)"):
        data(tmp_path, batch_size=3, num_microbatches=1).batch(0)
    tokens.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 7}, "batch_size 7 does not divide into 3 microbatches: .* or batch_size 9"),
        ({"length": 0}, "length is 0: give at least 1"),
        ({"held_out": 1.0}, "held_out is 1.0: give 0 or more, and less than 1"),
        ({"weights": (1,)}, None),
        ({"weights": (1, 2)}, "weights has 2 numbers for 1 token sets: give one for each"),
        ({"weights": (0,)}, "weights is .*: give numbers above 0"),
        ({"path": ()}, "path is empty: give the folder of a token set"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(changes, message):
    values = {"path": ("a",), "length": 12, "batch_size": 6, "num_microbatches": 3} | changes
    if message is None:
        TokensConfig(**values)
        return
    with pytest.raises(ValueError, match=message):
        TokensConfig(**values)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True])
def test_five_billion_tokens_take_little_memory(tmp_path, pack):
    sparse_set(tmp_path / "a", num_tokens=5 * 10**9, num_documents=5 * 10**6)
    found = data(tmp_path)
    found.batch(0)  # what is loaded once
    before, began_s = psutil.Process().memory_info().rss, time.perf_counter()
    found = data(tmp_path, length=2048, batch_size=64, num_microbatches=8, pack=pack, held_out=0.01)
    opened_s, durations_ms = time.perf_counter() - began_s, []
    for step in range(200):
        began_s = time.perf_counter()
        batch = found.batch(step % 20)
        durations_ms.append((time.perf_counter() - began_s) * 1e3)
    assert batch["tokens"].size == 64 * 2048
    assert psutil.Process().memory_info().rss - before < 200 * 2**20
    print(f"opened in {opened_s:.2f} s, a warm batch in {min(durations_ms[20:]):.2f} ms")
