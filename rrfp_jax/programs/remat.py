"""Rematerialisation of a chunk: which values its forward keeps for the backward, which the backward computes again.

A chunk that calls its layers through :func:`one_layer` keeps the input of each, and a backward computes one layer again
at a time: a barrier makes the next one wait for the gradient that it is needed for. Any other chunk is computed again
as a whole, and its backward needs memory for all of it at once.

With a split backward the input gradient recomputes values and the weight gradient reuses them. That makes the
weight-gradient residuals much larger than the residuals of the forward, so rematerialisation pays most where backwards
are not split.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax.costs.layer_sizes import KEPT, is_known_remat

Policy = Callable[..., Any]
"""A policy of ``jax.checkpoint``, for example one of ``jax.checkpoint_policies``."""

Remat = str | Policy
"""``none`` keeps the residuals of differentiation; ``dots`` keeps the results of matrix products and fused attention,
and recomputes the rest; ``full`` keeps the inputs of layers only and recomputes their whole forward; names of
:data:`rrfp_jax.costs.layer_sizes.KEPT`, joined by ``+``, keep these besides, which a layer of one's own names by
``jax.ad_checkpoint.checkpoint_name``; a policy decides itself."""

KEPT_BY_DOTS = "fused attention"
"""The name, for ``jax.ad_checkpoint.checkpoint_name``, of values that a fused forward of attention gives its backward.
``dots`` keeps it; otherwise the backward would run that forward again."""
KEPT_ALWAYS = "kept"
"""The name (``checkpoint_name``) of small values that cost much to compute again: only a user's policy drops them."""
_CUDNN_FORWARD = ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
"""Primitives of cuDNN's forward: its results have no name in JAX, and its backward needs all of them."""
_is_of_fused_attention = jax.checkpoint_policies.save_only_these_names(KEPT_BY_DOTS)


def _is_fused(primitive: Any, *args: Any, **params: Any) -> bool:
    return primitive.name in _CUDNN_FORWARD or bool(_is_of_fused_attention(primitive, *args, **params))


def _dots(primitive: Any, *args: Any, **params: Any) -> bool:
    is_product = jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
    return bool(is_product) or _is_fused(primitive, *args, **params)


_always = jax.checkpoint_policies.save_only_these_names(KEPT_ALWAYS)
_NAMED: dict[str, Policy] = {
    "dots": jax.checkpoint_policies.save_from_both_policies(_dots, _always),
    "full": _always,
}
_OUTPUT = "layer"
"""The name of a layer's outputs. The next layer begins with them, so they are kept."""
_of_layers: ContextVar[Policy | None] = ContextVar("of_layers", default=None)
"""The policy of the chunk that is being traced; None for one that is not rematerialised."""


def check_remat(remat: Remat) -> None:
    """Raises ValueError for a name that stands for no rematerialisation."""
    if not callable(remat) and not is_known_remat(remat):
        raise ValueError(
            f"remat is {remat!r}: give none, dots, full, or a policy of jax.checkpoint, or what layers are to keep: "
            f"{', '.join(KEPT)}, or {'+'.join(KEPT)}"
        )


def remat_of_chunks(remat: Remat | Sequence[Remat], num_chunks: int) -> tuple[Remat, ...]:
    """Returns one policy for each chunk, given one for all or one for each; raises ValueError for other numbers and
    unknown names."""
    policies = (remat,) * num_chunks if isinstance(remat, str) or callable(remat) else tuple(remat)
    if len(policies) != num_chunks:
        raise ValueError(
            f"remat has {len(policies)} entries for {num_chunks} chunks: give one for all, or one per chunk"
        )
    for policy in policies:
        check_remat(policy)
    return policies


def one_layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer of a chunk, ``fn(*arrays)``, that a backward computes again without any other layer.

    Call it where the chunk's ``apply`` calls the layer: ``x = one_layer(layer)(params["layers.3"], x)``. Elsewhere,
    and for chunks that are not rematerialised, it is ``fn``. Values that ``fn`` closes over are kept like its
    arguments.
    """

    def run(*args: Any) -> Any:
        found = _of_layers.get()
        if found is None:
            return fn(*args)
        # its barrier keeps the layers of a backward in turn; the chunk's own jax.checkpoint has none
        outputs = jax.checkpoint(fn, policy=found, prevent_cse=True)(*args)
        return jax.tree.map(lambda each: checkpoint_name(each, _OUTPUT), outputs)

    return run


def rematerialised(fn: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Returns ``fn``, a chunk, under this rematerialisation; raises ValueError for a name that stands for none."""
    check_remat(remat)
    if remat == "none":
        return fn
    policies = jax.checkpoint_policies
    own = remat if callable(remat) else _NAMED[remat] if remat in _NAMED else _keeping(remat.split("+"))
    kept = policies.save_only_these_names(_OUTPUT)

    def run(*args: Any) -> Any:
        token = _of_layers.set(own)
        try:
            return fn(*args)
        finally:
            _of_layers.reset(token)

    # forward and backward are programs of their own, so the compiler cannot merge what both compute
    return jax.checkpoint(run, policy=policies.save_from_both_policies(own, kept), prevent_cse=False)


def _keeping(names: Sequence[str]) -> Policy:
    is_named = jax.checkpoint_policies.save_only_these_names(KEPT_ALWAYS, *names)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        is_fused = "attention" in names and _is_fused(primitive, *args, **params)
        return is_fused or is_named(primitive, *args, **params)

    return policy
