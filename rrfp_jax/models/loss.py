"""The loss of next-token prediction, as a sum and its weight."""

import jax
import jax.numpy as jnp
import optax


def token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropy in nats, summed over tokens, and the sum of the weights; both float32 scalars.

    ``logits`` float32 ``[batch, length, vocab_size]``, ``targets`` int32 and ``weights`` float32 ``[batch, length]``.
    The mean over a step is the sum of the first divided by the sum of the second over all microbatches.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    weights = weights.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)
