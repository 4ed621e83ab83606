"""What the backend says of programs: the keys that are read, and doing without."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.programs.program_text import ProgramMemory, memory_of, optimal_s


@pytest.fixture(scope="module")
def program() -> Any:
    spec = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    return jax.jit(lambda a, b: jnp.sin(a @ b) @ b).lower(spec, spec).compile()


def test_the_keys_are_there(program: Any) -> None:
    """JAX may change them; then :mod:`rrfp_jax.programs.program_text` is to follow."""
    memory = memory_of(program)
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


def _said(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class Sizes:
    temp_size_in_bytes, argument_size_in_bytes, output_size_in_bytes = 1, 2, 3


@pytest.mark.parametrize(
    ("cost", "found"),
    [
        ([{"optimal_seconds": 2.0}], 2.0),
        ({"optimal_seconds": -1.0}, None),
        ({}, None),
        ([], None),
        (None, None),
        (NotImplementedError(), None),
        (RuntimeError("unimplemented"), None),
    ],
)
def test_times_may_be_missing_or_in_a_list(cost: Any, found: float | None) -> None:
    assert optimal_s(Answers(cost, None)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "found"), [(Sizes(), ProgramMemory(1, 2, 3)), (object(), None), (None, None), (RuntimeError(), None)]
)
def test_memory_may_be_missing(memory: Any, found: ProgramMemory | None) -> None:
    assert memory_of(Answers(None, memory)) == found  # type: ignore[arg-type]
