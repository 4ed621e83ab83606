"""Finds out, before anything is updated, that an optimizer's next update cannot be finite, whatever the gradients are.

A learning rate that is not a number, or a schedule that divides by zero at some step, spoils finite gradients. All
stages have to leave such a step out together, so the fault must be known when they agree on a step, before the clip
factor is known and without memory for a second copy of the parameters. Hence the update is not computed but followed:
values that come from the scalars of the optimizer's state alone, such as a count and a schedule's rate at this count,
are computed, and of every other value it is known at most that none of its elements is finite. Sums and products
keep that, and a division by zero makes it; operations that are not listed forget it. So no update that may be finite is
called a fault. An update that overflows because of its gradients is not seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax

from rrfp_jax.programs.jaxprs import called_jaxpr, open_jaxpr
from rrfp_jax.programs.shapes import Specs
from rrfp_jax.programs.splitting.ir import Apply

_LARGEST = 64
"""Number of elements of the largest array that is computed."""
_ANY = {"add", "sub", "mul", "add_any", "dot_general"}
"""Operations whose result has no finite element if any operand has none."""
_SAME = {"neg", "abs", "sqrt", "copy", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose"}
_SAME |= {"reduce_sum", "expand_dims", "stop_gradient"}

Flag = Any
"""A flag: False, or a traced truth value that says whether surely no element of an array is finite."""


class _Unknown:
    """An array that is not computed."""

    def __init__(self, is_spoilt: Flag) -> None:
        self.is_spoilt = is_spoilt


def scalars_of(state: Any) -> list[Any]:
    """Returns the scalars of an optimizer's state."""
    return [leaf for leaf in jax.tree.leaves(state) if not leaf.shape]


def update_fault(optimizer: optax.GradientTransformation, params: Specs) -> Callable[[Sequence[Any]], Flag]:
    """Returns ``fault(scalars)``, which tells from the scalars of an optimizer's state whether its next update of some
    of ``params`` cannot be finite."""
    state = jax.eval_shape(optimizer.init, params)
    update = jax.make_jaxpr(optimizer.update)(params, state, params)
    num_params = len(jax.tree.leaves(params))

    def fault(scalars: Sequence[Any]) -> Flag:
        rest = iter(scalars)
        known = [_Unknown(False) if leaf.shape else next(rest) for leaf in jax.tree.leaves(state)]
        unknown = [_Unknown(False)] * num_params
        updates = _run(update, [*unknown, *known, *unknown])[:num_params]
        sizes = [var.aval.size for var in open_jaxpr(update).outvars[:num_params]]
        return any_flag(*(_flag(each) for each, size in zip(updates, sizes, strict=True) if size))

    return fault


def _run(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    parts = open_jaxpr(jaxpr)
    known: dict[Any, Any] = dict(zip(parts.invars, inputs, strict=True))
    known.update(zip(parts.constvars, (_held(const) for const in parts.consts), strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in parts.equations:
        known.update(zip(eqn.outvars, _equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in parts.outvars]


def _held(value: Any) -> Any:
    return value if jnp.size(value) <= _LARGEST else _Unknown(_flag(value))


def _equation(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    is_small = all(getattr(var.aval, "size", 1) <= _LARGEST for var in eqn.outvars)
    if is_small and not eqn.effects and not any(isinstance(each, _Unknown) for each in inputs):
        return Apply(primitive=eqn.primitive, params=eqn.params, context=eqn.ctx, effectful=False).run(*inputs)
    if (called := called_jaxpr(eqn)) is not None:
        return _run(called, inputs)
    if eqn.primitive.name == "cond":
        branches = zip(*(_run(branch, inputs[1:]) for branch in eqn.params["branches"]), strict=True)
        return [_Unknown(_chosen(inputs[0], choices)) for choices in branches]
    return [_Unknown(_flag_of_result(eqn.primitive.name, inputs))] * len(eqn.outvars)


def _flag_of_result(name: str, inputs: list[Any]) -> Flag:
    flags = [_flag(each) for each in inputs]
    if name in _ANY:
        return any_flag(*flags)
    if name == "select_n":
        return _chosen(inputs[0], inputs[1:])
    if name == "div" and not isinstance(divisor := inputs[1], _Unknown):
        return any_flag(flags[0], _all(jnp.isnan(divisor) | (divisor == 0)))
    return flags[0] if name in _SAME or name == "div" else False


def _chosen(which: Any, choices: Sequence[Any]) -> Flag:
    """Returns the flag of the value that an index or a truth value chooses."""
    flags = [_flag(each) for each in choices]
    if all(flag is False for flag in flags):
        return False
    if isinstance(which, _Unknown) or jnp.size(which) != 1:
        return False if any(flag is False for flag in flags) else functools.reduce(jax.lax.bitwise_and, flags)
    index = jnp.clip(jnp.asarray(which).reshape(()).astype(jnp.int32), 0, len(flags) - 1)
    return jnp.stack([jnp.asarray(flag) for flag in flags])[index]


def _flag(value: Any) -> Flag:
    if isinstance(value, _Unknown):
        return value.is_spoilt
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return False
    return _all(jax.lax.bitwise_not(jnp.isfinite(value)))


def _all(truths: Any) -> Flag:
    return jnp.all(truths) if jnp.ndim(truths) else truths


def any_flag(*flags: Flag) -> Flag:
    """Returns False if all flags are False, else a traced truth value that says whether any flag is true."""
    found = [flag for flag in flags if flag is not False]
    # Not by `jnp.any`: each call would cost a trace of its own, and every layer makes some.
    return functools.reduce(jax.lax.bitwise_or, found) if found else False
