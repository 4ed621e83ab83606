"""One process of a run that saves and restores toy states; the tests start several of it.

    python -m tests.multiprocess.checkpoint_process RANK NUM_RANKS ADDRESS FOLDER COMMAND...

Commands are ``save LAYOUT STEP``, ``restore LAYOUT STEP`` and ``live LAYOUT NUMBER``: restore the newest step, if there
is one, and save step after step until killed. ``full LAYOUT STEP`` saves while the last rank's disk is full, and again
when it is not. In the layout ``apart`` every rank holds chunks of its own; ``together`` means that one stage spans all
ranks, which also share out the optimizer state; ``mixed`` means two layers of each kind. The variable ``CHECKPOINTS``
names the directory, else it is in the folder.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rrfp_jax.checkpoint import Checkpoints, ChunkLayers, Owner
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.storage import located
from tests.environment import of_child

Pieces = list[tuple[ChunkLayers, ChunkState]]
OPTIMIZER = optax.adamw(1e-3)
NUM_LAYERS = 4
SHAPES = {"weight": (32, 24), "bias": (6,)}


class Folder:
    """A coordinator that works through files."""

    def __init__(self, path: Path, rank: int, num_ranks: int) -> None:
        self.path, self.rank, self.num_ranks = path, rank, num_ranks
        self.living = tuple(range(num_ranks))
        path.mkdir(parents=True, exist_ok=True)

    def gather(self, name: str, data: Any = None) -> Mapping[int, Any]:
        files = {rank: self.path / f"{name} {rank}" for rank in range(self.num_ranks)}
        own = files[self.rank]
        own.with_suffix(".tmp").write_text(json.dumps(data))
        own.with_suffix(".tmp").rename(own)
        while not all(file.exists() for file in files.values()):
            time.sleep(0.01)
        return {rank: json.loads(file.read_text()) for rank, file in files.items()}


def chunk_of(numbers: tuple[int, ...]) -> Chunk:
    """A chunk of some toy layers."""

    def init(key: jax.Array) -> dict[str, Any]:
        return {f"layers.{n}": {name: jax.random.normal(key, shape) for name, shape in SHAPES.items()} for n in numbers}

    return Chunk(name=str(numbers), init=init, apply=lambda params, inputs, leaves, *, key: inputs)


def element(name: Any, step: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """What the array called ``name`` holds after ``step`` steps, the same in every layout."""
    if dtype == np.int32:
        return np.full(shape, step, dtype)
    seed = [step, *"/".join(name).encode()]
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def filled(layers: ChunkLayers, target: ChunkState, step: int) -> ChunkState:
    """A state of known numbers in the shardings of ``target``."""

    def array(name: Any, spec: Any) -> jax.Array:
        whole = element(name if spec.dtype != np.int32 else (), step, spec.shape, spec.dtype)
        return jax.make_array_from_callback(spec.shape, spec.sharding, lambda index: whole[index])

    return layers.join({name: array(name, spec) for name, spec in layers.split(target).items()}, target)


def target_of(chunk: Chunk, params: Sharding, optimizer_state: Sharding | None = None) -> ChunkState:
    """Specs of a chunk's state; vectors and scalars are whole everywhere."""
    specs = jax.eval_shape(chunk.init, jax.eval_shape(lambda: jax.random.key(0)))

    def place(sharding: Sharding) -> Any:
        def one(spec: Any) -> Any:
            whole = isinstance(sharding, NamedSharding) and len(spec.shape) < 2
            own = NamedSharding(sharding.mesh, PartitionSpec()) if whole else sharding
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=own)

        return one

    state = jax.eval_shape(OPTIMIZER.init, specs)
    return ChunkState(
        jax.tree.map(place(params), specs),
        (jax.tree.map(place(optimizer_state or params), state),),
        jax.tree.map(place(params), specs),
    )


def layout_of(name: str, rank: int, num_ranks: int) -> tuple[dict[str, Owner], Pieces]:
    """Owners of all layers, and this rank's chunks with the specs of their states."""
    devices = [next(d for d in jax.devices() if d.process_index == r) for r in range(num_ranks)]
    num_apart = {"apart": NUM_LAYERS, "together": 0, "mixed": NUM_LAYERS // 2}[name]
    cuts = [tuple(n for n in range(num_apart) if n * num_ranks // num_apart == r) for r in range(num_ranks)]
    common = tuple(range(num_apart, NUM_LAYERS))
    owners = {f"layers.{n}": Owner(ranks=(r,), device=devices[r]) for r, cut in enumerate(cuts) for n in cut}
    owners |= {f"layers.{n}": Owner(ranks=tuple(range(num_ranks)), device=devices[0]) for n in common}
    here, mesh = SingleDeviceSharding(devices[rank]), Mesh(np.array(devices), ("data",))
    # Every replica has the parameters for itself; together they have one optimizer state.
    everywhere = NamedSharding(mesh, PartitionSpec("data"))
    chunks = [(chunk_of(cuts[rank]), here), (chunk_of(common), everywhere)]
    pieces = [
        (ChunkLayers(chunk, OPTIMIZER), target_of(chunk, here, optimizer_state)) for chunk, optimizer_state in chunks
    ]
    return owners, [piece for piece in pieces if piece[0].names]


def check(layers: ChunkLayers, state: ChunkState, step: int) -> None:
    """Every element that lies here is what it should be, bit for bit."""
    for name, array in layers.split(state).items():
        whole = element(name if array.dtype != np.int32 else (), step, array.shape, array.dtype)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes(), name


def start_ranks(folder: Path, commands: list[str], num_ranks: int = 2) -> list[subprocess.Popen[str]]:
    """Start the processes of a run; each writes all it says to its ``stdout``."""
    environment = of_child() | {"JAX_PLATFORMS": "cpu"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.multiprocess.checkpoint_process"]
    return [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), address, str(folder), *commands],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def save(checkpoints: Checkpoints, pieces: Pieces, step: int) -> None:
    checkpoints.save(step, [(layers, filled(layers, target, step)) for layers, target in pieces], {"at": step})
    saved = checkpoints.wait()
    assert saved is not None
    assert saved.failure is None, saved


def restore(checkpoints: Checkpoints, pieces: Pieces) -> int:
    """The newest step, or 0; everything in it is checked."""
    found = checkpoints.newest()
    if found is None:
        return 0
    assert found.host == {"at": found.step}
    for (layers, _), state in zip(pieces, checkpoints.restore(found, pieces), strict=True):
        check(layers, state, found.step)
    return found.step


def save_on_a_full_disk(checkpoints: Checkpoints, pieces: Pieces, step: int, *, full_here: bool, last: int) -> None:
    states = [(layers, filled(layers, target, step)) for layers, target in pieces]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    checkpoints.save(step, states, {"at": step})
    saved = checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saved is not None
    assert saved.failure is not None
    assert f"rank {last}: " in saved.failure, saved
    assert "File too large" in saved.failure, saved
    save(checkpoints, pieces, step)


def live(checkpoints: Checkpoints, pieces: Pieces) -> None:
    step = restore(checkpoints, pieces)
    while True:
        step += 1
        save(checkpoints, pieces, step)
        print("committed", step, flush=True)


def main() -> None:
    rank, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    if num_ranks > 1:
        jax.distributed.initialize(sys.argv[3], num_ranks, rank)
    folder, commands = Path(sys.argv[4]), sys.argv[5:]
    for place in range(0, len(commands), 3):
        command, layout, number = commands[place : place + 3]
        owners, pieces = layout_of(layout, rank, num_ranks)
        coordinator = Folder(folder / f"gather {place} {command} {number}", rank, num_ranks)
        directory = os.environ.get("CHECKPOINTS", folder / "checkpoints")
        checkpoints = Checkpoints(located(directory), owners, coordinator=coordinator)
        if command == "live":
            live(checkpoints, pieces)
        elif command == "full":
            last = num_ranks - 1
            save_on_a_full_disk(checkpoints, pieces, int(number), full_here=rank == last, last=last)
        elif command == "save":
            save(checkpoints, pieces, int(number))
        else:
            assert restore(checkpoints, pieces) == int(number)
        checkpoints.close()


if __name__ == "__main__":
    main()
