"""From the options of ``rrfp plan`` to costs and a search space: all is read and checked before the search begins.

Costs come from a file, are worked out for a device, or come from programs that are compiled here. The small languages
of options are lists, ranges and noise.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path

from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.costs import CostBook, MachineCosts, Noise
from rrfp_jax.costs.devices import device_of
from rrfp_jax.costs.layer_costs import every_setting
from rrfp_jax.costs.layer_sizes import REMAT_NAMES, REMATS
from rrfp_jax.layout import describe_axes, other_axes, with_tensor
from rrfp_jax.planner.configured import check_as_configured
from rrfp_jax.planner.cost_file import machine_in, read_costs, read_machine
from rrfp_jax.planner.search_space import CONSUMPTIONS, SearchSpace
from rrfp_jax.planner.sites import PLANNED_HINTS
from rrfp_jax.planner.writing import check_writable
from rrfp_jax.readable import parse_bytes
from rrfp_jax.schedules import schedule_entry, schedule_names

_SHAPES = {name: schedule_entry(name).shape for name in schedule_names()}
_NO_CHAIN = {name for name, s in _SHAPES.items() if s.has_copies or s.is_sliced or s.is_sharded}
ORDER_NAMES = (*(name for name in _SHAPES if name not in _NO_CHAIN), *PLANNED_HINTS)
"""Values of ``--schedules``: no schedules of copies of the model, of slices or shards, which no cut here describes."""
_MOST = 4096
"""Numbers that a range may name."""
UNEQUAL = "unequal"
"""Value of ``--replicas`` for stages that may have different numbers of them."""
NOISE_FORMS = "none, lognormal:SIGMA, tail:SHARE,FACTOR"
_USUAL_SIZES = (1, 2, 4, 8)
"""Samples of a microbatch, and devices that share a layer, where the user does not say."""


def parse_counts(text: str | None, flag: str) -> tuple[int, ...] | None:
    """Reads ``8,16,32`` or ``8..64``, both ends included, or several of them; None: not given.

    Raises ValueError for any other text.
    """
    if text is None:
        return None
    try:
        ranges = [[int(end) for end in part.split("..")] for part in text.split(",")]
    except ValueError:
        ranges = [[]]
    if any(not 1 <= len(ends) <= 2 or ends[0] > ends[-1] or ends[0] < 1 for ends in ranges):
        raise ValueError(
            f"{flag} {text!r} is no list of numbers of at least 1: write 8,16,32, or 8..64 for all between"
        )
    if sum(ends[-1] - ends[0] for ends in ranges) >= _MOST:
        raise ValueError(f"{flag} {text} names more than {_MOST:,} numbers: give fewer")
    return tuple(dict.fromkeys(number for ends in ranges for number in range(ends[0], ends[-1] + 1)))


def parse_words(text: str | None, flag: str, known: Sequence[str]) -> tuple[str, ...] | None:
    """Reads ``none,dots``; None: not given. Raises ValueError for words that are not among ``known``."""
    if text is None:
        return None
    words = tuple(dict.fromkeys(text.split(",")))
    wrong = [word for word in words if word not in known]
    if wrong:
        raise ValueError(f"{flag} names {wrong[0]!r}: choose among {', '.join(known)}")
    return words


def parse_noise(text: str) -> Noise:
    """Reads ``none``, ``lognormal:0.2``, ``tail:0.01,5`` or the last two joined by ``+``; raises ValueError on
    others."""
    sigma, tail = 0.0, (0.0, 1.0)
    for part in () if text == "none" else text.split("+"):
        name, _, argument = part.partition(":")
        try:
            numbers = [float(number) for number in argument.split(",")]
        except ValueError:
            numbers = []
        if name == "lognormal" and len(numbers) == 1:
            sigma = numbers[0]
        elif name == "tail" and len(numbers) == 2:
            tail = numbers[0], numbers[1]
        else:
            raise ValueError(f"jitter {part!r} is unknown: write one of {NOISE_FORMS}, or the last two joined by +")
    noise = Noise.alike(sigma)
    return Noise(sigma=noise.sigma, tail=tail[0], tail_factor=tail[1])


# -- the request -------------------------------------------------------------------------------------------------------


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
    if arguments.compile and arguments.device is None:
        raise ValueError(
            "--compile tells bytes, and --device the times beside them: give --device NAME in place of --costs, or "
            "measure every way to run the stages (rrfp profile)"
        )
    if config is None and arguments.costs is None:
        raise ValueError("--device needs a model: give --config FILE.yaml too")
    if arguments.write is not None:
        if config is None:
            raise ValueError("--write completes a configuration: give --config FILE.yaml too")
        check_writable(config, Path(arguments.write))
    machine = _machine(arguments)
    num_devices, batch_size = _num_devices(arguments.devices, machine, config), arguments.batch_size
    if batch_size is None and config is not None:
        batch_size = config.data.batch_size
    chunks = _chunks(arguments, config)  # before costs are worked out, which takes longer
    book = _costs(arguments, config, num_devices=num_devices, batch_size=batch_size)
    book = replace(book, machine=machine)
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
        data=None if arguments.replicas == UNEQUAL else parse_counts(arguments.replicas, "--replicas"),
        unequal=arguments.replicas == UNEQUAL,
        tensor=parse_counts(arguments.tensor, "--tensor"),
        chunks=chunks,
        schedules=parse_words(arguments.schedules, "--schedules", ORDER_NAMES),
        consumptions=parse_words(arguments.consume, "--consume", CONSUMPTIONS) or CONSUMPTIONS,
        remats=parse_words(arguments.remat, "--remat", REMAT_NAMES),
        top=arguments.top,
    )
    return PlanRequest(book=book, space=space, config=config)


def _machine(arguments: argparse.Namespace) -> MachineCosts | None:
    """Returns the machine of its own file, else that of the costs; None: devices are alike."""
    if arguments.machine is not None:
        return read_machine(arguments.machine)
    return None if arguments.costs is None else machine_in(arguments.costs)


def _num_devices(asked: int | None, machine: MachineCosts | None, config: TrainConfig | None) -> int:
    if asked is not None:
        return asked
    if machine is not None:
        return len(machine.devices)
    if config is None:
        raise ValueError("the number of devices is not given: give --devices, or --config FILE.yaml, which has one")
    return config.pipeline.num_devices


def _chunks(arguments: argparse.Namespace, config: TrainConfig | None) -> tuple[int, ...] | None:
    chunks = parse_counts(arguments.chunks_per_stage, "--chunks-per-stage")
    if config is None or config.pipeline.encoder_mesh is None:
        return chunks
    # Encoder and decoder have meshes of their own, and so share no stage.
    if config.vision is None:
        raise ValueError("encoder_mesh is for models with an encoder: give a section vision, or leave it out")
    if arguments.costs is not None or arguments.compile:
        flag = "--compile" if arguments.compile else "--costs"
        raise ValueError(
            f"{flag} knows one mesh for all stages: work costs out alone (--device), or leave encoder_mesh out"
        )
    if chunks not in (None, (1,)):
        raise ValueError(
            "--chunks-per-stage above 1 makes encoder and decoder share stages: leave it or encoder_mesh out"
        )
    return (1,)


# -- costs -------------------------------------------------------------------------------------------------------------


def _costs(
    arguments: argparse.Namespace, config: TrainConfig | None, *, num_devices: int, batch_size: int | None
) -> CostBook:
    if arguments.costs is None:
        assert config is not None
        if arguments.compile:
            return _compiled(arguments, config, num_devices)
        return _analytic(arguments, config, num_devices, batch_size)
    book = read_costs(arguments.costs)
    if config is not None:
        wanted = config.model.num_layers + 2 + (0 if config.vision is None else config.vision.num_layers_run + 2)
        if len(book.layers) != wanted:
            raise ValueError(
                f"costs {arguments.costs} are of a model with {len(book.layers)} layers, ends included, and this one "
                f"has {wanted}: measure this model (rrfp profile)"
            )
    return book


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
        # Where the encoder has a mesh of its own, the decoder's stages have as many devices.
        own = config.pipeline.encoder_mesh
        tensors = tuple(
            tensor
            for tensor in _USUAL_SIZES
            if both % tensor == 0
            and (own is None or prod(with_tensor(config.pipeline.mesh, tensor).values()) == prod(own.values()))
        )
        tensors = tensors or _configured(config)[1]
    if remats is None:
        remats = REMATS if config.pipeline.remat == "none" else config.pipeline.remats
    return analytic_book(
        config,
        device_of(arguments.device),
        microbatch_sizes=sizes,
        tensors=tensors,
        remats=remats,
        num_devices=num_devices,
    )


def _compiled(arguments: argparse.Namespace, config: TrainConfig, num_devices: int) -> CostBook:
    """Compiles a few layers for each way to run the model that was asked for."""
    device = device_of(arguments.device)

    from rrfp_jax.commands.common.console import make_console
    from rrfp_jax.commands.training.training_console import CompileReport
    from rrfp_jax.planner.compile_for import compiled_book
    from rrfp_jax.runtime.compile_cache import use_compile_cache

    (sizes, tensors, remats), own = _ways(arguments), _configured(config)
    settings = every_setting(sizes or own[0], tensors or own[1], remats or own[2])
    use_compile_cache()
    report = CompileReport(make_console(is_quiet=arguments.json))
    try:
        return compiled_book(config, settings, device, num_devices=num_devices, progress=report)
    finally:
        report.stop()


def _configured(config: TrainConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    layout = config.pipeline
    return (config.data.microbatch_size,), (layout.tensor,), layout.remats


def _ways(
    arguments: argparse.Namespace,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[str, ...] | None]:
    return (
        parse_counts(arguments.microbatch_size, "--microbatch-size"),
        parse_counts(arguments.tensor, "--tensor"),
        parse_words(arguments.remat, "--remat", REMAT_NAMES),
    )
