"""Bytes of what a chunk holds, for tables and memory forecasts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.stages import Compiled

from rrfp_jax.programs.handover import OwedBytes


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """Bytes of what a chunk holds on its devices.

    While a microbatch is between forward and backward it holds ``stash_bytes + kept_bytes``, between input gradient and
    weight gradient ``owed.total``. Kept arrays and gradients are held by reference: where somebody else holds them too
    (an inbox, a transport, another chunk of the stage) count them once.
    """

    params_bytes: int
    """Parameters, once."""
    accumulators_bytes: int
    """Accumulated gradients, once; 0 for a chunk that does not train."""
    optimizer_bytes: int
    """Optimizer state, once; 0 for a chunk that does not train."""
    derived_bytes: int
    """What ``prepare`` derives from the parameters, once."""
    inputs_bytes: int
    """What arrives for the forward of one microbatch from all predecessors."""
    outputs_bytes: int
    """The output of one microbatch, as sent to each successor."""
    stash_bytes: int
    """What only the stash of one microbatch holds."""
    kept_bytes: int
    """Inputs, batch leaves and outputs of one microbatch that its stash keeps alive."""
    output_grads_bytes: int
    """What arrives for the backward of one microbatch from all successors; 0 for a chunk that computes a loss."""
    input_grads_bytes: int
    """The gradients of one microbatch, as sent to all predecessors."""
    owed: OwedBytes = field(default_factory=OwedBytes)
    """What one microbatch owes to its weight gradient; nothing where the backward is not split."""
    temporaries: Mapping[str, int] = field(default_factory=dict)
    """What each program needs while it runs beside its arguments and results, by its name; 0 where the backend does not
    say."""


def temporaries(compiled: Mapping[str, Compiled]) -> dict[str, int]:
    """Temporary bytes of compiled programs by name, as the backend's memory analysis has them."""
    analyses = {name: program.memory_analysis() for name, program in compiled.items()}
    return {name: int(getattr(analysis, "temp_size_in_bytes", None) or 0) for name, analysis in analyses.items()}
