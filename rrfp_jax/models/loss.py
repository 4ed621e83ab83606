"""The loss of a language model, and the answers that its logits get right.

Logits are by far the largest arrays of a model with many words: float32 ``[batch, length, vocab_size]``.
:class:`HeadLoss` computes the loss from the input of the head and makes logits block by block, in two passes, so that
none are kept:

* The forward goes over blocks of positions. A block has its logits of all words, hence its normalisers, hence the
  gradient of its logits already, but for the factor by which the loss itself is multiplied later. So it makes the
  gradient of the head's input at once, and the input gradient of the chunk computes nothing here but a scaling.
* The gradient of the head's matrix goes over blocks of words, each of which has its own rows of that gradient. It makes
  logits again from the input and the normalisers. (Over blocks of positions every block would read and write the
  gradient of the whole matrix.)

Kept between the two are the input, its gradient and two numbers a token. Logits and their softmax are float32; the
gradient of logits is rounded to the compute dtype, as those of all other activations are, before it goes into the two
products. No target is looked up or scattered: comparing words with targets fuses with the softmax, and holds where the
words are cut over devices.

In float8 the input, kept rounded, has one scale, and so has the matrix; the gradient of logits has one for each block.

Where the words are cut into shards in chunks of their own, :class:`HeadShard` gives two numbers a token of each shard,
in the same two passes, and :func:`joined_loss` the loss. A shard does not know the gradient of its logits in its
forward, but its own softmax, and so, for targets among its words, the gradient of its own cross entropy: all but two
factors a token of that of its input.

:func:`answer_counts` counts the answers that greedy decoding would write without a fault. An *answer* is a run of
neighbouring tokens of one sample whose targets count in the loss, for example all behind a prompt, or the line behind a
picture, the token that ends it included. Greedy decoding from the text before it writes an answer exactly if every
token of it is the likeliest one after those before, and these are the tokens that the model is given in evaluation. So
no text has to be generated to know. How far another answer is from the right one, in edits, cannot be known in this
way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh

from rrfp_jax.costs.layer_sizes import HEAD_BLOCK_BYTES
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR
from rrfp_jax.models.float8 import E4M3, E5M2, Scaled, check_float8, joint_products, rounded, scaled_einsum
from rrfp_jax.programs.remat import KEPT_ALWAYS
from rrfp_jax.programs.splitting.joined import widens
from rrfp_jax.programs.target import current_target

ANSWERS = "answers"
"""Named sum: the number of answers."""
EXACT_ANSWERS = "exact_answers"
"""Named sum: the number of answers that are right in every token."""
ANSWER_TOKENS = "answer_tokens"
"""Named sum: the number of their tokens."""
RIGHT_TOKENS = "right_tokens"
"""Named sum: the number of these tokens that are the likeliest one."""
COUNTS = (ANSWERS, EXACT_ANSWERS, ANSWER_TOKENS, RIGHT_TOKENS)
"""Named sums that count, and are no part of the loss."""


# -- from logits -------------------------------------------------------------------------------------------------------


def token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cross entropy in nats, summed over tokens by weight, and the sum of the weights; float32 scalars.

    ``logits`` float32 ``[batch, length, vocab_size]``, ``targets`` int32 and ``weights`` float32 ``[batch, length]``.
    The mean over a step is the sum of the first divided by the sum of the second over all microbatches.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    weights = weights.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


def normaliser_loss(logits: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the squared logarithms of the softmax's normalisers, summed over tokens by weight; a float32 scalar."""
    squares = jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
    return jnp.sum(squares * weights.astype(jnp.float32))


def answer_counts(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    segments: jax.Array | None = None,
    *,
    order: np.ndarray | None = None,
) -> dict[str, jax.Array]:
    """Returns the named sums :data:`COUNTS` of a microbatch, float32 scalars that are whole numbers.

    ``logits`` float ``[batch, length, vocab_size]``; the others ``[batch, length]``: ``targets`` int32, ``weights``,
    0 where a target does not count, and ``segments``, the sample that each token belongs to, None if each row is one.
    ``order`` int32 ``[length]`` is the natural position of the token at each place; None: the same.
    """
    return counts_of_right(jnp.argmax(logits, axis=-1) == targets, weights, segments, order=order)


def counts_of_right(
    is_right: jax.Array, weights: jax.Array, segments: jax.Array | None = None, *, order: np.ndarray | None = None
) -> dict[str, jax.Array]:
    """Returns the named sums of :func:`answer_counts`, given for each token whether its target is the likeliest one."""
    counts = weights > 0
    samples = jnp.ones_like(is_right) if segments is None else segments
    if order is not None:
        home = np.argsort(order)
        is_right, counts, samples = (each[:, home] for each in (is_right, counts, samples))
    goes_on = counts[:, 1:] & counts[:, :-1] & (samples[:, 1:] == samples[:, :-1])
    edge = jnp.zeros_like(counts[:, :1])
    is_first = counts & ~jnp.concatenate([edge, goes_on], axis=1)
    is_last = counts & ~jnp.concatenate([goes_on, edge], axis=1)
    is_fault = (counts & ~is_right).astype(jnp.int32)
    faults = jnp.cumsum(is_fault, axis=1)
    # faults only grow along a row, so the largest number before any answer is the one before the present answer
    before = jax.lax.cummax(jnp.where(is_first, faults - is_fault, 0), axis=1)
    found = {
        ANSWERS: is_first,
        EXACT_ANSWERS: is_last & (faults == before),
        ANSWER_TOKENS: counts,
        RIGHT_TOKENS: counts & is_right,
    }
    return {name: jnp.sum(each, dtype=jnp.float32) for name, each in found.items()}


# -- from the input of the head ----------------------------------------------------------------------------------------


class HeadLoss(NamedTuple):
    """The loss as a function of the head's input and matrix. All fields are static: they decide the traced program."""

    words_first: bool
    """Whether the matrix is ``[vocab_size, hidden]``, as a table of embeddings is, or ``[hidden, vocab_size]``."""
    compute_dtype: str
    """The dtype of the operands of products."""
    z_loss: float
    """Factor of the squared logarithms of the normalisers; 0: the loss has no such part."""
    float8: bool = False
    """Whether the operands are rounded to float8."""

    def __call__(
        self, x: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the loss, summed over tokens by weight, and the z-loss in it; both float32 scalars.

        ``x`` ``[batch, length, hidden]`` in the compute dtype, ``matrix`` in the dtype of parameters, ``targets`` int
        and ``weights`` ``[batch, length]``. Only the first result has a gradient.
        """
        losses, squares = _token_losses(self, _input(self, x), matrix, targets, weights.astype(jnp.float32))
        return losses, jax.lax.stop_gradient(squares)

    def logits(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        """Returns whole logits, float32 ``[batch, length, vocab_size]``."""
        if self.float8:
            return joint_products(x.astype(jnp.float32), [matrix.T if self.words_first else matrix])[0]
        # logits rounded to bfloat16 would cost the loss about two decimal digits
        subscripts, matrix = "blh,vh->blv" if self.words_first else "blh,hv->blv", matrix.astype(self.compute_dtype)
        return jnp.einsum(subscripts, x, matrix, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    normalisers, losses = _over_positions(how, _operand(how, x), matrix, targets, weights, with_gradient=False)
    return _summed(how, normalisers, losses, weights)


def _forward(how: HeadLoss, x: Any, matrix: Any, targets: Any, weights: Any) -> Any:
    x = _operand(how, x)
    made = _over_positions(how, x, matrix, targets, weights, with_gradient=True)
    # rematerialisation keeps these: making them again would make the logits again
    normalisers, losses, gradient = (checkpoint_name(each, KEPT_ALWAYS) for each in made)
    return _summed(how, normalisers, losses, weights), (x, matrix, targets, weights, normalisers, losses, gradient)


def _backward(how: HeadLoss, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, Any, None, Any]:
    x, matrix, targets, weights, normalisers, losses, gradient = residuals
    factor = cotangents[0]
    matrix_grad = _matrix_gradient(how, x, matrix, targets, normalisers, weights * factor)
    weights_grad = factor * (losses + how.z_loss * jnp.square(normalisers))
    return (gradient * factor).astype(_dtype(how, x)), matrix_grad, None, weights_grad


_token_losses.defvjp(_forward, _backward)


def _summed(how: HeadLoss, normalisers: Any, losses: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    squares = how.z_loss * jnp.sum(jnp.square(normalisers) * weights) if how.z_loss else jnp.float32(0)
    return jnp.sum(losses * weights) + squares, squares


class HeadShard(NamedTuple):
    """Two numbers a token, from which :func:`joined_loss` makes the loss, as a function of the head's input and of a
    shard of its matrix. The fields are those of :class:`HeadLoss`."""

    words_first: bool
    compute_dtype: str
    float8: bool = False

    def __call__(self, x: jax.Array, matrix: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the logarithms of the softmax's normalisers over the words of the shard, and the logits of the
        targets, 0 for those of other shards; float32 ``[batch, length]``.

        ``targets`` are counted from the first word of the shard.
        """
        how = HeadLoss(self.words_first, self.compute_dtype, 0.0, self.float8)
        return _shard_numbers(how, _input(how, x), matrix, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shard_numbers(how: HeadLoss, x: Any, matrix: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    normalisers, target_logits = _over_positions(how, _operand(how, x), matrix, targets, None, with_gradient=False)
    return normalisers, target_logits


def _shard_forward(how: HeadLoss, x: Any, matrix: Any, targets: Any) -> Any:
    x = _operand(how, x)
    made = _over_positions(how, x, matrix, targets, None, with_gradient=True)
    normalisers, target_logits, gradient = (checkpoint_name(each, KEPT_ALWAYS) for each in made)
    return (normalisers, target_logits), (x, matrix, targets, normalisers, gradient)


def _shard_backward(how: HeadLoss, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, Any, None]:
    x, matrix, targets, normalisers, gradient = residuals
    factors, of_targets = cotangents
    axis = 0 if how.words_first else 1
    is_here = (targets >= 0) & (targets < matrix.shape[axis])
    words = jnp.take(matrix, jnp.where(is_here, targets, 0), axis=axis).astype(how.compute_dtype)
    words = words if how.words_first else jnp.moveaxis(words, 0, -1)
    # nearly sure of a target, both factors of its word are nearly one; only their difference is multiplied by it
    x_grad = gradient * factors[..., None] + words * jnp.where(is_here, factors + of_targets, 0)[..., None]
    matrix_grad = _matrix_gradient(how, x, matrix, targets, normalisers, -of_targets, factors)
    return x_grad.astype(_dtype(how, x)), matrix_grad, None


_shard_numbers.defvjp(_shard_forward, _shard_backward)


def joined_loss(
    normalisers: jax.Array,
    target_logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    words: int,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of :class:`HeadLoss` from those of all shards, ``[shards, batch, length]``, of ``words``
    words together; only the first has a gradient."""
    whole, weights = jax.nn.logsumexp(normalisers, axis=0), weights.astype(jnp.float32)
    is_word = (targets >= 0) & (targets < words)
    losses = whole - jnp.where(is_word, jnp.sum(target_logits, axis=0), jnp.nan)
    squares = z_loss * jnp.sum(jnp.square(whole) * weights) if z_loss else jnp.float32(0)
    return jnp.sum(losses * weights) + squares, jax.lax.stop_gradient(squares)


def shard_logits(
    logits: jax.Array, targets: jax.Array, first: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the results of :class:`HeadShard` from the shard's logits, and besides the largest of them and the number
    of its word; ``first`` is that of the first one, from which ``targets`` are not counted."""
    numbers = first + jnp.arange(logits.shape[-1])
    target_logits = jnp.sum(logits * (targets[..., None] == numbers), axis=-1)
    likeliest = first + jnp.argmax(logits, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1), target_logits, jnp.max(logits, axis=-1), likeliest


def likeliest_words(largest: jax.Array, words: jax.Array) -> jax.Array:
    """Returns the likeliest word of each token, given the largest logit of every shard and its word, in order."""
    return jnp.take_along_axis(words, jnp.argmax(largest, axis=0)[None], axis=0)[0]


def _over_positions(
    how: HeadLoss, x: Scaled, matrix: Any, targets: Any, weights: Any, *, with_gradient: bool
) -> list[jax.Array]:
    """Returns the normalisers' logarithms and the cross entropies, float32 ``[batch, length]``, and ``x``'s gradient.

    Without weights, of a shard, the second are the logits of targets, 0 for those elsewhere, and the third is the
    gradient of the first less the second.
    """
    words, numbers = _by_words(how, matrix)
    batch, length, _ = x.values.shape
    parts = get_abstract_mesh().shape.get(CONTEXT, 1)
    parts = parts if length % parts == 0 else 1
    size = length // parts
    block = -(-size // _num_blocks(x.values.shape, numbers.size))

    def compute(values: Any, targets: Any, weights: Any = None) -> list[jax.Array]:
        logits = _logits(how, x._replace(values=values), words)
        normalisers = jax.nn.logsumexp(logits, axis=(-2, -1))
        is_target = targets[..., None, None] == numbers
        # jnp.where would need zeros of this shape, which XLA takes out of the loop and holds
        target_logits = jnp.sum(logits * is_target, axis=(-2, -1))
        if weights is None:
            losses, weights = target_logits, jnp.ones_like(normalisers)
        else:
            is_word = (targets >= 0) & (targets < numbers.size)
            losses = normalisers - jnp.where(is_word, target_logits, jnp.nan)
        if not with_gradient:
            return [normalisers, losses]
        gradient = _logits_gradient(how, logits, is_target, normalisers=normalisers, weights=weights)
        subscripts = "bcltv,tvh->bclh" if how.words_first else "bcltv,htv->bclh"
        return [normalisers, losses, scaled_einsum(subscripts, gradient, words, words_dtype)]

    words_dtype = jnp.dtype(how.compute_dtype)
    tokens = (x.values, targets) if weights is None else (x.values, targets, weights)
    cut = [(each.reshape(batch, parts, size, *each.shape[2:]), 2) for each in tokens]
    made = _by_blocks(compute, cut, (2,) * (3 if with_gradient else 2), size, block)
    return [each.reshape(batch, length, *each.shape[3:]) for each in made]


def _matrix_gradient(how: HeadLoss, x: Scaled, matrix: Any, *tokens: Any) -> jax.Array:
    """Returns the gradient of the matrix; ``tokens`` are targets, normalisers, weights times the loss's factor, and of
    a shard the factors of its normalisers."""
    shape, dtype = matrix.shape, matrix.dtype
    words, numbers = _by_words(how, matrix)
    size = numbers.shape[1]
    # products like multiples of 128
    block = min(-(-size // _num_blocks(x.values.shape, numbers.size) // 128) * 128, size)
    values, targets, *rest = (each[:, None] for each in (x.values, *tokens))
    rows = x._replace(values=values)
    numbers_of_tokens = dict(zip(("normalisers", "weights", "factors"), rest, strict=False))
    dtype_of_sum = jnp.promote_types(dtype, jnp.float32) if widens() else jnp.dtype(how.compute_dtype)

    def compute(values: Any, numbers: Any) -> list[jax.Array]:
        is_target = targets[..., None, None] == numbers
        logits = _logits(how, rows, words._replace(values=values))
        gradient = _logits_gradient(how, logits, is_target, **numbers_of_tokens)
        subscripts = "bclh,bcltv->tvh" if how.words_first else "bclh,bcltv->htv"
        return [scaled_einsum(subscripts, rows, gradient, dtype_of_sum)]

    axis = 1 if how.words_first else 2
    (made,) = _by_blocks(compute, [(words.values, axis), (numbers, 1)], (axis,), size, block)
    return made.reshape(shape).astype(dtype)


def _input(how: HeadLoss, x: jax.Array) -> jax.Array:
    """Returns the input of the head as a residual can tell its dtype: one in float8 cannot."""
    if how.float8:
        check_float8(current_target())
    return x.astype(how.compute_dtype) if how.float8 else x


def _operand(how: HeadLoss, array: jax.Array) -> Scaled:
    return rounded(E4M3, array)[0] if how.float8 else Scaled(array, None)


def _dtype(how: HeadLoss, x: Scaled) -> Any:
    return how.compute_dtype if how.float8 else x.values.dtype


def _logits(how: HeadLoss, x: Scaled, matrix: Scaled) -> jax.Array:
    """Maps ``x`` ``[batch, parts, length, hidden]`` to float32 logits ``[batch, parts, length, parts, words]``."""
    return scaled_einsum("bclh,tvh->bcltv" if how.words_first else "bclh,htv->bcltv", x, matrix, jnp.float32)


def _logits_gradient(
    how: HeadLoss, logits: Any, is_target: Any, *, normalisers: Any, weights: Any, factors: Any = None
) -> Scaled:
    """Returns the gradient of ``logits`` as the operand of a product; the last three have an entry for each token.

    ``factors`` are those of the normalisers; None: the weights', with that of the z-loss.
    """
    softmax = jnp.exp(logits - normalisers[..., None, None])
    if factors is None:
        factors = weights * (1 + 2 * how.z_loss * normalisers) if how.z_loss else weights
    gradient = softmax * factors[..., None, None] - is_target * weights[..., None, None]
    return rounded(E5M2, gradient)[0] if how.float8 else Scaled(gradient.astype(how.compute_dtype), None)


def _by_words(how: HeadLoss, matrix: jax.Array) -> tuple[Scaled, jax.Array]:
    """Returns the matrix with its words as ``[parts, size]``, as ``tensor`` cuts them, and their numbers like that."""
    axis = 0 if how.words_first else 1
    num_words, parts = matrix.shape[axis], get_abstract_mesh().shape.get(TENSOR, 1)
    parts = parts if num_words % parts == 0 else 1
    shape = (parts, num_words // parts)
    # parts are an axis of their own, so that no block of words crosses devices
    numbers = jnp.arange(num_words, dtype=jnp.int32).reshape(shape)
    words = _operand(how, matrix if how.float8 else matrix.astype(how.compute_dtype))
    values = words.values.reshape(*matrix.shape[:axis], *shape, *matrix.shape[axis + 1 :])
    return words._replace(values=values), numbers


def _num_blocks(shape: Sequence[int], num_words: int) -> int:
    """Returns the number of blocks with which the logits of one take at most ``HEAD_BLOCK_BYTES`` on a device."""
    batch, length, _ = shape
    mesh = get_abstract_mesh().shape
    logits_bytes = 4 * batch * length * num_words
    for axes, size in (((FSDP, EXPERT), batch), ((CONTEXT,), length), ((TENSOR,), num_words)):
        devices = int(np.prod([mesh.get(axis, 1) for axis in axes]))
        logits_bytes //= devices if size % devices == 0 else 1
    return max(1, -(-logits_bytes // HEAD_BLOCK_BYTES))


def _by_blocks(
    compute: Callable[..., list[jax.Array]],
    parts: Sequence[tuple[jax.Array, int]],
    axes: Sequence[int],
    size: int,
    block: int,
) -> list[jax.Array]:
    """Calls ``compute`` with each block of ``parts``, arrays with the axis of ``size`` along which they are cut.

    The results are joined along ``axes``. The last block begins earlier where blocks do not divide the whole; it
    computes the overlap again, to the same values.
    """
    if block >= size:
        return compute(*(array for array, _ in parts))
    pieces = [jax.ShapeDtypeStruct((*a.shape[:axis], block, *a.shape[axis + 1 :]), a.dtype) for a, axis in parts]
    made = jax.eval_shape(compute, *pieces)
    whole = [
        jnp.zeros((*m.shape[:axis], size, *m.shape[axis + 1 :]), m.dtype) for m, axis in zip(made, axes, strict=True)
    ]

    def step(held: list[jax.Array], start: jax.Array) -> tuple[list[jax.Array], None]:
        blocks = (jax.lax.dynamic_slice_in_dim(array, start, block, axis) for array, axis in parts)
        results = zip(held, compute(*blocks), axes, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(h, r, start, axis) for h, r, axis in results], None

    # slices have one size, so the last one begins earlier where blocks do not divide the whole
    starts = np.minimum(np.arange(-(-size // block)) * block, size - block)
    return jax.lax.scan(step, whole, jnp.asarray(starts, jnp.int32))[0]
