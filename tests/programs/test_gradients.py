"""The gradients that the compiled programs accumulate equal those of jax.grad on the composed model."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_plan import Residuals
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.programs.state import ChunkState, initial_state
from rrfp_jax.schedules import Edge, PipelineGraph, absences, chain
from tests.programs.toys import (
    WIDTH,
    assert_close,
    attention,
    compile_all,
    embedding,
    head,
    initial,
    make_batch,
    merged,
    mlp,
    reference_loss,
    run_gradients,
    run_reduce,
    weights,
)


class Checked(NamedTuple):
    graph: PipelineGraph
    programs: list[CompiledChunk]
    params: list[Any]
    reduced: list[Any]


def check(chunks: list[Chunk], graph: PipelineGraph, *, tolerance: float = 1e-5, both: bool = False) -> Checked:
    """Run all microbatches and compare the summed loss, every gradient and the squared norm with plain JAX.

    Backwards of odd chunks are split into input and weight gradient; with ``both``, first all are, then none.
    """
    batch = make_batch(graph.num_microbatches)
    params = [state.params for state in initial_states(chunks, graph)]
    reference = jax.jit(jax.value_and_grad(reference_loss(chunks, graph), has_aux=True))
    expected = reference(merged(params), batch)
    splits = [range(graph.num_chunks), ()] if both else [range(1, graph.num_chunks, 2)]
    graphs = [replace(graph, split=frozenset(split)) for split in splits]
    runs = [run(chunks, each, params, batch, expected, tolerance=tolerance) for each in graphs]
    assert_close(runs[0].reduced, runs[-1].reduced)
    return runs[-1]


def initial_states(chunks: list[Chunk], graph: PipelineGraph) -> list[ChunkState]:
    sharding = [SingleDeviceSharding(jax.devices()[c]) for c in range(len(chunks))]
    key, optimizer = jax.random.key(0), optax.sgd(0.1)
    return [
        initial_state(tuple(chunks), c, optimizer, key=key, sharding=each, trains=False)
        for c, each in enumerate(sharding)
    ]


def run(
    chunks: list[Chunk], graph: PipelineGraph, params: Any, batch: Any, reference: Any, *, tolerance: float
) -> Checked:
    (loss, weight), expected = reference
    programs = compile_all(chunks, graph, batch, updates=len(chunks) == 1)
    gradients = run_gradients(programs, graph, params, batch)
    reduced, report = run_reduce(programs, graph, gradients.accumulators)
    np.testing.assert_allclose(sum(entry[2] for entry in gradients.losses), loss, rtol=max(1e-5, tolerance * 1e-2))
    assert sum(entry[3] for entry in gradients.losses) == weight
    actual = merged(reduced)
    assert_close(actual, {name: expected[name] for name in actual}, tolerance)
    norm = sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(actual))
    np.testing.assert_allclose(sum(value for _, value in report.squared_norms), norm, rtol=1e-5)
    return Checked(graph, programs, params, reduced)


def test_chain_of_mlp_and_attention() -> None:
    chunks = [embedding(), mlp(0), attention(1), head()]
    graph, programs, params, reduced = check(chunks, chain(4, 2), both=True)
    copies = run_gradients(programs, graph, params, make_batch(2), views=False).accumulators
    assert_close(copies, reduced, tolerance=0.0)


def test_one_chunk_is_the_whole_model() -> None:
    parts = [embedding(), mlp(0), head()]

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        assert inputs is None
        assert key is None
        x = None
        for part in parts:
            x = part.apply(params, x, leaves, key=None)
        return x

    whole = Chunk(
        name="all",
        init=lambda key: {name: layer for part in parts for name, layer in part.init(key).items()},
        apply=apply,
        leaves=("tokens", "targets", "weights"),
    )
    _, programs, _, _ = check([whole], chain(1, 2))
    update = "update embedding, final, head, layers.0"
    assert programs[0].compiled.keys() == {"forward", "backward", "reduce", update}


def test_two_encoders_of_which_microbatches_skip_one() -> None:
    graph = PipelineGraph(4, 4, (Edge(0, 1), Edge(1, 3), Edge(2, 3)), absent=absences({(2, 0), (2, 2), (0, 3), (1, 3)}))
    chunks = [embedding(), mlp(0), embedding("image_embedding", "images"), head(num_inputs=2)]
    check(chunks, graph)


def test_several_successors_of_which_microbatches_skip_one() -> None:
    edges = (Edge(0, 1), Edge(0, 2), Edge(0, 3), Edge(1, 3), Edge(2, 3))
    graph = PipelineGraph(4, 3, edges, absent=absences({(1, 1), (2, 2)}))
    check([embedding(), mlp(0), attention(1), head(num_inputs=3)], graph, both=True)


def test_the_only_successor_with_a_gradient_is_skipped() -> None:
    edges = (Edge(0, 1), Edge(0, 2, carries_gradient=False), Edge(1, 2))
    graph = PipelineGraph(3, 2, edges, absent=absences({(1, 1)}))
    check([embedding(), mlp(0), head(num_inputs=2)], graph)


def test_a_frozen_chunk_may_have_several_successors() -> None:
    edges = (Edge(0, 1, carries_gradient=False), Edge(0, 2, carries_gradient=False), Edge(1, 2))
    check([embedding(), mlp(0), head(num_inputs=2)], PipelineGraph(3, 1, edges))


def test_tied_embeddings_start_equal_and_are_summed_to_equal_bits() -> None:
    chunks = [embedding(shared=True), mlp(0), head("embedding", shared=True)]
    _, _, params, reduced = check(chunks, chain(3, 2, shared=((0, 2),)), both=True)
    np.testing.assert_array_equal(params[0]["embedding"]["table"], params[2]["embedding"]["table"])
    np.testing.assert_array_equal(reduced[0]["embedding"]["table"], reduced[2]["embedding"]["table"])


def test_frozen_encoder_has_no_backward() -> None:
    graph = PipelineGraph(3, 2, (Edge(0, 1, carries_gradient=False), Edge(1, 2)))
    _, programs, _, _ = check([embedding(), mlp(0), head()], graph)
    frozen = programs[0]
    assert frozen.compiled.keys() == {"forward"}
    assert frozen.sizes.stash_bytes == frozen.sizes.kept_bytes == frozen.sizes.optimizer_bytes == 0
    params, state, accumulators = frozen.updates.update({"kept": 1}, (), {}, 1.0, True)
    assert (params, state, accumulators) == ({"kept": 1}, (), {})
    with pytest.raises(ValueError, match="no gradient reaches chunk 0"):
        frozen.of().backward({}, Residuals(), (), {})


def test_chunks_without_parameters_and_integer_inputs() -> None:
    shift = Chunk(
        name="shift",
        init=lambda key: {},
        apply=lambda params, inputs, leaves, *, key: {
            "x": 2.0 * inputs,
            "mask": inputs[..., 0] > 0,
            "n": jnp.arange(3),
        },
    )
    masked = Chunk(
        name="masked",
        init=lambda key: {"scale": jnp.ones(WIDTH)},
        apply=lambda params, inputs, leaves, *, key: (
            jnp.where(inputs["mask"][..., None], inputs["x"] * params["scale"], 0.0) + inputs["n"].sum()
        ),
    )
    _, programs, _, _ = check([embedding(), shift, masked, head()], chain(4, 2))
    assert not programs[1].updates.trains
    assert programs[1].updates.reduce({}) == ({}, 0)
    assert initial(programs, 1).optimizer_state == ()


def test_integer_edge_must_not_carry_a_gradient() -> None:
    ids = Chunk(
        name="ids",
        init=lambda key: {},
        apply=lambda params, inputs, leaves, *, key: leaves["tokens"] + 0,
        leaves=("tokens",),
    )
    table = Chunk(
        name="table",
        init=lambda key: {"w": jnp.ones((11, WIDTH))},
        apply=lambda params, inputs, leaves, *, key: params["w"][inputs],
    )
    chunks = [ids, table, head()]
    with pytest.raises(ValueError, match=r"chunk 0 \(ids\) .*Edge\(0, 1, carries_gradient=False\)"):
        compile_all(chunks, chain(3, 2), make_batch(2))
    check(chunks, PipelineGraph(3, 2, (Edge(0, 1, carries_gradient=False), Edge(1, 2))))


def test_bfloat16_edges_keep_their_dtype_and_gradients_add_up_in_float32() -> None:
    half = Chunk(
        name="half",
        init=lambda key: {"w": jnp.full((WIDTH,), 0.5, jnp.bfloat16)},
        apply=lambda params, inputs, leaves, *, key: inputs * params["w"],
    )
    _, programs, params, reduced = check([embedding(), mlp(0, jnp.bfloat16), half, head()], chain(4, 2), tolerance=3e-2)
    assert [p.of().shapes.outputs.dtype for p in programs[:3]] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    ones = np.ones((3, 5, WIDTH), jnp.bfloat16)
    stash = programs[2].of().forward(params[2], (ones,), {})[1]
    (grad,), _, _ = programs[2].of().backward(params[2], stash, (ones,), programs[2].zeros())
    assert grad.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(reduced)} == {jnp.dtype(jnp.float32)}


def test_rematerialised_scan_over_stacked_layers() -> None:
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    stacked = Chunk(
        name="stacked",
        init=lambda key: {"stack": weights(key, 1, 4, WIDTH, WIDTH)},
        apply=lambda params, inputs, leaves, *, key: jax.lax.scan(layer, inputs, params["stack"])[0],
    )
    check([embedding(), stacked, head()], chain(3, 2))


def test_dropout_depends_on_the_microbatch_and_not_on_the_order() -> None:
    graph, programs, params, _ = check([embedding(), attention(0, dropout=0.5), head()], chain(3, 3))
    same = {name: np.broadcast_to(leaf[:1], leaf.shape) for name, leaf in make_batch(3).items()}
    forth = run_gradients(programs, graph, params, same).losses
    back = run_gradients(programs, graph, params, same, order=reversed).losses
    assert sorted(forth) == sorted(back)
    assert len({loss for _, _, loss, _ in forth}) == 3
    assert run_gradients(programs, graph, params, same, step=1).losses != forth
