"""Saving and restoring on the devices of one process."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rrfp_jax.checkpoint import Checkpoints, ChunkLayers, Owner, Unusable, _checkpoints, _records, layer_owners
from rrfp_jax.layout import Layout
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.state import ChunkState
from tests.checkpoint.states import (
    LAYERS,
    Pieces,
    bits,
    chunk_of,
    cut_at,
    newest_step,
    opened,
    pieces_of,
    restored,
    save,
    trained,
)

ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-3, 100))


def spread(pieces: Pieces, axis: str, mesh: Mesh) -> Pieces:
    """Every array cut along its first dimension that the axis divides."""

    def place(leaf: jax.Array) -> jax.Array:
        dims = [dim for dim, size in enumerate(leaf.shape) if size and size % mesh.shape[axis] == 0]
        spec = PartitionSpec(*[axis if dims[:1] == [dim] else None for dim in range(leaf.ndim)])
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    for _, state in pieces:
        state.params, state.optimizer_state, state.accumulators = jax.tree.map(
            place, (state.params, state.optimizer_state, state.accumulators)
        )
    return pieces


@settings(max_examples=6)
@given(
    first=st.sets(st.integers(1, len(LAYERS) - 1), max_size=4).map(sorted),
    second=st.sets(st.integers(1, len(LAYERS) - 1), max_size=4).map(sorted),
)
def test_any_cut_restores_into_any_other_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, first: list[int], second: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("run")
    before, after = (pieces_of(cut_at(*places), ADAMW) for places in (first, second))
    checkpoints = opened(directory, before)
    assert save(checkpoints, 10, before) is None
    checkpoints.close()
    resumed = opened(directory, after)
    pieces = restored(resumed, after)
    assert bits(pieces) == bits(trained(before, 10))
    for (_, state), (_, target) in zip(pieces, after, strict=True):
        jax.tree.map(_same_place, (state.params, state.optimizer_state), (target.params, target.optimizer_state))
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.accumulators))
    resumed.close()


def _same_place(one: jax.Array, other: jax.Array) -> None:
    assert one.sharding == other.sharding


@pytest.mark.one_in(5)
@pytest.mark.parametrize("saved", ["one", "tensor", "grid"])
@pytest.mark.parametrize("wanted", ["one", "tensor", "grid", "data"])
def test_any_sharding_restores_into_any_other(tmp_path: Path, saved: str, wanted: str) -> None:
    grid = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    line = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    meshes = {"tensor": (line, "tensor"), "grid": (grid, "tensor"), "data": (grid, "data")}

    def pieces(kind: str) -> Pieces:
        made = pieces_of([LAYERS], ADAMW)
        return made if kind == "one" else spread(made, meshes[kind][1], meshes[kind][0])

    before, after = pieces(saved), pieces(wanted)
    checkpoints = opened(tmp_path, before)
    assert save(checkpoints, 3, before) is None
    assert bits(restored(checkpoints, after)) == bits(trained(before, 3))
    checkpoints.close()


def test_specs_are_targets_too_and_typed_keys_come_back(tmp_path: Path) -> None:
    noisy = optax.chain(optax.add_noise(1.0, 0.9, key=jax.random.key(5)), optax.adam(1e-3))
    pieces = pieces_of(cut_at(3), noisy)
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 1, pieces) is None

    def spec(leaf: jax.Array) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    for _, state in pieces:
        state.params, state.optimizer_state = jax.tree.map(spec, (state.params, state.optimizer_state))
    after = restored(checkpoints, pieces)
    assert bits(after) == bits(trained(pieces_of(cut_at(3), noisy), 1))
    checkpoints.close()


def test_arrays_may_be_given_away_as_soon_as_save_returns(tmp_path: Path) -> None:
    pieces = pieces_of(cut_at(2, 4), ADAMW)
    expected = bits(pieces)
    checkpoints = opened(tmp_path, pieces)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)
    states = trained(pieces, 8)
    expected = bits(states)
    checkpoints.save(8, states, {"step": 8})
    for _, state in states:
        spoil((state.params, state.optimizer_state))
    assert bits(restored(checkpoints, pieces)) == expected
    checkpoints.close()


def test_a_shared_layer_is_written_once_and_restored_into_all_its_copies(tmp_path: Path) -> None:
    shared = frozenset(["embedding"])
    cut = [("embedding", "layers.0"), ("head", "embedding")]
    pieces = trained(pieces_of(cut, ADAMW, shared=shared), 2)
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 2, pieces) is None
    found = checkpoints.find(2)
    (part,) = found.parts.values()
    assert sum(name[:2] == ("embedding", "params") for name, *_ in part.arrays) == 1
    assert bits(restored(checkpoints, pieces)) == bits(pieces)
    untied = pieces_of([("embedding", "layers.0", "head")], ADAMW)
    assert bits(restored(checkpoints, untied)) == bits(pieces)
    checkpoints.close()


def test_of_replicas_the_copy_on_the_owner_s_device_is_written(tmp_path: Path) -> None:
    places: list[Sharding] = [SingleDeviceSharding(device) for device in jax.devices()[:2]]
    replicas = pieces_of([LAYERS, LAYERS], ADAMW, places)
    wrong, right = trained(replicas[:1], 1)[0], trained(replicas[1:], 2)[0]
    owners = {layer: Owner(ranks=(0,), device=jax.devices()[1]) for layer in LAYERS}
    checkpoints = Checkpoints(tmp_path, owners)
    checkpoints.save(2, [wrong, right], {"step": 2})
    assert bits(restored(checkpoints, replicas[:1])) == bits([right])
    checkpoints.close()


def test_plain_orbax_reads_a_part(tmp_path: Path) -> None:
    pieces = pieces_of([LAYERS], ADAMW)
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 1, pieces) is None
    (path,) = checkpoints.find(1).parts
    assert path.name == "embedding"
    tree = ocp.PyTreeCheckpointer().restore(path)
    assert set(tree) == set(LAYERS)
    table = trained(pieces, 1)[0][1].params["head"]["table"]
    assert np.array_equal(tree["head"]["params"]["table"], table)
    checkpoints.close()


def test_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    pieces = pieces_of([LAYERS[:3]], ADAMW)
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 1, pieces) is None
    found = checkpoints.find(1)
    with pytest.raises(ValueError, match=r"has no layer head: resume with the model and the optimizer"):
        checkpoints.restore(found, pieces_of([("layers.0", "head")], ADAMW))
    with pytest.raises(ValueError, match=r"has no array layers\.0/optimizer/0/trace/"):
        checkpoints.restore(found, pieces_of([["layers.0"]], optax.sgd(1e-3, momentum=0.9)))
    ((layers, state),) = pieces_of([["layers.0"]], ADAMW)
    state.params["layers.0"]["mlp"]["bias"] = jnp.zeros(9)
    with pytest.raises(ValueError, match=r"bias is float32\[8\] in .*step_00000001 and float32\[9\] in this run"):
        checkpoints.restore(found, [(layers, state)])
    checkpoints.close()


def test_mistakes_of_the_caller_are_named_at_once(tmp_path: Path) -> None:
    pieces = pieces_of(cut_at(3), ADAMW)
    checkpoints = opened(tmp_path, pieces)
    with pytest.raises(ValueError, match="plain data only"):
        checkpoints.save(1, pieces, {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"rank 0 is to write final_norm, head, layers.2, layers.3: give the states"):
        checkpoints.save(1, pieces[:1], {})
    with pytest.raises(ValueError, match="keep is 0"):
        opened(tmp_path, pieces, keep=0)
    with pytest.raises(Unusable, match=r"step 7 cannot be restored .*: there is no step_00000007"):
        checkpoints.find(7)
    assert checkpoints.newest() is None
    checkpoints.close()


def test_names_that_run_together_are_refused() -> None:
    from rrfp_jax.checkpoint._arrays import nested

    with pytest.raises(ValueError, match=r"layers.0/w and layers/0/w cannot be told apart"):
        nested({("layers", "0", "w"): 1, ("layers.0", "w"): 2})


def test_owners_follow_from_the_layout() -> None:
    layers = [("embedding", "layers.0"), ("layers.1",), ("head", "embedding")]
    layout = Layout(num_stages=2, data=2, tensor=2, num_ranks=4)
    devices: Any = [f"device {n}" for n in range(8)]
    owners = layer_owners(layers, [0, 1, 0], layout, devices)
    assert owners["embedding"] == owners["head"] == Owner(ranks=(0,), device=devices[0])
    assert owners["layers.1"] == Owner(ranks=(2,), device=devices[4])
    assert list(owners) == ["embedding", "layers.0", "layers.1", "head"]
    sharded = layer_owners(layers, [0, 1, 0], layout, devices, shard_optimizer=True)
    assert sharded["layers.1"] == Owner(ranks=(2, 3), device=devices[4])


def test_the_last_steps_are_kept_and_a_step_can_be_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = pieces_of([["layers.0"]], ADAMW)
    checkpoints = opened(tmp_path, pieces, keep=2)
    (tmp_path / "notes").mkdir()
    for step in (10, 20, 30, 30, 40):
        assert save(checkpoints, step, pieces) is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step_00000030", "step_00000040"]
    assert all(len(list(entry.glob("data-*"))) == 1 for entry in tmp_path.glob("step_*"))
    assert not caplog.records
    # The run goes on from step 30: what came after it belongs to a history that was given up.
    assert bits(restored(checkpoints, pieces, 30)) == bits(trained(pieces, 30))
    with caplog.at_level(logging.WARNING, "rrfp_jax"):
        assert save(checkpoints, 35, pieces) is None
    assert "step_00000040 is removed: the run went on from an earlier step" in caplog.text
    assert newest_step(checkpoints) == 35
    assert bits(restored(checkpoints, pieces)) == bits(trained(pieces, 35))
    checkpoints.close()


@pytest.mark.parametrize("call", ["_commit", "keep_last"])
@pytest.mark.parametrize("has_links", [True, False])
def test_a_process_that_stood_still_changes_nothing_after_others_have_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, has_links: bool
) -> None:
    """It stands still right after it has found that nobody else is at work, or before it removes old steps."""
    pieces = pieces_of([["layers.0"]], ADAMW)
    others, taken_over = opened(tmp_path, pieces), False

    def go_on_without() -> None:
        nonlocal taken_over
        taken_over = True
        for step in (20, 30):
            assert save(others, step, pieces) is None

    def check() -> None:
        if taken_over:
            raise ValueError("others have taken over")
        if call == "_commit":
            go_on_without()

    def keep_last(*args: Any, **options: Any) -> None:
        if not taken_over:
            go_on_without()
        _records.keep_last(*args, **options)

    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    stopped = opened(tmp_path, pieces, before_commit=check, keep=1)
    assert save(others, 10, pieces) is None
    if call == "keep_last":
        monkeypatch.setattr(_checkpoints, call, keep_last)
    if not has_links:
        monkeypatch.setattr(os, "link", link)
    failure = save(stopped, 20, pieces)
    assert failure == ("rank 0: others have taken over" if call == "_commit" else None)
    for step in (10, 20, 30):
        assert bits(restored(others, pieces, step)) == bits(trained(pieces, step))
    others.close()
    stopped.close()


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    pieces = pieces_of([["layers.0"]], ADAMW)
    checkpoints = opened(tmp_path, pieces, keep=5)
    for step in range(4):
        checkpoints.save(step, trained(pieces, step), {"step": step})
    checkpoints.close()
    again = opened(tmp_path, pieces)
    for step in range(4):
        assert bits(restored(again, pieces, step)) == bits(trained(pieces, step))
    again.close()


def test_frozen_chunks_have_no_optimizer_state(tmp_path: Path) -> None:
    ((_, state),) = pieces_of([["layers.0"]], ADAMW)
    state.optimizer_state = ()
    pieces = [(ChunkLayers(chunk_of(["layers.0"]), ADAMW, trains=False), state)]
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 1, pieces) is None
    assert bits(restored(checkpoints, pieces)) == bits(trained(pieces, 1))
    checkpoints.close()


@pytest.mark.parametrize("optimizer", [ADAMW, optax.sgd(0.1)], ids=["with counts", "without state"])
@pytest.mark.parametrize("cut", [(("a", "relu"), ("b",)), (("a", "b"), ("relu",)), (("relu",),)], ids=str)
def test_layers_without_arrays_are_saved_and_restored(
    tmp_path: Path, cut: tuple[tuple[str, ...], ...], optimizer: optax.GradientTransformation
) -> None:
    """Such as ``{"relu": {}}``, in a chunk with others or alone, and where all of a part are such."""
    pieces = []
    for names in cut:
        chunk = Chunk(
            name="bare",
            init=lambda key, names=names: {name: {} if name == "relu" else jnp.ones(3) for name in names},
            apply=lambda params, inputs, leaves, *, key: inputs,
        )
        params = chunk.init(jax.random.key(0))
        trains = names != ("relu",)
        state = (optimizer.init(params),) if trains else ()
        pieces.append((ChunkLayers(chunk, optimizer, trains=trains), ChunkState(params, state, {})))
    owners = {name: Owner(ranks=(0,), device=jax.devices()[0]) for names in cut for name in names}
    checkpoints = Checkpoints(tmp_path, owners)
    assert save(checkpoints, 4, pieces) is None
    assert bits(restored(checkpoints, pieces)) == bits(trained(pieces, 4))
