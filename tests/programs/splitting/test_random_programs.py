"""The split is exact, repeats nothing and stores nothing needless on random programs."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.programs.splitting import split_backward
from tests.programs.splitting.checks import check_split
from tests.programs.splitting.flops import dot_flops, fused_work, split_work
from tests.programs.splitting.random_programs import Program, make_example, programs


def check_gradients(program: Program, seed: int, first_chunk: bool, prepared: bool) -> None:
    with jax.enable_x64(True):
        tolerance = 1e-5 if "half" in repr(program) else 1e-12
        check_split(make_example(program, seed, first_chunk=first_chunk), tolerance, prepared=prepared)


@settings(max_examples=6)
@given(programs(), st.integers(0, 99), st.booleans(), st.booleans())
def test_gradients(program: Program, seed: int, first_chunk: bool, prepared: bool) -> None:
    check_gradients(program, seed, first_chunk, prepared)


@pytest.mark.slow
@settings(max_examples=100)
@given(programs(depth=3), st.integers(0, 99), st.booleans(), st.booleans())
def test_gradients_of_many_programs(program: Program, seed: int, first_chunk: bool, prepared: bool) -> None:
    check_gradients(program, seed, first_chunk, prepared)


@settings(max_examples=15)
@given(programs(), st.booleans())
def test_work_and_bytes(program: Program, first_chunk: bool) -> None:
    """No matrix product twice; a residuals of at most what jax.vjp keeps, without what parameters alone determine."""
    example = make_example(program, 0, first_chunk=first_chunk)
    split = split_backward(*example)
    report = split.report
    assert report.residual_bytes <= report.vjp_bytes - report.fixed_vjp_bytes
    if "merged" not in repr(program):
        assert sum(split_work(dot_flops, split, example)) <= fused_work(dot_flops, example)
