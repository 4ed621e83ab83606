"""From a run's newest checkpoint, or an import, to a folder of Hugging Face, a layer at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.checkpoint.parameters import newest_step, param_specs_of, read_layer
from rrfp_jax.checkpoint.reader import Found
from rrfp_jax.data.token_kind import TokenKind
from rrfp_jax.exchange.hub_form import HubForm, read_config
from rrfp_jax.exchange.importing import CONFIG, carried_tensors
from rrfp_jax.exchange.model_folder import TOKENS, UNUSED, ModelFolder, came_with_the_model, open_model
from rrfp_jax.exchange.model_sections import differences
from rrfp_jax.exchange.names import Match, matches
from rrfp_jax.exchange.new_config import new_config
from rrfp_jax.exchange.shard_writer import Planned, ShardWriter
from rrfp_jax.exchange.tensor_files import StoredTensor, read_json
from rrfp_jax.exchange.whole_folder import check_new, copy_file, new_folder

_DTYPE_KEYS = ("dtype", "torch_dtype")
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class PlannedExport:
    """An export that is known to fit."""

    folder: ModelFolder
    files: Path | None
    """The folder of files that belong to the model; None: there are none."""
    found: Found
    config: Mapping[str, Any]
    """What becomes ``config.json``."""
    matches: list[Match]
    carried: list[StoredTensor]
    dtype: str | None
    """None: as in the checkpoint."""
    dtypes: Mapping[tuple[str, ...], str]
    """Of the arrays of the checkpoint."""

    @property
    def tensors(self) -> list[Planned]:
        """What is written, in order."""
        own = [
            Planned(name, shape, self.dtype or self.dtypes[match.ours])
            for match in self.matches
            for name, shape in zip(match.theirs, match.their_shapes, strict=True)
        ]
        return own + [Planned(each.name, each.shape, self.dtype or each.dtype) for each in self.carried]


def plan_export(run: Path, *, dtype: str | None = None) -> PlannedExport:
    """Find out what a run or an import becomes; ``dtype`` is that of all tensors, None: as they are.

    Raises ValueError, in one sentence, where there is nothing to export, or nothing that a family can express.
    """
    folder = open_model(run, "the folder")
    files = folder.files()
    is_of_hub = files is not None and (files / CONFIG).is_file()
    form, config = _form(folder, files if is_of_hub else None)
    if not is_of_hub or not came_with_the_model(files):
        _name_ends(config, folder.tokens())
    found = newest_step(folder.checkpoints)
    shapes = folder.sections.shapes()
    stored = {(name[0], *name[2:]): spec for name, spec in param_specs_of(found).items()}
    if {name: spec.shape for name, spec in stored.items()} != shapes:
        odd = next(name for name in (*shapes, *stored) if getattr(stored.get(name), "shape", None) != shapes.get(name))
        raise ValueError(
            f"{found.path} does not hold {'/'.join(odd)} as the configuration of {run} has it: train again"
        )
    dtypes = {name: spec.dtype.name for name, spec in stored.items()}
    for key in (key for key in _DTYPE_KEYS if key in config):
        config[key] = dtype or next(iter(dtypes.values()))
    carried = [] if files is None else list(carried_tensors(files))
    return PlannedExport(folder, files, found, config, matches(form.table, shapes), carried, dtype, dtypes)


def write_export(
    plan: PlannedExport,
    target: Path,
    *,
    shard_bytes: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Write the folder ``target``, which must be new; it appears as a whole at the end.

    ``progress`` is called with the number of layers that are written, and of all.

    Raises ValueError where an array cannot be read, or does not fit into the dtype.
    """
    check_new(target, "the folder of the export")
    layers = [(layer, list(own)) for layer, own in groupby(plan.matches, key=lambda match: match.ours[0])]
    with new_folder(target) as folder:
        _copy_files(plan, folder)
        (folder / CONFIG).write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        with ShardWriter(folder, plan.tensors, shard_bytes).open() as writer:
            for number, (layer, own) in enumerate(layers):
                progress(number, len(layers))
                for name, tensor in _tensors_of(plan, layer, own):
                    writer.write(name, tensor)
            for stored in plan.carried:
                writer.write(stored.name, _converted(stored.read(), plan.dtype, stored.name))
            writer.write_index()
    progress(len(layers), len(layers))


def _name_ends(config: dict[str, Any], tokens: TokenKind | None) -> None:
    """Write which of the tokens that the model was trained on ends a text, in place of the file's own entry."""
    ends = () if tokens is None else tokens.ends
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (part is config or "eos_token_id" in part):
            part |= {"bos_token_id": None, "eos_token_id": ends[0] if ends else None}


def _form(folder: ModelFolder, files: Path | None) -> tuple[HubForm, dict[str, Any]]:
    model = folder.sections.model
    if files is None:
        config = new_config(folder.sections, str(folder.path))
        form = read_config(config, str(folder.path), has_head=not model.tie_embeddings, dtype="float32")
        lost = differences(form.sections, folder.sections)
        if lost:
            raise ValueError(
                f"{folder.path} is no {config['architectures'][0]}: {'; '.join(lost)}, and no family has that"
            )
        return form, config
    path = files / CONFIG
    config = read_json(path)
    form = read_config(config, str(path), has_head=not model.tie_embeddings, dtype="float32")
    if other := differences(form.sections, folder.sections):
        raise ValueError(
            f"{path} is of another model than {folder.path}: {'; '.join(other)}: put that of the model there"
        )
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and part.get(_TIED) and not model.tie_embeddings:
            part[_TIED] = False
    return form, config


def _copy_files(plan: PlannedExport, folder: Path) -> None:
    for path in sorted(plan.files.iterdir()) if plan.files is not None else ():
        if path.name not in (UNUSED, CONFIG, TOKENS):
            copy_file(path, folder / path.name)


def _tensors_of(plan: PlannedExport, layer: str, own: list[Match]) -> Iterator[tuple[str, np.ndarray]]:
    arrays = read_layer(plan.found, layer)
    for match in own:
        array = _converted(arrays.pop(match.ours[1:]), plan.dtype, "/".join(match.ours))
        yield from zip(match.theirs, match.transform.to_theirs(array), strict=True)


def _converted(array: np.ndarray, dtype: str | None, name: str) -> np.ndarray:
    if dtype is None or array.dtype.name == dtype:
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(np.dtype(dtype))
    if not np.isfinite(converted).all() and np.isfinite(array).all():
        raise ValueError(f"{name} has numbers that are too large for {dtype}: give --dtype bfloat16 or float32")
    return converted
