"""Turns a folder of Hugging Face into one that training starts from, a layer at a time; or adapters of PEFT."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from rrfp_jax.data._sources import check_inside
from rrfp_jax.hf._model_config import DROPPED, EMBEDDING, HEAD, HubModel, read_config
from rrfp_jax.hf._tensor_names import PEFT, TensorMatch, fits, match_tensors, older_name, short_targets
from rrfp_jax.hf.exporting import ADAPTER_CONFIG, ADAPTER_WEIGHTS, hub_model
from rrfp_jax.hf.model_folder import (
    CARRIED,
    CHECKPOINTS,
    CONFIG,
    MODEL,
    UNUSED,
    ModelFolder,
    ModelSections,
    check_new,
    copy_file,
    new_folder,
    open_model,
)
from rrfp_jax.hf.tensor_files import (
    HUB_DTYPES,
    INDEX,
    PlannedTensor,
    ShardWriter,
    StoredTensor,
    check_fetched,
    read_headers,
    read_json,
    stored_tensors,
    unpacked,
)
from rrfp_jax.models.config import DTYPES, AdaptersConfig
from rrfp_jax.programs.chunk import ADAPTERS
from rrfp_jax.readable import shown

if TYPE_CHECKING:
    from rrfp_jax.checkpoint import ReadLater

_WEIGHTS = ("*.safetensors",)
_CHECKED_NUMBERS = 1 << 20
_CARRIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "README.md")


@dataclass(frozen=True)
class PlannedImport:
    """An import that is known to fit: every tensor has its place."""

    source: Path
    model: HubModel
    matches: list[TensorMatch]
    stored: Mapping[str, StoredTensor]
    """The tensors that the model uses, by their older names."""
    carried: list[tuple[str, StoredTensor]]
    """Older names and tensors that the family does not use."""
    dtype: str

    @property
    def num_params(self) -> int:
        """The number of elements in all arrays."""
        return sum(int(np.prod(match.shape)) for match in self.matches)

    @property
    def layers(self) -> list[tuple[str, list[TensorMatch]]]:
        """The arrays of every layer, in the model's order."""
        return [(layer, list(own)) for layer, own in groupby(self.matches, key=lambda match: match.ours[0])]


def plan_import(source: Path, *, dtype: str | None = None) -> PlannedImport:
    """Reads the configuration and the headers of all tensors, and finds a place for each tensor.

    ``dtype`` is the dtype of the parameters here; None takes that of the files.

    Raises ValueError, in one sentence that names file, field or tensor, for everything that has no place.
    """
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        # Something else may stand in place of a file that would be read or copied.
        if fits(path.name, (*_CARRIED, *_WEIGHTS)) and path.is_file():
            check_inside(path, source)
            check_fetched(path)
    config, where = read_json(source / CONFIG), str(source / CONFIG)
    # Read once before the tensors are looked at, so that a model that is none of ours is refused by its own name, and
    # once more when the tensors have told the dtype and whether the head is tied.
    probe = read_config(config, where, has_head=None, dtype="float32")
    found = stored_tensors(source)
    if probe.is_packed:
        found = unpacked(found)
    _check_layers(probe, len(found), where)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        older = older_name(name, probe.newer)
        if fits(older, DROPPED):
            continue
        if older in stored:
            raise ValueError(f"{tensor.path} holds {name}, which is {stored[older].name} by another name: remove one")
        stored[older] = tensor
    for tensor in stored.values():
        if tensor.dtype not in HUB_DTYPES.values():
            raise ValueError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype}, and models here are read in "
                f"{', '.join(HUB_DTYPES.values())}: save it with transformers in one of these, from numbers that were "
                "not quantised"
            )
    fixed = [theirs.replace(".N.", ".*.") for transform, theirs in probe.table.values() if transform.dtype]
    kept = dtype or _common_dtype({name: tensor for name, tensor in stored.items() if not fits(name, fixed)})
    has_head = _has_own_head(stored, probe)
    first = f"model.layers.{probe.sections.model.num_layers}."
    num_ahead = probe.num_layers_ahead if any(name.startswith(first) for name in stored) else 0
    model = read_config(config, where, has_head=has_head, dtype=kept, num_ahead=num_ahead)
    planned = match_tensors(model.table, model.sections.shapes())
    _check_shapes(source, planned, stored)
    used = {name for match in planned for name in match.theirs}
    rest = {name: tensor for name, tensor in stored.items() if name not in used}
    if has_head is False:
        rest.pop(model.decoder_prefix + HEAD, None)  # a copy of the embedding's table
    for name, tensor in rest.items():
        if not fits(name, model.unused):
            raise ValueError(f"{tensor.path} holds {tensor.name}, for which this model has no place")
    return PlannedImport(source, model, planned, {name: stored[name] for name in used}, list(rest.items()), kept)


def write_import(plan: PlannedImport, target: Path, *, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Writes the folder ``target``, which must be new; it appears as a whole at the end.

    ``progress`` is called with the number of layers that are written, and of all.

    Raises ValueError if a tensor cannot be read, and OSError if nothing can be written.
    """
    from rrfp_jax.checkpoint import LayerWriter

    check_new(target, "the folder of the import")
    layers = plan.layers
    with new_folder(target) as folder:
        writer = LayerWriter(folder / CHECKPOINTS)
        for number, (layer, own) in enumerate(layers):
            progress(number, len(layers))
            broken: list[str] = []
            writer.write(layer, {match.ours[1:]: _read_later(match, plan, broken) for match in own})
            if broken:
                path = plan.stored[broken[0]].path
                raise ValueError(
                    f"{path}: {broken[0]} has numbers that are not finite in {plan.dtype}: copy the model again, or "
                    "give one that is whole"
                )
        writer.commit({"imported": plan.source.name}, {"describe": "an import, layer by layer"})
        carried = folder / CARRIED
        carried.mkdir()
        for path in sorted(plan.source.iterdir()):
            if path.is_file() and fits(path.name, _CARRIED) and path.name != INDEX:
                copy_file(path, carried / path.name)
        if plan.carried:
            unused = [PlannedTensor(name, tensor.shape, tensor.dtype) for name, tensor in plan.carried]
            with ShardWriter(carried, unused, shard_bytes=2**62, single=UNUSED).open() as shards:
                for name, tensor in plan.carried:
                    shards.write(name, tensor.read())
        _write_sections(folder, plan.source, plan.model.sections)
    progress(len(layers), len(layers))


def _write_sections(folder: Path, source: Path, sections: ModelSections) -> None:
    head = f"# {source.name}: take this into the configuration of a run, with run.init_from naming this folder.\n"
    text = yaml.safe_dump(sections.as_dict(), sort_keys=False)
    (folder / MODEL).write_text(head + text, encoding="utf-8")


def _check_layers(model: HubModel, num_tensors: int, where: str) -> None:
    """Raises ValueError if the model would have more layers than its files have tensors.

    A forged number of layers would otherwise make a model of that size, before any tensor is missed.
    """
    sections = model.sections
    numbers = {"num_hidden_layers": sections.model.num_layers}
    if sections.vision is not None:
        numbers["num_hidden_layers of the tower"] = sections.vision.num_layers
    for name, number in numbers.items():
        if number > num_tensors:
            raise ValueError(
                f"{where}: {name} is {number}, and the files hold {num_tensors} tensors: give files that belong "
                "together"
            )


def _common_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """Returns the dtype of all tensors; raises ValueError if they have several, or one that cannot be trained in."""
    by_dtype = {tensor.dtype: tensor for tensor in stored.values()}
    for dtype, tensor in by_dtype.items():
        if dtype not in DTYPES:
            raise ValueError(f"{tensor.path}: {tensor.name} is {dtype}: give --dtype, {' or '.join(DTYPES)}")
    if len(by_dtype) > 1:
        (one, first), (other, second) = list(by_dtype.items())[:2]
        raise ValueError(f"{first.name} is {one} and {second.name} is {other}: give --dtype for all of them")
    return next(iter(by_dtype))


def _has_own_head(stored: Mapping[str, StoredTensor], model: HubModel) -> bool | None:
    """Returns whether there is a head that differs from the embedding's table; None if there is no head."""
    head, table = (stored.get(model.decoder_prefix + name) for name in (HEAD, EMBEDDING))
    if head is None or table is None:
        return None
    return (head.shape, head.dtype) != (table.shape, table.dtype) or not head.equals(table)


def _check_shapes(source: Path, planned: list[TensorMatch], stored: Mapping[str, StoredTensor]) -> None:
    for match in planned:
        for name, shape in zip(match.theirs, match.their_shapes, strict=True):
            tensor = stored.get(name)
            if tensor is None:
                raise ValueError(f"{source} lacks the tensor {name}: copy all shards of the model")
            if tensor.shape != shape:
                raise ValueError(
                    f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, and by {CONFIG} it is "
                    f"{list(shape)}: give files that belong together"
                )


def _read_later(match: TensorMatch, plan: PlannedImport, broken: list[str]) -> "ReadLater":
    """Returns a later read of an array, which adds a tensor's name to ``broken`` if a number in it is not finite.

    The read does not raise, because a writer that is interrupted leaves threads behind.
    """
    import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it

    from rrfp_jax.checkpoint import ReadLater

    dtype = np.dtype(match.transform.dtype or plan.dtype)

    def read() -> np.ndarray:
        tensors = [plan.stored[name].read() for name in match.theirs]
        array = match.transform.to_ours(tensors).astype(dtype, copy=False)
        # Some rows at a time, so that the check takes little memory.
        rows = array.reshape(len(array) if array.ndim else 1, -1)
        step = max(1, _CHECKED_NUMBERS * len(rows) // max(array.size, 1))
        if not all(np.isfinite(rows[start : start + step]).all() for start in range(0, len(rows), step)):
            broken.append(match.theirs[0])
        return array

    return ReadLater(match.shape, dtype, read)


# -- adapters of PEFT --------------------------------------------------------------------------------------------------

_READ = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "init_lora_weights")
_SILENT = (
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
    "qalora_group_size",
)
"""Fields that say again which tensors the file holds, or nothing about the numbers; of others, a value is refused."""
_FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}


@dataclass(frozen=True)
class PlannedAdapters:
    """Adapters of PEFT that are known to fit a model here."""

    source: Path
    base: ModelFolder
    """The model whose matrices they stand beside."""
    sections: ModelSections
    """That model with the adapters."""
    tensors: Mapping[tuple[str, ...], StoredTensor]
    """Tensors by the matrix's layer, its path in that, and the name of the factor."""


def plan_adapters(source: Path, base: Path) -> PlannedAdapters:
    """Finds a place for every tensor of PEFT's folder ``source`` in the model of ``base``, an import or a run.

    Raises ValueError, in one sentence that names file, field or tensor, for everything that has no place.
    """
    folder = open_model(base, "base")
    if folder.sections.vision is not None or folder.sections.adapters is not None:
        what = "has adapters already" if folder.sections.adapters else "sees, and PEFT's names differ for such models"
        raise ValueError(f"base {base} {what}: give the folder of a language model without adapters")
    adapters = _adapters_of(source / ADAPTER_CONFIG)
    weights = source / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ValueError(f"{source} has no {ADAPTER_WEIGHTS}: save the adapters with save_pretrained of PEFT")
    check_fetched(weights)
    stored, files = read_headers(weights), folder.files()
    model = hub_model(folder, files if files is not None and (files / CONFIG).is_file() else None)[0]
    found, paths, all_paths = dict[tuple[str, ...], StoredTensor](), list[str](), list[str]()
    rank, used = adapters.rank, set[str]()
    for match in match_tensors(model.table, folder.sections.shapes()):
        # of the head, experts and norms, or several matrices here that are one there
        if len(match.ours) < 3 or match.ours[-1] != "kernel" or match.transform.joined is not None:
            continue
        module, path = match.theirs[0].removesuffix(".weight"), ".".join(match.ours[:-1])
        all_paths.append(path)
        names = {own: f"{PEFT}{module}.{theirs}.weight" for own, theirs in _FACTORS.items()}
        shapes = [list(stored[name].shape) if name in stored else None for name in names.values()]
        rows, columns = match.shape
        if shapes == [None, None]:
            continue
        if shapes != [[rank, rows], [columns, rank]]:
            raise ValueError(
                f"{weights}: lora_A and lora_B of {module} have the shapes {shapes[0]} and {shapes[1]}, and by r and "
                f"the model in {base} they are [{rank}, {rows}] and [{columns}, {rank}]: give --base the model that "
                "they were trained with"
            )
        paths.append(path)
        used |= {*names.values()}
        found |= {(*match.ours[:-1], own): stored[name] for own, name in names.items()}
    if odd := next((name for name in stored if name not in used), None):
        raise ValueError(
            f"{weights} holds {odd}, for which the model in {base} has no matrix that takes an adapter: give --base "
            "the model that they were trained with, and adapters of attention's and the MLP's products alone, or merge "
            "them with PEFT"
        )
    adapters = replace(adapters, targets=tuple(short_targets(paths, all_paths)))
    return PlannedAdapters(source, folder, replace(folder.sections, adapters=adapters), found)


def write_adapters_import(plan: PlannedAdapters, target: Path) -> None:
    """Writes the folder ``target``, which must be new: the adapters, and the name of the step that has the other
    layers.

    Raises ValueError if a tensor cannot be read, and OSError if nothing can be written.
    """
    from rrfp_jax.checkpoint import BASE, LayerWriter, ReadLater, base_of, newest_step

    check_new(target, "the folder of the import")
    base = base_of(newest_step(plan.base.checkpoints))
    with new_folder(target) as folder:
        writer = LayerWriter(folder / CHECKPOINTS)
        for layer, names in groupby(plan.tensors, key=lambda name: name[0]):
            arrays = {}
            for name in names:
                # float32, in which adapters are kept and trained, whatever the base is
                array = np.asarray(plan.tensors[name].read().astype(np.float32).T)
                if not np.isfinite(array).all():
                    raise ValueError(
                        f"{plan.tensors[name].path}: {plan.tensors[name].name} is not finite: copy it again"
                    )
                arrays[name[1:]] = ReadLater(array.shape, array.dtype, array.copy)
            writer.write(ADAPTERS + layer, arrays)
        writer.commit({"imported": plan.source.name, BASE: base}, {"describe": "adapters of PEFT"})
        carried, files = folder / CARRIED, plan.base.files()
        carried.mkdir()
        for path in sorted(files.iterdir()) if files is not None else ():
            copy_file(path, carried / path.name)
        _write_sections(folder, plan.source, plan.sections)


def _adapters_of(path: Path) -> AdaptersConfig:
    """Returns the adapters that a file of PEFT describes, whose targets are still to be found; raises ValueError, with
    the field's name, for all that adapters here do not compute."""
    import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it

    config = read_json(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{path}: peft_type is {shown(kind)}: adapters here are LORA")
    for name, value in config.items():
        is_known = name in _SILENT or (name == "bias" and value == "none") or (name in _READ and name != "bias")
        # these three begin from parts of the base, which then lacks them
        if name == "init_lora_weights" and str(value).lower().startswith(("pissa", "olora", "corda", "loftq")):
            is_known = False
        if value and not is_known:
            raise ValueError(f"{path}: {name} is {shown(value)}, which adapters here do not have: merge them with PEFT")
    rank, alpha, dropout = config.get("r", 8), config.get("lora_alpha", 8), config.get("lora_dropout", 0.0)
    try:
        made = AdaptersConfig(rank=rank, alpha=alpha, dropout=dropout)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # rank-stabilised adapters are divided by the root of the rank
    return replace(made, alpha=alpha * math.sqrt(rank)) if config.get("use_rslora") else made
