"""The data sets of a run, and the checks that the model can read their contents.

A run that begins with an import or another run (``run.init_from``), or goes on with the checkpoints of its directory,
has a model whose tokens are known. Data without a tokenizer of its own is written in the model's tokens, and all other
data is compared with them.
"""

import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.data import HELD_OUT, TRAIN, ImageText, ImageTextConfig, OwnData, Part, TextBytes, Tokens
from rrfp_jax.data.buckets import cut_sizes
from rrfp_jax.data.config import JsonlConfig, OwnDataConfig, ParquetConfig, TextConfig, TokensConfig
from rrfp_jax.data.images import TextWriter
from rrfp_jax.data.tokenizer_files import BYTE_TOKENS, TokenKind, kind_of_file, read_tokenizer, tokenizer_file
from rrfp_jax.data.tokens import BYTE_TOKENIZER, TOKENIZER
from rrfp_jax.hf.model_folder import (
    CHECKPOINTS,
    CONFIG,
    ModelSections,
    files_are_kept,
    has_unread_tokenizer,
    open_model,
)
from rrfp_jax.models.vision_config import ProjectorConfig

RunData = TextBytes | ImageText | Tokens | OwnData
"""Any data set that a run trains or evaluates on."""
_INIT_FROM = "run.init_from"
_ORIGINS = {"path", "object", "arguments"}
"""Fields that say where data comes from."""


# -- the model's tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """The model that a run begins or goes on with, as far as its tokens are concerned."""

    where: Path | None = None
    """The folder of an import or a run; None: the run begins at random."""
    tokens: TokenKind | None = None
    """The tokens that the model knows; None: nothing tells."""
    files: Path | None = None
    """The folder of files that belong to the model; None: there are none."""
    has_begun: bool = False
    """Whether the run directory itself holds the model."""


def known_model(config: TrainConfig, directory: Path | None = None, *, fresh: bool = False) -> KnownModel:
    """Find the model that a run in ``directory`` goes on with; ``fresh``: ignore the directory's own model.

    Raises ValueError, with the remedy, if there is no such folder, or if its files do not fit together.
    """
    if directory is not None and not fresh and any((directory / CHECKPOINTS).glob("step_*/commit.json")):
        files = tokens = None
        try:
            folder = open_model(directory, "run_dir")
        except ValueError:  # other code says whether the run can go on
            return KnownModel(where=directory, has_begun=True)
        # A run without copies of its own asks its import, which may be gone, or its data, which may be moved.
        with nullcontext() if files_are_kept(directory) else suppress(ValueError):
            files = folder.files()
            tokens = folder.tokens()
        return KnownModel(where=directory, tokens=tokens, files=files, has_begun=True)
    if config.run.init_from is None:
        return KnownModel()
    folder = open_model(Path(config.run.init_from), _INIT_FROM)
    return KnownModel(where=folder.path, tokens=folder.tokens(), files=folder.files())


def check_init_from(config: TrainConfig) -> None:
    """Raise ValueError, in one sentence, if ``run.init_from`` is no such folder, or that of another model.

    Its parameters are not looked at yet.
    """
    if config.run.init_from is not None:
        projector = config.projector or (None if config.vision is None else ProjectorConfig())
        sections = ModelSections(
            model=config.model, vision=config.vision, projector=projector, adapters=config.adapters
        )
        open_model(Path(config.run.init_from), _INIT_FROM).check_fits(sections, _INIT_FROM)


def _tokenizer_of(given: str | None, known: KnownModel) -> str:
    """Returns the tokenizer to use: the given one, else that of the model, else bytes."""
    file = None if known.tokens is None else known.tokens.file
    if given is None:
        return BYTE_TOKENIZER.name if file is None else str(file)
    if file is not None and known.has_begun and given != BYTE_TOKENIZER.name and not Path(given).expanduser().exists():
        return str(file)  # the run keeps the tokenizer that it was trained with
    return given


def _check_tokens(kind_of_data: str, kind: TokenKind | None, known: KnownModel) -> None:
    """Raise ValueError if the tokens of the data, ``kind``, are not those of the model."""
    if known.where is None or kind is None:
        return
    tokens = known.tokens
    if tokens is None and kind.is_bytes and known.files is not None and has_unread_tokenizer(known.files):
        raise ValueError(
            f"the tokens of the data are bytes, and the model in {known.where} has a tokenizer in a form that is not "
            f"read here: save it as {TOKENIZER} into the folder that was imported, import again, or give --force"
        )
    if tokens is None or kind.is_same(tokens):
        return
    if tokens.is_bytes:
        remedy = "give data.tokenizer bytes, or data.kind text"
    elif kind_of_data == "tokens":
        remedy = f"tokenize the text with --tokenizer {tokens.file}"
    elif kind_of_data == "text":
        remedy = "give data.kind jsonl, parquet, tokens or image_text, with the model's tokenizer"
    else:
        remedy = f"give data.tokenizer {tokens.file}, or leave it out"
    raise ValueError(
        f"the tokens of the data are {kind}, and the model in {known.where} knows {tokens}: {remedy}, or give --force "
        "where it is to learn them"
    )


def token_notes(data: RunData, known: KnownModel) -> list[str]:
    """Returns sentences about tokens that cannot be compared, and about tokens that end texts and differ."""
    notes = []
    kind, tokens = data.token_kind, known.tokens
    if known.where is not None and not known.has_begun:
        if tokens is None:
            notes.append(
                f"nothing in {known.where} says which tokens its model knows, so nobody has compared those of the data"
            )
        elif kind is None:
            notes.append(f"the data does not say which tokens it has: they must be {tokens}, as the model's are")
        elif kind.ends and tokens.ends and kind.is_same(tokens) and kind.ends[0] not in tokens.ends:
            ends = ", ".join(map(str, tokens.ends))
            notes.append(
                f"a text of the data ends with token {kind.ends[0]}, and the model in {known.where} ends one with "
                f"{ends}: end_of_document names another"
            )
    return [*notes, *getattr(data, "notes", ())]


def vocabulary_note(config: TrainConfig, data: RunData) -> str | None:
    """Returns a sentence which says that the model knows more tokens than the token set has; None if it does not."""
    if not isinstance(data, Tokens) or config.model.vocab_size == data.vocab_size:
        return None
    return (
        f"the model's vocabulary of {config.model.vocab_size} is larger than that of the data, {data.vocab_size}: the "
        "other tokens never come"
    )


# -- data sets ---------------------------------------------------------------------------------------------------------


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
        _check_tokens(config.data_kind, BYTE_TOKENS, known)  # refuse before reading all of it
    data: RunData = _text(config, part, known) if config.images is None else _images(config, part, known)
    if not force:
        _check_tokens(config.data_kind, data.token_kind, known)
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
        scales = [images and (images.mean, images.std) for images in (of_set.images, config.images)]
        if scales[0] != scales[1]:
            raise ValueError(f"{where}: the encoder scales pixels as in training: leave out mean and std of images")
        found.counts_once = True
    return sets


def evaluation_configs(config: TrainConfig) -> dict[str, tuple[TrainConfig, Part]]:
    """Returns each set of the section ``evaluation`` by name: a configuration whose data is the set's, and the part
    that it takes.

    Raises ValueError, naming the set, for differences from the run's data that do not exist or cannot be.
    """
    sets: dict[str, tuple[TrainConfig, Part]] = {}
    for name, differences in ({} if config.evaluation is None else config.evaluation.named_sets).items():
        is_own = not _ORIGINS.isdisjoint(differences)
        all_of_it = {"held_out": 0.0} if is_own and hasattr(config.data, "held_out") else {}
        of_set = config.with_data({**all_of_it, **differences}, f"evaluation.sets.{name}")
        sets[name] = of_set, TRAIN if is_own else HELD_OUT
    return sets


def _text(config: TrainConfig, part: Part, known: KnownModel) -> TextBytes | Tokens | OwnData:
    if config.vision is not None:
        raise ValueError(f"data of kind {config.data_kind} is text alone, and the model has vision: give image_text")
    if config.has_segments and config.model.layer_variant.rope_sections is not None:
        raise ValueError(
            f"packed rows of {config.data_kind} have one position for each token, and model.variant.rope_sections "
            "needs three: give image_text, or pack false"
        )
    match config.data:
        case OwnDataConfig() as data:
            return OwnData(data, config.model.vocab_size, part)
        case TokensConfig() as data:
            # A token set names a tokenizer only to compare it; the run may have kept one that is gone elsewhere.
            kept = None if data.tokenizer is None else _tokenizer_of(data.tokenizer, known)
            return Tokens(replace(data, tokenizer=kept), part)
        case JsonlConfig() | ParquetConfig() as data:
            from rrfp_jax.data.text_files import tokens_of_files

            with_tokenizer = replace(data, tokenizer=_tokenizer_of(data.tokenizer, known))
            return tokens_of_files(with_tokenizer, part, say=lambda text: print(text, file=sys.stderr, flush=True))
        case TextConfig() as data:
            return TextBytes(data, part)
    raise AssertionError(config.data)


def _images(config: TrainConfig, part: Part, known: KnownModel) -> ImageText:
    from rrfp_jax.commands.training.model_parts import sample_cost

    data, layout = config.images, config.pipeline
    assert data is not None
    images = ImageText(
        data,
        cost=sample_cost(config),
        part=part,
        cut=cut_sizes(layout.mesh or {}, layout.encoder_mesh),
        num_replicas=layout.most_replicas,
        writer=_text_writer(data, known, sees=config.vision is not None),
        has_grid_positions=config.model.layer_variant.rope_sections is not None,
    )
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


def _text_writer(data: ImageTextConfig, known: KnownModel, *, sees: bool) -> TextWriter | None:
    """Returns the writer of text with images, or None if tokens are bytes. Raises ValueError if there can be none."""
    name = _tokenizer_of(data.tokenizer, known)
    if name == BYTE_TOKENIZER.name:
        return None
    file = tokenizer_file(name)
    kind = kind_of_file(file, (read_tokenizer(file, None).end_of_document,))
    # A model that began with an import knows how texts open and which tokens stand for images.
    is_of_hub = known.files is not None and (known.files / CONFIG).is_file()
    is_of_hub = is_of_hub and known.tokens is not None and kind.is_same(known.tokens)
    marks = None
    if is_of_hub and sees and known.files is not None:
        from rrfp_jax.hf.image_settings import read_image_tokens

        marks = read_image_tokens(known.files)
    if sees and marks is None:
        raise ValueError(
            f"data.tokenizer is {name}, and nothing says what stands for images among its tokens: give "
            f"{_INIT_FROM} with a model that has this tokenizer, or tokenizer bytes"
        )
    return TextWriter(kind, marks, opens=is_of_hub)


def _check_sees(data: ImageTextConfig, config: TrainConfig, largest_grid: tuple[int, int]) -> None:
    """Raise ValueError if the encoder's shape does not fit the data's patches, or its positions their grids."""
    vision, projector, merge = config.vision, config.projector or ProjectorConfig(), data.merge
    assert vision is not None
    of_features, row_order = projector.patches_per_feature, str(projector.row_order).lower()
    # Given, needed, and the remedy on the side of the data: the settings of a given model cannot be changed.
    wanted = {
        "vision.patch_dim": (vision.patch_dim, data.patch_size**2 * data.channels, "another patch_size or channels")
    }
    wanted["projector.patches_per_feature"] = (of_features, merge**2, f"merge {isqrt(of_features)}")
    if merge > 1:  # a patch that is a feature by itself has no order
        wanted["projector.row_order"] = (projector.row_order, data.row_order, f"row_order {row_order}")
    for name, (given, needed, of_data) in wanted.items():
        if given != needed:
            key = name.replace("projector.", "projector.overrides ")
            remedy = f"{key} {needed}" if config.run.init_from is None else f"data.images {of_data}"
            raise ValueError(f"{name} is {given}, and the data has {needed}: give {remedy}")
    rows, columns = largest_grid
    is_equal = data.image_size is not None
    if vision.rotary_theta is not None:
        if is_equal:
            raise ValueError("vision.rotary_theta is for images of their own sizes: leave data.images image_size out")
        return
    if is_equal != (vision.num_patches is not None):
        what = "images of one size" if is_equal else "images of different sizes"
        need = str(rows * columns) if is_equal else f"{rows},{columns}"
        raise ValueError(f"the data has {what}, for which vision needs grid {need}: give that")
    if vision.num_patches is not None and vision.num_patches != rows * columns:
        raise ValueError(
            f"vision.grid is {vision.num_patches}, and images have {rows * columns} patches: give that number"
        )
    if vision.num_patches is None and ((vision.max_rows or 0) < rows or (vision.max_columns or 0) < columns):
        raise ValueError(
            f"vision knows {vision.max_rows} rows and {vision.max_columns} columns of patches, and the largest image "
            f"has {rows} and {columns}: give vision.grid of at least that"
        )
