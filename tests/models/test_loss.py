"""The loss from the head's input: the formula over logits, whatever the blocks, and what it keeps and computes."""

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rrfp_jax.models import loss as module
from rrfp_jax.models.loss import HeadLoss, HeadShard, joined_loss
from rrfp_jax.programs.remat import Remat, rematerialised
from rrfp_jax.programs.splitting import SplitBackward, split_backward
from tests.programs.splitting.flops import dot_flops

BATCH, LENGTH, HIDDEN, WORDS = 4, 14, 6, 40
WHOLE, SMALL = 512 << 20, 4 * BATCH * WORDS * 5  # blocks of five positions, which do not divide 14


def arrays(dtype: str = "float32", *, words_first: bool = True) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, LENGTH, HIDDEN)).astype(dtype)
    matrix = random.normal(size=(WORDS, HIDDEN) if words_first else (HIDDEN, WORDS)).astype(np.float32)
    targets = random.integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32)
    weights = random.uniform(size=(BATCH, LENGTH)).astype(np.float32)
    weights[0, :3] = 0
    return x, matrix, targets, weights


def formula(how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any) -> jax.Array:
    kernel = (matrix.T if how.words_first else matrix).astype(how.compute_dtype)
    logits = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum((losses + how.z_loss * squares) * weights)


def both(how: HeadLoss, *given: Any) -> Any:
    """Losses and gradients of input, matrix and weights, by blocks and by the formula, with a factor behind."""

    def graded(loss: Any) -> Any:
        function = jax.value_and_grad(lambda x, m, t, w: 1.5 * loss(x, m, t, w), argnums=(0, 1, 3))
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), jax.jit(function)(*given))

    return graded(lambda *each: how(*each)[0]), graded(lambda *each: formula(how, *each))


def assert_near(found: Any, expected: Any, bound: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * np.abs(other).max())


@pytest.mark.parametrize("block_bytes", [WHOLE, SMALL], ids=["whole", "blocks"])
@pytest.mark.parametrize("words_first", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_it_is_the_formula(monkeypatch: Any, block_bytes: int, words_first: bool, z_loss: float) -> None:
    monkeypatch.setattr(module, "HEAD_BLOCK_BYTES", block_bytes)
    how = HeadLoss(words_first, "float32", z_loss)
    assert_near(*both(how, *arrays(words_first=words_first)), 1e-6)


def test_in_bfloat16_losses_are_those_of_the_formula_and_gradients_are_rounded_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "HEAD_BLOCK_BYTES", SMALL)
    given = arrays("bfloat16")
    found, expected = both(HeadLoss(True, "bfloat16", 0.0), *given)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert_near(found[1], expected[1], 0.01)


def test_a_target_that_is_no_word_gives_nan() -> None:
    x, matrix, targets, weights = arrays()
    for wrong in (WORDS, -1):
        targets[1, 2] = wrong
        how = HeadLoss(words_first=True, compute_dtype="float32", z_loss=0.0)
        loss, _ = jax.jit(lambda *each, how=how: how(*each))(x, matrix, targets, weights)
        assert np.isnan(loss)


def split(remat: Remat = "none") -> SplitBackward:
    x, matrix, *leaves = arrays("bfloat16")

    def loss(params: Any, x: Any) -> Any:
        return HeadLoss(True, "bfloat16", 0.02)(x * params["scale"], params["matrix"], *leaves)[0]

    params = {"matrix": matrix, "scale": np.ones(HIDDEN, "bfloat16")}
    return split_backward(rematerialised(loss, remat), params, x)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("block_bytes", [WHOLE, SMALL], ids=["whole", "blocks"])
def test_logits_are_handed_to_nobody(monkeypatch: Any, block_bytes: int, remat: str) -> None:
    """The forward makes the gradient of its input, so that the input gradient has no product."""
    monkeypatch.setattr(module, "HEAD_BLOCK_BYTES", block_bytes)
    programs = split(remat)
    assert max(spec.size for spec in programs.residual_specs) <= BATCH * LENGTH * HIDDEN
    assert max(spec.size for spec in programs.weight_residual_specs) <= BATCH * LENGTH * HIDDEN
    params, x = {"matrix": arrays()[1], "scale": np.ones(HIDDEN, "bfloat16")}, arrays("bfloat16")[0]
    outputs, residuals = jax.eval_shape(programs.forward, params, x)
    assert dot_flops(programs.backward, params, residuals, outputs) == 0


@pytest.mark.one_in(5)
@pytest.mark.parametrize("block_bytes", [WHOLE, SMALL], ids=["whole", "blocks"])
@pytest.mark.parametrize("words_first", [True, False])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2, "context": 2}, {"tensor": 2, "fsdp": 2}], ids=str)
def test_on_a_mesh_it_is_the_same(monkeypatch: Any, axes: dict[str, int], words_first: bool, block_bytes: int) -> None:
    monkeypatch.setattr(module, "HEAD_BLOCK_BYTES", block_bytes // 4 if block_bytes == SMALL else block_bytes)
    sizes = tuple(axes.values())
    mesh = Mesh(np.reshape(jax.devices()[: math.prod(sizes)], sizes), tuple(axes))
    rows = PartitionSpec("fsdp" if "fsdp" in axes else None, "context" if "context" in axes else None)
    words = "tensor" if "tensor" in axes else None
    places = (rows, PartitionSpec(words) if words_first else PartitionSpec(None, words), rows, rows)
    given = arrays(words_first=words_first)
    how = HeadLoss(words_first, "float32", 0.02)
    placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(given, places, strict=True)]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found, _ = both(how, *placed)
    assert_near(found, both(how, *given)[1], 1e-6)


# -- shards of the words -----------------------------------------------------------------------------------------------


def by_shards(how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any, *, num_shards: int = 3) -> jax.Array:
    shard, axis = HeadShard(how.words_first, how.compute_dtype), 0 if how.words_first else 1
    bounds = [number * WORDS // num_shards for number in range(num_shards + 1)]
    found = [
        shard(x, jax.lax.slice_in_dim(matrix, start, stop, axis=axis), targets - start)
        for start, stop in pairwise(bounds)
    ]
    normalisers, target_logits = map(jnp.stack, zip(*found, strict=True))
    return joined_loss(normalisers, target_logits, targets, weights, words=WORDS, z_loss=how.z_loss)[0]


def gradients(loss: Any, *given: Any) -> Any:
    function = jax.value_and_grad(loss, argnums=(0, 1, 3))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), jax.jit(function)(*given))


@pytest.mark.parametrize("block_bytes", [WHOLE, SMALL // 3], ids=["whole", "blocks"])
@pytest.mark.parametrize("words_first", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
@pytest.mark.one_in(4)
def test_shards_are_the_formula(monkeypatch: Any, block_bytes: int, words_first: bool, z_loss: float) -> None:
    monkeypatch.setattr(module, "HEAD_BLOCK_BYTES", block_bytes)
    how, given = HeadLoss(words_first, "float32", z_loss), arrays(words_first=words_first)
    found = gradients(lambda *each: by_shards(how, *each), *given)
    assert_near(found, gradients(lambda *each: formula(how, *each), *given), 1e-6)


@pytest.mark.parametrize("sure", [1.0, 3.0], ids=["unsure", "nearly sure"])
def test_in_bfloat16_shards_lose_no_more_than_the_whole_head(sure: float) -> None:
    """Where the model is nearly sure of a target, its word and the softmax's mean of words nearly cancel."""
    x, matrix, targets, weights = arrays("bfloat16")
    x = (x + sure * matrix[targets]).astype("bfloat16")
    how, exact = HeadLoss(True, "bfloat16", 0.0), HeadLoss(True, "float32", 0.0)
    matrix = matrix.astype("bfloat16").astype(np.float32)
    true = gradients(lambda *each: formula(exact, *each), x.astype(np.float32), matrix, targets, weights)

    def error(loss: Any) -> float:
        found = gradients(loss, x, matrix, targets, weights)
        return float(np.linalg.norm(found[1][0] - true[1][0]) / np.linalg.norm(true[1][0]))

    assert error(lambda *each: by_shards(how, *each)) <= 1.5 * error(lambda *each: how(*each)[0])


@pytest.mark.parametrize("remat", ["none", "full"])
def test_logits_of_a_shard_are_handed_to_nobody(monkeypatch: Any, remat: str) -> None:
    monkeypatch.setattr(module, "HEAD_BLOCK_BYTES", SMALL)
    x, matrix, targets, _ = arrays("bfloat16")

    def numbers(params: Any, x: Any) -> Any:
        return HeadShard(True, "bfloat16")(x * params["scale"], params["matrix"], targets)

    params = {"matrix": matrix, "scale": np.ones(HIDDEN, "bfloat16")}
    programs = split_backward(rematerialised(numbers, remat), params, x)
    assert max(spec.size for spec in programs.residual_specs) <= BATCH * LENGTH * HIDDEN
    assert max(spec.size for spec in programs.weight_residual_specs) <= BATCH * LENGTH * HIDDEN
    outputs, residuals = jax.eval_shape(programs.forward, params, x)
    assert dot_flops(programs.backward, params, residuals, outputs) == 0
