"""What the backend says of programs: the keys that are read, and doing without."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.programs.analysis import ProgramCost, ProgramMemory, cost_of, memory_of


@pytest.fixture(scope="module")
def program() -> Any:
    spec = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    return jax.jit(lambda a, b: jnp.sin(a @ b) @ b).lower(spec, spec).compile()


def test_the_keys_are_there(program: Any) -> None:
    """JAX may change them; then :mod:`rrfp_jax.programs.analysis` is to follow."""
    cost, memory = cost_of(program), memory_of(program)
    assert cost is not None
    assert cost.flops == pytest.approx(2 * 2 * 32**3, rel=0.05)
    assert cost.bytes_accessed >= 3 * 32 * 32 * 4
    assert memory is not None
    assert (memory.arguments, memory.outputs) == (2 * 32 * 32 * 4, 32 * 32 * 4)
    assert memory.temporaries >= 32 * 32 * 4


class Answers:
    """A program of a backend that says this."""

    def __init__(self, cost: Any, memory: Any) -> None:
        self._cost, self._memory = cost, memory

    def cost_analysis(self) -> Any:
        return _said(self._cost)

    def memory_analysis(self) -> Any:
        return _said(self._memory)

    def as_text(self) -> str:
        raise NotImplementedError


def _said(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class Sizes:
    temp_size_in_bytes, argument_size_in_bytes, output_size_in_bytes = 1, 2, 3


@pytest.mark.parametrize(
    ("cost", "found"),
    [
        ([{"flops": 1, "bytes accessed": 2}], ProgramCost(1.0, 2.0)),
        ({"flops": -1.0, "bytes accessed": 2}, None),
        ({"bytes accessed": 2}, None),
        ([], None),
        (None, None),
        (NotImplementedError(), None),
        (RuntimeError("unimplemented"), None),
    ],
)
def test_costs_may_be_missing_or_a_list(cost: Any, found: ProgramCost | None) -> None:
    assert cost_of(Answers(cost, None)) == found  # type: ignore[arg-type]


def test_the_text_tells_where_the_backend_does_not() -> None:
    class Text(Answers):
        def as_text(self) -> str:
            return (
                "ENTRY %main (a: f32[8]) -> f32[8] {\n  %a = f32[8]{0} parameter(0)\n  ROOT %b = f32[8]{0} sine(%a)\n}"
            )

    assert cost_of(Text(None, None)) == ProgramCost(0.0, 64.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "found"), [(Sizes(), ProgramMemory(1, 2, 3)), (object(), None), (None, None), (RuntimeError(), None)]
)
def test_memory_may_be_missing(memory: Any, found: ProgramMemory | None) -> None:
    assert memory_of(Answers(None, memory)) == found  # type: ignore[arg-type]
