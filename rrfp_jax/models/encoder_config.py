"""The shapes of encoders and projectors: validated records, pure data.

One transformer serves pictures and sound; only the stem that turns its input into vectors differs. CLIP, SigLIP and
InternViT are values of :class:`VisionConfig`:

=================  ==============  ==============  ==============
field              CLIP            SigLIP          InternViT
=================  ==============  ==============  ==============
class_token        True            False           True
patch_bias         False           True            True
pre_norm           True            False           False
activation         quick_gelu      gelu_tanh       gelu
qkv_bias           True            True            False (6B)
qk_norm            False           False           True (6B)
layer_scale        None            None            0.1
norm               layer_norm      layer_norm      rms_norm (6B)
final_norm         False           as used         False
feature_layer      -2 in LLaVA     -1              -1
=================  ==============  ==============  ==============
"""

from dataclasses import dataclass

from rrfp_jax.field_rules import check_fields, check_types
from rrfp_jax.models.config import ABOVE_0, check_dtypes

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")
"""Activations of an MLP: the error function's GELU; its approximation by tanh; and ``x * sigmoid(1.702 x)``."""
NORMS = ("layer_norm", "rms_norm")
ENCODER, OWN_CHUNK, DECODER = "encoder", "own", "decoder"
PROJECTOR_PLACES = (ENCODER, OWN_CHUNK, DECODER)
"""Places of a projector: the last chunk of its encoder, a chunk of its own, or the decoder's first chunk."""


def _check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless a field has one of these values."""
    if getattr(config, name) not in choices:
        raise ValueError(f"{name} is {getattr(config, name)!r}: give one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A pre-norm transformer in which every position attends to every other.

    Raises ValueError, with the remedy, for values that do not describe a model.
    """

    hidden: int
    """Width of the residual stream."""
    num_layers: int
    """Number of layers of the published model. ``feature_layer`` decides how many of them exist here."""
    num_heads: int
    """Number of attention heads; it divides ``hidden``."""
    mlp_dim: int
    """Inner width of the MLP."""
    activation: str = "gelu"
    """The activation of the MLP."""
    norm: str = "layer_norm"
    """The norm before attention, before the MLP and at the end."""
    norm_eps: float = 1e-6
    """Number that norms add to the variance or the mean square."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias; all other products have one."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm over their whole width."""
    layer_scale: float | None = None
    """Initial value of a learned factor for each channel of the outputs of attention and MLP; None: no such factor."""
    final_norm: bool = True
    """Whether the features pass a norm at the end."""
    feature_layer: int = -1
    """The layer whose output is the features, counted from the last, -1. Layers behind it do not exist here."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices; those that write to the residual stream get
    ``init_std / sqrt(2 * num_layers)``."""
    param_dtype: str = "float32"
    """Dtype in which parameters are kept and updated."""
    compute_dtype: str = "float32"
    """Dtype of matrix products and of activations between layers and chunks."""

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("hidden", "num_layers", "num_heads", "mlp_dim")
        check_fields(self, ABOVE_0, *sizes, "norm_eps", "layer_scale", "init_std")
        check_dtypes(self)
        _check_choice(self, "activation", ACTIVATIONS)
        _check_choice(self, "norm", NORMS)
        if self.hidden % self.num_heads:
            raise ValueError(
                f"hidden {self.hidden} does not divide into {self.num_heads} heads: "
                f"give hidden {self.hidden + -self.hidden % self.num_heads}"
            )
        if not -self.num_layers <= self.feature_layer <= -1:
            raise ValueError(
                f"feature_layer is {self.feature_layer} but the encoder has {self.num_layers} layers: "
                f"give {-self.num_layers} to -1"
            )
        if self.feature_layer < -1 and self.final_norm:
            raise ValueError(f"features of layer {self.feature_layer} pass no final norm: give final_norm false")

    @property
    def num_layers_run(self) -> int:
        """Number of layers that exist here."""
        return self.num_layers + 1 + self.feature_layer

    @property
    def num_norm_params(self) -> int:
        """Number of parameters of one norm."""
        return self.hidden * (2 if self.norm == "layer_norm" else 1)

    def num_layer_params(self) -> int:
        """Returns the number of parameters of one layer."""
        attention = 4 * self.hidden**2 + self.hidden * (3 * self.qkv_bias + 1 + 2 * self.qk_norm)
        mlp = 2 * self.hidden * self.mlp_dim + self.mlp_dim + self.hidden
        scales = 0 if self.layer_scale is None else 2 * self.hidden
        return attention + mlp + scales + 2 * self.num_norm_params

    def num_layers_params(self) -> int:
        """Returns the number of parameters of the layers that exist here, with the final norm."""
        return self.num_layers_run * self.num_layer_params() + self.final_norm * self.num_norm_params


@dataclass(frozen=True, kw_only=True)
class VisionConfig(EncoderConfig):
    """A vision transformer (Dosovitskiy et al. 2021).

    Its images are either equal, with ``num_patches`` patches each, or *packed*: images of different sizes one after
    another in a row, with the number of each patch's image, row and column beside it (``max_rows``, ``max_columns``).
    """

    patch_dim: int
    """Numbers in a patch: height * width * colours, which is the input width of the projection."""
    num_patches: int | None = None
    """Patches of every image, for equal images: positions are learned by patch number."""
    max_rows: int | None = None
    """Rows of patches that the tallest image has, for packed rows: positions are learned by row and by column."""
    max_columns: int | None = None
    """Columns of patches that the widest image has, for packed rows."""
    patch_bias: bool = True
    """Whether the projection of patches has a bias."""
    class_token: bool = False
    """Whether a learned token stands before the patches of each image; features are those of the patches alone."""
    pre_norm: bool = False
    """Whether a norm stands before the first layer, as in CLIP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ABOVE_0, "patch_dim", "num_patches", "max_rows", "max_columns")
        is_equal = self.num_patches is not None
        if (self.max_rows is None, self.max_columns is None) != (is_equal, is_equal):
            raise ValueError(
                "positions of patches are not settled: give num_patches for equal images, "
                "or both max_rows and max_columns for packed ones"
            )
        if self.is_packed and self.class_token:
            raise ValueError("packed rows hold several images and have no place for a class token: leave it out")

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several images."""
        return self.num_patches is None

    def num_params(self) -> int:
        """Returns the number of parameters of the encoder, without the projector."""
        positions = (self.num_patches or 0) + self.class_token + (self.max_rows or 0) + (self.max_columns or 0)
        patches = self.patch_dim + self.patch_bias + self.class_token + positions
        return self.hidden * patches + self.pre_norm * self.num_norm_params + self.num_layers_params()


@dataclass(frozen=True, kw_only=True)
class AudioConfig(EncoderConfig):
    """A transformer over spectrograms; positions are sines and cosines, as in Whisper (Radford et al. 2022)."""

    bins: int
    """Frequencies of a frame."""
    frames_per_position: int = 1
    """Consecutive frames that become one position."""
    is_packed: bool = False
    """Whether a row may hold several clips, each beginning at a multiple of ``frames_per_position``, with the number of
    each frame's clip beside it (the leaf ``frame_segments``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ABOVE_0, "bins", "frames_per_position")
        if self.hidden % 2:
            raise ValueError(
                f"hidden is {self.hidden} and positions are pairs of a sine and a cosine: give an even one"
            )

    def num_params(self) -> int:
        """Returns the number of parameters of the encoder, without the projector."""
        return self.hidden * (self.bins * self.frames_per_position + 1) + self.num_layers_params()


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """A projector from features of an encoder to vectors of the decoder: ``linear_2(activation(linear_1(x)))``.

    LLaVA's is the default. InternVL's has ``patches_per_feature`` 4 in ``row_order`` and a ``norm``.
    """

    activation: str = "gelu"
    """The activation between the two products."""
    patches_per_feature: int = 1
    """Patches that are concatenated and become one feature, 4 for 2 x 2."""
    row_order: bool = False
    """Whether patches come row by row from a square image, so that the projector must gather those of a square (pixel
    shuffle). If not, the patches of a feature are consecutive."""
    norm: bool = False
    """Whether a LayerNorm stands before ``linear_1``."""
    norm_eps: float = 1e-5
    """Number that this norm adds to the variance."""
    mlp_dim: int | None = None
    """Width between the two products. None: the width of the decoder."""
    bias: bool = True
    """Whether both products have a bias."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fields(self, ABOVE_0, "patches_per_feature", "mlp_dim", "norm_eps")
        _check_choice(self, "activation", ACTIVATIONS)
        if self.row_order and self.side**2 != self.patches_per_feature:
            raise ValueError(f"{self.patches_per_feature} patches make no square: give patches_per_feature 4, 9, ...")

    @property
    def side(self) -> int:
        """Side of the square of patches that becomes a feature."""
        return round(self.patches_per_feature**0.5)

    def num_params(self, in_dim: int, out_dim: int) -> int:
        """Returns the number of parameters between an encoder and a decoder of these widths."""
        width, inner = in_dim * self.patches_per_feature, out_dim if self.mlp_dim is None else self.mlp_dim
        biases = (inner + out_dim) * self.bias
        return 2 * width * self.norm + width * inner + inner * out_dim + biases
