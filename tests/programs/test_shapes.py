"""Shapes are derived along the graph, and every mistake names its chunk."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import derive_shapes, model_params
from rrfp_jax.schedules import Edge, PipelineGraph, chain
from tests.programs.toys import LENGTH, ROWS, VOCAB, WIDTH, embedding, head, make_batch, microbatch_spec, mlp

BATCH = microbatch_spec(make_batch(1))
MODEL = [embedding(), mlp(0), head()]


def refused(chunks: list[Chunk], message: str, *, graph: PipelineGraph | None = None, batch: Any = None) -> None:
    with pytest.raises(ValueError, match=message):
        derive_shapes(chunks, graph or chain(len(chunks), 1), BATCH if batch is None else batch)


def test_shapes_follow_the_graph() -> None:
    first, middle, last = derive_shapes(MODEL, chain(3, 1), BATCH)
    activations = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), np.float32)
    assert first.inputs == ()
    assert first.leaves == {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)}
    assert middle.inputs == last.inputs == (activations,)
    assert last.outputs == (jax.ShapeDtypeStruct((), np.float32),) * 2
    assert first.params == {"embedding": {"table": jax.ShapeDtypeStruct((VOCAB, WIDTH), np.float32)}}


def test_inputs_are_in_ascending_order_of_predecessor() -> None:
    short = replace(embedding("short", "images"), apply=lambda params, inputs, leaves, *, key: jnp.zeros(2))
    pair = Chunk(
        name="pair",
        init=lambda key: {},
        apply=lambda params, inputs, leaves, *, key: (inputs[0].sum() + inputs[1][0, 0, 0], jnp.float32(1)),
    )
    graph = PipelineGraph(3, 1, (Edge(1, 2), Edge(0, 2)))
    shapes = derive_shapes([short, embedding(), pair], graph, BATCH)
    assert [spec.shape for spec in shapes[2].inputs] == [(2,), (ROWS, LENGTH, WIDTH)]


def test_the_model_has_shared_parameters_once() -> None:
    tied = [embedding(shared=True), mlp(0), head("embedding", shared=True)]
    shapes = derive_shapes(tied, chain(3, 1, shared=((0, 2),)), BATCH)
    assert list(model_params(shape.params for shape in shapes)) == ["embedding", "layers.0", "final"]


def test_missing_batch_leaf() -> None:
    batch = {name: BATCH[name] for name in ("tokens", "weights")}
    refused(MODEL, r"chunk 2 \(head\) reads batch leaf 'targets', .* it has tokens, weights", batch=batch)


def test_number_of_chunks() -> None:
    refused(MODEL, "3 chunks are given for a graph of 4", graph=chain(4, 1))


def test_leaves_that_do_not_fit_together() -> None:
    batch = BATCH | {"targets": jax.ShapeDtypeStruct((ROWS + 1, LENGTH), np.int32)}
    refused(MODEL, r"chunk 2 \(head\) cannot be applied to .*targets int32\[4,5\], weights float32\[3,5\]", batch=batch)


def test_a_model_that_raises_is_named() -> None:
    broken = Chunk(name="broken", init=lambda key: {}, apply=lambda params, inputs, leaves, *, key: inputs["y"])
    refused([embedding(), broken, head()], r"chunk 1 \(broken\) cannot be applied to inputs float32\[3,5,8\]")


@pytest.mark.parametrize(
    "outputs",
    [
        jnp.float32(1),
        (jnp.float32(1), jnp.int32(3)),
        (jnp.ones(3), jnp.float32(1)),
        jnp.ones((2,)),
        (jnp.float32(1), jnp.float32(1), jnp.float32(1)),
        (jnp.float32(1), jnp.float32(1), {"router_loss": jnp.ones(3)}),
        (jnp.float32(1), {"router_loss": jnp.float32(1)}),
    ],
)
def test_last_chunk_returns_loss_and_weight(outputs: Any) -> None:
    last = Chunk(name="last", init=lambda key: {}, apply=lambda params, inputs, leaves, *, key: outputs)
    refused([embedding(), last], r"chunk 1 \(last\) has no successor .* \(loss_sum, weight\), two float32 scalars")


def test_names_of_sums_are_short() -> None:
    outputs = (jnp.float32(1), jnp.float32(1), {"x" * 41: jnp.float32(1)})
    last = Chunk(name="last", init=lambda key: {}, apply=lambda params, inputs, leaves, *, key: outputs)
    refused([embedding(), last], r"chunk 1 \(last\) names a sum 'x+': give a string of at most 40 bytes")


def test_parameters_form_a_dictionary_of_floating_arrays() -> None:
    refused([replace(head(), init=lambda key: [jnp.ones(3)])], r"chunk 0 \(head\) initialises to list")
    refused(
        [replace(head(), init=lambda key: {"steps": jnp.zeros((), jnp.int32)})],
        r"chunk 0 \(head\) has the parameter \['steps'\] of type int32",
    )


def test_layer_names_are_unique_unless_shared() -> None:
    refused([embedding(), mlp(0), mlp(0), head()], r"\(layers.0\) and chunk 2 \(layers.0\) both hold .* 'layers.0'")
    refused([embedding(shared=True), head("embedding")], r"both hold a layer named 'embedding': rename one, or list it")


def test_shared_layers_agree_with_each_other_and_with_the_graph() -> None:
    tied = [embedding(shared=True), mlp(0), head("embedding", shared=True)]
    refused(tied, r"share 'embedding', but the graph does not know: build it with shared=\(\(0, 2\),\)")
    refused([embedding(shared=True), head()], r"chunk 0 \(embedding\) shares 'embedding' with no other chunk")
    refused(
        [replace(embedding(), shared=frozenset({"x"})), head()], r"says that it shares 'x', .* layers are embedding"
    )
    other = replace(tied[2], init=lambda key: {"embedding": jnp.ones(3), "final": {"scale": jnp.ones(WIDTH)}})
    other = replace(other, apply=lambda params, inputs, leaves, *, key: (jnp.sum(inputs), jnp.float32(1)))
    refused([*tied[:2], other], r"float32\[11,8\] in one and float32\[3\] in the other", graph=None)
    frozen = PipelineGraph(3, 1, (Edge(0, 1, carries_gradient=False), Edge(1, 2)), shared=((0, 2),))
    refused(tied, "a gradient reaches only one of them", graph=frozen)
