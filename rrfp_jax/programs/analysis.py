"""What the backend says of a compiled program: its operations, the bytes that it touches, and the memory it needs.

JAX calls neither analysis stable: they may be missing, and their form may change between versions. So this file alone
reads them; ``tests/programs/test_analysis.py`` pins the keys, and whoever asks must do without where there is nothing.

Operations are of one device, and what is computed in loops and in kernels of libraries is counted in part or not at
all.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.stages import Compiled

from rrfp_jax.programs.program_text import ProgramText

FLOPS, BYTES_ACCESSED, OPTIMAL_SECONDS = "flops", "bytes accessed", "optimal_seconds"
TEMPORARIES, ARGUMENTS, OUTPUTS = "temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes"


class ProgramCost(NamedTuple):
    """What a program does on one device."""

    flops: float = 0.0
    bytes_accessed: float = 0.0
    """Read and written, by every operation that is left after fusion."""


class ProgramMemory(NamedTuple):
    """What a program needs on one device."""

    temporaries: int
    """While it runs, beside arguments and results."""
    arguments: int
    outputs: int


def cost_of(program: Compiled) -> ProgramCost | None:
    """Returns what the backend says, or what the program's text tells where it says nothing, as for GPUs that are not
    here; None where neither tells."""
    first = _cost_analysis(program)
    if FLOPS not in first or BYTES_ACCESSED not in first:
        text = ProgramText(_text(program))
        return ProgramCost(text.flops, float(text.touched_bytes)) if text.touched_bytes else None
    cost = ProgramCost(float(first[FLOPS]), float(first[BYTES_ACCESSED]))
    return cost if min(cost) >= 0 else None  # -1 stands for unknown


def optimal_s(program: Compiled) -> float | None:
    """Returns the seconds that the compiler's own model gives a program, as that of TPUs does; None where it has none.

    Loops count once in it, and kernels by their own estimates.
    """
    seconds = _cost_analysis(program).get(OPTIMAL_SECONDS, 0)
    return float(seconds) if seconds > 0 else None


def _text(program: Compiled) -> str:
    try:
        return program.as_text() or ""
    except (NotImplementedError, RuntimeError):
        return ""


def _cost_analysis(program: Compiled) -> Mapping[str, Any]:
    try:
        analysis = program.cost_analysis()
    except (NotImplementedError, RuntimeError):
        return {}
    first = analysis[0] if isinstance(analysis, list) and analysis else analysis
    return first if isinstance(first, Mapping) else {}


def memory_of(program: Compiled) -> ProgramMemory | None:
    """None where the backend does not say."""
    try:
        analysis = program.memory_analysis()
    except (NotImplementedError, RuntimeError):
        return None
    sizes = [getattr(analysis, name, None) for name in (TEMPORARIES, ARGUMENTS, OUTPUTS)]
    return None if None in sizes else ProgramMemory(*(int(size or 0) for size in sizes))
