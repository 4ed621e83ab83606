"""Compiles every program of a run for an accelerator that is not here, and tells the memory and time of each.

The programs are those that the run would compile on that accelerator. One replica of every stage stands for all of
them, and chunks that are alike share their programs. Nothing is allocated or run, and no data is needed: where it is
missing, microbatches with images are taken to have one row of text and one row of patches for every sample.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.stages import Compiled

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.process import use_cpu
from rrfp_jax.commands.training.assembly import chunks_of, make_pipeline
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import evaluation_configs
from rrfp_jax.commands.training.model_parts import pixel_scale
from rrfp_jax.commands.training.planned import check_cut, order_run
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.core import STRICT
from rrfp_jax.costs.devices import Device, device_of
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.data import TRAIN, Part
from rrfp_jax.data.packing import PatchFormat, Shape
from rrfp_jax.data.packing import leaf_specs as leaves_of_images
from rrfp_jax.layout import Layout
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planner.as_configured import configured_memory
from rrfp_jax.planner.microbatches import largest_rows, microbatch_specs
from rrfp_jax.programs.program_text import ProgramText, memory_of, optimal_s
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.runtime.jax_environment import use_xla_flags
from rrfp_jax.runtime.prepare import CompiledOnly
from rrfp_jax.runtime.process import Process
from rrfp_jax.training.evaluation import batches_per_step


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
    _start_without_devices(config)
    layout = config.pipeline
    ordered = order_run(config)
    grid = Layout(num_stages=layout.num_stages, data=layout.replicas, mesh=layout.meshes)
    process = Process.compile_only(grid, device)
    check_cut(config, ordered)
    pipeline = make_pipeline(config, chunks_of(config, ordered), process, ordered)
    buckets, notes = _buckets(config)
    evaluation, num_microbatches = None, config.data.num_microbatches
    if config.evaluation is not None:
        evaluation = EvaluationShapes(
            buckets=[shape for each in evaluation_configs(config).values() for shape in _buckets(*each)[0]],
            batches=batches_per_step(
                config.evaluation.batches,
                num_chunks=pipeline.placement.num_chunks,
                num_microbatches=num_microbatches // layout.replicas,
            ),
        )
    with console.compiling() as progress:
        compiled = pipeline.compile_only(buckets, num_microbatches, evaluation=evaluation, progress=progress)
    return CompiledRun(config=config, device=record, pipeline=pipeline, compiled=compiled, buckets=buckets, notes=notes)


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
        table.add_row(
            str(each.chunk),
            each.name,
            f"{each.seconds:.1f} s",
            format_bytes(each.temporaries),
            "" if each.bound_s is None else f"{each.bound_s * 1e3:.2f} ms",
            ", ".join(f"{_short(name)} x {times}" for name, times in each.text.attention.items()),
            ", ".join(
                f"{kind} x {moved.times} {format_bytes(moved.num_bytes)}"
                for kind, moved in each.text.collectives.items()
            ),
            _copies(each.text),
        )
    make_console().print(table)


def _copies(text: ProgramText) -> str:
    """Returns the bytes of copies, if they are more than a hundredth of the bytes that a program touches."""
    return format_bytes(text.copied_bytes) if text.copied_bytes > text.touched_bytes / 100 else ""


def _short(target: str) -> str:
    return target.removeprefix("__").removeprefix("cudnn$")


def _start_without_devices(config: TrainConfig) -> None:
    """Starts JAX on one CPU device: no accelerator of this host is looked for, and a TPU's compiler asks no service."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    use_xla_flags(config.run.xla_flags, os.environ)
    use_cpu(1)


def _buckets(config: TrainConfig, part: Part = TRAIN) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the shapes of microbatches, and a sentence where these were assumed."""
    data: Any = config.data
    if config.row_length is not None or config.vision is None or Path(getattr(data, "path", "")).exists():
        return microbatch_specs(config, data.microbatch_size, part), ()
    rows, length = data.microbatch_size, data.image_length or config.vision.num_patches or data.max_patches
    shape = Shape(rows=rows, length=data.length, image_rows=rows, image_length=length)
    is_packed = data.image_size is None  # images of one size fill a row each
    dtype = np.float32 if pixel_scale(config) is None else np.uint8
    leaves = leaves_of_images(shape, PatchFormat(config.vision.patch_dim, data.merge, is_packed, dtype))
    return [leaves], (
        f"the data is not here: microbatches are taken to have {rows} rows of {data.length} tokens and {rows} rows of "
        f"{length} patches",
    )
