"""From the options of plan to costs and wishes: everything is read and checked before the search begins."""

import argparse
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from rrfp_jax.byte_sizes import parse_bytes
from rrfp_jax.commands.planning.as_configured import check_as_configured
from rrfp_jax.commands.planning.given_costs import check_given, given_costs
from rrfp_jax.commands.planning.options import ORDER_NAMES, parse_counts, parse_noise, parse_words
from rrfp_jax.commands.planning.writing import check_writable
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.layer_sizes import NAMES
from rrfp_jax.layout import describe_axes, other_axes
from rrfp_jax.observe.output_files import check_file
from rrfp_jax.planning.search.wishes import CONSUMPTIONS, Wishes


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be planned."""

    book: CostBook
    wishes: Wishes
    config: TrainConfig | None
    """None: the costs alone tell the model."""
    title: str
    """What it is a plan of, for captions."""

    @property
    def memory_bytes(self) -> int | None:
        """Of a device; None: no limit is known."""
        return self.wishes.memory_bytes or self.book.device_bytes


def read_asked(arguments: argparse.Namespace) -> Asked:
    """Raises ValueError, in one sentence with the remedy, for what does not fit together."""
    config = None if arguments.config is None else load_train_config(arguments.config, {}, trust=arguments.trust)
    if arguments.as_configured:
        check_as_configured(arguments, config)
    check_given(arguments, has_config=config is not None)
    _check_outputs(arguments, config)
    num_devices = _num_devices(arguments, config)
    batch_size = _batch_size(arguments, config)
    if config is not None and config.pipeline.encoder_mesh is not None:
        _check_encoder_mesh(arguments, config)
    book = given_costs(arguments, config, num_devices=num_devices, batch_size=batch_size)
    asked = other_axes(None if config is None else config.pipeline.mesh)
    if config is not None and tuple(asked.items()) != tuple(book.mesh.items()):  # the order of axes counts
        raise ValueError(
            f"the costs know nothing of {describe_axes(tuple(asked.items()))} in mesh: work them out (--device, not "
            "--costs), compile them here (--compile), or leave mesh out"
        )
    if arguments.jitter is not None:
        book = replace(book, noise=parse_noise(arguments.jitter))
    wishes = Wishes(
        devices=num_devices,
        batch_size=batch_size,
        microbatch_sizes=parse_counts(arguments.microbatch_size, "--microbatch-size"),
        microbatches=parse_counts(arguments.microbatches, "--microbatches"),
        memory_bytes=None if arguments.memory is None else parse_bytes(arguments.memory, "memory"),
        stages=parse_counts(arguments.stages, "--stages"),
        data=parse_counts(arguments.data, "--data"),
        tensor=parse_counts(arguments.tensor, "--tensor"),
        chunks=_chunks(arguments, config),
        schedules=parse_words(arguments.schedules, "--schedules", ORDER_NAMES),
        consumptions=parse_words(arguments.consume, "--consume", CONSUMPTIONS) or CONSUMPTIONS,
        window=arguments.window,
        remats=parse_words(arguments.remat, "--remat", NAMES),
        objective=arguments.objective,
        draws=arguments.draws,
        effort=arguments.effort,
        top=arguments.top,
    )
    what = arguments.config or arguments.costs
    return Asked(book=book, wishes=wishes, config=config, title=f"{what} on {num_devices} {_many(book)}")


def _check_encoder_mesh(arguments: argparse.Namespace, config: TrainConfig) -> None:
    if config.vision is None:
        raise ValueError("encoder_mesh is for models with an encoder: give a section vision, or leave it out")
    if arguments.costs is not None or arguments.compile:
        flag = "--compile" if arguments.compile else "--costs"
        raise ValueError(
            f"{flag} knows one mesh for all stages: work costs out alone (--device), or leave encoder_mesh out"
        )


def _many(book: CostBook) -> str:
    return f"x {book.device}" if book.device else "devices"


def _check_outputs(arguments: argparse.Namespace, config: TrainConfig | None) -> None:
    if arguments.write is not None:
        if config is None:
            raise ValueError("--write completes a configuration: give --config FILE.yaml too")
        check_writable(config, Path(arguments.write))
    if arguments.picture is not None:
        if Path(arguments.picture).suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"picture {arguments.picture!r}: let the name end in .png or .svg")
        check_file(Path(arguments.picture), "picture")
    if arguments.seed < 0:
        raise ValueError(f"seed is {arguments.seed}: give 0 or more")


def _num_devices(arguments: argparse.Namespace, config: TrainConfig | None) -> int:
    if arguments.devices is not None:
        return int(arguments.devices)
    if config is None:
        raise ValueError("the number of devices is not given: give --devices, or --config FILE.yaml, which has one")
    layout = config.pipeline
    return layout.num_stages * layout.data * (layout.tensor if layout.mesh is None else prod(layout.mesh.values()))


def _chunks(arguments: argparse.Namespace, config: TrainConfig | None) -> tuple[int, ...] | None:
    """Of each stage: one where encoder and decoder have meshes of their own, and so share no stage."""
    asked = parse_counts(arguments.chunks_per_stage, "--chunks-per-stage")
    if config is None or config.pipeline.encoder_mesh is None:
        return asked
    if asked not in (None, (1,)):
        raise ValueError(
            "--chunks-per-stage above 1 makes encoder and decoder share stages: leave it or encoder_mesh out"
        )
    return (1,)


def _batch_size(arguments: argparse.Namespace, config: TrainConfig | None) -> int | None:
    if arguments.batch_size is not None:
        return int(arguments.batch_size)
    return None if config is None else config.data_set.batch_size
