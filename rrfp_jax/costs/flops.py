"""Floating-point operations of a layer, from its sizes; plain arithmetic, a multiply-add counts as two.

Only matrix products count, which is where the time goes. There are two kinds. Products of activations with *parameters*
cost the same three times: forward, gradient of the input, gradient of the parameters. Products among activations, which
are attention's scores and sums, have no parameters: their backward is all input gradient, and costs twice the forward.
So a trained layer's backward is twice its forward, whatever the shares; a frozen one that passes the gradient on does
without the parameters' part; and a frozen one before everything that trains has no backward at all.

Attention looks at pairs of tokens: the square of a sequence's length, or the sum of the squares where several sequences
are packed into a row and none attends to another (:func:`pairs`). Kernels that leave out the half above the diagonal
do half of that; this counts whole squares, as papers do.

The operations of a step of the model, the numerator of model FLOPs utilisation, are

::

    model FLOPs = sum over layers of  forward + input gradient + parameters' gradient     (rrfp_jax.costs.flops)
    MFU         = model FLOPs / (step time x sum of the devices' bfloat16 peaks)           (Chowdhery et al. 2022, B)

For a decoder that trains, this is 6 for each token and parameter of a product, the head's included, plus 12 times the
width of all heads for each layer and each pair of tokens that may look at each other. Counted are the operations
that the model asks for, not those that are executed:

* an operation that is computed again (rematerialisation, recomputing) counts once;
* padding counts nothing, and packed sequences are pairs only within themselves; whole squares, no triangles;
* the embedding is a look-up and counts nothing, and so do norms, activations and the optimizer;
* of experts those count that compute a token, and the router;
* a frozen layer has no gradient of parameters, and before everything that trains no backward;
* an encoder counts for the patches that there are, and not at all in microbatches without.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from rrfp_jax.field_rules import AT_LEAST_1, check_fields


class TaskFlops(NamedTuple):
    """Operations of one microbatch's tasks; a full backward takes the sum of the last two."""

    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True)
class Flops:
    """Forward operations of some layers for some tokens; they add up, and ``*`` repeats them."""

    with_parameters: float = 0.0
    among_activations: float = 0.0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.with_parameters + other.with_parameters, self.among_activations + other.among_activations)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.with_parameters * times, self.among_activations * times)

    @property
    def forward(self) -> float:
        return self.with_parameters + self.among_activations

    @property
    def trained(self) -> float:
        """Forward and backward together, of layers that train: three times the forward."""
        return sum(self.tasks())

    def tasks(self, *, trains: bool = True, has_backward: bool = True) -> TaskFlops:
        """Returns the operations of F, the input gradient and the weight gradient.

        Args:
            trains: whether the parameters' gradient is computed; False for frozen layers.
            has_backward: whether a gradient passes at all; False for frozen layers before everything that trains.
        """
        if not has_backward:
            return TaskFlops(self.forward, 0.0, 0.0)
        weight_gradient = self.with_parameters if trains else 0.0
        return TaskFlops(self.forward, self.with_parameters + 2 * self.among_activations, weight_gradient)


def pairs(lengths: Iterable[float], window: int | None = None) -> float:
    """The pairs of tokens that attention looks at: the sum of the squared lengths of sequences apart; with a window a
    token looks at no more than so many, itself among them."""
    return sum(length * (length if window is None else min(length, window)) for length in lengths)


def product(num_rows: float, in_dim: int, out_dim: int) -> Flops:
    """``[num_rows, in_dim] @ [in_dim, out_dim]``, the latter parameters."""
    return Flops(with_parameters=2.0 * num_rows * in_dim * out_dim)


def _attention(num_pairs: float, query_dim: int) -> Flops:
    """Scores and weighted sums over all heads, ``query_dim`` wide together."""
    return Flops(among_activations=4.0 * num_pairs * query_dim)


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """A decoder with grouped-query attention and gated MLPs, or experts in place of some of these.

    Of the experts of a sparse layer those count that compute a token, and the router.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    num_sparse_layers: int = 0
    num_experts: int = 0
    expert_dims: int = 0
    """Inner widths of all experts that compute a token, shared ones included, together."""
    latent_params: int | None = None
    """Parameters of all products of latent attention; None: attention is none."""
    value_dim: int | None = None
    """Width of a value head; None: as wide as ``head_dim``."""

    def __post_init__(self) -> None:
        of_experts = ("num_sparse_layers", "num_experts", "expert_dims")
        names = [name for name in self.__dataclass_fields__ if self.num_sparse_layers or name not in of_experts]
        check_fields(self, AT_LEAST_1, *names)

    def layer(self, num_tokens: float, num_pairs: float, *, is_sparse: bool = False) -> Flops:
        """One layer, for tokens whose attention looks at so many pairs (see :func:`pairs`)."""
        return self.attention(num_tokens, num_pairs) + self.mlp(num_tokens, is_sparse=is_sparse)

    def attention(self, num_tokens: float, num_pairs: float) -> Flops:
        """The attention of a layer."""
        query_dim, key_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = product(num_tokens, self.hidden, 2 * query_dim + 2 * key_dim)
        if self.latent_params is not None:
            projections = product(num_tokens, 1, self.latent_params)
        value_dim = query_dim if self.value_dim is None else self.num_heads * self.value_dim
        return projections + _attention(num_pairs / 2, query_dim) + _attention(num_pairs / 2, value_dim)

    def mlp(self, num_tokens: float, *, is_sparse: bool = False) -> Flops:
        """The MLP of a layer, or its experts."""
        widths = 3 * self.expert_dims + self.num_experts if is_sparse else 3 * self.mlp_dim
        return product(num_tokens, self.hidden, widths)

    def head(self, num_tokens: float) -> Flops:
        """The logits. (The embedding is a look-up and counts nothing.)"""
        return product(num_tokens, self.hidden, self.vocab_size)

    def whole(self, num_tokens: float, num_pairs: float) -> Flops:
        """All layers and the head."""
        sparse = self.layer(num_tokens, num_pairs, is_sparse=True) * self.num_sparse_layers
        dense = self.layer(num_tokens, num_pairs) * (self.num_layers - self.num_sparse_layers)
        return sparse + dense + self.head(num_tokens)


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """A transformer encoder with a plain two-layer MLP, or a gated one, for images or for anything else that is cut
    into patches.

    With a plain MLP four times as wide as the stream a layer takes ``24 n d^2 + 4 n^2 d`` for n patches of one image.
    """

    hidden: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    patch_dim: int
    """Values of one patch: for images 3 channels times the patch's pixels."""
    head_dim: int | None = None
    """Width of a head; None: ``hidden / num_heads``."""
    is_gated: bool = False

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, *(self.__dataclass_fields__.keys() - {"is_gated"}))
        if self.head_dim is None and self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.num_heads} heads: give head_dim")

    def layer(self, num_patches: float, num_pairs: float) -> Flops:
        """One layer, for patches whose attention looks at so many pairs: the sum of the squares over images."""
        head_dim = self.head_dim or self.hidden // self.num_heads
        query_dim = self.num_heads * head_dim
        projections = product(num_patches, self.hidden, 4 * query_dim)
        mlp = product(num_patches, self.hidden, (2 + self.is_gated) * self.mlp_dim)
        return projections + mlp + _attention(num_pairs, query_dim)

    def patches(self, num_patches: float) -> Flops:
        """The embedding of patches. Nothing needs a gradient of its input."""
        return product(num_patches, self.patch_dim, self.hidden)

    def whole(self, num_patches: float, num_pairs: float) -> Flops:
        """The embedding of patches and all layers."""
        return self.patches(num_patches) + self.layer(num_patches, num_pairs) * self.num_layers


@dataclass(frozen=True, kw_only=True)
class ProjectorSizes:
    """Two matrices from the encoder's features, merged where neighbours become one, to the decoder's width."""

    in_dim: int
    inner_dim: int
    out_dim: int

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, *self.__dataclass_fields__)

    def whole(self, num_features: float) -> Flops:
        """For so many features, after merging."""
        return product(num_features, self.in_dim, self.inner_dim) + product(num_features, self.inner_dim, self.out_dim)


class Amounts(NamedTuple):
    """Contents of a step's batch, over all microbatches, padding left out."""

    tokens: float
    pairs: float
    """Pairs of tokens that may look at each other, see :func:`rrfp_jax.costs.flops.pairs`."""
    patches: float = 0.0
    patch_pairs: float = 0.0
    near_pairs: float = 0.0
    """Pairs of tokens in layers with a window."""
    near_patch_pairs: float = 0.0
    """Pairs of patches in layers with a window."""


class CountedLayer(NamedTuple):
    """A layer as it counts."""

    forward: Callable[[Amounts], Flops]
    trains: bool = True
    returns_gradient: bool = True
    """Whether anything before it could use a gradient of its input."""


def step_flops(layers: Sequence[CountedLayer], amounts: Amounts) -> float:
    """Forward and backward of all layers, in the order in which a microbatch meets them; multiply-adds are two."""
    return sum(sum(tasks) for tasks in _tasks_of_layers(layers, amounts))


def chunk_flops(layers: Sequence[CountedLayer], counts: Sequence[int], amounts: Amounts) -> list[TaskFlops]:
    """Returns the operations of each chunk's tasks for a microbatch with these contents.

    Args:
        layers: all layers, in the order in which a microbatch meets them.
        counts: the number of layers in each chunk, in the same order.
        amounts: the contents of the microbatch.
    """
    tasks = _tasks_of_layers(layers, amounts)
    return [TaskFlops(*map(sum, zip(TaskFlops(0.0, 0.0, 0.0), *islice(tasks, n), strict=True))) for n in counts]


def _tasks_of_layers(layers: Sequence[CountedLayer], amounts: Amounts) -> Iterator[TaskFlops]:
    has_backward = False
    for layer in layers:
        has_backward |= layer.trains
        tasks = layer.forward(amounts).tasks(trains=layer.trains, has_backward=has_backward)
        yield tasks if layer.returns_gradient else tasks._replace(input_gradient=0.0)
