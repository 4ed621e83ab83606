"""Costs of a run's model whose bytes are those of compiled programs, and whose times are read off a device's roofline.

Programs of a few layers are compiled, those of :mod:`rrfp_jax.planner.small_cut`; nothing is allocated or run, so that
a layer of any size will do. The bytes of chunks are exact. Times are those of :mod:`rrfp_jax.planner.analytic_costs`,
as good as the device's record and efficiencies. With ``measured``, costs of one way to run the stages, they are fitted
to those of one layer, which is the only way on a device without a record, such as a CPU.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

import jax

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.core import FUSED, SPLIT, Ordering
from rrfp_jax.costs import CostBook, LayerCosts
from rrfp_jax.costs.devices import Device, Efficiencies, device_like, fitted_device
from rrfp_jax.costs.fitting import ChunkParts, fit_bytes
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.layout import Layout, describe_axes, with_tensor
from rrfp_jax.planner.analytic_costs import analytic_book
from rrfp_jax.planner.measuring import chunk_parts, plain_sizes
from rrfp_jax.planner.microbatches import microbatch_specs
from rrfp_jax.planner.model_layers import model_layers
from rrfp_jax.planner.small_cut import LAYER, small_cut, type_of_kind
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.program_text import memory_of
from rrfp_jax.programs.target import devices_for
from rrfp_jax.runtime.model import HostedModel
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Placement
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer

_log = logging.getLogger(__name__)
_TEMPORARIES = ("temporaries_bytes", "more_temporaries_bytes", "split_temporaries_bytes")


def compiled_book(
    config: TrainConfig,
    settings: Iterable[StageSetting],
    *,
    device: Device | None = None,
    measured: CostBook | None = None,
    num_devices: int | None = None,
    progress: CompileProgress = lambda done, total: None,
) -> CostBook:
    """Returns the costs of a run's model for each of these ways to run it, compiled for ``device``.

    Where this environment has no compiler for it, and where none is given, they are compiled for the devices that JAX
    finds here.

    Args:
        device: on whose roofline times are read; None: that of the devices here, if there is a record of it.
        measured: costs of one way to run the stages or more, of which the first gives the time of a layer. Its links
            and noise are taken over.
        num_devices: of the run, for the links; None: as many as the configuration has.
        progress: told how many programs of a way are compiled, and of how many.

    Raises ValueError, with the remedy, where nothing says how quick the devices are, where there are fewer devices than
    share a layer, or where model and data do not fit.
    """
    wanted = list(dict.fromkeys(settings))
    here = jax.local_devices()[0].device_kind
    device = device or device_like(here)
    if device is None and measured is None:
        raise ValueError(
            f"nothing is known of how quick a device {here!r} is: give a device by name, or costs that rrfp profile "
            "has measured on it"
        )
    target = None if device is None or measured is not None else _target(device)
    # Too few devices are refused before anything is worked out or compiled.
    processes = {tensor: _process(config, tensor, target) for tensor in dict.fromkeys(s.tensor for s in wanted)}
    efficiencies, is_known = Efficiencies(), device is not None
    if measured is not None:
        device, efficiencies = fitted_speed(config, measured, device)
    assert device is not None
    book = analytic_book(
        config, device, efficiencies=efficiencies, num_devices=num_devices,
        microbatch_sizes=[s.microbatch_size for s in wanted],
        tensors=[s.tensor for s in wanted],
        remats=[s.remat for s in wanted],
    )  # fmt: skip
    entries = []
    for setting in wanted:
        parts = compile_chunks(config, setting, processes[setting.tensor], progress=progress)
        (entry,) = (each for each in book.entries if each.setting == setting)
        entries.append(replace(entry, types=_with_bytes(entry.types, parts)))
    book = replace(book, entries=tuple(entries))
    if measured is None:
        return replace(book, source=f"compiled for {target or jax.default_backend()}, {book.source}")
    if not is_known:  # a fitted device has no memory and no name of its own
        book = replace(book, device=measured.device, device_bytes=measured.device_bytes)
    return replace(
        book,
        links=measured.links,
        noise=measured.noise,
        task_ms=measured.task_ms,
        device_flops=measured.device_flops,
        source=f"compiled for {jax.default_backend()}, at the speed of a layer {measured.source}",
    )


def fitted_speed(config: TrainConfig, measured: CostBook, device: Device | None = None) -> tuple[Device, Efficiencies]:
    """Returns a device on which a layer takes as long as it was measured to take, and the parts of its peaks.

    A device with a record gets efficiencies; another one (None) gets the rate at which it computes a layer. Raises
    ValueError where no layer was measured.
    """
    entry = measured.entries[0]
    if not any(name.partition(" ")[0] == LAYER for name in entry.types):
        raise ValueError(f"the measured costs have no layer of type {LAYER!r}, to which times are fitted: measure one")
    layer_ms = entry.types[type_of_kind(LAYER, entry.types)].work_ms(split=True)
    size, tensor, remat = entry.setting
    if device is None:
        types = model_layers(config, microbatch_size=size, tensor=tensor, remat=remat).types
        layer = types[type_of_kind(LAYER, types)]
        flops = layer.sizes.tasks(trains=layer.trains, has_backward=layer.has_backward)
        runs = (True, layer.has_backward, layer.trains)
        moved = [each * does for each, does in zip(layer.sizes.moved_bytes, runs, strict=True)]
        tasks = [(each / tensor / layer.sizes.sharing, num) for each, num in zip(flops, moved, strict=True)]
        whole = Efficiencies(compute=1.0, memory=1.0)
        return fitted_device(measured.device or "measured", tasks, layer_ms), whole
    book = analytic_book(config, device, microbatch_sizes=[size], tensors=[tensor], remats=[remat])
    foreseen = book.entries[0].types
    foreseen_ms = foreseen[type_of_kind(LAYER, foreseen)].work_ms(split=True)
    return device, Efficiencies().fitted(foreseen_ms, layer_ms)


def compile_chunks(
    config: TrainConfig, setting: StageSetting, process: Process, *, progress: CompileProgress
) -> list[ChunkParts]:
    """Returns the bytes of a few layers in chunks, compiled with split and with whole backwards.

    They are compiled on the devices of the process's first stage. Raises ValueError where model, data and setting do
    not fit.
    """
    cut = small_cut(config, 1)
    placement = Placement((0,) * len(cut.chunks))
    model = HostedModel(
        cut.chunks,
        placement,
        process,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        updates=UpdateRules(clip_norm=config.optimizer.clip_norm),
        seed=config.run.seed,
        remat=(setting.remat,) * len(cut.chunks),
    )
    buckets = Buckets(cut.chunks, microbatch_specs(config, setting.microbatch_size))
    found, tells_memory = list[ChunkParts](), True
    for backward in (SPLIT, FUSED):
        graph = Ordering(hint="bf", backward=backward).fitted(placement, model_graph(cut.chunks, cut.edges, None))
        chunks = model.compile(graph, buckets, progress).chunks
        programs = [program for chunk in chunks.values() for program in chunk.compiled.values()]
        tells_memory = tells_memory and all(memory_of(program) is not None for program in programs)
        sizes = {chunk: each.sizes for chunk, each in chunks.items()}
        if config.optimizer.shard:  # replicas share the optimizer's state out
            share = config.pipeline.replicas
            sizes = {c: replace(each, optimizer_bytes=-(-each.optimizer_bytes // share)) for c, each in sizes.items()}
        found += chunk_parts(cut, {chunk: plain_sizes(each) for chunk, each in sizes.items()})
    if not tells_memory:
        _log.warning("the backend does not say what memory programs need: temporaries are estimated from sizes")
        found = [replace(each, temporaries={}) for each in found]
    return found


def _with_bytes(types: Mapping[str, LayerCosts], parts: list[ChunkParts]) -> dict[str, LayerCosts]:
    """Returns the costs of each type with the bytes of its compiled chunks; their own where the backend tells none."""
    found, tells_memory = dict(types), any(each.temporaries for each in parts)
    for kind, held in fit_bytes(parts).items():
        name = type_of_kind(kind, types)
        own = {} if tells_memory else dict.fromkeys(_TEMPORARIES)
        of_programs = {field: num_bytes for field, num_bytes in held.items() if field not in own}
        # What a program remakes is part of its compiled stash already.
        found[name] = replace(types[name], remade_bytes=0, **of_programs)
    return found


def _target(device: Device) -> str | None:
    """Returns the name of an accelerator that is not here, if this environment can compile for it."""
    if device_like(jax.local_devices()[0].device_kind) == device:
        return None
    try:
        devices_for(device.name, 1)
    except ValueError:
        return None
    return device.name


def _process(config: TrainConfig, tensor: int, target: str | None) -> Process:
    mesh, devices = with_tensor(config.pipeline.mesh, tensor), jax.local_devices()
    if target is not None:
        return Process.compile_only(Layout(num_stages=1, mesh=mesh), target)
    number = prod(mesh.values())
    if len(devices) < number:
        words = describe_axes(tuple(mesh.items()))
        raise ValueError(f"{words} needs {number} devices, and JAX finds {len(devices)}: give smaller ones")
    process = Process(Layout(num_stages=1, mesh=mesh), num_devices=number)
    process.use_devices(devices[:number])
    return process
