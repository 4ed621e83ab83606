"""Random small programs over a pool of (ROWS, WIDTH) arrays, with every construct that the split looks into.

A program is data: a tuple of steps. A step reads arrays of the pool by number (modulo its size) and appends one. Nested
steps run a program of their own: under `jit`, `jax.checkpoint`, a custom derivative, `lax.scan` over stacked weights,
or `cond`. All operations are smooth and bounded in effect, so that values stay of order one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.programs.splitting.zoo import Example

ROWS, WIDTH, LAYERS = 3, 4, 2


class Step(NamedTuple):
    kind: str
    first: int
    second: int
    weight: int
    body: tuple[Step, ...] = ()


Program = tuple[Step, ...]

FLAT: dict[str, Callable[[Any, jax.Array, jax.Array, int], jax.Array]] = {
    "dot": lambda p, x, y, w: x @ p["matrices"][w],
    "dot_transposed": lambda p, x, y, w: x @ p["matrices"][w].T,
    "bias": lambda p, x, y, w: x + p["vectors"][w],
    "scale": lambda p, x, y, w: jnp.tanh(x) * p["vectors"][w],
    "norm": lambda p, x, y, w: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1.0),
    "outer": lambda p, x, y, w: jnp.tanh(x @ y.T) @ y,
    "softmax": lambda p, x, y, w: jax.nn.softmax(x) * y,
    "sin": lambda p, x, y, w: jnp.sin(x),
    "add": lambda p, x, y, w: x + y,
    "gate": lambda p, x, y, w: jax.nn.sigmoid(x) * jnp.tanh(y),
    "gather": lambda p, x, y, w: x[p["rows"]] - y,
    "embed": lambda p, x, y, w: x + p["matrices"][w][p["rows"]],
    "sum": lambda p, x, y, w: x + jnp.sum(y, axis=0),
    "cumulate": lambda p, x, y, w: jnp.tanh(jnp.cumsum(x, axis=w % 2)),
    "reshape": lambda p, x, y, w: jnp.concatenate([x.reshape(WIDTH, ROWS).T, jnp.tanh(y)], axis=1)[:, 2:6],
    "sort": lambda p, x, y, w: jnp.sort(x, axis=-1) + jax.lax.stop_gradient(y),
    "where": lambda p, x, y, w: jnp.where(p["mask"], x, y),
    "merged": lambda p, x, y, w: x @ jnp.tanh(p["matrices"][w] @ p["matrices"][1 - w]),
    "half": lambda p, x, y, w: (x.astype(jnp.float32) @ p["matrices"][w].astype(jnp.float32)).astype(x.dtype),
    "constant": lambda p, x, y, w: jnp.tri(ROWS, WIDTH, dtype=x.dtype) + p["vectors"][w],
}
NESTED = ("jit", "remat", "remat_dots", "custom_vjp", "scan", "scan_reverse", "scan_shared", "cond")


@st.composite
def programs(draw: st.DrawFn, depth: int = 2) -> Program:
    """Programs of one to four steps, with nested ones down to `depth`."""
    kinds = sorted(FLAT) + (3 * list(NESTED) if depth else [])
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        first, second, weight = draw(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 1)))
        body = draw(programs(depth - 1)) if kind in NESTED else ()
        steps.append(Step(kind, first, second, weight, body))
    return tuple(steps)


def run(program: Program, params: Any, pool: list[jax.Array]) -> list[jax.Array]:
    pool = list(pool)
    for step in program:
        x, y = pool[step.first % len(pool)], pool[step.second % len(pool)]
        pool.append(FLAT[step.kind](params, x, y, step.weight) if step.kind in FLAT else _nested(step, params, x, y))
    return pool


def _nested(step: Step, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    def body(p: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        return run(step.body, p, [a, b])[-1]

    if step.kind == "jit":
        return jax.jit(body)(params, x, y)
    if step.kind == "remat":
        return jax.checkpoint(body)(params, x, y)
    if step.kind == "remat_dots":
        return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)(params, x, y)
    if step.kind == "custom_vjp":
        return _custom(body)(params["matrices"], params, x, y)
    if step.kind == "cond":
        return jax.lax.cond(jnp.sum(params["mask"]) > step.weight * 6, body, lambda p, a, b: jnp.sin(b), params, x, y)
    return _scan(step, body, params, x, y)


def _custom(body: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`body`, differentiated by a rule that hands on everything and computes the gradient by itself."""

    @jax.custom_vjp
    def function(matrices: Any, params: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        return body({**params, "matrices": matrices}, a, b)

    def backward(saved: Any, gradient: jax.Array) -> Any:
        matrices, params, a, b = saved
        _, pullback = jax.vjp(lambda m, u, v: body({**params, "matrices": m}, u, v), matrices, a, b)
        matrices_grad, a_grad, b_grad = pullback(gradient)
        return matrices_grad, None, a_grad, b_grad

    function.defvjp(lambda *args: (function(*args), args), backward)
    return function


def _scan(step: Step, body: Callable[..., jax.Array], params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    def layer(h: jax.Array, stacked: jax.Array) -> Any:
        own = params if step.kind == "scan_shared" else {**params, "matrices": [stacked, params["matrices"][1]]}
        out = jnp.tanh(body(own, h, y))
        return out, jnp.sin(out)

    final, stacks = jax.lax.scan(layer, x, params["stack"], reverse=step.kind == "scan_reverse")
    return final + jnp.sum(stacks, axis=0)


def make_example(program: Program, seed: int, *, first_chunk: bool) -> Example:
    """The program as a chunk: it returns its last two arrays. A first chunk reads integers only."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(0.5 * draw.normal(size=shape), float)  # noqa: E731
    params = {
        "matrices": [normal(WIDTH, WIDTH), normal(WIDTH, WIDTH)],
        "vectors": [normal(WIDTH), normal(WIDTH)],
        "stack": normal(LAYERS, WIDTH, WIDTH),
        "table": normal(5, WIDTH),
    }
    inputs = {
        "ids": jnp.asarray(draw.integers(0, 5, ROWS)),
        "rows": jnp.asarray(draw.integers(0, ROWS, ROWS)),
        "mask": jnp.asarray(draw.random((ROWS, WIDTH)) > 0.5),
    }
    if not first_chunk:
        inputs["x"], inputs["y"] = normal(ROWS, WIDTH), normal(ROWS, WIDTH)

    def fn(p: Any, i: Any) -> Any:
        known = {**p, "rows": i["rows"], "mask": i["mask"]}
        start = [p["table"][i["ids"]]] if first_chunk else [i["x"], i["y"]]
        return run(program, known, start)[-2:]

    return Example(fn, params, inputs)
