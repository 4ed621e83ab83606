"""Which layers patterns freeze, and what is left of the programs of chunks with frozen layers."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.programs.chunk import Chunk, param_specs, trained_specs
from rrfp_jax.programs.chunk_plan import ChunkPlan, plan_chunk
from rrfp_jax.programs.jaxprs import called_jaxpr
from rrfp_jax.programs.model_graph import freeze, model_graph
from rrfp_jax.programs.shapes import derive_shapes, num_bytes
from rrfp_jax.schedules import Edge, PipelineGraph
from tests.programs.toys import (
    assert_close,
    compile_all,
    embedding,
    head,
    initial,
    joined,
    make_batch,
    merged,
    mlp,
    plain_model,
    reference_loss,
    run_gradients,
    run_reduce,
)

MODEL = [embedding("vision.embedding", "tokens"), *map(mlp, range(3)), head()]
NAMES = ["vision.embedding", "layers.0", "layers.1", "layers.2", "head", "final"]


def frozen_by(*patterns: str) -> set[str]:
    return set().union(*(chunk.frozen for chunk in freeze(MODEL, patterns)))


def test_patterns_are_names_beginnings_or_globs() -> None:
    assert frozen_by() == set()
    assert frozen_by("layers.1") == {"layers.1"}
    assert frozen_by("vision") == {"vision.embedding"}
    assert frozen_by("layers") == {"layers.0", "layers.1", "layers.2"}
    assert frozen_by("layers.[12]", "f*") == {"layers.1", "layers.2", "final"}
    assert frozen_by("*.*") == {"vision.embedding", "layers.0", "layers.1", "layers.2"}


def test_what_is_frozen_stays_frozen() -> None:
    twice = freeze(freeze(MODEL, ["layers.1"]), ["head"])
    assert set().union(*(chunk.frozen for chunk in twice)) == {"layers.1", "head"}


@pytest.mark.parametrize(
    ("pattern", "nearest"), [("layer", "layers"), ("layers.11", "layers.1"), ("visio", "vision"), ("Head", "head")]
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest(pattern: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"^no layer matches '{pattern}', .* the nearest is '{nearest}'$"):
        freeze(MODEL, ["layers", pattern])


def test_a_text_in_place_of_patterns_is_refused() -> None:
    with pytest.raises(ValueError, match="give a list of patterns"):
        freeze(MODEL, "layers")


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is left to train"):
        freeze(MODEL, ["*"])
    frozen = [replace(chunk, frozen=frozenset(param_specs(chunk))) for chunk in MODEL]
    with pytest.raises(ValueError, match="nothing is left to train"):
        model_graph(frozen, None, None)


def test_freezing_all_that_a_gradient_reaches_is_refused() -> None:
    behind = [MODEL[0], *(replace(chunk, frozen=frozenset(param_specs(chunk))) for chunk in MODEL[1:])]
    edges = [Edge(c, c + 1, carries_gradient=c > 0) for c in range(len(MODEL) - 1)]
    with pytest.raises(ValueError, match="no gradient reaches a layer that is not frozen, and nothing is left to"):
        model_graph(behind, edges, None)
    assert model_graph(behind, None, None).trains(0)


def test_a_layer_frozen_in_one_copy_only_is_refused() -> None:
    chunks = plain_model((1, 0), tied=True)
    chunks[0] = replace(chunks[0], frozen=frozenset({"embedding"}))
    with pytest.raises(ValueError, match=r"share 'embedding', but it is frozen in chunk 0 only"):
        compile_all(chunks, model_graph(chunks, None, None), make_batch(1))


def graph_of(chunks: list[Chunk], *, split: bool, num_microbatches: int = 2) -> PipelineGraph:
    graph = replace(model_graph(chunks, None, None), num_microbatches=num_microbatches)
    return replace(graph, split=frozenset(range(len(chunks)))) if split else graph


@pytest.mark.one_in(9)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("patterns", [["vision"], ["layers.1"], ["layers", "head", "final"], ["final", "layers.2"]])
def test_gradients_of_the_layers_that_train(patterns: list[str], split: bool) -> None:
    chunks = freeze([MODEL[0], joined(MODEL[1:3]), MODEL[3], MODEL[4]], patterns)
    graph, batch = graph_of(chunks, split=split), make_batch(2)
    programs = compile_all(chunks, graph, batch)
    states = [initial(programs, index) for index in range(len(chunks))]
    params = [state.params for state in states]
    gradients = run_gradients(programs, graph, params, batch)
    reduced, report = run_reduce(programs, graph, gradients.accumulators)
    expected = jax.jit(jax.grad(reference_loss(chunks, graph), has_aux=True))(merged(params), batch)[0]
    trained = {name for chunk in chunks for name in trained_specs(chunk)}
    assert set(merged(reduced)) == trained
    assert_close(merged(reduced), {name: expected[name] for name in trained})
    norm = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves({name: expected[name] for name in trained}))
    np.testing.assert_allclose(sum(value for _, value in report.squared_norms), norm, rtol=1e-5)


def language(frozen: tuple[str, ...], num_chunks: int = 2) -> list[Chunk]:
    config = LanguageModelConfig(
        vocab_size=64, hidden=96, num_layers=4, num_heads=4, num_kv_heads=4, mlp_dim=256, tie_embeddings=False
    )
    return freeze(language_model(config).split(num_chunks), frozen)


def language_plans(frozen: tuple[str, ...], *, split: bool) -> list[ChunkPlan]:
    chunks = language(frozen)
    graph = graph_of(chunks, split=split)
    leaf = jax.ShapeDtypeStruct((2, 16), np.int32)
    batch = {"tokens": leaf, "targets": leaf, "weights": jax.ShapeDtypeStruct((2, 16), np.float32)}
    shapes = derive_shapes(chunks, graph, batch)
    return [plan_chunk(index, chunks, graph, shapes) for index in range(len(chunks))]


def dot_flops(jaxpr: Any) -> int:
    """Operations of all matrix products, loops counted as often as they run."""
    return sum(_flops(eqn) for eqn in jaxpr.eqns)


def _flops(eqn: Any) -> int:
    inner = called_jaxpr(eqn)
    if inner is not None:
        return int(eqn.params.get("length", 1)) * dot_flops(getattr(inner, "jaxpr", inner))
    if eqn.primitive.name != "dot_general":
        return 0
    ((contracted, _), _), shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    return 2 * int(np.prod([shape[dim] for dim in contracted])) * int(np.prod(eqn.outvars[0].aval.shape))


def backward_flops(plan: ChunkPlan) -> Counter[str]:
    """Of B, or of I and W."""
    stash = (plan.residuals.specs.saved, plan.residuals.specs.aliased)
    derived = jax.eval_shape(plan.split.prepare, plan.params)
    sums = {name: plan.params[name] for name in plan.trained}
    flops: Counter[str] = Counter()
    if not plan.is_split:
        owned = (sums, plan.residuals.specs.donated)
        jaxpr = jax.make_jaxpr(plan.backward)(owned, plan.params, derived, stash, plan.output_grads)
        return Counter(B=dot_flops(jaxpr.jaxpr))
    first = jax.make_jaxpr(plan.input_gradient)(
        plan.residuals.specs.donated, plan.params, derived, stash, plan.output_grads
    )
    second = jax.make_jaxpr(plan.weight_gradient)(sums, plan.params, derived, plan.weight_residuals.specs)
    flops.update(I=dot_flops(first.jaxpr), W=dot_flops(second.jaxpr))
    return flops


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_a_frozen_decoder_does_about_half_of_the_backward(split: bool) -> None:
    """Attention's products of activations remain, and those of gradients with weights."""
    whole, passing = (
        language_plans(names, split=split)[1] for names in ((), ("layers.2", "layers.3", "final*", "head"))
    )
    trained, frozen = backward_flops(whole), backward_flops(passing)
    assert 0.4 * trained.total() < frozen.total() <= 0.55 * trained.total()
    assert frozen["W"] == 0
    assert frozen["I"] == trained["I"]
    assert passing.num_programs == 2  # F, and B or I
    assert passing.weight_residuals.num_bytes.total == 0
    assert num_bytes(passing.residuals.specs) < num_bytes(whole.residuals.specs)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_weights_of_frozen_layers_are_no_work_in_a_chunk_that_trains(split: bool) -> None:
    whole, half = (language_plans(names, split=split)[1] for names in ((), ("layers.3", "head")))
    flops = [backward_flops(plan) for plan in (whole, half)]
    layer = 16 * 2 * 2 * (4 * 96 * 96 + 3 * 96 * 256)
    head_flops = 2 * 16 * 2 * 2 * 96 * 64  # the logits again, and the gradient of its matrix
    assert flops[0].total() - flops[1].total() == layer + head_flops


def test_what_stands_before_the_first_layer_that_trains_has_no_backward() -> None:
    """The first chunk sends no gradient; so its frozen embedding and first layer are passed by."""
    whole, cut = (language_plans(names, split=False)[0] for names in (("layers.1",), ("embedding", "layers.0")))
    last = language_plans(("embedding", "layers.0"), split=True)[0]
    assert backward_flops(cut).total() < 0.55 * backward_flops(language_plans((), split=False)[0]).total()
    assert num_bytes(cut.residuals.specs) < 0.6 * num_bytes(whole.residuals.specs)
    assert backward_flops(last)["I"] == 0


def test_frozen_chunks_hold_nothing_but_their_parameters() -> None:
    chunks = freeze([MODEL[0], MODEL[1], MODEL[2], MODEL[4]], ["vision", "layers.1", "final"])
    for split in (False, True):
        programs = compile_all(chunks, graph_of(chunks, split=split), make_batch(2), optax.adam(0.1))
        encoder, trained, middle, last = (program.sizes for program in programs)
        assert (encoder.accumulators_bytes, encoder.optimizer_bytes) == (0, 0)
        assert (encoder.stash_bytes, encoder.kept_bytes, encoder.output_grads_bytes) == (0, 0, 0)
        assert (middle.accumulators_bytes, middle.optimizer_bytes, middle.owed.total) == (0, 0, 0)
        assert middle.input_grads_bytes == middle.inputs_bytes
        assert trained.accumulators_bytes == trained.params_bytes
        table = num_bytes(param_specs(chunks[3])["head"])
        assert (last.accumulators_bytes, last.optimizer_bytes) == (table, 2 * table + 4)
        assert programs[0].compiled.keys() == {"forward"}
        assert programs[2].compiled.keys() == {"forward", "input_gradient" if split else "backward"}
        assert [program.zeros().keys() for program in programs] == [set(), {"layers.0"}, set(), {"head"}]


def test_updates_leave_frozen_layers_as_they_are() -> None:
    chunks = freeze([joined(MODEL)], ["layers.1", "vision"])
    (program,) = compile_all(chunks, graph_of(chunks, split=False), make_batch(2), optax.adamw(0.1))
    state = initial([program])
    ones = jax.tree.map(lambda leaf: leaf + 1, state.accumulators)
    before = jax.tree.map(np.array, state.params)
    kept = {name: state.params[name] for name in ("layers.1", "vision.embedding")}
    params, _, accumulators = program.updates.update(state.params, state.optimizer_state, ones, 1.0, True)
    assert all(params[name] is layer for name, layer in kept.items())
    assert accumulators.keys() == {"layers.0", "layers.2", "head", "final"}
    for name in accumulators:
        same = jax.tree.map(np.array_equal, params[name], before[name])
        assert not any(jax.tree.leaves(same))


@pytest.mark.parametrize("first", [True, False], ids=["forwards only", "passes on"])
def test_a_cast_of_frozen_weights_is_made_once(first: bool) -> None:
    half = mlp(0, jnp.bfloat16)
    chunks = freeze([MODEL[0], half, MODEL[4]], ["layers", "vision"] if first else ["layers"])
    programs = compile_all(chunks, graph_of(chunks, split=False), make_batch(2))
    assert {leaf.dtype.name for leaf in programs[1].prepare(initial(programs, 1).params)} == {"bfloat16"}
    assert programs[1].compiled.keys() == {"prepare", "forward"} | (set() if first else {"backward"})
    state = initial(programs, 1)
    nothing = jax.tree.map(jnp.zeros_like, programs[1].prepare(state.params))
    ones = np.ones((3, 5, 8), np.float32)
    outputs, _ = programs[1].of().forward(state.params, (ones,), {}, derived=nothing)
    np.testing.assert_array_equal(outputs, ones)  # what is derived is taken as it is given
