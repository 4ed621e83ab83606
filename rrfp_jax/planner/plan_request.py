"""From the options of ``rrfp plan`` to costs and a search space: all is read and checked before the search begins.

Costs come from a file, are worked out for a device, or come from programs that are compiled here.
"""

import argparse
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path

from rrfp_jax.byte_sizes import parse_bytes
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.devices import device_of
from rrfp_jax.costs.layer_costs import every_setting
from rrfp_jax.costs.layer_sizes import REMAT_NAMES, REMATS
from rrfp_jax.layout import describe_axes, other_axes, with_tensor
from rrfp_jax.planner.as_configured import check_as_configured
from rrfp_jax.planner.cost_file import read_costs
from rrfp_jax.planner.options import ORDER_NAMES, parse_counts, parse_noise, parse_words
from rrfp_jax.planner.search_space import CONSUMPTIONS, SearchSpace
from rrfp_jax.planner.writing import check_writable

_USUAL_SIZES = (1, 2, 4, 8)
"""Samples of a microbatch, and devices that share a layer, where the user does not say."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The costs and the search space of a plan."""

    book: CostBook
    space: SearchSpace
    config: TrainConfig | None
    """The configuration to complete; None: the costs alone tell the model."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of a device; None: no limit is known."""
        return self.space.memory_bytes or self.book.device_bytes


def read_request(arguments: argparse.Namespace) -> PlanRequest:
    """Returns the request; raises ValueError, in one sentence with the remedy, where options contradict each other."""
    config = None if arguments.config is None else load_train_config(arguments.config, {}, trust=arguments.trust)
    if arguments.as_configured:
        check_as_configured(arguments, config)
    if (arguments.costs is None) == (arguments.device is None):
        raise ValueError("costs come from --device NAME or from --costs FILE.json: give one of them")
    if config is None and (arguments.costs is None or arguments.compile):
        flag = "--device" if arguments.costs is None else "--compile"
        raise ValueError(f"{flag} needs a model: give --config FILE.yaml too")
    if arguments.write is not None:
        if config is None:
            raise ValueError("--write completes a configuration: give --config FILE.yaml too")
        check_writable(config, Path(arguments.write))
    num_devices = _num_devices(arguments, config)
    batch_size = arguments.batch_size
    if batch_size is None and config is not None:
        batch_size = config.data.batch_size
    if config is not None and config.pipeline.encoder_mesh is not None:
        _check_encoder_mesh(arguments, config)
    book = _costs(arguments, config, num_devices=num_devices, batch_size=batch_size)
    if config is not None:
        asked = other_axes(config.pipeline.mesh)
        if tuple(asked.items()) != tuple(book.mesh.items()):  # the order of axes counts
            raise ValueError(
                f"the costs know nothing of {describe_axes(tuple(asked.items()))} in mesh: work them out (--device, "
                "not --costs), compile them here (--compile), or leave mesh out"
            )
    if arguments.jitter is not None:
        book = replace(book, noise=parse_noise(arguments.jitter))
    space = SearchSpace(
        devices=num_devices,
        batch_size=batch_size,
        microbatch_sizes=parse_counts(arguments.microbatch_size, "--microbatch-size"),
        microbatches=parse_counts(arguments.microbatches, "--microbatches"),
        memory_bytes=None if arguments.memory is None else parse_bytes(arguments.memory, "memory"),
        stages=parse_counts(arguments.stages, "--stages"),
        data=parse_counts(arguments.replicas, "--replicas"),
        tensor=parse_counts(arguments.tensor, "--tensor"),
        chunks=_chunks(arguments, config),
        schedules=parse_words(arguments.schedules, "--schedules", ORDER_NAMES),
        consumptions=parse_words(arguments.consume, "--consume", CONSUMPTIONS) or CONSUMPTIONS,
        remats=parse_words(arguments.remat, "--remat", REMAT_NAMES),
        top=arguments.top,
    )
    return PlanRequest(book=book, space=space, config=config)


def _check_encoder_mesh(arguments: argparse.Namespace, config: TrainConfig) -> None:
    if config.vision is None:
        raise ValueError("encoder_mesh is for models with an encoder: give a section vision, or leave it out")
    if arguments.costs is not None or arguments.compile:
        flag = "--compile" if arguments.compile else "--costs"
        raise ValueError(
            f"{flag} knows one mesh for all stages: work costs out alone (--device), or leave encoder_mesh out"
        )


def _num_devices(arguments: argparse.Namespace, config: TrainConfig | None) -> int:
    if arguments.devices is not None:
        return int(arguments.devices)
    if config is None:
        raise ValueError("the number of devices is not given: give --devices, or --config FILE.yaml, which has one")
    return config.pipeline.num_devices


def _chunks(arguments: argparse.Namespace, config: TrainConfig | None) -> tuple[int, ...] | None:
    """Returns the chunks per stage: one where encoder and decoder have meshes of their own, and so share no stage."""
    asked = parse_counts(arguments.chunks_per_stage, "--chunks-per-stage")
    if config is None or config.pipeline.encoder_mesh is None:
        return asked
    if asked not in (None, (1,)):
        raise ValueError(
            "--chunks-per-stage above 1 makes encoder and decoder share stages: leave it or encoder_mesh out"
        )
    return (1,)


# -- costs -------------------------------------------------------------------------------------------------------------


def costs_of_model(path: str, config: TrainConfig) -> CostBook:
    """Returns the costs of a file; raises ValueError where its model has another number of layers."""
    book = read_costs(path)
    wanted = config.model.num_layers + 2 + (0 if config.vision is None else config.vision.num_layers_run + 2)
    if len(book.layers) != wanted:
        raise ValueError(
            f"costs {path} are of a model with {len(book.layers)} layers, ends included, and this one has {wanted}: "
            "measure this model (rrfp profile)"
        )
    return book


def _costs(
    arguments: argparse.Namespace, config: TrainConfig | None, *, num_devices: int, batch_size: int | None
) -> CostBook:
    measured = None
    if arguments.costs is not None:
        measured = read_costs(arguments.costs) if config is None else costs_of_model(arguments.costs, config)
    if config is not None and arguments.compile:
        return _compiled(arguments, config, measured, num_devices)
    if measured is not None:
        return measured
    assert config is not None
    return _analytic(arguments, config, num_devices, batch_size)


def _analytic(arguments: argparse.Namespace, config: TrainConfig, num_devices: int, batch_size: int | None) -> CostBook:
    """Works out costs for each way to run the model that was asked for, or is worth a try."""
    from rrfp_jax.planner.analytic_costs import analytic_book  # loads JAX

    sizes, tensors, remats = _configured(config) if arguments.as_configured else _ways(arguments)
    if sizes is None:
        every = sorted({config.data.microbatch_size, *_USUAL_SIZES})
        sizes = tuple(size for size in every if batch_size is None or batch_size % size == 0)
    if tensors is None:
        both = gcd(
            num_devices // prod(other_axes(config.pipeline.mesh).values()),
            config.model.num_key_value_heads,
            config.model.mlp_dim,
        )
        tensors = tuple(tensor for tensor in _USUAL_SIZES if both % tensor == 0 and _is_as_large(config, tensor))
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
    """Returns whether the decoder's stages have as many devices as the encoder's, if these have a mesh of their own."""
    mesh, encoder_mesh = with_tensor(config.pipeline.mesh, tensor), config.pipeline.encoder_mesh
    return encoder_mesh is None or prod(mesh.values()) == prod(encoder_mesh.values())


def _compiled(
    arguments: argparse.Namespace, config: TrainConfig, measured: CostBook | None, num_devices: int
) -> CostBook:
    """Compiles a few layers for each way to run the model that was asked for."""
    device = None if arguments.device is None else device_of(arguments.device)

    from rrfp_jax.commands.common.console import make_console
    from rrfp_jax.commands.training.training_console import CompileReport
    from rrfp_jax.planner.compiled_costs import compiled_book
    from rrfp_jax.runtime.compile_cache import use_compile_cache

    (sizes, tensors, remats), own = _ways(arguments), _configured(config)
    settings = every_setting(sizes or own[0], tensors or own[1], remats or own[2])
    use_compile_cache()
    report = CompileReport(make_console(is_quiet=arguments.json))
    try:
        return compiled_book(
            config, settings, device=device, measured=measured, num_devices=num_devices, progress=report
        )
    finally:
        report.stop()


def _configured(config: TrainConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    layout = config.pipeline
    return (config.data.microbatch_size,), (layout.tensor,), (layout.remat,)


def _ways(
    arguments: argparse.Namespace,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[str, ...] | None]:
    return (
        parse_counts(arguments.microbatch_size, "--microbatch-size"),
        parse_counts(arguments.tensor, "--tensor"),
        parse_words(arguments.remat, "--remat", REMAT_NAMES),
    )
