"""A driver that trains with the programs of stages x data x tensor by hand, task after task.

Every chunk is a stage. Of a process group each process runs the units of which it holds devices, all in the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Compiled

from rrfp_jax.programs.agreement import StageReport, Verdict, agree
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.compiled import CompiledChunk, Variant
from rrfp_jax.programs.remat import Remat
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.programs.state import initial_shared_state, initial_state
from rrfp_jax.programs.updates import StageUpdates
from rrfp_jax.schedules import PipelineGraph
from tests.programs.toys import microbatch_spec

Unit = tuple[int, int]
"""(replica, chunk)."""


def grids_of(devices: Sequence[jax.Device], num_stages: int, data: int, tensor: int) -> list[StageDevices]:
    """One grid per stage, the tensor axis innermost, then data, then stages."""
    rows = np.array(devices[: num_stages * data * tensor]).reshape(num_stages, data, tensor)
    return [StageDevices(list(stage)) for stage in rows]


class GridTrainer:
    """A whole training run of a chain of chunks, one stage each."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        graph: PipelineGraph,
        grids: Sequence[StageDevices],
        batch: dict[str, np.ndarray],
        optimizer: optax.GradientTransformation,
        *,
        remat: Remat = "none",
        ordered: bool = False,
        shard_optimizer: bool = False,
        gather: Callable[[StageReport], Iterable[StageReport]] = lambda report: [report],
    ) -> None:
        self.graph, self.grids, self.gather = graph, grids, gather
        self.replicas = grids[0].local_replicas
        shapes = derive_shapes(chunks, graph, microbatch_spec(batch))
        options = {"optimizer": optimizer, "ordered": ordered, "shard_optimizer": shard_optimizer}
        self.joint = [
            StageUpdates(c, chunks, graph, devices=grid, **options) if grid.data > 1 else None
            for c, grid in enumerate(grids)
        ]
        self.programs: dict[Unit, CompiledChunk] = {}
        for c, grid in enumerate(grids):
            plan = plan_chunk(c, chunks, graph, shapes, remat=remat)
            for r in self.replicas:
                self.programs[r, c] = CompiledChunk(
                    c,
                    chunks,
                    graph,
                    [Variant(shapes[c], plan)],
                    optimizer=optimizer,
                    sharding=grid.unit_sharding(r),
                    stage=self.joint[c],
                )
        self.held = {
            (r, c): initial_state(
                tuple(chunks),
                c,
                optimizer,
                key=jax.random.key(0),
                sharding=each.sharding,
                trains=True,
                shard_optimizer=shard_optimizer,
            )
            for (r, c), each in self.programs.items()
        }
        self.shared_states = [
            initial_shared_state(chunks, c, optimizer, grids[c], self.of_replicas(c, "params"))
            if joint is not None and joint.shards_optimizer
            else ()
            for c, joint in enumerate(self.joint)
        ]

    def on_meshes(self) -> dict[Mesh, list[Compiled]]:
        """The compiled programs that run on several devices, by their mesh."""
        programs: dict[Mesh, list[Compiled]] = {}
        for (_, c), each in self.programs.items():
            joint = self.joint[c]
            if joint is not None:
                programs[self.grids[c].mesh] = list(joint.compiled.values())
            elif each.shardings.mesh is not None:
                programs[each.shardings.mesh] = list(each.compiled.values())
        return programs

    def of_replicas(self, chunk: int, field: str) -> dict[int, Any]:
        """A field of the state of every local replica of a chunk."""
        return {r: getattr(self.held[r, chunk], field) for r in self.replicas}

    def step(self, batch: dict[str, np.ndarray], *, apply: bool = True) -> Verdict:
        """One step; every replica runs its share of the microbatches."""
        for each, held in self.held.items():
            held.derived = self.programs[each].prepare(held.params)
        per_replica = self.graph.num_microbatches // self.grids[0].data
        losses = [
            (m, *self._run_microbatch(r, m, batch))
            for r in self.replicas
            for m in range(r * per_replica, (r + 1) * per_replica)
        ]
        report = StageReport(squared_norms=self.reduce(), losses=tuple(losses))
        verdict = agree(self.gather(report), clip_norm=1.0)
        self.update(verdict.scale, apply and verdict.apply)
        return verdict

    def _run_microbatch(self, replica: int, microbatch: int, batch: dict[str, np.ndarray]) -> tuple[int, float, float]:
        """(chunk, loss sum, weight)."""
        last, stashes, owed = self.graph.num_chunks - 1, {}, {}
        outputs: Any = None
        for c in range(last + 1):
            programs, held = self.programs[replica, c], self.held[replica, c]
            leaves = {name: batch[name][microbatch] for name in programs.chunk.leaves}
            inputs = () if c == 0 else (views(outputs),)
            outputs, stashes[c] = programs.of().forward(held.params, inputs, leaves, derived=held.derived)
        grads: tuple[Any, ...] = ()
        for c in reversed(range(last + 1)):
            programs, held = self.programs[replica, c], self.held[replica, c]
            if c in self.graph.split:
                grads, owed[c] = programs.of().input_gradient(held.params, stashes.pop(c), grads, derived=held.derived)
            else:
                grads, held.accumulators, _ = programs.of().backward(
                    held.params, stashes.pop(c), grads, held.accumulators, derived=held.derived
                )
            grads = views(grads)
        for c, debt in owed.items():
            programs, held = self.programs[replica, c], self.held[replica, c]
            held.accumulators, _ = programs.of().weight_gradient(
                held.params, debt, held.accumulators, derived=held.derived
            )
        loss, weight = outputs
        return last, float(loss), float(weight)

    def reduce(self) -> tuple[tuple[int, float], ...]:
        """R of every chunk: (chunk, squared norm)."""
        layers = {unit: each.shared_layers(self.held[unit].accumulators) for unit, each in self.programs.items()}
        self.gradients: list[Any] = []
        norms = []
        for c, joint in enumerate(self.joint):
            sharing = self.graph.sharing(c)
            shared = {
                r: tuple(moved(layers[r, o], self.programs[r, c].shardings.params) for o in sharing)
                if len(sharing) > 1
                else ()
                for r in self.replicas
            }
            if joint is None:
                (r,), gradients = self.replicas, None
                sums = {}
                sums[r], norm = self.programs[r, c].updates.reduce(self.held[r, c].accumulators, shared[r])
            else:
                sums, gradients, norm = joint.reduce(self.of_replicas(c, "accumulators"), shared)
            for r in self.replicas:
                self.held[r, c].accumulators = sums[r]
            self.gradients.append(gradients)
            norms.append((c, float(norm)))
        return tuple(norms)

    def update(self, scale: float, apply: bool) -> None:
        """U of every chunk."""
        for c, joint in enumerate(self.joint):
            if joint is not None and joint.shards_optimizer:
                params, self.shared_states[c] = joint.update(
                    self.of_replicas(c, "params"), self.gradients[c], self.shared_states[c], scale, apply
                )
                for r in self.replicas:
                    self.held[r, c].params = params[r]
                continue
            for r in self.replicas:
                held = self.held[r, c]
                held.params, held.optimizer_state, held.accumulators = self.programs[r, c].updates.update(
                    held.params, held.optimizer_state, held.accumulators, scale, apply
                )

    def params(self, replica: int) -> dict[str, Any]:
        """The whole model's parameters in one replica."""
        whole: dict[str, Any] = {}
        for c in range(self.graph.num_chunks):
            gathered = jax.jit(lambda params: params, out_shardings=self.programs[replica, c].sharding)
            whole |= {n: v for n, v in views(gathered(self.held[replica, c].params)).items() if n not in whole}
        return whole


def views(tree: Any) -> Any:
    """What is whole on every device, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), tree)


def moved(layers: dict[str, Any], shardings: dict[str, Any]) -> dict[str, Any]:
    """The shards of some layers on the devices of another unit that is cut in the same way."""
    return {name: jax.tree.map(_moved, layer, shardings[name]) for name, layer in layers.items()}


def _moved(array: jax.Array, sharding: Any) -> jax.Array:
    devices = [d for d in sharding._device_assignment if d.process_index == jax.process_index()]
    shards = sorted(array.addressable_shards, key=lambda s: array.sharding._device_assignment.index(s.device))
    pieces = [jax.device_put(shard.data, device) for shard, device in zip(shards, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)
