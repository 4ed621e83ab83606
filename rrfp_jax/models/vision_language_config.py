"""The shape of a model that reads text and pictures, and sounds: a record of records, pure data."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.encoder_config import AudioConfig, ProjectorConfig, VisionConfig


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
