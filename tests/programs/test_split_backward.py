"""Input gradient and weight gradient of a chunk as programs: who owns which array, and what is left out."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_plan import Residuals, WeightResidualBytes
from rrfp_jax.programs.compiled import CompiledChunk
from rrfp_jax.programs.shapes import num_bytes
from rrfp_jax.schedules import Edge, PipelineGraph, chain
from tests.programs.toys import (
    LENGTH,
    ROWS,
    WIDTH,
    assert_close,
    compile_all,
    embedding,
    head,
    initial,
    make_batch,
    mlp,
)

BATCH = make_batch(2)


def ones(programs: CompiledChunk, dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(np.ones((ROWS, LENGTH, WIDTH), dtype), programs.sharding)


@pytest.fixture(scope="module")
def model() -> list[CompiledChunk]:
    """Embedding, an MLP in float32, one in bfloat16 and the head; the last in one piece."""
    graph = replace(chain(4, 2), split=frozenset({0, 1, 2}))
    return compile_all([embedding(), mlp(0), mlp(1, jnp.bfloat16), head()], graph, BATCH)


@pytest.fixture(scope="module")
def params(model: list[CompiledChunk]) -> list[Any]:
    return [initial(model, index).params for index in range(4)]


def test_the_stash_is_taken_over_and_what_is_owed_is_held_by_reference(
    model: list[CompiledChunk], params: list[Any]
) -> None:
    middle = model[1]
    x, gradient = ones(middle), ones(middle)
    _, stash = middle.of().forward(params[1], (x,), {})
    assert stash.donated
    assert any(kept is x for kept in stash.aliased)
    _, owed = middle.of().input_gradient(params[1], stash, (gradient,))
    assert all(leaf.is_deleted() for leaf in stash.donated)
    assert any(array is x for array in owed)
    assert any(array is gradient for array in owed)
    assert any(array is saved for array in owed for saved in stash.saved)
    assert not any(array.is_deleted() for array in owed)


def test_what_is_not_owed_is_freed_with_the_stash(model: list[CompiledChunk], params: list[Any]) -> None:
    first, middle = model[0], model[1]
    for programs, held, inputs, leaves in (
        (middle, params[1], (ones(middle),), {}),
        (first, params[0], (), {"tokens": BATCH["tokens"][0]}),
    ):
        outputs, stash = programs.of().forward(held, inputs, leaves)
        watched = {id(array): weakref.ref(array) for array in (*stash.donated, *stash.saved)}
        _, owed = programs.of().input_gradient(held, stash, (jnp.ones_like(outputs),))
        wanted = {id(array) for array in owed}
        del stash
        gc.collect()
        assert {key for key, alive in watched.items() if alive() is not None} == wanted & watched.keys()


def test_weight_gradients_are_added_in_place(model: list[CompiledChunk], params: list[Any]) -> None:
    middle = model[1]
    accumulators = middle.zeros()
    totals = []
    for _ in range(2):
        _, stash = middle.of().forward(params[1], (ones(middle),), {})
        _, owed = middle.of().input_gradient(params[1], stash, (ones(middle),))
        before = jax.tree.leaves(accumulators)
        addresses = [leaf.unsafe_buffer_pointer() for leaf in before]
        accumulators, _ = middle.of().weight_gradient(params[1], owed, accumulators)
        assert all(leaf.is_deleted() for leaf in before)
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(accumulators)] == addresses
        totals.append(jax.tree.map(np.array, accumulators))  # a copy: arrays with views are not donated
    assert_close(totals[1], jax.tree.map(lambda leaf: 2 * leaf, totals[0]), 1e-6)


def test_sizes_add_up(model: list[CompiledChunk], params: list[Any]) -> None:
    middle, sizes = model[1], model[1].sizes
    outputs, stash = middle.of().forward(params[1], (ones(middle),), {})
    held = {id(array): array for array in (*stash.donated, *stash.saved)}
    assert sizes.stash_bytes == num_bytes(list(held.values()))
    assert sizes.kept_bytes == num_bytes(stash.aliased) == sizes.inputs_bytes == sizes.outputs_bytes
    grads, owed = middle.of().input_gradient(params[1], stash, (ones(middle),))
    assert sizes.input_grads_bytes == num_bytes(grads) == sizes.output_grads_bytes
    assert sizes.owed.total == num_bytes(owed)
    assert sizes.owed.saved == num_bytes([array for array in owed if id(array) in held])
    assert sizes.owed.aliased == sizes.kept_bytes
    assert sizes.owed.gradients == num_bytes(outputs)
    assert sizes.owed.made > 0
    assert sizes.derived_bytes == 0
    assert sizes.temporaries.keys() == middle.compiled.keys()
    assert min(sizes.temporaries.values()) >= 0
    assert model[3].sizes.owed == WeightResidualBytes()
    assert model[3].sizes.output_grads_bytes == 0


def test_temporaries_are_zero_where_the_backend_does_not_say() -> None:
    from rrfp_jax.programs.compiled import _temporaries

    class Silent:
        def memory_analysis(self) -> None:
            return None

    assert _temporaries({"forward": Silent()}) == {"forward": 0}


def test_low_precision_weights_are_derived_once_per_update(model: list[CompiledChunk], params: list[Any]) -> None:
    low, held = model[2], params[2]
    derived = low.prepare(held)
    assert num_bytes(derived) == low.sizes.derived_bytes == low.sizes.params_bytes // 2
    assert {leaf.dtype for leaf in derived} == {jnp.dtype(jnp.bfloat16)}

    def gradients(**options: Any) -> Any:
        outputs, stash = low.of().forward(held, (ones(low),), {}, **options)
        grads, owed = low.of().input_gradient(held, stash, (ones(low, outputs.dtype),), **options)
        return outputs, grads, low.of().weight_gradient(held, owed, low.zeros(), **options)[0]

    by_hand, by_itself = gradients(derived=derived), gradients()
    jax.tree.map(np.testing.assert_array_equal, by_hand, by_itself)
    assert {leaf.dtype for leaf in jax.tree.leaves(by_hand[2])} == {jnp.dtype(jnp.float32)}
    assert model[1].prepare(params[1]) == ()


def test_the_first_chunk_owes_everything(model: list[CompiledChunk], params: list[Any]) -> None:
    first = model[0]
    assert first.compiled.keys() == {"forward", "weight_gradient", "reduce", "update embedding"}
    _, stash = first.of().forward(params[0], (), {"tokens": BATCH["tokens"][0]})
    gradient = ones(first)
    grads, owed = first.of().input_gradient(params[0], stash, (gradient,))
    assert grads == ()
    assert any(array is gradient for array in owed)
    table = first.of().weight_gradient(params[0], owed, first.zeros())[0]["embedding"]["table"]
    np.testing.assert_array_equal(table.sum(), ROWS * LENGTH * WIDTH)


def test_a_chunk_without_parameters_owes_nothing() -> None:
    plain = Chunk(name="plain", init=lambda key: {}, apply=lambda params, inputs, leaves, *, key: jnp.sin(inputs))
    programs = compile_all([embedding(), plain, head()], chain(3, 1, split=True), make_batch(1))[1]
    assert programs.compiled.keys() == {"forward", "input_gradient"}
    _, stash = programs.of().forward({}, (ones(programs),), {})
    (grad,), owed = programs.of().input_gradient({}, stash, (ones(programs),))
    np.testing.assert_allclose(grad, np.cos(1) * np.ones(grad.shape), rtol=1e-6)
    assert owed == ()
    assert programs.of().weight_gradient({}, owed, {}) == ({}, ())


def test_the_gradients_of_several_successors_are_owed_as_their_sum() -> None:
    graph = PipelineGraph(3, 1, (Edge(0, 1), Edge(0, 2), Edge(1, 2)), split=frozenset({0}))
    first, *_ = compile_all([embedding(), mlp(0), head(num_inputs=2)], graph, make_batch(1))
    held = initial([first]).params
    _, stash = first.of().forward(held, (), {"tokens": BATCH["tokens"][0]})
    _, owed = first.of().input_gradient(held, stash, (ones(first), 2 * ones(first)))
    assert first.sizes.owed.gradients == 0
    assert first.sizes.owed.made == first.sizes.outputs_bytes
    assert any(array.shape == (ROWS, LENGTH, WIDTH) and np.all(array == 3) for array in owed)


def test_the_wrong_half_is_refused(model: list[CompiledChunk], params: list[Any]) -> None:
    with pytest.raises(ValueError, match="chunk 1 is split: call input_gradient and weight_gradient"):
        model[1].of().backward(params[1], Residuals(), (), model[1].zeros())
    with pytest.raises(ValueError, match="chunk 3 is in one piece: call backward"):
        model[3].of().input_gradient(params[3], Residuals(), ())
    with pytest.raises(ValueError, match="chunk 3 is in one piece: call backward"):
        model[3].of().weight_gradient(params[3], (), model[3].zeros())


def test_results_take_over_the_memory_of_what_the_last_layers_kept_first() -> None:
    """JAX pairs in order, and a backward begins with the last layer: the first layer's arrays are read last."""

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        for layer in params.values():
            inputs = jnp.tanh(inputs @ layer["w"])
        return inputs

    def init(key: jax.Array) -> Any:
        return {f"layers.{layer}": {"w": jnp.eye(WIDTH)} for layer in range(4)}

    deep = Chunk(name="deep", init=init, apply=apply)
    middle = compile_all([embedding(), deep, head()], chain(3, 1, split=True), make_batch(1), updates=False)[1]
    donated = middle.of().plan.residuals.donated
    assert len(donated) > 1
    assert list(donated) == sorted(donated, reverse=True)
