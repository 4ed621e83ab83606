"""The model as a whole: against the reference, and over all cuts."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models import language_model
from tests.models.reference import cut, make_leaves, reference_loss, run_chunks, small_config

CUTS = [[4], [2, 2], [1, 3], [0, 2, 2, 0], [4, 0], [1, 1, 1, 1]]


def loss_gradient(chunks, params, leaves):
    return jax.jit(jax.grad(lambda p: run_chunks(chunks, p, leaves)[0]))(params)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_loss_equals_the_reference(tie_embeddings):
    config = small_config(tie_embeddings=tie_embeddings)
    chunks, params = cut(config, [4])
    leaves = make_leaves(config)
    loss_sum, weight = jax.jit(partial(run_chunks, chunks))(params, leaves)
    expected_loss, expected_weight = reference_loss(config, params[0], leaves)
    assert float(loss_sum) == pytest.approx(expected_loss, rel=1e-5)
    assert float(weight) == expected_weight


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_every_cut_is_the_same_model(tie_embeddings):
    config = small_config(tie_embeddings=tie_embeddings)
    leaves = make_leaves(config)
    chunks, (whole,) = cut(config, [4])
    expected = run_chunks(chunks, [whole], leaves)
    for counts in CUTS:
        chunks, params = cut(config, counts)
        for chunk_params in params:
            chex.assert_trees_all_equal(chunk_params, {name: whole[name] for name in chunk_params})
        assert set().union(*params) == set(whole)
        chex.assert_trees_all_equal(run_chunks(chunks, params, leaves), expected)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_layers_have_global_names(tie_embeddings):
    chunks, params = cut(small_config(tie_embeddings=tie_embeddings), [1, 3])
    head = {"embedding", "final_norm"} if tie_embeddings else {"final_norm", "head"}
    assert set(params[0]) == {"embedding", "layers.0"}
    assert set(params[1]) == {"layers.1", "layers.2", "layers.3"} | head
    assert [chunk.leaves for chunk in chunks] == [("tokens",), ("targets", "weights")]
    assert [chunk.shared for chunk in chunks] == [frozenset({"embedding"} if tie_embeddings else ())] * 2


def test_one_chunk_shares_nothing_even_when_tied():
    chunks, (params,) = cut(small_config(tie_embeddings=True), [4])
    assert chunks[0].shared == frozenset()
    assert "head" not in params


def test_layers_start_differently_and_from_the_key_alone():
    _, (params,) = cut(small_config(), [4])
    _, (again,) = cut(small_config(), [4])
    _, (other,) = cut(small_config(), [4], seed=1)
    chex.assert_trees_all_equal(params, again)
    kernels = [tree[name]["mlp"]["up"]["kernel"] for tree in (params, other) for name in ("layers.0", "layers.1")]
    assert len({float(kernel[0, 0]) for kernel in kernels}) == 4


def test_residual_writers_start_smaller():
    (chunk,) = language_model(small_config(hidden=128, mlp_dim=128)).split(1)
    mlp = jax.jit(chunk.init)(jax.random.key(0))["layers.0"]["mlp"]
    assert np.std(mlp["up"]["kernel"]) == pytest.approx(0.2, rel=0.05)
    assert np.std(mlp["down"]["kernel"]) == pytest.approx(0.2 / np.sqrt(8), rel=0.05)


def test_bfloat16_compute_keeps_float32_parameters_gradients_and_loss():
    exact, params = cut(small_config(), [2, 2])
    config = small_config(compute_dtype="bfloat16")
    chunks, low_params = cut(config, [2, 2])
    chex.assert_trees_all_equal(low_params, params)
    leaves = make_leaves(config)
    hidden = jax.eval_shape(chunks[0].apply, params[0], None, leaves)
    assert hidden.dtype == jnp.bfloat16
    (loss, weight), gradients = jax.jit(jax.value_and_grad(partial(run_chunks, chunks), has_aux=True))(params, leaves)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
    assert loss.dtype == weight.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(run_chunks(exact, params, leaves)[0]), rel=0.02)


def test_parameters_may_be_stored_in_bfloat16():
    (chunk,) = language_model(small_config(param_dtype="bfloat16")).split(1)
    shapes = jax.eval_shape(chunk.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


def test_apply_is_pure_and_traces_under_jit_and_vjp():
    config = small_config()
    chunks, params = cut(config, [2, 2])
    leaves = make_leaves(config)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def forward_and_back(params, leaves):
        (loss, _), pullback = jax.vjp(lambda p: run_chunks(chunks, p, leaves), params)
        return loss, pullback((jnp.float32(1), jnp.float32(0)))[0]

    first, second = forward_and_back(params, leaves), forward_and_back(params, leaves)
    chex.assert_trees_all_equal(first, second)
    plain = loss_gradient(chunks, params, leaves)
    chex.assert_trees_all_close(first[1], plain, rtol=1e-3, atol=1e-4)


def test_tied_gradients_of_two_copies_add_up_to_that_of_one():
    config = small_config(tie_embeddings=True)
    leaves = make_leaves(config)
    gradients = {}
    for counts in ([4], [2, 2]):
        chunks, params = cut(config, counts)
        gradients[len(counts)] = loss_gradient(chunks, params, leaves)
    summed = sum(gradient["embedding"]["table"] for gradient in gradients[2])
    np.testing.assert_allclose(summed, gradients[1][0]["embedding"]["table"], rtol=1e-4, atol=1e-3)
