"""Refuse optimizers that couple parameters, before they silently become one optimizer per chunk.

Every chunk is updated on its own, from its own gradients. That equals one update of the whole model only if the
optimizer treats every parameter array by itself, as AdamW, Lion or Adafactor do. A clip by global norm inside the optax
chain would clip each chunk by its own norm instead. So the optimizer's update is traced on the parameters of the whole
model, and it is followed which arrays each result depends on, through the optimizer's state and over any number of
steps.

Every value of the trace carries a set of labels, written as the bits of an integer; an equation's outputs get the
labels of all its inputs. Calls, conditionals and loops are followed inside, loops until nothing changes any more. What
is unknown mixes everything: the answer may name too many dependencies, never too few.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import optax

from rrfp_jax.programs.specs import Specs, describe, spec_of
from rrfp_jax.programs.splitting.versions import called_jaxpr, scan_shape

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


def output_labels(jaxpr: jex.Jaxpr, labels: Sequence[int]) -> list[int]:
    """The labels of the outputs of ``jaxpr`` when its inputs carry ``labels``; its constants carry none."""
    known: dict[Any, int] = dict(zip(jaxpr.invars, labels, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, jex.Literal) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: jex.JaxprEqn, labels: list[int]) -> list[int]:
    match eqn.primitive.name:
        case "cond":
            return _cond(eqn.params, labels)
        case "while":
            return _while(eqn.params, labels)
        case "scan":
            return _scan(eqn, labels)
    called = called_jaxpr(eqn)
    if called is not None:
        return output_labels(_open(called), labels)
    return [reduce(or_, labels, 0)] * len(eqn.outvars)


def _cond(params: dict[str, Any], labels: list[int]) -> list[int]:
    predicate, operands = labels[0], labels[1:]
    branches = [output_labels(_open(branch), operands) for branch in params["branches"]]
    return [predicate | reduce(or_, outputs, 0) for outputs in zip(*branches, strict=True)]


def _while(params: dict[str, Any], labels: list[int]) -> list[int]:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = labels[:num_cond], labels[num_cond : num_cond + num_body]
    carry = labels[num_cond + num_body :]
    while True:
        (predicate,) = output_labels(_open(params["cond_jaxpr"]), cond_consts + carry)
        body = output_labels(_open(params["body_jaxpr"]), body_consts + carry)
        grown = [old | new | predicate for old, new in zip(carry, body, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _scan(eqn: jex.JaxprEqn, labels: list[int]) -> list[int]:
    num_consts, num_carry = scan_shape(eqn)
    consts, carry = labels[:num_consts], labels[num_consts : num_consts + num_carry]
    sliced = labels[num_consts + num_carry :]
    while True:
        outputs = output_labels(_open(eqn.params["jaxpr"]), consts + carry + sliced)
        grown = [old | new for old, new in zip(carry, outputs, strict=False)]
        if grown == carry:
            return carry + outputs[num_carry:]
        carry = grown


def _open(jaxpr: Any) -> jex.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)
