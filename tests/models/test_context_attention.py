"""Attention over sequences cut over ``context`` is that of one device: values and gradients."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from rrfp_jax.models._context_attention import context_attention, gather_or_ring
from rrfp_jax.models.attention import causal_attention
from rrfp_jax.models.cuts import ContextCut, SequenceOrder


def on_devices(
    devices: int, length: int, *, kv_heads: int, window: int | None, packed: bool, attention: str, tensor: int
) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """Result and gradients as cut and as whole, in the order of the cut, and the text of the cut's jaxpr."""
    rng, shape = np.random.default_rng(0), (2, length, 4, 8)
    query, *arrays = (rng.normal(size=shape).astype(np.float32) for _ in range(4))
    key, value, outer = (*(each[:, :, :kv_heads] for each in arrays[:2]), arrays[2])
    segments = np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32) if packed else None
    order = SequenceOrder(devices, window)(length)
    mixed, pullback = jax.vjp(
        lambda *heads: causal_attention(*heads, window=window, segments=segments), query, key, value
    )
    whole = [np.asarray(each)[:, order] for each in (mixed, *pullback(outer))]

    mesh = Mesh(np.array(jax.devices()[: devices * tensor]).reshape(devices, tensor), ("context", "tensor"))
    cut = ContextCut(devices=devices, attention=attention)
    at = segments if segments is None else segments[:, order]

    def both(query: jax.Array, key: jax.Array, value: jax.Array, outer: jax.Array) -> tuple[jax.Array, ...]:
        mixed, pullback = jax.vjp(
            lambda *heads: context_attention(*heads, cut=cut, window=window, segments=at), query, key, value
        )
        return mixed, *pullback(outer)

    inputs = [each[:, order] for each in (query, key, value, outer)]
    with use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(both)(*inputs)
    lies = NamedSharding(mesh, PartitionSpec(None, "context", "tensor" if tensor > 1 else None))
    run = jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args), in_shardings=lies)
    return [np.asarray(each) for each in run(*inputs)], whole, str(jaxpr)


CASES = [
    (2, 16, {"attention": "gather"}),
    (4, 32, {"attention": "ring", "packed": True, "tensor": 2}),
    (4, 32, {"attention": "gather", "packed": True, "tensor": 2}),
    (4, 32, {"attention": "ring", "packed": True, "window": 5, "kv_heads": 1}),
    (4, 32, {"attention": "gather", "window": 5}),
    (4, 32, {"attention": "gather", "packed": True, "window": 12, "kv_heads": 1}),
    (4, 32, {"attention": "ring", "window": 25}),
    (4, 20, {"attention": "ring"}),
    (4, 20, {"attention": "gather", "packed": True}),
    (8, 64, {"attention": "ring", "kv_heads": 1}),
    (3, 18, {"attention": "ring"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "length", "options"), CASES, ids=str)
def test_cut_attention_is_that_of_one_device(devices: int, length: int, options: dict) -> None:  # type: ignore[type-arg]
    asked = {"kv_heads": 2, "window": None, "packed": False, "tensor": 1} | options
    cut, whole, text = on_devices(devices, length, **asked)
    assert ("ppermute" in text) == (options["attention"] == "ring")
    assert f",{length},{length}]" not in text  # no scores of all against all
    for one, other in zip(cut, whole, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


def test_without_its_mesh_it_is_computed_as_on_one_device() -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 8, 2, 4)).astype(np.float32) for _ in range(3))
    order = SequenceOrder(2, None)(8)
    cut = context_attention(*(each[:, order] for each in (query, key, value)), cut=ContextCut(devices=2))
    np.testing.assert_allclose(cut, causal_attention(query, key, value)[:, order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_device_holds_an_early_and_a_late_piece(devices: int) -> None:
    length = 8 * devices
    held = SequenceOrder(devices, None)(length).reshape(devices, -1)
    seen = [sum(position + 1 for position in own) for own in held]
    assert sorted(held.ravel()) == list(range(length))
    assert len(set(seen)) == 1


def test_positions_keep_their_order_where_that_is_less_work() -> None:
    """16 devices of 64 positions: balanced pieces make 33 pairs of half-shares, a near window 4 for each neighbour."""
    assert not SequenceOrder(16, 65).is_balanced(1024)
    assert SequenceOrder(16, 65).num_hops(1024) == 1
    assert not SequenceOrder(16, 7 * 64).is_balanced(1024)
    assert SequenceOrder(16, 8 * 64 + 1).is_balanced(1024)
    assert not SequenceOrder(4, None).is_balanced(20)
    assert list(SequenceOrder(4, None)(20)) == list(range(20))


@pytest.mark.parametrize(("context", "tensor", "chosen"), [(4, 1, "ring"), (4, 2, "gather"), (8, 2, "ring")])
def test_the_ring_is_taken_where_gathered_keys_are_larger_than_the_stream(
    context: int, tensor: int, chosen: str
) -> None:
    """8 of 32 heads: keys and values of one token are half as wide as the stream."""
    axes = AbstractMesh((context, tensor), ("context", "tensor")).shape
    assert gather_or_ring((1, 64, 32, 128), (1, 64, 8, 128), axes) == chosen


@pytest.mark.parametrize(
    ("options", "message"), [({"devices": 0}, "at least 1"), ({"attention": "no"}, "auto, gather")]
)
def test_what_is_no_cut_is_refused(options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        ContextCut(**{"devices": 2} | options)
