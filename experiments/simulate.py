"""Simulate a schedule or a hint: ``rrfp simulate``, with workloads of published sample lengths.

::

    python -m experiments.simulate --num-stages 8 --num-microbatches 16 --window 8 \\
        --workload interleaved --compare 1f1b:strict,zb-h1:strict,zb-h1,bfw

All other options are those of ``rrfp simulate``, whose help shows more examples.
"""

from experiments.workload_options import WORK_OPTIONS
from rrfp_jax.commands import simulate
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.main import run


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return simulate.main(argv, work=WORK_OPTIONS)


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    return simulate.make_parser(WORK_OPTIONS)


if __name__ == "__main__":
    run("experiments.simulate")
