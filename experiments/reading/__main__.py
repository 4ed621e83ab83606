"""Have trained models read words that they have never seen, and say how many are right.

::

    python -m experiments.reading runs/reading --beside runs/reading-blind --picture runs/words.png

A run that was trained on the samples of ``experiments.reading.draw`` writes down the words of held-out pictures, the
likeliest byte in every place. The parameters come from the newest checkpoint, whatever layout saved it. The scores of a
second run, for example one that was trained on blank pictures, stand in the same table.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reading.draw import HELD_OUT
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import start_alone
from rrfp_jax.commands.training.config import TrainConfig, read_train_config
from rrfp_jax.exit_codes import DONE
from rrfp_jax.observe.output_files import check_file
from rrfp_jax.training.run_directory import CHECKPOINTS, CONFIG

if TYPE_CHECKING:
    from experiments.reading.scores import ReadWord

_DRAWN = 30
"""Number of words in the picture."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    runs = [Path(run) for run in (arguments.run, arguments.beside) if run is not None]
    with checking_input():
        if arguments.samples < 1:
            raise ValueError(f"samples is {arguments.samples}: give at least 1")
        if arguments.picture is not None:
            if Path(arguments.picture).suffix.lower() != ".png":
                raise ValueError(f"picture {arguments.picture!r}: let the name end in .png")
            check_file(Path(arguments.picture), "picture")
        # Both configurations are checked before the first run is read, which takes a while.
        configs = [_config_of(run) for run in runs]
        read = {run: _read(run, config, arguments.samples) for run, config in zip(runs, configs, strict=True)}

    from experiments.reading.scores import draw_reading, scores_of

    columns = ("run", "steps", "words", "exact match", "character errors")
    table = make_table("held-out words, read aloud", *columns, numeric=True)
    for run, (step, words) in read.items():
        scores = scores_of(words)
        figures = str(scores.num_words), f"{scores.exact_match:.1%}", f"{scores.character_error_rate:.3f}"
        table.add_row(run.name, str(step), *figures)
    make_console().print(table)
    if arguments.picture is not None:
        _, words = read[runs[0]]
        draw_reading(words[:_DRAWN], arguments.picture, title=f"what {runs[0].name} reads in words it never saw")
    return DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("reading", __doc__)
    parser.prog = "python -m experiments.reading"
    parser.add_argument("run", metavar="RUN", help="a run directory of training on drawn words")
    parser.add_argument("--beside", metavar="RUN", help="another one, to compare with")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="number of held-out words, at most")
    parser.add_argument("--picture", metavar="FILE.png", help="draw some words with what the model reads in them")
    return parser


def _config_of(run: Path) -> TrainConfig:
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{run} is no run directory, it has no {CONFIG}: give one that rrfp train has made")
    config = read_train_config(str(path), {})
    if config.images is None or config.vision is None:
        raise ValueError(f"{run} was not trained to read pictures: give a run whose data is image_text")
    return config


def _read(run: Path, config: TrainConfig, num_samples: int) -> "tuple[int, list[ReadWord]]":
    """Returns the number of steps that the run has trained, and the words that its model reads."""
    start_alone(config.run.platform)
    from experiments.reading.scores import read_words
    from rrfp_jax.checkpoint import newest_step, read_params
    from rrfp_jax.commands.training.model_parts import vision_language_config

    found = newest_step(run / CHECKPOINTS)
    assert config.images is not None
    held_out = Path(config.images.path).with_name(HELD_OUT)
    return found.step, read_words(
        vision_language_config(config), read_params(found), config.images, held_out, num_samples
    )


if __name__ == "__main__":
    run_command(main)
