"""What is read from the text of compiled programs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rrfp_jax.programs.program_text import Moved, ProgramText, shape_bytes

# As XLA prints a program for a GPU, shortened: a product, attention, copies, an all-gather, a loop of three turns.
TEXT = """HloModule jit_f

%fused (p.0: f32[8,8]) -> f32[8,8] {
  %p.0 = f32[8,8]{1,0} parameter(0)
  ROOT %transpose.1 = f32[8,8]{0,1} transpose(%p.0), dimensions={1,0}
}

%gemm (p.1: bf16[4,6], p.2: bf16[6,8]) -> f32[4,8] {
  %p.1 = bf16[4,6]{1,0} parameter(0)
  %p.2 = bf16[6,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,8]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%turn (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %state = (s32[], f32[8,8]{1,0}) parameter(0)
  %element = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %copied = f32[8,8]{1,0} copy(%element)
  ROOT %next = (s32[], f32[8,8]{1,0}) tuple(%element, %copied)
}

ENTRY %main (a: bf16[4,6], b: bf16[6,8], c: f32[8,8]) -> (f32[4,8], f32[8,8]) {
  %a = bf16[4,6]{1,0} parameter(0)
  %b = bf16[6,8]{1,0} parameter(1)
  %c = f32[8,8]{1,0} parameter(2)
  %q = bf16[2,16,4,64]{3,2,1,0} custom-call(%a), custom_call_target="other"
  %product = f32[4,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm
  %turned = f32[8,8]{0,1} fusion(%c), kind=kLoop, calls=%fused
  %fmha = (bf16[2,16,4,64]{3,2,1,0}, u8[128]{0}) custom-call(%q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %start = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%product), replica_groups={{0,1,2,3}}, dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%start)
  %init = (s32[], f32[8,8]{1,0}) tuple(%c, %c)
  %loop = (s32[], f32[8,8]{1,0}) while(%init), body=%turn, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %result = (f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%product, %turned)
}
"""


def test_a_program_is_read_once_with_what_its_loops_do() -> None:
    text = ProgramText(TEXT)
    assert text.collectives == {"all-gather": Moved(1, 16 * 8 * 4)}
    shape = "(f32[4,8]{1,0}, f32[16,8]{1,0})"
    assert [*text.each_collective()] == [("all-gather", shape, ", replica_groups={{0,1,2,3}}, dimensions={0}")]
    assert text.attention == {"__cudnn$fmhaSoftmax": 1}, "and not the other custom call"
    assert text.copied_bytes == 8 * 8 * 4 * (1 + 3)  # the fusion that only turns, and a copy in each turn


@pytest.mark.parametrize(("place", "copied"), [("S(1)", 0), ("", 256)])
def test_an_array_read_ahead_into_on_chip_memory_is_no_copy(place: str, copied: int) -> None:
    start = f"%ahead = (f32[8,8]{{1,0:T(8,128){place}}}, f32[8,8]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) copy-start(%c)"
    before = ProgramText(TEXT).copied_bytes
    assert ProgramText(TEXT.replace("  %turned", f"  {start}\n  %turned")).copied_bytes == before + copied


def test_arrays_of_two_equal_lengths_are_found_where_they_leave_a_kernel() -> None:
    scores = TEXT.replace("%copied = f32[8,8]", "%copied = f32[2,8,8]")
    assert ProgramText(scores).arrays_with(8) == ["f32[2,8,8]"]
    assert ProgramText(TEXT).arrays_with(8) == []  # a matrix of parameters


def test_a_bound_takes_products_or_bytes_whichever_is_longer() -> None:
    text = ProgramText(TEXT)
    launches = 2e-6 * 7  # other, product, turned, fmha, and three copies
    products = 2 * 4 * 8 * 6 + 2 * 2 * 4 * 16**2 * 64  # cuDNN has [batch, length, heads, width]
    assert text.bound_s(flops=1.0, bytes_per_s=1e30) == pytest.approx(products + launches)
    assert text.bound_s(flops=1e30, bytes_per_s=1.0) == pytest.approx(text.touched_bytes + launches)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("bf16[2,3]{1,0}", 12), ("(f32[4]{0}, pred[8]{0}, s32[])", 16 + 8 + 4), ("f8e4m3fn[16]{0}", 16), ("token[]", 0)],
)
def test_bytes_of_a_shape(shape: str, expected: int) -> None:
    assert shape_bytes(shape) == expected


def test_programs_of_this_backend_are_read_too() -> None:
    mesh = jax.make_mesh((2,), ("x",))
    cut = NamedSharding(mesh, PartitionSpec("x"))
    spec = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=cut)
    total = partial(jnp.sum, axis=0)
    compiled = (
        jax.jit(total, out_shardings=NamedSharding(mesh, PartitionSpec()), donate_argnums=()).lower(spec).compile()
    )
    assert ProgramText(compiled.as_text() or "").collectives == {"all-reduce": Moved(1, 16 * 4)}
