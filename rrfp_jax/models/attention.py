"""Attention by the fastest implementation that the target has for it; :data:`IMPLEMENTATIONS` is the whole rule.

``cudnn``: flash attention of cuDNN, on NVIDIA GPUs. ``splash``: JAX's flash attention for TPUs. ``tiles``: our own
tiles with a streaming softmax (:mod:`rrfp_jax.models._tiled_attention`), for long rows that no kernel takes.
``formula``: XLA compiles the formula as it stands, and keeps the scores of every token against every other; that is
right for short rows. The memory that the first three keep for the backward grows with the length of the text, not with
its square.

Kernels know no mesh: each device of a stage calls them with its own rows and heads. The choice is made when a program
is traced, so that forward and backward agree on the residuals.

Packed rows hold several samples, which differ by segment ids: a token attends only to tokens of its own id, and the
weight of all other tokens is exactly 0, so nothing of a sample shows in the bits of its neighbours. Padding is a
segment like any other, with id 0: each of its tokens attends to itself at least, and no row of the softmax is empty.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import gcd, prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, get_abstract_mesh

from rrfp_jax.layout import EXPERT, FSDP, TENSOR
from rrfp_jax.models._tiled_attention import lengthened, tiled_attention
from rrfp_jax.private.jax_names import fused_attention_stablehlo
from rrfp_jax.programs.remat import KEPT_BY_DOTS
from rrfp_jax.programs.target import Target, current_target

Implementation = Literal["cudnn", "splash", "tiles", "formula"]

_LONG = 1024
"""Rows above this length are not left to the formula: the scores of 16 heads are 64 MiB in float32 there."""
_NO_SEGMENT = -1
"""Segment id of positions that are added at the end of a row to make its length even, or one of whole blocks."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of attention on one device, as far as the choice of an implementation depends on it."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    is_causal: bool
    window: int | None = None
    is_packed: bool = False
    earlier: int = 0
    """Number of keys before that of the first query."""
    has_sinks: bool = False
    """Whether each head's softmax has one score more."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window: int | None = None,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Lets every token attend to itself and to earlier ones; scores and softmax are float32.

    ``query`` ``[batch, length, heads, head_dim]``, ``key`` and ``value`` ``[batch, keys, kv_heads, head_dim]``, where
    ``kv_heads`` divides ``heads``; returns the shape and dtype of ``query``. The queries are those of the last
    ``length`` keys, which are all of them or the last slice of a sequence. With a ``window`` a token attends to that
    many tokens, itself included; with the ``segments`` of packed rows, int32 ``[batch, keys]`` of ids from 0 on, to
    those of its own segment. With ``sinks``, float32 ``[heads]``, the softmax of each head has one score more, which
    has no value.
    """
    reach = None if window is None or window >= key.shape[1] else window
    return _attention(query, key, value, segments, is_causal=True, window=reach, sinks=sinks)


def full_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, segments: jax.Array | None = None
) -> jax.Array:
    """Lets every patch or frame attend to all others, otherwise as :func:`causal_attention`."""
    return _attention(query, key, value, segments, is_causal=False, window=None)


def cached_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes :func:`causal_attention` for tokens at some ``positions`` of a text whose keys and values are cached.

    ``query`` ``[batch, tokens, heads, head_dim]``, ``positions`` int ``[tokens]``; ``keys`` and ``values`` ``[batch,
    places, kv_heads, head_dim]``, the one at place ``p`` of position ``p``. Places behind a token's own may hold
    anything finite.
    """
    distance = positions[:, None] - jnp.arange(keys.shape[1])
    is_seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return _masked(query, keys, values, is_seen[None, None], sinks)


# -- over the mesh of a stage ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """How the devices of a mesh share the rows and heads of a call."""

    axes: frozenset[str]
    """All axes of the mesh that are not manual already."""
    rows: tuple[str, ...]
    """Axes that share the rows."""
    num_row_parts: int
    heads: str | None
    """The axis that shares the heads."""
    num_head_parts: int
    copies: int
    """How often each key head is repeated, so that the axis shares them as it shares the queries' heads."""

    @classmethod
    def of(cls, query: tuple[int, ...], key: tuple[int, ...]) -> "_Cut":
        """Returns the cut of queries and keys of these shapes on the mesh of the present trace."""
        mesh = get_abstract_mesh()
        free = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
        sizes = {axis: mesh.shape[axis] for axis in free if mesh.shape[axis] > 1}
        heads = TENSOR if query[2] % sizes.get(TENSOR, 1) == 0 and TENSOR in sizes else None
        # the axes that cut rows between chunks come first; one that shares nothing else takes rows where they divide
        rows: tuple[str, ...] = ()
        for axis in sorted(sizes.keys() - {heads}, key=lambda axis: (axis != FSDP, axis != EXPERT, axis)):
            if query[0] % (prod(sizes[each] for each in rows) * sizes[axis]) == 0:
                rows = (*rows, axis)
        num_head_parts = sizes[heads] if heads else 1
        copies = num_head_parts // gcd(key[2], num_head_parts)
        return cls(frozenset(free), rows, prod(sizes[axis] for axis in rows), heads, num_head_parts, copies)


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    is_causal: bool,
    window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    cut = _Cut.of(query.shape, key.shape)
    (rows, length, heads, head_dim), kv_heads = query.shape, key.shape[2] * cut.copies
    call = AttentionCall(
        rows=rows // cut.num_row_parts, length=length, heads=heads // cut.num_head_parts,
        kv_heads=kv_heads // cut.num_head_parts, head_dim=head_dim, dtype=query.dtype, is_causal=is_causal,
        window=window, is_packed=segments is not None, earlier=key.shape[1] - length,
        has_sinks=sinks is not None,
    )  # fmt: skip
    target = current_target()
    choice = implementation(target, call)
    if choice == "cudnn" and (problem := _cudnn_refusal(target, call)) is not None:
        _warn_once(problem)
        choice = implementation(None, call)
    if target.is_nvidia and call.has_sinks:
        _warn_once("cuDNN has no sinks in JAX.")
    compute = partial(IMPLEMENTATIONS[choice].compute, is_causal=is_causal, window=window)
    if choice == "formula" or not cut.axes:
        return compute(query, key, value, segments, sinks)

    # the partitioner cannot look into kernels, so each device calls them with its own rows and heads
    if cut.copies > 1:
        # query head h reads key head h // (heads / kv_heads); so it does among repeated ones, on every device
        key, value = (jnp.repeat(part, cut.copies, axis=2) for part in (key, value))
    whole_rows = PartitionSpec(cut.rows or None)
    own = PartitionSpec(cut.rows or None, None, cut.heads)
    mapped = jax.shard_map(
        compute,
        axis_names=cut.axes,
        in_specs=(
            *(own, own, own),
            None if segments is None else whole_rows,
            None if sinks is None else PartitionSpec(cut.heads),
        ),
        out_specs=own,
        check_vma=False,
    )
    return mapped(query, key, value, segments, sinks)


# -- the formula -------------------------------------------------------------------------------------------------------


def _formula(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, sinks: Any = None,
    *, is_causal: bool, window: int | None,
) -> jax.Array:  # fmt: skip
    bias, earlier = None, key.shape[1] - query.shape[1]
    if sinks is not None:
        assert is_causal
        distance = earlier + jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
        is_seen = ((distance >= 0) & (distance < (window or key.shape[1])))[None, None]
        if segments is not None:
            is_seen &= segments[:, None, earlier:, None] == segments[:, None, None, :]
        return _masked(query, key, value, is_seen, sinks)
    local = None if window is None else (window - 1, 0)
    if segments is not None:
        # unlike a mask, nothing of a bias is kept for the backward
        is_seen = segments[:, None, earlier:, None] == segments[:, None, None, :]
        bias = jnp.where(is_seen, 0.0, -(2.0**41)).astype(query.dtype)
    mask = None
    if earlier:  # JAX's own causal masks begin with the first key
        distance = earlier + jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
        mask = ((distance >= 0) if window is None else (distance >= 0) & (distance < window))[None, None]
        is_causal, local = False, None
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, is_causal=is_causal, local_window_size=local, implementation="xla"
    )


def _masked(query: jax.Array, key: jax.Array, value: jax.Array, is_seen: jax.Array, sinks: Any) -> jax.Array:
    """Computes attention to the keys that each query sees, bool ``[1 or batch, 1, length, keys]``."""
    bias = None
    if sinks is not None:
        # a key before all others, seen by every query: its score is the sink, and its value nothing
        key, value = (jnp.pad(part, ((0, 0), (1, 0), (0, 0), (0, 0))) for part in (key, value))
        is_seen = jnp.pad(is_seen, ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=True)
        bias = jnp.pad(sinks[None, :, None, None], ((0, 0), (0, 0), (0, 0), (0, key.shape[1] - 1)))
    return jax.nn.dot_product_attention(query, key, value, bias, is_seen, implementation="xla")


# -- cuDNN -------------------------------------------------------------------------------------------------------------

_ID_COLUMNS = 64
"""Two columns for every bit of a segment id; see :func:`_with_ids`."""


def _cudnn_widths(target: Target, dtype: Any, size: int, *, is_packed: bool) -> tuple[int, int] | None:
    """Returns the head sizes of queries and values in cuDNN's call, or None if cuDNN takes no heads of this ``size``.

    A backward takes heads of up to 256 on Hopper and of up to 128 elsewhere, and on both Hopper and datacentre
    Blackwell queries of 192 with values of 128. All are multiples of 8.
    """
    major = (target.capability or (8, 0))[0]
    widest = 256 if major == 9 else 128
    if dtype not in (jnp.bfloat16, jnp.float16) or size % 8 or size > widest:
        return None
    if not is_packed:
        return size, size
    if 64 < size <= 128:
        return (192, 128) if major in (9, 10) else None
    return (size + _ID_COLUMNS,) * 2 if size + _ID_COLUMNS <= widest else None


def _takes_cudnn(target: Target | None, call: AttentionCall) -> bool:
    # cuDNN's causal mask begins with the first key, so it has none for the later slices of a sequence
    if target is None or not target.is_nvidia or call.earlier or call.has_sinks:
        return False
    return _cudnn_widths(target, call.dtype, call.head_dim, is_packed=call.is_packed) is not None


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, sinks: None = None,
    *, is_causal: bool, window: int | None,
) -> jax.Array:  # fmt: skip
    assert sinks is None
    length, size = query.shape[1], query.shape[-1]
    options: dict[str, Any] = {}
    if length % 2:  # cuDNN's backward wants an even length
        query, key, value = (lengthened(part, length + 1) for part in (query, key, value))
        segments = None if segments is None else lengthened(segments, length + 1, _NO_SEGMENT)
        if segments is None and not is_causal:
            # only lengths keep tokens from the added position, where no mask does
            options["key_value_seq_lengths"] = jnp.full(len(query), length, jnp.int32)
    if segments is None:
        local = None if window is None else (window - 1, 0)
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=is_causal, local_window_size=local, implementation="cudnn", **options
        )
        return mixed[:, :length]
    widths = _cudnn_widths(current_target(), query.dtype, size, is_packed=True)
    assert widths is not None
    query, key = _with_ids(query, key, segments, widths[0])
    fused = fused_attention_stablehlo
    mixed = fused.dot_product_attention(
        query,
        key,
        _widened(value, widths[1]),
        scale=size**-0.5,
        mask_type=fused.MaskType.CAUSAL if is_causal else fused.MaskType.NO_MASK,
        sliding_window_length=window,
    )
    return mixed[:, :length, :, :size]


def _with_ids(query: jax.Array, key: jax.Array, segments: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys with the segments' ids in columns of their own, so that no bias has to hide tokens.

    A bit ``a`` of a query's id and ``b`` of a key's add ``-c (a (1 - b) + (1 - a) b)`` to the score: exactly 0 where
    they are equal, so equal ids leave the score as it is; and otherwise ``-c``, after which a weight is exactly 0.
    """
    bits = (segments[..., None] >> jnp.arange(_ID_COLUMNS // 2)) & 1
    asks, answers = jnp.concatenate([bits, 1 - bits], axis=-1), jnp.concatenate([1 - bits, bits], axis=-1)
    # c is 2 ** 23, in factors that float16 holds
    columns = (asks * 2**8, answers * -(2**15))

    def joined(part: jax.Array, own: jax.Array) -> jax.Array:
        shape = (*part.shape[:-1], own.shape[-1])
        return _widened(
            jnp.concatenate([part, jnp.broadcast_to(own[:, :, None].astype(part.dtype), shape)], axis=-1), width
        )

    return joined(query, columns[0]), joined(key, columns[1])


def _widened(part: jax.Array, width: int) -> jax.Array:
    return jnp.pad(part, ((0, 0),) * 3 + ((0, width - part.shape[-1]),))


@cache
def _cudnn_refusal(target: Target, call: AttentionCall) -> str | None:
    """Returns why JAX refuses to give cuDNN this call, or None.

    Older versions of cuDNN do less than :func:`_cudnn_widths` says, and a backward less than a forward; only JAX knows.
    """
    del target  # it is the cache's key: tracing asks for the current one
    query = jax.ShapeDtypeStruct((call.rows, call.length, call.heads, call.head_dim), call.dtype)
    key = jax.ShapeDtypeStruct((call.rows, call.length, call.kv_heads, call.head_dim), call.dtype)
    segments = np.zeros((call.rows, call.length), np.int32) if call.is_packed else None
    compute = partial(_cudnn, segments=segments, is_causal=call.is_causal, window=call.window)

    def gradients(*heads: Any) -> Any:
        mixed, pullback = jax.vjp(compute, *heads)
        return pullback(mixed)

    try:
        jax.eval_shape(gradients, query, key, key)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


@cache
def _warn_once(problem: str) -> None:
    logging.getLogger(__name__).warning("attention is not fused, and takes more memory and time: %s", problem)


# -- TPUs --------------------------------------------------------------------------------------------------------------

_LANES, _LARGEST_BLOCK = 128, 1024
_LONGEST_SPLASH = 32_768
"""Longest rows that splash attention gets. Each time that a call is traced, JAX looks at every pair of positions of its
mask on the host: 3 s for this length, hours for a million positions."""
_FEW_BLOCKS = 4
"""Up to this number of key blocks one kernel makes all gradients; it holds the queries' once for every block."""


def _splash(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, sinks: Any = None,
    *, is_causal: bool, window: int | None, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    # not at the head: a process without TPUs needs no compiler for their kernels
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, heads, size = query.shape[1:]
    earlier = key.shape[1] - length
    (padded, block_q), (padded_keys, block_kv) = _whole_blocks(length), _whole_blocks(key.shape[1])
    ids = None if segments is None else (segments[:, earlier:], segments)
    if padded > length and segments is None and not is_causal:
        ids = (jnp.zeros(query.shape[:2], jnp.int32),) * 2
    if ids is not None:
        ids = lengthened(ids[0], padded, _NO_SEGMENT), lengthened(ids[1], padded_keys, _NO_SEGMENT)
    query, (key, value) = lengthened(query, padded), (lengthened(part, padded_keys) for part in (key, value))
    half = block_kv if block_kv % (2 * _LANES) else block_kv // 2
    is_few = padded_keys // block_kv <= _FEW_BLOCKS
    sizes = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=half,
        block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=half,
        block_q_dq=None if is_few else block_q, block_kv_dq=None if is_few else block_kv, use_fused_bwd_kernel=is_few,
    )  # fmt: skip
    shape = (padded, padded_keys)
    mask: Any = splash.FullMask(shape)
    if is_causal and window is None:
        mask = splash.CausalMask(shape, offset=earlier)
    elif is_causal:
        mask = splash.LocalMask(shape, window_size=(window - 1, 0), offset=earlier)  # type: ignore[operator]
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        residual_checkpoint_name=KEPT_BY_DOTS, interpret=interpret,
    )  # fmt: skip
    # the kernel takes heads before positions, and no factor for the scores
    scaled = (query * size**-0.5).astype(query.dtype)
    query, key, value = (part.swapaxes(1, 2) for part in (scaled, key, value))
    told = None if ids is None else splash.SegmentIds(*ids)
    return jax.vmap(kernel, (0, 0, 0, 0, None))(query, key, value, told, sinks).swapaxes(1, 2)[:, :length]


def _whole_blocks(length: int) -> tuple[int, int]:
    """Returns the length of as many whole blocks, which kernels take, and the size of a block."""
    step = _LANES if length <= _LARGEST_BLOCK else _LARGEST_BLOCK // 2
    padded = -(-length // step) * step
    return padded, padded if padded <= _LARGEST_BLOCK else _LARGEST_BLOCK if padded % _LARGEST_BLOCK == 0 else step


def _takes_splash(target: Target | None, call: AttentionCall) -> bool:
    if target is None or target.platform != "tpu" or call.dtype not in (jnp.bfloat16, jnp.float32):
        return False
    return call.length >= _LANES and call.length + call.earlier <= _LONGEST_SPLASH


# -- the choice --------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One implementation of attention."""

    takes: Callable[[Target | None, AttentionCall], bool]
    """Whether it is for this call on this target; None: a target without kernels."""
    compute: Callable[..., jax.Array]
    """The function, ``compute(query, key, value, segments, sinks, *, is_causal, window)``."""


IMPLEMENTATIONS: dict[Implementation, _Entry] = {
    "cudnn": _Entry(_takes_cudnn, _cudnn),
    "splash": _Entry(_takes_splash, _splash),
    "tiles": _Entry(lambda target, call: call.length + call.earlier > _LONG, tiled_attention),
    "formula": _Entry(lambda target, call: True, _formula),
}
"""All implementations; a call goes to the first one that takes it."""


def implementation(target: Target | None, call: AttentionCall) -> Implementation:
    """Returns the implementation that a target runs; None stands for a target without kernels."""
    return next(name for name, entry in IMPLEMENTATIONS.items() if entry.takes(target, call))
