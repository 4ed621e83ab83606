"""What a plan says is what the machine allows, and the best of what was looked at."""

import shlex
from dataclasses import replace

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.commands.training.planned import order_run
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts, LinkCosts, Noise
from rrfp_jax.planner.search import make_plan
from rrfp_jax.planner.search_space import SearchSpace

LAYER = LayerCosts(
    forward_ms=1.0,
    input_gradient_ms=1.0,
    weight_gradient_ms=1.0,
    stash_bytes=100,
    fixed_bytes=1000,
    flops=6e9,
    update_ms=0.1,
)
HEAD = LayerCosts(forward_ms=2.0, input_gradient_ms=2.0, weight_gradient_ms=2.0, stash_bytes=50, flops=12e9)


def a_book(num_layers: int = 8, **more: object) -> CostBook:
    return CostBook(
        layers=("layer",) * num_layers + ("head",),
        entries=(CostEntry(types={"layer": LAYER, "head": HEAD}),),
        links=LinkCosts(latency_ms=0.2),
        device_flops=1e12,
        tokens_per_sample=10.0,
        **more,  # type: ignore[arg-type]
    )


def test_a_ranking() -> None:
    told: list[tuple[object, ...]] = []
    space = SearchSpace(devices=2, stages=(2,), microbatches=(4,), memory_bytes=4000)
    plan = make_plan(a_book(4), space, progress=lambda *words: told.append(words))
    assert told
    steps = [each.forecast.step_ms for each in plan.ranking]
    assert len(steps) > 1
    assert steps == pytest.approx(sorted(steps), rel=1e-9)
    assert all(each.choice.peak_bytes <= 4000 for each in plan.ranking)
    first = plan.ranking[0].forecast
    assert first.nominal_ms == first.step_ms
    assert first.bound_ms == pytest.approx(first.step_ms)  # proven best, but for the last bit
    assert all(each.forecast.bound_ms <= each.forecast.nominal_ms * (1 + 1e-12) for each in plan.ranking)
    assert first.mfu == pytest.approx((4 * 6e9 + 12e9) * 4 / (2 * 1e12 * first.step_ms / 1e3))
    assert first.tokens_per_s == pytest.approx(40 / first.step_ms * 1e3)
    assert plan.named is not None
    assert plan.even is not None
    assert first.step_ms <= plan.named.forecast.step_ms <= plan.even.forecast.step_ms


def test_why_the_others_lost() -> None:
    plan = make_plan(a_book(4), SearchSpace(devices=2, stages=(2,), microbatches=(4,), memory_bytes=3600))
    assert not plan.ranking[0].why
    assert all(each.why for each in plan.ranking[1:])
    where, gain = plan.why
    assert where.startswith("an average stage works ")
    assert "even" in gain
    kinds = [each.why.partition(":")[0] for each in plan.alternatives]
    assert len(kinds) == 3
    assert {"another order", "another cut"} <= set(kinds)
    assert all(each.why.partition(": ")[2] for each in plan.alternatives)
    worse = [each.forecast.nominal_ms / plan.ranking[0].forecast.nominal_ms - 1 for each in plan.alternatives]
    assert all(
        f"{loss:.1%} longer" in each.why for loss, each in zip(worse, plan.alternatives, strict=True) if loss > 1e-9
    )


def test_what_it_would_take() -> None:
    entries = [
        CostEntry(types={"layer": replace(LAYER, stash_bytes=stash), "head": HEAD}, remat=remat)
        for remat, stash in (("none", 2500), ("full", 100))
    ]
    book = replace(a_book(), entries=tuple(entries))
    plan = make_plan(book, SearchSpace(devices=2, stages=(2,), microbatches=(4,), memory_bytes=6000, remats=("none",)))
    assert not plan.ranking
    (refused,) = plan.refused
    assert refused.reason == "stage 1 needs 13.72 KiB of 5.859 KiB with one microbatch in flight"
    assert refused.change == "remat full (window 4), or 13.86 KiB per device"
    space = SearchSpace(devices=2, stages=(2,), microbatches=(4,), memory_bytes=6000, remats=("full",))
    assert make_plan(book, space).ranking


def test_same_seed_same_plan() -> None:
    space = SearchSpace(devices=2, stages=(2,), microbatches=(4,), chunks=(1,))
    book = a_book(4, noise=Noise.alike(0.3))
    one, other, third = (make_plan(book, space, seed=seed, draws=6) for seed in (1, 1, 2))
    assert [each.forecast for each in one.ranking] == [each.forecast for each in other.ranking]
    assert one.ranking[0].forecast.draws_ms != third.ranking[0].forecast.draws_ms
    assert one.ranking[0].forecast.error_ms > 0
    assert one.notes == ("how much memory a device has is not known, so nothing is refused for lack of it",)


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ({"devices": 4, "stages": (3,), "microbatches": (4,)}, "cannot be divided by stages 3"),
        ({"devices": 4}, "neither the batch nor the number"),
        ({"devices": 4, "microbatches": (4,), "memory_bytes": 0}, "no memory"),
        ({"devices": 4, "microbatches": (4,), "consumptions": ("eager",)}, "consumption eager is unknown"),
        ({"devices": 4, "batch_size": 9, "microbatches": (4,), "microbatch_sizes": (2,)}, "no batch of 9 samples"),
        ({"devices": 0, "microbatches": (4,)}, "devices is 0: give at least 1"),
    ],
)
def test_a_space_that_contradicts_itself(space: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SearchSpace(**space)  # type: ignore[arg-type]


def test_no_costs_for_the_space() -> None:
    with pytest.raises(ValueError, match="no stages x data x tensor make 4 devices"):
        make_plan(a_book(), SearchSpace(devices=4, microbatches=(4,), tensor=(2,)))


# -- shards of the vocabulary ------------------------------------------------------------------------------------------


def noted_shards(head_ms: float, **space: object) -> list[str]:
    times = {"forward_ms": head_ms, "input_gradient_ms": head_ms, "weight_gradient_ms": head_ms}
    head, embedding = replace(HEAD, **times, fixed_bytes=4000), replace(LAYER, forward_ms=0.1, input_gradient_ms=0.0)
    book = CostBook(
        layers=("embedding", *("layer",) * 7, "head"),
        entries=(CostEntry(types={"layer": LAYER, "head": head, "embedding": embedding}),),
        links=LinkCosts(latency_ms=0.02),
    )
    plan = make_plan(book, SearchSpace(**{"devices": 4, "stages": (4,), "microbatches": (8,)} | space))  # type: ignore[arg-type]
    return [note for note in plan.notes if "in shards on all stages" in note]


def test_shards_of_a_large_vocabulary_are_proposed_as_options_of_a_run() -> None:
    (note,) = noted_shards(8.0)
    words = shlex.split(note.partition("configured as 1, with ")[2])
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--schedule"] == "vocabulary"
    named = {
        f"pipeline.{name.removeprefix('--').replace('-', '_')}": None if value == "null" else value
        for name, value in options.items()
    }
    order = order_run(load_train_config("cpu/debug", {"pipeline.num_stages": 4, "model.num_layers": 7} | named)).order
    assert order.graph.num_chunks == 13


def test_shards_of_a_small_vocabulary_are_not_proposed() -> None:
    assert noted_shards(1.0) == noted_shards(8.0, schedules=("1f1b",)) == []
