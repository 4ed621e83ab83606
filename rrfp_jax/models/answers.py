"""How many answers greedy decoding would write without a fault, counted where the loss is.

An *answer* is what is to be predicted at a stretch: neighbouring tokens of one sample whose targets count in the loss,
for example all behind a prompt, or the line behind a picture, the token that ends it included. Greedy decoding from
what stands before writes an answer exactly if every token of it is the likeliest one after those before, and these are
then the tokens that the model is given in evaluation. So no text has to be generated to know. How far another answer is
from the right one, in edits, cannot be known in this way.
"""

import jax
import jax.numpy as jnp
import numpy as np

ANSWERS = "answers"
"""The named sum of answers."""
EXACT_ANSWERS = "exact_answers"
"""The named sum of those that are right in every token."""
ANSWER_TOKENS = "answer_tokens"
"""The named sum of their tokens."""
RIGHT_TOKENS = "right_tokens"
"""The named sum of those that are the likeliest one."""
COUNTS = (ANSWERS, EXACT_ANSWERS, ANSWER_TOKENS, RIGHT_TOKENS)
"""Named sums that count, and are no part of the loss."""


def answer_counts(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    segments: jax.Array | None = None,
    *,
    order: np.ndarray | None = None,
) -> dict[str, jax.Array]:
    """The named sums of a microbatch, float32 scalars that are whole numbers.

    ``logits`` float ``[batch, length, vocab_size]``; the others ``[batch, length]``: ``targets`` int32, ``weights``,
    0 where a target does not count, and ``segments``, the sample that stands there, None where each row is one.
    ``order`` int32 ``[length]`` is the natural position of what stands at each place; None: the same.
    """
    is_right, counts = jnp.argmax(logits, axis=-1) == targets, weights > 0
    samples = jnp.ones_like(targets) if segments is None else segments
    if order is not None:
        home = np.argsort(order)
        is_right, counts, samples = (each[:, home] for each in (is_right, counts, samples))
    goes_on = counts[:, 1:] & counts[:, :-1] & (samples[:, 1:] == samples[:, :-1])
    edge = jnp.zeros_like(counts[:, :1])
    is_first = counts & ~jnp.concatenate([edge, goes_on], axis=1)
    is_last = counts & ~jnp.concatenate([goes_on, edge], axis=1)
    is_fault = (counts & ~is_right).astype(jnp.int32)
    faults = jnp.cumsum(is_fault, axis=1)
    # Faults only grow along a row, so the largest number before any answer is that before the present one.
    before = jax.lax.cummax(jnp.where(is_first, faults - is_fault, 0), axis=1)
    found = {
        ANSWERS: is_first,
        EXACT_ANSWERS: is_last & (faults == before),
        ANSWER_TOKENS: counts,
        RIGHT_TOKENS: counts & is_right,
    }
    return {name: jnp.sum(each, dtype=jnp.float32) for name, each in found.items()}
