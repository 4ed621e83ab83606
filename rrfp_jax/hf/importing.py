"""Turns a folder of Hugging Face into one that training starts from, a layer at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from rrfp_jax.data._sources import check_inside
from rrfp_jax.hf._model_config import DROPPED, EMBEDDING, HEAD, HubModel, read_config
from rrfp_jax.hf._tensor_names import TensorMatch, fits, match_tensors, older_name
from rrfp_jax.hf.model_folder import CARRIED, CHECKPOINTS, CONFIG, MODEL, UNUSED, check_new, copy_file, new_folder
from rrfp_jax.hf.tensor_files import (
    HUB_DTYPES,
    INDEX,
    PlannedTensor,
    ShardWriter,
    StoredTensor,
    check_fetched,
    read_json,
    stored_tensors,
)
from rrfp_jax.models.config import DTYPES

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
        head = (
            f"# {plan.source.name}: take this into the configuration of a run, with run.init_from naming this folder.\n"
        )
        sections = yaml.safe_dump(plan.model.sections.as_dict(), sort_keys=False)
        (folder / MODEL).write_text(head + sections, encoding="utf-8")
    progress(len(layers), len(layers))


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
