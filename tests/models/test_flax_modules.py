"""Flax modules of one's own as chunks: names, initial values, kinds, modes, and refusals."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

from rrfp_jax import Pipeline, linear
from rrfp_jax.models import chunk_from_linen, chunk_from_nnx, split_nnx
from rrfp_jax.programs.chunk import Chunk, param_specs
from tests.flax_models import (
    WIDTH,
    Block,
    LinenBlock,
    LinenPart,
    Transformer,
    cut_model,
    linen_chunks,
    make_batches,
    nnx_chunks,
    weighted_loss,
)

X = jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32)
WORDS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


def outputs(chunk: Chunk, inputs: Any = X, **leaves: Any) -> Any:
    """The shapes of what a chunk computes."""

    def apply(params: Any, inputs: Any, leaves: Any) -> Any:
        return chunk.apply(params, inputs, leaves, key=jax.random.key(0))

    return jax.eval_shape(apply, param_specs(chunk), inputs, leaves)


def test_a_cut_changes_no_names() -> None:
    model = nnx.eval_shape(lambda: Transformer(rngs=nnx.Rngs(0)))
    for num_chunks in (1, 2, 4):
        chunks = nnx_chunks(num_chunks=num_chunks)
        names = [list(param_specs(chunk)) for chunk in chunks]
        assert sorted({name for own in names for name in own}) == [
            *(f"blocks.{n}" for n in range(4)),
            "embedding",
            "norm",
            "positions",
        ]
        assert [chunk.leaves for chunk in chunks][-1][-2:] == ("targets", "weights")
    assert [chunk.name for chunk in chunks] == [
        "embedding, positions, layer 0",
        "layer 1",
        "layer 2",
        "layer 3, norm, head",
    ]
    # the head has the embedding's parameter, so its chunk holds a copy
    assert [set(chunk.shared) for chunk in chunks] == [{"embedding"}, set(), set(), {"embedding"}]
    assert names[-1] == ["blocks.3", "embedding", "norm"]
    assert param_specs(chunks[1])["blocks.1"]["query"]["kernel"].shape == model.blocks[1].query.kernel.shape
    assert chunks[1].own.kind == chunks[2].own.kind, "equal blocks share their programs"


def test_another_generator_of_random_numbers_makes_other_values() -> None:
    chunk = nnx_chunks(num_chunks=4)[1]
    made = [chunk.init(jax.random.key(0, impl=impl))["blocks.1"]["query"]["kernel"] for impl in ("threefry2x32", "rbg")]
    model = Transformer(rngs=nnx.Rngs(jax.random.key(0, impl="rbg")))
    np.testing.assert_allclose(made[1], model.blocks[1].query.kernel[...], rtol=1e-6)
    assert (made[0] != made[1]).any()


def test_a_module_with_arrays_keeps_them() -> None:
    model = Transformer(rngs=nnx.Rngs(7))
    chunks = nnx_chunks(model, 2)
    made = chunks[1].init(jax.random.key(0))
    np.testing.assert_array_equal(made["blocks.3"]["query"]["kernel"], model.blocks[3].query.kernel[...])
    np.testing.assert_array_equal(made["embedding"]["embedding"], model.embedding.embedding[...])


def test_metadata_become_the_partition() -> None:
    for chunk, layer in ((nnx_chunks(cut_model)[1], "blocks.1"), (linen_chunks(is_cut=True)[1], "blocks.1")):
        assert chunk.partition is not None
        params = param_specs(chunk)
        cut = chunk.partition(params, {"tensor": 2})[layer]
        assert cut["value" if "value" in cut else "up"]["kernel"] == PartitionSpec(None, "tensor")
        assert cut["output"]["kernel"] == PartitionSpec("tensor", None)
        whole = chunk.partition(params, {"context": 2})[layer]["output"]["kernel"]
        assert whole == PartitionSpec(None, None), "an axis of one device"
    assert nnx_chunks()[1].partition is None


def test_dropout_goes_by_key_and_path_and_stops_in_evaluations() -> None:
    one, other = nnx_chunks()[1:3]
    params, x = one.init(jax.random.key(0)), np.ones(X.shape, np.float32)
    same = {"blocks.2": params["blocks.1"]}
    outputs = [
        np.asarray(chunk.apply(own, x, {}, key=key))
        for chunk, own, key in (
            (one, params, jax.random.key(1)),
            (one, params, jax.random.key(1)),
            (one, params, jax.random.key(2)),
            (other, same, jax.random.key(1)),
            (one, params, None),
            (other, same, None),
        )
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[4], outputs[5])
    assert all((outputs[0] != outputs[n]).any() for n in (2, 3, 4))


def test_a_layer_that_all_blocks_have_is_shared() -> None:
    class Rotating(nnx.Module):
        def __init__(self, shared: nnx.Linear) -> None:
            self.shared = shared

        def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
            return self.shared(x) + bias

    class Shared(Transformer):
        def __init__(self, rngs: nnx.Rngs) -> None:
            linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            super().__init__(rngs, block=lambda rngs: Rotating(linear))

    chunks = nnx_chunks(Shared, 2)
    assert [list(param_specs(chunk)) for chunk in chunks] == [
        ["embedding", "positions", "blocks.0"],
        ["blocks.0", "embedding", "norm"],
    ]
    assert [chunk.leaves for chunk in chunks] == [("tokens", "bias"), ("bias", "targets", "weights")]
    assert chunks[0].shared == chunks[1].shared == {"embedding", "blocks.0"}


def test_a_chunk_of_a_module_names_its_layers_behind_a_prefix() -> None:
    chunk = chunk_from_nnx(lambda rngs: Transformer(rngs, num_blocks=2), Transformer.embed, name="a", prefix="vision.")
    assert list(param_specs(chunk)) == [
        f"vision.{own}" for own in ("blocks.0", "blocks.1", "embedding", "norm", "positions")
    ]
    one, other = (
        chunk_from_nnx(lambda rngs: nnx.Sequential(nnx.Linear(3, 3, rngs=rngs)), name="b", prefix=prefix)
        for prefix in ("x.", "y.")
    )
    params = one.init(jax.random.key(0))
    assert list(params) == ["x.layers.0"]
    assert (params["x.layers.0"]["kernel"] != other.init(jax.random.key(0))["y.layers.0"]["kernel"]).any()
    assert one.apply(params, np.ones((2, 3), np.float32), {}).shape == (2, 3)
    first = chunk_from_linen(linen.Dense(3), name="c", leaves={"inputs": jnp.ones((2, 4))}, prefix="c.")
    params = first.init(jax.random.key(0))
    assert first.apply(params, None, {"inputs": jnp.ones((2, 4))}).shape == (2, 3)
    assert params["c.kernel"].shape == (4, 3)


# -- refusals ----------------------------------------------------------------------------------------------------------


class WithStatistics(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.batch_norm = nnx.BatchNorm(WIDTH, rngs=rngs)


class WithArray(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.scale = jnp.ones(3)


class Explicit(Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.query(x, out_sharding=PartitionSpec("tensor"))


class Keeping(Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen = nnx.Cache(x)
        return x


def transformer_of(block: Any) -> Any:
    return partial(Transformer, block=block)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (5, {}, "model is 5 .*give a Module or a function"),
        (LinenBlock(), {}, "takes an nnx.Module.*: give it to chunk_from_linen"),
        (lambda rngs: 5, {}, "takes an nnx.Module, or a function that makes one, and got 5 "),
        (lambda: 5, {}, "with rngs alone .*lambda rngs: Model"),
        (nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))), {}, "is a shape alone: give the function that makes"),
        (transformer_of(WithStatistics), {}, "blocks.0.batch_norm.mean is an nnx.BatchStat, state .*put LayerNorm"),
        (transformer_of(WithArray), {}, "blocks.0.scale is an array that JAX made .*constant with NumPy"),
        (Transformer, {"layers": "layers"}, "no layers 'layers', as Transformer has no .*: name the path .*blocks"),
        (Transformer, {"layers": "decoder.blocks"}, "as Transformer has no 'decoder'"),
        (Transformer, {"layers": "norm"}, "'norm' is of type LayerNorm: name a list of blocks"),
        (partial(Transformer, num_blocks=0), {}, "the list 'blocks' has no blocks"),
        (transformer_of(lambda rngs: nnx.Param(jnp.ones(3))), {}, "blocks.0 is Param: let the list hold"),
        (Transformer, {"first_holds": "embedding"}, "first_holds is 'embedding' .*give a list"),
        (Transformer, {"first_holds": ["embedded"]}, "first_holds has 'embedded', .*name one of embedding, head, norm"),
        (Transformer, {"first_holds": []}, "first_holds is empty"),
        (Transformer, {"last_holds": ["head"]}, "neither end holds the layer 'norm': name it in"),
        (Transformer, {"num_chunks": 3}, "4 layers do not cut into 3 equal chunks"),
        (Transformer, {"num_chunks": None, "layers_per_chunk": [2.5, 1.5]}, "layers_per_chunk is .*whole numbers"),
    ],
)  # fmt: skip
def test_an_nnx_model_that_cannot_be_cut_is_refused(model: Any, options: dict[str, Any], words: str) -> None:
    given = {
        "layers": "blocks",
        "num_chunks": 2,
        "first": Transformer.embed,
        "first_holds": ["embedding", "positions"],
        "last": Transformer.loss,
        "last_holds": ["norm", "head"],
    }
    with pytest.raises(ValueError, match=words):
        split_nnx(model, **(given | options))


class Reading(Transformer):
    def read(self, x: Any, targets: Any, weights: Any) -> Any:
        return weighted_loss(self.embedding.attend(self.norm(x)), targets, weights)


def test_a_module_that_does_not_fit_is_refused_where_it_is_called() -> None:
    ends = {"first": Reading.embed, "first_holds": ["embedding", "positions"]}
    ends |= {"last": Reading.read, "last_holds": ["norm", "head"]}
    with pytest.raises(ValueError, match="last reads the layer 'embedding': name it in last_holds"):
        outputs(
            split_nnx(Reading, layers="blocks", num_chunks=1, **ends)[0], None, tokens=WORDS, targets=WORDS, weights=X
        )
    with pytest.raises(ValueError, match="Auto, not Explicit: leave it out"):
        outputs(nnx_chunks(transformer_of(Explicit))[1])
    with pytest.raises(ValueError, match="makes the variable seen of Keeping, which nobody could read"):
        outputs(nnx_chunks(transformer_of(Keeping))[1])


class LinenStatistics(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=False)(x)


class Sowing(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("losses", "own", x.sum())
        return linen.Dense(3)(x)


@pytest.mark.parametrize(
    ("module", "inputs", "words"),
    [
        (Transformer, X, "takes a flax.linen.Module, .*give"),
        (Block(nnx.Rngs(0)), X, "takes a flax.linen.Module, .*give it to chunk_from_nnx"),
        (LinenStatistics(), X, "has BatchNorm_0.mean in its collection 'batch_stats', state that .*put LayerNorm"),
        (Sowing(), X, "has own.0 in its collection 'losses', .*return values in place of sow"),
        (linen.Dense(3), None, "chunk 'own' cannot be initialised: .*give `run` and the inputs"),
        (linen.Dense(3), 3, "have 3 .*give jax.ShapeDtypeStruct"),
    ],
)
def test_a_linen_module_that_cannot_be_a_chunk_is_refused(module: Any, inputs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chunk_from_linen(module, name="own", inputs=inputs)


def test_layers_of_one_name_and_wrong_axes_are_refused() -> None:
    from tests.pipelines import make_pipeline

    first, last = linen_chunks(2)
    part = LinenPart(range(1), is_first=False, is_last=False)
    twice = chunk_from_linen(part, LinenPart.__call__, name="again", inputs=X)
    pipeline = Pipeline([first, twice, last], placement=linear(3), optimizer=optax.sgd(0.1))
    pipeline.init(jax.random.key(0))
    (batch,) = make_batches(1)
    with pytest.raises(ValueError, match=r"both hold a layer named 'blocks.0': rename one"):
        pipeline.prepare(batch)
    cut = partial(Transformer, block=Cut)
    with pytest.raises(ValueError, match=r"cannot cut its parameter .*over tensor 2: name axes of the mesh"):
        make_pipeline(nnx_chunks(cut), placement=linear(4), optimizer=optax.sgd(0.1), tensor=2).init(jax.random.key(0))


class Cut(Block):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        init = nnx.with_partitioning(nnx.initializers.ones, ("model", None))
        self.query = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=rngs)
