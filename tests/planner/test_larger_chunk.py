"""How long the larger chunk of a profile is: as long as a chunk of the run, as bounds and memory have it."""

from typing import Any

import pytest

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.planner import measuring as module
from rrfp_jax.planner.analytic_costs import model_layers
from rrfp_jax.planner.measuring import LAYER, larger_chunk, small_cut


class Ranks:
    """Processes of which another one tells how many layers fit there."""

    def __init__(self, elsewhere: int) -> None:
        self.elsewhere = elsewhere

    def gather(self, name: str, data: int) -> dict[int, int]:
        assert name == "layers that fit"
        return {0: data, 1: self.elsewhere}


def found(monkeypatch: pytest.MonkeyPatch, *, layers: float = 1000.0, elsewhere: int = 1000, **config: Any) -> int:
    """With memory for so many layers of the model, each with three microbatches in flight."""
    run = load_train_config(
        "cpu/debug", {f"{'pipeline' if 'stage' in k else 'model'}.{k}": v for k, v in config.items()}
    )
    model = model_layers(run, microbatch_size=4)
    one = model.types[LAYER]
    each = one.fixed_bytes + one.sizes.more_temporaries_bytes + 3 * (one.sizes.stash_bytes + one.sizes.owed_bytes)
    monkeypatch.setattr(module, "_free_bytes", lambda _: 2 * layers * each)
    ranks: Any = Ranks(elsewhere)
    return larger_chunk(run, model, ranks, num_microbatches=3)


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks_per_stage", "expected"),
    [(4, 4, None, 3), (20, 4, None, 5), (22, 4, None, 6), (80, 4, None, 8), (40, 4, 2, 5)],
)
def test_it_is_as_long_as_a_chunk_of_the_run_within_bounds(
    num_layers: int, stages: int, chunks_per_stage: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {} if chunks_per_stage is None else {"chunks_per_stage": chunks_per_stage}
    assert found(monkeypatch, num_layers=num_layers, num_stages=stages, **more) == expected


@pytest.mark.parametrize(("layers", "expected"), [(9.5, 8), (7.5, 6), (6.5, 5), (2.5, 3), (0.5, 3)])
def test_short_memory_makes_it_shorter(layers: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, layers=layers, num_layers=64, num_stages=4) == expected


def test_the_process_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, elsewhere=4, num_layers=64, num_stages=4) == 4


def test_the_cut_has_a_chunk_so_long() -> None:
    cut = small_cut(load_train_config("cpu/debug", {}), 2, many=6)
    assert [len(layers) for layers in cut.layers] == [1, 1, 6, 1]
