"""The ground truth of training where microbatches differ: one jitted function of the whole model for each shape."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from rrfp_jax.models.model import ChunkGraph
from tests.models.graph_of_chunks import run_graph

Microbatch = dict[str, np.ndarray]


def microbatches_of(batch: Mapping[str, Sequence[Any]]) -> list[Microbatch]:
    """The leaves that each microbatch has."""
    num = len(next(iter(batch.values())))
    return [{name: leaf[m] for name, leaf in batch.items() if leaf[m] is not None} for m in range(num)]


def batch_of(microbatches: Sequence[Microbatch]) -> dict[str, list[np.ndarray | None]]:
    """Leaves with an entry for each microbatch."""
    names = dict.fromkeys(name for microbatch in microbatches for name in microbatch)
    return {name: [microbatch.get(name) for microbatch in microbatches] for name in names}


def train_plainly(
    graph: ChunkGraph,
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    steps: Sequence[Sequence[Microbatch]],
    *,
    clip_norm: float,
    frozen: Collection[str] = (),
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms and the final parameters by layer name; the layers ``frozen`` are constants."""
    optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    params = jax.tree.map(np.array, dict(params))
    constant = {name: params.pop(name) for name in frozen}

    @jax.jit
    def gradient(params: Any, constant: Any, microbatch: Microbatch) -> Any:
        def loss_of(trained: Any) -> Any:
            return run_graph(graph, trained | constant, microbatch)

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    @jax.jit
    def update(params: Any, state: Any, grads: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda grad: grad / weight, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    state, losses, norms = optimizer.init(params), [], []
    for microbatches in steps:
        total = weight = 0.0
        grads = jax.tree.map(np.zeros_like, params)
        for microbatch in microbatches:
            (summed, own), grad = gradient(params, constant, microbatch)
            total, weight = total + float(summed), weight + float(own)
            grads = jax.tree.map(np.add, grads, grad)
        params, state, norm = update(params, state, grads, np.float32(weight))
        losses.append(total / weight)
        norms.append(float(norm))
    return losses, norms, params | constant
