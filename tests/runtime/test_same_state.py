"""Copies of parameters and optimizer states that start from other bits are refused by name, before anything runs."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.runtime import consistency
from rrfp_jax.runtime.consistency import sum_on_host, sums_on_device
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline

BATCH = {"x": np.ones((4, 2, 8), np.float32)}


def drawn(generator: np.random.Generator, *names: str) -> Any:
    """An ``init`` that draws from a generator of NumPy, as user code may, at each of its traces anew."""

    def init(key: jax.Array) -> dict[str, Any]:
        return {name: {"kernel": generator.normal(size=(8, 8)).astype(np.float32)} for name in names}

    return init


def first(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    return leaves["x"] @ params["first"]["kernel"]


def last(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    loss = jnp.sum((inputs @ params["last"]["kernel"]) ** 2)
    return loss, jnp.float32(inputs.size)


def cut_kernels(params: Any, axes: Any) -> Any:
    return jax.tree.map(lambda _: PartitionSpec("tensor"), params)


def two_chunks(**of_last: Any) -> list[Chunk]:
    """Two stages, of which the second one's parameters differ from copy to copy."""
    seeded, unseeded = drawn_once("first"), drawn(np.random.default_rng(0), "last")
    return [
        Chunk(name="one", init=seeded, apply=first, leaves=("x",)),
        Chunk(name="two", **{"init": unseeded, "apply": last, **of_last}),
    ]


def drawn_once(*names: str) -> Any:
    values = drawn(np.random.default_rng(1), *names)(jax.random.key(0))
    return lambda key: values


def refusal(chunks: list[Chunk], **options: Any) -> str:
    options = {"placement": linear(len(chunks)), "optimizer": optax.adam(0.1), **options}
    with make_pipeline(chunks, **options) as pipeline:
        state = pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match="all copies must start from the same bits") as caught:
            pipeline.step(state, BATCH)
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"data": 2},
        {"data": 4, "shard_optimizer": True},
        {"data": 2, "tensor": 2},
        {"data": 2, "mesh": {"fsdp": 2}, "shard_optimizer": True},
    ],
    ids=str,
)
def test_replicas_that_draw_other_values_are_refused(options: dict[str, Any]) -> None:
    said = refusal(two_chunks(), **options)
    assert said.startswith(
        "stage 1: layer 'last', parameter ['kernel'] differs between chunk 1 of replica 0 on rank 0 ("
    ), said
    assert "and chunk 1 of replica 1 on rank 0 (" in said


def test_frozen_layers_and_cut_ones_are_compared_too() -> None:
    assert "layer 'last'" in refusal(two_chunks(frozen=["last"]), data=2)
    assert "layer 'last'" in refusal(two_chunks(partition=cut_kernels), data=2, tensor=2)


@pytest.mark.parametrize("options", [{}, {"tensor": 2}, {"data": 2}], ids=str)
def test_tied_copies_that_differ_are_refused(options: dict[str, Any]) -> None:
    unseeded = drawn(np.random.default_rng(0), "both")
    chunks = [
        Chunk(name="one", init=unseeded, apply=lambda p, i, b, *, key: b["x"] @ p["both"]["kernel"], leaves=("x",)),
        Chunk(name="two", init=unseeded, apply=lambda p, i, b, *, key: last({"last": p["both"]}, i, b, key=key)),
    ]
    partition = cut_kernels if "tensor" in options else None
    said = refusal([replace(chunk, shared=frozenset({"both"}), partition=partition) for chunk in chunks], **options)
    assert said.startswith("tied layer 'both': parameter ['kernel'] differs between"), said


@pytest.mark.parametrize("of_numpy", [False, True])
def test_an_optimizer_state_that_was_restored_unlike_another_is_refused(*, of_numpy: bool) -> None:
    chunks = two_chunks(init=drawn_once("last"))
    options: dict[str, Any] = {"placement": linear(2), "optimizer": optax.adam(0.1), "data": 2}
    with make_pipeline(chunks, **options) as pipeline:
        states = [state for _, state in pipeline.chunk_states(pipeline.init(jax.random.key(0)))]
        change = np.asarray if of_numpy else lambda leaf: leaf  # type: ignore[var-annotated]
        states[-1].optimizer_state = jax.tree.map(lambda leaf: change(leaf + 1), states[-1].optimizer_state)
    with make_pipeline(chunks, **options) as pipeline:
        state = pipeline.restore(states, 5)
        with pytest.raises(ValueError, match=r"optimizer state of chunk 1 \(two\), \[0\]\[0\].count differs between"):
            pipeline.step(state, BATCH)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "float8_e4m3fn", "complex64"]
)
def test_a_device_and_the_host_find_the_same_sum(dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(6, 5)) * 3
    array = jnp.asarray(values + 1j * values if dtype == "complex64" else values).astype(dtype)
    (on_device,) = sums_on_device([array])
    assert int(on_device) == sum_on_host(np.asarray(array))


def test_a_sum_sees_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    swapped, flipped = values.copy(), values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    flipped[3, 3] = np.nextafter(flipped[3, 3], np.float32(9))
    sums = [sum_on_host(each) for each in (values, swapped, flipped, -values, np.zeros_like(values))]
    assert len(set(sums)) == len(sums)
    monkeypatch.setattr(consistency, "_BLOCK", 7)
    assert sum_on_host(values) == sums[0]
