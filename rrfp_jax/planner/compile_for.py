"""Compiles for an accelerator that need not be here: all programs of a run, or a few layers for the costs of a plan.

Nothing is allocated or run, so that models of any size will do. The programs of a run are those that it would compile
on that accelerator: one replica of every stage stands for all of them, and chunks that are alike share their programs.
No data is needed: where it is missing, microbatches with images are taken to have one row of text and one row of
patches for every sample. The layers of a plan are those of :func:`rrfp_jax.planner.measuring.small_cut`: their bytes
are exact.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.commands.training.assembly import chunks_of, make_pipeline
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import evaluation_configs
from rrfp_jax.commands.training.model_parts import pixel_scale
from rrfp_jax.commands.training.planned import check_cut, order_run
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.core import FUSED, SPLIT, STRICT, Ordering
from rrfp_jax.costs import CostBook
from rrfp_jax.costs.devices import Device, device_like, device_of
from rrfp_jax.costs.fitting import ChunkParts, fit_bytes
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.data import TRAIN, Part
from rrfp_jax.data.packing import PatchFormat, Shape
from rrfp_jax.data.packing import leaf_specs as leaves_of_images
from rrfp_jax.layout import Layout, describe_axes, with_tensor
from rrfp_jax.models.float8 import float8_notes
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planner.analytic_costs import analytic_book, largest_rows, microbatch_specs
from rrfp_jax.planner.configured import configured_memory
from rrfp_jax.planner.measuring import chunk_parts, plain_sizes, small_cut, type_of_kind
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.program_text import ProgramText, memory_of, optimal_s
from rrfp_jax.programs.target import Target, devices_for
from rrfp_jax.readable import format_bytes
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.jax_environment import use_xla_flags
from rrfp_jax.runtime.model import HostedModel
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.prepare import CompiledOnly
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Placement
from rrfp_jax.training.evaluation import batches_per_step
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer

_log = logging.getLogger(__name__)


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program."""

    chunk: int
    """The first chunk that runs it."""
    name: str
    seconds: float
    """The time that it took to trace, lower and compile."""
    temporaries: int
    """Bytes of temporaries."""
    text: ProgramText
    bound_s: float | None
    """The least time that the device takes, collectives apart; None where nothing tells."""


@dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """A run whose programs are compiled for a device that is not here."""

    config: TrainConfig
    device: Device
    pipeline: Pipeline
    compiled: CompiledOnly
    buckets: list[dict[str, Any]]
    """The shapes that microbatches may have."""
    notes: tuple[str, ...]
    """Sentences on assumptions."""

    def programs(self) -> list[ProgramReport]:
        """Every program once, by chunk."""
        found: dict[int, ProgramReport] = {}
        for number, chunk in sorted(self.compiled.programs.chunks.items()):
            for name, program in chunk.compiled.items():
                if id(program) not in found:
                    found[id(program)] = self._report(number, name, program)
        return list(found.values())

    def foreseen(self) -> tuple[StageForecast, ...]:
        """Returns the memory of every stage as ``rrfp plan --as-configured`` works it out, without any program."""
        return configured_memory(self.config, self.device, largest_rows(self.buckets))

    def check_fits(self) -> None:
        """Raises ValueError, with the remedy, where a stage does not fit the device, in evaluations too."""
        self.compiled.check_fits(is_strict=self.pipeline.ordering.consume == STRICT)

    def _report(self, chunk: int, name: str, program: Compiled) -> ProgramReport:
        memory, text = memory_of(program), ProgramText(program.as_text() or "")
        peaks = {"flops": self.device.flops, "bytes_per_s": self.device.memory_gb_per_s * 1e9}
        return ProgramReport(
            chunk=chunk,
            name=name,
            seconds=self.compiled.programs.seconds.get(id(program), 0.0),
            temporaries=0 if memory is None else memory.temporaries,
            text=text,
            bound_s=optimal_s(program) if self.device.card is None else text.bound_s(**peaks),
        )


def compile_run(config: TrainConfig, device: str, console: TrainingConsole) -> CompiledRun:
    """Compiles the programs of a configuration for a device by name. Raises ValueError where these do not fit."""
    record = device_of(device)
    # No accelerator of this host is looked for, and a TPU's compiler asks no service.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    use_xla_flags(config.run.xla_flags, os.environ)
    use_cpu(1)
    layout = config.pipeline
    ordered = order_run(config)
    own = () if isinstance(layout.replicas, int) else layout.replicas
    grid = Layout(num_stages=layout.num_stages, data=layout.most_replicas, replicas=own, mesh=layout.meshes)
    process = Process.compile_only(grid, device)
    check_cut(config, ordered)
    told = float8_notes(config.model, Target.like(record))
    pipeline = make_pipeline(config, chunks_of(config, ordered), process, ordered)
    buckets, notes = _buckets(config)
    evaluation, num_microbatches = None, config.data.num_microbatches
    if config.evaluation is not None:
        evaluation = EvaluationShapes(
            buckets=[shape for each in evaluation_configs(config).values() for shape in _buckets(*each)[0]],
            batches=batches_per_step(
                config.evaluation.batches,
                num_chunks=pipeline.placement.num_chunks,
                num_microbatches=num_microbatches // layout.most_replicas,
            ),
        )
    with console.compiling() as progress:
        compiled = pipeline.compile_only(buckets, num_microbatches, evaluation=evaluation, progress=progress)
    return CompiledRun(
        config=config, device=record, pipeline=pipeline, compiled=compiled, buckets=buckets, notes=(*told, *notes)
    )


def show_compiled(run: CompiledRun, console: TrainingConsole) -> None:
    """Prints the stages as ``rrfp train`` does, and a table of the programs."""
    for note in run.notes:
        console.say(note)
    console.show_stages(run.pipeline, run.compiled.order, run.compiled.forecast)
    table = make_table(
        f"programs for {run.device.title}",
        *("chunk", "program", "compiled in", "temporaries", "least time", "attention", "collectives", "copies"),
    )
    for each in run.programs():
        text = each.text
        attention = (f"{name.removeprefix('__').removeprefix('cudnn$')} x {n}" for name, n in text.attention.items())
        moved = (f"{kind} x {sent.times} {format_bytes(sent.num_bytes)}" for kind, sent in text.collectives.items())
        # Copies are told if they are more than a hundredth of the bytes that a program touches.
        copies = format_bytes(text.copied_bytes) if text.copied_bytes > text.touched_bytes / 100 else ""
        table.add_row(
            str(each.chunk),
            each.name,
            f"{each.seconds:.1f} s",
            format_bytes(each.temporaries),
            "" if each.bound_s is None else f"{each.bound_s * 1e3:.2f} ms",
            ", ".join(attention),
            ", ".join(moved),
            copies,
        )
    make_console().print(table)


def _buckets(config: TrainConfig, part: Part = TRAIN) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the shapes of microbatches, and a sentence where these were assumed."""
    data: Any = config.data
    if config.row_length is not None or config.vision is None or Path(getattr(data, "path", "")).exists():
        return microbatch_specs(config, data.microbatch_size, part), ()
    rows, length = data.microbatch_size, data.image_length or config.vision.num_patches or data.max_patches
    shape = Shape(rows=rows, length=data.length, image_rows=rows, image_length=length)
    is_packed = data.image_size is None  # images of one size fill a row each
    dtype = np.float32 if pixel_scale(config) is None else np.uint8
    has_grid = config.model.layer_variant.rope_sections is not None
    leaves = leaves_of_images(shape, PatchFormat(config.vision.patch_dim, data.merge, is_packed, dtype, has_grid))
    return [leaves], (
        f"the data is not here: microbatches are taken to have {rows} rows of {data.length} tokens and {rows} rows of "
        f"{length} patches",
    )


# -- the costs of layers -----------------------------------------------------------------------------------------------


def compiled_book(
    config: TrainConfig,
    settings: Iterable[StageSetting],
    device: Device,
    *,
    num_devices: int | None = None,
    progress: CompileProgress = lambda done, total: None,
) -> CostBook:
    """Returns the costs of a run's model for each of these ways to run it: bytes of programs that are compiled, and
    times that are read off the device's roofline.

    Where this environment has no compiler for the device, programs are compiled for the devices that JAX finds here.

    Args:
        config: the run.
        settings: the ways to run its stages.
        device: on whose roofline times are read.
        num_devices: of the run, for the links; None: as many as the configuration has.
        progress: told how many programs of a way are compiled, and of how many.

    Raises ValueError, with the remedy, where there are fewer devices than share a layer, or where model and data do not
    fit.
    """
    wanted, target = list(dict.fromkeys(settings)), None
    if device_like(jax.local_devices()[0].device_kind) != device:
        with suppress(ValueError):  # no compiler for it is installed
            devices_for(device.name, 1)
            target = device.name
    # Too few devices are refused before anything is worked out or compiled.
    processes = {tensor: _process(config, tensor, target) for tensor in dict.fromkeys(s.tensor for s in wanted)}
    book = analytic_book(
        config, device, num_devices=num_devices,
        microbatch_sizes=[s.microbatch_size for s in wanted],
        tensors=[s.tensor for s in wanted],
        remats=[s.remat for s in wanted],
    )  # fmt: skip
    entries = []
    for setting in wanted:
        parts = compile_chunks(config, setting, processes[setting.tensor], progress=progress)
        (entry,) = (each for each in book.entries if each.setting == setting)
        # Nothing is compiled of halves, so that layers stay whole.
        types = {name: each for name, each in entry.types.items() if name in book.layers}
        tells_memory = any(each.temporaries for each in parts)
        for kind, held in fit_bytes(parts, recomputes=setting.remat != "none").items():
            name = type_of_kind(kind, types)
            # Temporaries stay as they were worked out where the backend tells none.
            known = {field: num for field, num in held.items() if tells_memory or "temporaries" not in field}
            # The compiled stash has the output that the layer behind makes again already.
            types[name] = replace(types[name], remade_bytes=0, **known)
        entries.append(replace(entry, types=types))
    source = f"compiled for {target or jax.default_backend()}, {book.source}"
    return replace(book, entries=tuple(entries), source=source)


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
        share = config.num_state_shares
        sizes = {c: replace(each, optimizer_bytes=-(-each.optimizer_bytes // share)) for c, each in sizes.items()}
        found += chunk_parts(cut, {chunk: plain_sizes(each) for chunk, each in sizes.items()})
    if not tells_memory:
        _log.warning("the backend does not say what memory programs need: temporaries are estimated from sizes")
        found = [replace(each, temporaries={}) for each in found]
    return found


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
