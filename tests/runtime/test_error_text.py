"""What is told of an exception that ends a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.runtime import TaskFailed
from rrfp_jax.runtime.failure import error_text
from tests.test_pipeline import Host, make_batch


def explode(value: np.ndarray) -> np.ndarray:
    raise KeyError("no such word\nin the vocabulary")


def test_what_a_host_function_raises_is_told_as_it_was_raised() -> None:
    call = jax.jit(lambda x: jax.pure_callback(explode, jax.ShapeDtypeStruct((2,), jnp.float32), x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call(jnp.ones(2)))
    lines = error_text(caught.value).splitlines()
    assert lines[0].startswith("KeyError: 'no such word")
    assert __file__ in lines[-1]
    assert lines[-1].endswith("in explode")
    assert len(lines) == 4


def test_an_exception_of_python_is_told_with_its_last_frames() -> None:
    def deep(levels: int) -> None:
        if not levels:
            raise ValueError("give more\nthan that")
        deep(levels - 1)

    with pytest.raises(ValueError, match="give more") as caught:
        deep(20)
    lines = error_text(caught.value).splitlines()
    assert lines[:2] == ["ValueError: give more", "than that"]
    assert 0 < sum(line.startswith("  File ") for line in lines) <= 3
    assert 'raise ValueError("give more' in lines[-2] + lines[-1]


def test_a_text_of_megabytes_is_cut() -> None:
    text = error_text(ValueError("x" * 5_000_000))
    assert len(text) < 2_100
    assert text.endswith("(4,998,012 more letters)")


def test_a_failed_task_is_told_in_the_report_without_escapes() -> None:
    with Host().pipeline(explode) as pipeline:
        state = pipeline.init(jax.random.key(0))
        _, metrics = pipeline.step(state, make_batch())
        with pytest.raises(TaskFailed) as caught:
            metrics.result()
    summary = str(caught.value)
    assert summary.startswith("step 0: 0F0 on stage 0 failed: KeyError: 'no such word")
    assert "\\n  File" not in summary
    assert "JaxRuntimeError" not in summary
    assert len(summary) < 2_500


def test_an_exception_whose_text_cannot_be_made_is_named_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    text = error_text(Unspeakable())
    assert "Unspeakable: <exception str() failed>" in text
