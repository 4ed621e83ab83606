"""A mixture of experts: the MLP of a sparse layer.

Its matrices are those of all experts side by side, ``gate`` and ``up`` ``[experts, hidden, mlp_dim]``, ``down``
``[experts, mlp_dim, hidden]``. There are three ways to compute it; which one it is, is settled when a program is
traced.

*With a capacity* each row of the microbatch sorts its tokens by expert into places, so many for each expert, and every
expert computes its places. First come, first served: tokens that come later in the row go past an expert that is full,
and padding comes after all others. So what becomes of a token depends on those before it, not on those after it; but in
packed rows it does depend on other documents. Rows are cut over the devices and experts too, so the partitioner makes
an all-to-all of the way into the places, and of the way back; where matrices are smaller than what would travel, it
gathers these instead.

*Without one, on TPUs,* the tokens of a microbatch are sorted by expert and multiplied run by run, by
``jax.lax.ragged_dot``, which these have an instruction for.

*Without one, elsewhere,* every expert computes every token, and what was not chosen is multiplied by 0. JAX expands
``ragged_dot`` there into ``num_experts`` products over all that was sorted, ``experts_per_token`` times as much work.
What is done is ``num_experts / experts_per_token`` times what is needed, so large models on GPUs want a capacity.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.experts_config import ExpertsConfig
from rrfp_jax.models.parts import learned, projection
from rrfp_jax.models.routing import Routes, route, router_loss
from rrfp_jax.programs.target import current_target


class Experts(nnx.Module):
    """SwiGLU MLPs side by side."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        count, hidden, inner = config.experts.num_experts, config.hidden, config.expert_dim
        self.gate = learned(config, (count, hidden, inner), rngs)
        self.up = learned(config, (count, hidden, inner), rngs)
        self.down = learned(config, (count, inner, hidden), rngs, to_residual=True)
        self.compute_dtype = jnp.dtype(config.compute_dtype)

    def matrices(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``gate``, ``up`` and ``down`` in the compute dtype."""
        gate, up, down = (each[...].astype(self.compute_dtype) for each in (self.gate, self.up, self.down))
        return gate, up, down


class SharedExpert(nnx.Module):
    """The MLP that computes every token."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        assert config.experts.shared_mlp_dim is not None
        inner = config.experts.shared_mlp_dim
        self.gate = projection(config, config.hidden, inner, rngs)
        self.up = projection(config, config.hidden, inner, rngs)
        self.down = projection(config, inner, config.hidden, rngs, to_residual=True)
        self.weight = projection(config, config.hidden, 1, rngs) if config.experts.shared_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., hidden]`` to the same shape."""
        y = self.down(nnx.silu(self.gate(x)) * self.up(x))
        return y if self.weight is None else nnx.sigmoid(self.weight(x)) * y


class MixtureOfExperts(nnx.Module):
    """Each token is computed by its best experts, and by the shared one, ``[batch, length, hidden]`` to the same."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        self.config: ExpertsConfig = config.experts
        self.router = learned(config, (config.hidden, self.config.num_experts), rngs)
        self.experts = Experts(config, rngs)
        self.shared = None if self.config.shared_mlp_dim is None else SharedExpert(config, rngs)

    def __call__(
        self, x: jax.Array, *, is_token: Any = None, counts: Any = None, order: np.ndarray | None = None
    ) -> tuple[jax.Array, Any]:
        """The result, shaped like ``x``, and what the router adds to the loss, or None.

        Of bool ``[batch, length]``, ``is_token`` says which are no padding (None: all), ``counts`` which the router's
        loss is about (None: it is not wanted). ``order`` are the natural positions of tokens that lie in another order,
        int ``[length]``: with a capacity, earlier ones come first.
        """
        logits = jnp.einsum("blh,he->ble", x.astype(jnp.float32), self.router[...].astype(jnp.float32))
        routes = route(self.config, logits)
        matrices = self.experts.matrices()
        if self.config.capacity_factor is not None:
            capacity = self.config.capacity(x.shape[1])
            y = by_places(x, routes, *matrices, capacity=capacity, is_token=is_token, order=order)
        else:
            y = (by_runs if current_target().platform == "tpu" else by_all)(x, routes, *matrices)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, None if counts is None else router_loss(self.config, logits, routes, counts)


def by_all(x: jax.Array, routes: Routes, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Every expert computes every token."""
    inner = nnx.silu(jnp.einsum("blh,ehm->blem", x, gate)) * jnp.einsum("blh,ehm->blem", x, up)
    return jnp.einsum("blem,emh->blh", inner * routes.weights[..., None].astype(x.dtype), down)


def by_runs(x: jax.Array, routes: Routes, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Tokens are sorted by expert, over the whole microbatch."""
    per_token, flat = routes.experts.shape[-1], x.reshape(-1, x.shape[-1])
    experts = routes.experts.reshape(-1)
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=len(gate)).astype(jnp.int32)
    source = order // per_token
    taken = flat[source]
    inner = nnx.silu(jax.lax.ragged_dot(taken, gate, sizes)) * jax.lax.ragged_dot(taken, up, sizes)
    weights = jnp.take_along_axis(routes.weights, routes.experts, axis=-1).reshape(-1)[order]
    y = jax.lax.ragged_dot(inner * weights[:, None].astype(x.dtype), down, sizes)
    back = jnp.argsort(order).reshape(-1, per_token)
    return y[back].sum(axis=1, dtype=jnp.float32).astype(x.dtype).reshape(x.shape)


def by_places(
    x: jax.Array,
    routes: Routes,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    capacity: int,
    is_token: jax.Array | None = None,
    order: np.ndarray | None = None,
) -> jax.Array:
    """Every expert computes up to ``capacity`` tokens of each row, the first ones that chose it."""
    is_late = jnp.zeros(x.shape[:2], bool) if is_token is None else ~is_token
    places = partial(_places, num_experts=len(gate), capacity=capacity)
    if order is None:
        source, is_taken = jax.vmap(places)(routes.experts, is_late)
    else:
        home = np.argsort(order)
        source, is_taken = jax.vmap(places)(routes.experts[:, home], is_late[:, home])
        source = jnp.asarray(home)[source]
    taken = jax.vmap(lambda row, at, there: jnp.where(there[..., None], row[at], 0))(x, source, is_taken)
    inner = nnx.silu(jnp.einsum("bech,ehm->becm", taken, gate)) * jnp.einsum("bech,ehm->becm", taken, up)
    weights = jax.vmap(lambda row, at: jnp.take_along_axis(row.T, at, axis=1))(routes.weights, source) * is_taken
    y = jnp.einsum("becm,emh->bech", inner, down) * weights[..., None].astype(x.dtype)
    return jax.vmap(lambda row, at: jnp.zeros(x.shape[1:], jnp.float32).at[at].add(row))(y, source).astype(x.dtype)


def _places(experts: jax.Array, is_late: jax.Array, *, num_experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Which token of a row sits in each place, and whether one does, both ``[num_experts, capacity]``."""
    chosen, per_token = experts.reshape(-1), experts.shape[-1]
    order = jnp.argsort(2 * chosen + jnp.repeat(is_late, per_token), stable=True)
    sizes = jnp.bincount(chosen, length=num_experts)
    places = (jnp.cumsum(sizes) - sizes)[:, None] + jnp.arange(capacity)
    is_taken = jnp.arange(capacity) < sizes[:, None]
    return order[jnp.minimum(places, len(order) - 1)] // per_token, is_taken
