"""Drawn words for tests: files for the multimodal preset, and steps with 0 to 4 words per sample.

With them goes a small vision-language model, and one that also hears.

The microbatches of a step have several shapes, some have no picture, and one step has none at all.
"""

import atexit
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.reading.draw import TRAIN, draw_data
from rrfp_jax.data import Batch, BucketSpecs, ImageText, ImageTextConfig
from rrfp_jax.models import AudioConfig, LanguageModelConfig, ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.models.model import ChunkGraph
from rrfp_jax.models.vision_language import vision_language_model
from tests.plain_graph import Microbatch, microbatches_of
from tests.programs.toys import with_cheap_init

NUM_STEPS, NUM_MICROBATCHES = 20, 4
# Biases of keys change nothing: their gradients would be rounding, and Adam would make steps of them.
ENCODER: dict[str, Any] = {"hidden": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 12, "qkv_bias": False}
MODEL: dict[str, Any] = {
    "vision": VisionConfig(**ENCODER, qk_norm=True, patch_dim=64, max_rows=2, max_columns=8),
    "projector": ProjectorConfig(patches_per_feature=4),
    "decoder": LanguageModelConfig(vocab_size=256, hidden=8, num_layers=2, num_heads=2, mlp_dim=12),
}
AUDIO = AudioConfig(**ENCODER, bins=5, frames_per_position=2, is_packed=True)
CUT: dict[str, Any] = {"decoder_layers_per_chunk": [1, 1], "packed": True}


class Data(NamedTuple):
    """What a run trains on."""

    steps: list[list[Microbatch]]
    buckets: list[dict[str, Any]]


@cache
def preset_data() -> str:
    """Draws a small data set for the preset ``cpu/multimodal`` and returns its path. It is there until the process
    ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    letters = "adeiknorstEW"
    text = " ".join(f"{a}{b}{c}" for a in letters for b in letters for c in ("", "on", "iWs"))
    draw_data(Path(folder.name), num_samples=160, num_pictures=60, num_held_out=32, text_only=0.5, text=text)
    return str(Path(folder.name) / TRAIN)


def image_text(folder: Path, *, text: str, draw: dict[str, Any], **batching: Any) -> ImageText:
    """Draws samples to a folder, and returns them as a data set of grey pictures in patches of 8 x 8 pixels."""
    draw_data(folder, text=text, num_held_out=0, held_out=0.0, **draw)
    grey: dict[str, Any] = {"channels": 1, "patch_size": 8, "mean": (1.0,), "std": (1.0,)}
    return ImageText(ImageTextConfig(path=str(folder / TRAIN), **grey, **batching))


def as_floats(batch: Batch) -> Batch:
    """Returns a batch whose patches are numbers, 0 for white and 1 for black, in place of bytes."""
    patches = [None if leaf is None else (255 - leaf.astype(np.float32)) / 255 for leaf in batch["patches"]]
    return {**batch, "patches": patches}


def float_buckets(data: ImageText) -> list[BucketSpecs]:
    """Returns the shapes of microbatches that :func:`as_floats` has changed."""
    return [
        {
            name: jax.ShapeDtypeStruct(leaf.shape, np.float32) if name == "patches" else leaf
            for name, leaf in each.items()
        }
        for each in data.buckets
    ]


@cache
def drawn() -> Data:
    """Some steps, the last one without any picture."""
    with TemporaryDirectory() as folder:
        data = image_text(
            Path(folder), text="am Be do up ink wax " * 9, batch_size=8, num_microbatches=NUM_MICROBATCHES,
            text_buckets=2, image_buckets=2, balance=False, seed=1,
            draw={"num_samples": 200, "num_pictures": 24, "text_only": 0.5},
        )  # fmt: skip
        of_text = next(step for step in count() if not any(sample.images for sample in data.samples(step)))
        numbers = [*range(NUM_STEPS - 1), of_text]
        assert {len(sample.images) for step in numbers for sample in data.samples(step)} == {0, 1, 2, 3, 4}
        return Data([microbatches_of(as_floats(data.batch(step))) for step in numbers], float_buckets(data))


@cache
def with_sounds() -> Data:
    """The same with a sound here and there, whose two features stand in the place of the first two tokens."""
    data, rng = drawn(), np.random.default_rng(0)

    def heard(microbatch: Microbatch) -> Microbatch:
        index = np.full(microbatch["tokens"].shape, -1, np.int32)
        is_free = microbatch.get("image_index", index)[0] < 0
        index[0, np.flatnonzero(is_free)[:2]] = [0, 2]
        segments = np.array([[1] * 8 + [2] * 4], np.int32)
        frames = rng.normal(size=(1, 12, AUDIO.bins)).astype(np.float32)
        return microbatch | {"frames": frames, "frame_segments": segments, "audio_index": index}

    steps = [[heard(each) if rng.integers(2) else each for each in step] for step in data.steps]
    leaf = {name: array for step in steps for each in step for name, array in each.items()}
    sounds = {name: leaf[name] for name in ("frames", "frame_segments")}
    loud = [bucket | sounds | {"audio_index": bucket["tokens"]} for bucket in data.buckets]
    return Data(steps, [*data.buckets, *loud])


@cache
def model(*, projector_in: str = "encoder", hears: bool = False) -> ChunkGraph:
    config = VisionLanguageConfig(
        **MODEL, audio=AUDIO if hears else None, audio_projector=ProjectorConfig(patches_per_feature=2)
    )
    graph = vision_language_model(config).split(**CUT, projector_in=projector_in)
    graph.chunks[:] = map(with_cheap_init, graph.chunks)
    return graph
