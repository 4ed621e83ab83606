"""Have trained models read words that they have never seen, and say how many are right.

::

    rrfp read runs/seeing --beside runs/blind --picture words.png

A run that was trained on ``rendered_text`` is asked what the pictures of held-out words say. Of a run beside it, one
with ``blind`` for example, the scores stand in the same table: what can be had from spelling alone. Parameters come
from the newest checkpoint, whatever layout saved it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.process import start_alone
from rrfp_jax.commands.training.config import TrainConfig, read_train_config
from rrfp_jax.exit_codes import DONE
from rrfp_jax.observe.output_files import check_file
from rrfp_jax.training.run_directory import CONFIG

if TYPE_CHECKING:
    from rrfp_jax.commands.training.reading import ReadWord

_BATCH = 32
_DRAWN = 30


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    runs = [Path(run) for run in (arguments.run, arguments.beside) if run is not None]
    with checking_input():
        if arguments.samples < 1 or arguments.samples % _BATCH:
            raise ValueError(f"samples is {arguments.samples}: give a multiple of {_BATCH}")
        if arguments.picture is not None:
            if Path(arguments.picture).suffix.lower() != ".png":
                raise ValueError(f"picture {arguments.picture!r}: let the name end in .png")
            check_file(Path(arguments.picture), "picture")
        configs = [_config_of(run) for run in runs]

    read = []
    for run, config in zip(runs, configs, strict=True):
        with checking_input():
            read.append((run, config, *_read(run, config, arguments.samples)))
    _show(read)
    if arguments.picture is not None:
        from rrfp_jax.commands.training.reading_picture import draw_reading

        draw_reading(read[0][3][:_DRAWN], arguments.picture, title=f"what {runs[0].name} reads in words it never saw")
    return DONE


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("read", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory of training on rendered_text")
    parser.add_argument("--beside", metavar="RUN", help="another one, to compare with")
    parser.add_argument(
        "--samples", type=int, default=256, metavar="N", help=f"samples of held-out words, a multiple of {_BATCH}"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw some words with what the model reads in them")
    return parser


def _config_of(run: Path) -> TrainConfig:
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{run} is no run directory, it has no {CONFIG}: give one that rrfp train has made")
    config = read_train_config(str(path), {})
    if config.rendered_text is None or config.vision is None:
        raise ValueError(f"{run} was not trained to read pictures: give a run whose data is rendered_text")
    return config


def _read(run: Path, config: TrainConfig, num_samples: int) -> "tuple[int, list[ReadWord]]":
    """After how many steps, and what is read."""
    start_alone(config.run.platform)
    from rrfp_jax.checkpoint import newest_step, read_params
    from rrfp_jax.commands.training.model_parts import vision_language_config
    from rrfp_jax.commands.training.reading import read_words
    from rrfp_jax.data import RenderedText
    from rrfp_jax.training.run_directory import RunDirectory

    found = newest_step(RunDirectory(run).checkpoints)
    assert config.rendered_text is not None
    batches = RenderedText(config.rendered_text).held_out(num_samples, rows=_BATCH)
    return found.step, read_words(vision_language_config(config), read_params(found), batches)


def _show(read: "list[tuple[Path, TrainConfig, int, list[ReadWord]]]") -> None:
    from rrfp_jax.commands.training.reading import scores_of

    table = make_table(
        "held-out words, read aloud", "run", "steps", "words", "exact match", "character errors", numeric=True
    )
    for run, config, step, words in read:
        scores = scores_of(words)
        blind = " (blind)" if config.rendered_text is not None and config.rendered_text.blind else ""
        table.add_row(
            f"{run.name}{blind}",
            str(step),
            str(scores.num_words),
            f"{scores.exact_match:.1%}",
            f"{scores.character_error_rate:.3f}",
        )
    make_console().print(table)


if __name__ == "__main__":
    run_command(main)
