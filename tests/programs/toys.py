"""Small chunks, and a driver that runs the compiled programs of a whole step one after another."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from rrfp_jax.programs.agreement import StageReport, Verdict, agree
from rrfp_jax.programs.chunk import Chunk, microbatch_key, param_specs
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.compiled import CompiledChunk, Variant
from rrfp_jax.programs.remat import Remat
from rrfp_jax.programs.shapes import arrange_inputs, derive_shapes
from rrfp_jax.programs.state import ChunkState, initial_state
from rrfp_jax.programs.updates import UnitUpdates
from rrfp_jax.schedules import PipelineGraph

VOCAB, WIDTH, ROWS, LENGTH = 11, 8, 3, 5


def weights(key: jax.Array, number: int, *shape: int) -> jax.Array:
    """Numbers that depend on the key and on ``number``; without a random generator, which takes long to compile.

    Angles are made of whole numbers, so that they do not depend on how a compiler rounds.
    """
    places = jnp.arange(math.prod(shape), dtype=jnp.uint32) * 40503 + jax.random.key_data(key)[-1] * 9973
    angles = (places + np.uint32(number * 78233)) % 65536
    return 0.4 * jnp.sin(angles.astype(jnp.float32) * (2 * math.pi / 65536)).reshape(shape)


def with_cheap_init(chunk: Chunk) -> Chunk:
    """The chunk with parameters of the same shapes that compile quickly; copies of a layer start equal."""
    specs = param_specs(chunk)

    def init(key: jax.Array) -> Any:
        def numbers(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            number = zlib.crc32(jax.tree_util.keystr(path).encode()) % 1000
            return weights(key, number, *leaf.shape).astype(leaf.dtype)

        return jax.tree.map_with_path(numbers, specs)

    return replace(chunk, init=init)


def embedding(name: str = "embedding", leaf: str = "tokens", *, shared: bool = False) -> Chunk:
    return Chunk(
        name=name,
        init=lambda key: {name: {"table": weights(key, 1, VOCAB, WIDTH)}},
        apply=lambda params, inputs, leaves, *, key: params[name]["table"][leaves[leaf]],
        leaves=(leaf,),
        shared=frozenset([name] if shared else []),
    )


def mlp(layer: int, dtype: Any = jnp.float32) -> Chunk:
    name = f"layers.{layer}"

    def init(key: jax.Array) -> Any:
        shapes = {"up": (WIDTH, 16), "bias": (16,), "down": (16, WIDTH)}
        return {name: {w: weights(key, 10 * layer + i, *shape) for i, (w, shape) in enumerate(shapes.items())}}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(dtype), params[name])
        x = inputs.astype(dtype)
        return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]

    return Chunk(name=name, init=init, apply=apply)


def attention(layer: int, dropout: float = 0.0) -> Chunk:
    name = f"layers.{layer}"

    def init(key: jax.Array) -> Any:
        layers = {w: weights(key, 10 * layer + i, WIDTH, WIDTH) for i, w in enumerate("qkvo")}
        return {name: layers, f"{name}.norm": jnp.ones(WIDTH)}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        p = params[name]
        x = inputs * jax.lax.rsqrt(jnp.mean(inputs**2, -1, keepdims=True) + 1e-6) * params[f"{name}.norm"]
        scores = jnp.einsum("bqd,bkd->bqk", x @ p["q"], x @ p["k"])
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
        x = jax.nn.softmax(scores) @ (x @ p["v"]) @ p["o"]
        if dropout:
            x = x * jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - dropout, x.shape)
        return inputs + x

    return Chunk(name=name, init=init, apply=apply, uses_key=dropout > 0)


def head(table: str = "head", *, shared: bool = False, num_inputs: int = 1) -> Chunk:
    def init(key: jax.Array) -> Any:
        return {table: {"table": weights(key, 99, VOCAB, WIDTH)}, "final": {"scale": jnp.ones(WIDTH)}}

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        x = inputs if num_inputs == 1 else sum(inputs)
        logits = (x.astype(jnp.float32) * params["final"]["scale"]) @ params[table]["table"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, leaves["targets"])
        return jnp.sum(losses * leaves["weights"]), jnp.sum(leaves["weights"])

    return Chunk(
        name=table,
        init=init,
        apply=apply,
        leaves=("targets", "weights"),
        shared=frozenset([table] if shared else []),
    )


def plain_model(cut: Sequence[int], *, tied: bool = True) -> list[Chunk]:
    """Embedding, layers without attention, and a head, with so many layers in each chunk: quick to compile."""
    layers = [dense(layer) for layer in range(sum(cut))]
    ends = [sum(cut[:number]) for number in range(len(cut) + 1)]
    parts = [layers[start:end] for start, end in pairwise(ends)]
    parts[0].insert(0, embedding(shared=tied))
    parts[-1].append(head("embedding", shared=True) if tied else head())
    return [joined(part) for part in parts]


def dense(layer: int) -> Chunk:
    """An MLP that may be cut over the devices of a stage."""
    cuts = {"up": PartitionSpec(None, "tensor"), "bias": PartitionSpec("tensor"), "down": PartitionSpec("tensor")}
    whole = dict.fromkeys(cuts, PartitionSpec())
    return replace(
        mlp(layer), partition=lambda params, axes: dict.fromkeys(params, cuts if "tensor" in axes else whole)
    )


def joined(parts: list[Chunk]) -> Chunk:
    """One chunk of several that follow each other."""
    names = [tuple(param_specs(part)) for part in parts]

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        for part, own in zip(parts, names, strict=True):
            inputs = part.apply({name: params[name] for name in own}, inputs, leaves, key=key)
        return inputs

    def partition(params: Any, axes: Mapping[str, int]) -> Any:
        specs = jax.tree.map(lambda _: PartitionSpec(), params)
        for part, own in zip(parts, names, strict=True):
            if part.partition is not None:
                specs |= part.partition({name: params[name] for name in own}, axes)
        return specs

    return Chunk(
        name=" ".join(part.name for part in parts),
        init=lambda key: {name: layer for part in parts for name, layer in part.init(key).items()},
        apply=apply,
        leaves=tuple(leaf for part in parts for leaf in part.leaves),
        shared=frozenset.union(*(part.shared for part in parts)) if len(parts) else frozenset(),
        partition=partition,
    )


def make_batch(num_microbatches: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Leaves [microbatches, rows, length]."""
    rng = np.random.default_rng(seed)
    shape = (num_microbatches, ROWS, LENGTH)
    return {
        "tokens": rng.integers(0, VOCAB, shape, dtype=np.int32),
        "images": rng.integers(0, VOCAB, shape, dtype=np.int32),
        "targets": rng.integers(0, VOCAB, shape, dtype=np.int32),
        "weights": rng.integers(0, 2, shape).astype(np.float32),
    }


def microbatch_spec(batch: dict[str, np.ndarray]) -> Any:
    return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()}


def compile_all(
    chunks: Sequence[Chunk],
    graph: PipelineGraph,
    batch: dict[str, np.ndarray],
    optimizer: optax.GradientTransformation | None = None,
    seed: int = 7,
    remat: Remat = "none",
    updates: bool = True,
) -> list[CompiledChunk]:
    """Every chunk on a device of its own; without ``updates`` U is left out, which takes a fifth of the time."""
    compile_updates = UnitUpdates._compile_updates if updates else lambda self: None
    shapes = derive_shapes(chunks, graph, microbatch_spec(batch))
    devices = jax.devices()
    with mock.patch.object(UnitUpdates, "_compile_updates", compile_updates):
        return [
            CompiledChunk(
                c,
                chunks,
                graph,
                [Variant(shapes[c], plan_chunk(c, chunks, graph, shapes, remat=remat))],
                optimizer=optimizer or optax.sgd(0.1),
                sharding=SingleDeviceSharding(devices[c % len(devices)]),
                seed=seed,
            )
            for c in range(len(chunks))
        ]


def initial(programs: Sequence[CompiledChunk], index: int = 0) -> ChunkState:
    """The state that a chunk of a model, or one without shared layers alone, starts from."""
    own = programs[index]
    chunks = tuple(each.chunk for each in programs)
    optimizer, trains = own.updates.optimizer, own.updates.trains
    return initial_state(chunks, index, optimizer, key=jax.random.key(0), sharding=own.sharding, trains=trains)


class Gradients(NamedTuple):
    accumulators: list[Any]
    losses: tuple[tuple[int, int, float, float], ...]


def send(tree: Any, programs: CompiledChunk, *, views: bool) -> Any:
    """To the devices of ``programs``: as a NumPy view, or as an array of its own."""
    if views:
        return jax.tree.map(np.asarray, tree)
    return jax.device_put(tree, programs.sharding)


def run_gradients(
    programs: list[CompiledChunk],
    graph: PipelineGraph,
    params: list[Any],
    batch: dict[str, np.ndarray],
    *,
    views: bool = True,
    step: int = 0,
    order: Callable[[range], Any] = iter,
) -> Gradients:
    """Forward and backward of every microbatch, one microbatch after the other in the given order.

    What a split backward owes is paid in the end of the microbatch.
    """
    accumulators = [p.zeros() for p in programs]
    derived = [p.prepare(held) for p, held in zip(programs, params, strict=True)]
    losses = []
    for m in order(range(graph.num_microbatches)):
        outputs: dict[int, Any] = {}
        stashes: dict[int, Any] = {}
        for c, program in enumerate(programs):
            if not graph.exists(c, m):
                continue
            inputs = tuple(
                send(outputs[p], program, views=views) if p in outputs else None for p in graph.predecessors(c)
            )
            leaves = {name: batch[name][m] for name in program.chunk.leaves}
            outputs[c], stashes[c] = program.of().forward(params[c], inputs, leaves, step, m, derived=derived[c])
        losses += [(m, c, *map(float, outputs[c])) for c in outputs if not graph.successors(c)]
        grads: dict[tuple[int, int], Any] = {}
        owed: dict[int, Any] = {}
        for c in reversed(range(len(programs))):
            if not (graph.exists(c, m) and graph.has_backward(c)):
                continue
            incoming = tuple(
                send(grads[s, c], programs[c], views=views) if (s, c) in grads else None
                for s in graph.gradient_successors(c)
            )
            given = (params[c], stashes.pop(c), incoming)
            if c in graph.split:
                outgoing, owed[c] = programs[c].of().input_gradient(*given, derived=derived[c])
            else:
                outgoing, accumulators[c], _ = programs[c].of().backward(*given, accumulators[c], derived=derived[c])
            grads |= {(c, p): grad for p, grad in zip(graph.gradient_predecessors(c), outgoing, strict=True)}
        for c, debt in owed.items():
            accumulators[c], _ = programs[c].of().weight_gradient(params[c], debt, accumulators[c], derived=derived[c])
    return Gradients(accumulators, tuple(losses))


def run_reduce(
    programs: list[CompiledChunk], graph: PipelineGraph, accumulators: list[Any], *, views: bool = True
) -> tuple[list[Any], StageReport]:
    """R of every chunk."""
    layers = [p.shared_layers(a) for p, a in zip(programs, accumulators, strict=True)]
    reduced, norms = [], []
    for c, program in enumerate(programs):
        shared = tuple(send(layers[other], program, views=views) for other in graph.sharing(c))
        total, norm = program.updates.reduce(accumulators[c], shared if len(shared) > 1 else ())
        reduced.append(total)
        norms.append((c, float(norm)))
    return reduced, StageReport(squared_norms=tuple(norms))


class Trainer:
    """A whole training run, step by step, without any concurrency."""

    def __init__(self, programs: list[CompiledChunk], graph: PipelineGraph, **agreement: Any) -> None:
        self.programs, self.graph, self.agreement = programs, graph, agreement
        states = [initial(programs, index) for index in range(len(programs))]
        self.params = [state.params for state in states]
        self.states = [state.optimizer_state for state in states]

    def step(self, batch: dict[str, np.ndarray], step: int = 0, **options: Any) -> Verdict:
        gradients = run_gradients(self.programs, self.graph, self.params, batch, step=step, **options)
        reduced, report = run_reduce(self.programs, self.graph, gradients.accumulators)
        verdict = agree([report, StageReport(losses=gradients.losses)], **self.agreement)
        for c, program in enumerate(self.programs):
            self.params[c], self.states[c], _ = program.updates.update(
                self.params[c], self.states[c], reduced[c], verdict.scale, verdict.apply
            )
        return verdict


def merged(params: list[Any]) -> Any:
    """The parameters of all chunks in one tree; shared ones once."""
    whole: dict[str, Any] = {}
    for part in params:
        whole |= {name: jax.device_get(layer) for name, layer in part.items() if name not in whole}
    return whole


def reference_loss(chunks: Sequence[Chunk], graph: PipelineGraph, seed: int = 7) -> Callable[..., Any]:
    """``loss(whole_params, batch, step) -> (summed loss, weight)`` in plain JAX, for jax.grad."""

    def loss(whole: Any, batch: Any, step: int = 0) -> Any:
        total, weight = 0.0, 0.0
        for m in range(graph.num_microbatches):
            outputs: dict[int, Any] = {}
            for c, chunk in enumerate(chunks):
                if not graph.exists(c, m):
                    continue
                names = jax.eval_shape(chunk.init, jax.random.key(0))
                inputs = tuple(_input(outputs, chunks, graph, p, c, batch) for p in graph.predecessors(c))
                outputs[c] = chunk.apply(
                    {name: whole[name] for name in names},
                    arrange_inputs(inputs),
                    {name: batch[name][m] for name in chunk.leaves},
                    key=microbatch_key(seed, step, m) if chunk.uses_key else None,
                )
                if not graph.successors(c):
                    total, weight = total + outputs[c][0], weight + outputs[c][1]
        return total, weight

    return loss


def _input(outputs: Any, chunks: Any, graph: PipelineGraph, source: int, target: int, batch: Any) -> Any:
    if source not in outputs:
        spec = derive_shapes(chunks, graph, microbatch_spec(batch))[source].outputs
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)
    if target in graph.gradient_successors(source):
        return outputs[source]
    return jax.lax.stop_gradient(outputs[source])


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Leaf by leaf: the norm of the difference over the norm, or absolutely below the largest norm of all."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    largest = max((float(np.linalg.norm(leaf)) for leaf in jax.tree.leaves(expected)), default=0.0)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(jax.device_get(actual)),
        jax.tree.leaves(jax.device_get(expected)),
        strict=True,
    ):
        error = np.linalg.norm(np.asarray(a, np.float64) - np.asarray(e, np.float64))
        limit = tolerance * max(float(np.linalg.norm(e)), 1e-2 * largest)
        assert error <= limit, f"{jax.tree_util.keystr(path)}: {error} > {limit}"
