"""Rematerialisation changes what is kept and computed again, and no gradient."""

from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.remat import Remat
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.specs import accumulator_spec, num_bytes
from rrfp_jax.tasks import chain
from tests.programs.splitting.flops import dot_flops
from tests.programs.toys import (
    assert_close,
    attention,
    compile_all,
    embedding,
    head,
    initial,
    make_batch,
    microbatch_spec,
    run_gradients,
)

CHUNKS = [embedding(), attention(0, dropout=0.5), head()]
BATCH = make_batch(2)
POLICIES: dict[str, Remat] = {"dots": "dots", "full": "full", "own": jax.checkpoint_policies.everything_saveable}


def gradients(split: bool, remat: Remat) -> Any:
    graph = chain(3, 2, split=split)
    programs = compile_all(CHUNKS, graph, BATCH, remat=remat, updates=False)
    params = [initial(programs, index).params for index in range(3)]
    return run_gradients(programs, graph, params, BATCH)


@pytest.fixture(scope="module")
def expected() -> Any:
    return gradients(False, "none")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("remat", POLICIES)
def test_gradients_are_those_without(expected: Any, remat: str, split: bool) -> None:
    """With dropout: the recomputation draws the same numbers."""
    accumulators, losses = gradients(split, POLICIES[remat])
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-6)
    assert_close(accumulators, expected.accumulators)


def plan(remat: Remat, *, split: bool = True) -> ChunkPlan:
    graph = chain(3, 2, split=split)
    shapes = derive_shapes(CHUNKS, graph, microbatch_spec(BATCH))
    return plan_chunk(1, CHUNKS, graph, shapes, remat=remat)


def test_less_is_kept() -> None:
    sizes = [num_bytes((s.donated, s.saved)) for s in (plan(r).stash.specs for r in ("none", "dots", "full"))]
    assert sizes[0] > sizes[1] > sizes[2] == 0
    kept = plan("full").stash.specs.kept
    assert sorted(str(spec.dtype) for spec in kept) == ["float32", "uint32"], "its input, and the counters of its key"


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_weight_gradient_reuses_what_the_input_gradient_recomputed(remat: Remat) -> None:
    halves, whole = plan(remat), plan(remat, split=False)
    params = jax.eval_shape(CHUNKS[1].init, jax.random.key(0))
    stash, sums = halves.stash.specs, accumulator_spec(params)
    rest = (stash.saved, stash.kept)
    first = dot_flops(halves.input_gradient, stash.donated, params, (), rest, halves.output_grads)
    second = dot_flops(halves.weight_gradient, sums, params, (), halves.owed.specs)
    stash = whole.stash.specs
    owned, rest = (sums, stash.donated), (stash.saved, stash.kept)
    assert first + second == dot_flops(whole.backward, owned, params, (), rest, whole.output_grads)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"remat is 'dot': give none, dots, full, or a policy of jax\.checkpoint"):
        plan("dot")
