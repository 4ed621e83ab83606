"""Counting the work of programs: matrix products on jaxprs, and XLA's own count."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend.core

from rrfp_jax.programs.splitting import SplitBackward
from tests.programs.splitting.checks import output_gradient, reference
from tests.programs.splitting.zoo import Example


def dot_flops(function: Callable[..., Any], *args: Any) -> int:
    """Floating-point operations in matrix products; those of a loop's body count once per pass.

    XLA's cost analysis counts a loop's body once, hence this count.
    """
    return _count(jax.make_jaxpr(function)(*args))


def _count(jaxpr: Any) -> int:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_count_equation(equation) for equation in inner.eqns)


def _count_equation(equation: Any) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    passes = equation.params["length"] if equation.primitive.name == "scan" else 1
    return passes * sum(map(_count, jax.extend.core.jaxprs_in_params(equation.params)))


def xla_flops(function: Callable[..., Any], *args: Any) -> float:
    """XLA's count for the compiled program."""
    analysis = jax.jit(function).lower(*args).compile().cost_analysis()
    return float(analysis.get("flops", 0))  # no entry for a program that computes nothing


class Work(NamedTuple):
    """The count of each program of a split; `prepare` runs once per update, the others per microbatch."""

    prepare: float
    forward: float
    backward: float
    weight_gradient: float


def split_work(count: Callable[..., float], split: SplitBackward, example: Example) -> Work:
    _, params, inputs = example
    derived = jax.eval_shape(split.prepare, params)
    outputs, residuals = jax.eval_shape(partial(split.forward, derived=derived), params, inputs)
    _, weight_residuals = jax.eval_shape(partial(split.backward, derived=derived), params, residuals, outputs)
    return Work(
        count(split.prepare, params),
        count(lambda p, x, d: split.forward(p, x, derived=d), params, inputs, derived),
        count(lambda p, s, g, d: split.backward(p, s, g, derived=d), params, residuals, outputs, derived),
        count(lambda p, o, d: split.weight_gradient(p, o, derived=d), params, weight_residuals, derived),
    )


def fused_work(count: Callable[..., float], example: Example) -> float:
    """`count` of forward and backward in one program, by jax.vjp."""
    output_grad = output_gradient(jax.eval_shape(example.fn, example.params, example.inputs))
    return count(
        lambda p, x, g: reference(example._replace(params=p, inputs=x), g), example.params, example.inputs, output_grad
    )
