"""Models with encoders: against the reference, over all cuts, and with pictures or sounds missing."""

from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest

from rrfp_jax.models import vision_language_model
from rrfp_jax.models.encoder import merged_squares
from rrfp_jax.models.loss import token_loss
from rrfp_jax.programs.chunk import OwnFunction, param_specs
from rrfp_jax.schedules import Edge, PipelineGraph
from tests.models.encoder_reference import (
    AUDIO,
    CLIP,
    INTERN,
    PACKED,
    SIGLIP,
    TOWERS,
    make_leaves,
    reference_model,
    small_model,
    uneven,
)
from tests.models.graph_of_chunks import run_graph, start

SWITCHES: dict[str, Any] = {"qkv_bias": True, "qk_norm": True, "sliding_window": 4}
IMAGE_LEAVES = ("patches", "patch_segments", "patch_rows", "patch_columns", "image_index")
AUDIO_LEAVES = ("frames", "frame_segments", "audio_index")


def whole(config, **options):
    return vision_language_model(config).split(packed=True, **options)


def reference_loss(config, params, leaves):
    logits = reference_model(config, params, leaves)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probs, leaves["targets"][..., None], axis=-1)[..., 0]
    return -(picked * leaves["weights"]).sum()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tower", TOWERS)
def test_loss_equals_the_reference_and_gradients_reach_every_parameter(tower):
    config = small_model(TOWERS[tower], AUDIO if tower == "packed" else None, **SWITCHES)
    graph, leaves = whole(config), make_leaves(config)
    params = uneven(start(graph))
    loss, gradients = jax.jit(jax.value_and_grad(lambda params: run_graph(graph, params, leaves)[0]))(params)
    assert float(loss) == pytest.approx(reference_loss(config, params, leaves), rel=2e-5)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        *_, part, kind = (key.key for key in path)
        encoder = {"vision": config.vision, "audio": config.audio}.get(path[0].key.partition(".")[0])
        if encoder and (part, kind) == ("key", "bias") and not encoder.qk_norm:
            continue  # it adds the same to all scores of a query, which changes nothing
        assert np.abs(leaf).max() > 1e-6, jax.tree_util.keystr(path)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("missing", "projector_in"),
    [((), "own"), (IMAGE_LEAVES, "encoder"), (AUDIO_LEAVES, "decoder"), (IMAGE_LEAVES + AUDIO_LEAVES, "decoder")],
    ids=["nothing", "images", "sounds", "both"],
)
def test_a_microbatch_may_lack_pictures_or_sounds(missing, projector_in):
    config = small_model(PACKED, AUDIO, num_layers=1)
    graph = whole(config, projector_in=projector_in)
    leaves = {name: leaf for name, leaf in make_leaves(config).items() if name not in missing}
    params = uneven(start(graph))
    loss, gradients = jax.jit(jax.value_and_grad(lambda params: run_graph(graph, params, leaves)[0]))(params)
    assert float(loss) == pytest.approx(reference_loss(config, params, leaves), rel=2e-5)
    idle = [modality for modality in config.modalities if modality.data_leaf in missing]
    for modality in idle:
        assert not any(leaf.any() for leaf in jax.tree.leaves(gradients[modality.projector_name]))


@pytest.mark.slow
def test_every_cut_is_the_same_model():
    config = small_model(PACKED, AUDIO, tie_embeddings=True)
    leaves, expected_params = make_leaves(config), start(whole(config))
    expected = jax.jit(partial(run_graph, whole(config)))(expected_params, leaves)
    for cut in (
        {"encoder_layers_per_chunk": [1, 1, 1], "decoder_layers_per_chunk": [1, 1]},
        {"encoder_layers_per_chunk": [0, 3, 0], "decoder_layers_per_chunk": [0, 2, 0], "projector_in": "decoder"},
        {"audio_layers_per_chunk": [2, 1], "decoder_layers_per_chunk": [2, 0], "projector_in": "own"},
    ):
        graph = whole(config, **cut)
        params = start(graph)
        chex.assert_trees_all_equal(params, expected_params)
        chex.assert_trees_all_close(jax.jit(partial(run_graph, graph))(params, leaves), expected, rtol=1e-6)


@pytest.mark.slow
def test_logits_are_those_of_the_loss():
    config = small_model(PACKED, tie_embeddings=True, num_layers=1)
    leaves, params = make_leaves(config), uneven(start(whole(config)))
    graph = vision_language_model(config).split(packed=True, gives_logits=True)
    assert not {"targets", "weights"} & set(graph.chunks[-1].leaves)
    logits = jax.jit(partial(run_graph, graph))(params, leaves)
    assert logits.dtype == np.float32
    loss, weight = token_loss(logits, leaves["targets"], leaves["weights"])
    expected = jax.jit(partial(run_graph, whole(config)))(params, leaves)
    np.testing.assert_allclose((loss, weight), expected, rtol=1e-6)


def test_names_leaves_and_edges():
    graph = whole(
        small_model(CLIP), encoder_layers_per_chunk=[1, 1], decoder_layers_per_chunk=[1, 1], projector_in="own"
    )
    assert [chunk.name for chunk in graph.chunks] == [
        "vision: patches, layer 0", "vision: layer 1", "projector", "embedding, layer 0", "layer 1, head",
    ]  # fmt: skip
    assert [set(param_specs(chunk)) for chunk in graph.chunks] == [
        {"vision.patches", "vision.pre_norm", "vision.layers.0"},
        {"vision.layers.1"},
        {"projector"},
        {"decoder.embedding", "decoder.layers.0"},
        {"decoder.layers.1", "decoder.final_norm", "decoder.head"},
    ]
    assert [chunk.leaves for chunk in graph.chunks] == [
        ("patches",), (), (), ("tokens", "image_index", "positions", "segments"),
        ("positions", "segments", "targets", "weights"),
    ]  # fmt: skip
    assert graph.chunks[3].optional_leaves == {"image_index"}
    assert graph.edges == (Edge(0, 1), Edge(1, 2), Edge(2, 3, is_optional=True), Edge(3, 4))
    assert graph.parts == {"vision": range(3), "decoder": range(3, 5)}
    PipelineGraph(5, 2, graph.edges)  # raises on a graph that is none


def test_leaves_of_packed_encoders():
    graph = vision_language_model(small_model(PACKED, AUDIO)).split(
        encoder_layers_per_chunk=[0, 3], audio_layers_per_chunk=[1, 2]
    )
    assert [chunk.leaves for chunk in graph.chunks[:-1]] == [
        ("patches", "patch_rows", "patch_columns"), ("patch_segments",), ("frames", "frame_segments"),
        ("frame_segments",),
    ]  # fmt: skip
    assert graph.chunks[-1].leaves == ("tokens", "image_index", "audio_index", "targets", "weights")


def test_equal_chunks_are_of_one_kind():
    graph = whole(
        small_model(SIGLIP, num_layers=4), encoder_layers_per_chunk=[0, 1, 1, 1],
        decoder_layers_per_chunk=[1, 1, 1, 1], projector_in="own",
    )  # fmt: skip
    kinds = [(chunk.own.kind, OwnFunction(chunk.init).kind) for chunk in graph.chunks]
    same = [[other for other, kind in enumerate(kinds) if kind == own] for own in kinds]
    assert same[1] == [1, 2]
    assert same[6] == [6, 7]
    assert [numbers for numbers in same if len(numbers) > 1] == [[1, 2], [1, 2], [6, 7], [6, 7]]


@pytest.mark.slow
def test_an_image_stays_in_its_row_and_segment():
    """Other pictures change nothing in the bits of those that they are packed with."""
    config = small_model(PACKED)
    encoder = whole(config).chunks[0]
    params, leaves = encoder.init(jax.random.key(0)), make_leaves(config)
    read = {name: leaves[name] for name in encoder.leaves}
    changed = read | {"patches": np.where(read["patch_segments"][..., None] == 2, 7.0, read["patches"])}
    changed["patches"] = changed["patches"].astype(np.float32)
    before, after = (encoder.apply(params, None, each, key=None) for each in (read, changed))
    np.testing.assert_array_equal(before[0, :2], after[0, :2])
    np.testing.assert_array_equal(before[1], after[1])
    assert np.abs(before[0, 2] - after[0, 2]).max() > 1e-3
    alone = {name: leaf[:1, 8:] for name, leaf in read.items()}
    np.testing.assert_allclose(encoder.apply(params, None, alone, key=None)[0], before[0, 2:], atol=1e-5)


def test_squares_are_found_as_internvl_publishes_it():
    """Its four steps: fold columns, swap, fold rows, swap."""
    x = np.random.default_rng(0).normal(size=(2, 36, 5)).astype(np.float32)
    folded = x.reshape(2, 6, 3, 10).transpose(0, 2, 1, 3)
    folded = folded.reshape(2, 3, 3, 20).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(merged_squares(x, 2).reshape(2, 9, 20), folded.reshape(2, 9, 20))


@pytest.mark.slow
def test_a_feature_that_is_not_there_gives_no_number():
    config = small_model(INTERN)
    graph, leaves = whole(config), make_leaves(config)
    leaves["image_index"][0, 0] = 8
    assert np.isnan(jax.jit(partial(run_graph, graph))(start(graph), leaves)[0])


def test_features_need_an_index():
    config = small_model(INTERN)
    leaves = make_leaves(config)
    del leaves["image_index"]
    with pytest.raises(ValueError, match="features came for a microbatch without image_index: give that leaf"):
        jax.jit(partial(run_graph, whole(config)))(start(whole(config)), leaves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_layers_per_chunk": [1, 1]}, r"^encoder_layers_per_chunk \[1, 1\] sums to 2 but the model has 3"),
        ({"encoder_layers_per_chunk": [1, 0, 2]}, r"chunk 1 of encoder_layers_per_chunk .* no layer, no patches and no "
                                                  r"projector: leave it out"),
        ({"encoder_layers_per_chunk": [3, 0], "projector_in": "own"}, r"chunk 1 .* holds no layer and no patches: "),
        ({"decoder_layers_per_chunk": [3]}, r"^decoder_layers_per_chunk \[3\] sums to 3 but the model has 2 layers"),
        ({"audio_layers_per_chunk": [3]}, r"the model has no audio encoder: leave it out"),
        ({"projector_in": "both"}, r"projector_in is 'both': give one of encoder, own, decoder"),
    ],
)  # fmt: skip
def test_wrong_cuts_are_refused_with_a_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        vision_language_model(small_model(INTERN)).split(**options)


def test_patches_of_another_shape_are_refused():
    config = small_model(SIGLIP)
    leaves = make_leaves(config) | {"patches": np.zeros((2, 8, 12), np.float32)}
    with pytest.raises(ValueError, match=r"patches have shape \(2, 8, 12\) but the encoder takes \[images, 9, 12\]"):
        jax.jit(partial(run_graph, whole(config)))(start(whole(config)), leaves)
