"""Faults planted in the library on purpose: each is found within the first compositions of a seed."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.programs import agreement, update_functions, updates
from rrfp_jax.runtime import stage as program_stage
from tests.fuzz import building, trial
from tests.fuzz.composition import Composition, drawn

SEED, MOST = 2_000, 200
Patch = pytest.MonkeyPatch


def a_tied_gradient_summed_twice(patch: Patch) -> None:
    whole = update_functions.Tie.sums

    def twice(self: Any, accumulators: Any, others: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + leaf, whole(self, accumulators, others))

    patch.setattr(update_functions.Tie, "sums", twice)


def a_microbatch_whose_weight_is_ignored(patch: Patch) -> None:
    whole = agreement._in_order

    def ignoring(packed: bytes, dtype: np.dtype) -> Any:
        entries, order = whole(packed, dtype)
        if dtype == agreement._LOSSES and len(entries) > 1:
            entries = entries.copy()
            entries["weight"][order[-1]] = 1.0
        return entries, order

    patch.setattr(agreement, "_in_order", ignoring)


def a_frozen_layer_that_decays(patch: Patch) -> None:
    whole = updates.UnitUpdates.update

    def decaying(self: Any, params: Any, state: Any, accumulators: Any, scale: float, apply: bool) -> Any:
        frozen = {name: layer for name, layer in params.items() if name not in self._params}
        new, *rest = whole(self, params, state, accumulators, scale, apply)
        return {**new, **jax.tree.map(lambda leaf: leaf * np.float32(0.99).astype(leaf.dtype), frozen)}, *rest

    patch.setattr(updates.UnitUpdates, "update", decaying)


def a_norm_that_misses_a_replica(patch: Patch) -> None:
    whole, of_all = update_functions._over_replicas, update_functions._squared_norm
    missed: dict[int, Any] = {}

    def remembering(gradient: Any, share: Any, *, ordered: bool) -> Any:
        summed = whole(gradient, share, ordered=ordered)
        if summed.shape == gradient.shape:
            missed[id(summed)] = summed, jax.lax.all_gather(gradient, update_functions.DATA)[:-1].sum(axis=0)
        return summed

    def missing(layers: Any, partition: Any) -> Any:
        return of_all(jax.tree.map(lambda leaf: missed.get(id(leaf), (leaf, leaf))[1], layers), partition)

    patch.setattr(update_functions, "_over_replicas", remembering)
    patch.setattr(update_functions, "_squared_norm", missing)


def a_stash_of_the_wrong_microbatch(patch: Patch) -> None:
    class Mixed(dict[tuple[int, int], Any]):
        def pop(self, pair: Any, *default: Any) -> Any:
            other = next((key for key in self if key[0] == pair[0] and key != pair), pair)
            self[pair], self[other] = self[other], self[pair]
            return super().pop(pair, *default)

    whole = program_stage._Step

    def mixing(*arguments: Any, **named: Any) -> Any:
        step = whole(*arguments, **named)
        step.stashes = Mixed()
        return step

    patch.setattr(program_stage, "_Step", mixing)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[Composition], bool]]] = [
    (a_tied_gradient_summed_twice, lambda c: c.tied and c.num_chunks > 1),
    (a_microbatch_whose_weight_is_ignored, lambda c: c.microbatches * c.data > 1),
    (a_frozen_layer_that_decays, lambda c: bool(c.frozen)),
    (a_norm_that_misses_a_replica, lambda c: c.data > 1),
    (a_stash_of_the_wrong_microbatch, lambda c: c.microbatches > 1),
]
"""Faults, each with the compositions that it can touch: the others would only pass."""


@pytest.fixture(autouse=True)
def _programs_with_faults_are_dropped() -> Iterator[None]:
    yield
    building.forget()


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "touches"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_fault_is_found(
    plant: Callable[[Patch], None],
    touches: Callable[[Composition], bool],
    record_property: Callable[[str, object], None],
) -> None:
    for number in filter(lambda number: touches(drawn(SEED, number)), range(MOST)):
        composition = drawn(SEED, number)
        building.forget()
        with Patch.context() as patch:
            plant(patch)
            outcome = trial.tried(composition)
        building.forget()
        if outcome.kind == trial.FOUND and trial.tried(composition).kind == trial.PASSED:
            record_property("compositions", number + 1)
            print(f"{plant.__name__}: found by composition {number + 1}: {outcome.text}\n{composition}")
            return
    pytest.fail(f"{plant.__name__} is not found within {MOST} compositions")
