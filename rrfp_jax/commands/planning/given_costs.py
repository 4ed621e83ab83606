"""The costs that plan works with: of a file, worked out for a device, or from programs compiled here."""

import argparse
from math import gcd, prod

from rrfp_jax.commands.planning.cost_file import read_costs
from rrfp_jax.commands.planning.options import parse_counts, parse_words
from rrfp_jax.commands.planning.setting import every_setting
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.devices import device_of
from rrfp_jax.costs.layer_sizes import NAMES, REMATS
from rrfp_jax.layout import TENSOR, other_axes, with_tensor

_SIZES = (1, 2, 4, 8)
"""Of microbatches, and devices that share a layer, where the user does not say."""


def check_given(arguments: argparse.Namespace, *, has_config: bool) -> None:
    """Raise ValueError unless it is clear where costs come from."""
    if (arguments.costs is None) == (arguments.device is None):
        raise ValueError("costs come from --device NAME or from --costs FILE.json: give one of them")
    if not has_config and (arguments.costs is None or arguments.compile):
        flag = "--device" if arguments.costs is None else "--compile"
        raise ValueError(f"{flag} needs a model: give --config FILE.yaml too")


def given_costs(
    arguments: argparse.Namespace, config: TrainConfig | None, *, num_devices: int, batch_size: int | None
) -> CostBook:
    """Raises ValueError, with the remedy, where files, devices and model do not fit together."""
    measured = None
    if arguments.costs is not None:
        measured = read_costs(arguments.costs) if config is None else costs_of_model(arguments.costs, config)
    if config is not None and arguments.compile:
        return _compiled(arguments, config, measured, num_devices)
    if measured is not None:
        return measured
    assert config is not None
    return _analytic(arguments, config, num_devices, batch_size)


def costs_of_model(path: str, config: TrainConfig) -> CostBook:
    """Those of a file; raises ValueError where they are of a model with another number of layers."""
    book = read_costs(path)
    wanted = config.model.num_layers + 2 + (0 if config.vision is None else config.vision.num_layers_run + 2)
    if len(book.layers) != wanted:
        raise ValueError(
            f"costs {path} are of a model with {len(book.layers)} layers, ends included, and this one has {wanted}: "
            "measure this model (rrfp profile)"
        )
    return book


def _analytic(arguments: argparse.Namespace, config: TrainConfig, num_devices: int, batch_size: int | None) -> CostBook:
    """For each way to run the model that was asked for, or is worth a try."""
    from rrfp_jax.commands.planning.analytic_costs import analytic_book  # loads JAX

    sizes, tensors, remats = _configured(config) if arguments.as_configured else _ways(arguments)
    if sizes is None:
        every = sorted({config.data_set.microbatch_size, *_SIZES})
        sizes = tuple(size for size in every if batch_size is None or batch_size % size == 0)
    if tensors is None:
        both = gcd(
            num_devices // prod(other_axes(config.pipeline.mesh).values()),
            config.model.num_key_value_heads,
            config.model.mlp_dim,
        )
        tensors = tuple(tensor for tensor in _SIZES if both % tensor == 0 and _is_as_large(config, tensor))
        tensors = tensors or _configured(config)[1]
    if remats is None:
        remats = REMATS if config.pipeline.remat == "none" else (config.pipeline.remat,)
    return analytic_book(
        config,
        device_of(arguments.device),
        microbatch_sizes=sizes,
        tensors=tensors,
        remats=remats,
        num_devices=num_devices,
    )


def _is_as_large(config: TrainConfig, tensor: int) -> bool:
    """Whether the decoder's stages have as many devices as the encoder's, where these have a mesh of their own."""
    mesh, encoder_mesh = with_tensor(config.pipeline.mesh, tensor), config.pipeline.encoder_mesh
    return encoder_mesh is None or prod(mesh.values()) == prod(encoder_mesh.values())


def _compiled(
    arguments: argparse.Namespace, config: TrainConfig, measured: CostBook | None, num_devices: int
) -> CostBook:
    """For each way that was asked for; each takes a compilation."""
    device = None if arguments.device is None else device_of(arguments.device)

    from rrfp_jax.commands.common.console import make_console
    from rrfp_jax.commands.planning.compiled_costs import compiled_book
    from rrfp_jax.commands.training.assembly import compile_cache_of
    from rrfp_jax.commands.training.training_console import CompileReport

    (sizes, tensors, remats), own = _ways(arguments), _configured(config)
    settings = every_setting(sizes or own[0], tensors or own[1], remats or own[2])
    compile_cache_of(config)
    report = CompileReport(make_console(is_quiet=arguments.json))
    try:
        return compiled_book(
            config, settings, device=device, measured=measured, num_devices=num_devices, progress=report
        )
    finally:
        report.stop()


def _configured(config: TrainConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    layout = config.pipeline
    tensor = layout.tensor if layout.mesh is None else layout.mesh.get(TENSOR, 1)
    return (config.data_set.microbatch_size,), (tensor,), (layout.remat,)


def _ways(
    arguments: argparse.Namespace,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[str, ...] | None]:
    return (
        parse_counts(arguments.microbatch_size, "--microbatch-size"),
        parse_counts(arguments.tensor, "--tensor"),
        parse_words(arguments.remat, "--remat", NAMES),
    )
