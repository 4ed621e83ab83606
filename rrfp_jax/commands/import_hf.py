"""Take in a model of Hugging Face, to train it further.

::

    rrfp import-hf downloads/Llama-3.2-1B imported/llama
    rrfp import-hf downloads/llava-1.5-7b-hf imported/llava --dtype float32

Families: Llama, Mistral, Qwen 2 and 2.5, Qwen 3, Mixtral and Qwen 3 with experts; LLaVA and InternVL. The new folder
holds ``model.yaml``, the sections of a configuration that describe the model, and the parameters by layer. A run whose
``run.init_from`` names the folder starts from them, in any layout; ``rrfp export-hf`` is the way back. What models here
cannot express is refused by the name of the field, and no tensor is left over.
"""

from pathlib import Path

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.memory import return_large_blocks
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.data.tokens.header import TOKENIZER
from rrfp_jax.exit_codes import DONE
from rrfp_jax.hf.model_folder import CARRIED, MODEL
from rrfp_jax.models.config import DTYPES


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    source, target = Path(arguments.source), Path(arguments.folder)
    with checking_input():
        from rrfp_jax.hf.new_folder import check_new

        check_new(target, "the folder of the import")
        return_large_blocks()
        use_cpu(1)
        from rrfp_jax.hf.importing import plan_import, write_import

        plan = plan_import(source, dtype=arguments.dtype)
        write_import(plan, target)
    say = make_console().print
    say(f"{plan.num_params:,} parameters in {len(plan.layers)} layers, {plan.dtype}, are in {target}", soft_wrap=True)
    if plan.carried:
        say(f"{len(plan.carried)} tensors that models here do not use are carried along", soft_wrap=True)
    if not (target / CARRIED / TOKENIZER).is_file():
        say(f"{source} has no {TOKENIZER}: nothing will tell whether data is in the model's tokens", soft_wrap=True)
    say(f"start from {target / MODEL}, and give run.init_from: {target}", soft_wrap=True)
    return DONE


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("import-hf", __doc__)
    parser.add_argument("source", metavar="DIR", help="the folder with config.json and safetensors files")
    parser.add_argument("folder", metavar="OUT", help="the folder that is made")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="|".join(DTYPES),
        help="the numbers in which parameters are kept and computed (left out: those of the files)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
