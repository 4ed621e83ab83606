"""The backend's analysis of a compiled program: the time that its own model gives it, and the memory that it needs.

JAX calls neither analysis stable: they may be missing, and their form may change between versions. So this file alone
reads them; ``tests/programs/test_analysis.py`` pins the keys, and callers must do without where there is nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.stages import Compiled

OPTIMAL_SECONDS = "optimal_seconds"
TEMPORARIES, ARGUMENTS, OUTPUTS = "temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"


class ProgramMemory(NamedTuple):
    """The memory that a program needs on one device, in bytes."""

    temporaries: int
    """Bytes while it runs, beside arguments and results."""
    arguments: int
    outputs: int


def optimal_s(program: Compiled) -> float | None:
    """Returns the seconds that the compiler's own model gives a program, as that of TPUs does; None where it has none.

    Loops count once in it, and kernels by their own estimates.
    """
    seconds = _cost_analysis(program).get(OPTIMAL_SECONDS, 0)
    return float(seconds) if seconds > 0 else None


def _cost_analysis(program: Compiled) -> Mapping[str, Any]:
    try:
        analysis = program.cost_analysis()
    except (NotImplementedError, RuntimeError):
        return {}
    first = analysis[0] if isinstance(analysis, list) and analysis else analysis
    return first if isinstance(first, Mapping) else {}


def memory_of(program: Compiled) -> ProgramMemory | None:
    """Returns the memory that a program needs; None where the backend does not say."""
    try:
        analysis = program.memory_analysis()
    except (NotImplementedError, RuntimeError):
        return None
    sizes = [getattr(analysis, name, None) for name in (TEMPORARIES, ARGUMENTS, OUTPUTS)]
    return None if None in sizes else ProgramMemory(*(int(size or 0) for size in sizes))
