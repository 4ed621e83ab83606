"""Raw models: chunks of one's own, with layers of several kinds and any tree that travels between them.

A model is a list of named layers, so every cut computes the same: the values that travel are packed and unpacked after
every layer, also where two layers are in one chunk. Each microbatch has ``x`` ``[rows, positions, 4]``, token ids
``ids``, targets ``y`` and weights ``w``, one for each position; with two towers ``z`` besides, which the second one
reads.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.schedules import Edge
from tests.fuzz.composition import GRAPH, Composition
from tests.programs.toys import weights

WIDTH, FEATURES, OUTPUTS, VOCABULARY = 8, 4, 3, 16
EMBED, HEAD, LEFT, RIGHT = "embed", "head", "left", "right"
LEAVES = {EMBED: ("x", "ids"), LEFT: ("x",), RIGHT: ("z",), HEAD: ("ids", "y", "w")}
EDGES = {
    "skip": ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3)),
    "constant": ((0, 1), (0, 2), (1, 2), (2, 3)),
    "towers": ((0, 2), (1, 2), (2, 3)),
    "optional": ((0, 2), (1, 2), (2, 3)),
}


def layer_names(composition: Composition, num_layers: int) -> list[list[str]]:
    """Returns the layers of the model: for graphs chunk by chunk, for chains all in one list."""
    names = [f"layers.{index}" for index in range(num_layers)]
    if composition.placement != GRAPH:
        return [[EMBED, *names, HEAD]]
    if composition.graph in ("towers", "optional"):
        return [[LEFT], [RIGHT], names[:2], [*names[2:], HEAD]]
    return [[EMBED], [names[0]], names[1:3], [*names[3:], HEAD]]


def edges_of(composition: Composition) -> tuple[Edge, ...] | None:
    """Returns the edges of a graph; None for a chain."""
    if composition.placement != GRAPH:
        return None
    return tuple(
        Edge(
            source,
            target,
            carries_gradient=not (composition.graph == "constant" and (source, target) == (0, 2)),
            is_optional=composition.graph == "optional" and source == 1,
        )
        for source, target in EDGES[composition.graph]
    )


def raw_chunks(composition: Composition, num_chunks: int, num_layers: int) -> list[Chunk]:
    """Returns the model in so many chunks, or in those of its graph."""
    parts = layer_names(composition, num_layers)
    if composition.placement != GRAPH:
        embed, *names, head = parts[0]
        parts = [names[num_layers * c // num_chunks : num_layers * (c + 1) // num_chunks] for c in range(num_chunks)]
        parts[0] = [embed, *parts[0]]
        parts[-1] = [*parts[-1], head]
    return [_chunk(composition, number, tuple(names)) for number, names in enumerate(parts)]


def _chunk(composition: Composition, number: int, names: tuple[str, ...]) -> Chunk:
    ties = composition.tied and ((EMBED in names) != (HEAD in names))
    edges = edges_of(composition) or ()
    merges = sum(edge.target == number for edge in edges) > 1
    return Chunk(
        name=f"chunk {number}: {names[0]} to {names[-1]}",
        init=partial(_init, composition, names),
        apply=partial(_apply, composition, names, merges),
        leaves=tuple(dict.fromkeys(leaf for name in names for leaf in LEAVES.get(name, ()))),
        shared=frozenset({EMBED} if ties else ()),
        uses_key=composition.dropout and any(name.startswith("layers") for name in names),
        partition=_partition if composition.cuts_params else None,
    )


def _init(composition: Composition, names: Sequence[str], key: jax.Array) -> dict[str, Any]:
    params = {}
    for place, name in enumerate(names):
        number = zlib.crc32(name.encode()) % 1000 if composition.own_keys else place
        params[name] = _init_layer(composition, name, key, number)
    if composition.tied and HEAD in params:
        del params[HEAD]
        params.setdefault(EMBED, _init_layer(composition, EMBED, key, zlib.crc32(EMBED.encode()) % 1000))
    return params


def _init_layer(composition: Composition, name: str, key: jax.Array, number: int) -> dict[str, Any]:
    def normal(place: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
        # each takes sixteen bits of one half of the key: two layers must not come to the same values by chance
        turned = jax.random.wrap_key_data(jax.random.key_data(key)[::-1])
        halves = [weights(each, 10 * number + place, *shape) for each in (key, turned)]
        return (0.7 * (halves[0] + halves[1])).astype(dtype)

    low = jnp.bfloat16 if composition.params == "bf16" else jnp.float32
    other = jnp.bfloat16 if composition.params != "f32" else jnp.float32
    if not name.startswith("layers"):
        shape = (WIDTH, OUTPUTS) if name == HEAD else (FEATURES, WIDTH)
        made = {"w": normal(0, *shape, dtype=low)}
        return made | {"table": normal(1, VOCABULARY, WIDTH, dtype=low)} if name == EMBED else made
    square, bias = normal(0, WIDTH, WIDTH, dtype=low), jnp.zeros(WIDTH, other)
    kinds: dict[str, dict[str, Any]] = {
        "conv": {"kernel": normal(0, 3, 1, WIDTH, dtype=low), "b": bias},
        "attention": {"q": square, "k": normal(1, WIDTH, WIDTH, dtype=low), "v": normal(2, WIDTH, WIDTH, dtype=low)},
        "norm": {"scale": jnp.ones(WIDTH, other), "w": square, "gain": jnp.ones((), other)},
        "complex": {"c": jax.lax.complex(normal(0, WIDTH, WIDTH), normal(1, WIDTH, WIDTH)), "b": bias},
        "bare": {} if name == "layers.1" else {"w": square, "b": bias},
    }
    return kinds.get(composition.layers, {"w": square, "b": bias})


def _run_layer(layer: dict[str, Any], hidden: jax.Array) -> jax.Array:
    p = {name: value if value.dtype == jnp.complex64 else value.astype(jnp.float32) for name, value in layer.items()}
    if "kernel" in p:
        mixed = jax.lax.conv_general_dilated(
            hidden, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=WIDTH
        )
        return hidden + 0.5 * jnp.tanh(mixed + p["b"])
    if "q" in p:
        scores = jnp.einsum("rpw,rsw->rps", hidden @ p["q"], hidden @ p["k"])
        return hidden + jax.nn.softmax(scores) @ (hidden @ p["v"])
    if "scale" in p:
        normed = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True) + 1e-3) * p["scale"]
        return hidden + p["gain"] * jnp.tanh(normed @ p["w"])
    if "c" in p:
        return hidden + 0.5 * jnp.tanh(jnp.real((hidden + 0.5j * hidden) @ p["c"]) + p["b"])
    if not p:
        return jnp.tanh(hidden)
    return hidden + 0.5 * jnp.tanh(hidden @ p["w"] + p["b"])


def _run_scan(layer: dict[str, Any], hidden: jax.Array) -> jax.Array:
    def move(state: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(0.5 * state + value @ layer["w"].astype(jnp.float32) + layer["b"].astype(jnp.float32))
        return state, state

    _, states = jax.lax.scan(move, jnp.zeros_like(hidden[:, 0]), hidden.swapaxes(0, 1))
    return hidden + 0.5 * states.swapaxes(0, 1)


def _apply(
    composition: Composition, names: tuple[str, ...], merges: bool, params: Any, inputs: Any, leaves: Any, *, key: Any
) -> Any:
    hidden = aux = first = total = None
    if names[0] in (EMBED, LEFT, RIGHT):
        hidden = leaves["z" if names[0] == RIGHT else "x"] @ params[names[0]]["w"].astype(jnp.float32)
        if names[0] == EMBED:
            hidden = hidden + params[EMBED]["table"].astype(jnp.float32)[leaves["ids"]]
        aux, first, total = jnp.tanh(hidden[..., :2]), hidden, jnp.float32(0)
    elif merges:
        unpacked = [_unpack(composition.carry, each) for each in inputs if each is not None]
        hidden, aux, first, total = (sum(values[1:], values[0]) for values in zip(*unpacked, strict=True))
    else:
        hidden, aux, first, total = _unpack(composition.carry, inputs)
    run = _run_scan if composition.layers == "scan" else _run_layer
    for name in names:
        if name.startswith("layers"):
            hidden = run(params[name], hidden)
            if key is not None:
                kept = jax.random.bernoulli(jax.random.fold_in(key, int(name.split(".")[1])), 0.8, hidden.shape)
                hidden = jnp.where(kept, hidden / 0.8, 0)
            aux = 0.9 * aux + 0.1 * jnp.tanh(hidden[..., :2])
            total = total + 0.01 * jnp.mean(hidden**2)
            first = hidden if name == "layers.0" and composition.carry == "shared" else first
        if name != HEAD:
            carry = _pack(composition.carry, hidden, aux, first, total)
            hidden, aux, first, total = _unpack(composition.carry, carry)
    return _loss(composition, params, hidden, aux, first, total, leaves) if names[-1] == HEAD else carry


def _loss(composition: Composition, params: Any, hidden: Any, aux: Any, first: Any, total: Any, leaves: Any) -> Any:
    if composition.tied:
        logits = hidden @ params[EMBED]["table"].astype(jnp.float32).T
        target = jnp.take_along_axis(logits, leaves["ids"][..., None], -1)[..., 0]
        errors = jax.nn.logsumexp(logits, axis=-1) - target
    else:
        errors = jnp.mean((hidden @ params[HEAD]["w"].astype(jnp.float32) - leaves["y"]) ** 2, -1)
    errors = errors + 0.1 * jnp.mean(aux**2, -1) + 0.1 * jnp.mean(first**2, -1)
    weight = jnp.sum(leaves["w"])
    loss = jnp.sum(errors * leaves["w"]) + total * weight
    return (loss, weight, {"aux": jnp.sum(aux)}) if composition.named_sums else (loss, weight)


def _pack(carry: str, hidden: Any, aux: Any, first: Any, total: Any) -> Any:
    signs = jnp.sign(jax.lax.stop_gradient(aux)).astype(jnp.int8)
    places = jnp.arange(hidden.shape[1], dtype=jnp.uint32)
    return {
        "array": hidden,
        "tuple": (hidden, aux),
        "dict": {"hidden": hidden, "more": {"aux": aux, "count": jnp.sum(hidden > 0).astype(jnp.int32)}},
        "bf16": (hidden.astype(jnp.bfloat16), aux),
        "f16": {"hidden": hidden, "aux": aux.astype(jnp.float16)},
        "int": (hidden, signs, hidden > 0, places),
        "scalar": (hidden, total),
        "shared": {"hidden": hidden, "first": first},
        "empty": (hidden, (), {"nothing": None}, jnp.zeros((hidden.shape[0], 0))),
        "key": (hidden, jax.random.key(0)),
    }[carry]


def _unpack(carry: str, packed: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the values that travelled; the others are zeros."""
    hidden = packed if carry == "array" else packed["hidden"] if isinstance(packed, dict) else packed[0]
    hidden = hidden.astype(jnp.float32)
    aux, first, total = jnp.zeros_like(hidden[..., :2]), jnp.zeros_like(hidden), jnp.float32(0)
    match carry:
        case "tuple" | "bf16":
            aux = packed[1]
        case "dict":
            aux = packed["more"]["aux"] * (1 + 0.001 * packed["more"]["count"])
        case "f16":
            aux = packed["aux"].astype(jnp.float32)
        case "int":
            aux = 0.1 * packed[1].astype(jnp.float32)
            hidden = hidden + jnp.where(packed[2], 0.01, -0.01) * (1 + packed[3][:, None].astype(jnp.float32))
        case "scalar":
            total = packed[1]
        case "shared":
            first = packed["first"]
    return hidden, aux, first, total


def _partition(params: Any, axes: Any) -> Any:
    """Returns a partition that cuts matrices at their last dimension over ``tensor``."""
    from jax.sharding import PartitionSpec

    def cut(leaf: Any) -> PartitionSpec:
        is_cut = "tensor" in axes and len(leaf.shape) > 1 and leaf.shape[-1] % axes["tensor"] == 0
        return PartitionSpec(*[None] * (len(leaf.shape) - 1), "tensor") if is_cut else PartitionSpec()

    return jax.tree.map(cut, params)
