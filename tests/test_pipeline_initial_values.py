"""Initial values of chunks of one's own: every layer has a random key of its own, wherever the model is cut."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.schedules import linear

WIDTH = 4


def weights(*names: str) -> Any:
    """As one writes it who does not think of keys: one draw of one shape for every layer."""
    return lambda key: {name: jax.random.normal(key, (WIDTH, WIDTH)) for name in names}


def layers(*names: str, init: Any = None, shared: Sequence[str] = (), last: bool = False) -> Chunk:
    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        value = leaves["x"] if inputs is None else inputs
        for name in names:
            value = jnp.tanh(value @ params[name])
        return (jnp.sum(value**2), jnp.float32(1)) if last else value

    return Chunk(name="mlp", init=init or weights(*names), apply=apply, leaves=("x",), shared=frozenset(shared))


def initial(*chunks: Chunk) -> dict[str, Any]:
    pipeline = Pipeline(chunks, placement=linear(len(chunks)), optimizer=optax.sgd(0.1))
    return jax.tree.map(np.array, pipeline.params(pipeline.init(jax.random.key(3))))


def test_layers_of_equal_shapes_start_from_different_values() -> None:
    params = initial(layers("a"), layers("b", "c"), layers("d", last=True))
    values = [params[name].tobytes() for name in "abcd"]
    assert len(set(values)) == 4


def test_initial_values_do_not_depend_on_the_cut_and_are_what_init_returns() -> None:
    first, second, last = layers("a"), layers("b", "c"), layers("d", last=True)
    params = initial(first, second, last)

    def both(key: jax.Array) -> Any:
        return first.init(key) | second.init(key)

    cut_otherwise = initial(layers("a", "b", "c", init=both), last)
    alone = model_params(chunk.init(jax.random.key(3)) for chunk in (first, second, last))
    for other in (cut_otherwise, alone):
        assert other.keys() == params.keys()
        for name, value in params.items():
            np.testing.assert_array_equal(other[name], value)


def test_tied_layers_start_equal() -> None:
    chunks = layers("a", "table", shared=["table"]), layers("b", "table", shared=["table"], last=True)
    pipeline = Pipeline(chunks, placement=linear(2), optimizer=optax.sgd(0.1))
    (_, one), (_, other) = pipeline.chunk_states(pipeline.init(jax.random.key(3)))
    np.testing.assert_array_equal(one.params["table"], other.params["table"])
    assert not np.array_equal(one.params["a"], other.params["b"])


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_the_library_s_models_keep_their_initial_values(num_chunks: int) -> None:
    config = LanguageModelConfig(vocab_size=32, hidden=8, num_layers=2, num_heads=2, mlp_dim=16)
    params = initial(*language_model(config).split(num_chunks))
    largest = {
        name: max(np.abs(leaf).max() for leaf in jax.tree.leaves(params[name])) for name in ("embedding", "head")
    }
    assert largest == pytest.approx({"embedding": 0.058485065, "head": 0.058125194}, rel=1e-6)
