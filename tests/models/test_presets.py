"""The models that have names are as large as their names say."""

from dataclasses import replace

import jax
import pytest

from rrfp_jax.models import language_model, vision_language_model
from rrfp_jax.models.presets import DECODERS, ENCODERS, MODELS
from rrfp_jax.programs.chunk import param_specs

PUBLISHED = {
    "qwen3-1.7b": 1.72e9, "qwen3-4b": 4.02e9, "qwen3-32b": 32.8e9, "llama3-8b": 8.03e9, "llama3-70b": 70.6e9,
    "mixtral-8x7b": 46.7e9, "mixtral-8x22b": 140.6e9, "qwen3-30b-a3b": 30.5e9, "deepseek-v3": 671.03e9,
    "gemma3-27b": 27.0e9, "gpt-oss-120b": 116.8e9,
    "vit-h": 632e6, "vit-big": 1.843e9, "vit-5b": 5.0e9, "internvit-6b": 5.903e9, "vit-22b": 21.7e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name):
    config = (DECODERS | ENCODERS)[name]
    assert config.num_params() == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12.9e9),
        pytest.param("mixtral-8x22b", 39.1e9, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", 3.35e9, marks=pytest.mark.slow),
        pytest.param("gpt-oss-120b", 5.7e9, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 37.55e9, marks=pytest.mark.slow),
    ],
)
def test_active_parameters_are_those_that_compute_a_token(name, active):
    config = DECODERS[name]
    assert config.num_params(active=True) == pytest.approx(active, rel=0.01)
    (chunk,) = language_model(config).split(1)
    specs = param_specs(chunk)
    assert sum(leaf.size for leaf in jax.tree.leaves(specs)) == config.num_params()
    chunk.partition(specs, {"tensor": 2, "expert": 4})


def test_a_deep_model_has_no_more_unlike_chunks_than_a_shallow_one():
    def kinds(num_layers: int) -> set[object]:
        config = replace(DECODERS["deepseek-v3"], num_layers=num_layers)
        return {chunk.own.kind for chunk in language_model(config).split(num_layers)}

    assert len(kinds(61)) == len(kinds(16)) == 4  # with the embedding, dense, sparse, with the head


def test_all_presets_are_counted():
    assert set(PUBLISHED) == set(DECODERS) | set(ENCODERS)


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_parameters_that_they_count(name):
    """Without an array of them; 2 devices can share each stage."""
    config = MODELS[name]
    graph = vision_language_model(config).split(
        encoder_layers_per_chunk=[1] * config.vision.num_layers_run,
        decoder_layers_per_chunk=[1] * config.decoder.num_layers,
    )
    specs = [param_specs(chunk) for chunk in graph.chunks]
    layers = {name: layer for each in specs for name, layer in each.items()}  # tied embeddings once
    assert sum(leaf.size for leaf in jax.tree.leaves(layers)) == config.num_params()
    for chunk, layers in zip(graph.chunks, specs, strict=True):
        assert chunk.partition is not None
        chunk.partition(layers, {"tensor": 2})
