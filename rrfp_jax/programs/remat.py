"""Rematerialisation of a chunk: what its forward keeps for the backward, and what the backward computes again.

With a split backward the input gradient recomputes and the weight gradient reuses what was recomputed. That makes what
is owed between the two much larger than the stash, so rematerialisation pays most where backwards are not split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Policy = Callable[..., Any]
"""A policy of ``jax.checkpoint``, for example one of ``jax.checkpoint_policies``."""

Remat = str | Policy
"""``none`` keeps what differentiation wants; ``dots`` keeps the results of matrix products and recomputes the rest;
``full`` keeps inputs only and recomputes the whole forward; a policy decides itself."""

_NAMED: dict[str, Policy | None] = {"dots": jax.checkpoint_policies.dots_saveable, "full": None}


def check_remat(remat: Remat) -> None:
    """Raise ValueError for a name that stands for no rematerialisation."""
    if not callable(remat) and remat != "none" and remat not in _NAMED:
        raise ValueError(f"remat is {remat!r}: give none, dots, full, or a policy of jax.checkpoint")


def remat_of_chunks(remat: Remat | Sequence[Remat], num_chunks: int) -> tuple[Remat, ...]:
    """One for each chunk, from one for all or one for each; raises ValueError for other numbers and unknown names."""
    policies = (remat,) * num_chunks if isinstance(remat, str) or callable(remat) else tuple(remat)
    if len(policies) != num_chunks:
        raise ValueError(
            f"remat has {len(policies)} entries for {num_chunks} chunks: give one for all, or one per chunk"
        )
    for policy in policies:
        check_remat(policy)
    return policies


def rematerialised(fn: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """``fn`` under this rematerialisation; raises ValueError for a name that stands for none."""
    check_remat(remat)
    if remat == "none":
        return fn
    policy = remat if callable(remat) else _NAMED[remat]
    # forward and backward are programs of their own, so the compiler cannot merge what both compute
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)
