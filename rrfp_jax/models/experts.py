"""A mixture of experts: the MLP of a sparse layer.

Its matrices are those of all experts side by side, ``gate`` and ``up`` ``[experts, hidden, mlp_dim]``, ``down``
``[experts, mlp_dim, hidden]``. There are three ways to compute it; which one it is, is settled when a program is
traced.

*With a capacity* each row of the microbatch sorts its tokens by expert into places, equally many for each expert, and
every expert computes its places. First come, first served: tokens that come later in the row go past an expert that is
full, and padding comes after all others. So a token's result depends on the tokens before it, not on those after it;
but in packed rows it does depend on other documents. Rows are cut over the axis ``expert`` as experts are: each device
fills the places of its own rows, an all-to-all brings them to the devices of their experts, and another one back.

*Without one* each device computes its own rows with all experts, whose matrices it gathers: how many tokens choose the
experts of a device is not known when a program is made, so nothing could be made large enough to receive them. Tokens
are sorted by expert. TPUs multiply run by run with ``jax.lax.ragged_dot``. For GPUs XLA expands that into a dense
product of all tokens with all experts; so runs are filled up to whole blocks there, and each block is one product.

*Without one, on CPUs,* every expert computes every token, and results of experts that were not chosen are multiplied by
0: for models as small as these are, that is the fastest.

The bias that balances without a loss (Wang et al. 2024) is a parameter that no derivative reaches: only the choice
depends on it. In the place of its gradient the backward puts by how much the load of each expert exceeds the average
(:func:`_with_load_error`), so microbatches and replicas add up loads as they do gradients; the update goes by the sign
of the sum alone (:attr:`rrfp_jax.programs.chunk.Chunk.sign_rates`).
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, get_abstract_mesh

from rrfp_jax.layout import EXPERT
from rrfp_jax.models._parts import joined, learned, projection
from rrfp_jax.models.config import SIGMOID, ExpertsConfig, LanguageModelConfig
from rrfp_jax.programs.shardings import row_axes
from rrfp_jax.programs.target import current_target

_SWIGLU_ALPHA = 1.702
"""Factor of the gate within the sigmoid of GPT-OSS's SwiGLU."""

# -- the router --------------------------------------------------------------------------------------------------------


class Routes(NamedTuple):
    """The experts that a router chose for the tokens of a microbatch."""

    scores: jax.Array
    """Shares of all experts that sum to 1, float32 ``[batch, length, experts]``."""
    experts: jax.Array
    """The experts of every token, that with the highest score first, int32 ``[batch, length, experts_per_token]``."""
    weights: jax.Array
    """Factors of the results of all experts, 0 for those not chosen; float32 like ``scores``."""


def choose_experts(config: ExpertsConfig, logits: jax.Array, bias: jax.Array | None = None) -> Routes:
    """Returns the routes by the router's float32 logits, ``[batch, length, experts]``; of equal ones the first wins.

    ``bias`` ``[experts]`` is added to the scores by which experts are chosen.
    """
    is_sigmoid = config.scores == SIGMOID
    scores = jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits, axis=-1)
    choice = scores if is_sigmoid else logits  # softmax rounds, so that unequal logits may have equal scores
    if bias is not None:
        choice = choice + bias
    choice = jax.lax.stop_gradient(choice)
    if config.num_groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], config.num_groups, -1)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        groups = jax.lax.top_k(best, config.groups_per_token)[1]
        is_open = jax.nn.one_hot(groups, config.num_groups).sum(axis=-2) > 0
        choice = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(choice.shape)
    experts = jax.lax.top_k(choice, config.experts_per_token)[1]
    weights = scores * jax.nn.one_hot(experts, config.num_experts).sum(axis=-2)
    if config.renormalise:
        # sigmoids of very small logits may all be 0
        weights /= weights.sum(axis=-1, keepdims=True) + (1e-20 if is_sigmoid else 0)
    if is_sigmoid:
        scores /= scores.sum(axis=-1, keepdims=True) + 1e-20
    return Routes(scores, experts, weights if config.scale == 1 else config.scale * weights)


BALANCE_BIAS = "balance_bias"
"""Name of the parameter that is added to scores where experts are chosen."""
_SCALE_OF_ERRORS = 2.0**-60
"""Factor of load errors, which are no part of the gradient's norm: beside it their squares vanish. They remain exact,
being whole numbers times a power of two, and so keep their sign."""


@jax.custom_vjp
def _with_load_error(weights: jax.Array, bias: jax.Array, error: jax.Array) -> jax.Array:
    """Returns the weights as they are; ``bias`` gets ``error`` for its gradient, whatever that of the weights is."""
    del bias, error
    return weights


def _keep_error(weights: jax.Array, bias: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
    del bias
    return weights, error


def _hand_error(error: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return gradient, error, None


_with_load_error.defvjp(_keep_error, _hand_error)


def load_errors(routes: Routes, counts: jax.Array) -> jax.Array:
    """Returns for each expert by how much more tokens of ``counts``, bool ``[batch, length]``, chose it than the
    average, times the number of experts: whole numbers, float32 ``[experts]``."""
    num_experts = routes.scores.shape[-1]
    chosen = jax.nn.one_hot(routes.experts, num_experts).sum(axis=-2)
    loads = jnp.einsum("ble,bl->e", chosen, counts.astype(jnp.float32))
    return num_experts * loads - loads.sum()


def router_loss(config: ExpertsConfig, logits: jax.Array, routes: Routes, is_real: jax.Array) -> jax.Array:
    """Returns the loss that one layer's router adds for a microbatch, a float32 scalar; tokens of ``is_real`` count.

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


class ExpertMatrices(NamedTuple):
    """The parameters of all experts of a layer, or of those of one device."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    """Biases ``[experts, mlp_dim]``, and ``[experts, hidden]`` of ``down``. None: there are none."""
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    def inner(
        self, product: Callable[[jax.Array], jax.Array], spread: Callable[[jax.Array], jax.Array], limit: float | None
    ) -> jax.Array:
        """Returns the gated products; ``product`` multiplies with a matrix, ``spread`` shapes biases like a result."""
        gate, up = product(self.gate), product(self.up)
        if self.gate_bias is not None and self.up_bias is not None:
            gate, up = gate + spread(self.gate_bias), up + spread(self.up_bias)
        if limit is None:
            return nnx.silu(gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * nnx.sigmoid(_SWIGLU_ALPHA * gate) * (up + 1)


# -- modules -----------------------------------------------------------------------------------------------------------


class _Experts(nnx.Module):
    """SwiGLU MLPs side by side."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        count, hidden, inner = config.experts.num_experts, config.hidden, config.expert_dim
        self.gate = learned(config, (count, hidden, inner), rngs)
        self.up = learned(config, (count, hidden, inner), rngs)
        self.down = learned(config, (count, inner, hidden), rngs, to_residual=True)
        if config.experts.biases:
            zeros = partial(jnp.zeros, dtype=config.param_dtype)
            self.gate_bias, self.up_bias = nnx.Param(zeros((count, inner))), nnx.Param(zeros((count, inner)))
            self.down_bias = nnx.Param(zeros((count, hidden)))
        self.has_biases = config.experts.biases
        self.compute_dtype = jnp.dtype(config.compute_dtype)

    def matrices(self) -> "ExpertMatrices":
        """Returns the parameters in the compute dtype."""
        parts = [self.gate, self.up, self.down]
        parts += [self.gate_bias, self.up_bias, self.down_bias] if self.has_biases else []
        return ExpertMatrices(*(part[...].astype(self.compute_dtype) for part in parts))


class _SharedExpert(nnx.Module):
    """The MLP that computes every token."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs, float8: Collection[str] = ()) -> None:
        assert config.experts is not None
        assert config.experts.shared_mlp_dim is not None
        make, (hidden, inner) = partial(projection, config, rngs=rngs), (config.hidden, config.experts.shared_mlp_dim)
        self.gate = make(hidden, inner, float8="mlp.shared.gate" in float8)
        self.up = make(hidden, inner, float8="mlp.shared.up" in float8)
        self.down = make(inner, hidden, to_residual=True, float8="mlp.shared.down" in float8)
        self.weight = projection(config, config.hidden, 1, rngs) if config.experts.shared_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., hidden]`` to the same shape."""
        gate, up = joined(x, self.gate, self.up)
        y = self.down(nnx.silu(gate) * up)
        return y if self.weight is None else nnx.sigmoid(self.weight(x)) * y


class MixtureOfExperts(nnx.Module):
    """Each token is computed by its best experts, and by the shared one, ``[batch, length, hidden]`` to the same."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs, float8: Collection[str] = ()) -> None:
        assert config.experts is not None
        self.config: ExpertsConfig = config.experts
        # sigmoids, unlike a softmax, do not get rid of what all logits have in common: they are DeepSeek's, in float32
        exact = replace(config, param_dtype="float32") if self.config.scores == SIGMOID else config
        self.router = learned(exact, (config.hidden, self.config.num_experts), rngs)
        zeros = jnp.zeros(self.config.num_experts, exact.param_dtype)
        self.router_bias = nnx.Param(zeros) if self.config.biases else None
        if self.config.bias_rate is not None:  # bfloat16 would swallow steps of a thousandth
            self.balance_bias = nnx.Param(jnp.zeros(self.config.num_experts, jnp.float32))
        self.experts = _Experts(config, rngs)
        self.shared = None if self.config.shared_mlp_dim is None else _SharedExpert(config, rngs, float8)

    def __call__(
        self,
        x: jax.Array,
        *,
        is_token: jax.Array | None = None,
        counts: jax.Array | None = None,
        order: np.ndarray | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the result, shaped like ``x``, and the loss that the router adds, or None.

        Both are bool ``[batch, length]``: ``is_token`` is false for padding (None: there is none), ``counts`` is true
        for the tokens of the router's loss and of the experts' loads (None: neither is wanted). ``order`` are the
        natural positions of tokens that lie in another order, int ``[length]``: with a capacity, earlier ones come
        first.
        """
        logits = jnp.einsum("blh,he->ble", x.astype(jnp.float32), self.router[...].astype(jnp.float32))
        if self.router_bias is not None:
            logits += self.router_bias[...].astype(jnp.float32)
        bias = None if self.config.bias_rate is None else self.balance_bias[...]
        routes, limit = choose_experts(self.config, logits, bias), self.config.swiglu_limit
        if bias is not None and counts is not None:
            errors = _SCALE_OF_ERRORS * load_errors(routes, counts)
            routes = routes._replace(weights=_with_load_error(routes.weights, bias, errors))
        matrices = self.experts.matrices()
        if self.config.capacity_factor is not None:
            capacity = self.config.capacity(x.shape[1])
            y = by_places(x, routes, *matrices, limit=limit, capacity=capacity, is_token=is_token, order=order)
        else:
            compute = {"tpu": by_runs, "gpu": by_blocks}.get(current_target().platform, by_all)
            y = compute(x, routes, *matrices, limit=limit)
        if self.shared is not None:
            y = y + self.shared(x)
        if counts is None or not (self.config.balance_coefficient or self.config.z_coefficient):
            return y, None
        return y, router_loss(self.config, logits, routes, counts)


# -- three ways without a capacity -------------------------------------------------------------------------------------


def by_all(x: jax.Array, routes: Routes, *parts: jax.Array | None, limit: float | None = None) -> jax.Array:
    """Lets every expert compute every token; ``parts`` are those of :class:`ExpertMatrices`."""
    matrices, weights = ExpertMatrices(*parts), routes.weights.astype(x.dtype)  # type: ignore[arg-type]
    inner = matrices.inner(lambda matrix: jnp.einsum("blh,ehm->blem", x, matrix), lambda bias: bias, limit)
    y = jnp.einsum("blem,emh->blh", inner * weights[..., None], matrices.down)
    return y if matrices.down_bias is None else y + jnp.einsum("ble,eh->blh", weights, matrices.down_bias)


def by_runs(x: jax.Array, routes: Routes, *parts: jax.Array | None, limit: float | None = None) -> jax.Array:
    """Sorts the tokens of a device by expert, and lets each expert multiply its run."""

    def compute(rows: tuple[jax.Array, Routes], matrices: ExpertMatrices) -> jax.Array:
        x, routes = rows
        per_token, flat = routes.experts.shape[-1], x.reshape(-1, x.shape[-1])
        experts = routes.experts.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=len(matrices.gate)).astype(jnp.int32)
        source = order // per_token
        taken, chosen = flat[source], experts[order]
        inner = matrices.inner(
            lambda matrix: jax.lax.ragged_dot(taken, matrix, sizes), lambda bias: bias[chosen], limit
        )
        weights = jnp.take_along_axis(routes.weights, routes.experts, axis=-1).reshape(-1)[order]
        weights = weights[:, None].astype(x.dtype)
        y = jax.lax.ragged_dot(inner * weights, matrices.down, sizes)
        if matrices.down_bias is not None:
            y = y + weights * matrices.down_bias[chosen]
        # back in the order of tokens, where the results of a token's experts are added in float32
        back = jnp.argsort(order).reshape(-1, per_token)
        return y[back].sum(axis=1, dtype=jnp.float32).astype(x.dtype).reshape(x.shape)

    return _on_own_rows(compute, (x, routes), ExpertMatrices(*parts))  # type: ignore[arg-type]


def by_blocks(x: jax.Array, routes: Routes, *parts: jax.Array | None, limit: float | None = None) -> jax.Array:
    """Sorts as :func:`by_runs` and fills every run up to whole blocks; each block is one product with one expert."""

    def compute(rows: tuple[jax.Array, Routes], matrices: ExpertMatrices) -> jax.Array:
        x, routes = rows
        per_token, flat, num_experts = routes.experts.shape[-1], x.reshape(-1, x.shape[-1]), len(matrices.gate)
        experts = routes.experts.reshape(-1)
        size = block_size(len(experts), num_experts)
        # however tokens choose, runs fill no more blocks than this: each expert leaves less than one block empty
        num_blocks = (len(experts) + num_experts * (size - 1)) // size
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
        blocks = -(-sizes // size)  # of each expert
        ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
        expert = jnp.minimum(jnp.searchsorted(ends, jnp.arange(num_blocks), side="right"), num_experts - 1)
        within = (jnp.arange(num_blocks) - (ends - blocks)[expert])[:, None] * size + jnp.arange(size)
        # places at the end of an expert's last block stay empty
        is_taken = within < sizes[expert][:, None]
        pair = order[jnp.minimum(starts[expert][:, None] + within, len(order) - 1)]
        taken = jnp.where(is_taken[..., None], flat[pair // per_token], 0)
        inner = matrices.inner(
            lambda matrix: _block_products(taken, matrix, expert), lambda bias: bias[expert][:, None], limit
        )
        weights = jnp.take_along_axis(routes.weights, routes.experts, axis=-1).reshape(-1)[pair]
        weights = weights[..., None].astype(x.dtype)
        y = _block_products(inner * weights, matrices.down, expert)
        if matrices.down_bias is not None:
            y = y + weights * matrices.down_bias[expert][:, None]
        y = y.reshape(-1, x.shape[-1])
        rank = jnp.argsort(order) - starts[experts]
        back = ((ends - blocks)[experts] * size + rank).reshape(-1, per_token)
        return y[back].sum(axis=1, dtype=jnp.float32).astype(x.dtype).reshape(x.shape)

    return _on_own_rows(compute, (x, routes), ExpertMatrices(*parts))  # type: ignore[arg-type]


def block_size(num_rows: int, num_experts: int) -> int:
    """Returns how many rows a block has: a power of two, at most half of an expert's equal share.

    Smaller blocks are filled better, larger ones read the matrices less often.
    """
    return 1 << max(0, min(10, (num_rows // num_experts // 2).bit_length() - 1))


@jax.custom_vjp
def _block_products(blocks: jax.Array, matrices: jax.Array, expert: jax.Array) -> jax.Array:
    """Returns the product of each block with the matrix of its expert.

    They are computed one after another: gathering the matrices of all blocks would hold one of them several times.
    """
    return jax.lax.map(lambda each: each[0] @ matrices[each[1]], (blocks, expert))


def _forward(blocks: jax.Array, matrices: jax.Array, expert: jax.Array) -> tuple[jax.Array, Any]:
    return _block_products(blocks, matrices, expert), (blocks, matrices, expert)


def _backward(residuals: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    blocks, matrices, expert = residuals

    def add(sums: jax.Array, each: Any) -> tuple[jax.Array, None]:
        block, grad, number = each
        product = jnp.einsum("bk,bn->kn", block, grad, preferred_element_type=jnp.float32)
        return sums.at[number].add(product), None

    matrix_grads, _ = jax.lax.scan(add, jnp.zeros(matrices.shape, jnp.float32), (blocks, grads, expert))
    block_grads = jax.lax.map(lambda each: each[0] @ matrices[each[1]].T, (grads, expert))
    return block_grads, matrix_grads.astype(matrices.dtype), None


_block_products.defvjp(_forward, _backward)


# -- with a capacity ---------------------------------------------------------------------------------------------------


def by_places(
    x: jax.Array,
    routes: Routes,
    *parts: jax.Array | None,
    limit: float | None = None,
    capacity: int,
    is_token: jax.Array | None = None,
    order: np.ndarray | None = None,
) -> jax.Array:
    """Lets every expert compute up to ``capacity`` tokens of each row, the first ones that chose it."""
    whole = ExpertMatrices(*parts)  # type: ignore[arg-type]
    is_late, num_experts = jnp.zeros(x.shape[:2], bool) if is_token is None else ~is_token, len(whole.gate)
    places = partial(_places, num_experts=num_experts, capacity=capacity)

    def compute(rows: tuple[jax.Array, Routes, jax.Array], matrices: ExpertMatrices) -> jax.Array:
        """Computes the rows of one device; ``matrices`` are those of its experts, other devices have the rest."""
        x, routes, is_late = rows
        if order is None:
            source, is_taken = jax.vmap(places)(routes.experts, is_late)
        else:  # first come, first served goes by natural positions
            home = np.argsort(order)
            source, is_taken = jax.vmap(places)(routes.experts[:, home], is_late[:, home])
            source = jnp.asarray(home)[source]
        taken = jax.vmap(lambda row, at, there: jnp.where(there[..., None], row[at], 0))(x, source, is_taken)
        is_dealt_out = len(matrices.gate) < num_experts
        if is_dealt_out:
            taken = jax.lax.all_to_all(taken, EXPERT, split_axis=1, concat_axis=0, tiled=True)
        # remat "experts" keeps both, so that a backward repeats no all-to-all
        taken = checkpoint_name(taken, "experts")
        inner = matrices.inner(
            lambda matrix: jnp.einsum("bech,ehm->becm", taken, matrix), lambda bias: bias[:, None], limit
        )
        y = jnp.einsum("becm,emh->bech", inner, matrices.down)
        if matrices.down_bias is not None:
            y = y + matrices.down_bias[:, None]
        if is_dealt_out:
            y = jax.lax.all_to_all(y, EXPERT, split_axis=0, concat_axis=1, tiled=True)
        y = checkpoint_name(y, "experts")
        weights = jax.vmap(lambda row, at: jnp.take_along_axis(row.T, at, axis=1))(routes.weights, source) * is_taken
        y = y * weights[..., None].astype(x.dtype)
        return jax.vmap(lambda row, at: jnp.zeros(x.shape[1:], jnp.float32).at[at].add(row))(y, source).astype(x.dtype)

    return _on_own_rows(compute, (x, routes, is_late), whole, held=EXPERT)


def _places(experts: jax.Array, is_late: jax.Array, *, num_experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the token of a row in each place, and whether there is one, both ``[num_experts, capacity]``."""
    chosen, per_token = experts.reshape(-1), experts.shape[-1]
    # by expert, real tokens before padding, and earlier ones first
    order = jnp.argsort(2 * chosen + jnp.repeat(is_late, per_token), stable=True)
    sizes = jnp.bincount(chosen, length=num_experts)
    places = (jnp.cumsum(sizes) - sizes)[:, None] + jnp.arange(capacity)
    is_taken = jnp.arange(capacity) < sizes[:, None]
    return order[jnp.minimum(places, len(order) - 1)] // per_token, is_taken


def _on_own_rows(compute: Callable[..., jax.Array], rows: Any, matrices: Any, *, held: str | None = None) -> jax.Array:
    """Calls ``compute(rows, matrices)`` on each device for its own rows; the result is shaped like the first of them.

    A device has its part of the matrices along the axis ``held``, and gathers them over all other axes. Left to itself
    the partitioner gathers the matrices of all experts, or the rows of all devices. Where rows are not cut there is
    nothing to gather but parts of matrices, and it may.
    """
    axes = row_axes(get_abstract_mesh().shape, len(jax.tree.leaves(rows)[0]))
    if not axes:
        return compute(rows, matrices)
    cut, own = PartitionSpec(axes), PartitionSpec(held if held in axes else None)
    # types that say what varies would make casts of matrices vary, so that each microbatch would cast them again
    mapped = jax.shard_map(compute, axis_names=set(axes), in_specs=(cut, own), out_specs=cut, check_vma=False)
    return mapped(rows, matrices)
