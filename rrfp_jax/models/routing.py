"""Which experts compute a token, and what the router adds to the loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rrfp_jax.models.experts_config import ExpertsConfig


class Routes(NamedTuple):
    """What a router says of the tokens of a microbatch."""

    scores: jax.Array
    """The softmax over all experts, float32 ``[batch, length, experts]``."""
    experts: jax.Array
    """The experts of every token, that with the highest score first, int32 ``[batch, length, experts_per_token]``."""
    weights: jax.Array
    """By which the results of all experts are multiplied, 0 for those not chosen; float32 like ``scores``."""


def route(config: ExpertsConfig, logits: jax.Array) -> Routes:
    """From the router's float32 logits, ``[batch, length, experts]``; of equal ones that of the first expert wins."""
    scores = jax.nn.softmax(logits, axis=-1)
    experts = jax.lax.top_k(jax.lax.stop_gradient(logits), config.experts_per_token)[1]
    weights = scores * jax.nn.one_hot(experts, config.num_experts).sum(axis=-2)
    if config.renormalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    return Routes(scores, experts, weights)


def router_loss(config: ExpertsConfig, logits: jax.Array, routes: Routes, is_real: jax.Array) -> jax.Array:
    """What one layer's router adds to the loss of a microbatch, a float32 scalar; only tokens in ``is_real`` count.

    The load-balancing loss is ``num_experts * sum(f * P)``: ``f`` of an expert is the number of tokens that it is
    chosen for, ``P`` its mean score, both over the number of tokens (Fedus et al. 2021, equation 4; for several experts
    per token as Hugging Face's Mixtral has it, so that it is ``experts_per_token`` where all is even). The z-loss is
    the mean square of the logits' logsumexp (Zoph et al. 2022, equation 5).
    """
    real = is_real.astype(jnp.float32)
    count = jnp.maximum(real.sum(), 1.0)
    loss = jnp.zeros((), jnp.float32)
    if config.balance_coefficient:
        chosen = jax.nn.one_hot(routes.experts, config.num_experts).sum(axis=-2)
        shares, means = (jnp.einsum("ble,bl->e", each, real) / count for each in (chosen, routes.scores))
        loss += config.balance_coefficient * config.num_experts * jnp.sum(shares * means)
    if config.z_coefficient:
        squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        loss += config.z_coefficient * jnp.sum(squares * real) / count
    return loss
