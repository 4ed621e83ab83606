"""Which implementation of attention runs where, and that each computes the formula."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.models import LanguageModelConfig, attention, language_model
from rrfp_jax.models._tiled_attention import tiled_attention
from rrfp_jax.models.attention import AttentionCall, causal_attention, full_attention, implementation
from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.target import Target, tracing_for
from tests.commands.running import ROOT
from tests.models.cudnn_on_cpu import HOPPER, cudnn_on_cpu

AMPERE = replace(HOPPER, kind="NVIDIA A100-SXM4-80GB", capability=(8, 0))
BLACKWELL = replace(HOPPER, kind="NVIDIA B200", capability=(10, 0))
TPU = Target(platform="tpu", kind="TPU v5")
CPU = Target(platform="cpu", kind="cpu")
ASKED = AttentionCall(
    rows=2, length=512, heads=8, kv_heads=2, head_dim=64, dtype=jnp.dtype(jnp.bfloat16), is_causal=True
)
PRESETS = ROOT / "tpu_gpu_configs"
GPU_PRESETS = sorted(path for path in (PRESETS / "gpu").glob("*.yaml") if "vision:" not in path.read_text())
TPU_PRESETS = sorted((PRESETS / "tpu").glob("*.yaml"))


@pytest.mark.parametrize("preset", GPU_PRESETS + TPU_PRESETS, ids=lambda preset: preset.stem)
def test_presets_take_a_fused_one(preset: Path):
    config = load_train_config(str(preset), {})
    model = config.model
    asked = replace(
        ASKED, dtype=jnp.dtype(model.compute_dtype), head_dim=model.size_per_head, length=config.data.length
    )
    assert implementation(HOPPER, asked) == "cudnn"
    # no device holds whole the sequences that are cut over devices: they go by the tiles of context attention
    is_cut = "context" in (config.pipeline.mesh or {})
    assert implementation(TPU, asked) == ("tiles" if is_cut else "splash")


@pytest.mark.parametrize(
    ("target", "asked", "expected"),
    [
        (HOPPER, {"dtype": jnp.dtype(jnp.float32)}, "formula"),
        (HOPPER, {"dtype": jnp.dtype(jnp.float32), "length": 2048}, "tiles"),
        (HOPPER, {"head_dim": 60}, "formula"),
        (HOPPER, {"head_dim": 256}, "cudnn"),
        (HOPPER, {"head_dim": 264}, "formula"),
        (HOPPER, {"head_dim": 128, "is_packed": True}, "cudnn"),
        (HOPPER, {"head_dim": 192, "is_packed": True}, "cudnn"),
        (HOPPER, {"head_dim": 256, "is_packed": True, "length": 4096}, "tiles"),
        (AMPERE, {"head_dim": 128}, "cudnn"),
        (AMPERE, {"head_dim": 136}, "formula"),
        (AMPERE, {"is_packed": True}, "cudnn"),
        (AMPERE, {"head_dim": 128, "is_packed": True, "length": 2048}, "tiles"),
        (BLACKWELL, {"head_dim": 128, "is_packed": True}, "cudnn"),
        (BLACKWELL, {"head_dim": 256}, "formula"),
        (Target(platform="gpu", kind="AMD Instinct MI300X"), {}, "formula"),
        (Target(platform="gpu", kind="AMD Instinct MI300X"), {"length": 2048}, "tiles"),
        (TPU, {"head_dim": 80, "dtype": jnp.dtype(jnp.float32)}, "splash"),
        (TPU, {"length": 64}, "formula"),
        (TPU, {"length": 32_768}, "splash"),
        (TPU, {"length": 2**20}, "tiles"),
        (TPU, {"dtype": jnp.dtype(jnp.float16)}, "formula"),
        (HOPPER, {"has_sinks": True}, "formula"),
        (HOPPER, {"has_sinks": True, "length": 2048}, "tiles"),
        (TPU, {"has_sinks": True}, "splash"),
        (CPU, {}, "formula"),
        (CPU, {"length": 2048}, "tiles"),
    ],
)  # fmt: skip
def test_the_choice_is_by_target_dtype_head_size_length_and_mask(target: Target, asked: dict[str, Any], expected: str):
    assert implementation(target, replace(ASKED, **asked)) == expected


def test_a_gpu_that_cannot_do_it_falls_back_with_one_sentence(caplog: pytest.LogCaptureFixture):
    """As here, where JAX finds no cuDNN."""
    heads = [jnp.asarray(np.random.default_rng(i).normal(size=(2, 8, 2, 16)), jnp.bfloat16) for i in range(3)]
    expected = causal_attention(*heads)
    attention._cudnn_refusal.cache_clear()
    with caplog.at_level(logging.WARNING), tracing_for(HOPPER):
        for _ in range(2):
            np.testing.assert_array_equal(causal_attention(*heads), expected)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "attention is not fused, and takes more memory and time: cuDNN is not detected."


def layer_plan(config: TrainConfig, *, is_split: bool, remat: str = "none") -> ChunkPlan:
    """The plan of one decoder layer of a preset, with its microbatches."""
    data = config.data
    experts = config.model.experts and replace(config.model.experts, dense_layers=())
    chunks = language_model(replace(config.model, num_layers=3, experts=experts)).split(num_chunks=3)
    rows = (data.batch_size // data.num_microbatches, data.length)
    leaves = {name: jax.ShapeDtypeStruct(rows, np.int32) for name in ("tokens", "targets")}
    leaves["weights"] = jax.ShapeDtypeStruct(rows, np.float32)
    graph = replace(model_graph(chunks, None, None), split=frozenset({1} if is_split else ()))
    return plan_chunk(1, chunks, graph, derive_shapes(chunks, graph, leaves), remat=remat)


def lowered(plan: ChunkPlan, params: object, platform: str) -> list[str]:
    """Forward and backward, or input gradient, as they would be compiled for the platform."""
    derived = jax.eval_shape(plan.split.prepare, params)
    stash = plan.residuals.specs
    rest = (stash.saved, stash.aliased)
    forward = jax.jit(plan.forward).trace(params, derived, plan.operands)
    backward = jax.jit(plan.input_gradient).trace(stash.donated, params, derived, rest, plan.output_grads)
    return [program.lower(lowering_platforms=(platform,)).as_text() for program in (forward, backward)]


def has_scores(plan: ChunkPlan, length: int) -> bool:
    """Whether a forward keeps an array for every head and every pair of tokens."""
    return any(leaf.ndim > 3 and leaf.shape[-2:] == (length, length) for leaf in jax.tree.leaves(plan.residuals.specs))


@pytest.mark.parametrize("preset", GPU_PRESETS, ids=lambda preset: preset.stem)
@pytest.mark.one_in(3)
def test_programs_of_gpu_presets_are_fused_and_keep_no_scores(preset: Path):
    config = load_train_config(str(preset), {})
    with cudnn_on_cpu():
        plan = layer_plan(config, is_split=True)
        assert not has_scores(plan, config.data.length)
        assert not has_scores(layer_plan(config, is_split=False), config.data.length)
        forward, backward = lowered(plan, plan.params, "cuda")
    if config.model.layer_variant.sinks:  # cuDNN has none: own tiles compute them.
        return
    assert "fmhaSoftmax" in forward
    assert "fmhaSoftmaxBackward" in backward


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("length", [66, 67])
def test_all_that_models_ask_is_fused(length: int, window: int | None, is_packed: bool):
    """Packed rows too, and without an array for every pair of tokens."""
    heads = [jax.ShapeDtypeStruct((2, length, 4, 80), jnp.bfloat16)] * 3
    segments = jax.ShapeDtypeStruct((2, length), jnp.int32) if is_packed else None
    for function in (partial(causal_attention, window=window), full_attention):
        with cudnn_on_cpu():
            traced = jax.jit(partial(with_gradients, function)).trace(*heads, segments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "fmhaSoftmax" in text
        assert "fmhaSoftmaxBackward" in text
        assert f"{length}x{length}x" not in text


@pytest.mark.parametrize("is_split", [False, True])
def test_packed_layers_keep_nothing_for_pairs_of_tokens(is_split: bool):
    config = LanguageModelConfig(
        vocab_size=16, hidden=64, num_layers=2, num_heads=2, mlp_dim=64, compute_dtype="bfloat16"
    )
    chunks = language_model(config).split(layers_per_chunk=[0, 2, 0], packed=True)
    names = ("tokens", "targets", "positions", "segments")
    leaves = {name: jax.ShapeDtypeStruct((3, 128), np.int32) for name in names}
    leaves["weights"] = jax.ShapeDtypeStruct((3, 128), np.float32)
    graph = replace(model_graph(chunks, None, None), split=frozenset({1} if is_split else ()))
    with cudnn_on_cpu():
        plan = plan_chunk(1, chunks, graph, derive_shapes(chunks, graph, leaves))
    assert not [leaf.shape for leaf in jax.tree.leaves(plan.residuals.specs) if leaf.shape[-2:] == (128, 128)]


def test_remat_dots_keeps_what_fused_attention_gives_its_backward():
    config = load_train_config(str(PRESETS / "gpu" / "two_nodes_16.yaml"), {})
    with cudnn_on_cpu():
        plan = layer_plan(config, is_split=True, remat="dots")
        _, backward = lowered(plan, plan.params, "cuda")
    assert "fmhaSoftmaxBackward" in backward
    assert '@"__cudnn$fmhaSoftmax"' not in backward.replace("fmhaSoftmaxBackward", "")


@pytest.mark.parametrize("preset", TPU_PRESETS[:1], ids=lambda preset: preset.stem)
def test_programs_of_tpu_presets_run_a_kernel_and_keep_no_scores(preset: Path):
    """Once in the forward and once in the backward of a layer: it is not computed again."""
    config = load_train_config(str(preset), {})
    with tracing_for(TPU):
        plan = layer_plan(config, is_split=True, remat="dots")
        assert not has_scores(plan, config.data.length)
        forward, backward = lowered(plan, plan.params, "tpu")
    assert forward.count("@tpu_custom_call") == 1
    assert backward.count("@tpu_custom_call") == 1


# -- values ------------------------------------------------------------------------------------------------------------

FORMULA = partial(attention._formula, is_causal=True, window=None)
MASKS: list[dict[str, Any]] = [
    {"is_causal": True, "window": None}, {"is_causal": True, "window": 70}, {"is_causal": False, "window": None},
]  # fmt: skip


def with_gradients(function: Any, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """The result, and gradients by queries, keys and values."""
    mixed, pullback = jax.vjp(lambda *heads: function(*heads, segments=segments), query, key, value)
    return mixed, *pullback(jnp.cos(mixed))


def drawn(length: int, *, size: int = 64, heads: int = 4, kv_heads: int = 2, dtype: Any = jnp.float32) -> list[Any]:
    """Queries, keys and values of two rows, and segments that stand together."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, number, size) for number in (heads, kv_heads, kv_heads)]
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    return [*arrays, jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)]


def assert_close(made: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(map(np.float64, made), map(np.float64, wanted), strict=True):
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_tiles_compute_the_formula(is_packed: bool, options: dict[str, Any]):
    """With rows that are not of whole tiles."""
    *heads, segments = drawn(50, size=8)
    told = segments if is_packed else None
    tiles = partial(tiled_attention, largest_tile=16, **{**options, "window": options["window"] and 20})
    formula = partial(attention._formula, **{**options, "window": options["window"] and 20})
    made, wanted = (jax.jit(partial(with_gradients, each))(*heads, told) for each in (tiles, formula))
    assert_close(made, wanted, 1e-5)


@pytest.mark.parametrize(("way", "window", "is_packed"), [("tiles", 20, True), ("splash", None, False)])
@pytest.mark.one_in(2)
def test_sinks_take_their_part_of_every_softmax(
    monkeypatch: pytest.MonkeyPatch, way: str, window: Any, is_packed: bool
):
    """Beside the definition: the softmax over all scores and the sink, of which the sink's weight is left out."""
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 256)
    length, size = (300, 64) if way == "splash" else (50, 8)
    *heads, segments = drawn(length, size=size)
    sinks, told = jnp.asarray([0.5, -1.0, 3.0, 0.0]), segments if is_packed else None

    def defined(query: Any, key: Any, value: Any, sinks: Any, segments: Any) -> Any:
        key, value = (jnp.repeat(part, 2, axis=2) for part in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * size**-0.5
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        is_seen = (distance >= 0) & (distance < (window or length))
        if segments is not None:
            is_seen = is_seen & (segments[:, None, :, None] == segments[:, None, None, :])
        own = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([jnp.where(is_seen, scores, -jnp.inf), own], axis=-1))[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    def gradients(compute: Any) -> Any:
        def run(query: Any, key: Any, value: Any, sinks: Any, segments: Any) -> Any:
            return compute(query, key, value, segments, sinks, is_causal=True, window=window)

        mixed, pullback = jax.vjp(lambda *held: run(*held, told), *heads, sinks)
        return mixed, *pullback(jnp.cos(mixed))

    kernels = {
        "tiles": partial(tiled_attention, largest_tile=16), "splash": partial(attention._splash, interpret=True)
    }  # fmt: skip
    wanted = jax.jit(
        lambda: gradients(lambda query, key, value, segments, sinks, **_: defined(query, key, value, sinks, segments))
    )()
    for compute in (kernels[way], attention._formula):
        assert_close(jax.jit(partial(gradients, compute))(), wanted, 1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("way", ["tiles", "splash", "formula"])
@pytest.mark.one_in(4)
def test_a_slice_attends_as_it_does_in_the_whole_sequence(
    monkeypatch: pytest.MonkeyPatch, way: str, is_packed: bool, window: int | None
):
    """The last positions, with the keys of all; the kernel of TPUs in blocks, interpreted here."""
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 256)
    length, start = (530, 250) if way == "splash" else (50, 27)
    *heads, segments = drawn(length, size=64 if way == "splash" else 8)
    told, options = segments if is_packed else None, {"is_causal": True, "window": window}
    computes = {
        "tiles": partial(tiled_attention, largest_tile=16),
        "splash": partial(attention._splash, interpret=True),
        "formula": attention._formula,
    }[way]

    def of_slice(query: Any, key: Any, value: Any, segments: Any) -> Any:
        return computes(query[:, start:], key, value, segments, **options)

    def of_whole(query: Any, key: Any, value: Any, segments: Any) -> Any:
        return attention._formula(query, key, value, segments, **options)[:, start:]

    made, wanted = (jax.jit(partial(with_gradients, each))(*heads, told) for each in (of_slice, of_whole))
    assert_close(made, wanted, 1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("is_packed", "few_blocks"), [(False, 1), (True, 4)])
def test_the_kernel_of_tpus_computes_the_formula(
    monkeypatch: pytest.MonkeyPatch, is_packed: bool, few_blocks: int, options: dict[str, Any]
):
    """In blocks, with rows that are not of whole blocks, and both of its backwards; interpreted here."""
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 256)
    monkeypatch.setattr(attention, "_FEW_BLOCKS", few_blocks)
    *heads, segments = drawn(300)
    told = segments if is_packed else None
    splash = partial(attention._splash, interpret=True, **options)
    formula = partial(attention._formula, **options)
    made, wanted = (jax.jit(partial(with_gradients, each))(*heads, told) for each in (splash, formula))
    assert_close(made, wanted, 1e-5)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("length", "size", "is_packed"), [(65, 80, False), (65, 64, True), (64, 128, True)])
def test_calls_of_cudnn_compute_the_formula(length: int, size: int, is_packed: bool, options: dict[str, Any]):
    *heads, segments = drawn(length, size=size, dtype=jnp.bfloat16)
    told = segments if is_packed else None
    options = {**options, "window": options["window"] and 20}
    with cudnn_on_cpu():
        made = jax.jit(partial(with_gradients, partial(attention._cudnn, **options)))(*heads, told)
    wanted = jax.jit(partial(with_gradients, partial(attention._formula, **options)))(*heads, told)
    assert_close(made, wanted, 2e-2)


def test_nothing_of_a_segment_shows_in_the_bits_of_others():
    """With ids of any kind, in any order."""
    query, key, value, _ = drawn(64, size=128, dtype=jnp.bfloat16)
    segments = jnp.asarray(np.random.default_rng(1).choice([0, 1, 5, 2**31 - 1, 4097], (2, 64)), jnp.int32)
    is_other = (segments == 5)[..., None, None]
    with cudnn_on_cpu():
        compute = jax.jit(partial(causal_attention, segments=segments))
        before = compute(query, key, value)
        after = compute(*(jnp.where(is_other, 100, part).astype(part.dtype) for part in (query, key, value)))
    np.testing.assert_array_equal(*(np.where(is_other, 0, np.float32(part)) for part in (before, after)))
    assert_close([before], [jax.jit(FORMULA)(query, key, value, segments)], 2e-2)


# -- over meshes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("axes", [{"tensor": 2, "fsdp": 2}, {"tensor": 8}], ids=str)
def test_on_a_mesh_every_device_calls_cudnn_with_its_own_rows_and_heads(axes: dict[str, int], kv_heads: int):
    """Also where there are fewer heads of keys and values than devices that share the queries' heads."""
    *heads, segments = drawn(32, size=16, heads=8, kv_heads=kv_heads, dtype=jnp.bfloat16)
    told = None if kv_heads == 8 else segments
    wanted = jax.jit(partial(with_gradients, FORMULA))(*heads, told)
    with cudnn_on_cpu():
        made, jaxpr = on_mesh(axes, heads, told)
    assert "dot_product_attention_fwd" in jaxpr
    assert_close(made, wanted, 2e-2)


def test_what_does_not_divide_is_computed_by_all(monkeypatch: pytest.MonkeyPatch):
    """Three heads on two devices, and two rows on four."""
    monkeypatch.setattr(attention, "_LONG", 16)
    *heads, segments = drawn(32, size=16, heads=3, kv_heads=3)
    wanted = jax.jit(partial(with_gradients, FORMULA))(*heads, segments)
    assert_close(on_mesh({"tensor": 2, "fsdp": 4}, heads, segments)[0], wanted, 1e-5)


def on_mesh(axes: dict[str, int], heads: list[Any], segments: Any) -> tuple[list[Any], str]:
    """Causal attention and its gradients, on arrays that are cut as a stage cuts them; and the text of the jaxpr."""
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    mesh = Mesh(devices.reshape(*axes.values()), tuple(axes))
    with use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(partial(with_gradients, causal_attention))(*heads, segments)

    def lies(part: Any) -> NamedSharding:
        rows = "fsdp" if axes.get("fsdp", 3) <= 2 else None
        is_cut = part.ndim == 4 and part.shape[2] % axes["tensor"] == 0
        return NamedSharding(mesh, PartitionSpec(rows, None, "tensor") if is_cut else PartitionSpec(rows))

    arrays = [*heads] if segments is None else [*heads, segments]
    placed = [jax.device_put(part, lies(part)) for part in arrays]
    return jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args))(*placed), str(jaxpr)
