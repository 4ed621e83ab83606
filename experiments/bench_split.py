"""Measure the cost of splitting a backward: (I + W) / B, times of all programs, bytes handed on.

::

    python -m experiments.bench_split --repeats 30 --only wide

For each chunk the programs run in turn, again and again, so that a disturbance hits all of them; medians are printed.
B is the fused backward from the same residuals, `vjp` the pullback that `jax.vjp` itself returns as a separate program.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.programs.splitting import SplitBackward, split_backward


class Case(NamedTuple):
    """A stack of transformer blocks: `layers` of `width`, four heads, over `batch` x `tokens`."""

    layers: int
    width: int
    batch: int
    tokens: int
    scan: bool = False
    remat: str = "none"


CASES = {
    "wide: 2 blocks of width 512": Case(2, 512, 4, 128),
    "wide: the same, scan": Case(2, 512, 4, 128, scan=True),
    "wide: the same, dots saved": Case(2, 512, 4, 128, remat="dots"),
    "wide: the same, full remat": Case(2, 512, 4, 128, remat="full"),
    "tiny: 8 blocks of width 64": Case(8, 64, 4, 64),
    "tiny: the same, scan": Case(8, 64, 4, 64, scan=True),
    "tiny: the same, scan and full remat": Case(8, 64, 4, 64, scan=True, remat="full"),
}


PROGRAMS = ("F", "I", "W", "B", "vjp")


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Applies pre-norm attention with four heads, then a gelu layer of four times the width."""

    def norm(h: jax.Array, scale: jax.Array) -> jax.Array:
        return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * scale

    u = norm(x, p["norm_1"])
    query, key, value = (jnp.reshape(u @ p[name], (*u.shape[:2], 4, -1)) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9))
    x = x + jnp.reshape(jnp.einsum("bhts,bshd->bthd", weights, value), x.shape) @ p["o"]
    return x + jax.nn.gelu(norm(x, p["norm_2"]) @ p["up"] + p["bias"]) @ p["down"]


def init_block(key: jax.Array, width: int) -> dict[str, jax.Array]:
    keys = dict(zip(("q", "k", "v", "o", "up", "down"), jax.random.split(key, 6), strict=True))
    sizes = {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: jax.random.normal(k, sizes.get(name, (width, width))) / width**0.5 for name, k in keys.items()}
    return params | {"norm_1": jnp.ones(width), "norm_2": jnp.ones(width), "bias": jnp.zeros(4 * width)}


def build(case: Case) -> tuple[Callable[[Any, Any], Any], Any, jax.Array]:
    """Returns (fn, params, inputs) of a case."""
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_saveable}
    layer = block if case.remat == "none" else jax.checkpoint(block, policy=policies[case.remat])
    params: Any = [init_block(key, case.width) for key in jax.random.split(jax.random.key(0), case.layers)]
    inputs = jax.random.normal(jax.random.key(1), (case.batch, case.tokens, case.width))
    if case.scan:
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        return (lambda p, x: jax.lax.scan(lambda h, q: (layer(q, h), None), x, p)[0]), params, inputs

    def fn(layers: Any, x: jax.Array) -> jax.Array:
        for p in layers:
            x = layer(p, x)
        return x

    return fn, params, inputs


def programs(
    split: SplitBackward, fn: Callable[[Any, Any], Any], params: Any, inputs: jax.Array
) -> dict[str, Callable[[], Any]]:
    """Returns the jitted programs, each bound to its arguments and compiled."""
    outputs, residuals = jax.jit(split.forward)(params, inputs)
    gradient = jnp.ones_like(outputs)
    backward, weight_gradient = jax.jit(split.backward), jax.jit(split.weight_gradient)
    _, weight_residuals = backward(params, residuals, gradient)
    _, pullback = jax.jit(lambda p, x: jax.vjp(fn, p, x))(params, inputs)
    fused, pull = jax.jit(split.full_backward), jax.jit(lambda pb, g: pb(g))
    forward = jax.jit(split.forward)
    bound: dict[str, Callable[[], Any]] = {
        "F": lambda: forward(params, inputs),
        "I": lambda: backward(params, residuals, gradient),
        "W": lambda: weight_gradient(params, weight_residuals),
        "B": lambda: fused(params, residuals, gradient),
        "vjp": lambda: pull(pullback, gradient),
    }
    for program in bound.values():
        jax.block_until_ready(program())
    return bound


def medians_ms(bound: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in bound}
    for _ in range(repeats):
        for name, program in bound.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def bench_split(console: Console, *, repeats: int = 30, only: str = "") -> None:
    """Prints one line per case whose name contains ``only``, the medians of so many runs."""
    table = Table(title=f"split backward, medians of {repeats} runs", title_justify="left")
    for heading in ("chunk", *PROGRAMS, "(I+W)/B", "residuals MB", "for W MB", "jax.vjp MB"):
        table.add_column(f"{heading} ms" if heading in PROGRAMS else heading, justify="right", no_wrap=True)
    table.columns[0].justify = "left"
    for name, case in CASES.items():
        if only in name:
            table.add_row(name, *_figures(case, repeats))
    console.print(table)


def _figures(case: Case, repeats: int) -> list[str]:
    fn, params, inputs = build(case)
    split = split_backward(fn, params, inputs)
    ms = medians_ms(programs(split, fn, params, inputs), repeats)
    report = split.report
    sizes = (report.residual_bytes, report.weight_residual_bytes, report.vjp_bytes)
    ratio = (ms["I"] + ms["W"]) / ms["B"]
    return [*(f"{ms[name]:.2f}" for name in PROGRAMS), f"{ratio:.3f}", *(f"{size / 1e6:.1f}" for size in sizes)]


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    if arguments.repeats < 1:
        raise BadInput(f"repeats is {arguments.repeats}: give at least 1")
    if not any(arguments.only in name for name in CASES):
        raise BadInput(f"only {arguments.only!r} is part of no case: choose among {'; '.join(CASES)}")
    use_cpu(1)
    bench_split(make_console(), repeats=arguments.repeats, only=arguments.only)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_split", __doc__)
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="runs of each program")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the cases whose name contains this (default: all)"
    )
    return parser


if __name__ == "__main__":
    run_command(main)
