"""The shapes of encoders, projectors, and a model that reads text and pictures: validated records, pure data.

One transformer serves pictures and sound; only the stem that turns its input into vectors differs. CLIP, SigLIP,
InternViT and the tower of Qwen2.5-VL are values of :class:`VisionConfig`:

=================  ==============  ==============  ==============  ==============
field              CLIP            SigLIP          InternViT       Qwen2.5-VL
=================  ==============  ==============  ==============  ==============
class_token        True            False           True            False
patch_bias         False           True            True            False
pre_norm           True            False           False           False
activation         quick_gelu      gelu_tanh       gelu            silu
gated_mlp          False           False           False           True
qkv_bias           True            True            False (6B)      True
qk_norm            False           False           True (6B)       False
layer_scale        None            None            0.1             None
norm               layer_norm      layer_norm      rms_norm (6B)   rms_norm
final_norm         False           as used         False           True
feature_layer      -2 in LLaVA     -1              -1              -1
rotary_theta       None            None            None            10000
patch_frames       1               1               1               2
window             None            None            None            8
=================  ==============  ==============  ==============  ==============

The sections ``vision`` and ``projector`` of a configuration name a kind, sizes, and the fields that differ from the
kind (:data:`VISION_KINDS`, :data:`PROJECTOR_KINDS`); :func:`encoder_values` makes a record of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np

from rrfp_jax.field_rules import check_fields, check_types
from rrfp_jax.models.config import ABOVE_0, LanguageModelConfig, check_dtypes

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu")
"""Activations of an MLP: the error function's GELU; its approximation by tanh; ``x * sigmoid(1.702 x)``; and ``x *
sigmoid(x)``."""
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
    gated_mlp: bool = False
    """Whether the MLP is ``down(activation(gate(x)) * up(x))``, as in the decoder but with biases."""
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
        num_inner = 2 if self.gated_mlp else 1
        mlp = (num_inner + 1) * self.hidden * self.mlp_dim + num_inner * self.mlp_dim + self.hidden
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
    rotary_theta: float | None = None
    """Base of the wavelengths by which a patch's row turns one half of each head's pairs of dims, and its column the
    other, for packed rows of images of any size. None: positions are learned."""
    window: int | None = None
    """Rows and columns of patches of the squares, counted from an image's first patch, within which patches attend to
    each other. None: a patch attends to its whole image."""
    global_layers: tuple[int, ...] = ()
    """Layers without a ``window`` where the others have one, counted from 0."""
    patch_frames: int = 1
    """Pictures that a patch of a video spans, each with a part of the projection's matrix. An image is so many equal
    pictures."""
    patch_bias: bool = True
    """Whether the projection of patches has a bias."""
    class_token: bool = False
    """Whether a learned token stands before the patches of each image; features are those of the patches alone."""
    pre_norm: bool = False
    """Whether a norm stands before the first layer, as in CLIP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ABOVE_0, "patch_dim", "num_patches", "max_rows", "max_columns")
        check_fields(self, ABOVE_0, "rotary_theta", "window", "patch_frames")
        is_equal = self.num_patches is not None
        if self.rotary_theta is not None:
            self._check_rotary()
        elif (self.max_rows is None, self.max_columns is None) != (is_equal, is_equal):
            raise ValueError(
                "positions of patches are not settled: give num_patches for equal images, "
                "or both max_rows and max_columns for packed ones, or rotary_theta"
            )
        if self.window is not None and not self.is_packed:
            raise ValueError("a window goes by the rows and columns of packed images: leave it out, or num_patches")
        absent = [layer for layer in self.global_layers if not 0 <= layer < self.num_layers]
        if absent or (self.global_layers and self.window is None):
            what = f"names layer {absent[0]} of {self.num_layers}" if absent else "is for layers with a window"
            raise ValueError(f"global_layers {what}: give numbers of layers from 0 on, and a window of the others")
        if self.is_packed and self.class_token:
            raise ValueError("packed rows hold several images and have no place for a class token: leave it out")

    def _check_rotary(self) -> None:
        if (self.num_patches, self.max_rows, self.max_columns) != (None, None, None):
            raise ValueError("rotary_theta is for packed images of any size: leave num_patches or grid out")
        if (width := self.hidden // self.num_heads) % 4:
            raise ValueError(
                f"heads are {width} wide, and rotary_theta turns two halves of pairs: give a multiple of 4"
            )

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several images."""
        return self.num_patches is None

    @property
    def has_layers_of_places(self) -> bool:
        """Whether layers read the rows and columns of patches: for rotary positions, or for a window."""
        return self.rotary_theta is not None or self.window is not None

    def is_global(self, layer: int) -> bool:
        """Returns whether patches of a layer, counted from 0, attend to their whole image."""
        return self.window is None or layer in self.global_layers

    def num_params(self) -> int:
        """Returns the number of parameters of the encoder, without the projector."""
        positions = (self.num_patches or 0) + self.class_token + (self.max_rows or 0) + (self.max_columns or 0)
        patches = self.patch_frames * self.patch_dim + self.patch_bias + self.class_token + positions
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


@dataclass(frozen=True)
class Modality:
    """One encoder with its projector, and the leaves of the batch that belong to it."""

    name: str
    """Prefix of its layers' names: ``vision`` of ``vision.layers.0``."""
    projector_name: str
    """Layer name of the projector."""
    encoder: VisionConfig | AudioConfig
    """Shape of the encoder."""
    projector: ProjectorConfig
    """Shape of the projector."""
    data_leaf: str
    """Leaf with the pictures or sounds, ``[rows, patches or frames, numbers]``."""
    segments_leaf: str
    """Leaf with the segment ids of packed rows; read if the encoder is packed."""
    index_leaf: str
    """Leaf with the number of the feature that takes the place of each token."""

    @property
    def inputs_per_feature(self) -> int:
        """Number of patches or frames that become one feature."""
        frames = self.encoder.frames_per_position if isinstance(self.encoder, AudioConfig) else 1
        return frames * self.projector.patches_per_feature


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig:
    """A decoder with encoders, whose features take the place of some tokens of the text.

    Raises ValueError, with the remedy, for parts that do not fit each other.
    """

    vision: VisionConfig
    """Shape of the encoder of pictures."""
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    """Projector of its features."""
    decoder: LanguageModelConfig
    """Shape of the language model."""
    audio: AudioConfig | None = None
    """Shape of the encoder of sounds; None: the model does not listen."""
    audio_projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    """Projector of its features."""

    def __post_init__(self) -> None:
        if self.audio_projector.row_order:
            raise ValueError("frames have no rows of patches: give audio_projector.row_order false")
        if self.projector.row_order and self.vision.is_packed:
            raise ValueError(
                "packed images have their patches block by block: give projector.row_order false, or equal images"
            )
        num_patches, block = self.vision.num_patches, self.projector.patches_per_feature
        if num_patches is None:
            return
        if num_patches % block:
            raise ValueError(
                f"{num_patches} patches do not divide into features of {block}: "
                f"give num_patches {num_patches + -num_patches % block}"
            )
        rows = math.isqrt(num_patches)
        if self.projector.row_order and (rows**2 != num_patches or rows % self.projector.side):
            raise ValueError(
                f"{num_patches} patches are no square image that divides into squares of {block}: "
                f"give num_patches {(-(-rows // self.projector.side) * self.projector.side) ** 2}"
            )

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """The encoders in the order of their chunks."""
        vision = Modality(
            "vision", "projector", self.vision, self.projector, "patches", "patch_segments", "image_index"
        )
        if self.audio is None:
            return (vision,)
        audio = Modality(
            "audio", "audio_projector", self.audio, self.audio_projector, "frames", "frame_segments", "audio_index"
        )
        return vision, audio

    def num_params(self) -> int:
        """Returns the number of parameters of the whole model, tied embeddings counted once."""
        return self.decoder.num_params() + sum(
            each.encoder.num_params() + each.projector.num_params(each.encoder.hidden, self.decoder.hidden)
            for each in self.modalities
        )


def check_image_index(config: VisionLanguageConfig, leaves: Mapping[str, Any], name: str = "the microbatch") -> None:
    """Raises ValueError if an index leaf does not fit the pictures or sounds of a microbatch.

    A row or column of a patch beyond the tables of positions is refused too. ``leaves`` are the arrays of the
    microbatch by name; the numbers of a ``jax.ShapeDtypeStruct`` are not checked. ``name`` names the microbatch in the
    error.

    A compiled program cannot refuse such numbers: it gives a loss of NaN. So the chunks of
    :func:`rrfp_jax.models.vision_language_model` call the two halves of this check before every step.
    """
    check_index_leaves(config, leaves, name)
    check_patch_places(config, leaves, name)


def check_index_leaves(config: VisionLanguageConfig, leaves: Mapping[str, Any], name: str) -> None:
    """Raises ValueError if an index leaf does not fit: the half that the decoder's first chunk checks."""
    for modality in config.modalities:
        for problem in _index_problems(modality, leaves):
            raise ValueError(f"{modality.index_leaf} of {name} {problem}")


def check_patch_places(config: VisionLanguageConfig, leaves: Mapping[str, Any], name: str) -> None:
    """Raises ValueError if a patch lies beyond the tables: the half that the encoder's first chunk checks."""
    for leaf, field_name in (("patch_rows", "max_rows"), ("patch_columns", "max_columns")):
        size, places = getattr(config.vision, field_name), _numbers(leaves, leaf)
        if size is not None and places is not None and places.size and not 0 <= places.min() <= places.max() < size:
            raise ValueError(
                f"{leaf} of {name} go from {places.min()} to {places.max()}, but {field_name} is {size}: "
                f"give numbers from 0 to {size - 1}, or a larger {field_name}"
            )


def _numbers(leaves: Mapping[str, Any], name: str) -> Any:
    """Returns a leaf as an array, or None if only its shape is known here."""
    leaf = leaves.get(name)
    return np.asarray(leaf) if hasattr(leaf, "__array__") else None


def _index_problems(modality: Modality, leaves: Mapping[str, Any]) -> Iterator[str]:
    name, data, index = modality.data_leaf, leaves.get(modality.data_leaf), leaves.get(modality.index_leaf)
    if index is None:
        if data is not None:
            yield f"is missing although there are {name}: say which feature stands where, -1 for none"
        return
    if index.shape != leaves["tokens"].shape:
        yield f"has shape {index.shape}, the tokens {leaves['tokens'].shape}: give one number for each token"
    numbers = _numbers(leaves, modality.index_leaf)
    highest = -1 if numbers is None else int(numbers.max(initial=-1))
    if data is None:
        if highest >= 0:
            yield f"names feature {highest} but there are no {name}: give -1 everywhere, or {name}"
        return
    rows, length = data.shape[:2]
    if length % modality.inputs_per_feature:
        yield f"counts features of {modality.inputs_per_feature} {name}, which do not divide {length}: pad the rows"
    num_features = rows * (length // modality.inputs_per_feature)
    if highest >= num_features:
        yield (
            f"names feature {highest} but the {name} give {num_features} ({rows} x {num_features // rows}): "
            f"give numbers from 0 to {num_features - 1}, and -1 for none"
        )
    segments = _numbers(leaves, modality.segments_leaf) if modality.encoder.is_packed else None
    if numbers is not None and segments is not None and highest < num_features:
        is_padding = segments[:, :: modality.inputs_per_feature].reshape(-1) == 0
        named = numbers[numbers >= 0]
        if (padded := named[is_padding[named]]).size:
            segments_leaf = modality.segments_leaf
            yield f"names feature {padded.min()}, which is padding: name features whose {segments_leaf} is not 0"


VISION_KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "clip": {
        **{"class_token": True, "patch_bias": False, "pre_norm": True, "activation": "quick_gelu"},
        **{"final_norm": False, "feature_layer": -2, "norm_eps": 1e-5},
    },
    "siglip": {"activation": "gelu_tanh"},
    "intern": {"class_token": True, "layer_scale": 0.1, "final_norm": False},
    "qwen": {
        **{"gated_mlp": True, "activation": "silu", "norm": "rms_norm", "patch_bias": False},
        **{"rotary_theta": 10_000.0, "patch_frames": 2, "window": 8},
    },
}
"""Fields in which each kind of encoder differs from the defaults of :class:`VisionConfig`."""
PROJECTOR_KINDS: Mapping[str, Mapping[str, Any]] = {
    "llava": {},
    "intern": {"patches_per_feature": 4, "row_order": True, "norm": True},
}
_GRID = ("num_patches", "max_rows", "max_columns")


@dataclass(frozen=True, kw_only=True)
class VisionSection:
    """The encoder of images, a vision transformer (Dosovitskiy et al. 2021)."""

    kind: str = "plain"
    """The kind of the encoder, ``clip``, ``siglip``, ``intern``, ``qwen`` or ``plain``, which decides its activation,
    norms, biases, positions, class token and feature layer."""
    hidden: int
    """The width of the residual stream."""
    num_layers: int
    """The number of layers of the published model."""
    num_heads: int
    """The number of attention heads; divides ``hidden``."""
    mlp_dim: int
    """The inner width of the MLP."""
    patch_dim: int
    """The numbers of a patch: its pixels times the channels, 588 for 14 x 14 pixels of three colours."""
    grid: int | tuple[int, ...] | None = None
    """The patches of an image: their number where all images are alike, such as 256, or the most rows and columns where
    rows pack images of several sizes, such as ``2,16``. None: of any size, for rotary positions."""
    overrides: dict[str, Any] | None = None
    """The fields of :class:`VisionConfig` in which the encoder differs from its kind, such as ``{feature_layer: -1,
    compute_dtype: bfloat16}``. None: none."""


@dataclass(frozen=True, kw_only=True)
class ProjectorSection:
    """The projector from features of the encoder to vectors of the decoder."""

    kind: str = "llava"
    """The kind of the projector: ``llava``, two products with an activation between them, or ``intern``, which first
    merges 2 x 2 patches of square images and normalises them."""
    overrides: dict[str, Any] | None = None
    """The fields of :class:`ProjectorConfig` in which the projector differs from its kind, such as
    ``{patches_per_feature: 4}``. None: none."""


def encoder_values(section: str, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the record of a section ``vision`` or ``projector``, and the values of its fields.

    Raises ValueError, in one sentence, for a kind or a field that does not exist.
    """
    kinds, record = _of(section)
    kind = values.get("kind", next(iter(kinds)))
    if kind not in kinds:
        raise ValueError(f"{section}: kind is {kind!r}: give one of {', '.join(kinds)}")
    overrides, known = values.get("overrides") or {}, [field.name for field in fields(record)]
    if not isinstance(overrides, Mapping):
        raise ValueError(f"{section}.overrides is {overrides!r}: give a mapping")
    if (odd := next((key for key in overrides if key not in known), None)) is not None:
        raise ValueError(f"{section}.overrides has no key {odd!r}: the known ones are {', '.join(known)}")
    given = {key: value for key, value in values.items() if key not in ("kind", "overrides", "grid")}
    return record, {**kinds[kind], **_grid(values.get("grid")), **given, **overrides}


def encoder_section(section: str, record: VisionConfig | ProjectorConfig) -> dict[str, Any]:
    """Returns the section that becomes this record, by the kind from which it differs least."""
    kinds, of = _of(section)
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(record).items()}
    defaults = {field.name: field.default for field in fields(of) if field.default is not MISSING}
    defaults |= {key: list(value) for key, value in defaults.items() if isinstance(value, tuple)}
    own = {field.name for field in fields(VisionSection)}
    taken = {"kind": "", **{key: value for key, value in values.items() if section == "vision" and key in own}}
    if section == "vision":
        alike, of_rows = values["num_patches"], [values["max_rows"], values["max_columns"]]
        taken["grid"] = alike if alike is not None else None if of_rows == [None, None] else of_rows
    rest = {key: value for key, value in values.items() if key not in taken and key not in _GRID}

    def differences(kind: str) -> dict[str, Any]:
        expected = {**defaults, **kinds[kind]}
        return {key: value for key, value in rest.items() if key not in expected or expected[key] != value}

    kind = min(kinds, key=lambda kind: len(differences(kind)))
    return {**taken, "kind": kind, "overrides": differences(kind)}


def _of(section: str) -> tuple[Mapping[str, Mapping[str, Any]], type]:
    return (VISION_KINDS, VisionConfig) if section == "vision" else (PROJECTOR_KINDS, ProjectorConfig)


def _grid(given: Any) -> dict[str, Any]:
    if isinstance(given, list | tuple):
        if len(given) != 2:
            raise ValueError(f"vision.grid has {len(given)} numbers: give one number of patches, or rows and columns")
        return {"max_rows": given[0], "max_columns": given[1]}
    return {} if given is None else {"num_patches": given}
