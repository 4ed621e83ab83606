"""Refuse optimizers that couple parameters, before they silently become one optimizer per chunk.

Every chunk is updated on its own, from its own gradients. That equals one update of the whole model only if the
optimizer treats every parameter array by itself, as AdamW, Lion or Adafactor do. A clip by global norm inside the optax
chain would clip each chunk by its own norm instead. So the optimizer's update is traced on the parameters of the whole
model, and it is followed which arrays each result depends on, through the optimizer's state and over any number of
steps.
"""

from typing import Any, NamedTuple

import jax
import optax

from rrfp_jax.programs.dataflow import output_labels
from rrfp_jax.programs.specs import Specs, describe, spec_of

REMEDY = (
    "each chunk is updated on its own, so an optimizer must treat every array by itself: use clip_norm=... of the "
    "pipeline instead of optax.clip_by_global_norm, and skip_nonfinite instead of optax.apply_if_finite"
)


class _Trace(NamedTuple):
    """An optimizer as two jaxprs over flat leaves, with the shapes of its state before and after an update."""

    init: Any
    update: Any
    state: Specs
    new_state: Specs


def check_leafwise(optimizer: optax.GradientTransformation, params: Specs) -> None:
    """Raise ValueError if ``optimizer`` couples any two leaves of ``params``, naming the two.

    ``params`` holds the shapes of the whole model, as a dictionary from layer name to parameters: in a part of it a
    coupling can go unseen.
    """
    trace = _trace(optimizer, params)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    own = [1 << index for index in range(len(names))]
    state = output_labels(trace.init, own)
    while True:
        outputs = output_labels(trace.update, own + state + own)
        updates, new_state = outputs[: len(own)], outputs[len(own) :]
        if len(state) != len(new_state):
            return _check_state(trace)
        grown = [old | new for old, new in zip(state, new_state, strict=True)]
        for index, labels in enumerate(updates):
            _refuse_mixture(f"its update of {names[index]}", labels | own[index], names)
        for labels in grown:
            _refuse_mixture("its state", labels, names)
        if grown == state:
            return _check_state(trace)
        state = grown


def _trace(optimizer: optax.GradientTransformation, params: Specs) -> _Trace:
    try:
        init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
        update, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"the optimizer cannot be called as update(gradients, state, params), as the pipeline does: {error}"
        ) from error
    updates, new_state = shapes
    if len(jax.tree.leaves(updates)) != len(jax.tree.leaves(params)):
        raise ValueError("the optimizer's update returns another number of arrays than there are parameters")
    return _Trace(init.jaxpr, update.jaxpr, spec_of(state), spec_of(new_state))


def _check_state(trace: _Trace) -> None:
    before = jax.tree_util.tree_leaves_with_path(trace.state)
    after = jax.tree.leaves(trace.new_state)
    if len(before) != len(after):
        raise ValueError(f"the optimizer's state grows from {len(before)} to {len(after)} arrays in one update")
    for (path, old), new in zip(before, after, strict=True):
        if old != new:
            raise ValueError(
                f"the optimizer turns its state {jax.tree_util.keystr(path)} from {describe(old)} into "
                f"{describe(new)} in one update: shapes and dtypes must stay the same from step to step"
            )


def _refuse_mixture(what: str, labels: int, names: list[str]) -> None:
    mixed = [name for index, name in enumerate(names) if labels >> index & 1]
    if len(mixed) > 1:
        raise ValueError(f"the optimizer couples leaves: {what} depends on {mixed[0]} and {mixed[1]}; {REMEDY}")
