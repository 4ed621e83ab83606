"""A process that restores its own part of a large checkpoint never holds much more than that part."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from rrfp_jax.checkpoint import Checkpoints, ChunkLayers, Owner
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.state import ChunkState

MIB = 1 << 20
NUM_LAYERS, WIDTH, NUM_ARRAYS = 6, 1024, 8
LAYER_BYTES = 3 * NUM_ARRAYS * 4 * WIDTH * WIDTH
"""With the two moments of Adam."""
OPTIMIZER = optax.adam(1e-3)


def pieces_of(numbers: range) -> list[tuple[ChunkLayers, ChunkState]]:
    """Some layers and the specs of their state."""
    layer = {f"weight{n}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for n in range(NUM_ARRAYS)}
    params = {f"layers.{number}": layer for number in numbers}

    def init(key: jax.Array) -> dict[str, object]:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), params)

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding),
        (params, jax.eval_shape(OPTIMIZER.init, params)),
    )
    chunk = Chunk(name="some layers", init=init, apply=lambda params, inputs, leaves, *, key: inputs)
    return [(ChunkLayers(chunk, OPTIMIZER), ChunkState(specs[0], (specs[1],), {}))]


def checkpoints_in(folder: Path) -> Checkpoints:
    owner = Owner(ranks=(0,), device=jax.devices()[0])
    return Checkpoints(folder, {f"layers.{n}": owner for n in range(NUM_LAYERS)})


def kilobytes(what: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1])


def main() -> None:
    """Restore one layer; print by how many bytes the process grew at most."""
    checkpoints, pieces = checkpoints_in(Path(sys.argv[1])), pieces_of(range(3, 4))
    found = checkpoints.newest()
    assert found is not None
    before = kilobytes("VmHWM")
    (state,) = checkpoints.restore(found, pieces)
    jax.block_until_ready(state.params)
    print("grew by", 1024 * (kilobytes("VmHWM") - before))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of a process from /proc")
def test_restoring_one_layer_of_six(tmp_path: Path) -> None:
    checkpoints, ((layers, specs),) = checkpoints_in(tmp_path), pieces_of(range(NUM_LAYERS))
    state = layers.join({n: jnp.ones(s.shape, s.dtype) for n, s in layers.split(specs).items()}, specs)
    checkpoints.save(1, [(layers, state)], {})
    checkpoints.close()
    done = subprocess.run(
        [sys.executable, "-m", "tests.multiprocess.test_checkpoint_memory", str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growth = int(done.stdout.split()[-1])
    # Its part, what is being read at the moment (16 MiB, twice), and what the libraries take for themselves.
    assert LAYER_BYTES <= growth < LAYER_BYTES + 80 * MIB


if __name__ == "__main__":
    main()
