"""Import a model of Hugging Face to train it further, or export a trained model as one of Hugging Face.

::

    rrfp convert import downloads/Llama-3.2-1B imported/llama
    rrfp convert import downloads/llava-1.5-7b-hf imported/llava --dtype float32
    rrfp convert export runs/tuned exported/llama --dtype bfloat16
    rrfp convert export runs/adapted exported/adapters --adapters
    rrfp convert import downloads/adapters imported/adapters --base imported/llama

Families: Llama, Mistral, Qwen 2 and 2.5, Qwen 3, Mixtral and Qwen 3 with experts; LLaVA and InternVL.

``import`` makes a folder with ``model.yaml``, the sections of a configuration that describe the model, and the
parameters by layer. A run whose ``run.init_from`` names the folder starts from them, in any layout. A model with a
field that models here cannot express is refused by the name of the field, and no tensor is left over.

``export`` reads the newest checkpoint of a run, whatever layout saved it, or an import. The configuration, the
tokenizer and the tensors that our models do not use come from the import that the run began with; a language model
that began here becomes one of the family that has the same parts. ``from_pretrained`` reads the folder as it is.

Adapters are merged into the matrices that they stand beside. ``export --adapters`` writes them alone, as PEFT does, and
``import --base`` reads PEFT's; the import needs the folder of its base for as long as it is used.
"""

import argparse
import math
from pathlib import Path

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import return_large_blocks, use_cpu
from rrfp_jax.data.tokens import TOKENIZER
from rrfp_jax.exit_codes import DONE
from rrfp_jax.hf.model_folder import CARRIED, MODEL
from rrfp_jax.models.config import DTYPES
from rrfp_jax.readable import parse_bytes
from rrfp_jax.storage import local_copy, located

IMPORT, EXPORT = "import", "export"
_EXPORT_DTYPES = ("float32", "bfloat16", "float16")
_SHARD_SIZE = "5GB"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    source, target = located(arguments.source), located(arguments.folder)
    with checking_input():
        sentences = (
            _import(arguments, source, target) if arguments.way == IMPORT else _export(arguments, source, target)
        )
    console = make_console()
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)
    return DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("convert", __doc__)
    add = parser.add_argument
    add("way", choices=(IMPORT, EXPORT), metavar=f"{IMPORT}|{EXPORT}", help="from Hugging Face, or to it")
    add(
        "source",
        metavar="DIR",
        help=f"{IMPORT}: the folder with config.json and safetensors files; {EXPORT}: a run directory with a "
        f"checkpoint, or the folder of an {IMPORT}",
    )
    add("folder", metavar="OUT", help="the folder that is made")
    add(
        "--dtype",
        choices=_EXPORT_DTYPES,
        metavar="|".join(_EXPORT_DTYPES),
        help=f"the type of the written parameters; {IMPORT} takes {' or '.join(DTYPES)}, in which the model computes "
        "too (default: that of the source)",
    )
    add(
        "--shard-size",
        metavar="SIZE",
        help=f"for {EXPORT}, how large a file may be, as 5GB or 512MiB (default {_SHARD_SIZE})",
    )
    add("--base", metavar="DIR", help=f"for {IMPORT} of PEFT's adapters, the import or run with their model (optional)")
    add("--adapters", action="store_true", help=f"for {EXPORT}, write the adapters alone, as PEFT does")
    return parser


def _import(arguments: argparse.Namespace, source: Path, target: Path) -> list[str]:
    """Write the import; returns the sentences that describe it."""
    from rrfp_jax.hf.model_folder import check_new

    check_new(target, "the folder of the import")
    if arguments.shard_size is not None:
        raise ValueError(f"shard-size is about the files of an {EXPORT}: leave it out")
    if arguments.adapters:
        raise ValueError(f"adapters is about an {EXPORT}: leave it out")
    source = local_copy(source)
    if arguments.base is not None:
        return _import_adapters(arguments, source, target)
    if (source / "adapter_config.json").is_file():
        raise ValueError(f"{source} holds adapters of PEFT: give --base the import, or the run, with their model")
    if arguments.dtype is not None and arguments.dtype not in DTYPES:
        raise ValueError(f"dtype is {arguments.dtype}, in which no model here computes: give {' or '.join(DTYPES)}")
    return_large_blocks()
    use_cpu(1)
    from rrfp_jax.hf.importing import plan_import, write_import

    plan = plan_import(source, dtype=arguments.dtype)
    write_import(plan, target)
    sentences = [f"{plan.num_params:,} parameters in {len(plan.layers)} layers, {plan.dtype}, are in {target}"]
    if plan.carried:
        sentences.append(f"{len(plan.carried)} tensors that models here do not use are carried along")
    if not (target / CARRIED / TOKENIZER).is_file():
        sentences.append(f"{source} has no {TOKENIZER}: nothing will tell whether data is in the model's tokens")
    return [*sentences, f"start from {target / MODEL}, and give run.init_from: {target}"]


def _import_adapters(arguments: argparse.Namespace, source: Path, target: Path) -> list[str]:
    if arguments.dtype is not None:
        raise ValueError("dtype is about a model, and adapters are float32: leave it out")
    use_cpu(1)
    from rrfp_jax.hf.importing import plan_adapters, write_adapters_import

    plan = plan_adapters(source, Path(arguments.base))
    write_adapters_import(plan, target)
    number = sum(math.prod(tensor.shape) for tensor in plan.tensors.values())
    return [
        f"{number:,} parameters of adapters are in {target}, beside the model in {arguments.base}",
        f"start from {target / MODEL}, and give run.init_from: {target}",
    ]


def _export(arguments: argparse.Namespace, run: Path, target: Path) -> list[str]:
    """Write the export; returns the sentence that describes it."""
    from rrfp_jax.hf.model_folder import check_new

    check_new(target, "the folder of the export")
    if arguments.base is not None:
        raise ValueError(f"base is about an {IMPORT}: leave it out")
    shard_bytes = parse_bytes(arguments.shard_size or _SHARD_SIZE, "shard-size")
    return_large_blocks()
    use_cpu(1)
    from rrfp_jax.hf.exporting import plan_export, write_adapters, write_export

    plan = plan_export(run, dtype=arguments.dtype)
    if arguments.adapters:
        write_adapters(plan, target)
        return [f"{target} holds adapters of {len(plan.adapters)} tensors, after {plan.stored.step} steps of {run}"]
    write_export(plan, target, shard_bytes=shard_bytes)
    kind, step = plan.config["architectures"][0], plan.stored.step
    return [f"{target} holds a {kind} of {len(plan.tensors)} tensors, after {step} steps of {run}"]


if __name__ == "__main__":
    run_command(main)
