"""The model of a run as its configuration describes it: shape, chunks, their stages, frozen parameters, operations."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.planned import about_layout, sequence_slices
from rrfp_jax.costs.flops import Amounts, CountedLayer, DecoderSizes, Flops, chunk_flops, pairs, product, step_flops
from rrfp_jax.data.dataset import Batch, BatchContents
from rrfp_jax.field_rules import matches
from rrfp_jax.layout import CONTEXT
from rrfp_jax.models import add_adapters, language_model
from rrfp_jax.models.adapters import adapter_sizes
from rrfp_jax.models.cuts import ATTENTION, MLP, ContextCut, balanced_counts
from rrfp_jax.models.presets import decoder_sizes, sizes_of
from rrfp_jax.models.vision_config import OWN_CHUNK, ProjectorConfig, VisionLanguageConfig
from rrfp_jax.programs.batches import absent_chunks, num_microbatches
from rrfp_jax.programs.chunk import ADAPTERS, Chunk, param_specs, part_name, whole_name
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.schedules import Absences, Edge, PipelineGraph, Placement, absences
from rrfp_jax.training.batches import BatchCosts
from rrfp_jax.training.run_config import PipelineConfig

if TYPE_CHECKING:
    from rrfp_jax.models.encoder import PixelScale  # loads with a model that sees


class ModelChunks(NamedTuple):
    """A model's chunks, and which of them feed which."""

    chunks: list[Chunk]
    edges: tuple[Edge, ...]
    placement: Placement


def training_chunks(config: TrainConfig, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Returns chunks of the model with the adapters of the configuration, and the layers frozen that it freezes."""
    adapted = chunks if config.adapters is None else add_adapters(chunks, config.adapters)
    return freeze(adapted, config.optimizer.freeze)


def cut_language_model(config: TrainConfig, num_chunks: int, num_slices: int = 1) -> list[Chunk]:
    """Returns a decoder alone, in so many chunks, and its sequences in slices."""
    layout, cut = config.pipeline, config.pipeline.cut
    chunks = language_model(config.model).split(
        None if cut.layers else num_chunks,
        layers_per_chunk=cut.layers,
        embedding_in=cut.embedding_chunk,
        head_in=cut.head_chunk,
        packed=config.has_segments,
        context=context_cut(layout),
        counts_answers=config.counts_answers,
        slices=sequence_slices(config, num_slices),
    )
    return training_chunks(config, chunks)


def cut_vocabulary(config: TrainConfig) -> ModelChunks:
    """Returns a decoder alone, with embedding and head in shards on all stages.

    Raises ValueError, with the remedy, for a cut that does not add up.
    """
    layout, cut, stages = config.pipeline, config.pipeline.cut, config.pipeline.num_stages
    ends = (cut.embedding_chunk, cut.head_chunk, cut.stages)
    if cut.layers is not None and (len(cut.layers) != stages or ends != (0, -1, None)):
        raise ValueError(
            f"schedule {layout.schedule} has embedding and head on all stages, and layout {layout.layout!r} says "
            f"otherwise: give {stages} chunks of layers, with E in the first, L in the last, and without @"
        )
    if layout.offload is not None:
        raise ValueError(f"schedule {layout.schedule} moves nothing to the host: leave offload out")
    if not 2 <= stages <= config.model.vocab_size:
        raise ValueError(
            f"schedule {layout.schedule} cuts {config.model.vocab_size} words into a shard for each of {stages} "
            f"stages: give 2 to {config.model.vocab_size} stages, or another schedule"
        )
    with about_layout():
        graph = language_model(config.model).split_vocabulary(
            stages,
            None if cut.layers else stages,
            layers_per_chunk=cut.layers,
            packed=config.has_segments,
            fan_out=layout.named_schedule[1],
            context=context_cut(layout),
            counts_answers=config.counts_answers,
        )
    assert graph.placement is not None
    return ModelChunks(training_chunks(config, graph.chunks), graph.edges, graph.placement)


def context_cut(layout: PipelineConfig) -> ContextCut | None:
    """Returns the cut of the decoder's sequences; its stages all have one mesh."""
    devices = (layout.mesh or {}).get(CONTEXT, 1)
    return ContextCut(devices=devices) if devices > 1 else None


def pixel_scale(config: TrainConfig) -> "PixelScale | None":
    """Returns the encoder's scale of the pixels of image files; None where pictures do not come as bytes."""
    if config.images is None:
        return None
    from rrfp_jax.models.encoder import PixelScale

    return PixelScale(config.images.mean, config.images.std)


def vision_language_config(config: TrainConfig) -> VisionLanguageConfig:
    """Returns the shape of a model with an encoder."""
    assert config.vision is not None
    return VisionLanguageConfig(
        vision=config.vision, projector=config.projector or ProjectorConfig(), decoder=config.model
    )


def cut_vision_language_model(config: TrainConfig) -> ModelChunks:
    """Returns encoder and decoder on the stages that the configuration gives them.

    Raises ValueError, with the remedy, for a cut or a placement that does not add up.
    """
    from rrfp_jax.models import vision_language_model

    assert config.vision is not None
    layout, cut = config.pipeline, config.pipeline.cut
    placement, num_encoder_chunks = placement_of(layout)
    num_decoder_chunks = placement.num_chunks - num_encoder_chunks - (cut.projector_in == OWN_CHUNK)
    encoder_layers = cut.encoder_layers or balanced_counts(config.vision.num_layers_run, num_encoder_chunks)
    with about_layout():
        graph = vision_language_model(vision_language_config(config)).split(
            encoder_layers_per_chunk=encoder_layers,
            decoder_layers_per_chunk=cut.layers or balanced_counts(config.model.num_layers, num_decoder_chunks),
            projector_in=cut.projector_in,
            head_in=cut.head_chunk,
            packed=True,
            context=context_cut(layout),
            counts_answers=config.counts_answers,
            pixels=pixel_scale(config),
        )
    return ModelChunks(training_chunks(config, graph.chunks), graph.edges, placement)


def placement_of(layout: PipelineConfig) -> tuple[Placement, int]:
    """Returns the stage of every chunk, and how many chunks are the encoder's, without a projector of its own.

    Without a layout the encoder is one chunk on the first stage, and the decoder's chunks lie on the others in turn.
    """
    cut = layout.cut
    if layout.layout is not None and cut.encoder_layers is None:
        raise ValueError(f"layout {layout.layout!r} has no encoder, and the model has one: begin with P, v and p")
    if cut.embedding_chunk:
        raise ValueError(f"layout {layout.layout!r} embeds late: give the decoder's first chunk E, behind an encoder")
    encoder_stages = len(cut.encoder_layers or (1,))
    if cut.stages is not None:
        return Placement(cut.stages), encoder_stages
    decoder_stages = layout.num_stages - encoder_stages
    if decoder_stages < 1:
        raise ValueError(
            f"the encoder takes {encoder_stages} of {layout.num_stages} stages and leaves the decoder none: give more "
            "stages, or a layout with @ by which they share some"
        )
    num_decoder_chunks = len(cut.layers or ()) or decoder_stages * (layout.chunks_per_stage or 1)
    if num_decoder_chunks < decoder_stages:
        raise ValueError(
            f"layout has {num_decoder_chunks} chunks of the decoder for {decoder_stages} stages: give one or more for "
            "each stage"
        )
    stages = [*range(encoder_stages)]
    stages += [encoder_stages - 1] * (cut.projector_in == OWN_CHUNK)
    stages += [encoder_stages + chunk % decoder_stages for chunk in range(num_decoder_chunks)]
    return Placement(tuple(stages)), encoder_stages


# -- operations --------------------------------------------------------------------------------------------------------


def sample_cost(config: TrainConfig) -> Callable[[int, Sequence[int]], float]:
    """Returns a function from a sample's tokens, and the patches of each image, to its forward operations; balancing
    takes them as its cost."""
    decoder = decoder_sizes(config.model)
    if config.vision is None:
        return lambda tokens, patches: decoder.whole(tokens, pairs([tokens])).forward
    sizes, merged = sizes_of(vision_language_config(config)), _patches_per_feature(config)

    def cost(tokens: int, patches: Sequence[int]) -> float:
        seen = sizes.encoder.whole(sum(patches), pairs(patches)) + sizes.projector.whole(sum(patches) / merged)
        return (sizes.decoder.whole(tokens, pairs([tokens])) + seen).forward

    return cost


def model_flops(config: TrainConfig) -> Callable[[BatchContents], float]:
    """Returns a function from a batch's contents to the operations of its step, forward and backward.

    :mod:`rrfp_jax.costs.flops` counts them.
    """
    layers = [layer for _, layer in _counted_layers(config)]
    side = None if config.vision is None else config.vision.window
    return lambda contents: step_flops(
        layers,
        Amounts(
            tokens=contents.tokens,
            pairs=pairs(contents.token_lengths.tolist()),
            patches=contents.patches,
            patch_pairs=pairs(contents.patch_lengths.tolist()),
            near_pairs=pairs(contents.token_lengths.tolist(), config.model.sliding_window),
            near_patch_pairs=pairs(contents.patch_lengths.tolist(), (side or 0) ** 2 or None),
        ),
    )


def batch_costs(config: TrainConfig, chunks: Sequence[Chunk], graph: PipelineGraph) -> BatchCosts:
    """Returns a function from a batch to the operations of its tasks, and the pairs that it lacks.

    Those of a microbatch follow from its shapes, padding included, as its programs run. ``graph`` is that of one
    replica.
    """
    counted, owners, seen = _counted_layers(config), list[int](), set[str]()
    for name, _ in counted:
        # A table that embeds and is the head too is in two chunks, and the second mention is the head.
        own = [number for number, chunk in enumerate(chunks) if {name, whole_name(name)} & param_specs(chunk).keys()]
        owners.append(own[-1 if name in seen else 0])
        seen.add(name)
    layers, window = [layer for _, layer in counted], config.model.sliding_window
    known: dict[Any, tuple[NDArray[np.float64], frozenset[int]]] = {}

    def of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[NDArray[np.float64], frozenset[int]]:
        (rows, length), (images, patches) = shapes["tokens"], shapes.get("patches", (0, 0))[:2]
        amounts = Amounts(
            tokens=rows * length,
            pairs=pairs([length] * rows),
            patches=images * patches,
            patch_pairs=pairs([patches] * images),
            near_pairs=pairs([length] * rows, window),
            near_patch_pairs=pairs([patches] * images),
        )
        costs = np.zeros((len(chunks), 3))
        for owner, tasks in zip(owners, chunk_flops(layers, [1] * len(layers), amounts), strict=True):
            costs[owner] += tasks
        absent = absent_chunks(chunks, graph, shapes.keys())
        # A chunk that only embeds takes some time, too.
        costs[[chunk not in absent for chunk in range(len(chunks))], 0] += 1e-6 * costs.sum()
        return costs, absent

    def of_batch(batch: Batch) -> tuple[NDArray[np.float64], Absences]:
        found, lacks = list[NDArray[np.float64]](), list[tuple[int, int]]()
        for number in range(num_microbatches(batch)):
            shapes = {name: tuple(leaf[number].shape) for name, leaf in batch.items() if leaf[number] is not None}
            key = tuple(sorted(shapes.items()))
            if key not in known:
                known[key] = of_shapes(shapes)
            costs, absent = known[key]
            found.append(costs)
            lacks += [(chunk, number) for chunk in absent]
        return np.stack(found, axis=1), absences(lacks)

    return of_batch


def _counted_layers(config: TrainConfig) -> list[tuple[str, CountedLayer]]:
    """Returns the layers of the model by name, in its order, the encoder's first, each with its operations; those of a
    decoder by their parts."""
    model, layers = config.model, list[tuple[str, CountedLayer]]()

    beside = {} if config.adapters is None else adapter_sizes(training_chunks(config, whole_chunks(config)))

    def add(name: str, flops: Callable[[Amounts], Flops], *, returns_gradient: bool = True) -> None:
        part = name.partition(":")[2]
        own = [size for size in beside.get(whole_name(name), ()) if part in ("", size.path[0])]
        if own:  # before the layer, through which their gradients pass
            widths = sum(size.rows + size.columns for size in own) * config.adapters.rank  # type: ignore[union-attr]
            sees = name.startswith(("vision", "projector"))
            per = _patches_per_feature(config) if name == "projector" else 1
            counted = CountedLayer(lambda held: product(held.patches / per if sees else held.tokens, 1, widths))
            layers.append((ADAPTERS + name, counted))
        frozen = [*config.optimizer.freeze, *(["*"] if config.adapters is not None else ())]
        trains = not any(matches(pattern, whole_name(name)) for pattern in frozen)
        layers.append((name, CountedLayer(flops, trains=trains, returns_gradient=returns_gradient)))

    if config.vision is not None:
        seen, merged = sizes_of(vision_language_config(config)), _patches_per_feature(config)
        # Nothing lies before the patches, so they need no gradient of their input.
        add("vision.patches", lambda held: seen.encoder.patches(held.patches), returns_gradient=False)
        for number in range(config.vision.num_layers_run):
            pairs_of = attrgetter("patch_pairs" if config.vision.is_global(number) else "near_patch_pairs")
            add(
                f"vision.layers.{number}",
                lambda held, pairs_of=pairs_of: seen.encoder.layer(held.patches, pairs_of(held)),  # type: ignore[misc]
            )
        add("projector", lambda held: seen.projector.whole(held.patches / merged))
    sizes, prefix = decoder_sizes(model), "" if config.vision is None else "decoder."
    add(f"{prefix}embedding", lambda _: Flops())
    for number in range(model.num_layers):
        name, is_sparse = f"{prefix}layers.{number}", model.is_sparse(number)
        pairs_of = attrgetter("pairs" if model.is_global(number) else "near_pairs")
        add(part_name(name, ATTENTION), lambda held, pairs_of=pairs_of: sizes.attention(held.tokens, pairs_of(held)))  # type: ignore[misc]
        add(part_name(name, MLP), lambda held, is_sparse=is_sparse: sizes.mlp(held.tokens, is_sparse=is_sparse))  # type: ignore[misc]
    head = f"{prefix}{'embedding' if model.tie_embeddings else 'head'}"
    add(head, lambda held: sizes.head(held.tokens))
    for number in range(model.num_layers, model.num_layers + model.num_layers_ahead):
        add(f"layers.{number}", partial(_ahead_flops, sizes, is_sparse=model.is_sparse(number)))
        add(head, lambda held: sizes.head(held.tokens))
    return layers


def whole_chunks(config: TrainConfig) -> list[Chunk]:
    """Returns a model in one chunk, or in as few as it has parts, before anything is frozen."""
    if config.vision is None:
        return language_model(config.model).split(1)
    from rrfp_jax.models import vision_language_model

    return vision_language_model(vision_language_config(config)).split().chunks


def _ahead_flops(sizes: DecoderSizes, held: Amounts, *, is_sparse: bool) -> Flops:
    """Returns the operations of a layer that predicts further ahead, without the head."""
    return product(held.tokens, 2 * sizes.hidden, sizes.hidden) + sizes.layer(
        held.tokens, held.near_pairs, is_sparse=is_sparse
    )


def _patches_per_feature(config: TrainConfig) -> int:
    return (config.projector or ProjectorConfig()).patches_per_feature
