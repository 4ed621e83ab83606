"""Attention as layers call it, compiled for an accelerator: it is one kernel, over any mesh, and never a matrix of all
pairs of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from rrfp_jax.costs.devices import CUDA, Device
from rrfp_jax.models.attention import causal_attention, full_attention
from rrfp_jax.programs.program_text import ProgramText
from rrfp_jax.programs.target import Target, devices_for, tracing_for

CALLS: list[dict[str, Any]] = [
    *({"axes": {"tensor": tensor}, "kv_heads": kv_heads} for tensor in (2, 8) for kv_heads in (1, 2, 8)),
    {"axes": {"tensor": 2, "fsdp": 2}, "kv_heads": 1, "is_packed": True},
    {"head_dim": 64, "is_packed": True},
    {"head_dim": 256},
    {"length": 257, "heads": 4, "kv_heads": 4, "head_dim": 80, "is_causal": False},
    {"length": 1025, "heads": 5, "kv_heads": 5, "axes": {"tensor": 2}, "is_causal": False, "is_packed": True},
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_attention_is_a_kernel_and_holds_no_pairs_of_tokens(target: Device, call: dict[str, Any]) -> None:
    length = call.get("length", 1536)
    text = ProgramText(compiled_for(target.name, **{**call, "length": length}))
    kernels = sorted(text.attention)
    wanted = ["fmhaSoftmax", "fmhaSoftmaxBackward"] if target.kind == CUDA else ["tpu_custom_call"]
    assert [name.removeprefix("__cudnn$") for name in kernels] == wanted
    assert not text.arrays_with(length)


def compiled_for(
    name: str,
    *,
    length: int,
    axes: dict[str, int] | None = None,
    heads: int = 16,
    kv_heads: int = 2,
    head_dim: int = 128,
    is_causal: bool = True,
    is_packed: bool = False,
) -> str:
    """The text of attention with its gradients, on arrays that are cut as a stage cuts them."""
    axes = axes or {"tensor": 1}
    devices = devices_for(name, int(np.prod([*axes.values()])))
    mesh = Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
    rows = "fsdp" if "fsdp" in axes else None

    def lies(num_heads: int) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(rows, None, "tensor" if num_heads % axes["tensor"] == 0 else None))

    def spec(num_heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, length, num_heads, head_dim), jnp.bfloat16, sharding=lies(num_heads))

    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(rows)))
    arguments = (spec(heads), spec(kv_heads), spec(kv_heads), *((ids,) if is_packed else ()))
    attention = causal_attention if is_causal else full_attention

    def with_gradients(query: Any, key: Any, value: Any, segments: Any = None) -> Any:
        mixed, pullback = jax.vjp(lambda *heads: attention(*heads, segments=segments), query, key, value)
        return mixed, pullback(mixed)

    with tracing_for(Target.of(devices[0])), use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(with_gradients)(*arguments)
    program = jax.jit(lambda *arrays: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays))
    return program.lower(*arguments).compile().as_text()
