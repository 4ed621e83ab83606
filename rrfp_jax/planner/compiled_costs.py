"""Costs of a run's model from its compiled programs: the backend's operations and bytes, on a device's roofline.

Programs of a few layers are compiled, those of :mod:`rrfp_jax.planner.small_cut`; nothing is allocated or
run, so that a layer of any size will do. The bytes of chunks are exact. Times are as good as the device's record and
efficiencies; with ``measured``, costs of one way to run the stages, they are fitted to those of one layer, which is the
only way on a device without a record, such as a CPU.

XLA counts loops and kernels of libraries in part or not at all. Its operations are compared with those of the layers'
sizes; where they differ by more than a tenth that is told, and the larger number counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import jax

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs import CostBook, CostEntry
from rrfp_jax.costs.devices import Device, Efficiencies, device_like, fitted_device
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.costs.roofline import Roofline
from rrfp_jax.layout import Layout, describe_axes, other_axes, spans, with_tensor
from rrfp_jax.planner.analytic_costs import devices_of
from rrfp_jax.planner.compiled_work import CompiledWay, compiled_way
from rrfp_jax.planner.small_cut import LAYER, type_of_kind
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.target import devices_for
from rrfp_jax.runtime.process import Process


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """The machine that runs the programs."""

    title: str
    device: Device
    efficiencies: Efficiencies
    num_bytes: int | None


def compiled_book(
    config: TrainConfig,
    settings: Iterable[StageSetting],
    *,
    device: Device | None = None,
    efficiencies: Efficiencies | None = None,
    measured: CostBook | None = None,
    num_devices: int | None = None,
    progress: CompileProgress = lambda done, total: None,
) -> CostBook:
    """Returns the costs of a run's model for each of these ways to run it, compiled for ``device``.

    Where this environment has no compiler for it, and where none is given, they are compiled for the devices that JAX
    finds here.

    Args:
        device: on whose roofline times are read; None: that of the devices here, if there is a record of it.
        efficiencies: of it; None: the defaults, or fitted to ``measured``.
        measured: costs of one way to run the stages or more, of which the first gives the time of a layer. Its links
            and noise are taken over.
        num_devices: of the run, for the links; None: as many as the configuration has.
        progress: told how many programs of a way are compiled, and of how many.

    Raises ValueError, with the remedy, where nothing says how quick the devices are, where there are fewer devices than
    share a layer, or where model and data do not fit.
    """
    settings = list(dict.fromkeys(settings))
    here = jax.local_devices()[0].device_kind
    device = device or device_like(here)
    if device is None and measured is None:
        raise ValueError(
            f"nothing is known of how quick a device {here!r} is: give a device by name, or costs that rrfp profile "
            "has measured on it"
        )
    first = None if measured is None else _first(measured)
    every = list(dict.fromkeys([*settings, *([] if first is None else [first])]))
    target = None if device is None or measured is not None else _target(device)
    ways = {s: compiled_way(config, s, _process(config, s.tensor, target), progress=progress) for s in every}
    if measured is not None and first is not None:
        machine = _fitted(config, ways[first], measured, device)
    else:
        assert device is not None
        machine = _Machine(
            title=device.title,
            device=device,
            efficiencies=efficiencies or Efficiencies(),
            num_bytes=device.num_bytes,
        )
    entries = [
        CostEntry(types=ways[s].costs(_roofline(config, machine.device, machine.efficiencies, s.tensor)), **s._asdict())
        for s in settings
    ]
    model = ways[settings[0]].model
    book = CostBook(
        layers=model.layers,
        ends=model.ends,
        entries=tuple(entries),
        tokens_per_sample=model.tokens_per_sample,
        mesh=other_axes(config.pipeline.mesh),
        device=machine.title,
        device_bytes=machine.num_bytes,
    )
    return _beside(book, config, machine, measured, num_devices, target=target)


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


def _first(measured: CostBook) -> StageSetting:
    entry = measured.entries[0]
    return StageSetting(entry.microbatch_size, entry.tensor, entry.remat)


def _fitted(config: TrainConfig, way: CompiledWay, measured: CostBook, device: Device | None) -> _Machine:
    """Returns a machine on which a layer takes as long as it was measured to take.

    A device with a record gets efficiencies; another one gets the rate at which it computes a layer."""
    types = measured.entries[0].types
    if not any(each.partition(" ")[0] == LAYER for each in types):
        raise ValueError(f"the measured costs have no layer of type {LAYER!r}, to which times are fitted: measure one")
    layer_ms = types[type_of_kind(LAYER, types)].work_ms(split=True)
    work, tensor = way.works[LAYER], way.setting.tensor
    if device is None:
        tasks = [(work[kind].flops, work[kind].moved_bytes) for kind in "FIW"]
        device = fitted_device(measured.device or "measured", tasks, layer_ms)
        whole = Efficiencies(compute=1.0, memory=1.0)
        return _Machine(title=measured.device, device=device, efficiencies=whole, num_bytes=measured.device_bytes)
    roofline = _roofline(config, device, Efficiencies(), tensor)
    foreseen_ms = sum(roofline.task_ms(work[kind].flops * tensor, work[kind].moved_bytes) for kind in "FIW")
    return _Machine(
        title=device.title,
        device=device,
        efficiencies=Efficiencies().fitted(foreseen_ms, layer_ms),
        num_bytes=device.num_bytes,
    )


def _roofline(config: TrainConfig, device: Device, efficiencies: Efficiencies, tensor: int) -> Roofline:
    is_float32 = config.model.compute_dtype == "float32"
    along = spans(with_tensor(config.pipeline.mesh, tensor))
    return Roofline(device=device, efficiencies=efficiencies, tensor=tensor, spans=along, is_float32=is_float32)


def _beside(
    book: CostBook,
    config: TrainConfig,
    machine: _Machine,
    measured: CostBook | None,
    num_devices: int | None,
    *,
    target: str | None,
) -> CostBook:
    """Returns the book with links, launches, peaks and the source."""
    if measured is not None:
        return replace(
            book,
            links=measured.links,
            noise=measured.noise,
            task_ms=measured.task_ms,
            device_flops=measured.device_flops,
            source=f"compiled for {jax.default_backend()}, at the speed of a layer {measured.source}",
        )
    layout, device, found = config.pipeline, machine.device, machine.efficiencies
    return replace(
        book,
        links=device.links(num_devices or devices_of(layout), found),
        task_ms=found.launch_ms,
        device_flops=_roofline(config, device, found, 1).peak_flops,
        source=f"compiled for {target or jax.default_backend()}: {found.compute:.0%} of the peak's operations, "
        f"{found.memory:.0%} of the memory's bandwidth",
    )
