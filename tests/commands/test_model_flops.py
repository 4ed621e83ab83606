"""The operations of a step as the metrics count them: beside the compiler's own count, and what is left out."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.model_parts import cut_language_model, model_flops
from rrfp_jax.costs.devices import peak_flops
from rrfp_jax.data.dataset import contents_of
from rrfp_jax.programs.chunk import param_specs
from rrfp_jax.testing.comparing import run_unpipelined

WIDE: dict[str, Any] = {
    "model.hidden": 256,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.mlp_dim": 768,
    "model.vocab_size": 1024,
    "data.length": 128,
    "data.max_bytes": 100_000,
}


def config_of(**overrides: Any) -> TrainConfig:
    return load_train_config("tpu_gpu_configs/cpu/debug.yaml", WIDE | overrides)


def text(rows: int, length: int) -> dict[str, Any]:
    return {
        "tokens": np.zeros((1, rows, length), np.int32),
        "targets": np.zeros((1, rows, length), np.int32),
        "weights": np.ones((1, rows, length), np.float32),
    }


def counted_by_xla(config: TrainConfig, leaves: dict[str, Any]) -> float:
    """Of the loss's value and gradient, one function without anything of a pipeline, before XLA optimises it.

    The gradient of the head's matrix makes logits again, which is no operation of the model.
    """
    chunks = cut_language_model(config, 1)
    params = {name: spec for chunk in chunks for name, spec in param_specs(chunk).items()}
    constant = {name: params.pop(name) for chunk in chunks for name in chunk.frozen}
    micro = {name: leaf[0] for name, leaf in leaves.items()}
    step = jax.value_and_grad(lambda trained, rest: run_unpipelined(chunks, {**trained, **rest}, micro)[0])
    again = 2 * micro["tokens"].size * config.model.hidden * config.model.vocab_size
    return jax.jit(step).lower(params, constant).cost_analysis()["flops"] - again


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model.num_heads": 8, "model.head_dim": 48, "model.tie_embeddings": True},
        {"model.sliding_window": 128, "model.qk_norm": True, "model.num_layers": 2},
        {"optimizer.freeze": ["embedding", "layers.0", "layers.1"]},
    ],
    ids=["debug", "tied, wide heads", "qwen3-like", "partly frozen"],
)
def test_the_count_is_the_compiler_s_within_3_percent(overrides: dict[str, Any]) -> None:
    config, batch = config_of(**overrides), text(4, 128)
    ours, theirs = model_flops(config)(contents_of(batch)), counted_by_xla(config, batch)
    assert ours == pytest.approx(theirs, rel=0.03)


def test_layers_without_a_window_count_all_pairs() -> None:
    local, mixed, whole = (
        model_flops(config_of(**{"model.sliding_window": window, "model.global_layers": layers}))(
            contents_of(text(4, 128))
        )
        for window, layers in ((16, None), (16, {"every": 2}), (None, None))
    )
    assert local < mixed == pytest.approx((local + whole) / 2)


def test_it_is_six_for_each_parameter_and_token_and_twelve_for_attention() -> None:
    config = config_of()
    model, tokens = config.model, 4 * 128
    norms = 2 * model.hidden * model.num_layers + model.hidden
    in_products = model.num_params() - norms - model.vocab_size * model.hidden  # without norms and the look-up
    attention = 12 * model.num_layers * 128 * model.num_heads * model.size_per_head
    assert model_flops(config)(contents_of(text(4, 128))) == tokens * (6 * in_products + attention)


def test_remat_and_the_cut_change_nothing() -> None:
    batch = contents_of(text(4, 128))
    same = config_of(**{"pipeline.remat": "full", "pipeline.num_stages": 2})
    assert model_flops(config_of())(batch) == model_flops(same)(batch)


def test_packed_rows_count_their_segments_and_no_padding() -> None:
    flops = model_flops(config_of())
    segments = np.zeros((1, 2, 128), np.int32)
    segments[0, 0, :100], segments[0, 0, 100:], segments[0, 1, :50] = 1, 2, 1
    packed = contents_of({"segments": segments})
    assert sorted(packed.token_lengths) == [28, 50, 100]
    alone = [flops(contents_of(text(1, length))) for length in (28, 50, 100)]
    assert flops(packed) == pytest.approx(sum(alone))


def test_of_experts_those_that_compute_a_token_count() -> None:
    experts = {"num_experts": 8, "experts_per_token": 2, "mlp_dim": 128}
    sparse, batch = config_of(**{"model.experts": experts}), contents_of(text(1, 128))
    more = config_of(**{"model.experts": experts | {"num_experts": 64}})
    router = 6 * 128 * 256 * (64 - 8) * 4
    assert model_flops(more)(batch) - model_flops(sparse)(batch) == router


def test_an_encoder_counts_for_the_patches_that_there_are_and_frozen_it_has_no_backward() -> None:
    config = load_train_config("tpu_gpu_configs/cpu/multimodal.yaml", {})
    segments = np.ones((1, 2, 16), np.int32)
    text_only = contents_of({"segments": segments})
    seen = replace(text_only, patches=12, patch_lengths=np.array([12]))
    trained, blind = model_flops(config)(seen), model_flops(config)(text_only)
    frozen = replace(config, optimizer=replace(config.optimizer, freeze=("vision",)))
    encoder_and_projector, without_backward = (
        trained - blind,
        model_flops(frozen)(seen) - model_flops(frozen)(text_only),
    )
    assert 0.3 < without_backward / encoder_and_projector < 0.6
    assert model_flops(frozen)(text_only) == blind


def test_peaks_are_those_of_the_kind_or_unknown() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("TPU v5 lite") == 197e12
    unknown = ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GB200", "TPU v4 lite", "TPU v3")
    assert [peak_flops(kind) for kind in unknown] == [None] * len(unknown)
