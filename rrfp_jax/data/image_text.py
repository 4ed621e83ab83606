"""Text with images, from a JSONL file: one sample per line.

A line is an object with these fields:

* ``text``, all of which is to be predicted; or ``prompt``, which is only read, and ``target`` after it; or
  ``messages``, a chat that the tokenizer's template writes, whose assistant's turns are to be predicted;
* ``images``, paths of image files, relative to the file or to ``image_folder``; may be missing, or null.

``<image>`` in the text or prompt says where an image stands, once for each; without any, all stand before the text. In
a chat it is an entry ``{"type": "image"}`` of a message's content, which may name its file as ``image`` or ``path``. A
token is a byte of UTF-8, and after each sample comes a zero byte; or it is one of a tokenizer, and its end of a text
comes after each. Text alone is a data set too, with samples of any length in few shapes.

Some samples may be held out, by a checksum: of samples that share images, all are held out or none.

The heads of all image files are read at the start, so a file that is missing, is no image or is too large is refused
before anything runs. Pixels are decoded where they are read, when a batch is made. An epoch visits every sample once,
in an order that follows from (seed, epoch) alone.
"""

import difflib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._sources import check_inside
from rrfp_jax.data.batching import Batching, Cost, Limits
from rrfp_jax.data.buckets import CutSizes
from rrfp_jax.data.config import ImageTextConfig
from rrfp_jax.data.dataset import Batch, BrokenData, BucketSpecs, Reads
from rrfp_jax.data.images import TextWriter, fitting_grid, processor_grid, read_bytes, size_of_image
from rrfp_jax.data.packing import IMAGE_TOKEN, Grid, PatchFormat, Sample, Text, make_sample, patches_of
from rrfp_jax.data.sample_order import (
    HELD_OUT,
    TRAIN,
    Part,
    is_held_out,
    items_of,
    places_of_step,
    refuse_nothing_held_out,
)
from rrfp_jax.data.tokenizer_files import BYTE_TOKENS
from rrfp_jax.record_files import parse_json

if TYPE_CHECKING:
    from rrfp_jax.data._chats import ChatTemplate

MARKER = "<image>"
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_IMAGES = 1 << 12
"""Largest number of images that a line may have; each of them is opened before the first step."""
_SURVEYED_SAMPLES = 2048
_FIELDS = ({"text"}, {"prompt", "target"}, {"messages"}, {"messages", "tools"})
_KNOWN = ("text", "prompt", "target", "messages", "tools", "images")
_FILE_KEYS = ("image", "path", "url")


class _Line(NamedTuple):
    """A line of the file, ready to become a sample."""

    number: int
    parts: list[Text | Grid]
    files: list[Path]


class ImageText:
    """A deterministic data set of text with images; see the module's text.

    Args:
        cost: the cost of a sample, for balancing; None: a token and a patch cost the same.
        part: the samples that are trained on, or those that are held out.
        cut: the numbers of which the sizes of microbatches are multiples.
        num_replicas: the number of replicas that share the microbatches.
        writer: turns the text into tokens; None: tokens are bytes.
        has_grid_positions: whether a position is a token's place in time, row and column.

    Attributes: ``config``; ``num_samples`` and ``num_images`` of the part; ``shapes``, all that a microbatch can have,
    and ``buckets``, the same as leaves; ``largest_grid``, the most rows and the most columns of patches that an image
    has; ``counts_once``, whether a sample that has come before has no weight, as in evaluations.
    Raises ValueError, with the remedy, naming the line and the file, for anything that cannot be used.
    """

    counts_once = False

    def __init__(
        self,
        config: ImageTextConfig,
        *,
        cost: Cost | None = None,
        part: Part = TRAIN,
        cut: CutSizes | None = None,
        num_replicas: int = 1,
        writer: TextWriter | None = None,
        has_grid_positions: bool = False,
    ) -> None:
        refuse_nothing_held_out(part, config.held_out)
        self.config, self._writer, self._num_bad = config, writer, 0
        self.vocab_size, self.token_kind = (256, BYTE_TOKENS) if writer is None else (writer.vocab_size, writer.kind)
        path = _at_home(config.path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): give the path of a JSONL file") from error
        self._folder = path.parent if config.image_folder is None else _at_home(config.image_folder)
        self._lines = self._lines_of(content, part)
        self.num_samples, self.num_images = len(self._lines), sum(len(line.files) for line in self._lines)
        image_token = IMAGE_TOKEN if writer is None else writer.image_token
        self._samples = [make_sample(line.parts, config.merge, image_token) for line in self._lines]
        grids = [grid for sample in self._samples for grid in sample.images] or [Grid(0, 0)]
        # With the images' sizes, which decide how samples are divided: files may change while the text stays.
        sizes = [tuple(grid) for grid in grids]
        told = repr(sizes if writer is None else (sizes, writer.told))
        if "_template" in vars(self):  # some line is a chat
            told += repr(self._template.settings)
        digest = hashlib.sha256(content + told.encode()).hexdigest()[:16]
        self.fingerprint = f"{self.num_samples} samples with {self.num_images} images, SHA-256 {digest}"
        self.largest_grid = Grid(max(grid.rows for grid in grids), max(grid.columns for grid in grids))
        self._format = PatchFormat(
            config.channels * config.patch_size**2,
            config.merge,
            is_packed=config.image_size is None,
            dtype=np.uint8,
            has_grid_positions=has_grid_positions,
        )
        limits = self._limits()
        num_steps = -(-min(_SURVEYED_SAMPLES, self.num_samples) // config.batch_size)
        survey = [self.samples(step) for step in range(num_steps)]
        self._batching = Batching(config, self._format, limits, survey, cost, cut=cut, num_replicas=num_replicas)
        self.shapes = self._batching.shapes

    @property
    def buckets(self) -> list[BucketSpecs]:
        return self._batching.buckets

    # -- the lines of the file --------------------------------------------------------------------------------------

    def _lines_of(self, content: bytes, part: Part) -> list[_Line]:
        """Returns the lines of the part; of others no image file is looked at."""
        config = self.config
        lines = [
            (number, fields)
            for number, line in enumerate(content.splitlines(), start=1)
            if line.strip() and (fields := self._spared(self._fields, number, line)) is not None
        ]
        keys, shared = _group_keys(fields for _, fields in lines) if config.held_out else ([""] * len(lines), "")
        found = [
            self._spared(self._line, number, fields)
            for (number, fields), key in zip(lines, keys, strict=True)
            if (part == HELD_OUT) == is_held_out(key, config.held_out)
        ]
        own = [line for line in found if line is not None]
        if part == HELD_OUT and not own:
            raise ValueError(
                f"held_out {config.held_out} holds back not one sample of {_at_home(config.path)}{shared}: give more "
                "lines, or a larger held_out"
            )
        if part == TRAIN and len(own) < config.batch_size:
            what = f"{len(own)} samples" if not config.held_out else f"{len(own)} samples that are not held out{shared}"
            raise ValueError(
                f"{_at_home(config.path)} holds {what}, fewer than batch_size {config.batch_size}: give more lines, or "
                "a smaller batch_size"
            )
        return own

    def _spared(self, make: Callable[[int, Any], _T], number: int, given: Any) -> _T | None:
        """Returns the result of ``make`` for a line, or None if the line is bad and one more bad line is allowed."""
        try:
            return make(number, given)
        except ValueError as error:
            if self._num_bad == self.config.max_bad_samples:
                raise
            self._num_bad += 1
            _LOG.warning("left out: %s", error)
            return None

    def _fields(self, number: int, line: bytes) -> dict[str, Any]:
        """Returns the fields of a line, ``images`` always among them."""
        try:
            fields = parse_json(line)
        except ValueError as error:
            raise self._refusal(number, f"is not JSON ({error}): mend or remove it") from error
        known = fields.keys() & _KNOWN if isinstance(fields, dict) else set()
        if known - {"images"} not in _FIELDS:
            kinds = "with text, or with prompt and target, or with messages"
            raise self._refusal(number, f"must be an object {kinds}, and perhaps images")
        for name in fields.keys() - known:
            if near := difflib.get_close_matches(name.lower(), _KNOWN, n=1):
                raise self._refusal(number, f"has a field {name!r}, which is not read: call it {near[0]}, or remove it")
        own = {name: fields[name] for name in fields if name in known} | {"images": fields.get("images") or []}
        texts = [value for name, value in own.items() if name not in ("images", "messages", "tools")]
        if not isinstance(own["images"], list) or not all(isinstance(each, str) for each in [*texts, *own["images"]]):
            raise self._refusal(number, "must hold text in its fields, and a list of paths in images")
        if len(own["images"]) > _MOST_IMAGES:
            raise self._refusal(
                number, f"has {len(own['images'])} images: give at most {_MOST_IMAGES}, on several lines"
            )
        if "messages" in own:
            own["images"] = self._images_of_chat(number, own)
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise self._refusal(number, "has half a character (a lone surrogate): mend or remove it") from None
        return own

    def _line(self, number: int, fields: dict[str, Any]) -> _Line:
        files, target = [self._folder / name for name in fields["images"]], fields.get("target", "")
        grids = []
        for file in files:
            if file.is_symlink() and file.is_file():
                try:
                    check_inside(file, self._folder)
                except ValueError as error:
                    raise self._refusal(number, f"names an image outside: {error}") from None
            try:
                grids.append(image_grid(self.config, file))
            except ValueError as error:
                raise self._of_file(number, file, error) from error
        if "messages" in fields:
            return _Line(number, self._chat_parts(number, fields, grids), files)
        pieces = fields.get("text", fields.get("prompt", "")).split(MARKER)
        if len(pieces) == 1:
            pieces = [""] * len(files) + pieces
        if len(pieces) != len(files) + 1:
            raise self._refusal(
                number, f"has {len(files)} images and {len(pieces) - 1} times {MARKER}: make them equal"
            )
        if not fields.get("target", "".join(pieces)):
            raise self._refusal(number, "has no text to predict: give it some, or remove the line")
        if self._writer is not None:
            try:
                parts = [*self._writer.parts(pieces, target, grids, self.config.merge), self._writer.closing]
            except ValueError as error:
                raise self._refusal(number, str(error)) from None
            return _Line(number, parts, files)
        parts = []
        for piece, grid in zip(pieces, [*grids, None], strict=True):
            parts += [Text(piece.encode(), float(not target))] if piece else []
            parts += [grid] if grid is not None else []
        parts += [Text(target.encode(), 1)] if target else []
        return _Line(number, [*parts, Text(b"\0", 1)], files)

    @cached_property
    def _template(self) -> "ChatTemplate":
        from rrfp_jax.data._chats import read_chat_template

        assert self._writer is not None
        template = read_chat_template(str(self._writer.kind.file), of_processor=True)
        if template.is_dated:
            raise ValueError(
                f"the chat template in {template.file} writes the date, and a run that goes on tomorrow would have "
                "other data: put a date into it in place of strftime_now"
            )
        return template

    def _images_of_chat(self, number: int, fields: dict[str, Any]) -> list[str]:
        """Returns the files of a chat's images in order; raises ValueError for content that is no text or image."""
        named = iter(fields["images"])
        files = list[str]()
        for message in fields["messages"] if isinstance(fields["messages"], list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for entry in content if isinstance(content, list) else ():
                kind = entry.get("type") if isinstance(entry, dict) else None
                if kind == "text" and isinstance(entry.get("text"), str):
                    continue
                if kind != "image":
                    what = f"of type {kind!r}" if isinstance(kind, str) and kind != "text" else "without type or text"
                    raise self._refusal(number, f"has content {what} in its messages: give entries of text and image")
                file = next((entry[key] for key in _FILE_KEYS if entry.get(key) is not None), None) or next(named, None)
                if not isinstance(file, str) or file.startswith(("http:", "https:", "data:")):
                    raise self._refusal(
                        number, "has an image in its messages without a file: name one there or in images"
                    )
                files.append(file)
        if next(named, None) is not None:
            raise self._refusal(number, "names more images than its messages show: leave some out, or show them")
        return files

    def _chat_parts(self, number: int, fields: dict[str, Any], grids: list[Grid]) -> list[Text | Grid]:
        if self._writer is None:
            raise self._refusal(number, "has messages, and its tokens would be bytes: give a tokenizer with a template")
        template = self._template  # a template that is none is no fault of the line
        try:
            text, turns = template.written(fields, "messages")
            bos = template.tokens.get("bos_token")
            opens = not (bos and text.startswith(bos))
            parts = self._writer.chat_parts(text, turns, grids, self.config.merge, opens=opens)
        except ValueError as error:
            raise self._refusal(number, str(error)) from None
        if not any(isinstance(part, Text) and part.weight for part in parts):
            raise self._refusal(number, "has no turn of the assistant to predict: give one, or remove the line")
        return parts

    def _refusal(self, number: int, what: str) -> ValueError:
        return ValueError(f"line {number} of {self.config.path} {what}")

    def _of_file(self, number: int, file: Path, error: ValueError) -> ValueError:
        return ValueError(f"image {file}, of line {number} of {self.config.path}, {error}")

    def _limits(self) -> Limits:
        """Returns the limits by the largest samples, as many as a microbatch has when cut in order.

        Where a step spans several epochs, one sample may come as often. Raises ValueError, naming the line, for a
        sample or an image that is larger than the configuration allows.
        """
        config = self.config
        largest_images = [max(sample.patches, default=0) for sample in self._samples]
        for name, most, sizes in (
            ("length", config.length, [sample.length for sample in self._samples]),
            ("image_length", config.image_length, largest_images),
        ):
            if most is not None and max(sizes) > most:
                longest = int(np.argmax(sizes))
                what = "tokens long" if name == "length" else "patches large in one of its images"
                raise self._refusal(
                    self._lines[longest].number,
                    f"is {sizes[longest]} {what}, more than {name} {most}: give at least that, or shorten the line",
                )
        often = self._samples * (1 + -(-config.batch_size // self.num_samples))
        lengths = sorted((sample.length for sample in often), reverse=True)
        images = sorted((len(sample.images) for sample in often), reverse=True)
        patches = sorted((sum(sample.patches) for sample in often), reverse=True)
        return Limits(
            longest=lengths[0],
            tokens=sum(lengths[: config.microbatch_size]),
            largest_image=max(largest_images),
            images=sum(images[: config.microbatch_size]),
            patches=sum(patches[: config.microbatch_size]),
            has_text_only=not images[-1],
        )

    # -- batches ----------------------------------------------------------------------------------------------------

    def _numbers(self, step: int) -> list[int]:
        config = self.config
        return items_of(step, batch_size=config.batch_size, num=self.num_samples, seed=config.seed).tolist()

    def samples(self, step: int, left_out: Container[int] = ()) -> list[Sample]:
        """Returns the samples of ``step``, whatever microbatches they come into; those in ``left_out``, by their
        numbers in the step, count nothing."""
        again = places_of_step(step, self.config.batch_size) >= self.num_samples
        samples = [self._samples[number] for number in self._numbers(step)]
        return [
            replace(sample, weights=np.zeros_like(sample.weights))
            if place in left_out or (self.counts_once and again[place])
            else sample
            for place, sample in enumerate(samples)
        ]

    def batch(self, step: int, reads: Reads | None = None, left_out: Container[int] = ()) -> Batch:
        """Returns the batch of ``step`` (0, 1, ...), lists of microbatches by leaf; unread images are not decoded.

        Each microbatch has the leaves ``tokens``, ``positions``, ``segments``, ``targets`` (int32) and ``weights``
        (float32), all ``[rows, length]``. A microbatch with images also has ``image_index`` (int32, the same shape),
        ``patches`` (uint8 ``[image_rows, image_length, channels * patch_size**2]``), ``patch_segments``, ``patch_rows``
        and ``patch_columns`` (int32 ``[image_rows, image_length]``); images of one ``image_size`` have a row each and
        neither ``patch_rows`` nor ``patch_columns``.

        The samples in ``left_out``, by their numbers in the step, count nothing, and their images are blank. Raises
        BrokenData, naming file and line, for an image that cannot be decoded.
        """
        numbers = self._numbers(step)

        def patches(sample: int, image: int) -> NDArray[np.uint8]:
            line = self._lines[numbers[sample]]
            grid = [part for part in line.parts if isinstance(part, Grid)][image]
            if sample in left_out:
                return np.zeros((grid.num_patches, self._format.patch_dim), np.uint8)
            try:
                return byte_patches(self.config, line.files[image], grid)
            except ValueError as error:
                broken = BrokenData(str(self._of_file(line.number, line.files[image], error)))
                broken.sample = sample
                raise broken from error

        return self._batching.leaves(self.samples(step, left_out), patches, reads)


def image_grid(config: ImageTextConfig, file: Path) -> Grid:
    """Returns the patches of an image; raises ValueError, in words that follow the name of the file, where it is
    none."""
    width, height = size_of_image(file, config.max_pixels)
    if config.image_size is not None:
        return Grid(config.image_size // config.patch_size, config.image_size // config.patch_size)
    if config.min_patches is not None:
        return processor_grid(
            width,
            height,
            patch=config.patch_size,
            merge=config.merge,
            min_patches=config.min_patches,
            max_patches=config.max_patches,
        )
    block = config.patch_size * config.merge
    return fitting_grid(width, height, block=block, merge=config.merge, max_patches=config.max_patches)


def byte_patches(config: ImageTextConfig, file: Path, grid: Grid) -> NDArray[np.uint8]:
    """Returns pixels ``[patches, channels * patch_size**2]``; raises ValueError, in words as above, where the image
    cannot be decoded."""
    pixels = read_bytes(
        file, grid, patch_size=config.patch_size, channels=config.channels, max_pixels=config.max_pixels
    )
    return patches_of(pixels, config.patch_size, 1 if config.row_order else config.merge)


def _at_home(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} begins with a ~ that names nobody's folder: write the path in full") from error


def _group_keys(samples: Iterable[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Returns for every sample, given by its fields, the key that decides whether its group is held out.

    Samples that share an image, directly or by way of others, are one group, so an image of a sample that is asked
    about is never trained on. The fate of a group follows from the names of its own images, so data that is added
    elsewhere changes nothing: the key is the first of the lists of images of the group, as text; of a sample without
    images its own text.

    Also returns words for a refusal where more than half of the samples are one group; empty otherwise.
    """
    samples = list(samples)
    above: dict[str, str] = {}  # names that belong together, as a disjoint-set forest (Galler and Fischer 1964)

    def root(name: str) -> str:
        up = above.setdefault(name, name)
        while up != name:
            above[name] = above[up]
            name, up = up, above[up]
        return name

    for fields in samples:
        names = [normpath(name) for name in fields["images"]]
        for name in names:
            above[root(name)] = root(names[0])
    keys: list[str] = []
    first: dict[str, str] = {}
    for fields in samples:
        texts = (fields[name] for name in sorted(fields.keys() - {"images"}))
        own = (text if isinstance(text, str) else json.dumps(text, sort_keys=True) for text in texts)
        key = "\n".join(fields["images"]) or "\n".join(own)
        keys.append(key)
        if fields["images"]:
            group = root(normpath(fields["images"][0]))
            first[group] = min(first.get(group, key), key)
    found = [
        first[root(normpath(fields["images"][0]))] if fields["images"] else key
        for fields, key in zip(samples, keys, strict=True)
    ]
    most = max(Counter(found).values(), default=0)
    if most <= max(1, len(found) // 2):
        return found, ""
    return (
        found,
        f" ({most} of {len(found)} share images with one another, so they are held out together or not at all)",
    )
