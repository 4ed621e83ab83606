"""The model of a configuration as layers by type, in order, with the bytes that each holds.

A decoder is ``embedding``, so many times ``layer``, and ``head`` with the final norm. A model with an encoder has
``patches``, so many times ``vision``, and ``projector`` before them; encoder and decoder share no chunk. Layers
that are frozen are types of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs.layer_sizes import LEAVES_AHEAD, LayerSizes, remat_rule
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR, describe_axes, other_axes, with_tensor
from rrfp_jax.models.cuts import check_divides
from rrfp_jax.models.vision_config import DECODER, OWN_CHUNK, ProjectorConfig, VisionLanguageConfig
from rrfp_jax.planner.layer_kinds import (
    FLOAT32,
    FLOAT_BYTES,
    Placed,
    StageRun,
    decoder_layer_sizes,
    encoder_layer_sizes,
)
from rrfp_jax.planner.microbatches import MicrobatchRows, rows_of_microbatch

if TYPE_CHECKING:
    from rrfp_jax.programs.target import Target

_COUNTS = 8
"""Bytes of the two counts of updates that an optimizer has for each chunk."""
_TABLES = ("embedding", "head")
"""Layers whose matrices are no products of hidden layers, for optimizers that tell these apart."""


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
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Mesh of the devices that hold it, innermost axis first."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes that replicas sum up."""
        return self.sizes.num_held * FLOAT32 if self.trains else 0


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
    from rrfp_jax.programs.target import current_target

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
    placed = _placed(config, way, of_encoder)
    trains = [not _is_frozen(each.names, config.optimizer.freeze) for each in placed]
    if not any(trains):
        raise ValueError("every layer of the model is frozen, and nothing is left to train: freeze fewer layers")
    ahead = 0 if way.target.platform == "cpu" else LEAVES_AHEAD
    first, replicas = trains.index(True), config.pipeline.replicas if config.optimizer.shard else 1
    names, types = [], {}
    for place, (each, does) in enumerate(zip(placed, trains, strict=True)):
        has_backward = place >= first
        names.append(each.kind + ("" if does else " (frozen)" if has_backward else " (frozen, first)"))
        num_moments = config.optimizer.num_moments(is_matrix=each.kind not in _TABLES)
        is_in_turn = way.target.platform != "cpu" and each.kind != "embedding"
        types[names[-1]] = LayerType(
            sizes=each.sizes.in_turn(trains=does) if is_in_turn else each.sizes,
            fixed_bytes=_fixed(each, num_moments if does else None, replicas) + ahead * each.sizes.leaf_bytes,
            num_moments=num_moments,
            trains=does,
            has_backward=has_backward,
            mesh=encoder_mesh if each.is_encoder else mesh,
        )
    return ModelLayers(
        layers=tuple(names),
        types=types,
        ends=_ends(config, [each.kind for each in placed]),
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


def _placed(config: TrainConfig, way: StageRun, of_encoder: StageRun) -> list[Placed]:
    packed = config.has_segments
    if config.vision is None:
        return list(decoder_layer_sizes(config.model, way, packed=packed))
    projector = config.projector or ProjectorConfig()
    model = VisionLanguageConfig(vision=config.vision, projector=projector, decoder=config.model)
    seen = [*encoder_layer_sizes(model, of_encoder)]
    if config.pipeline.projector_in == DECODER:  # in a chunk of the decoder's, on its mesh
        seen[-1] = [*encoder_layer_sizes(model, way)][-1]._replace(is_encoder=False)
    return [*seen, *decoder_layer_sizes(config.model, way, packed=packed, prefix="decoder.")]


def _is_frozen(names: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return False
    from rrfp_jax.programs.model_graph import matches

    return all(any(matches(pattern, name) for pattern in patterns) for name in names)


def _fixed(placed: Placed, num_moments: int | None, replicas: int) -> int:
    """Returns the lasting bytes of a layer. Moments have the parameters' dtype, and replicas may share them out; None:
    the layer is frozen."""
    itemsize, number = FLOAT_BYTES[placed.param_dtype], placed.sizes.num_held
    held = number * itemsize + placed.sizes.derived_bytes
    if num_moments is None:
        return held
    return held + number * FLOAT32 - (-num_moments * number * itemsize // replicas) + _COUNTS


def _ends(config: TrainConfig, kinds: list[str]) -> frozenset[int]:
    if config.vision is None:
        return frozenset()
    projector, where = kinds.index("projector"), config.pipeline.projector_in
    behind = {DECODER: (projector - 1,), OWN_CHUNK: (projector - 1, projector)}
    return frozenset(behind.get(where, (projector,)))
