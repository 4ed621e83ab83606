"""While a pipeline compiles, it tells how many of its programs are done."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline

BATCH = {"x": np.ones((2, 1, 4), np.float32)}


def chunk(index: int, *, shared: bool) -> Chunk:
    """The weight is cast, which costs work and is done once per update, by a program of its own."""

    def init(key: jax.Array) -> dict[str, Any]:
        own = {f"layer_{index}": jax.random.normal(jax.random.fold_in(key, index), (4, 4))}
        return own | ({"tied": jnp.ones(4)} if shared else {})

    def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
        value = leaves["x"] if index == 0 else inputs
        value = (value @ params[f"layer_{index}"].astype(jnp.bfloat16)).astype(jnp.float32)
        value = value * params["tied"] if shared else value
        return value if index == 0 else (jnp.sum(value**2), jnp.float32(2))

    leaves = ("x",) if index == 0 else ()
    return Chunk(name=f"chunk {index}", init=init, apply=apply, leaves=leaves, shared=("tied",) if shared else ())


@pytest.mark.parametrize(
    ("shared", "options"),
    [
        (False, {}),
        (True, {"backward": "split", "hint": "bfw"}),
        (True, {"data": 2}),
        (False, {"data": 2, "shard_optimizer": True}),
    ],
)
def test_every_program_is_announced_and_then_counted(
    shared: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    lowered = jax.stages.Lowered.compile

    def compile_and_note(self: Any, *arguments: Any, **more: Any) -> Any:
        compiled.append("a program")
        return lowered(self, *arguments, **more)

    told: list[tuple[int, int]] = []
    chunks = [chunk(0, shared=shared), chunk(1, shared=shared)]
    with make_pipeline(chunks, placement=linear(2), optimizer=optax.sgd(0.1), **options) as pipeline:
        pipeline.init(jax.random.key(0))
        with monkeypatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", compile_and_note)
            pipeline.prepare(BATCH, progress=lambda *numbers: told.append(numbers))
        assert told == [(done, len(compiled)) for done in range(len(compiled) + 1)]
        assert len(told) > 8
        twin = pipeline.reordered(Ordering(backward=options.get("backward")))
        twin.init(jax.random.key(0))
        with twin:
            twin.prepare(BATCH, progress=lambda *_: pytest.fail("these programs are compiled already"))
