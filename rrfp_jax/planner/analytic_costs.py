"""Costs of a run's model on a device that need not be there: its layers by type, on the device's roofline.

A decoder is ``embedding``, so many times ``layer``, and ``head`` with the final norm. A model with an encoder has
``patches``, so many times ``vision``, and ``projector`` before them; encoder and decoder share no chunk. Layers
that are frozen are types of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import make_data_set
from rrfp_jax.costs import CostBook, CostEntry
from rrfp_jax.costs.devices import Device, Efficiencies, Roofline
from rrfp_jax.costs.layer_costs import HALVES, halves_of
from rrfp_jax.costs.layer_sizes import LEAVES_AHEAD, LayerSizes, adapters_beside, remat_rule
from rrfp_jax.data import TRAIN, Part
from rrfp_jax.field_rules import matches
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR, describe_axes, other_axes, spans, with_tensor
from rrfp_jax.models.cuts import check_divides
from rrfp_jax.models.vision_config import DECODER, OWN_CHUNK, ProjectorConfig, VisionLanguageConfig
from rrfp_jax.planner.layer_kinds import (
    FLOAT32,
    FLOAT_BYTES,
    MicrobatchRows,
    Placed,
    StageRun,
    decoder_layer_sizes,
    encoder_layer_sizes,
)

if TYPE_CHECKING:
    from rrfp_jax.models.adapters import AdapterSize
    from rrfp_jax.programs.target import Target

_COUNTS = 8
"""Bytes of the two counts of updates that an optimizer has for each chunk."""
_SECOND = ("output", "down", "fc2", "linear_2")
"""Products that read the results of others of their part; all others of it read one input."""
_TABLES = ("embedding", "head")
"""Layers whose matrices are no products of hidden layers, for optimizers that tell these apart."""


# -- microbatches ------------------------------------------------------------------------------------------------------


def rows_of_microbatch(config: TrainConfig, microbatch_size: int) -> MicrobatchRows:
    """Returns the largest microbatch of this size; samples that share rows must be read to know it.

    Raises ValueError, with the remedy, where the data cannot be read.
    """
    return largest_rows(microbatch_specs(config, microbatch_size))


def largest_rows(buckets: Sequence[Mapping[str, Any]]) -> MicrobatchRows:
    """Returns the largest of these microbatches, from arrays or specs of their leaves."""
    found = []
    for leaves in buckets:
        (num_rows, length), patches = leaves["tokens"].shape[:2], leaves.get("patches")
        image_rows, patch_length = (0, 0) if patches is None else patches.shape[:2]
        found.append(MicrobatchRows(num_rows=num_rows, length=length, image_rows=image_rows, patch_length=patch_length))
    return max(found, key=lambda rows: (rows.tokens, rows.patches))


def microbatch_specs(config: TrainConfig, microbatch_size: int, part: Part = TRAIN) -> list[dict[str, Any]]:
    """Returns arrays or specs of a microbatch's leaves, for every shape that a part of the data has at this size.

    Raises ValueError, with the remedy, where data that must be read cannot be.
    """
    if config.row_length is not None:
        shape, dtypes = (microbatch_size, config.row_length), {"tokens": "i4", "targets": "i4", "weights": "f4"}
        if config.has_segments:
            dtypes |= {"positions": "i4", "segments": "i4"}
        return [{name: np.empty(shape, dtype) for name, dtype in dtypes.items()}]
    batch_size = microbatch_size * config.data.num_microbatches
    section: Any = {"data": replace(config.data, batch_size=batch_size)}
    return list(make_data_set(replace(config, **section), part, force=True).buckets or [])


# -- layers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """A layer of a type."""

    sizes: LayerSizes
    fixed_bytes: int
    """Parameters, accumulators, optimizer state, and parameters cast for computing."""
    num_moments: int = 2
    """Numbers of optimizer state for each parameter."""
    trains: bool = True
    """Whether its parameters change."""
    has_backward: bool = True
    """Whether it, or a layer before it, trains."""
    adapters: LayerSizes | None = None
    """The adapters beside it, which train. None: it has none."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Mesh of the devices that hold it, innermost axis first."""

    @property
    def flops(self) -> float:
        """Operations of the model, forward and backward, of the layer with its adapters."""
        own = sum(self.sizes.flops.tasks(trains=self.trains, has_backward=self.has_backward))
        return own if self.adapters is None else own + self.adapters.flops.trained


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """A model run in one way."""

    layers: tuple[str, ...]
    """The type of each layer in order."""
    types: Mapping[str, LayerType]
    ends: frozenset[int]
    """Layers behind which a chunk must end."""
    tokens_per_sample: float
    """Tokens of a sample; 0 where samples share rows."""


def model_layers(
    config: TrainConfig,
    *,
    microbatch_size: int,
    tensor: int = 1,
    remat: str = "none",
    target: "Target | None" = None,
    rows: MicrobatchRows | None = None,
) -> ModelLayers:
    """Returns the layers of a run's model on a target (None: the running backend).

    ``rows`` are those of a microbatch, where they are known already: data may have to be read for them.

    Raises ValueError, with the remedy, where devices cannot share the layers, or the data cannot be read.
    """
    from rrfp_jax.programs.target import current_target  # a plan whose costs come from a file loads no JAX

    mesh, encoder_mesh = _meshes(config, tensor)
    check_divides(config.model, tensor, mesh.get(EXPERT, 1))
    way = StageRun(
        rows=rows or rows_of_microbatch(config, microbatch_size),
        tensor=tensor,
        axes=other_axes(mesh),
        remat=remat_rule(remat),
        target=target or current_target(),
        compute_bytes=FLOAT_BYTES[config.model.compute_dtype],
        pixel_bytes=FLOAT32 if config.images is None else 1,
    )
    of_encoder = replace(way, tensor=encoder_mesh.get(TENSOR, 1), axes=other_axes(encoder_mesh))
    packed, where = config.has_segments, config.pipeline.projector_in
    placed, ends = list[Placed](), frozenset[int]()
    if config.vision is not None:
        projector = config.projector or ProjectorConfig()
        model = VisionLanguageConfig(vision=config.vision, projector=projector, decoder=config.model)
        placed = [*encoder_layer_sizes(model, of_encoder)]
        if where == DECODER:  # in a chunk of the decoder's, on its mesh
            placed[-1] = [*encoder_layer_sizes(model, way)][-1]._replace(is_encoder=False)
        last = len(placed) - 1
        ends = frozenset({DECODER: (last - 1,), OWN_CHUNK: (last - 1, last)}.get(where, (last,)))
    prefix = "" if config.vision is None else "decoder."
    placed += decoder_layer_sizes(config.model, way, packed=packed, prefix=prefix)
    beside = [_adapters_of(each, of_encoder if each.is_encoder else way, config) for each in placed]
    frozen = ("*",) if config.adapters is not None else config.optimizer.freeze
    trains = [not _is_frozen(each.names, frozen) or bool(own) for each, own in zip(placed, beside, strict=True)]
    if not any(trains):
        raise ValueError("every layer of the model is frozen, and nothing is left to train: freeze fewer layers")
    ahead = 0 if way.target.platform == "cpu" else LEAVES_AHEAD
    first, num_shares = trains.index(True), config.num_state_shares
    names, types, kinds = list[str](), dict[str, LayerType](), dict[str, list[Any]]()
    for place, (each, of_layer) in enumerate(zip(placed, beside, strict=True)):
        has_backward, does = place >= first, trains[place] and not of_layer
        if of_layer:  # layers of a kind may have different ones
            known = kinds.setdefault(each.kind, [])
            known += [] if of_layer in known else [of_layer]
            number = known.index(of_layer)
            names.append(each.kind + (f" (adapters {number + 1})" if number else " (adapters)"))
        else:
            names.append(each.kind + ("" if does else " (frozen)" if has_backward else " (frozen, first)"))
        num_moments = config.optimizer.num_moments(
            is_matrix=each.kind not in _TABLES, param_bytes=FLOAT_BYTES[each.param_dtype]
        )
        is_in_turn = way.target.platform != "cpu" and each.kind != "embedding"
        for name, sizes in zip((names[-1], *halves_of(names[-1])), (each.sizes, *each.halves), strict=False):
            adapters = of_layer.get(name.removeprefix(names[-1]).removeprefix(":"))
            # Moments in host memory take none of the devices'.
            here = 0 if config.optimizer.on_host else 1
            fixed = _fixed(sizes, FLOAT_BYTES[each.param_dtype], here * num_moments if does else None, num_shares)
            if adapters is not None:
                fixed += _fixed(adapters, FLOAT32, here * config.optimizer.num_moments(), num_shares)
            types[name] = LayerType(
                sizes=sizes.in_turn(trains=does) if is_in_turn else sizes,
                fixed_bytes=fixed + ahead * sizes.leaf_bytes,
                num_moments=num_moments,
                trains=does,
                has_backward=has_backward,
                adapters=adapters,
                mesh=encoder_mesh if each.is_encoder else mesh,
            )
    return ModelLayers(
        layers=tuple(names),
        types=types,
        ends=ends,
        tokens_per_sample=float(config.row_length or 0),
    )


def _meshes(config: TrainConfig, tensor: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Returns the mesh of the decoder's stages with ``tensor`` devices along that axis, and the encoder's."""
    layout = config.pipeline
    mesh = with_tensor(layout.mesh, tensor)
    own = layout.encoder_mesh
    encoder_mesh = mesh if own is None else with_tensor(own, own.get(TENSOR, 1))
    if prod(encoder_mesh.values()) != prod(mesh.values()):
        raise ValueError(
            f"encoder_mesh has {prod(encoder_mesh.values())} devices, and the decoder's stages have "
            f"{prod(mesh.values())} ({describe_axes(tuple(mesh.items()))}): give both the same number"
        )
    for axis in (*other_axes(mesh), *other_axes(encoder_mesh)):
        if axis not in (FSDP, EXPERT, CONTEXT):
            raise ValueError(f"planning knows nothing of the axis {axis!r}, which the model does not cut: leave it out")
    return mesh, encoder_mesh


def _is_frozen(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    return bool(patterns) and all(any(matches(pattern, name) for pattern in patterns) for name in names)


def _adapters_of(placed: Placed, way: StageRun, config: TrainConfig) -> dict[str, LayerSizes]:
    """Returns the adapters beside a layer, and beside its attention and its MLP; empty where there are none."""
    if config.adapters is None:
        return {}
    own = _adapter_sizes(config, way.tensor)
    num_rows, num_tokens = (each.patches if placed.is_encoder else each.tokens for each in (way.rows, way.own))
    found: dict[str, LayerSizes] = {}
    for part in ("", *HALVES):
        sizes = [size for name in placed.names for size in own.get(name, ()) if part in ("", size.path[0])]
        if not sizes:
            continue
        found[part] = adapters_beside(
            [(size.rows, size.columns) for size in sizes],
            config.adapters.rank,
            inputs=sum({(*size.path[:-1], size.path[-1] in _SECOND): size.rows for size in sizes}.values()),
            num_params=sum(size.held for size in sizes),
            num_rows=num_rows,
            num_tokens=num_tokens,
            remat=way.remat,
            compute_bytes=way.compute_bytes,
            has_dropout=config.adapters.dropout > 0,
        )
        found[part] = way.spread(found[part], num_rows / num_tokens)
    return found


def _adapter_sizes(config: TrainConfig, tensor: int) -> Mapping[str, Sequence["AdapterSize"]]:
    from rrfp_jax.commands.training.model_parts import training_chunks, whole_chunks
    from rrfp_jax.models.adapters import adapter_sizes

    return adapter_sizes(training_chunks(config, whole_chunks(config)), {TENSOR: tensor})


def _fixed(sizes: LayerSizes, itemsize: int, num_moments: int | None, num_shares: int) -> int:
    """Returns the lasting bytes of a layer. Moments have the parameters' dtype, and a unit holds a share of them; None:
    the layer is frozen."""
    number = sizes.num_held
    held = number * itemsize + sizes.derived_bytes
    if num_moments is None:
        return held
    return held + number * FLOAT32 - (-num_moments * number * itemsize // num_shares) + _COUNTS


# -- costs -------------------------------------------------------------------------------------------------------------


def analytic_book(
    config: TrainConfig,
    device: Device,
    *,
    microbatch_sizes: Sequence[int],
    tensors: Sequence[int] = (1,),
    remats: Sequence[str] = ("none",),
    num_devices: int | None = None,
    rows: MicrobatchRows | None = None,
) -> CostBook:
    """Returns the costs of a run's model for each of these ways to run it.

    Links are those of ``num_devices`` (None: as many as the configuration has): between hosts, where one host has not
    so many. ``rows`` are those of a microbatch (None: read from the data).

    Operations of a step, over those that the devices could do in its time, are its MFU: those of the model alone,
    forward and backward, without rematerialisation. For each token of a decoder they are 6 for every parameter of a
    product, the head's included, and ``12 * layers * length * width of all heads`` for attention, whose squares count
    whole. The embedding is a look-up and counts nothing.

    Raises ValueError, with the remedy, where devices cannot share the layers, or the data cannot be read.
    """
    from rrfp_jax.programs.target import Target  # a plan whose costs come from a file loads no JAX

    found, layout = Efficiencies(), config.pipeline
    entries, models, target = [], [], Target.like(device)

    def roofline_of(mesh: Mapping[str, int]) -> Roofline:
        return Roofline(
            device=device,
            efficiencies=found,
            tensor=mesh.get(TENSOR, 1),
            spans=spans(mesh),
            is_float32=config.model.compute_dtype == "float32",
        )

    for size in dict.fromkeys(microbatch_sizes):
        of_size = rows or rows_of_microbatch(config, size)
        for tensor, remat in product(dict.fromkeys(tensors), dict.fromkeys(remats)):
            models.append(
                model_layers(config, microbatch_size=size, tensor=tensor, remat=remat, target=target, rows=of_size)
            )
            costs = {
                name: roofline_of(each.mesh).costs(
                    each.sizes,
                    fixed_bytes=each.fixed_bytes,
                    param_bytes=FLOAT_BYTES[config.model.param_dtype],
                    num_moments=each.num_moments,
                    on_host=config.optimizer.on_host,
                    trains=each.trains,
                    has_backward=each.has_backward,
                )
                for name, each in models[-1].types.items()
            }
            for name, each in models[-1].types.items():
                if each.adapters is not None:  # their bytes are in those of the layer
                    costs[name] += roofline_of(each.mesh).costs(
                        each.adapters,
                        fixed_bytes=0,
                        param_bytes=FLOAT32,
                        num_moments=config.optimizer.num_moments(),
                        on_host=config.optimizer.on_host,
                    )
            entries.append(CostEntry(types=costs, microbatch_size=size, tensor=tensor, remat=remat))
    return CostBook(
        layers=models[0].layers,
        entries=tuple(entries),
        ends=models[0].ends,
        links=device.links(num_devices or layout.num_devices, found),
        mesh=other_axes(layout.mesh),
        task_ms=found.launch_ms,
        tokens_per_sample=models[0].tokens_per_sample,
        device=device.title,
        device_bytes=device.num_bytes,
        device_flops=roofline_of({}).peak_flops,
        source=f"analytic: {found.compute:.0%} of the peak's operations, {found.memory:.0%} of the memory's bandwidth",
    )
