"""Turns a run's newest checkpoint, or an import, into a folder of Hugging Face, a layer at a time.

Adapters are merged into the model's matrices, or they alone are written, in the form of PEFT."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.checkpoint import BASE, StoredStep, newest_step, open_step, read_layer_params, stored_param_specs
from rrfp_jax.hf._model_config import QUANTISED, HubModel, new_config, read_config
from rrfp_jax.hf._tensor_names import (
    PEFT,
    TensorMatch,
    by_tensor,
    match_adapters,
    match_tensors,
    short_targets,
)
from rrfp_jax.hf.model_folder import (
    CONFIG,
    TOKENS,
    UNUSED,
    ModelFolder,
    came_with_the_model,
    check_new,
    copy_file,
    model_differences,
    new_folder,
    open_model,
)
from rrfp_jax.hf.tensor_files import PlannedTensor, ShardWriter, StoredTensor, read_headers, read_json
from rrfp_jax.models.adapters import merged_layer
from rrfp_jax.models.config import AdaptersConfig
from rrfp_jax.programs.chunk import ADAPTERS

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of PEFT."""
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class PlannedExport:
    """An export that is known to fit."""

    folder: ModelFolder
    files: Path | None
    """The folder of files that belong to the model. None: there are none."""
    stored: StoredStep
    config: Mapping[str, Any]
    """The content of ``config.json``."""
    matches: list[TensorMatch]
    carried: list[StoredTensor]
    dtype: str | None
    """The dtype of all tensors. None: the dtypes of the checkpoint."""
    dtypes: Mapping[tuple[str, ...], str]
    """Dtypes of the arrays of the checkpoint."""
    adapters: list[TensorMatch]
    """The arrays of adapters with their tensors of PEFT."""

    @property
    def tensors(self) -> list[PlannedTensor]:
        """All tensors in the order in which they are written."""
        own = [
            PlannedTensor(name, shape, match.transform.dtype or self.dtype or self.dtypes[match.ours])
            for match, *_ in by_tensor(self.matches)
            for name, shape in zip(match.theirs, match.their_shapes, strict=True)
        ]
        return own + [PlannedTensor(each.name, each.shape, self.dtype or each.dtype) for each in self.carried]


def plan_export(run: Path, *, dtype: str | None = None) -> PlannedExport:
    """Finds the family and the tensors of a run or an import; ``dtype`` is that of all tensors, None keeps theirs.

    Raises ValueError, in one sentence, if there is nothing to export, or if no family can express it.
    """
    folder = open_model(run, "the folder")
    files = folder.files()
    is_of_hub = files is not None and (files / CONFIG).is_file()
    model, config = hub_model(folder, files if is_of_hub else None)
    if not is_of_hub or not came_with_the_model(files):
        # The file's own tokens are those of another tokenizer: write the token that ended texts in training.
        tokens = folder.tokens()
        end = tokens.ends[0] if tokens is not None and tokens.ends else None
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and (part is config or "eos_token_id" in part):
                part |= {"bos_token_id": None, "eos_token_id": end}
    found = newest_step(folder.checkpoints)
    shapes = folder.sections.shapes()
    stored = {(name[0], *name[2:]): spec for name, spec in stored_param_specs(found).items()}
    if {name: spec.shape for name, spec in stored.items()} != shapes:
        odd = next(name for name in (*shapes, *stored) if getattr(stored.get(name), "shape", None) != shapes.get(name))
        raise ValueError(
            f"{found.path} does not hold {'/'.join(odd)} as the configuration of {run} has it: train again"
        )
    dtypes = {name: spec.dtype.name for name, spec in stored.items()}
    of_model = {name: shape for name, shape in shapes.items() if not name[0].startswith(ADAPTERS)}
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype or dtypes[next(iter(of_model))]
    unused = None if files is None else files / UNUSED
    carried = list(read_headers(unused).values()) if unused is not None and unused.is_file() else []
    matches, adapters = match_tensors(model.table, of_model), match_adapters(model.table, shapes)
    return PlannedExport(folder, files, found, config, matches, carried, dtype, dtypes, adapters)


def write_export(
    plan: PlannedExport,
    target: Path,
    *,
    shard_bytes: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Writes the folder ``target``, which must be new; it appears as a whole at the end.

    ``progress`` is called with the number of layers that are written, and of all.

    Raises ValueError if an array cannot be read, or does not fit into the dtype.
    """
    check_new(target, "the folder of the export")
    layers = [(layer, list(own)) for layer, own in groupby(plan.matches, key=lambda match: match.ours[0])]
    with new_folder(target) as folder:
        for path in sorted(plan.files.iterdir()) if plan.files is not None else ():
            if path.name not in (UNUSED, CONFIG, TOKENS):
                copy_file(path, folder / path.name)
        (folder / CONFIG).write_text(json.dumps(plan.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        with ShardWriter(folder, plan.tensors, shard_bytes).open() as writer:
            for number, (layer, own) in enumerate(layers):
                progress(number, len(layers))
                arrays = read_layer_params(plan.stored, layer)
                factors = read_layer_params(plan.stored, ADAPTERS + layer)
                for group in by_tensor(own):
                    # Popped, so that each array is freed once its tensors are written.
                    held = []
                    for match in group:
                        inner = match.ours[1:]
                        array = _merged(arrays.pop(inner), factors, inner, plan.folder.sections.adapters)
                        dtype = match.transform.dtype or plan.dtype or plan.dtypes[match.ours]
                        held.append(_converted(array, dtype, "/".join(match.ours)))
                    transform = group[0].transform
                    tensors = transform.to_theirs(held[0]) if transform.joined is None else [transform.joined(held)]
                    for name, tensor in zip(group[0].theirs, tensors, strict=True):
                        writer.write(name, tensor)
            for stored in plan.carried:
                writer.write(stored.name, _converted(stored.read(), plan.dtype, stored.name))
            writer.write_index()
    progress(len(layers), len(layers))


def _merged(
    array: np.ndarray,
    factors: Mapping[tuple[str, ...], np.ndarray],
    path: tuple[str, ...],
    adapters: AdaptersConfig | None,
) -> np.ndarray:
    """Returns an array of a layer with the product of its adapter added, in float32; as it is where it has none."""
    own = {name[-1]: factor for name, factor in factors.items() if name[:-1] == path[:-1] and path[-1] == "kernel"}
    if adapters is None or not own:
        return array
    merged: np.ndarray = merged_layer({"kernel": array.astype(np.float32)}, own, adapters.scale)["kernel"]
    return merged


def write_adapters(plan: PlannedExport, target: Path) -> None:
    """Writes the adapters alone as PEFT reads them into the folder ``target``, which must be new.

    Raises ValueError where there are none, and for a model with an encoder, whose modules have other names in every
    version of transformers.
    """
    check_new(target, "the folder of the export")
    adapters, folder = plan.folder.sections.adapters, plan.folder
    if adapters is None:
        raise ValueError(f"{folder.path} has no adapters: leave --adapters out")
    if folder.sections.vision is not None:
        raise ValueError(f"{folder.path} sees, and PEFT's names differ for such models: leave --adapters out, to merge")
    base, imported = plan.stored.host.get(BASE), plan.stored.host.get("imported")
    if base is not None:
        imported = open_step(Path(base["folder"]), base["step"]).host.get("imported")
    modules = [match.theirs[0].removesuffix(".weight") for match in plan.matches if match.ours[-1] == "kernel"]
    paths = {".".join(each.ours[:-1]).removeprefix(ADAPTERS) for each in plan.adapters}
    for match in plan.matches:
        if match.transform.joined is not None and (path := ".".join(match.ours[:-1])) in paths:
            raise ValueError(
                f"{folder.path} has an adapter for {path} alone, a part of {match.theirs[0]}, which has one adapter in "
                "PEFT: leave --adapters out, to merge"
            )
    adapted = [name for name in modules if f"{PEFT}{name}.lora_A.weight" in {each.theirs[0] for each in plan.adapters}]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": imported,
        "r": adapters.rank,
        "lora_alpha": adapters.rank if adapters.alpha is None else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": short_targets(adapted, modules),
        "bias": "none",
        "inference_mode": True,
    }
    tensors = [PlannedTensor(each.theirs[0], each.their_shapes[0], plan.dtype or "float32") for each in plan.adapters]
    with new_folder(target) as made:
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        with ShardWriter(made, tensors, 2**62, single=ADAPTER_WEIGHTS).open() as writer:
            for layer, own in groupby(plan.adapters, key=lambda match: match.ours[0]):
                arrays = read_layer_params(plan.stored, layer)
                for match in own:
                    array = _converted(arrays[match.ours[1:]], plan.dtype, "/".join(match.ours))
                    writer.write(match.theirs[0], match.transform.to_theirs(array)[0])


def hub_model(folder: ModelFolder, files: Path | None) -> tuple[HubModel, dict[str, Any]]:
    """Returns the family's tables and ``config.json``: that in ``files``, or a new one if there are none."""
    tied, num_ahead = folder.sections.model.tie_embeddings, folder.sections.model.num_layers_ahead
    if files is None:
        config = new_config(folder.sections, str(folder.path))
        # Reading the new file back shows every field that the family has no words for.
        model = read_config(config, str(folder.path), has_head=not tied, dtype="float32", num_ahead=num_ahead)
        if lost := model_differences(model.sections, folder.sections):
            raise ValueError(
                f"{folder.path} is no {config['architectures'][0]}: {'; '.join(lost)}, and no family has that"
            )
        return model, config
    path = files / CONFIG
    config = read_json(path)
    config.pop(QUANTISED, None)  # the import has made whole numbers of them
    model = read_config(config, str(path), has_head=not tied, dtype="float32", num_ahead=num_ahead)
    if other := model_differences(model.sections, folder.sections):
        raise ValueError(
            f"{path} is of another model than {folder.path}: {'; '.join(other)}: put that of the model there"
        )
    # The import may have had a head of its own in spite of the file.
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and part.get(_TIED) and not tied:
            part[_TIED] = False
    return model, config


def _converted(array: np.ndarray, dtype: str | None, name: str) -> np.ndarray:
    if dtype is None or array.dtype.name == dtype:
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(np.dtype(dtype))
    if not np.isfinite(converted).all() and np.isfinite(array).all():
        raise ValueError(f"{name} has numbers that are too large for {dtype}: give --dtype bfloat16 or float32")
    return converted
