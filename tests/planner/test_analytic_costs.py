"""A configuration's model as layers, and what they cost on a device that is not there."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.commands.training.config import choices_of_options, load_train_config
from rrfp_jax.costs.devices import SHARE_OF_GPU, device_of
from rrfp_jax.costs.flops import Flops
from rrfp_jax.costs.layer_sizes import REMAT_NAMES, REMATS
from rrfp_jax.models.config import (
    ExpertsConfig,
    Float8Config,
    GlobalLayers,
    LanguageModelConfig,
    LatentAttentionConfig,
    LayerVariant,
)
from rrfp_jax.models.model import language_model
from rrfp_jax.planner.analytic_costs import MicrobatchRows, analytic_book, model_layers
from rrfp_jax.planner.layer_kinds import StageRun, decoder_layer_sizes
from rrfp_jax.planner.plan_request import parse_words
from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.remat import check_remat
from rrfp_jax.programs.shapes import derive_shapes, num_bytes
from rrfp_jax.programs.target import Target
from rrfp_jax.schedules import chain
from tests.drawn_words import preset_data
from tests.models.cudnn_on_cpu import HOPPER, cudnn_on_cpu

CPU = Target(platform="cpu", kind="cpu")
ROWS = MicrobatchRows(num_rows=3, length=40)
GEMMA = LayerVariant(activation="gelu_tanh", norm_offset=True, post_norms=True, scaled_embedding=True)
GLM = LayerVariant(post_norms=True, rotary_dim=4, interleaved=True)
MODEL = LanguageModelConfig(
    vocab_size=300, hidden=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10, mlp_dim=112
)

LATENT = {
    "num_kv_heads": None,
    "head_dim": None,
    "latent_attention": LatentAttentionConfig(query_rank=20, kv_rank=14, plain_dim=10, rotary_dim=4, value_dim=12),
}


def traced(model: LanguageModelConfig, remat: str) -> list[ChunkPlan]:
    """The plans of embedding, attention and MLP of a layer, a whole layer and head, each a chunk."""
    chunks = language_model(model).split(layers_per_chunk=[0, 0.5, 0.5, 1, 0])
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    leaves = {name: jax.ShapeDtypeStruct((ROWS.num_rows, ROWS.length), dtype) for name, dtype in dtypes.items()}
    graph = chain(5, 1, split=True)
    shapes = derive_shapes(chunks, graph, leaves)
    return [plan_chunk(chunk, chunks, graph, shapes, remat=remat) for chunk in range(5)]


@pytest.mark.parametrize(
    ("remat", "more"),
    [
        ("none", {"compute_dtype": "bfloat16"}),
        ("dots", {"compute_dtype": "bfloat16", "qkv_bias": True}),
        ("full", {"compute_dtype": "bfloat16", "fp8": Float8Config()}),
        pytest.param("full", {}, marks=pytest.mark.slow),
        pytest.param("none", {"variant": GEMMA}, marks=pytest.mark.slow),
        pytest.param("dots", {"variant": GEMMA}, marks=pytest.mark.slow),
        pytest.param("none", {"variant": GLM}, marks=pytest.mark.slow),
        pytest.param("dots", {"variant": GLM, "compute_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("none", {"variant": GEMMA, "fp8": Float8Config()}, marks=pytest.mark.slow),
        pytest.param("none", {"fp8": Float8Config(exclude=("*.key", "head"))}, marks=pytest.mark.slow),
        pytest.param("dots", {"compute_dtype": "bfloat16", "fp8": Float8Config()}, marks=pytest.mark.slow),
        pytest.param("none", {"qk_norm": True}, marks=pytest.mark.slow),
        pytest.param("none", LATENT, marks=pytest.mark.slow),
        pytest.param("dots", {**LATENT, "compute_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_in(3)
def test_bytes_are_those_of_the_programs(remat: str, more: dict[str, Any]) -> None:
    """Of stash, what I owes to W, and cast parameters, within a thousandth, of layers whose attention is not fused."""
    model = replace(MODEL, **more)
    way = StageRun(rows=ROWS, remat=remat, target=CPU)
    embedding, layer, *others = decoder_layer_sizes(model, way, packed=False)
    units = [embedding.sizes, *layer.halves, *(other.sizes for other in others)]
    for sizes, plan in zip(units, traced(model, remat), strict=True):
        report = plan.split.report
        stash = num_bytes(tuple(plan.residuals.specs))
        assert sizes.stash_bytes == pytest.approx(stash, rel=1e-3)
        assert sizes.owed_bytes == pytest.approx(plan.weight_residuals.num_bytes.total, rel=5e-3)
        assert report is not None
        # not counted: scales beside matrices in float8, and 1 plus the scale of a norm, which is made once, too
        uncounted = 16 * model.hidden * model.layer_variant.norm_offset
        uncounted += 0 if model.fp8 is None else 5e-3 * report.derived_bytes
        assert sizes.derived_bytes == pytest.approx(report.derived_bytes, rel=0, abs=uncounted)
        assert sizes.num_params * 4 == num_bytes(plan.params)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"experts": ExpertsConfig(num_experts=4, experts_per_token=2)},
        {"num_kv_heads": 6, "qk_norm": True},
        {"variant": GEMMA, "sliding_window": 8, "global_layers": GlobalLayers(every=2)},
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_halves_of_a_layer_add_up_to_it(tensor: int, more: dict[str, Any]) -> None:
    model = replace(MODEL, **more)
    for remat in REMATS:
        way = StageRun(rows=ROWS, remat=remat, tensor=tensor, target=CPU)
        layer = list(decoder_layer_sizes(model, way, packed=True))[1]
        for name in ("flops", "num_params", "derived_bytes", "recomputed"):
            attention, mlp = (getattr(half, name) for half in layer.halves)
            assert attention + mlp == getattr(layer.sizes, name)
        assert [sum(numbers) for numbers in zip(*(half.sums for half in layer.halves), strict=True)] == [2, 2]
        both = sum(half.stash_bytes for half in layer.halves)
        is_kept = remat == "full" or (remat == "dots" and model.layer_variant.post_norms)  # by the MLP's half
        stream = ROWS.tokens * model.hidden * 4 if is_kept else 0
        assert both == pytest.approx(layer.sizes.stash_bytes + stream, abs=2)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_bytes_of_layers_whose_attention_is_fused(remat: str) -> None:
    """What a fused forward gives its backward is kept by ``dots`` too."""
    model = replace(MODEL, head_dim=16, compute_dtype="bfloat16")
    layer = list(decoder_layer_sizes(model, StageRun(rows=ROWS, remat=remat, target=HOPPER), packed=False))[1]
    with cudnn_on_cpu():
        plan = traced(model, remat)[3]
    assert layer.sizes.stash_bytes == pytest.approx(num_bytes(tuple(plan.residuals.specs)), rel=1e-3)
    assert layer.sizes.recomputed == Flops()


@pytest.mark.parametrize(
    ("device", "head_dim", "length", "is_fused"),
    [("h100", 256, 64, True), ("a100", 256, 64, False), ("v5p", 48, 256, True), ("v5p", 48, 64, False)],
)
def test_scores_are_kept_where_attention_is_no_kernel(device: str, head_dim: int, length: int, is_fused: bool) -> None:
    model = replace(MODEL, head_dim=head_dim, compute_dtype="bfloat16")
    way = StageRun(rows=replace(ROWS, length=length), remat="dots", target=Target.like(device_of(device)))
    layer = list(decoder_layer_sizes(model, way, packed=False))[1]
    results = 2 * (2 * (6 + 2) * head_dim + 2 * 48 + 2 * 112)  # of products, in bfloat16
    beside = layer.sizes.stash_bytes / (3 * length) - results
    assert beside == 6 * 4 * (1 if is_fused else length)  # a normaliser of each head, or its scores


def test_accelerators_give_the_room_of_one_layer_to_the_next() -> None:
    """And get batch leaves of two microbatches ahead; a CPU device has neither."""
    config = load_train_config("gpu/one_node_8", {})
    for device, grows in ((device_of("h100"), False), (replace(device_of("h100"), kind=""), True)):
        costs = analytic_book(config, device, microbatch_sizes=[2]).at(microbatch_size=2, remat="none").types["layer"]
        assert (costs.more_temporaries_bytes > 0) == grows
        assert costs.temporaries_bytes > 0
    ours, theirs = (model_layers(config, microbatch_size=2, target=each).types["embedding"] for each in (CPU, HOPPER))
    assert theirs.fixed_bytes - ours.fixed_bytes == 2 * 2 * 2048 * 4


def test_the_head_computes_its_logits_twice() -> None:
    head = model_layers(load_train_config("cpu/debug", {}), microbatch_size=2).types["head"].sizes
    once = head.flops.forward
    assert head.tasks() == (2 * once, 0, 2 * once)
    assert head.tasks(trains=False) == (2 * once, 0, 0)


@pytest.mark.parametrize(("target", "per_token"), [(CPU, 8), (HOPPER, 3), (Target.like(device_of("v5p")), 2)])
def test_experts_without_a_capacity_compute_what_their_target_makes_them(target: Target, per_token: int) -> None:
    """All of them every token on a CPU; runs that are filled up to blocks on a GPU; runs on a TPU."""
    experts = {"num_experts": 8, "experts_per_token": 2}
    config = load_train_config("cpu/debug", {"model.experts": experts})
    rows = MicrobatchRows(num_rows=4, length=64)
    layer = model_layers(config, microbatch_size=4, rows=rows, target=target).types["layer"].sizes
    model, tokens = config.model, rows.tokens
    dense = 2 * tokens * model.hidden * (2 * model.num_heads + 2 * model.num_key_value_heads) * model.size_per_head
    of_experts = layer.flops.with_parameters - dense - 2 * tokens * model.hidden * 8
    assert of_experts / (2 * tokens * model.hidden * 3 * model.expert_dim) == pytest.approx(per_token, rel=0.15)


def test_the_layers_of_a_model_with_an_encoder() -> None:
    less = {"data.path": preset_data(), "data.batch_size": 2, "data.num_microbatches": 1}
    config = load_train_config("cpu/multimodal", less | {"pipeline.layout": "Pv|p|Et|tL"})
    model = model_layers(config, microbatch_size=2)
    assert model.layers == ("patches", "vision", "projector", "embedding", "layer", "layer", "head")
    assert model.ends == {1, 2}
    assert model.tokens_per_sample == 0.0


def test_frozen_layers_are_types_of_their_own() -> None:
    config = load_train_config("cpu/debug", {"optimizer.freeze": ("embedding", "layers.0", "layers.2")})
    model = model_layers(config, microbatch_size=2)
    first, frozen = "layer (frozen, first)", "layer (frozen)"
    assert model.layers == ("embedding (frozen, first)", first, "layer", frozen, "layer", "head")
    costs = analytic_book(config, device_of("h100"), microbatch_sizes=[2]).at(microbatch_size=2)
    assert costs.types[first].input_gradient_ms == 0
    assert costs.types[frozen].input_gradient_ms > 0
    assert costs.types[frozen].weight_gradient_ms == 0
    assert costs.types[frozen].fixed_bytes < costs.types["layer"].fixed_bytes
    with pytest.raises(ValueError, match="every layer of the model is frozen"):
        model_layers(load_train_config("cpu/debug", {"optimizer.freeze": ("*",)}), microbatch_size=2)


def test_a_book_for_every_way_to_run() -> None:
    config = load_train_config("gpu/one_node_8", {})
    book = analytic_book(
        config, device_of("h100"), microbatch_sizes=[1, 2], tensors=[1, 2], remats=["none", "full"], num_devices=8
    )
    assert len(book.entries) == 8
    assert (book.device_bytes, book.tokens_per_sample) == (int(84_942_979_072 * SHARE_OF_GPU), 2048)
    one, shared = (book.at(microbatch_size=2, tensor=tensor).types["layer"] for tensor in (1, 2))
    full = book.at(microbatch_size=2, remat="full").types["layer"]
    assert shared.fixed_bytes < 0.51 * one.fixed_bytes
    assert one.forward_ms / 2 < shared.forward_ms < one.forward_ms
    assert full.stash_bytes == full.output_bytes  # the layer's input
    assert full.input_gradient_ms > one.input_gradient_ms + 0.9 * one.forward_ms
    assert full.flops == one.flops
    small = book.at(microbatch_size=1).types["layer"]
    assert small.stash_bytes * 2 == one.stash_bytes
    whole = sum(book.at(microbatch_size=1).of(layer).flops for layer in range(len(book.layers)))
    params = config.model.num_params() - config.model.vocab_size * config.model.hidden
    attention = 12 * config.model.num_layers * 2048**2 * config.model.num_heads * config.model.size_per_head
    assert whole == pytest.approx(6 * params * 2048 + attention, rel=1e-3)


def test_far_devices_have_slower_links() -> None:
    config = load_train_config("gpu/one_node_8", {})
    near, far = (
        analytic_book(config, device_of("h100"), microbatch_sizes=[1], num_devices=number).links for number in (8, 16)
    )
    assert (near.gb_per_s, far.gb_per_s) == (pytest.approx(450 * 0.8), pytest.approx(50 * 0.8))
    assert near.host_gb_per_s == far.host_gb_per_s == pytest.approx(64 * 0.8)
    tpu = analytic_book(config, device_of("tpu-v5p"), microbatch_sizes=[1]).links
    assert tpu.host_gb_per_s is None, "its vendor does not say"


def test_every_rematerialisation_that_trains_can_be_planned() -> None:
    config, device = load_train_config("gpu/one_node_8", {}), device_of("h100")
    book = analytic_book(config, device, microbatch_sizes=[1], remats=REMAT_NAMES)
    counted = {name: book.at(microbatch_size=1, remat=name).types for name in REMAT_NAMES}
    for name in REMAT_NAMES:
        check_remat(name)
        assert counted[name] == counted[name if name in REMATS else "full"]
    assert (
        parse_words(",".join(REMAT_NAMES), "--remat", REMAT_NAMES)
        == REMAT_NAMES
        == choices_of_options()["pipeline.remat"]
    )


@pytest.mark.parametrize(
    ("wish", "problem"),
    [({"tensors": [3]}, "does not divide over tensor 3"), ({"remats": ["some"]}, "remat is 'some': give one of none")],
)
def test_ways_that_there_are_not(wish: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        analytic_book(load_train_config("gpu/one_node_8", {}), device_of("h100"), microbatch_sizes=[1], **wish)


def layer_of(mesh: dict[str, int], **more: Any) -> Any:
    """A layer of a model on a mesh, and what it costs on a GPU of a host of eight."""
    config = load_train_config("cpu/debug", {"pipeline.mesh": mesh, "data.length": 64} | more)
    model = model_layers(config, microbatch_size=8, tensor=mesh.get("tensor", 1)).types["layer"]
    book = analytic_book(config, device_of("h100"), microbatch_sizes=[8], tensors=[mesh.get("tensor", 1)])
    return model, book.entries[0].types["layer"]


def test_fsdp_divides_what_is_held_and_gathers_parameters() -> None:
    (whole, own), (cut, costs) = layer_of({"tensor": 1}), layer_of({"fsdp": 4})
    assert cut.fixed_bytes == pytest.approx(whole.fixed_bytes / 4, rel=1e-3)
    assert cut.sizes.stash_bytes * 4 == whole.sizes.stash_bytes
    assert costs.gradient_bytes * 4 == own.gradient_bytes
    assert costs.forward_ms < own.forward_ms / 4 + 1  # but for what travels
    (sent,) = cut.sizes.sent
    assert sent.axis == "fsdp"
    assert sent.forward == whole.sizes.num_params * 3 / 4 * 4
    assert costs.flops == own.flops


def test_context_divides_positions_and_sends_keys() -> None:
    (whole, _), (cut, _) = layer_of({"tensor": 1}), layer_of({"context": 4})
    assert cut.fixed_bytes == whole.fixed_bytes
    assert cut.sizes.output_bytes * 4 == whole.sizes.output_bytes
    assert cut.sizes.stash_bytes * 4 < whole.sizes.stash_bytes  # no scores
    keys = next(sent for sent in cut.sizes.sent if sent.forward)
    assert keys.input_gradient == 2 * keys.forward  # once more, and their gradients, all float32
    assert cut.sizes.flops.among_activations == whole.sizes.flops.among_activations * 9 / 16


def test_experts_are_dealt_out() -> None:
    experts = {"model.experts": {"num_experts": 4, "experts_per_token": 2, "capacity_factor": 1.0}}
    (whole, _), (cut, _) = layer_of({"tensor": 1}, **experts), layer_of({"expert": 4}, **experts)
    assert whole.sizes.num_params / 4 < cut.sizes.num_params < whole.sizes.num_params / 2
    tokens = next(sent for sent in cut.sizes.sent if sent.forward)
    assert tokens.axis == "expert"
    assert tokens.forward == tokens.input_gradient > 0


def test_what_travels_between_hosts_takes_longer() -> None:
    near, far = (layer_of({"tensor": tensor, "fsdp": 4}, **{"model.num_kv_heads": 4, "model.num_heads": 4})[1]
                 for tensor in (2, 4))  # fmt: skip
    assert far.weight_gradient_ms > near.weight_gradient_ms


def test_axes_whose_costs_nobody_knows_are_refused() -> None:
    config = load_train_config("cpu/debug", {"pipeline.mesh": {"tensor": 2, "other": 2}})
    with pytest.raises(ValueError, match="planning knows nothing of the axis 'other'"):
        model_layers(config, microbatch_size=2)


SEEN = MicrobatchRows(num_rows=4, length=64, image_rows=8, patch_length=32)
"""What both meshes cut."""


def test_an_encoder_is_shared_by_the_devices_of_its_own_mesh() -> None:
    """Its layers are those of a run that has this mesh everywhere, the decoder's those of one that has the other."""

    def layers(mesh: dict[str, int], encoder_mesh: dict[str, int] | None = None) -> Any:
        config = load_train_config(
            "cpu/multimodal", {"pipeline.mesh": mesh, "pipeline.encoder_mesh": encoder_mesh, "pipeline.num_stages": 2}
        )
        return model_layers(config, microbatch_size=4, tensor=mesh.get("tensor", 1), rows=SEEN).types

    own, tensor, fsdp = layers({"tensor": 2}, {"fsdp": 2}), layers({"tensor": 2}), layers({"fsdp": 2})
    for name, layer in own.items():
        assert layer == (fsdp if name in ("patches", "vision", "projector") else tensor)[name]
    assert own["vision"].sizes != tensor["vision"].sizes
    with pytest.raises(ValueError, match=r"^encoder_mesh has 2 devices, and .* have 4 \(tensor 2 x context 2\): give"):
        layers({"tensor": 2, "context": 2}, {"fsdp": 2})
