"""Plans for models whose layers weigh differently, against interleaved 1F1B on its best cut.

Costs are operations over 60% of 989 TFLOP/s for microbatches of 4096 tokens, with the widths of published
configurations; devices share no layer, so that only how layers compare counts:

* Gemma 3 27B: 62 layers of width 5376, MLP 21504, and 262,144 words (arXiv 2503.19786);
* DeepSeek-V3: 61 layers of width 7168, three dense (MLP 18432), the others with 8 + 1 experts of 2048, then one layer
  for another token and a second head; 129,280 words (arXiv 2412.19437);
* Nemotron-H 8B: 52 layers of width 4096, Mamba-2 and MLP of 21504 in turn, 4 of attention; 131,072 words (arXiv
  2504.03624);
* LLaVA-OneVision 7B: SigLIP's 27 layers of width 1152 on 7290 patches, a projector, 28 layers of width 3584 with MLP
  18944 on 4096 tokens; 152,064 words (arXiv 2408.03326).
"""

from collections.abc import Sequence
from statistics import fmean

import pytest

from rrfp_jax.costs import CostBook, CostEntry, LayerCosts, LinkCosts
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import SearchSpace

TOKENS = 4096
_FLOPS_PER_MS = 0.6 * 989e9


def a_layer(params: float, *, attends: int = 0, tokens: int = TOKENS) -> LayerCosts:
    """A layer of so many parameters per token; ``attends`` is the width of attention, whose scores have no weights."""
    ms = 2 * params * tokens / _FLOPS_PER_MS
    scores_ms = 4 * attends * tokens * tokens / 2 / _FLOPS_PER_MS
    return LayerCosts(
        forward_ms=ms + scores_ms,
        input_gradient_ms=ms + 2 * scores_ms,
        weight_gradient_ms=ms,
        output_bytes=2 * tokens * 4096,
    )


def decoder(hidden: int, mlp: int, kv: int) -> LayerCosts:
    return a_layer(hidden * (2 * hidden + 2 * kv + 3 * mlp), attends=hidden)


EMBEDDING = LayerCosts(forward_ms=0.05, input_gradient_ms=0.0, weight_gradient_ms=0.1)
MODELS: dict[str, tuple[Sequence[str], dict[str, LayerCosts]]] = {
    "gemma": (
        ["embedding", *["layer"] * 62, "head"],
        {"layer": decoder(5376, 21504, 2048), "head": a_layer(5376 * 262_144)},
    ),
    "deepseek": (
        ["embedding", *["dense"] * 3, *["moe"] * 58, "head", "mtp", "mtp head"],
        {
            "dense": a_layer(7168 * (2 * 7168 + 3 * 18432), attends=16384),
            "moe": a_layer(7168 * (2 * 7168 + 3 * 9 * 2048), attends=16384),
            "mtp": a_layer(7168 * (4 * 7168 + 3 * 9 * 2048), attends=16384),
            "head": a_layer(7168 * 129_280),
            "mtp head": a_layer(7168 * 129_280),
        },
    ),
    "nemotron": (
        ["embedding", *[{0: "mamba", 1: "mlp"}[n % 2] if n % 13 != 7 else "attention" for n in range(52)], "head"],
        {
            "mamba": a_layer(4096 * 3 * 8192),
            "mlp": a_layer(4096 * 2 * 21504),
            "attention": a_layer(4096 * (2 * 4096 + 2 * 1024), attends=4096),
            "head": a_layer(4096 * 131_072),
        },
    ),
    "multimodal": (
        ["patches", *["vision layer"] * 27, "projector", "embedding", *["layer"] * 28, "head"],
        {
            "patches": a_layer(1152 * 588, tokens=7290),
            "vision layer": a_layer(1152 * (4 * 1152 + 2 * 4304), attends=1152, tokens=7290),
            "projector": a_layer(1152 * 3584 + 3584 * 3584, tokens=7290),
            "layer": decoder(3584, 18944, 512),
            "head": a_layer(3584 * 152_064),
        },
    ),
}


def a_book(name: str, **more: LayerCosts) -> CostBook:
    layers, types = MODELS[name]
    links = LinkCosts(latency_ms=0.02, gb_per_s=40.0)
    entry = CostEntry(types={"embedding": EMBEDDING, **types, **more})
    return CostBook(layers=tuple(layers), entries=(entry,), links=links)


def in_halves(name: str, attention: LayerCosts, mlp: LayerCosts) -> dict[str, LayerCosts]:
    return {f"{name}:attention": attention, f"{name}:mlp": mlp}


EXPERTS = a_layer(7168 * 3 * 9 * 2048)
HALVES = {
    "gemma": in_halves("layer", a_layer(5376 * (2 * 5376 + 2 * 2048), attends=5376), a_layer(5376 * 3 * 21504)),
    "deepseek": in_halves("dense", a_layer(7168 * 2 * 7168, attends=16384), a_layer(7168 * 3 * 18432))
    | in_halves("moe", a_layer(7168 * 2 * 7168, attends=16384), EXPERTS)
    | in_halves("mtp", a_layer(7168 * 4 * 7168, attends=16384), EXPERTS),
    "multimodal": in_halves("layer", a_layer(3584 * (2 * 3584 + 2 * 512), attends=3584), a_layer(3584 * 3 * 18944)),
}


def gain_of_halves(name: str, stages: int, microbatches: int) -> float:
    """How many times as long the best plan takes whose cuts lie between layers."""
    space = SearchSpace(devices=stages, stages=(stages,), microbatches=(microbatches,))
    whole, halves = (make_plan(a_book(name, **more), space).ranking[0] for more in ({}, HALVES[name]))
    is_cut = any(layer.endswith(":mlp") for layer in halves.choice.cut.costs.layers)
    gain = whole.forecast.step_ms / halves.forecast.step_ms
    assert gain > 1.01 if is_cut else gain == 1.0
    return gain


@pytest.mark.slow
def test_cuts_inside_layers_gain_a_fiftieth() -> None:
    assert gain_of_halves("gemma", 4, 8) >= 1.02
    for name, halves in HALVES.items():
        for layer in {half.partition(":")[0] for half in halves}:
            of_halves = sum(halves[f"{layer}:{half}"].work_ms(split=True) for half in ("attention", "mlp"))
            assert of_halves == pytest.approx(MODELS[name][1][layer].work_ms(split=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 32), (16, 32)])
def test_so_they_do_for_all_models_and_on_more_stages(stages: int, microbatches: int) -> None:
    gains = [gain_of_halves(name, stages, microbatches) for name in HALVES]
    assert min(gains) >= 1.0
    assert fmean(gains) >= 1.02


def gain_of(name: str, stages: int, microbatches: int) -> float:
    """How many times as long the best interleaved 1F1B takes, of one, two and four chunks per stage."""
    space = SearchSpace(devices=stages, stages=(stages,), microbatches=(microbatches,))
    found = make_plan(a_book(name), space)
    interleaved = []
    for schedule, chunks in (("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4)):
        named = SearchSpace(
            devices=stages, stages=(stages,), microbatches=(microbatches,), schedules=(schedule,), chunks=(chunks,),
            consumptions=("strict",),
        )  # fmt: skip
        interleaved += [each.forecast.step_ms for each in make_plan(a_book(name), named).ranking[:1]]
    return min(interleaved) / found.ranking[0].forecast.step_ms


@pytest.mark.slow
def test_plans_are_a_tenth_ahead_of_interleaved_1f1b_in_the_mean() -> None:
    gains = [gain_of(name, 4, 8) for name in ("gemma", "deepseek")]
    assert min(gains) >= 1.0
    assert fmean(gains) >= 1.10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16), (8, 32), (16, 32)])
def test_so_they_are_of_all_models_and_on_more_stages(stages: int, microbatches: int) -> None:
    gains = [gain_of(name, stages, microbatches) for name in MODELS]
    assert min(gains) >= 1.0
    assert fmean(gains) >= 1.10
