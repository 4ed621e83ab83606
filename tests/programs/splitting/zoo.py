"""Chunks of every kind that the split must handle, each with tiny parameters and inputs.

A case is built by a function of a random key that returns (fn, params, inputs); arrays are made in the default float
type, so that the same zoo serves float64 and float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Example(NamedTuple):
    fn: Callable[[Any, Any], Any]
    params: Any
    inputs: Any


ZOO: dict[str, Callable[[jax.Array], Example]] = {}


def example(build: Callable[[jax.Array], Example]) -> Callable[[jax.Array], Example]:
    ZOO[build.__name__] = build
    return build


def normal(key: jax.Array, *shape: int) -> jax.Array:
    seed = np.asarray(jax.random.key_data(key)).tolist()
    return jnp.asarray(0.3 * np.random.default_rng(seed).normal(size=shape), float)


def block_params(key: jax.Array, width: int, hidden: int) -> dict[str, jax.Array]:
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes |= {"up": (width, hidden), "down": (hidden, width), "up_bias": (hidden,), "scale": (width,)}
    keys = jax.random.split(key, len(shapes))
    return {name: normal(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(p: dict[str, jax.Array], x: jax.Array, heads: int) -> jax.Array:
    query, key, value = (jnp.reshape(x @ p[name], (*x.shape[:-1], heads, -1)) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / jnp.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.reshape(jnp.einsum("bhts,bshd->bthd", weights, value), x.shape) @ p["o"]


def block(p: dict[str, jax.Array], x: jax.Array, heads: int = 2) -> jax.Array:
    x = x + attention(p, norm(x, p["scale"]), heads)
    return x + jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"]


def stack_blocks(key: jax.Array, layers: int, width: int, hidden: int) -> Any:
    return jax.tree.map(
        lambda *w: jnp.stack(w), *(block_params(k, width, hidden) for k in jax.random.split(key, layers))
    )


def scan_blocks(layer: Callable[..., jax.Array]) -> Callable[[Any, Any], jax.Array]:
    return lambda params, x: jax.lax.scan(lambda h, p: (layer(p, h), None), x, params)[0]


def scanned(key: jax.Array, layer: Callable[..., jax.Array]) -> Example:
    first, second = jax.random.split(key)
    return Example(scan_blocks(layer), stack_blocks(first, 3, 8, 16), normal(second, 2, 4, 8))


@example
def mlp(key: jax.Array) -> Example:
    a, b, c = jax.random.split(key, 3)
    params = {"in": normal(a, 6, 16), "bias": normal(b, 16), "out": normal(c, 16, 5)}
    return Example(lambda p, x: jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"], params, normal(key, 4, 6))


@example
def transformer(key: jax.Array) -> Example:
    params = [block_params(k, 8, 16) for k in jax.random.split(key, 2)]
    return Example(lambda p, x: block(p[1], block(p[0], x)), params, normal(key, 2, 4, 8))


@example
def convolution(key: jax.Array) -> Example:
    def fn(p: Any, x: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        for kernel, bias in p:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims) + bias)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    params = [
        (normal(k, 3, 3, i, o), normal(k, o)) for k, i, o in zip(jax.random.split(key), (2, 4), (4, 3), strict=True)
    ]
    return Example(fn, params, normal(key, 2, 6, 6, 2))


@example
def embedding(key: jax.Array) -> Example:
    """The first chunk: integer inputs, hence no input gradient."""
    params = {"table": normal(key, 11, 8), "block": block_params(key, 8, 16)}
    tokens = jax.random.randint(key, (2, 4), 0, 11)
    return Example(lambda p, ids: block(p["block"], p["table"][ids]), params, tokens)


@example
def head(key: jax.Array) -> Example:
    """The last chunk: activations and labels in, (loss sum, weight) out."""

    def fn(p: Any, inputs: Any) -> Any:
        logits = norm(inputs["x"], p["scale"]) @ p["table"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["labels"][..., None], axis=-1)[..., 0]
        return -jnp.sum(picked * inputs["mask"]), jnp.sum(inputs["mask"]), jnp.argmax(logits, -1)

    labels = jax.random.randint(key, (2, 4), 0, 11)
    inputs = {"x": normal(key, 2, 4, 8), "labels": labels, "mask": labels > 3}
    return Example(fn, {"table": normal(key, 11, 8), "scale": normal(key, 8)}, inputs)


@example
def no_inputs(key: jax.Array) -> Example:
    return Example(lambda p, _: jnp.tanh(p["a"] @ p["b"]), {"a": normal(key, 3, 4), "b": normal(key, 4, 5)}, None)


@example
def no_params(key: jax.Array) -> Example:
    return Example(lambda _, x: jnp.tanh(x @ x.T), {}, normal(key, 3, 4))


@example
def experts(key: jax.Array) -> Example:
    """Mixture of experts: top-2 routing, dispatch by scatter into fixed capacity, combine by gather."""

    def fn(p: Any, x: jax.Array) -> Any:
        gates = jax.nn.softmax(x @ p["router"])
        top, chosen = jax.lax.top_k(gates, 2)
        top = top / jnp.sum(top, axis=-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen.reshape(-1), 4, dtype=jnp.int32)
        slot = jnp.sum((jnp.cumsum(one_hot, axis=0) - 1) * one_hot, axis=-1)
        tokens = jnp.repeat(x, 2, axis=0)
        bins = jnp.zeros((4, 6, x.shape[-1]), x.dtype).at[chosen.reshape(-1), slot].add(tokens, mode="drop")
        outs = jnp.einsum("ech,ehd->ecd", jax.nn.silu(jnp.einsum("ecd,edh->ech", bins, p["up"])), p["down"])
        back = outs.at[chosen.reshape(-1), slot].get(mode="fill", fill_value=0).reshape(*chosen.shape, -1)
        balance = jnp.sum(jnp.mean(gates, 0) * jnp.mean(jax.nn.one_hot(chosen[:, 0], 4), 0))
        return jnp.sum(back * top[..., None], axis=1), balance

    a, b, c = jax.random.split(key, 3)
    params = {"router": normal(a, 8, 4), "up": normal(b, 4, 8, 16), "down": normal(c, 4, 16, 8)}
    return Example(fn, params, normal(key, 6, 8))


@example
def scan_over_layers(key: jax.Array) -> Example:
    return scanned(key, block)


@example
def scan_in_scan(key: jax.Array) -> Example:
    params = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), stack_blocks(key, 4, 8, 16))
    inner = scan_blocks(block)
    return Example(
        lambda p, x: jax.lax.scan(lambda h, q: (inner(q, h), jnp.sum(h)), x, p), params, normal(key, 1, 3, 8)
    )


@example
def scan_with_shared_weights(key: jax.Array) -> Example:
    """W's part of the loop carries the sum over layers."""

    def fn(p: Any, x: jax.Array) -> Any:
        def step(h: jax.Array, q: Any) -> Any:
            h = jnp.tanh(h @ p["shared"] + p["bias"]) @ q
            return h, jnp.mean(h)

        return jax.lax.scan(step, x, p["own"], reverse=True)

    params = {"shared": normal(key, 6, 6), "bias": normal(key, 6), "own": normal(key, 3, 6, 6)}
    return Example(fn, params, normal(key, 4, 6))


@example
def recurrent(key: jax.Array) -> Example:
    """A scan over time: inputs are sliced, weights are shared, the carry is a pair."""

    def fn(p: Any, xs: jax.Array) -> jax.Array:
        def step(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, g = jnp.split(x @ p["x"] + h @ p["h"], 3, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jnp.tanh(c), c), c

        start = jnp.zeros((xs.shape[1], 4), xs.dtype)
        return jax.lax.scan(step, (start, start), xs)[1]

    return Example(fn, {"x": normal(key, 3, 12), "h": normal(key, 4, 12)}, normal(key, 5, 2, 3))


@example
def remat_full(key: jax.Array) -> Example:
    params = [block_params(k, 8, 16) for k in jax.random.split(key, 2)]
    layer = jax.checkpoint(block)
    return Example(lambda p, x: layer(p[1], layer(p[0], x)), params, normal(key, 2, 4, 8))


@example
def remat_dots_scan(key: jax.Array) -> Example:
    return scanned(key, jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False))


@example
def remat_full_scan(key: jax.Array) -> Example:
    return scanned(key, jax.checkpoint(block))


@example
def remat_names(key: jax.Array) -> Example:
    def layer(p: Any, x: jax.Array) -> jax.Array:
        h = checkpoint_name(jnp.tanh(x @ p["up"]), "hidden")
        return jnp.sin(h @ p["down"]) + x

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    params = {"up": normal(key, 6, 12), "down": normal(key, 12, 6)}
    return Example(jax.checkpoint(layer, policy=policy), params, normal(key, 4, 6))


@example
def custom_derivatives(key: jax.Array) -> Example:
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ w)

    product.defvjp(
        lambda x, w: (jnp.sin(x @ w), (x, w, jnp.cos(x @ w))),
        lambda saved, g: ((g * saved[2]) @ saved[1].T, saved[0].T @ (g * saved[2])),
    )

    @jax.custom_jvp
    def squash(x: jax.Array) -> jax.Array:
        return x / (1 + jnp.abs(x))

    squash.defjvp(lambda primals, tangents: (squash(*primals), tangents[0] / (1 + jnp.abs(primals[0])) ** 2))

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (squash(product(h, w)), None), product(x, p["in"]), p["layers"])[0]

    return Example(fn, {"in": normal(key, 4, 6), "layers": normal(key, 3, 6, 6)}, normal(key, 5, 4))


@example
def shared_twice(key: jax.Array) -> Example:
    def fn(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["w"])
        return jnp.tanh(h @ p["w"]) @ p["w"].T

    return Example(fn, {"w": normal(key, 6, 6)}, normal(key, 4, 6))


@example
def dropout(key: jax.Array) -> Example:
    def fn(p: Any, inputs: Any) -> jax.Array:
        x, drop_key = inputs
        h = jax.nn.relu(x @ p["up"])
        h = jnp.where(jax.random.bernoulli(drop_key, 0.7, h.shape), h / 0.7, 0)
        return h @ p["down"]

    params = {"up": normal(key, 6, 12), "down": normal(key, 12, 6)}
    return Example(fn, params, (normal(key, 4, 6), jax.random.key(5)))


@example
def remat_dropout(key: jax.Array) -> Example:
    """The recomputation reads the random key again, which is folded per layer."""

    def fn(p: Any, inputs: Any) -> jax.Array:
        x, drop_key = inputs

        @jax.checkpoint
        def layer(w: jax.Array, h: jax.Array, number: jax.Array) -> jax.Array:
            kept = jax.random.bernoulli(jax.random.fold_in(drop_key, number), 0.7, h.shape)
            return h + jnp.where(kept, jnp.tanh(h @ w) / 0.7, 0)

        return jax.lax.scan(lambda h, own: (layer(own[0], h, own[1]), None), x, (p, jnp.arange(3)))[0]

    return Example(fn, normal(key, 3, 6, 6), (normal(key, 4, 6), jax.random.key(5)))


@example
def nested_jit(key: jax.Array) -> Example:
    @jax.jit
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.jit(jnp.tanh)(x @ w)

    return Example(lambda p, x: layer(p[1], layer(p[0], x)), [normal(key, 6, 6), normal(key, 6, 6)], normal(key, 4, 6))


@example
def several_inputs(key: jax.Array) -> Example:
    """Two inputs and outputs, parameters that are not inexact, an output that no input reaches."""

    def fn(p: Any, inputs: Any) -> Any:
        image, text = inputs
        joint = jnp.where(p["swap"], image @ p["image"], text @ p["text"])
        return {"joint": joint, "ids": jnp.argmax(joint, -1), "scale": p["text"].sum() * p["count"], "copy": image}

    params = {"image": normal(key, 3, 5), "text": normal(key, 4, 5), "swap": jnp.array([True] * 4 + [False])}
    return Example(fn, params | {"count": jnp.array(3)}, (normal(key, 2, 3), normal(key, 2, 4)))


@example
def branches_and_loops(key: jax.Array) -> Example:
    def fn(p: Any, inputs: Any) -> jax.Array:
        x, flag = inputs
        h = jax.lax.cond(flag, lambda w, v: jnp.sin(v @ w), lambda w, v: v @ w * 2, p["a"], x)
        h = jax.lax.fori_loop(0, 3, lambda i, v: v * jnp.cos(v) + i, h)
        start = jax.lax.while_loop(lambda v: v < 3.0, lambda v: v + 1.0, jnp.array(0.0))
        return jnp.sort(h @ p["b"], axis=-1) * start

    params = {"a": normal(key, 4, 4), "b": normal(key, 4, 4)}
    return Example(fn, params, (normal(key, 3, 4), jnp.array(True)))


@example
def derived_weights(key: jax.Array) -> Example:
    """Merged low-rank weights, normalised weights and masks: made of parameters and constants alone."""

    def fn(p: Any, x: jax.Array) -> jax.Array:
        merged = p["base"] + p["left"] @ p["right"]
        unit = p["v"] / jnp.linalg.norm(p["v"], axis=0)
        return jnp.tanh(x @ merged) @ jnp.where(jnp.tri(6, dtype=bool), unit.T, 0)

    shapes = {"base": (5, 6), "left": (5, 2), "right": (2, 6), "v": (6, 6)}
    params = {name: normal(jax.random.fold_in(key, i), *shape) for i, (name, shape) in enumerate(shapes.items())}
    return Example(fn, params, normal(key, 4, 5))


@example
def low_precision_scan(key: jax.Array) -> Example:
    """Master weights cast to bfloat16 in every layer, and float32 accumulation."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        low = jnp.einsum(
            "bi,ij->bj", x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        return jnp.tanh(low).astype(x.dtype)

    return Example(scan_blocks(layer), normal(key, 3, 6, 6), normal(key, 4, 6))


@example
def remat_low_precision(key: jax.Array) -> Example:
    """The recomputation casts the weights once more, in the loop and outside."""

    @jax.checkpoint
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)

    scan = scan_blocks(layer)
    params = {"stack": normal(key, 3, 6, 6), "last": normal(key, 6, 4)}
    return Example(lambda p, x: layer(p["last"], scan(p["stack"], x)), params, normal(key, 4, 6))


@example
def map_over_chunks(key: jax.Array) -> Example:
    """`lax.map`: a loop that carries nothing forward, and sums weight gradients backward."""
    return Example(lambda p, x: jax.lax.map(lambda row: jnp.tanh(row @ p), x), normal(key, 4, 5), normal(key, 3, 2, 4))


def make_mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))


@example
def sharding_constraints(key: jax.Array) -> Example:
    mesh = make_mesh()

    def fn(p: Any, x: jax.Array) -> jax.Array:
        h = jax.lax.with_sharding_constraint(x @ p["up"], NamedSharding(mesh, PartitionSpec("data", "tensor")))
        inner = jax.jit(jnp.tanh, in_shardings=NamedSharding(mesh, PartitionSpec("data")))
        return jax.lax.with_sharding_constraint(inner(h) @ p["down"], NamedSharding(mesh, PartitionSpec("data")))

    return Example(fn, {"up": normal(key, 4, 8), "down": normal(key, 8, 4)}, normal(key, 2, 4))


def _tensor_parallel(key: jax.Array, **options: Any) -> Example:
    mesh, spec = make_mesh(), PartitionSpec

    def local(p: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, q: Any) -> Any:
            return h + jax.lax.psum(jnp.tanh(h @ q["up"]) @ q["down"], "tensor") * q["scale"], None

        return jax.lax.scan(layer, x, p)[0]

    specs = {"up": spec(None, None, "tensor"), "down": spec(None, "tensor", None), "scale": spec()}
    fn = jax.shard_map(local, mesh=mesh, in_specs=(specs, spec("data")), out_specs=spec("data"), **options)
    params = {"up": normal(key, 2, 4, 8), "down": normal(key, 2, 8, 4), "scale": normal(key, 2, 4)}
    return Example(fn, params, normal(key, 4, 4))


@example
def shard_map_checked(key: jax.Array) -> Example:
    return _tensor_parallel(key)


@example
def shard_map_unchecked(key: jax.Array) -> Example:
    return _tensor_parallel(key, check_vma=False)


@example
def shard_map_partial(key: jax.Array) -> Example:
    mesh, spec = make_mesh(), PartitionSpec
    fn = jax.shard_map(
        lambda p, x: jax.lax.psum(jnp.sin(x @ p), "tensor"), mesh=mesh, axis_names={"tensor"},
        in_specs=(spec("tensor"), spec(None, "tensor")), out_specs=spec(),
    )  # fmt: skip
    return Example(lambda p, x: jnp.tanh(fn(p, x)) @ p, normal(key, 4, 4), normal(key, 3, 4))
