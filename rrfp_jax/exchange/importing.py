"""From a folder of Hugging Face to one that training starts from, a layer at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from rrfp_jax.data.links import check_inside
from rrfp_jax.exchange.hub_form import DROPPED, EMBEDDING, HEAD, HubForm, read_config
from rrfp_jax.exchange.model_folder import CARRIED, CHECKPOINTS, MODEL, UNUSED
from rrfp_jax.exchange.names import Match, fits, matches, older
from rrfp_jax.exchange.shard_writer import Planned, ShardWriter
from rrfp_jax.exchange.tensor_files import DTYPES as KNOWN
from rrfp_jax.exchange.tensor_files import INDEX, StoredTensor, check_fetched, read_json, stored_tensors
from rrfp_jax.exchange.whole_folder import check_new, copy_file, new_folder
from rrfp_jax.models.config import DTYPES

if TYPE_CHECKING:
    from rrfp_jax.checkpoint.layer_writer import ReadLater

CONFIG = "config.json"
_WEIGHTS = ("*.safetensors",)
_BLOCK_NUMBERS = 1 << 20
_CARRIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "README.md")


@dataclass(frozen=True)
class PlannedImport:
    """An import that is known to fit: which tensors become which arrays."""

    source: Path
    form: HubForm
    matches: list[Match]
    stored: Mapping[str, StoredTensor]
    """By the older names, and only those that are used."""
    carried: list[tuple[str, StoredTensor]]
    """Those that the family does not use, by the older names."""
    dtype: str

    @property
    def num_params(self) -> int:
        """Numbers in all arrays."""
        return sum(int(np.prod(match.shape)) for match in self.matches)

    @property
    def layers(self) -> list[tuple[str, list[Match]]]:
        """The arrays of every layer, in the model's order."""
        return [(layer, list(own)) for layer, own in groupby(self.matches, key=lambda match: match.ours[0])]


def plan_import(source: Path, *, dtype: str | None = None) -> PlannedImport:
    """Read what the folder says, its tensors' names and shapes included, and find a place for each of them.

    ``dtype`` is that of the parameters here; None: as in the files.

    Raises ValueError, in one sentence that names file, field or tensor, for whatever has no place.
    """
    _check_files(source)
    config, where = read_json(source / CONFIG), str(source / CONFIG)
    probe = read_config(config, where, has_head=None, dtype="float32")  # what is not a model of ours says so first
    found = stored_tensors(source)
    _check_layers(probe, len(found), where)
    stored = _by_older_names(found, probe)
    for tensor in stored.values():
        _check_dtype(tensor)
    kept = dtype or _dtype_of(stored)
    has_head = _has_own_head(stored, probe)
    form = read_config(config, where, has_head=has_head, dtype=kept)
    planned = matches(form.table, form.sections.shapes())
    _check(source, planned, stored)
    used = {name for match in planned for name in match.theirs}
    rest = {name: tensor for name, tensor in stored.items() if name not in used}
    if has_head is False:
        rest.pop(form.renamed + HEAD, None)  # the same numbers as the table
    for name, tensor in rest.items():
        if not fits(name, form.unused):
            raise ValueError(f"{tensor.path} holds {tensor.name}, for which this model has no place")
    return PlannedImport(source, form, planned, {name: stored[name] for name in used}, list(rest.items()), kept)


def _check_layers(form: HubForm, num_tensors: int, where: str) -> None:
    """Raise ValueError if the model would have more layers, or experts, than its files have tensors."""
    sections = form.sections
    told = {"num_hidden_layers": sections.model.num_layers}
    if sections.vision is not None:
        told["num_hidden_layers of the tower"] = sections.vision.num_layers
    for name, number in told.items():
        if number > num_tensors:
            raise ValueError(
                f"{where}: {name} is {number}, and the files hold {num_tensors} tensors: give files that belong "
                "together"
            )


def write_import(plan: PlannedImport, target: Path, *, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Write the folder ``target``, which must be new; it appears as a whole at the end.

    ``progress`` is called with the number of layers that are written, and of all.

    Raises ValueError where a tensor cannot be read, and OSError where nothing can be written.
    """
    from rrfp_jax.checkpoint.layer_writer import LayerWriter

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
        _carry(plan, folder / CARRIED)
        (folder / MODEL).write_text(_sections_text(plan), encoding="utf-8")
    progress(len(layers), len(layers))


def _check_files(source: Path) -> None:
    """Raise ValueError if something else stands in place of a file that would be read or copied."""
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if fits(path.name, (*_CARRIED, *_WEIGHTS)) and path.is_file():
            check_inside(path, source)
            check_fetched(path)


def _by_older_names(found: Mapping[str, StoredTensor], form: HubForm) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        own = older(name, form.newer)
        if fits(own, DROPPED):
            continue
        if own in stored:
            raise ValueError(f"{tensor.path} holds {name}, which is {stored[own].name} by another name: remove one")
        stored[own] = tensor
    return stored


def _dtype_of(stored: Mapping[str, StoredTensor]) -> str:
    """The one of all tensors."""
    by_dtype = {tensor.dtype: tensor for tensor in stored.values()}
    for dtype, tensor in by_dtype.items():
        if dtype not in DTYPES:
            raise ValueError(f"{tensor.path}: {tensor.name} is {dtype}: give --dtype, {' or '.join(DTYPES)}")
    if len(by_dtype) > 1:
        (one, first), (other, second) = list(by_dtype.items())[:2]
        raise ValueError(f"{first.name} is {one} and {second.name} is {other}: give --dtype for all of them")
    return next(iter(by_dtype))


def _has_own_head(stored: Mapping[str, StoredTensor], form: HubForm) -> bool | None:
    """Whether there is a head that differs from the embedding's table; None where there is none."""
    before = form.renamed
    head, table = stored.get(before + HEAD), stored.get(before + EMBEDDING)
    if head is None or table is None:
        return None
    return (head.shape, head.dtype) != (table.shape, table.dtype) or not head.equals(table)


def _check(source: Path, planned: list[Match], stored: Mapping[str, StoredTensor]) -> None:
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


def _check_dtype(tensor: StoredTensor) -> None:
    if tensor.dtype not in KNOWN.values():
        raise ValueError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype}, and models here are read in {', '.join(KNOWN.values())}: "
            "save it with transformers in one of these, from numbers that were not quantised"
        )


def _read_later(match: Match, plan: PlannedImport, broken: list[str]) -> "ReadLater":
    """Returns a later read of a tensor, which adds the tensor's name to ``broken`` if a number in it is not finite.

    The read does not raise, because a writer that is interrupted leaves threads behind.
    """
    import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it

    from rrfp_jax.checkpoint.layer_writer import ReadLater

    return ReadLater(match.shape, np.dtype(plan.dtype), lambda: _array(match, plan, broken))


def _array(match: Match, plan: PlannedImport, broken: list[str]) -> np.ndarray:
    tensors = [plan.stored[name].read() for name in match.theirs]
    array = match.transform.to_ours(tensors).astype(np.dtype(plan.dtype), copy=False)
    if not all(np.isfinite(rows).all() for rows in _blocks(array)):
        broken.append(match.theirs[0])
    return array


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Returns some rows of an array at a time, so that checking them takes little memory."""
    rows = max(1, _BLOCK_NUMBERS * len(array) // max(array.size, 1)) if array.ndim else 1
    return (array[start : start + rows] for start in range(0, len(array), rows)) if array.ndim else iter([array])


def _carry(plan: PlannedImport, folder: Path) -> None:
    folder.mkdir()
    for path in sorted(plan.source.iterdir()):
        if path.is_file() and fits(path.name, _CARRIED) and path.name != INDEX:
            copy_file(path, folder / path.name)
    if plan.carried:
        _write_unused(plan.carried, folder)


def _write_unused(carried: list[tuple[str, StoredTensor]], folder: Path) -> None:
    planned = [Planned(name, tensor.shape, tensor.dtype) for name, tensor in carried]
    with ShardWriter(folder, planned, shard_bytes=2**62, single=UNUSED).open() as writer:
        for name, tensor in carried:
            writer.write(name, tensor.read())


def _sections_text(plan: PlannedImport) -> str:
    sections: dict[str, Any] = plan.form.sections.as_dict()
    head = f"# {plan.source.name}: take this into the configuration of a run, with run.init_from naming this folder.\n"
    return head + yaml.safe_dump(sections, sort_keys=False)


def carried_tensors(files: Path) -> Iterator[StoredTensor]:
    """Returns the tensors that an import carries along in ``files``, if there are some."""
    from rrfp_jax.exchange.tensor_files import tensors_of

    path = files / UNUSED
    return iter(tensors_of(path).values() if path.is_file() else ())
