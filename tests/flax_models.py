"""Transformers as users write them in Flax, and the plain loops in which users train them."""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from rrfp_jax import microbatch_key
from rrfp_jax.models import chunk_from_linen, split_nnx
from rrfp_jax.programs.chunk import Chunk
from tests.programs.toys import VOCAB

WIDTH, HEADS, NUM_BLOCKS, NUM_MICROBATCHES = 16, 2, 4, 4
KEY, SEED = 3, 5
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)


def make_batches(num_steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tokens = ((rng.integers(0, VOCAB, (num_steps, NUM_MICROBATCHES, 2, 1)) + np.arange(9)) % VOCAB).astype(np.int32)
    weights = (rng.random((num_steps, NUM_MICROBATCHES, 2, 8)) < 0.8).astype(np.float32)
    return [{"tokens": t[..., :-1], "targets": t[..., 1:], "weights": w} for t, w in zip(tokens, weights, strict=True)]


def weighted_loss(logits: Any, targets: Any, weights: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * weights), jnp.sum(weights)


# -- NNX ---------------------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, is_cut: bool = False, rate: float = 0.2) -> None:
        columns, rows = ((None, "tensor"), ("tensor", None)) if is_cut else (None, None)

        def linear(num_in: int, num_out: int, axes: Any) -> nnx.Linear:
            init = nnx.initializers.lecun_normal()  # a function of its own in each block
            init = nnx.with_partitioning(init, axes) if axes else init
            # a bias of keys has no gradient but rounding, which Adam would make large
            return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=init, rngs=rngs)

        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value = (linear(WIDTH, WIDTH, columns) for _ in range(3))
        self.output = linear(WIDTH, WIDTH, rows)
        self.mlp = nnx.Sequential(linear(WIDTH, 4 * WIDTH, columns), nnx.gelu, linear(4 * WIDTH, WIDTH, rows))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.mask = np.tril(np.ones((8, 8), bool))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        query, key, value = (part(y).reshape(*y.shape[:-1], HEADS, -1) for part in (self.query, self.key, self.value))
        mixed = nnx.dot_product_attention(query, key, value, mask=self.mask)
        x = x + self.dropout(self.output(mixed.reshape(x.shape)))
        return x + self.dropout(self.mlp(x))


class RematBlock(Block):
    __call__ = nnx.remat(Block.__call__)


class ScannedBlock(nnx.Module):
    """Three layers in one, each with random numbers of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(_Inner, in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.layers, x)


class _Inner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.linear(x))


class Transformer(nnx.Module):
    """Token embedding and output matrix are one ``nnx.Param``, in two modules."""

    def __init__(self, rngs: nnx.Rngs, *, block: Any = Block, num_blocks: int = NUM_BLOCKS) -> None:
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, WIDTH)))
        self.scales = np.linspace(1, 2, WIDTH, dtype=np.float32)
        self.config, self.activation, self.name = range(3), nnx.gelu, "own"
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([block(rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head.embedding = self.embedding.embedding

    def embed(self, tokens: Any) -> Any:
        return self.dropout(self.embedding(tokens) * self.scales + self.positions)

    def loss(self, x: Any, targets: Any, weights: Any) -> Any:
        return weighted_loss(self.head.attend(self.norm(x)), targets, weights)


cut_model = partial(Transformer, block=partial(Block, is_cut=True))
remat_model = partial(Transformer, block=RematBlock)
scanned_model = partial(Transformer, block=ScannedBlock)


def nnx_chunks(model: Any = Transformer, num_chunks: int = 4, **options: Any) -> list[Chunk]:
    ends = {"first_holds": ["embedding", "positions"], "last_holds": ["norm", "head"]} | options
    return split_nnx(
        model, layers="blocks", num_chunks=num_chunks, first=Transformer.embed, last=Transformer.loss, **ends
    )


def with_keys(model: nnx.Module, key: Any) -> None:
    """Starts each random stream as the chunks do, from the microbatch's key and the stream's path."""
    for path, stream in nnx.iter_graph(model):
        if isinstance(stream, nnx.RngStream):
            number = zlib.crc32(".".join(map(str, path)).encode())
            own, shape = jax.random.fold_in(key, number), stream.key.shape
            stream.key.set_value(jax.random.split(own, shape) if shape else own)
            stream.count.set_value(jnp.zeros(shape, jnp.uint32))


def layers_of(model: nnx.Module) -> dict[str, Any]:
    """Returns the parameters of a model by the names of its layers."""
    layers: dict[str, Any] = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        parts = list(map(str, path))
        parts = [".".join(parts[:2]), *parts[2:]] if parts[0] == "blocks" else parts
        node = layers
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = np.asarray(param.get_value())
    return layers


def train_nnx_plainly(
    make: Any, batches: Sequence[Mapping[str, np.ndarray]]
) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Returns parameters before and after, by layer, and losses."""
    with nnx.use_eager_sharding(False):
        # compiled as a pipeline makes it: without, XLA rounds 0.1 times a random number otherwise
        model = nnx.jit(lambda key: make(rngs=nnx.Rngs(key)))(jax.random.key(KEY))
    start, optimizer = layers_of(model), nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any, number: Any) -> Any:
        def mean_loss(model: Any) -> Any:
            total, weight = jnp.zeros(()), jnp.zeros(())
            for m in range(NUM_MICROBATCHES):
                with_keys(model, microbatch_key(SEED, number, m))
                x = model.embed(batch["tokens"][m])
                for block in model.blocks:
                    x = block(x)
                loss, count = model.loss(x, batch["targets"][m], batch["weights"][m])
                total, weight = total + loss, weight + count
            return total / weight

        loss, grads = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch, jnp.uint32(n))) for n, batch in enumerate(batches)]
    return start, losses, layers_of(model)


# -- Linen -------------------------------------------------------------------------------------------------------------


class LinenBlock(linen.Module):
    is_cut: bool = False

    @linen.compact
    def __call__(self, x: Any, is_training: bool) -> Any:
        columns, rows = ((None, "tensor"), ("tensor", None)) if self.is_cut else ((None, None), (None, None))

        def dense(width: int, axes: Any, name: str) -> linen.Dense:
            init = linen.initializers.lecun_normal()
            return linen.Dense(width, kernel_init=linen.with_partitioning(init, axes) if any(axes) else init, name=name)

        y = linen.LayerNorm()(x)
        y = jnp.cumsum(dense(WIDTH, columns, "value")(y), axis=-2) / jnp.arange(1, x.shape[-2] + 1)[:, None]
        x = x + linen.Dropout(0.2, deterministic=not is_training)(dense(WIDTH, rows, "output")(y))
        y = dense(WIDTH, rows, "down")(linen.gelu(dense(4 * WIDTH, columns, "up")(x)))
        return x + linen.Dropout(0.2, deterministic=not is_training)(y)


class LinenPart(linen.Module):
    """Some layers of a transformer; all of them are the model itself."""

    layers: range
    is_first: bool = True
    is_last: bool = True
    is_cut: bool = False
    is_remat: bool = False

    @linen.compact
    def __call__(self, x: Any, tokens: Any = None, targets: Any = None, weights: Any = None) -> Any:
        is_training = self.has_rng("dropout")
        table = linen.Embed(VOCAB, WIDTH, name="embedding") if self.is_first or self.is_last else None
        if self.is_first and table is not None:
            x = table(tokens)
        block = linen.remat(LinenBlock, static_argnums=(2,)) if self.is_remat else LinenBlock
        for number in self.layers:
            x = block(self.is_cut, name=f"blocks.{number}")(x, is_training)
        if not self.is_last or table is None:
            return x
        return weighted_loss(table.attend(linen.LayerNorm(name="norm")(x)), targets, weights)


def linen_chunks(num_chunks: int = 4, **options: Any) -> list[Chunk]:
    chunks, size = [], NUM_BLOCKS // num_chunks
    for number in range(num_chunks):
        is_first, is_last = number == 0, number == num_chunks - 1
        leaves = (["tokens"] if is_first else []) + (["targets", "weights"] if is_last else [])
        part = LinenPart(range(number * size, (number + 1) * size), is_first, is_last, **options)
        chunk = chunk_from_linen(
            part,
            LinenPart.__call__,
            name=f"part {number}",
            inputs=None if is_first else jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32),
            leaves={name: jax.ShapeDtypeStruct((2, 8), "float32" if name == "weights" else "int32") for name in leaves},
            shared={"embedding"} if is_first != is_last else (),
        )
        chunks.append(chunk)
    return chunks


def train_linen_plainly(
    batches: Sequence[Mapping[str, np.ndarray]],
) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    model = LinenPart(range(NUM_BLOCKS))

    @jax.jit
    def step(params: Any, state: Any, batch: Any, number: Any) -> Any:
        def mean_loss(params: Any) -> Any:
            total, weight = jnp.zeros(()), jnp.zeros(())
            for m in range(NUM_MICROBATCHES):
                rngs = {"dropout": microbatch_key(SEED, number, m)}
                own = {name: leaf[m] for name, leaf in batch.items()}
                loss, count = model.apply({"params": params}, None, rngs=rngs, **own)
                total, weight = total + loss, weight + count
            return total / weight

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    own = {name: leaf[0] for name, leaf in batches[0].items()}
    start = params = dict(model.init(jax.random.key(KEY), None, **own)["params"])
    state, losses = OPTIMIZER.init(params), []
    for number, batch in enumerate(batches):
        params, state, loss = step(params, state, batch, jnp.uint32(number))
        losses.append(float(loss))
    return jax.tree.map(np.asarray, start), losses, jax.tree.map(np.asarray, params)
