"""Reads how an imported model's images become pixels, and which tokens stand for them, from the files with it.

``preprocessor_config.json``, or ``image_processor`` in ``processor_config.json``, holds the steps of image processors
of transformers, one after the other: resize, crop the middle, scale, subtract and divide. ``config.json`` says which
token stands for a feature, and ``tokenizer_config.json`` which tokens InternVL puts around an image. Those of
Qwen2.5-VL have one name everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isqrt
from pathlib import Path
from typing import Any

from rrfp_jax.data.images import ImageTokens
from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf._vision_language import INTERNVL, QWEN_VL
from rrfp_jax.hf.tensor_files import read_json
from rrfp_jax.models.vision_config import VisionConfig

# The older file, and the newer one with the part of it that describes images.
_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
_FILTERS = range(6)  # Pillow's numbers of filters
# The tokens around the features of an image, by the fields of the tokenizer that may name others.
_AROUND_IMAGES = {"start_image_token": "<img>", "end_image_token": "</img>"}
_QWEN_MARKS = "<|vision_start|>", "<|vision_end|>"
ImageSize = tuple[int, int]
"""Height and width, in pixels."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How a picture of any size becomes numbers. A step whose field is None is left out."""

    resized: ImageSize | int | None
    """The size after resizing, or the pixels of the shorter side, where the shape is kept."""
    resample: int
    """Pillow's number of the filter."""
    crop: ImageSize | None
    """The size of the middle that is cut out."""
    factor: float | None
    """The factor of pixels, which are 0 to 255."""
    mean: tuple[float, ...] | None
    """The numbers that are subtracted after that, one for each channel."""
    std: tuple[float, ...] | None
    """The divisors after that, one for each channel."""
    channels: int
    """The number of channels: 3 for RGB, 1 for grey."""
    patch_size: int
    """Pixels of a patch along each side."""

    @property
    def size(self) -> ImageSize:
        """The size that all pictures have in the end."""
        size = self.crop or self.resized
        assert isinstance(size, tuple)
        return size


def read_image_settings(carried: Path, vision: VisionConfig) -> ImageSettings:
    """Returns the image settings of a model by the files that came with it.

    Raises ValueError, naming file and field, if the tower's images cannot be made that way.
    """
    fields, path = _processor(carried), carried / "config.json"
    tower = ConfigFields(read_json(path), str(path), {}).part("vision_config", {"num_channels": 3})
    channels = tower.whole("num_channels")
    patch_size, side = isqrt(vision.patch_dim // channels), isqrt(vision.num_patches or 0)
    fields.only("do_pad", False, why="images are not padded here")
    does_crop, resample = fields.flag("do_center_crop"), fields.get("resample")
    if type(resample) is not int or resample not in _FILTERS:
        raise fields.refusal("resample", resample, f"a filter of Pillow is needed, {_FILTERS[0]} to {_FILTERS[-1]}")
    crop = _size(fields, "crop_size", shorter=False) if does_crop else None
    if isinstance(crop, int):
        raise fields.refusal("crop_size", fields.get("crop_size"), "height and width are needed")
    settings = ImageSettings(
        resized=_size(fields, "size", shorter=does_crop) if fields.flag("do_resize") else None,
        resample=resample,
        crop=crop,
        factor=fields.number("rescale_factor") if fields.flag("do_rescale") else None,
        mean=_per_channel(fields, "image_mean", channels) if fields.flag("do_normalize") else None,
        std=_per_channel(fields, "image_std", channels) if fields.flag("do_normalize") else None,
        channels=channels,
        patch_size=patch_size,
    )
    if not isinstance(settings.crop or settings.resized, tuple):
        raise fields.refusal("size", fields.get("size"), "pictures of one size are needed, so give height and width")
    height, width = settings.size
    if (height // patch_size, width // patch_size) != (side, side):
        raise fields.refusal(
            "crop_size" if settings.crop else "size",
            list(settings.size),
            f"the tower sees {side} x {side} patches of {patch_size} pixels: give {side * patch_size}",
        )
    return settings


def read_image_tokens(carried: Path) -> ImageTokens:
    """Returns the tokens that stand for an image, by the files that came with a model.

    Raises ValueError if they do not say.
    """
    config, where = read_json(carried / "config.json"), str(carried / "config.json")
    token = ConfigFields(config, where, {}).get("image_token_id", "image_token_index")
    if type(token) is not int or token < 0:
        raise ValueError(
            f"{where}: image_token_id is {token!r}: the number of the token that stands for an image is needed"
        )
    if config.get("model_type") == QWEN_VL:
        return ImageTokens(feature=token, before=_QWEN_MARKS[0], behind=_QWEN_MARKS[1], are_in_chats=True)
    if config.get("model_type") != INTERNVL:
        return ImageTokens(feature=token)
    path = carried / "tokenizer_config.json"
    words: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    extra = words.get("extra_special_tokens")
    # The tokenizer's own entry counts before one in the newer part for more tokens.
    words = {**(extra if isinstance(extra, dict) else {}), **words}
    before, behind = (str(words.get(name, word)) for name, word in _AROUND_IMAGES.items())
    return ImageTokens(feature=token, before=before, behind=behind)


def _processor(carried: Path) -> ConfigFields:
    for name, part in _FILES:
        path = carried / name
        if path.is_file():
            fields = ConfigFields(read_json(path), str(path), {})
            if part is None:
                return fields
            if fields.has(part):
                return fields.part(part)
    raise ValueError(
        f"{carried} has no {_FILES[0][0]}, which says how images become patches: put that of the model there, or give "
        "a run that image_text has trained"
    )


def _size(fields: ConfigFields, name: str, *, shorter: bool) -> ImageSize | int:
    """Returns a size; one number alone counts for the shorter side, or for both."""
    value = fields.get(name)
    if isinstance(value, dict) and value.keys() == {"shortest_edge"}:
        value, shorter = value["shortest_edge"], True
    elif isinstance(value, dict) and value.keys() == {"height", "width"}:
        value = value["height"], value["width"]
    sides = value if isinstance(value, tuple) else (value, value)
    if not all(type(side) is int and side > 0 for side in sides):
        raise fields.refusal(name, fields.get(name), "height and width are needed, or shortest_edge")
    return sides[0] if shorter and not isinstance(value, tuple) else sides


def _per_channel(fields: ConfigFields, name: str, channels: int) -> tuple[float, ...]:
    value = fields.get(name)
    numbers = value if isinstance(value, list) else [value] * channels
    if len(numbers) != channels or not all(isinstance(each, int | float) and isfinite(each) for each in numbers):
        raise fields.refusal(name, value, f"{channels} numbers are needed, one for each channel")
    if name == "image_std" and not min(numbers) > 0:
        raise fields.refusal(name, value, "positive numbers are needed")
    return tuple(map(float, numbers))
