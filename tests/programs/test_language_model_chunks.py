"""The programs of a language model: tied embeddings in its first and last chunk, and computation in bfloat16."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.model import language_model
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.schedules import PipelineGraph, chain
from tests.programs.toys import (
    assert_close,
    compile_all,
    initial,
    make_batch,
    merged,
    reference_loss,
    run_gradients,
    run_reduce,
)

CONFIG = LanguageModelConfig(
    vocab_size=11, hidden=8, num_layers=1, num_heads=2, num_kv_heads=1, mlp_dim=12, tie_embeddings=True, init_std=0.3
)
GRAPH = chain(2, 1, shared=((0, 1),))
SPLIT = replace(GRAPH, split=frozenset({0, 1}))
BATCH = make_batch(1)


class Run(NamedTuple):
    programs: list[CompiledChunk]
    gradients: Any
    """Of the whole model, by layer name."""


def chunks(dtype: str) -> list[Chunk]:
    return language_model(replace(CONFIG, compute_dtype=dtype)).split(layers_per_chunk=[1, 0])


def run(params: list[Any], dtype: str, graph: PipelineGraph, *, updates: bool = False) -> Run:
    programs = compile_all(chunks(dtype), graph, BATCH, updates=updates)
    placed = [jax.device_put(held, p.sharding) for held, p in zip(params, programs, strict=True)]
    gradients = run_gradients(programs, graph, placed, BATCH)
    return Run(programs, merged(run_reduce(programs, graph, gradients.accumulators)[0]))


@pytest.fixture(scope="module")
def params() -> list[Any]:
    return [jax.device_get(jax.jit(chunk.init)(jax.random.key(0))) for chunk in chunks("float32")]


@pytest.fixture(scope="module")
def exact(params: list[Any]) -> Any:
    loss = reference_loss(chunks("float32"), GRAPH)
    gradients, _ = jax.jit(jax.grad(loss, has_aux=True))(merged(params), BATCH)
    return jax.device_get(gradients)


@pytest.fixture(scope="module")
def half_split(params: list[Any]) -> Run:
    return run(params, "bfloat16", SPLIT, updates=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("graph", [GRAPH, SPLIT], ids=["fused", "split"])
def test_tied_chunks(params: list[Any], exact: Any, graph: PipelineGraph) -> None:
    assert_close(run(params, "float32", graph).gradients, exact)


def test_bfloat16_computes_and_travels_and_float32_accumulates(params: list[Any], exact: Any, half_split: Run) -> None:
    fused = run(params, "bfloat16", GRAPH)
    for programs, gradients in (fused, half_split):
        assert programs[0].of().shapes.outputs.dtype == jnp.bfloat16
        assert programs[1].of().plan.input_grads[0].dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
        assert programs[1].sizes.derived_bytes > 0
        assert_close(gradients, exact, 5e-2)
    assert_close(half_split.gradients, fused.gradients, 1e-2)


def test_an_update_keeps_master_weights_in_float32(params: list[Any], half_split: Run) -> None:
    last = half_split.programs[1]
    before = {name: half_split.gradients[name] for name in params[1]}
    held, gradients = jax.device_put((params[1], before), last.sharding)
    changed, _, _ = last.updates.update(held, initial(half_split.programs, 1).optimizer_state, gradients, 1e-3, True)
    assert {leaf.dtype for leaf in jax.tree.leaves(changed)} == {jnp.dtype(jnp.float32)}
    assert_close(changed, jax.tree.map(lambda p, g: p - np.float32(1e-4) * g, params[1], before), 1e-6)
