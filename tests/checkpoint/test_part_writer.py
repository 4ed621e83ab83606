"""Large arrays are written in chunks, many arrays in several transactions."""

from pathlib import Path

import numpy as np
import optax
import pytest
import tensorstore as ts

from rrfp_jax.checkpoint import part_writer, reader
from rrfp_jax.checkpoint.part_writer import chunk_shape
from tests.checkpoint.states import LAYERS, bits, opened, pieces_of, restored, save, trained


def test_chunks_tile_the_piece_and_are_small_enough() -> None:
    assert chunk_shape((4096, 4096), 4, 16 << 20) == [2048, 2048]
    assert chunk_shape((6, 10), 4, 40) == [3, 1]
    assert chunk_shape((7,), 4, 8) == [1]
    assert chunk_shape((), 4, 8) == []


def test_chunks_and_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(part_writer, "_BATCH_BYTES", 200)
    monkeypatch.setattr(reader, "_BATCH_BYTES", 200)
    pieces = pieces_of([LAYERS], optax.adam(1e-3))
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 1, pieces) is None
    assert bits(restored(checkpoints, pieces)) == bits(trained(pieces, 1))
    (part,) = checkpoints.find(1).parts
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{part}/", "path": "head.params.table"}}
    array = ts.open(spec).result()
    assert array.shape == (16, 6)
    assert np.prod(array.chunk_layout.read_chunk.shape) * 4 <= 64
    checkpoints.close()
