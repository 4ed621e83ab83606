"""One of two processes that train together; started by ``test_programs_two_processes.py``.

Arguments: rank, address of the coordinator, file for the results. A case puts either the two devices of every unit or
the two replicas of every stage on different processes.
"""

import pickle
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rrfp_jax.models.model import language_model
from rrfp_jax.programs.agreement import StageReport
from rrfp_jax.programs.stage_devices import StageDevices, connect
from rrfp_jax.programs.state import initial_state
from tests.programs.grids import GridTrainer, views
from tests.programs.test_grids import BATCHES, CONFIG, OPTIMIZER, chunks_of, graph_of

CASES: dict[str, dict[str, Any]] = {
    "tensor": {"split": True},
    "data": {"shard_optimizer": True, "ordered": True},
}


def gathered(report: StageReport) -> list[StageReport]:
    """The reports of both processes as one; what both say must be the same bit for bit."""
    norms = multihost_utils.process_allgather(np.array(report.squared_norms, np.float32))
    losses = multihost_utils.process_allgather(np.array(report.losses, np.float32))
    return [
        StageReport(
            squared_norms=tuple(sorted({(int(chunk), float(norm)) for chunk, norm in norms.reshape(-1, 2)})),
            losses=tuple(
                sorted({(int(m), int(c), float(loss), float(weight)) for m, c, loss, weight in losses.reshape(-1, 4)})
            ),
        )
    ]


def train(case: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and final parameters."""
    options = dict(CASES[case])
    graph = graph_of(split=options.pop("split", False))
    by_process = np.array(jax.devices()).reshape(2, 2)  # [process, stage]
    grids = [StageDevices([column] if case == "tensor" else [[device] for device in column]) for column in by_process.T]
    trainer = GridTrainer(chunks_of(), graph, grids, BATCHES[0], OPTIMIZER, gather=gathered, **options)
    connect(grids, trainer.on_meshes())
    losses = [trainer.step(batch).loss for batch in BATCHES]
    return losses, trainer.params(trainer.replicas[0])


def initial_params() -> tuple[Any, Any]:
    """The initial parameters of a chunk whose layers both processes share, and those made on one device."""
    chunks = tuple(language_model(CONFIG).split(1))
    boundary = StageDevices([[devices[0] for devices in np.array(jax.devices()).reshape(2, 2)]]).unit_sharding(0)
    state = initial_state(chunks, 0, OPTIMIZER, key=jax.random.key(7), sharding=boundary, trains=False)
    whole = jax.jit(lambda params: params, out_shardings=boundary)(state.params)
    return views(whole), jax.device_get(jax.jit(chunks[0].init)(jax.random.key(7)))


def main(rank: int, coordinator: str, results: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes=2, process_id=rank)
    with open(results, "wb") as file:
        pickle.dump({case: train(case) for case in CASES} | {"initial": initial_params()}, file)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
