"""A model that sees by rotary positions and windows, and reads by positions of three axes, as Qwen2.5-VL: one jitted
model's training, however it runs."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import optax
import pytest

from experiments.reading.draw import TRAIN, draw_data
from rrfp_jax.data import ImageText, ImageTextConfig
from rrfp_jax.data.buckets import CutSizes
from rrfp_jax.models import LanguageModelConfig, ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.models.config import LayerVariant
from rrfp_jax.models.cuts import ContextCut
from rrfp_jax.models.model import ChunkGraph
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.schedules import Placement, linear
from tests.drawn_words import Data, as_floats, float_buckets
from tests.models.graph_of_chunks import start
from tests.pipelines import make_pipeline
from tests.plain_graph import batch_of, microbatches_of, train_plainly
from tests.plain_loop import assert_same_training

NUM_STEPS, OPTIMIZER = 5, optax.adamw(1e-3)
# Biases of keys change nothing, so their gradients are rounding, of which Adam would make steps.
MODEL = VisionLanguageConfig(
    vision=VisionConfig(
        **{"hidden": 16, "num_layers": 3, "num_heads": 2, "mlp_dim": 12, "patch_dim": 64, "qkv_bias": False},
        **{"gated_mlp": True, "activation": "silu", "norm": "rms_norm", "patch_bias": False, "patch_frames": 2},
        **{"rotary_theta": 100.0, "window": 4, "global_layers": (1,)},
    ),
    projector=ProjectorConfig(patches_per_feature=4, mlp_dim=64),
    decoder=LanguageModelConfig(
        **{"vocab_size": 256, "hidden": 16, "num_layers": 3, "num_heads": 2, "mlp_dim": 12},
        variant=LayerVariant(rope_sections=(1, 1, 2)),
    ),
)


@cache
def drawn() -> Data:
    with TemporaryDirectory() as folder:
        draw = {"num_samples": 60, "num_pictures": 24, "text_only": 0.4, "num_held_out": 0, "held_out": 0.0}
        draw_data(Path(folder), text="am Be do up ink wax " * 9, **draw)
        config = ImageTextConfig(
            path=str(Path(folder) / TRAIN), batch_size=8, num_microbatches=4, text_buckets=2, image_buckets=2,
            channels=1, patch_size=8, mean=(1.0,), std=(1.0,),
        )  # fmt: skip
        # of a size that meshes of two divide
        data = ImageText(config, cut=CutSizes(rows=2, length=2, image_rows=2, image_length=2), has_grid_positions=True)
        steps = [microbatches_of(as_floats(data.batch(step))) for step in range(NUM_STEPS)]
    places = [each["positions"] for step in steps for each in step if "patches" in each]
    assert any((each != each[..., :1]).any() for each in places)
    return Data(steps, float_buckets(data))


def model(*, projector_in: str = "encoder", context: int = 1) -> ChunkGraph:
    return vision_language_model(MODEL).split(
        encoder_layers_per_chunk=[2, 1],
        decoder_layers_per_chunk=[1, 2],
        projector_in=projector_in,
        packed=True,
        context=ContextCut(devices=context) if context > 1 else None,
    )


@cache
def expected(*frozen: str) -> tuple[list[float], Any]:
    graph = model()
    names = {name for chunk in freeze(graph.chunks, frozen) for name in chunk.frozen}
    losses, _, params = train_plainly(graph, start(graph), OPTIMIZER, drawn().steps, clip_norm=1.0, frozen=names)
    return losses, params


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hint": "bfw", "window": 2, "remat": "dots"},
        {"projector_in": "own", "placement": Placement((0, 0, 1, 2, 3)), "remat": "full"},
        {"projector_in": "decoder", "freeze": ("vision",)},
        {"data": 2},
        {"mesh": {"tensor": 2}},
        {"mesh": {"fsdp": 2}, "remat": "full"},
        {"mesh": {"context": 2}, "context": 2},
    ],
    ids=str,
)
def test_four_stages_train_what_one_jitted_model_does(options: dict[str, Any]) -> None:
    options = dict(options)
    cut = {name: options.pop(name) for name in ("projector_in", "context") if name in options}
    frozen = options.pop("freeze", ())
    graph = model(**cut)
    chunks = freeze(graph.chunks, frozen) if frozen else graph.chunks
    given = {"placement": linear(4), "clip_norm": 1.0, "progress_deadline_s": 120} | options
    with make_pipeline(chunks, edges=graph.edges, optimizer=OPTIMIZER, **given) as pipeline:
        state, losses = pipeline.init(jax.random.key(0)), []
        pipeline.prepare(batch_of(drawn().steps[0]), buckets=drawn().buckets)
        for step in drawn().steps:
            state, metrics = pipeline.step(state, batch_of(step))
            losses.append(metrics.result().loss)
        params = jax.tree.map(np.array, pipeline.params(state))
    assert_same_training(losses, params, *expected(*frozen))
