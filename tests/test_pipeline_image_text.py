"""Drawn words through a pipeline: how a step's samples are cut, packed and padded changes rounding only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from experiments.reading.draw import TRAIN, draw_data
from rrfp_jax.data import ImageText, ImageTextConfig, prefetched
from rrfp_jax.data.buckets import cut_sizes
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.cuts import ContextCut
from rrfp_jax.models.encoder import PixelScale
from rrfp_jax.models.vision_config import ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training

TEXT = "am Be do up Zoo ink wax lot " * 4
MODEL = VisionLanguageConfig(
    # A bias of keys changes nothing, so its gradients are rounding alone.
    vision=VisionConfig(
        hidden=8, num_layers=1, num_heads=2, mlp_dim=8, qkv_bias=False, patch_dim=64, max_rows=2, max_columns=8
    ),
    projector=ProjectorConfig(patches_per_feature=4),
    decoder=LanguageModelConfig(vocab_size=256, hidden=8, num_layers=1, num_heads=2, mlp_dim=8),
)
NUM_STEPS = 3


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    draw = {"num_samples": 40, "num_pictures": 30, "num_held_out": 0, "max_images": 2, "text_only": 0.4}
    draw_data(folder, **draw, held_out=0.0, text=TEXT)
    return folder / TRAIN


def trained(words: Path, meshes: Sequence[dict[str, int]] = (), **changes: Any) -> tuple[list[float], Any]:
    """Returns losses and final parameters of a few steps on the meshes of encoder and decoder. Only the pictures that
    the pipeline reads are decoded."""
    grey = {"channels": 1, "patch_size": 8, "mean": (1.0,), "std": (1.0,)}
    few = {"batch_size": 8, "num_microbatches": 4, "text_buckets": 2, "image_buckets": 1, "gather_text": True}
    encoder_mesh, mesh = meshes or ({}, {})
    config = ImageTextConfig(path=str(words), **(grey | few | changes))
    data = ImageText(config, cut=cut_sizes(mesh, encoder_mesh))
    devices = mesh.get("context", 1)
    graph = vision_language_model(MODEL).split(
        packed=True,
        context=ContextCut(devices=devices) if devices > 1 else None,
        pixels=PixelScale(config.mean, config.std),
    )
    with make_pipeline(
        graph.chunks,
        edges=graph.edges,
        placement=linear(2),
        optimizer=optax.sgd(0.5, momentum=0.9),
        clip_norm=1.0,
        **({"mesh": meshes} if meshes else {}),
    ) as pipeline:
        state = pipeline.init(jax.random.key(0))
        reads = pipeline.reads(data.config.num_microbatches)
        pipeline.prepare(data.batch(0, reads={}), buckets=data.buckets)
        results = []
        with prefetched(data, reads=reads) as batches:
            for _ in range(NUM_STEPS):
                state, metrics = pipeline.step(state, next(batches))
                results.append(metrics)
        return [each.result().loss for each in results], jax.tree.map(np.array, pipeline.params(state))


@pytest.fixture(scope="module")
def expected(words: Path) -> tuple[list[float], Any]:
    return trained(words, gather_text=False, balance=False, num_microbatches=1)


IN_ORDER = {"balance": False, "gather_text": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"pack": False, **IN_ORDER}, marks=pytest.mark.slow),
        pytest.param({"pack": False}, marks=pytest.mark.slow),
        pytest.param({"pack": False, "num_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"pack": False, "num_microbatches": 8, **IN_ORDER}, marks=pytest.mark.slow),
        pytest.param({"num_microbatches": 8, "text_buckets": 1}, marks=pytest.mark.slow),
        pytest.param({"num_microbatches": 2, "image_buckets": 3, **IN_ORDER}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_microbatches_of_any_cut_train_alike(
    words: Path, expected: tuple[list[float], Any], changes: dict[str, Any]
) -> None:
    losses, params = trained(words, **changes)
    assert_same_training(losses, params, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    "meshes",
    [
        [{"fsdp": 4}, {"fsdp": 4}],
        [{"context": 4}, {"context": 4}],
        [{"fsdp": 4}, {"context": 2, "tensor": 2}],
    ],
    ids=str,
)
def test_meshes_cut_what_was_padded_for_them(
    words: Path, expected: tuple[list[float], Any], meshes: list[dict[str, int]], pack: bool
) -> None:
    """Every leaf of every bucket has a part on each device, and training is that of one bucket in one piece."""
    losses, params = trained(words, meshes, pack=pack)
    assert_same_training(losses, params, *expected)
