"""The ground truth of training: one jitted step of the whole model, without anything of the pipeline."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.programs.chunk import Chunk, Loss, microbatch_key

Inputs = Callable[[list[Any], int], Any]


def chain_inputs(outputs: list[Any], chunk: int) -> Any:
    """The input of a chunk in a chain."""
    return outputs[chunk - 1] if chunk else None


def holding_still(chunk: Chunk, index: int) -> Chunk:
    """The chunk with its parameters constant for the microbatches whose leaf ``still`` says so."""

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        still = leaves["still"][index]
        held = jax.tree.map(lambda leaf: jnp.where(still, jax.lax.stop_gradient(leaf), leaf), params)
        return chunk.apply(held, inputs, {name: leaves[name] for name in chunk.leaves}, key=key)

    return replace(chunk, apply=apply, leaves=(*chunk.leaves, "still"), check_leaves=None)


def with_still(batch: Mapping[str, np.ndarray], pairs: Iterable[tuple[int, int]], num_chunks: int) -> dict[str, Any]:
    """The batch with a leaf that says for which chunks and microbatches :func:`holding_still` holds."""
    still = np.zeros((len(next(iter(batch.values()))), num_chunks), bool)
    for chunk, microbatch in pairs:
        still[microbatch, chunk] = True
    return {**batch, "still": still}


def train_plainly(
    chunks: Sequence[Chunk],
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    batches: Sequence[Mapping[str, np.ndarray]],
    *,
    clip_norm: float | None = None,
    inputs_of: Inputs = chain_inputs,
    frozen: Collection[str] = (),
    norms: list[float] | None = None,
    means: list[dict[str, float]] | None = None,
    seed: int | None = None,
    delay: int | Callable[[str], int] = 0,
    left_out: Collection[int] = (),
) -> tuple[list[float], dict[str, Any]]:
    """Train on ``batches`` and return the losses and the final parameters by layer name.

    ``inputs_of(outputs, chunk)`` says what a chunk reads of the outputs of the chunks before it; the layers ``frozen``
    are constants; ``norms`` gets the norm of every step's gradients, ``means`` its named sums over its weight; chunks
    that read random keys get those of ``seed``. The gradients of a step are those at the parameters before the last
    ``delay`` updates, a number or a function of the layer. The updates of the steps ``left_out`` do not take place.
    """
    layers = [list(jax.eval_shape(chunk.init, jax.random.key(0))) for chunk in chunks]
    if clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)

    def mean_loss(params: Any, batch: Mapping[str, Any], number: Any) -> Any:
        def loss_and_weight(numbered: Any) -> Any:
            outputs: list[Any] = []
            microbatch, m = numbered
            key = None if seed is None else microbatch_key(seed, number, m)
            for index, chunk in enumerate(chunks):
                own = {name: params[name] for name in layers[index]}
                leaves = {name: microbatch[name] for name in chunk.leaves}
                outputs.append(chunk.apply(own, inputs_of(outputs, index), leaves, key=key))
            return outputs[-1]

        numbers = jnp.arange(len(next(iter(batch.values()))), dtype=jnp.uint32)
        loss = Loss(*jax.lax.map(loss_and_weight, (dict(batch), numbers)))
        total = loss.weight.sum()
        return loss.loss_sum.sum() / total, {name: sums.sum() / total for name, sums in loss.named_sums.items()}

    params = jax.tree.map(np.array, dict(params))
    constant = jax.tree.map(jnp.asarray, {name: params.pop(name) for name in frozen})

    @jax.jit
    def step(params: Any, older: Any, state: Any, batch: Any, number: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: mean_loss({**p, **constant}, batch, number), has_aux=True)(older)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    state = optimizer.init(params)
    delays = {name: delay(name) if callable(delay) else delay for name in params}
    losses, versions = [], [params] * (1 + max(delays.values()))
    for number, batch in enumerate(batches):
        older = {name: versions[-1 - delays[name]][name] for name in params}
        updated, new_state, (loss, means_of_step), norm = step(params, older, state, batch, jnp.uint32(number))
        if number not in left_out:
            params, state = updated, new_state
        versions = [*versions[1:], params]
        losses.append(float(loss))
        if norms is not None:
            norms.append(float(norm))
        if means is not None:
            means.append({name: float(mean) for name, mean in means_of_step.items()})
    return losses, {**params, **constant}


def assert_same_training(
    losses: Sequence[float], params: Any, expected_losses: Sequence[float], expected_params: Any
) -> None:
    """Losses within 1e-6 relative, every leaf within 1e-5 by norm of the difference over norm."""
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert jax.tree.structure(params) == jax.tree.structure(expected_params)
    for (path, leaf), expected in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected_params), strict=True):
        distance, size = np.linalg.norm(np.asarray(leaf) - np.asarray(expected)), np.linalg.norm(expected)
        assert distance <= 1e-5 * size, (jax.tree_util.keystr(path), distance, size)
