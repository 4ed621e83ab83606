"""Functions and traced programs are the same only where one can stand for the other."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.programs.compiling import shared_program
from rrfp_jax.programs.sameness import ProgramStore, identity, program_identity


def scaled(factor: Any) -> Any:
    return lambda x: x * factor


@dataclass(frozen=True)
class Scale:
    factor: float
    note: str = field(default="", compare=False)

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Layer:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: Any) -> Any:
        return x * self.factor


def recursive(depth: int) -> Any:
    def descend(x: Any) -> Any:
        return x if depth == 0 else descend(x)

    return descend


LAYER, TABLE = Layer(2.0), np.arange(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: scaled(2.0),
        lambda: scaled((1, {"a": [2.5]})),
        lambda: scaled(np.float32(2.0)),
        lambda: scaled(np.arange(3)),
        lambda: partial(scaled(2.0), y=1),
        lambda: Scale(2.0),
        lambda: LAYER.apply,
        lambda: recursive(2),
        lambda: optax.adamw(1e-3),
        lambda: frozenset({"a", "b"}),
        lambda: range(3),
    ],
)
def test_made_anew_it_is_the_same(make: Any) -> None:
    assert identity(make()) == identity(make())
    assert hash(identity(make())) == hash(identity(make()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(2.0), scaled(3.0)),
        (scaled(1), scaled(1.0)),
        (scaled(0.0), scaled(-0.0)),
        (scaled(True), scaled(1)),
        (scaled(np.arange(3)), scaled(np.arange(3.0))),
        (scaled(np.arange(3)), scaled(np.arange(1, 4))),
        (scaled(np.zeros(5000)), scaled(np.zeros(5000))),  # too large to look at
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x, y=1: x, lambda x, y=2: x),
        (lambda x, *, y=1: x, lambda x, *, y=2: x),
        (partial(scaled(2.0), y=1), partial(scaled(2.0), y=2)),
        (Scale(2.0), Scale(3.0)),  # whatever its own == says
        (Scale(2.0, "a"), Scale(2.0, "b")),
        (Layer(2.0).apply, Layer(2.0).apply),  # may change
        (optax.adamw(1e-3), optax.adamw(2e-3)),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (recursive(2), recursive(3)),
    ],
)
def test_what_differs_is_not_the_same(one: Any, other: Any) -> None:
    assert identity(one) != identity(other)


def trace(function: Any, *shape: int) -> Any:
    return program_identity(jax.make_jaxpr(function)(jnp.zeros(shape)))


def test_programs_that_compute_the_same_are_the_same() -> None:
    def doubled(x: Any) -> Any:
        y = jnp.where(x > 0, x, 0)
        return jax.lax.scan(lambda c, z: (c + z, c), 0.0, y * 2)

    assert trace(doubled, 3) == trace(partial(doubled), 3)
    assert trace(doubled, 3) != trace(doubled, 4)
    assert trace(lambda x: x * 2, 3) != trace(lambda x: x * 3, 3)
    assert trace(lambda x: x * TABLE, 3) == trace(lambda x: x * TABLE.copy(), 3)
    assert trace(lambda x: x * TABLE, 3) != trace(lambda x: x * (TABLE + 1), 3)
    assert trace(lambda x: x - x.T, 2, 2) != trace(lambda x: x.T - x, 2, 2)
    assert trace(lambda x: (x, -x), 3) != trace(lambda x: (-x, x), 3)


def test_an_optimizer_that_goes_by_names_is_compiled_for_each_behaviour() -> None:
    """Its trace decides, not its identity: here layers of even number do not learn."""

    def learns(params: Any) -> Any:
        return {name: int(name[-1]) % 2 == 1 for name in params}

    optimizer, store = optax.masked(optax.scale(2.0), learns), ProgramStore()
    at = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made = []
    for number in (1, 3, 2):
        grads = {f"layers.{number}": jnp.ones(2)}
        program = shared_program(
            store,
            "update",
            lambda grads: optimizer.update(grads, optimizer.init(grads))[0],
            jax.eval_shape(lambda grads=grads: grads),
            in_shardings=(at,),
            out_shardings=at,
        )
        made.append(program.compiled)
        assert program(grads)[f"layers.{number}"].tolist() == ([2, 2] if number % 2 else [1, 1])
    assert made[0] is made[1]
    assert made[0] is not made[2]
    with pytest.raises(TypeError, match="compiled for arguments"):
        program({"layers.9": jnp.ones(2)})


def test_the_first_makes_for_all_and_fails_for_all() -> None:
    store, calls = ProgramStore(), []

    def fail() -> None:
        calls.append(1)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            store.get("key", fail)
    assert len(calls) == 1
    assert store.get("other", lambda: 3) == (3, True)
    assert store.get("other", fail) == (3, False)


def test_sums_over_the_axes_of_a_mesh_are_the_same_for_each_trace() -> None:
    """Naming an axis is no effect on anything outside of the program."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))

    def traced() -> Any:
        def summed(x: Any) -> Any:
            return jax.lax.psum(x, "data")

        whole = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(summed, mesh=mesh, in_specs=(whole,), out_specs=whole, check_vma=False)
        return jax.make_jaxpr(mapped)(np.ones(3, np.float32))

    assert program_identity(traced()) == program_identity(traced())
