"""Write a trained model as one of Hugging Face.

::

    rrfp export-hf runs/tuned exported/llama
    rrfp export-hf runs/tuned exported/llama --dtype bfloat16 --shard-size 2GB

Parameters come from the newest checkpoint of a run, whatever layout saved it, or from an import. Configuration,
tokenizer and tensors that our models do not use come from the import that the run began with; a language model that
began here becomes one of the family that has what it has. ``from_pretrained`` reads the folder as it is.
"""

from pathlib import Path

from rrfp_jax.byte_sizes import parse_bytes
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.memory import return_large_blocks
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.exit_codes import DONE

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    run, target = Path(arguments.run), Path(arguments.folder)
    with checking_input():
        from rrfp_jax.hf.new_folder import check_new

        check_new(target, "the folder of the export")
        shard_bytes = parse_bytes(arguments.shard_size, "shard-size")
        return_large_blocks()
        use_cpu(1)
        from rrfp_jax.hf.exporting import plan_export, write_export

        plan = plan_export(run, dtype=arguments.dtype)
        write_export(plan, target, shard_bytes=shard_bytes)
    kind, step = plan.config["architectures"][0], plan.stored.step
    make_console().print(
        f"{target} holds a {kind} of {len(plan.tensors)} tensors, after {step} steps of {run}", soft_wrap=True
    )
    return DONE


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("export-hf", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory with a checkpoint, or the folder of an import")
    parser.add_argument("folder", metavar="DIR", help="the folder that is made")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        metavar="|".join(_DTYPES),
        help="the numbers in which tensors are written (left out: those of the checkpoint)",
    )
    parser.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="how large a file may be, as 5GB or 512MiB (default: 5GB)"
    )
    return parser


if __name__ == "__main__":
    run_command(main)
