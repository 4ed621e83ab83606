"""Names of what the backward of a chunk computes again, as configurations, profiles and plans have them."""

from rrfp_jax.planning.layer_sizes import REMATS

KEPT = ("attention", "experts")
"""Names of what a layer may be told to keep: the result of attention; tokens where they have reached their experts, and
what these make of them, so that no backward sends them again."""
NAMES = (*REMATS, *KEPT, "+".join(KEPT))


def is_known(name: str) -> bool:
    """Returns whether there is such a rematerialisation; names of :data:`KEPT` may be joined by ``+``."""
    return name in REMATS or set(name.split("+")) <= set(KEPT)


def rule_of(name: str) -> str:
    """Returns the rule of :mod:`rrfp_jax.planning.layer_sizes` by which a name is counted.

    Where layers keep arrays by name the nearest is ``full``: the arrays are left out, and what need not be computed
    again for them is counted. Raises ValueError for a name that there is not.
    """
    if not is_known(name):
        raise ValueError(f"remat is {name!r}: give one of {', '.join(NAMES)}")
    return name if name in REMATS else "full"
