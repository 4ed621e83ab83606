"""The loss of a language model from what goes into its head, without keeping logits.

Logits are by far the largest arrays of a model with many words: float32 ``[batch, length, vocab_size]``. Here they are
made block by block and dropped, in two passes:

* The forward goes over blocks of positions. A block has its logits of all words, hence its normalisers, hence the
  gradient of its logits already, but for the factor by which the loss itself is multiplied later. So it makes the
  gradient of the head's input at once, and the input gradient of the chunk computes nothing here but a scaling.
* The gradient of the head's matrix goes over blocks of words, each of which has its own rows of that gradient. It makes
  logits again from the input and the normalisers. (Over blocks of positions every block would read and write the
  gradient of the whole matrix.)

What is kept between the two is the input, its gradient and two numbers a token. Logits and their softmax are float32;
the gradient of logits is rounded to the compute dtype, as those of all other activations are, before it goes into the
two products. No target is looked up or scattered: comparing words with targets fuses with the softmax, and holds where
the words are cut over devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh

from rrfp_jax.costs.layer_sizes import HEAD_BLOCK_BYTES
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR
from rrfp_jax.programs.remat import KEPT_ALWAYS
from rrfp_jax.programs.splitting.widening import widens


class HeadLoss(NamedTuple):
    """How the loss is made of logits; all plain values, since it decides what is traced."""

    words_first: bool
    """Whether the matrix is ``[vocab_size, hidden]``, as a table of embeddings is, or ``[hidden, vocab_size]``."""
    compute_dtype: str
    """The dtype of the operands of products."""
    z_loss: float
    """The factor of the squares of the normalisers' logarithms; 0: the loss has no such part."""

    def __call__(
        self, x: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss, summed over tokens by weight, and the z-loss in it; both float32 scalars.

        ``x`` ``[batch, length, hidden]`` in the compute dtype, ``matrix`` in the dtype of parameters, ``targets`` int
        and ``weights`` ``[batch, length]``. Only the first result has a gradient.
        """
        losses, squares = _token_losses(self, x, matrix, targets, weights.astype(jnp.float32))
        return losses, jax.lax.stop_gradient(squares)


class _Cut(NamedTuple):
    """Positions or words ``[parts, size]``, as devices hold them, and how many of each part make a block."""

    parts: int
    size: int
    block: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    normalisers, losses = _over_positions(how, x, matrix, targets, weights, with_gradient=False)
    return _summed(how, normalisers, losses, weights)


def _forward(how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any) -> Any:
    made = _over_positions(how, x, matrix, targets, weights, with_gradient=True)
    # rematerialisation keeps these: making them again would make the logits again
    normalisers, losses, gradient = (checkpoint_name(each, KEPT_ALWAYS) for each in made)
    return _summed(how, normalisers, losses, weights), (x, matrix, targets, weights, normalisers, losses, gradient)


def _backward(how: HeadLoss, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, Any, None, Any]:
    x, matrix, targets, weights, normalisers, losses, gradient = kept
    factor = cotangents[0]
    of_matrix = _over_words(how, x, matrix, (targets, weights * factor, normalisers))
    of_weights = factor * (losses + how.z_loss * jnp.square(normalisers))
    return (gradient * factor).astype(x.dtype), of_matrix, None, of_weights


_token_losses.defvjp(_forward, _backward)


def _summed(how: HeadLoss, normalisers: Any, losses: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    squares = how.z_loss * jnp.sum(jnp.square(normalisers) * weights) if how.z_loss else jnp.float32(0)
    return jnp.sum(losses * weights) + squares, squares


def _over_positions(
    how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any, *, with_gradient: bool
) -> list[jax.Array]:
    """The normalisers' logarithms and the cross entropies, float32 ``[batch, length]``, and the gradient of ``x``."""
    matrix, numbers = _by_words(how, matrix.astype(how.compute_dtype))
    positions = _cut_of_positions(x.shape, numbers.size)

    def compute(x: Any, targets: Any, weights: Any) -> list[jax.Array]:
        logits = _logits(how, x, matrix)
        normalisers = jax.nn.logsumexp(logits, axis=(-2, -1))
        is_target = targets[..., None, None] == numbers
        of_targets = jnp.sum(logits * is_target, axis=(-2, -1))  # zeros of this shape would be taken out of the loop
        is_word = (targets >= 0) & (targets < numbers.size)
        losses = normalisers - jnp.where(is_word, of_targets, jnp.nan)
        if not with_gradient:
            return [normalisers, losses]
        gradient = _gradient_of_logits(how, logits, is_target, weights, normalisers)
        subscripts = "bcltv,tvh->bclh" if how.words_first else "bcltv,htv->bclh"
        return [normalisers, losses, jnp.einsum(subscripts, gradient, matrix)]

    batch, length, _ = x.shape
    parts = [each.reshape(batch, positions.parts, positions.size, *each.shape[2:]) for each in (x, targets, weights)]
    made = _by_blocks(compute, [(part, 2) for part in parts], (2,) * (2 + with_gradient), positions)
    return [each.reshape(batch, length, *each.shape[3:]) for each in made]


def _over_words(how: HeadLoss, x: Any, matrix: Any, of_tokens: tuple[Any, Any, Any]) -> jax.Array:
    """The gradient of the matrix, from targets, weights times the factor of the loss, and normalisers."""
    shape, dtype = matrix.shape, matrix.dtype
    matrix, numbers = _by_words(how, matrix.astype(how.compute_dtype))
    words = _cut_of_words(x.shape, numbers)
    x, targets, weights, normalisers = (each[:, None] for each in (x, *of_tokens))
    dtype_of_sum = jnp.promote_types(dtype, jnp.float32) if widens() else jnp.dtype(how.compute_dtype)

    def compute(matrix: Any, numbers: Any) -> list[jax.Array]:
        is_target = targets[..., None, None] == numbers
        gradient = _gradient_of_logits(how, _logits(how, x, matrix), is_target, weights, normalisers)
        subscripts = "bclh,bcltv->tvh" if how.words_first else "bclh,bcltv->htv"
        return [jnp.einsum(subscripts, x, gradient, preferred_element_type=dtype_of_sum)]

    axis = 1 if how.words_first else 2
    (made,) = _by_blocks(compute, [(matrix, axis), (numbers, 1)], (axis,), words)
    return made.reshape(shape).astype(dtype)


def _logits(how: HeadLoss, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """``x`` ``[batch, parts, length, hidden]`` to float32 logits ``[batch, parts, length, parts, words]``."""
    subscripts = "bclh,tvh->bcltv" if how.words_first else "bclh,htv->bcltv"
    # logits rounded to bfloat16 would cost the loss about two decimal digits
    return jnp.einsum(subscripts, x, matrix, preferred_element_type=jnp.float32)


def _gradient_of_logits(how: HeadLoss, logits: Any, is_target: Any, weights: Any, normalisers: Any) -> jax.Array:
    """In the compute dtype, shaped like ``logits``; weights and normalisers have an entry for each token."""
    softmax = jnp.exp(logits - normalisers[..., None, None])
    factors = weights * (1 + 2 * how.z_loss * normalisers) if how.z_loss else weights
    gradient = softmax * factors[..., None, None] - is_target * weights[..., None, None]
    return gradient.astype(how.compute_dtype)


def _by_words(how: HeadLoss, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The matrix with its words as ``[parts, size]``, where ``tensor`` cuts them, and the words' numbers like that."""
    axis = 0 if how.words_first else 1
    num_words, parts = matrix.shape[axis], get_abstract_mesh().shape.get(TENSOR, 1)
    parts = parts if num_words % parts == 0 else 1
    shape = (parts, num_words // parts)
    numbers = jnp.arange(num_words, dtype=jnp.int32).reshape(shape)
    return matrix.reshape(*matrix.shape[:axis], *shape, *matrix.shape[axis + 1 :]), numbers


def _cut_of_positions(shape: Sequence[int], num_words: int) -> _Cut:
    parts = get_abstract_mesh().shape.get(CONTEXT, 1)
    parts = parts if shape[1] % parts == 0 else 1
    size = shape[1] // parts
    return _Cut(parts, size, -(-size // _num_blocks(shape, num_words)))


def _cut_of_words(shape: Sequence[int], numbers: jax.Array) -> _Cut:
    parts, size = numbers.shape
    # products like multiples of 128
    block = -(-size // _num_blocks(shape, numbers.size) // 128) * 128
    return _Cut(parts, size, min(block, size))


def _num_blocks(shape: Sequence[int], num_words: int) -> int:
    """So many that the logits of one are small enough."""
    batch, length, _ = shape
    mesh = get_abstract_mesh().shape
    logits_bytes = 4 * batch * length * num_words
    for axes, size in (((FSDP, EXPERT), batch), ((CONTEXT,), length), ((TENSOR,), num_words)):
        devices = int(np.prod([mesh.get(axis, 1) for axis in axes]))
        logits_bytes //= devices if size % devices == 0 else 1
    return max(1, -(-logits_bytes // HEAD_BLOCK_BYTES))


def _by_blocks(
    compute: Callable[..., list[jax.Array]], parts: Sequence[tuple[jax.Array, int]], axes: Sequence[int], cut: _Cut
) -> list[jax.Array]:
    """``compute`` of every block of ``parts``, arrays with the axis along which they are cut.

    Results lie along ``axes``. The last block begins earlier where blocks do not divide the whole; what it computes
    again is the same.
    """
    if cut.block >= cut.size:
        return compute(*(array for array, _ in parts))
    pieces = [jax.ShapeDtypeStruct((*a.shape[:axis], cut.block, *a.shape[axis + 1 :]), a.dtype) for a, axis in parts]
    made = jax.eval_shape(compute, *pieces)
    whole = [
        jnp.zeros((*m.shape[:axis], cut.size, *m.shape[axis + 1 :]), m.dtype)
        for m, axis in zip(made, axes, strict=True)
    ]

    def step(held: list[jax.Array], start: jax.Array) -> tuple[list[jax.Array], None]:
        blocks = (jax.lax.dynamic_slice_in_dim(array, start, cut.block, axis) for array, axis in parts)
        results = zip(held, compute(*blocks), axes, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(h, r, start, axis) for h, r, axis in results], None

    starts = np.minimum(np.arange(-(-cut.size // cut.block)) * cut.block, cut.size - cut.block)
    return jax.lax.scan(step, whole, jnp.asarray(starts, jnp.int32))[0]
