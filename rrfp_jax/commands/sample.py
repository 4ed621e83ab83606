"""Continue a text with a trained model.

::

    rrfp sample runs/mine --prompt "def main("
    rrfp sample runs/mine --prompt-file story.txt --temperature 0.8 --top-p 0.95
    rrfp sample runs/seeing --image sign.png --prompt "<image>It says: "
    rrfp sample imported/llama --prompt "The capital of France is"
    rrfp sample imported/llava --image cat.jpg --prompt "USER: <image> ASSISTANT:"

Parameters come from the newest checkpoint of a run, whatever layout saved it, or from an imported model; they must fit
on one device. The command prints the text behind the prompt.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.commands.common.console import show_text
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import start_alone
from rrfp_jax.commands.training.config import TrainConfig, read_train_config
from rrfp_jax.exit_codes import DONE
from rrfp_jax.hf.model_folder import RUN, ModelFolder, open_model
from rrfp_jax.storage import local_copy

if TYPE_CHECKING:
    from rrfp_jax.commands.sampling.generating import TokenPrompt
    from rrfp_jax.commands.sampling.prompts import Vocabulary


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        text = _text(arguments)
        folder = open_model(Path(arguments.folder), "the model")
        run = None if folder.is_import else read_train_config(str(local_copy(folder.path / RUN)), {})
        _check_images(arguments, folder, run)
        start_alone(None if run is None else run.run.platform)
        from rrfp_jax.commands.sampling.generating import Drawing
        from rrfp_jax.commands.sampling.prompts import check_fits, vocabulary_of

        drawing = Drawing(
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
        )
        vocabulary = vocabulary_of(folder, arguments.tokenizer)
        prompt = _prompt(text, [Path(image) for image in arguments.image], vocabulary, folder, run)
        check_fits(prompt.tokens, folder, drawing.max_tokens)
        made = _made(folder, prompt, drawing, vocabulary)
    show_text(made)
    return DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("sample", __doc__)
    parser.add_argument("folder", metavar="RUN", help="a run directory, or the folder of an imported model")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="what the model goes on with (default: nothing)")
    text.add_argument("--prompt-file", metavar="FILE", help="a file of UTF-8 with the prompt in it (optional)")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image, where the prompt says <image>, or before it; may be given several times (default: none)",
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens that are made, at most")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="what logits are divided by; 0: the likeliest token"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="draw of the likeliest tokens that have this probability"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides what is drawn")
    parser.add_argument(
        "--tokenizer", metavar="FILE|bytes", help="the tokenizer to take (left out: that of the run or the import)"
    )
    return parser


def _text(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        return arguments.prompt or ""
    try:
        return Path(arguments.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ValueError(f"prompt file {arguments.prompt_file} cannot be read ({reason}): give another one") from None


def _check_images(arguments: argparse.Namespace, folder: ModelFolder, run: TrainConfig | None) -> None:
    if not arguments.image:
        return
    if folder.sections.vision is None:
        raise ValueError(f"{folder.path} is a model of text, which sees no images: leave --image out")
    if folder.sections.model.layer_variant.rope_sections is not None:
        raise ValueError(f"{folder.path} has rope_sections, with which images are seen in training alone: export it")
    if run is not None and run.images is None:
        raise ValueError(f"{folder.path} was trained without images: give a run of image_text")


def _prompt(
    text: str, images: list[Path], vocabulary: "Vocabulary", folder: ModelFolder, run: TrainConfig | None
) -> "TokenPrompt":
    from rrfp_jax.commands.sampling.generating import TokenPrompt

    if not images:
        return TokenPrompt(tokens=vocabulary.encode(text))
    if run is None:
        from rrfp_jax.commands.sampling.prompts import Tokenizer, prompt_of_import

        if not isinstance(vocabulary, Tokenizer):
            raise ValueError("tokens of bytes have none that stands for an image: leave --tokenizer out")
        return prompt_of_import(text, images, folder, vocabulary)
    from rrfp_jax.commands.sampling.prompts import prompt_with_images
    from rrfp_jax.commands.training.model_parts import vision_language_config
    from rrfp_jax.data.images import TextWriter
    from rrfp_jax.hf.image_settings import read_image_tokens

    assert run.images is not None
    writer, files, kind = None, folder.files(), folder.tokens()
    if files is not None and kind is not None and not kind.is_bytes:
        writer = TextWriter(kind, read_image_tokens(files), opens=True)
    return prompt_with_images(text, images, run.images, vision_language_config(run), writer)


def _made(folder: ModelFolder, prompt: "TokenPrompt", drawing: object, vocabulary: "Vocabulary") -> str:
    from rrfp_jax.checkpoint import newest_step, read_params
    from rrfp_jax.commands.sampling.generating import Drawing, Generator
    from rrfp_jax.models.adapters import merged_params
    from rrfp_jax.models.vision_config import ProjectorConfig, VisionLanguageConfig

    assert isinstance(drawing, Drawing)
    sections = folder.sections
    model = (
        sections.model
        if sections.vision is None
        else VisionLanguageConfig(
            vision=sections.vision, projector=sections.projector or ProjectorConfig(), decoder=sections.model
        )
    )
    params = read_params(newest_step(folder.checkpoints))
    if sections.adapters is not None:
        params = merged_params(params, sections.adapters)
    generator = Generator(model, params)
    return vocabulary.decode(generator.tokens(prompt, drawing, stops=vocabulary.stops))


if __name__ == "__main__":
    run_command(main)
