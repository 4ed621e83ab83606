"""The token files of Megatron-LM, read as they are."""

import struct
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rrfp_jax.data.config import TokensConfig
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.token_data import MegatronTokens, Tokens
from rrfp_jax.data.tokens import write_token_set
from rrfp_jax.hf.model_folder import open_model
from tests.commands.running import ROOT, run_command

CODES = {"uint16": 8, "int32": 4}


def write_files(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> None:
    """Writes documents, each of sequences, as Megatron-LM's IndexedDatasetBuilder does."""
    sequences = [sequence for document in documents for sequence in document]
    size, counts = np.dtype(dtype).itemsize, [len(sequence) for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(np.array([*chain.from_iterable(sequences)], dtype).tobytes())
    places = [0, *accumulate(size * count for count in counts)][: len(counts)]
    firsts = [0, *accumulate(map(len, documents))]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(firsts))
        + np.array(counts, "<i4").tobytes()
        + np.array(places, "<i8").tobytes()
        + np.array(firsts, "<i8").tobytes()
    )


def drawn(num_documents: int, *, most: int = 40) -> list[list[list[int]]]:
    rng = np.random.default_rng(3)
    return [
        [*(rng.integers(1, 256, rng.integers(1, most)).tolist() for _ in range(rng.integers(0, 3))), [7, 0]]
        for _ in range(num_documents)
    ]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("name", ["text", "text.bin", "text.idx"])
def test_documents_are_those_that_were_written(tmp_path: Path, dtype: str, name: str) -> None:
    documents = drawn(30)
    write_files(tmp_path / "text", documents, dtype)
    with MegatronTokens(tmp_path / name, "bytes") as tokens:
        assert tokens.num_documents == 30
        for number, document in enumerate(documents):
            assert tokens.tokens(*tokens.document(number)).tolist() == [*chain.from_iterable(document)]
        ends = tokens.document_ends(0, 30)
        for first, stop in ((0, 0), (3, 11), (29, 30)):
            assert tokens.document_ends(first, stop).tolist() == ends[first:stop].tolist()
        assert tokens.document_at(int(ends[4])) == 5
        assert tokens.decode([72, 105]) == "Hi"
        assert tokens.notes == []


@pytest.mark.parametrize("pack", [False, True])
def test_batches_are_those_of_the_same_documents_as_a_token_set(tmp_path: Path, pack: bool) -> None:
    documents = [[*chain.from_iterable(document)] for document in drawn(50)]
    write_files(tmp_path / "text", [[document] for document in documents])
    write_token_set(tmp_path / "set", [document[:-1] for document in documents])
    common: dict[str, Any] = {"length": 16, "batch_size": 4, "num_microbatches": 2, "pack": pack, "held_out": 0.1}
    theirs = Tokens(TokensConfig(path=(str(tmp_path / "text"),), tokenizer="bytes", **common))
    ours = Tokens(TokensConfig(path=(str(tmp_path / "set"),), **common))
    assert theirs.num_rows == ours.num_rows
    assert theirs.token_kind == ours.token_kind
    for step in range(12):
        one, other = theirs.batch(step), ours.batch(step)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[leaf], other[leaf]) for leaf in one)


@pytest.mark.slow
def test_a_run_trains_on_them_and_knows_its_tokens(tmp_path: Path) -> None:
    write_files(tmp_path / "text", drawn(200))
    data = {"kind": "tokens", "path": str(tmp_path / "text"), "tokenizer": "bytes"}
    config = yaml.safe_load((ROOT / "tpu_gpu_configs" / "cpu" / "debug.yaml").read_text())
    rows = {key: config["data"][key] for key in ("batch_size", "num_microbatches")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "data": {**data, **rows, "length": 16}}))
    small = ("--hidden", 32, "--mlp-dim", 64, "--steps", 1, "--run-dir", tmp_path / "run")
    result = run_command("train", "--config", tmp_path / "run.yaml", *small)
    assert result.returncode == 0, result.stderr
    kind = open_model(tmp_path / "run", "run").tokens()
    assert kind is not None
    assert kind.is_bytes


def test_documents_that_no_token_closes_are_noted(tmp_path: Path) -> None:
    write_files(tmp_path / "text", [[[1, 2, 3]], [[4, 5]]])
    with MegatronTokens(tmp_path / "text", "bytes") as tokens:
        assert tokens.document(1) == (3, 5)
        assert [note for note in tokens.notes if "--append-eod" in note]


def test_files_that_cannot_be_read_are_refused_in_one_sentence(tmp_path: Path) -> None:
    index, file = tmp_path / "text.idx", tmp_path / "text.bin"

    def refuses(match: str, tokenizer: str | None = "bytes") -> None:
        with pytest.raises(ValueError, match=match):
            MegatronTokens(tmp_path / "text.bin", tokenizer)

    refuses("cannot read .*text.idx .*: give both files")
    write_files(tmp_path / "text", drawn(5))
    refuses("text.idx does not say which tokenizer made its tokens: give it with data.tokenizer", None)
    whole = index.read_bytes()
    index.write_bytes(b"MMIDIDY" + whole[7:])
    refuses("text.idx is no index of Megatron's token files")
    index.write_bytes(whole[:20])
    refuses("text.idx is no index of Megatron's token files")
    index.write_bytes(whole[:-8])
    refuses("text.idx is damaged .* bytes for .* sequences")
    index.write_bytes(whole[:17] + b"\x06" + whole[18:])
    refuses("tokens of dtype 6: write them as uint16")
    index.write_bytes(whole)
    file.write_bytes(file.read_bytes()[:-1])
    refuses("no whole number of uint16 tokens")
    file.write_bytes(file.read_bytes()[:-5])
    with MegatronTokens(tmp_path / "text", "bytes") as tokens, pytest.raises(BrokenData, match="do not ascend"):
        tokens.document_ends(0, 5)
    write_files(tmp_path / "text", [[[1, 300, 0]]])
    with MegatronTokens(tmp_path / "text", "bytes") as tokens, pytest.raises(BrokenData, match="name the tokenizer"):
        tokens.tokens(0, 3)
