"""Draw words of a text as small pictures, and write samples to learn reading from.

::

    python -m experiments.reading.draw runs/words
    python -m experiments.train --config tpu_gpu_configs/cpu/multimodal.yaml --run-dir runs/reading

The folder gets two data sets for the section ``data`` of a configuration, kind ``image_text``:

* ``train.jsonl``: each sample shows 1 to 4 pictures of one word each, and each picture is followed by its word. A
  quarter of the samples has no picture but a piece of the text.
* ``held_out.jsonl``: pictures of words that stand in no training picture, one for each sample. About 5% of the words
  are held out, by a checksum.

The folder ``blind`` inside it has the same two data sets with blank pictures of the same widths. A model that is
trained on these shows how much of the score comes from spelling alone.

Words are 2 to 5 letters long and are taken from the running Python's standard library. Pillow draws them with the faces
that come with matplotlib, so nothing is downloaded. The same arguments always give the same samples.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.data.image_text import MARKER
from rrfp_jax.data.sample_order import is_held_out
from rrfp_jax.data.text_bytes import read_corpus
from rrfp_jax.exit_codes import DONE
from rrfp_jax.observe.output_files import replacing

TRAIN, HELD_OUT, BLIND = "train.jsonl", "held_out.jsonl", "blind"
PROMPT = f"{MARKER}\n"
"""The text in front of a word that is to be read."""
HEIGHT = 16
"""Height of every picture in pixels. Widths are multiples of it, so a picture is a whole number of image features."""
_FACES = ("DejaVuSansMono", "DejaVuSansMono-Bold")
_FONT_SIZE = 13
"""Pixels per em. Letters of these faces are then 8 pixels wide, as wide as the patches of the preset."""
_PAPER, _NOISE = 230, 25
"""Grey of the paper, 0 to 255, and the most by which noise changes a pixel."""
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,5}(?![A-Za-z])")
_SHORTEST_PIECE, _LONGEST_PIECE = 6, 24
"""Characters of a sample without pictures."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        draw_data(
            Path(arguments.folder),
            num_samples=arguments.samples,
            num_pictures=arguments.pictures,
            seed=arguments.seed,
        )
    print(f"{arguments.samples} samples of drawn words are in {Path(arguments.folder) / TRAIN}")
    return DONE


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("reading.draw", __doc__)
    parser.prog = "python -m experiments.reading.draw"
    parser.add_argument("folder", metavar="FOLDER", help="the folder to write; files that it has are replaced")
    parser.add_argument("--samples", type=int, default=8000, metavar="N", help="number of samples to train on")
    parser.add_argument("--pictures", type=int, default=12000, metavar="N", help="number of pictures that these show")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides which words are drawn, and how")
    return parser


class _Picture(NamedTuple):
    """A picture that has been drawn."""

    word: str
    name: str
    """The name of the file relative to the data sets."""
    width: int
    """Width in pixels."""

    @property
    def blank(self) -> str:
        """The name of the blank picture of this width, relative to the folder ``blind``."""
        return f"blank-{self.width}.png"


def draw_data(
    folder: Path,
    *,
    num_samples: int,
    num_pictures: int,
    num_held_out: int = 512,
    max_images: int = 4,
    text_only: float = 0.25,
    held_out: float = 0.05,
    text: str | None = None,
    seed: int = 0,
) -> None:
    """Writes the pictures and the data sets that the module's docstring describes.

    Args:
        folder: the folder to write to; it is made if it does not exist.
        num_samples: number of samples to train on.
        num_pictures: number of pictures that these samples show.
        num_held_out: number of samples of held-out words.
        max_images: largest number of pictures in a training sample. All numbers from 1 on are equally frequent.
        text_only: fraction of the training samples that have no picture.
        held_out: fraction of the words that are held out; 0 leaves ``held_out.jsonl`` empty.
        text: the text that words and pieces are taken from. None: the sources of the standard library.
        seed: decides which words are drawn, and how.

    Raises ValueError if a number is out of its range, or the text has too few words.
    """
    for name, number, least in (("samples", num_samples, 1), ("pictures", num_pictures, 1), ("seed", seed, 0)):
        if number < least:
            raise ValueError(f"{name} is {number}: give at least {least}")
    if text is None:
        text = read_corpus(None, suffixes=(".py", ".txt"), max_bytes=64 * 2**20).tobytes().decode("ascii", "ignore")
    text = text.replace(MARKER, "")  # a piece with a marker would need an image
    words = sorted(set(_WORD.findall(text)))
    unseen = [word for word in words if is_held_out(word, held_out)]
    seen = [word for word in words if not is_held_out(word, held_out)]
    if not seen or (held_out and not unseen) or len(text) <= _LONGEST_PIECE:
        raise ValueError(
            f"the text has {len(text)} characters and {len(words)} words, of which {len(unseen)} are held out: give a "
            "longer text, or another fraction to hold out"
        )

    rng = np.random.default_rng(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    (folder / BLIND).mkdir(exist_ok=True)
    shown = _draw_pictures(folder, "seen", [seen[index] for index in rng.integers(len(seen), size=num_pictures)], rng)
    asked = [unseen[index] for index in rng.integers(len(unseen), size=num_held_out)] if unseen else []
    held_out_pictures = _draw_pictures(folder, "unseen", asked, rng)

    samples: list[tuple[dict[str, Any], list[_Picture]]] = []
    for _ in range(num_samples):
        if rng.random() < text_only:
            length = rng.integers(_SHORTEST_PIECE, _LONGEST_PIECE + 1)
            start = rng.integers(len(text) - length)
            samples.append(({"text": text[start : start + length]}, []))
        else:
            pictures = [shown[index] for index in rng.integers(len(shown), size=rng.integers(1, max_images + 1))]
            samples.append(({"text": "".join(f"{PROMPT}{picture.word}\n" for picture in pictures)}, pictures))
    questions = [({"prompt": PROMPT, "target": f"{picture.word}\n"}, [picture]) for picture in held_out_pictures]
    # The data sets come after the pictures, so that a folder that has them has all their pictures.
    for name, lines in ((HELD_OUT, questions), (TRAIN, samples)):
        _write(folder / BLIND / name, [line | {"images": [each.blank for each in images]} for line, images in lines])
        _write(folder / name, [line | {"images": [each.name for each in images]} for line, images in lines])


def _draw_pictures(folder: Path, kind: str, words: Sequence[str], rng: np.random.Generator) -> list[_Picture]:
    """Draws a picture of each word, and a blank one of each width for the folder ``blind``."""
    pictures = []
    for number, word in enumerate(words):
        pixels = draw_word(word, rng)
        pictures.append(_Picture(word, f"pictures/{kind}-{number:05}.png", pixels.shape[1]))
        Image.fromarray(pixels).save(folder / pictures[-1].name)
    for blank, width in {(picture.blank, picture.width) for picture in pictures}:
        Image.new("L", (width, HEIGHT), _PAPER).save(folder / BLIND / blank)
    return pictures


def draw_word(word: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Returns a grey picture of a word, uint8 ``[16, width]``: dark letters on light paper, with noise.

    The face, the grey of the letters and a shift by a pixel are drawn from ``rng``.
    """
    font = _font(_FACES[rng.integers(len(_FACES))])
    # A margin of one pixel on either side, and one more for the shift.
    width = -(-(int(np.ceil(font.getlength(word))) + 3) // HEIGHT) * HEIGHT
    image = Image.new("L", (width, HEIGHT), _PAPER)
    right, down = rng.integers(2, size=2).tolist()
    ink = int(rng.integers(_PAPER * 2 // 5))
    ImageDraw.Draw(image).text((1 + right, down - _top(font)), word, font=font, fill=ink)
    noise = rng.integers(-_NOISE, _NOISE + 1, size=(HEIGHT, width))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)


@cache
def _font(face: str) -> ImageFont.FreeTypeFont:
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    # The basic layout is the same with every build of Pillow.
    return ImageFont.truetype(file, _FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)


@cache
def _top(font: ImageFont.FreeTypeFont) -> int:
    """Returns the number of free pixels above the highest letter of a line."""
    return int(font.getbbox("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")[1])


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with replacing(path) as temporary:
        Path(temporary).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    run_command(main)
