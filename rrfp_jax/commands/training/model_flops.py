"""The operations that the model of a configuration needs for a step, from the contents of its batch."""

from collections.abc import Callable, Iterator
from functools import partial

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.model_parts import vision_language_config
from rrfp_jax.costs.flops import Amounts, CountedLayer, Flops, pairs, step_flops
from rrfp_jax.data.dataset import BatchContents
from rrfp_jax.models.presets import decoder_sizes, sizes_of
from rrfp_jax.models.vision_config import ProjectorConfig
from rrfp_jax.programs.model_graph import matches


def model_flops(config: TrainConfig) -> Callable[[BatchContents], float]:
    """Returns a function from a batch's contents to the operations of its step, forward and backward.

    :mod:`rrfp_jax.costs.flops` counts them.
    """
    layers = [*_encoder_layers(config), *_decoder_layers(config)]

    def of(contents: BatchContents) -> float:
        amounts = Amounts(
            tokens=contents.tokens,
            pairs=pairs(contents.token_lengths.tolist(), config.model.sliding_window),
            patches=contents.patches,
            patch_pairs=pairs(contents.patch_lengths.tolist()),
        )
        return step_flops(layers, amounts)

    return of


def _decoder_layers(config: TrainConfig) -> Iterator[CountedLayer]:
    model, prefix = config.model, "" if config.vision is None else "decoder."
    sizes, trains = decoder_sizes(model), partial(_trains, config)
    yield CountedLayer(lambda _: Flops(), trains=trains(f"{prefix}embedding"))
    for number in range(model.num_layers):
        is_sparse = model.is_sparse(number)
        yield CountedLayer(
            lambda held, is_sparse=is_sparse: sizes.layer(held.tokens, held.pairs, is_sparse=is_sparse),  # type: ignore[misc]
            trains=trains(f"{prefix}layers.{number}"),
        )
    head = f"{prefix}{'embedding' if model.tie_embeddings else 'head'}"
    yield CountedLayer(lambda held: sizes.head(held.tokens), trains=trains(head))


def _encoder_layers(config: TrainConfig) -> Iterator[CountedLayer]:
    if config.vision is None:
        return
    sizes, merged = (
        sizes_of(vision_language_config(config)),
        (config.projector or ProjectorConfig()).patches_per_feature,
    )
    trains = partial(_trains, config)
    yield CountedLayer(
        lambda held: sizes.encoder.patches(held.patches), trains=trains("vision.patches"), returns_gradient=False
    )
    for number in range(config.vision.num_layers_run):
        yield CountedLayer(
            lambda held: sizes.encoder.layer(held.patches, held.patch_pairs), trains=trains(f"vision.layers.{number}")
        )
    yield CountedLayer(lambda held: sizes.projector.whole(held.patches / merged), trains=trains("projector"))


def _trains(config: TrainConfig, name: str) -> bool:
    return not any(matches(pattern, name) for pattern in config.optimizer.freeze)
