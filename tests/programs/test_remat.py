"""Rematerialisation changes what is kept and computed again, and no gradient."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.remat import Remat, one_layer
from rrfp_jax.programs.shapes import accumulator_spec, derive_shapes, num_bytes
from rrfp_jax.schedules import chain
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


@pytest.mark.one_in(3)
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
    sizes = [num_bytes((s.donated, s.saved)) for s in (plan(r).residuals.specs for r in ("none", "dots", "full"))]
    assert sizes[0] > sizes[1] > sizes[2] == 0
    kept = plan("full").residuals.specs.aliased
    assert sorted(str(spec.dtype) for spec in kept) == ["float32", "uint32"], "its input, and the counters of its key"


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_weight_gradient_reuses_what_the_input_gradient_recomputed(remat: Remat) -> None:
    halves, whole = plan(remat), plan(remat, split=False)
    params = jax.eval_shape(CHUNKS[1].init, jax.random.key(0))
    stash, sums = halves.residuals.specs, accumulator_spec(params)
    rest = (stash.saved, stash.aliased)
    first = dot_flops(halves.input_gradient, stash.donated, params, (), rest, halves.output_grads)
    second = dot_flops(halves.weight_gradient, sums, params, (), halves.weight_residuals.specs)
    stash = whole.residuals.specs
    owned, rest = (sums, stash.donated), (stash.saved, stash.aliased)
    assert first + second == dot_flops(whole.backward, owned, params, (), rest, whole.output_grads)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"remat is 'dot': give none, dots, full, or a policy of jax\.checkpoint"):
        plan("dot")


WIDTH, INNER, ROWS = 64, 512, 128


def layered(num_layers: int, *, by_layer: bool = True) -> list[Chunk]:
    """A chunk between two others, each layer of which makes much more than it returns."""

    def init(key: jax.Array) -> dict[str, Any]:
        shapes = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
        return {
            f"layers.{n}": {name: jax.random.normal(key, shape) * 0.05 for name, shape in shapes.items()}
            for n in range(num_layers)
        }

    def layer(layer: Any, x: jax.Array) -> jax.Array:
        inner = checkpoint_name(jnp.tanh(x @ layer["up"]), "attention")
        return x + jnp.sin(jnp.cos(inner) * inner) @ layer["down"]

    def apply(params: Any, x: Any, leaves: Any, *, key: Any) -> Any:
        for each in params.values():
            x = (one_layer(layer) if by_layer else layer)(each, x)
        return x

    def first(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        return leaves["x"] * params["scale"]["value"]

    def last(params: Any, x: Any, leaves: Any, *, key: Any) -> Any:
        return jnp.sum(x**2), jnp.float32(1)

    return [
        Chunk(name="first", init=lambda key: {"scale": {"value": jnp.ones(WIDTH)}}, apply=first, leaves=("x",)),
        Chunk(name="layers", init=init, apply=apply),
        Chunk(name="last", init=lambda key: {}, apply=last),
    ]


def planned(chunks: list[Chunk], remat: Remat) -> ChunkPlan:
    """The plan of the chunk with layers."""
    graph = chain(3, 1)
    shapes = derive_shapes(chunks, graph, {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)})
    return plan_chunk(1, chunks, graph, shapes, remat=remat)


def waits(plan: ChunkPlan, *, of: Any) -> list[bool]:
    """For each layer that the backward computes again, last one first, whether it waits for one of some operands.

    ``of`` picks them of the accumulators and the output gradients.
    """
    params = jax.eval_shape(lambda: layered(6)[1].init(jax.random.key(0)))
    stash, sums = plan.residuals.specs, accumulator_spec(params)
    operands = ((sums, stash.donated), params, (), (stash.saved, stash.aliased), plan.output_grads)
    jaxpr = jax.make_jaxpr(plan.backward)(*operands).jaxpr
    names = jax.tree.unflatten(jax.tree.structure(operands), jaxpr.invars)
    late, found = set(jax.tree.leaves(of(names[0][0], names[-1]))), []
    for equation in jaxpr.eqns:
        is_late = any(isinstance(each, jax.extend.core.Var) and each in late for each in equation.invars)
        late.update(equation.outvars if is_late else ())
        found += [is_late] * (equation.primitive.name == "tanh")
    return found


def test_layers_are_computed_again_one_at_a_time() -> None:
    """Each waits for the gradient of the next one, and the stash are their inputs."""
    plan = planned(layered(6), "full")
    assert waits(plan, of=lambda sums, grads: grads) == [True] * 6
    stash = plan.residuals.specs
    assert num_bytes((stash.donated, stash.saved, stash.aliased)) == 6 * ROWS * WIDTH * 4
    whole = planned(layered(6, by_layer=False), "full")
    assert waits(whole, of=lambda sums, grads: grads) == [False] * 6
    assert num_bytes((whole.residuals.specs.donated, whole.residuals.specs.saved)) == 0


def test_gradients_are_added_up_before_the_next_layer() -> None:
    """So that a backward does not hold those of all layers."""
    plan = planned(layered(6), "full")
    assert waits(plan, of=lambda sums, grads: sums["layers.5"]) == [False] + [True] * 5


def test_layers_keep_what_is_named() -> None:
    sizes = {}
    for remat in ("full", "experts", "attention", "attention+experts", "dots"):
        stash = planned(layered(2), remat).residuals.specs
        sizes[remat] = num_bytes((stash.donated, stash.saved, stash.aliased))
    named = 2 * ROWS * INNER * 4
    assert sizes["experts"] == sizes["full"]
    assert sizes["attention"] == sizes["attention+experts"] == sizes["full"] + named


@pytest.mark.parametrize("remat", ["dots", "full", "attention"])
def test_gradients_of_layers_are_those_without(remat: Remat) -> None:
    chunks = layered(3)
    params = chunks[1].init(jax.random.key(0))
    x, grad = np.random.default_rng(0).standard_normal((2, ROWS, WIDTH), np.float32)

    def gradients(remat: Remat) -> Any:
        split = planned(chunks, remat).split
        _, stash = split.forward(params, ((x,), {}, ((), ())))
        return split.full_backward(params, stash, grad)

    for found, expected in zip(*(jax.tree.leaves(gradients(each)) for each in (remat, "none")), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
