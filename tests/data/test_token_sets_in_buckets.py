"""Token sets in an object store: the same tokens, of which only the blocks that are asked for are copied."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrfp_jax.data import tokens as tokens_module
from rrfp_jax.data.config import record_values
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizer_files import kind_of_tokens
from rrfp_jax.data.tokens import TokenSet, write_token_set
from rrfp_jax.storage import BucketPath, located, move_up


def test_tokens_come_as_from_a_disk_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_BLOCK_BYTES", 64)
    documents = [np.random.default_rng(number).integers(1, 256, 20 + number) for number in range(30)]
    write_token_set(tmp_path / "set", documents)
    place = located("memory://sets/mine")
    assert isinstance(place, BucketPath)
    with TokenSet(tmp_path / "set") as here:
        expected = here.tokens(0, here.num_tokens)
        fingerprint = here.fingerprint
    move_up(tmp_path / "set", place, last=("header.json",))
    assert record_values({"path": str(place), "length": 8})[0].__name__ == "TokensConfig"
    assert kind_of_tokens(str(place), None).is_bytes

    requests: list[Any] = []
    call = BucketPath._call
    monkeypatch.setattr(
        BucketPath,
        "_call",
        lambda path, method, *args, **options: (requests.append(options), call(path, method, *args, **options))[1],
    )
    with TokenSet(str(place)) as there:
        assert there.fingerprint == fingerprint
        requests.clear()
        np.testing.assert_array_equal(there.tokens(100, 110), expected[100:110])
        assert [(each["start"], each["end"]) for each in requests] == [(192, 256)]
        np.testing.assert_array_equal(there.tokens(96, 128), expected[96:128])
        assert len(requests) == 1
        np.testing.assert_array_equal(there.tokens(0, there.num_tokens), expected)
        there.check()
        assert there.document(29) == (len(expected) - 50, len(expected))
    with TokenSet(place) as there:
        (place / "tokens.bin").unlink()
        with pytest.raises(BrokenData, match=r"cannot read memory://sets/mine/tokens\.bin"):
            there.tokens(0, 10)
    place.remove_tree()
    with pytest.raises(ValueError, match="token set memory://sets/mine does not exist"):
        TokenSet(place)


def test_other_files_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"path is s3://b/x.jsonl, and of an object store only token sets are read"):
        record_values({"path": "s3://b/x.jsonl"})
