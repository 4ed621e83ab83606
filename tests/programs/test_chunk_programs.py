"""Ownership of buffers, traces, skipped steps, and whole training runs against a plain loop."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.compiled import CompiledChunk, Variant
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.schedules import PipelineGraph, chain
from tests.programs.toys import (
    ROWS,
    WIDTH,
    Trainer,
    assert_close,
    compile_all,
    embedding,
    head,
    initial,
    make_batch,
    merged,
    microbatch_spec,
    mlp,
    reference_loss,
)

ONES = np.ones((ROWS, 5, WIDTH), np.float32)


@pytest.fixture(scope="module")
def middle() -> CompiledChunk:
    """The programs of an MLP between an embedding and a head, on the second device."""
    chunks, graph = [embedding(), mlp(0), head()], chain(3, 2)
    shapes = derive_shapes(chunks, graph, microbatch_spec(make_batch(2)))
    sharding = SingleDeviceSharding(jax.devices()[1])
    plan = plan_chunk(1, chunks, graph, shapes)
    return CompiledChunk(1, chunks, graph, [Variant(shapes[1], plan)], optimizer=optax.adamw(0.01), sharding=sharding)


def test_everything_lies_on_the_device_of_the_sharding(middle: CompiledChunk) -> None:
    params = initial([middle]).params
    outputs, stash = middle.of().forward(params, (ONES,), {})
    grads, accumulators, _ = middle.of().backward(params, stash, (ONES,), middle.zeros())
    state = initial([middle]).optimizer_state
    for leaf in jax.tree.leaves((params, outputs, grads, accumulators, state)):
        assert leaf.devices() == {jax.devices()[1]}


def test_a_backward_can_be_waited_for_when_the_next_has_taken_its_results_over(middle: CompiledChunk) -> None:
    params, accumulators, tokens = initial([middle]).params, middle.zeros(), []
    for _ in range(3):
        _, stash = middle.of().forward(params, (ONES,), {})
        before = jax.tree.leaves(accumulators)
        _, accumulators, token = middle.of().backward(params, stash, (ONES,), accumulators)
        tokens.append(token)
    assert all(leaf.is_deleted() for leaf in before)
    for token in tokens:
        assert token.devices() == {jax.devices()[1]}
        token.block_until_ready()


def test_backward_takes_over_accumulators_and_stash(middle: CompiledChunk) -> None:
    params = initial([middle]).params
    _, stash = middle.of().forward(params, (ONES,), {})
    accumulators = middle.zeros()
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(accumulators)]
    _, summed, _ = middle.of().backward(params, stash, (ONES,), accumulators)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(accumulators))
    assert all(leaf.is_deleted() for leaf in stash.donated)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(summed)] == addresses


def test_update_takes_over_parameters_state_and_accumulators(middle: CompiledChunk) -> None:
    params = initial([middle]).params
    before = (
        params,
        initial([middle]).optimizer_state,
        jax.tree.map(jnp.ones_like, middle.zeros()),
    )
    *_, accumulators = middle.updates.update(*before, 1.0, True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert all(not leaf.any() for leaf in jax.tree.leaves(accumulators))


def test_the_stash_holds_no_parameter_and_shares_inputs_with_the_caller(middle: CompiledChunk) -> None:
    params = initial([middle]).params
    outputs, stash = middle.of().forward(params, (ONES,), {})
    assert any(kept is ONES for kept in stash.aliased)
    taken = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, outputs))}
    assert taken.isdisjoint(leaf.unsafe_buffer_pointer() for leaf in (*stash.donated, *stash.saved))
    sizes = middle.sizes
    assert sizes.stash_bytes == sum(leaf.nbytes for leaf in (*stash.donated, *stash.saved))
    assert sizes.kept_bytes == ONES.nbytes == sizes.outputs_bytes
    assert sizes.params_bytes == sizes.accumulators_bytes == 4 * (WIDTH * 16 + 16 + 16 * WIDTH)
    assert sizes.optimizer_bytes == 2 * sizes.params_bytes + 4


def test_an_input_passed_through_is_not_spoilt_by_the_backward() -> None:
    through = Chunk(
        name="through",
        init=lambda key: {"w": jnp.ones(WIDTH)},
        apply=lambda params, inputs, leaves, *, key: (inputs, jnp.exp(inputs) * params["w"]),
    )
    last = Chunk(
        name="last",
        init=lambda key: {},
        apply=lambda params, inputs, leaves, *, key: (jnp.sum(inputs[0] * inputs[1]), jnp.float32(1)),
    )
    programs = compile_all([embedding(), through, last], chain(3, 1), make_batch(1))[1]
    params = initial([programs]).params
    given = jax.device_put(2 * ONES, programs.sharding)
    outputs, stash = programs.of().forward(params, (given,), {})
    kept = jax.tree.map(np.array, outputs)
    (grads,), accumulators, _ = programs.of().backward(params, stash, (outputs,), programs.zeros())
    assert_close(outputs, kept, tolerance=0.0)
    np.testing.assert_array_equal(given, 2 * ONES)
    np.testing.assert_allclose(grads, kept[0] + kept[1] * np.exp(2), rtol=1e-6)
    np.testing.assert_allclose(accumulators["w"], (kept[1] * np.exp(2)).sum((0, 1)), rtol=1e-6)


@pytest.mark.parametrize("split", [False, True])
def test_every_apply_is_traced_once_for_its_shapes_and_once_for_its_programs(split: bool) -> None:
    traces = 0

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        nonlocal traces
        traces += 1
        return jnp.tanh(inputs * params["w"])

    counted = Chunk(name="counted", init=lambda key: {"w": jnp.ones(WIDTH)}, apply=apply)
    graph = chain(3, 2, split=split)
    programs = compile_all([embedding(), counted, head()], graph, make_batch(2), optax.adam(0.1))
    trainer = Trainer(programs, graph)
    for step in range(3):
        trainer.step(make_batch(2, step), step, views=step != 1)
    assert traces == 2


def test_other_shapes_are_refused_instead_of_compiled(middle: CompiledChunk) -> None:
    params = initial([middle]).params
    with pytest.raises(TypeError, match="float32"):
        middle.of().forward(params, (ONES[:1],), {})


def test_nothing_changes_where_the_step_is_not_applied(middle: CompiledChunk) -> None:
    params = initial([middle]).params
    state = initial([middle]).optimizer_state
    before = jax.tree.map(np.array, (params, state))
    poisoned = jax.tree.map(lambda leaf: leaf * jnp.nan, middle.zeros())
    accumulators, norm = middle.updates.reduce(poisoned)
    assert math.isnan(float(norm))
    params, state, accumulators = middle.updates.update(params, state, accumulators, float("nan"), False)
    jax.tree.map(np.testing.assert_array_equal, (params, state), before)
    assert all(not leaf.any() for leaf in jax.tree.leaves(accumulators))


def test_training_equals_a_plain_loop_and_skips_what_is_not_finite() -> None:
    chunks = [embedding(shared=True), mlp(0), head("embedding", shared=True)]
    graph = chain(3, 2, shared=((0, 2),))
    ours = optax.adamw(optax.linear_schedule(0.05, 0.01, 8), weight_decay=0.1)
    trainer = Trainer(compile_all(chunks, graph, make_batch(2), ours), graph, clip_norm=0.1)
    params = merged(trainer.params)
    plain = optax.chain(optax.clip_by_global_norm(0.1), ours)
    state = plain.init(params)
    summed = reference_loss(chunks, graph)

    @jax.jit
    def plain_step(params: Any, state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            loss, weight = summed(params, batch)
            return loss / weight

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    for step in range(8):
        batch = make_batch(2, step)
        if step == 3:
            spoilt = batch | {"weights": np.full_like(batch["weights"], np.inf)}
            verdict = trainer.step(spoilt, step)
            assert not verdict.finite
            assert not verdict.apply
        verdict = trainer.step(batch, step)
        params, state, loss, norm = plain_step(params, state, batch)
        np.testing.assert_allclose(verdict.loss, loss, rtol=1e-6)
        np.testing.assert_allclose(verdict.grad_norm, norm, rtol=1e-5)
    assert_close(merged(trainer.params), jax.device_get(params))
    tables = [trainer.params[c]["embedding"]["table"] for c in (0, 2)]
    np.testing.assert_array_equal(*tables)


def test_a_chunk_that_computes_the_loss_without_parameters_or_inputs_with_gradient() -> None:
    lonely = Chunk(
        name="lonely",
        init=lambda key: {},
        apply=lambda params, inputs, leaves, *, key: (jnp.sum(leaves["weights"]), jnp.float32(2)),
        leaves=("weights",),
    )
    graph = PipelineGraph(1, 1, ())
    (programs,) = compile_all([lonely], graph, make_batch(1))
    outputs, stash = programs.of().forward({}, (), {"weights": make_batch(1)["weights"][0]})
    assert float(outputs[1]) == 2
    grads, accumulators, token = programs.of().backward({}, stash, (), programs.zeros())
    assert (grads, accumulators) == ((), {})
    assert token.shape == ()


def test_seed_must_fit_32_bits() -> None:
    with pytest.raises(ValueError, match="seed -1 does not fit 32 bits"):
        compile_all([embedding(), head()], chain(2, 1), make_batch(1), seed=-1)
