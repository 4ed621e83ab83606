"""A model that reads text and pictures, and sounds, as a graph of chunks.

Each encoder is a chain of named layers (``vision.patches``, ``vision.pre_norm``, ``vision.layers.0`` ...,
``vision.norm``; ``audio.frames`` ...), with ``projector`` or ``audio_projector`` behind it. All lead into the first
chunk of the decoder (``decoder.embedding``, ``decoder.layers.0`` ..., ``decoder.final_norm``, ``decoder.head``), where
features take the place of some tokens' vectors. That edge is optional: a microbatch without pictures skips the
encoder's chunks, and the decoder does not wait for anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.models._parts import ProjectorShape
from rrfp_jax.models._tensor_cut import vision_language_partition
from rrfp_jax.models.cuts import ChunkContents, ContextCut, CutWords, plan_cut
from rrfp_jax.models.encoder import (
    EncoderLayer,
    FrameStem,
    PatchPlaces,
    PatchStem,
    PixelScale,
    Projector,
    encoder_layer,
    encoder_norm,
    patch_places,
)
from rrfp_jax.models.flax_modules import NamedLayer, chunk_of
from rrfp_jax.models.model import ChunkGraph, Merge, decoder_chunk, layer_name
from rrfp_jax.models.vision_config import (
    DECODER,
    ENCODER,
    OWN_CHUNK,
    PROJECTOR_PLACES,
    AudioConfig,
    Modality,
    VisionConfig,
    VisionLanguageConfig,
    check_index_leaves,
    check_patch_places,
)
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.remat import one_layer
from rrfp_jax.schedules import Edge


@dataclass(frozen=True)
class VisionLanguageModel:
    """A decoder with encoders, to be cut into chunks; :func:`vision_language_model` makes it."""

    config: VisionLanguageConfig
    """Shape and dtypes of the model."""

    def split(
        self,
        *,
        encoder_layers_per_chunk: Sequence[int] | None = None,
        decoder_layers_per_chunk: Sequence[float] | None = None,
        audio_layers_per_chunk: Sequence[int] | None = None,
        projector_in: str = ENCODER,
        head_in: int = -1,
        packed: bool = False,
        gives_logits: bool = False,
        context: ContextCut | None = None,
        counts_answers: bool = False,
        pixels: PixelScale | None = None,
    ) -> ChunkGraph:
        """Cuts the model into chunks; every cut computes the same function of the same parameters.

        The three lists give the number of layers of every chunk; None: all in one. 0 is for a chunk that holds only
        the parts before the first layer or behind the last; a half is for decoders. Projectors are in ``projector_in``:
        ``encoder`` (the last chunk of the encoder), ``own`` (a chunk for each) or ``decoder`` (the decoder's first
        chunk). ``head_in``, ``packed``, ``context`` and ``counts_answers``, all of the decoder, are those of
        :meth:`rrfp_jax.models.LanguageModel.split`. With ``gives_logits`` the last chunk returns float32 logits
        ``[batch, length, vocab_size]`` in place of the loss.

        Leaves: the first chunk of an encoder reads ``patches``, float ``[images, patches, patch_dim]``, or uint8 with
        ``pixels`` to scale them, and if the encoder is packed ``patch_rows`` and ``patch_columns``, int32 ``[images,
        patches]``; all its chunks with layers then also read ``patch_segments``, and with rotary positions or windows
        these two too. An encoder of sounds reads ``frames``,
        float ``[clips, frames, bins]``, and ``frame_segments``.
        The decoder's first chunk reads ``tokens`` and, where the microbatch has features, ``image_index`` and
        ``audio_index``, int32 ``[batch, length]``: the number of the feature that takes the place of the token's own
        vector, counted over the microbatch's features ``[images * features per image]``; -1 for none. The rest is as in
        a language model.

        Raises ValueError, with the remedy, for a cut that does not add up.
        """
        if projector_in not in PROJECTOR_PLACES:
            raise ValueError(f"projector_in is {projector_in!r}: give one of {', '.join(PROJECTOR_PLACES)}")
        counts = {"vision": encoder_layers_per_chunk, "audio": audio_layers_per_chunk}
        if audio_layers_per_chunk is not None and self.config.audio is None:
            raise ValueError("audio_layers_per_chunk is given but the model has no audio encoder: leave it out")
        chains = {
            modality.name: self._encoder_chunks(modality, counts[modality.name], projector_in, pixels)
            for modality in self.config.modalities
        }
        options = {"packed": packed, "gives_logits": gives_logits, "context": context, "counts_answers": counts_answers}
        chains["decoder"] = self._decoder_chunks(decoder_layers_per_chunk, projector_in, head_in, **options)
        return _graph(chains)

    def _encoder_chunks(
        self, modality: Modality, counts: Sequence[int] | None, projector_in: str, pixels: PixelScale | None
    ) -> list[Chunk]:
        num_layers = modality.encoder.num_layers_run
        words = CutWords(
            counts=f"{'encoder' if modality.name == 'vision' else modality.name}_layers_per_chunk",
            first=modality.data_leaf,
            last="projector" if projector_in == ENCODER else "norm" if modality.encoder.final_norm else "",
            has_halves=False,
        )
        plans = plan_cut(num_layers, layers_per_chunk=[num_layers] if counts is None else counts, words=words)
        chunks = [self._encoder_chunk(modality, plan, projector_in, pixels) for plan in plans]
        if projector_in == OWN_CHUNK:
            layer = _projector(self.config, modality)
            chunks.append(self._chunk([layer], partial(_run_encoder, stem=None), layer.name, ()))
        return chunks

    def _encoder_chunk(
        self, modality: Modality, plan: ChunkContents, projector_in: str, pixels: PixelScale | None
    ) -> Chunk:
        encoder, layers = modality.encoder, _encoder_layers(modality, plan)
        if plan.head and projector_in == ENCODER:
            layers.append(_projector(self.config, modality))
        vision, has_layers = encoder if isinstance(encoder, VisionConfig) else None, len(plan.layers) > 0
        leaves = []
        if plan.embedding:
            leaves.append(modality.data_leaf)
        # layers with rotary positions or windows need places, and so does a stem with learned positions
        reads_places = vision is not None and has_layers and vision.has_layers_of_places
        learns_places = vision is not None and vision.is_packed and vision.rotary_theta is None
        if reads_places or (learns_places and plan.embedding):
            leaves += ["patch_rows", "patch_columns"]
        # a stem of sounds counts positions within clips; attention needs the segments of both
        if encoder.is_packed and (has_layers or (plan.embedding and vision is None)):
            leaves.append(modality.segments_leaf)
        run = partial(
            _run_encoder,
            stem=modality.data_leaf if plan.embedding else None,
            pixels=pixels,
            segments=modality.segments_leaf if encoder.is_packed and has_layers else None,
            stride=encoder.frames_per_position if isinstance(encoder, AudioConfig) else 1,
            places_of=partial(patch_places, vision) if vision is not None and reads_places else None,
            drops_first=plan.head and isinstance(encoder, VisionConfig) and encoder.class_token,
        )
        chunk = self._chunk(layers, run, f"{modality.name}: {plan.title}", tuple(leaves))
        has_table = learns_places and plan.embedding
        return replace(chunk, check_leaves=partial(check_patch_places, self.config)) if has_table else chunk

    def _decoder_chunks(
        self, counts: Sequence[float] | None, projector_in: str, head_in: int, **options: Any
    ) -> list[Chunk]:
        config = self.config.decoder
        plans = plan_cut(
            config.num_layers,
            layers_per_chunk=[config.num_layers] if counts is None else counts,
            head_in=head_in,
            words=CutWords(counts="decoder_layers_per_chunk"),
        )
        merges = tuple(
            Merge(each.index_leaf, _projector(self.config, each) if projector_in == DECODER else None)
            for each in self.config.modalities
        )
        first, *others = (
            decoder_chunk(
                config,
                plan,
                prefix="decoder.",
                merges=merges if plan.embedding else (),
                cut_over_devices=partial(vision_language_partition, self.config),
                **options,
            )
            for plan in plans
        )
        return [replace(first, check_leaves=partial(check_index_leaves, self.config)), *others]

    def _chunk(self, layers: list[NamedLayer], run: Any, title: str, leaves: tuple[str, ...]) -> Chunk:
        return chunk_of(layers, run, title, leaves=leaves, partition=partial(vision_language_partition, self.config))


def vision_language_model(config: VisionLanguageConfig) -> VisionLanguageModel:
    """Returns the model that ``config`` describes; nothing is allocated before a chunk's ``init``."""
    return VisionLanguageModel(config)


def _graph(chains: dict[str, list[Chunk]]) -> ChunkGraph:
    chunks: list[Chunk] = []
    parts = {}
    for name, chain in chains.items():
        parts[name] = range(len(chunks), len(chunks) + len(chain))
        chunks += chain
    merging = parts["decoder"][0]
    edges = [Edge(*pair) for numbers in parts.values() for pair in pairwise(numbers)]
    # a microbatch without pictures or sounds skips the chunks of that encoder
    edges += [Edge(numbers[-1], merging, is_optional=True) for name, numbers in parts.items() if name != "decoder"]
    return ChunkGraph(chunks, tuple(sorted(edges)), parts)


def _projector(config: VisionLanguageConfig, modality: Modality) -> NamedLayer:
    decoder = config.decoder
    shape = ProjectorShape(
        projector=modality.projector,
        in_dim=modality.encoder.hidden,
        out_dim=decoder.hidden,
        norm_eps=modality.projector.norm_eps,
        init_std=decoder.init_std,
        num_layers=decoder.num_layers,
        param_dtype=decoder.param_dtype,
        compute_dtype=decoder.compute_dtype,
    )
    return NamedLayer(modality.projector_name, modality.projector_name, Projector, shape)


def _encoder_layers(modality: Modality, plan: ChunkContents) -> list[NamedLayer]:
    """Returns the encoder's layers of a chunk in order; in the chunk layers are counted from 0."""
    config, layers = modality.encoder, []
    if plan.embedding:
        stem = FrameStem if isinstance(config, AudioConfig) else PatchStem
        layers.append(NamedLayer(modality.data_leaf, f"{modality.name}.{modality.data_leaf}", stem, config))
        if isinstance(config, VisionConfig) and config.pre_norm:
            layers.append(NamedLayer("pre_norm", f"{modality.name}.pre_norm", encoder_norm, config))
    layers += [
        NamedLayer(
            layer_name(own),
            f"{modality.name}.{layer_name(layer)}",
            encoder_layer(is_global=not isinstance(config, VisionConfig) or config.is_global(layer)),
            config,
        )
        for own, layer in enumerate(plan.layers)
    ]
    if plan.head and config.final_norm:
        layers.append(NamedLayer("norm", f"{modality.name}.norm", encoder_norm, config))
    return layers


def _run_encoder(
    modules: dict[str, Any],
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    stem: str | None,
    pixels: PixelScale | None = None,
    segments: str | None = None,
    stride: int = 1,
    places_of: Callable[..., PatchPlaces] | None = None,
    drops_first: bool = False,
) -> jax.Array:
    """Computes the layers in order; ``drops_first`` leaves the class token out of the features."""
    x, places = inputs, PatchPlaces(None if segments is None else leaves[segments][:, ::stride])
    if places_of is not None:
        places = places_of(places.segments, leaves["patch_rows"], leaves["patch_columns"])
    if stem is not None and leaves[stem].dtype == jnp.uint8:
        if pixels is None:
            raise ValueError(f"{stem} are bytes: give them as floats, or say by `pixels` how the encoder scales bytes")
        # scaled here, so that bytes travel to the devices
        leaves = {**leaves, stem: pixels.scaled(leaves[stem])}
    for name, module in modules.items():
        if isinstance(module, Projector):
            x, drops_first = module(x[:, 1:] if drops_first else x), False
        elif isinstance(module, EncoderLayer):
            x = one_layer(partial(module, places=places))(x)
        else:
            x = module(leaves if name == stem else x)
    return x[:, 1:] if drops_first else x
