"""Which token comes next: the likeliest, or one drawn from the nucleus of the distribution (Holtzman et al. 2020)."""

import jax
import jax.numpy as jnp


def nucleus(logits: jax.Array, top_p: jax.typing.ArrayLike) -> jax.Array:
    """``logits`` ``[..., vocab_size]`` with minus infinity for all but the likeliest tokens that have ``top_p``.

    Those are as few as together have at least this probability, and one at least; of equally likely tokens the first
    ones count as likelier.
    """
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ordered = jnp.take_along_axis(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    is_in = (before < top_p).at[..., 0].set(True)
    places = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(is_in, places, axis=-1), logits, -jnp.inf)


def next_token(
    logits: jax.Array, key: jax.Array, *, temperature: jax.typing.ArrayLike, top_p: jax.typing.ArrayLike
) -> jax.Array:
    """An int32 token for ``logits`` ``[vocab_size]``; the likeliest where the temperature is 0."""
    is_greedy = jnp.asarray(temperature) == 0
    tempered = logits / jnp.where(is_greedy, 1.0, temperature)
    drawn = jax.random.categorical(key, nucleus(tempered, top_p))
    return jnp.where(is_greedy, jnp.argmax(logits), drawn).astype(jnp.int32)
