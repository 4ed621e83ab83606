"""Operations and bytes of one layer for one microbatch on one device, by plain arithmetic from a layer's widths.

The bytes follow from the arrays that the chunk programs keep (:mod:`rrfp_jax.programs.splitting`): between F and the
backward, per token and in the dtype of computing unless said otherwise,

=========  =========================================================================================================
``none``   of each norm its input and its result; queries, keys, values, attention's result; of a gated MLP six times
           its width, of a plain one four times; where attention is not fused its scores, in float32 and in the dtype
           of computing
``dots``   the results of all matrix products, scores in float32; the stream between layers
``full``   the layer's input
=========  =========================================================================================================

Between I and W wait the inputs of all products with parameters and the gradients of their results, whatever is
recomputed. For products in float8 both have one byte a number, and so have the inputs that are kept, and the matrices.

Temporaries bound those of the largest program from above. A layer needs room

* for the arrays between its products: three arrays of the stream, and three as wide as the MLP; where attention is not
  fused, scores in float32 twice;
* for the arrays that its backward makes again, which ``none`` would have kept; or for the float32 gradients of its
  parameters, where these are more;
* for parameters that are gathered from other devices;
* for the gradients of results to which a bias is added.

Compilers for accelerators give the first two to one layer after the other, since programs go through the layers in
turn: a chunk needs as much as its largest layer (:meth:`LayerSizes.in_turn`). The other two last while programs are at
other layers: parameters are gathered early, so that nothing waits for them, and gradients of biases are summed up late.
XLA's CPU backend has the first alone in turn. The gradient of an embedding has room of its own everywhere: it is
scattered into zeros, which are made early.

Configurations, profiles and plans have names for the arrays that the backward of a chunk computes again
(:data:`REMAT_NAMES`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rrfp_jax.costs.flops import Flops, TaskFlops, product

REMATS = ("none", "dots", "full")
_FLOAT32 = 4
LEAVES_AHEAD = 2
"""For how many microbatches the batch leaves of a chunk go to devices with memory of their own before their tasks are
launched; see :mod:`rrfp_jax.runtime.mailbox`."""
HEAD_BLOCK_BYTES = 512 << 20
"""The most that the float32 logits of one block take on one device; see :mod:`rrfp_jax.models.loss`."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The widths of a transformer layer, per token; those on one device where several share it."""

    hidden: int
    query: int
    """All query heads together."""
    key: int
    """All key heads together; values are as wide."""
    mlp: int
    num_heads: float
    is_gated: bool = True
    normed_heads: int = 0
    """Widths of the arrays that are normalised beside the two norms of the stream: queries and keys, in some models."""
    mlp_kept: int = 6
    """How many times the width of the MLP a backward needs."""
    biased: int = 0
    """Widths of the results of products to which a bias is added."""
    more_kept: int = 0
    """Widths of arrays that ``none`` keeps in latent attention, beyond those of plain attention with these widths."""
    more_results: int = 0
    """Widths of the results of matrix products, beyond those."""
    more_products: int = 0
    """Widths of the inputs and results of products with parameters, beyond those."""


class Sent(NamedTuple):
    """Bytes that a device gets from the others of an axis, or adds up with them."""

    axis: str
    forward: float = 0.0
    """Bytes in F."""
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """One layer of a type, one microbatch, one device of a stage."""

    flops: Flops
    """Forward operations, of all devices of the stage."""
    num_params: int
    """That a device computes with."""
    held_params: int | None = None
    """That it holds of these between programs, which gather the others; None: all."""
    sharing: int = 1
    """Devices that compute a part of the rows and positions each, beside those that share every matrix."""
    sent: tuple[Sent, ...] = ()
    """Over axes of the mesh that share no matrices."""
    moved_bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Bytes that F, the input gradient and the weight gradient read and write."""
    stash_bytes: int = 0
    owed_bytes: int = 0
    leaf_bytes: int = 0
    """Bytes of the microbatch's own data, which it reads."""
    derived_bytes: int = 0
    """Bytes of parameters cast to the dtype of computing, once per update."""
    temporaries_bytes: int = 0
    """While one of its programs runs; of a chunk the most that a layer needs."""
    more_temporaries_bytes: int = 0
    """Bytes that the programs of a chunk need beyond that for each layer."""
    lasting_bytes: int = 0
    """The part of these that lasts while programs are at other layers."""
    output_bytes: int = 0
    remade_bytes: int = 0
    """Bytes of the output that the layer behind it in a chunk makes again, in place of keeping them in its stash."""
    recomputed: Flops = field(default_factory=Flops)
    """Operations that the backward computes again."""
    sums: tuple[int, int] = (0, 0)
    """How often F and the input gradient sum over the devices that share the layer."""
    sum_bytes: int = 0
    """Bytes of each of these sums."""
    returns_gradient: bool = True
    """Whether its backward hands a gradient on; not so the model's first layer."""
    is_loss: bool = False
    """Whether F makes the gradient of its input too, and the weight gradient computes its results again."""

    @property
    def num_held(self) -> int:
        """Parameters that a device holds all the time."""
        return self.num_params if self.held_params is None else self.held_params

    def with_temporaries(self, num_bytes: int) -> "LayerSizes":
        """Returns these with so many more for every layer."""
        return replace(self, more_temporaries_bytes=self.more_temporaries_bytes + num_bytes)

    def in_turn(self, *, trains: bool) -> "LayerSizes":
        """Returns these for compilers that give the room of one layer to the next."""
        return replace(
            self,
            temporaries_bytes=self.temporaries_bytes + (self.more_temporaries_bytes - self.lasting_bytes) * trains,
            more_temporaries_bytes=self.lasting_bytes,
        )

    def tasks(self, *, trains: bool = True, has_backward: bool = True) -> TaskFlops:
        """Returns the operations of F, the input gradient and the weight gradient; the input gradient computes
        again."""
        forward, input_gradient, weight_gradient = self.flops.tasks(trains=trains, has_backward=has_backward)
        if self.is_loss:
            return TaskFlops(forward + input_gradient, 0.0, weight_gradient + forward * trains)
        again = self.recomputed.forward * has_backward
        if not self.returns_gradient:
            return TaskFlops(forward, 0.0, weight_gradient + again)
        return TaskFlops(forward, input_gradient + again, weight_gradient)


def transformer_layer(
    widths: Widths,
    flops: Flops,
    *,
    num_params: int,
    num_tokens: int,
    length: float,
    remat: str,
    compute_bytes: int,
    is_fused: bool,
    is_cast: bool,
    num_branches: int = 2,
    float8: Collection[str] = (),
) -> LayerSizes:
    """An attention layer with its MLP, or one of the two branches that add to the stream, where the widths of the other
    are 0; ``length`` is how many tokens each one looks at, ``is_fused`` whether scores stay inside a kernel,
    ``is_cast`` whether parameters are cast before they are used, ``float8`` names the products in float8."""
    w, c, added = widths, compute_bytes, num_branches * widths.hidden
    stream = w.hidden * c
    kept_less, owed_less, num_in_float8 = _in_float8(w, float8, c)
    # The widths of the inputs and results of all products with parameters.
    products = 2 * added + 2 * w.query + 2 * w.key + (3 if w.is_gated else 2) * w.mlp + w.more_products
    scores = w.num_heads * length
    norms = added + w.normed_heads
    none: float = norms * c
    none += (added + 2 * w.query + 2 * w.key + w.mlp_kept * w.mlp + w.more_kept) * c
    # a kernel's backward reads the result of attention as it was
    none += w.query * c * (is_fused and "attention.output" in float8) - kept_less
    none += w.num_heads * _FLOAT32 if is_fused else scores * (_FLOAT32 + c) + 2 * w.num_heads * _FLOAT32
    dots: float = (2 * w.query + 2 * w.key + added + (1 + w.is_gated) * w.mlp + w.more_results) * c
    dots += (w.num_heads if is_fused else scores) * _FLOAT32
    stash = {"none": none, "dots": dots, "full": stream}[remat]
    owed = (products * c - owed_less) * num_tokens + norms * c
    elementwise = (5 * added + 2 * w.query + 2 * w.key + 3 * w.mlp) * c
    attention = (2 * w.query + 2 * w.key) * c + (0 if is_fused else 4 * scores * _FLOAT32)
    forward = num_tokens * (products * c + elementwise + attention) + num_params * c
    again_of_scores = 0 if is_fused else attention
    again = {"none": 0.0, "dots": num_tokens * (elementwise + again_of_scores), "full": forward}[remat]
    working = 3 * (w.hidden + (w.mlp or w.query)) * c + (0 if is_fused else 2 * scores * _FLOAT32)
    made, gradients, lasting = num_tokens * (none - stash), num_params * _FLOAT32, num_tokens * w.biased * c
    return LayerSizes(
        flops=flops,
        num_params=num_params,
        moved_bytes=(
            forward,
            2 * forward - num_params * c + again,
            num_tokens * products * c + num_params * 2 * _FLOAT32,
        ),
        stash_bytes=round(stash * num_tokens),
        owed_bytes=round(owed),
        derived_bytes=num_in_float8 + (num_params - num_in_float8) * c * is_cast,
        temporaries_bytes=round(num_tokens * working),
        more_temporaries_bytes=round(max(gradients, made)) + lasting,
        lasting_bytes=lasting,
        output_bytes=round(stream * num_tokens),
        recomputed=flops if remat == "full" else Flops(),
    )


def _in_float8(widths: Widths, float8: Collection[str], compute_bytes: int) -> tuple[int, int, int]:
    """Returns how many bytes fewer a token keeps of inputs, and owes of inputs and gradients, where these products are
    in float8, and how many parameters they have."""
    w, kept_less, owed_less, num_params = widths, 0, 0, 0
    for width, results in (
        (w.hidden, {"attention.query": w.query, "attention.key": w.key, "attention.value": w.key}),
        (w.query, {"attention.output": w.hidden}),
        (w.hidden, {"mlp.gate": w.mlp, "mlp.up": w.mlp}),
        (w.mlp, {"mlp.down": w.hidden}),
    ):
        rounded = [result for name, result in results.items() if name in float8]
        if rounded:  # what other products read too is there both ways
            kept_less += width * (compute_bytes * (len(rounded) == len(results)) - 1)
            owed_less += sum(rounded) * (compute_bytes - 1)
            num_params += width * sum(rounded)
    return kept_less, owed_less + kept_less, num_params


def embedding_layer(
    hidden: int, *, num_params: int, num_tokens: int, compute_bytes: int, param_bytes: int
) -> LayerSizes:
    """The look-up of token vectors; its gradient is scattered into the table."""
    rows, output = num_tokens * hidden * param_bytes, num_tokens * hidden * compute_bytes
    return LayerSizes(
        flops=Flops(),
        num_params=num_params,
        moved_bytes=(rows + output, 0.0, output + rows + num_params * 2 * _FLOAT32),
        stash_bytes=num_tokens * 4,
        owed_bytes=num_tokens * 4 + output,
        leaf_bytes=num_tokens * 4,
        temporaries_bytes=num_tokens * hidden * _FLOAT32,
        more_temporaries_bytes=num_params * _FLOAT32,
        output_bytes=output,
        returns_gradient=False,
    )


def head_layer(
    hidden: int,
    vocab: int,
    flops: Flops,
    *,
    num_params: int,
    num_tokens: int,
    remat: str,
    compute_bytes: int,
    is_cast: bool,
    is_float8: bool = False,
) -> LayerSizes:
    """Final norm, logits in float32, and the loss; ``vocab`` are the words of one device.

    The logits are made by blocks, once in F, with the gradient of their input, and once in W.
    """
    c = compute_bytes
    stream, logits = hidden * c, vocab * _FLOAT32
    read = hidden if is_float8 else stream
    stash = {"none": 2 * stream + read, "dots": 2 * stream, "full": 2 * stream}[remat] + 12
    passes = (4 + 2 * c / _FLOAT32) * logits  # three kernels read them, and their gradient is written and read
    normed = num_tokens * 3 * stream
    return LayerSizes(
        flops=flops,
        num_params=num_params,
        moved_bytes=(
            normed + num_tokens * (stream + passes) + 2 * num_params * c,
            normed + (0.0 if remat == "none" else normed),
            num_tokens * (stream + passes) + num_params * (c + 2 * _FLOAT32),
        ),
        stash_bytes=num_tokens * stash,
        owed_bytes=num_tokens * (read + 12) + hidden * c,
        leaf_bytes=num_tokens * 8,
        derived_bytes=num_params if is_float8 else num_params * c * is_cast,
        temporaries_bytes=2 * min(num_tokens * logits, HEAD_BLOCK_BYTES),
        more_temporaries_bytes=num_params * _FLOAT32,
        is_loss=True,
    )


def dense_layer(
    widths: tuple[int, ...],
    flops: Flops,
    *,
    num_params: int,
    num_rows: int,
    remat: str,
    compute_bytes: int,
    is_cast: bool,
    returns_gradient: bool = True,
) -> LayerSizes:
    """Products one after another, from the first of these widths to the last, such as a projector."""
    c, inner = compute_bytes, widths[1:-1]
    moved = num_rows * c * (widths[0] + 2 * sum(inner) + widths[-1]) + num_params * c
    stash = {"none": widths[0] + 3 * sum(inner), "dots": widths[0] + sum(inner), "full": widths[0]}[remat]
    return LayerSizes(
        flops=flops,
        num_params=num_params,
        moved_bytes=(moved, moved * returns_gradient, moved + num_params * 2 * _FLOAT32),
        stash_bytes=num_rows * stash * c,
        owed_bytes=num_rows * (widths[0] + 2 * sum(inner) + widths[-1]) * c,
        derived_bytes=num_params * c if is_cast else 0,
        temporaries_bytes=num_rows * sum(widths) * _FLOAT32,
        more_temporaries_bytes=num_params * _FLOAT32,
        output_bytes=num_rows * widths[-1] * c,
        recomputed=flops if remat == "full" else Flops(),
        returns_gradient=returns_gradient,
    )


def adapters_beside(
    matrices: Sequence[tuple[int, int]],
    rank: int,
    *,
    inputs: int,
    num_params: int,
    num_rows: int,
    num_tokens: int,
    remat: str,
    compute_bytes: int,
    has_dropout: bool,
) -> LayerSizes:
    """Adapters of this rank beside products of a layer that is frozen, by the rows and columns of their matrices.

    ``inputs`` are the widths of their inputs, each counted once where several products read it; ``num_rows`` are those
    of all devices, ``num_tokens`` those of one. The layer keeps these inputs anyway, but not what dropout leaves of
    them, of which each product has its own.
    """
    c, flops = compute_bytes, Flops()
    for rows, columns in matrices:
        flops += product(num_rows, rows, rank) + product(num_rows, rank, columns)
    all_inputs, results = sum(rows for rows, _ in matrices), sum(columns for _, columns in matrices)
    inner = rank * len(matrices)
    dropped = all_inputs * (c + 1) if has_dropout else 0
    stash = {"none": inner * c + dropped, "dots": (inner + results) * c, "full": 0}[remat]
    owed = ((all_inputs if has_dropout else inputs) + results + 2 * inner) * c
    moved = num_tokens * owed + num_params * c
    return LayerSizes(
        flops=flops,
        num_params=num_params,
        moved_bytes=(moved, moved, num_tokens * owed + num_params * 2 * _FLOAT32),
        stash_bytes=num_tokens * stash,
        owed_bytes=num_tokens * owed,
        derived_bytes=num_params * c if c < _FLOAT32 else 0,
        more_temporaries_bytes=num_params * _FLOAT32,
        recomputed=flops if remat == "full" else Flops(),
    )


KEPT = ("attention", "experts")
"""Names of arrays that a layer may be told to keep: the result of attention; tokens where they have reached their
experts, and the experts' results, so that no backward sends them again."""
REMAT_NAMES = (*REMATS, *KEPT, "+".join(KEPT))


def is_known_remat(name: str) -> bool:
    """Returns whether there is such a rematerialisation; names of :data:`KEPT` may be joined by ``+``."""
    return name in REMATS or set(name.split("+")) <= set(KEPT)


def remat_rule(name: str) -> str:
    """Returns the rule of :mod:`rrfp_jax.costs.layer_sizes` by which a name is counted.

    Where layers keep arrays by name the nearest is ``full``: the arrays are left out, and the operations that they
    save are counted. Raises ValueError for a name that there is not.
    """
    if not is_known_remat(name):
        raise ValueError(f"remat is {name!r}: give one of {', '.join(REMAT_NAMES)}")
    return name if name in REMATS else "full"
