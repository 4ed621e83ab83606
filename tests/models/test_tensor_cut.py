"""How a language model is cut over devices: as Megatron does, with one sum per attention and MLP."""

import re
from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rrfp_jax.models._tensor_cut import BIAS
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.model import language_model
from rrfp_jax.models.vision_config import VisionConfig, VisionLanguageConfig
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.programs.chunk import param_specs
from rrfp_jax.programs.shardings import param_partition, place
from rrfp_jax.programs.stage_devices import StageDevices
from tests.models.encoder_reference import INTERN, PACKED, SIGLIP, make_leaves, small_model, uneven

CONFIG = LanguageModelConfig(vocab_size=12, hidden=8, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=12)
COLUMNS, ROWS, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None), PartitionSpec()


def partition_of(config: LanguageModelConfig, num_shards: int) -> Any:
    return param_partition(language_model(config).split(1), 0, {"tensor": num_shards})


def test_columns_rows_and_words() -> None:
    cut = partition_of(CONFIG, 2)
    assert cut["layers.0"]["attention"] == {
        "query": {"kernel": COLUMNS},
        "key": {"kernel": COLUMNS},
        "value": {"kernel": COLUMNS},
        "output": {"kernel": ROWS},
    }
    assert cut["layers.0"]["mlp"] == {"gate": {"kernel": COLUMNS}, "up": {"kernel": COLUMNS}, "down": {"kernel": ROWS}}
    assert cut["embedding"] == {"table": ROWS}
    assert cut["head"] == {"kernel": COLUMNS}
    for norm in (cut["final_norm"], cut["layers.0"]["attention_norm"], cut["layers.0"]["mlp_norm"]):
        assert set(norm.values()) == {WHOLE}


def test_what_does_not_divide_is_whole() -> None:
    cut = partition_of(replace(CONFIG, vocab_size=13), 4)
    assert cut["layers.0"]["attention"]["query"]["kernel"] == COLUMNS
    assert {cut["layers.0"]["attention"][name]["kernel"] for name in ("key", "value")} == {WHOLE}
    assert cut["embedding"]["table"] == cut["head"]["kernel"] == WHOLE


@pytest.mark.parametrize(("name", "value", "remedy"), [("num_heads", 3, 4), ("mlp_dim", 13, 14)])
def test_heads_and_mlp_must_divide(name: str, value: int, remedy: int) -> None:
    config = replace(CONFIG, num_kv_heads=1, head_dim=4, **{name: value})
    with pytest.raises(ValueError, match=rf"{name} {value} does not divide over tensor 2: .* or {name} {remedy}$"):
        partition_of(config, 2)


@pytest.mark.parametrize(("kv_heads", "vocab_size", "tensor"), [(2, 12, 2), (1, 13, 4)])
def test_the_loss_does_not_depend_on_the_cut(kv_heads: int, vocab_size: int, tensor: int) -> None:
    """And where all divides, whole activations are summed once per embedding, attention and MLP, and none gathered."""
    config = replace(CONFIG, num_kv_heads=kv_heads, vocab_size=vocab_size, init_std=0.3)
    (chunk,) = language_model(config).split(1)
    boundary = StageDevices([jax.devices()[:tensor]]).unit_sharding(0)
    assert isinstance(boundary, NamedSharding)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: 0.3 * rng.standard_normal(spec.shape, np.float32), param_specs(chunk))
    leaves = {name: rng.integers(0, vocab_size, (2, 5), np.int32) for name in ("tokens", "targets")}
    leaves["weights"] = np.ones((2, 5), np.float32)

    def loss(params: Any, leaves: Any) -> Any:
        return chunk.apply(params, None, leaves, key=None)[0]

    at_params = place(param_partition([chunk], 0, {"tensor": tensor}), boundary)
    program = jax.jit(loss, in_shardings=(at_params, boundary), out_shardings=boundary).lower(params, leaves).compile()
    np.testing.assert_allclose(program(params, leaves), jax.jit(loss)(params, leaves), rtol=1e-6)
    if kv_heads % tensor == 0:
        text = program.as_text()
        assert len(re.findall(r"f32\[2,5,8\]\S* all-reduce\(", text)) == 3
        assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", text)


def graph_partition(config: VisionLanguageConfig, num_shards: int) -> Any:
    graph = vision_language_model(config).split()
    return {
        name: cut
        for index in range(2)
        for name, cut in param_partition(graph.chunks, index, {"tensor": num_shards}).items()
    }


def test_encoder_and_projector_are_cut_with_their_biases() -> None:
    cut = graph_partition(small_model(INTERN, qkv_bias=True, qk_norm=True), 2)
    whole = {"kernel": ROWS, "bias": WHOLE}
    of_decoder, of_encoder = cut["decoder.layers.0"]["attention"], cut["vision.layers.0"]
    assert of_decoder["query"] == of_decoder["key"] == of_decoder["value"] == {"kernel": COLUMNS, "bias": BIAS}
    assert of_decoder["query_norm"] == of_decoder["key_norm"] == {"scale": WHOLE}
    assert of_encoder["attention"]["value"] == {"kernel": COLUMNS}
    assert of_encoder["attention"]["output"] == of_encoder["mlp"]["fc2"] == cut["projector"]["linear_2"] == whole
    assert of_encoder["mlp"]["fc1"] == cut["projector"]["linear_1"] == {"kernel": COLUMNS, "bias": BIAS}
    for layer in (of_encoder["attention_norm"], of_encoder["attention"]["query_norm"], cut["projector"]["norm"]):
        assert set(layer.values()) == {WHOLE}
    assert of_encoder["mlp_scale"] == WHOLE
    assert set(jax.tree.leaves(cut["vision.patches"])) == {WHOLE}


def test_an_encoder_whose_heads_do_not_divide_has_its_attention_whole() -> None:
    config = replace(small_model(SIGLIP), vision=replace(SIGLIP, num_heads=1))
    cut = graph_partition(config, 2)["vision.layers.0"]
    assert set(jax.tree.leaves(cut["attention"])) == {WHOLE}
    assert cut["mlp"]["fc1"]["kernel"] == COLUMNS
    with pytest.raises(ValueError, match=r"vision.mlp_dim 21 does not divide over tensor 2: .* or vision.mlp_dim 22$"):
        graph_partition(replace(config, vision=replace(SIGLIP, mlp_dim=21)), 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("vision", [INTERN, PACKED], ids=["intern", "packed"])
def test_features_do_not_depend_on_the_cut(vision: VisionConfig) -> None:
    """Norms over the whole width of heads that are cut, too."""
    graph, leaves = vision_language_model(small_model(vision)).split(), make_leaves(small_model(vision))
    chunk, boundary = graph.chunks[0], StageDevices([jax.devices()[:2]]).unit_sharding(0)
    assert isinstance(boundary, NamedSharding)
    params, read = uneven(chunk.init(jax.random.key(0))), {name: leaves[name] for name in chunk.leaves}

    def gradients(params: Any, leaves: Any) -> Any:
        def total(params: Any) -> Any:
            return jax.numpy.sin(chunk.apply(params, None, leaves, key=None)).sum()

        return jax.value_and_grad(total)(params)

    at_params = place(param_partition(graph.chunks, 0, {"tensor": 2}), boundary)
    cut = jax.jit(gradients, in_shardings=(at_params, boundary), out_shardings=(boundary, at_params))
    chex.assert_trees_all_close(cut(params, read), jax.jit(gradients)(params, read), rtol=1e-4, atol=1e-4)
