"""What a step holds of frozen layers, and how it is restored where others are frozen."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.checkpoint import ChunkLayers
from rrfp_jax.checkpoint._arrays import ArrayName
from rrfp_jax.programs.shapes import pick
from rrfp_jax.programs.state import ChunkState, layer_groups
from tests.checkpoint.states import LAYERS, Pieces, bits, chunk_of, cut_at, opened, restored, save, trained

ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-3, 100))


def pieces_without(frozen: set[str], *places: int, shared: frozenset[str] = frozenset()) -> Pieces:
    """The chunks of a cut, in which these layers are frozen."""
    pieces = []
    for layers in cut_at(*places):
        chunk = replace(chunk_of(layers, shared), frozen=frozenset(frozen) & set(layers))
        params = chunk.init(jax.random.key(0))
        changing = pick(params, (name for name in layers if name not in frozen))
        state = tuple(ADAMW.init(pick(changing, group)) for group in layer_groups(chunk, changing))
        target = ChunkState(params, state, jax.tree.map(jnp.zeros_like, changing))
        pieces.append((ChunkLayers(chunk, ADAMW, trains=bool(changing)), target))
    return pieces


def test_frozen_layers_are_saved_without_optimizer_state(tmp_path: Path) -> None:
    pieces = pieces_without({"embedding", "layers.0", "layers.2"}, 2)
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 3, pieces) is None
    assert bits(restored(checkpoints, pieces_without({"embedding", "layers.0", "layers.2"}, 1, 4))) == bits(
        trained(pieces, 3)
    )
    names = {name for part in checkpoints.find(3).parts.values() for name, _, _ in part.arrays}
    assert {name[0] for name in names if name[1] == "params"} == set(LAYERS)
    assert {name[0] for name in names if name[1] == "optimizer"} == {"layers.1", "layers.3", "final_norm", "head"}
    checkpoints.close()


def test_freezing_more_takes_what_is_needed(tmp_path: Path) -> None:
    everything = pieces_without(set(), 2)
    checkpoints = opened(tmp_path, everything)
    assert save(checkpoints, 3, everything) is None
    held, saved = bits(restored(checkpoints, pieces_without({"head", "layers.1"}, 3))), bits(trained(everything, 3))
    assert held == {name: saved[name] for name in held}
    assert {name for name in saved if name not in held} == {
        name for name in saved if name[0] in ("head", "layers.1") and name[1] == "optimizer"
    }
    checkpoints.close()


@pytest.mark.parametrize("places", [(2,), (4,), (1, 5)])
def test_what_trains_anew_starts_afresh_but_for_what_all_have_in_common(
    tmp_path: Path, places: tuple[int, ...]
) -> None:
    before = pieces_without({"head", "layers.1", "final_norm"}, 3)
    checkpoints = opened(tmp_path, before)
    assert save(checkpoints, 3, before) is None
    saved, leaves = bits(trained(before, 3)), {}
    for layers, state in restored(checkpoints, pieces_without({"layers.0"}, *places)):
        leaves |= layers.split(state)
    fresh = {name for name, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
    moments = {name for name in leaves if name[1] == "optimizer" and {"mu", "nu"} & set(name) and leaves[name].size}
    assert fresh >= {name for name in moments if name[0] in ("head", "layers.1", "final_norm")}
    assert all(np.asarray(leaf).tobytes() == saved[name] for name, leaf in leaves.items() if name in saved)
    counts: dict[ArrayName, int] = {name: int(leaf) for name, leaf in leaves.items() if name[-1] == "count"}
    assert {name[0] for name in counts} == set(LAYERS) - {"layers.0"}
    assert set(counts.values()) == {3}
    checkpoints.close()


def test_another_optimizer_is_still_refused(tmp_path: Path) -> None:
    (layers, state), *_ = pieces_without(set(), 2)
    checkpoints = opened(tmp_path, [(layers, state)])
    chunk = chunk_of(LAYERS[:2])
    plain = ChunkState(state.params, (optax.sgd(1.0).init(state.params),), state.accumulators)
    checkpoints.save(1, [(ChunkLayers(chunk, optax.sgd(1.0)), plain)], {})
    checkpoints.wait()
    with pytest.raises(ValueError, match="has no array embedding/optimizer/0/count: resume with the model and the opt"):
        checkpoints.restore(checkpoints.find(1), [(layers, state)])
    checkpoints.close()
