"""The data sets of a run, and the checks that the model can read their contents."""

import sys
from math import isqrt

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.model_tokens import (
    KnownModel,
    check_tokens,
    known_model,
    text_writer,
    with_kept_tokenizer,
    with_tokenizer,
)
from rrfp_jax.data import (
    HELD_OUT,
    TRAIN,
    ImageText,
    ImageTextConfig,
    OwnData,
    Part,
    TextBytes,
    Tokens,
)
from rrfp_jax.data.buckets import CutSizes, cut_sizes
from rrfp_jax.data.own_data_config import OwnDataConfig
from rrfp_jax.data.text_bytes import TextConfig
from rrfp_jax.data.token_kind import BYTE_TOKENS
from rrfp_jax.data.tokens_config import JsonlConfig, ParquetConfig, TokensConfig
from rrfp_jax.models.vision_config import ProjectorConfig, VisionConfig

RunData = TextBytes | ImageText | Tokens | OwnData
"""Any data set that a run trains or evaluates on."""
_ORIGINS = {"path", "object", "arguments"}
"""Fields that say where data comes from."""


def make_data_set(
    config: TrainConfig, part: Part = TRAIN, *, known: KnownModel | None = None, force: bool = False
) -> RunData:
    """Returns the data that a run trains on, or the part of it that is held out for evaluation.

    ``known`` is the model that the run begins with (None: by its configuration). Raises ValueError, with the remedy, if
    the data cannot be read, if this model cannot read it, or if it has no such part; and also, unless ``force`` says
    that it is meant, if its tokens are not the model's.
    """
    known = known_model(config) if known is None else known
    if not force and isinstance(config.data, TextConfig):
        check_tokens(config.data_kind, BYTE_TOKENS, known)  # refuse before reading all of it
    data: RunData = _text(config, part, known) if config.images is None else _images(config, part, known)
    if not force:
        check_tokens(config.data_kind, data.token_kind, known)
    if config.model.vocab_size < data.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokens of the data are up to "
            f"{data.vocab_size - 1}: give at least {data.vocab_size}"
        )
    return data


def make_evaluation_sets(
    config: TrainConfig, *, known: KnownModel | None = None, force: bool = False
) -> dict[str, RunData]:
    """Returns the evaluation sets of a run by name; none without a section ``evaluation``.

    Raises ValueError, naming the set, as :func:`make_data_set` does, and for differences from the run's data that do
    not exist or cannot be.
    """
    sets = {}
    for name, (of_set, part) in evaluation_configs(config).items():
        where = f"evaluation.sets.{name}"
        try:
            found = sets[name] = make_data_set(of_set, part, known=known, force=force)
        except ValueError as error:
            raise ValueError(f"{where}: {error}".replace("to train on", "to evaluate on")) from None
        if _scale(of_set) != _scale(config):
            raise ValueError(f"{where}: the encoder scales pixels as in training: leave out mean and std of images")
        found.counts_once = True
    return sets


def evaluation_configs(config: TrainConfig) -> dict[str, tuple[TrainConfig, Part]]:
    """Each set of the section ``evaluation`` by name: a configuration whose data is the set's, and the part it takes.

    Raises ValueError, naming the set, for differences from the run's data that do not exist or cannot be.
    """
    sets: dict[str, tuple[TrainConfig, Part]] = {}
    for name, differences in ({} if config.evaluation is None else config.evaluation.named_sets).items():
        is_own = not _ORIGINS.isdisjoint(differences)
        all_of_it = {"held_out": 0.0} if is_own and hasattr(config.data, "held_out") else {}
        of_set = config.with_data({**all_of_it, **differences}, f"evaluation.sets.{name}")
        sets[name] = of_set, TRAIN if is_own else HELD_OUT
    return sets


def vocabulary_note(config: TrainConfig, data: RunData) -> str | None:
    """Returns a sentence which says that the model knows more tokens than the token set has; None where it does not."""
    if not isinstance(data, Tokens) or config.model.vocab_size == data.vocab_size:
        return None
    return (
        f"the model's vocabulary of {config.model.vocab_size} is larger than that of the data, {data.vocab_size}: the "
        "other tokens never come"
    )


def _text(config: TrainConfig, part: Part, known: KnownModel) -> TextBytes | Tokens | OwnData:
    if config.vision is not None:
        raise ValueError(f"data of kind {config.data_kind} is text alone, and the model has vision: give image_text")
    match config.data:
        case OwnDataConfig() as data:
            return OwnData(data, config.model.vocab_size, part)
        case TokensConfig() as data:
            return Tokens(with_kept_tokenizer(data, known), part)
        case JsonlConfig() | ParquetConfig() as data:
            from rrfp_jax.data.text_files import tokens_of_files

            return tokens_of_files(with_tokenizer(data, known), part, say=_say)
        case TextConfig() as data:
            return TextBytes(data, part)
    raise AssertionError(config.data)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _images(config: TrainConfig, part: Part, known: KnownModel) -> ImageText:
    from rrfp_jax.commands.training.model_parts import sample_cost

    data = config.images
    assert data is not None
    writer = text_writer(data, known, sees=config.vision is not None)
    images = ImageText(data, cost=sample_cost(config), part=part, cut=_cut_sizes(config), writer=writer)
    if images.num_images and config.vision is None:
        raise ValueError(
            f"{data.path} has {images.num_images} images, and the model no vision: give a section vision, or text alone"
        )
    if config.vision is not None and (images.num_images or part == TRAIN):
        if not images.num_images:
            raise ValueError(
                f"{data.path} has no images, and the model has vision: leave out the sections vision and projector, or "
                "give lines with images"
            )
        _check_sees(data, config, images.largest_grid)
    return images


def _cut_sizes(config: TrainConfig) -> CutSizes:
    """Returns the sizes of a batch that the meshes of the run's stages divide."""
    layout = config.pipeline
    return cut_sizes(layout.mesh or {}, layout.encoder_mesh)


def _check_sees(data: ImageTextConfig, config: TrainConfig, largest_grid: tuple[int, int]) -> None:
    """Raise ValueError where the encoder's shape does not fit the data's patches."""
    vision, projector = config.vision, config.projector or ProjectorConfig()
    assert vision is not None
    wanted = {"vision.patch_dim": (vision.patch_dim, data.patch_size**2 * data.channels)}
    wanted["projector.patches_per_feature"] = (projector.patches_per_feature, data.merge**2)
    if data.merge > 1:  # a patch that is a feature by itself has no order
        wanted["projector.row_order"] = (projector.row_order, data.row_order)
    # The settings of a given model cannot be changed, so the remedies change how the data is shown.
    of_data = {
        "vision.patch_dim": "another patch_size or channels",
        "projector.patches_per_feature": f"merge {isqrt(projector.patches_per_feature)}",
        "projector.row_order": f"row_order {str(projector.row_order).lower()}",
    }
    for name, (given, needed) in wanted.items():
        if given != needed:
            is_given = config.run.init_from is not None
            remedy = f"data.images {of_data[name]}" if is_given else f"{_to_give(name)} {needed}"
            raise ValueError(f"{name} is {given}, and the data has {needed}: give {remedy}")
    _check_positions(data, vision, largest_grid)


def _check_positions(data: ImageTextConfig, vision: VisionConfig, largest_grid: tuple[int, int]) -> None:
    rows, columns = largest_grid
    is_equal = data.image_size is not None
    if is_equal != (vision.num_patches is not None):
        what = "images of one size" if is_equal else "images of different sizes"
        need = str(rows * columns) if is_equal else f"{rows},{columns}"
        raise ValueError(f"the data has {what}, for which vision needs grid {need}: give that")
    if vision.num_patches is not None:
        if vision.num_patches != rows * columns:
            raise ValueError(
                f"vision.grid is {vision.num_patches}, and images have {rows * columns} patches: give that number"
            )
    elif (vision.max_rows or 0) < rows or (vision.max_columns or 0) < columns:
        raise ValueError(
            f"vision knows {vision.max_rows} rows and {vision.max_columns} columns of patches, and the largest image "
            f"has {rows} and {columns}: give vision.grid of at least that"
        )


def _scale(config: TrainConfig) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """How the pixels of image files are scaled; None where there are none."""
    return None if config.images is None else (config.images.mean, config.images.std)


def _to_give(name: str) -> str:
    """Returns the key that gives a field of the encoder or the projector."""
    section, _, key = name.partition(".")
    return name if section == "vision" else f"projector.overrides {key}"
