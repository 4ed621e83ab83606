"""The work and the bytes of a way to run the stages, from its compiled programs, checked against the layers' own sizes.

The chunk programs of a few layers are compiled; nothing is allocated or run.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.core import FUSED, SPLIT, Ordering
from rrfp_jax.costs import LayerCosts
from rrfp_jax.costs.byte_fit import ChunkParts, fit_bytes
from rrfp_jax.costs.fitting import ChunkWork, TaskWork, fit_work
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.costs.roofline import Roofline
from rrfp_jax.planner.measuring import chunk_parts, plain_sizes
from rrfp_jax.planner.microbatches import microbatch_specs
from rrfp_jax.planner.model_layers import LayerType, ModelLayers, model_layers
from rrfp_jax.planner.small_cut import SmallCut, small_cut, type_of_kind
from rrfp_jax.programs.analysis import ProgramCost, cost_of, memory_of
from rrfp_jax.programs.batches import Buckets
from rrfp_jax.programs.compiled import ChunkSizes, CompiledChunk
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.programs.target import Target
from rrfp_jax.runtime.hosted import HostedModel
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Placement
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer

_log = logging.getLogger(__name__)
_APART = 0.1
"""How far XLA's operations may be from the layers' own, as a share."""
_KIND_OF = {"forward": "F", "input_gradient": "I", "weight_gradient": "W", "backward": "B"}
_ONCE = ("reduce", "update", "prepare")
"""Programs that run once per step."""


@dataclass(frozen=True, kw_only=True)
class CompiledChunks:
    """The work and the bytes of one way to run the stages, with split and with whole backwards."""

    parts: tuple[ChunkParts, ...]
    work: tuple[ChunkWork, ...]
    tells_work: bool
    """Whether the backend tells the work of programs."""
    tells_memory: bool
    """Whether it tells the memory that they need."""


def compile_chunks(
    config: TrainConfig, setting: StageSetting, process: Process, *, progress: CompileProgress
) -> CompiledChunks:
    """Compiles on the devices of the process's first stage. Raises ValueError where model, data and setting do not
    fit."""
    cut = small_cut(config, 1)
    rules = UpdateRules(clip_norm=config.pipeline.clip_norm, skip_nonfinite=config.pipeline.skip_nonfinite)
    placement = Placement((0,) * len(cut.chunks))
    model = HostedModel(
        cut.chunks,
        placement,
        process,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        updates=rules,
        seed=config.run.seed,
        remat=(setting.remat,) * len(cut.chunks),
    )
    buckets = Buckets(cut.chunks, microbatch_specs(config, setting.microbatch_size))
    found: list[tuple[ChunkParts, ChunkWork]] = []
    compiled: list[CompiledChunk] = []
    costs: dict[int, ProgramCost | None] = {}  # by id, since telling them may take to read a program's whole text
    for backward in (SPLIT, FUSED):
        graph = Ordering(hint="bf", backward=backward).fitted(placement, model_graph(cut.chunks, cut.edges, None))
        chunks = model.compile(graph, buckets, progress).chunks
        compiled += chunks.values()
        costs |= {id(each): cost_of(each) for chunk in chunks.values() for each in chunk.compiled.values()}
        found += zip(*_seen(config, cut, chunks, costs), strict=True)
    programs = [program for chunk in compiled for program in chunk.compiled.values()]
    return CompiledChunks(
        parts=tuple(parts for parts, _ in found),
        work=tuple(work for _, work in found),
        tells_work=None not in costs.values(),
        tells_memory=all(memory_of(program) is not None for program in programs),
    )


def _seen(
    config: TrainConfig,
    cut: SmallCut,
    chunks: Mapping[int, CompiledChunk],
    costs: Mapping[int, ProgramCost | None],
) -> tuple[list[ChunkParts], list[ChunkWork]]:
    rows = {chunk: plain_sizes(_shared(config, each.sizes)) for chunk, each in chunks.items()}
    work = [
        ChunkWork(layer=cut.layers[chunk][0], count=len(cut.layers[chunk]), work=_work(each, costs))
        for chunk, each in chunks.items()
    ]
    return chunk_parts(cut, rows), work


def _shared(config: TrainConfig, sizes: ChunkSizes) -> ChunkSizes:
    """Returns the sizes with the optimizer's state shared out to replicas where the run does so."""
    if not config.pipeline.shard_optimizer:
        return sizes
    return replace(sizes, optimizer_bytes=-(-sizes.optimizer_bytes // config.pipeline.data))


def _work(chunk: CompiledChunk, costs: Mapping[int, ProgramCost | None]) -> dict[str, TaskWork]:
    """Returns the work by kind of task; of several buckets the most."""
    found: dict[str, TaskWork] = {}
    once = TaskWork()
    for name, program in chunk.compiled.items():
        cost, first = costs[id(program)], name.partition(" ")[0]
        if cost is None:
            continue
        if first in _ONCE:
            once = TaskWork(once.flops + cost.flops, once.moved_bytes + cost.bytes_accessed)
        elif kind := _KIND_OF.get(first):
            known = found.get(kind, TaskWork())
            found[kind] = TaskWork(max(known.flops, cost.flops), max(known.moved_bytes, cost.bytes_accessed))
    return found | {"U": once}


@dataclass(frozen=True, kw_only=True)
class CompiledWay:
    """One way to run the stages."""

    setting: StageSetting
    chunks: CompiledChunks
    model: ModelLayers
    works: Mapping[str, Mapping[str, TaskWork]]
    """By kind of layer and of task: as XLA says, or more where it misses something; from sizes where it is silent."""

    def costs(self, roofline: Roofline) -> dict[str, LayerCosts]:
        """Returns the costs by type, on this roofline."""
        held = fit_bytes(self.chunks.parts)
        return {type_of_kind(kind, self.model.types): self._layer(kind, roofline, held[kind]) for kind in self.works}

    def _layer(self, kind: str, roofline: Roofline, held: Mapping[str, int]) -> LayerCosts:
        layer, tensor = self.model.types[type_of_kind(kind, self.model.types)], self.setting.tensor
        ms = {task: roofline.task_ms(work.flops * tensor, work.moved_bytes) for task, work in self.works[kind].items()}
        sums = [roofline.sums_ms(number, layer.sizes.sum_bytes) for number in layer.sizes.sums]
        sent = roofline.sent_ms(layer.sizes)
        estimates: dict[str, Any] = {
            "temporaries_bytes": layer.sizes.temporaries_bytes,
            "more_temporaries_bytes": layer.sizes.more_temporaries_bytes,
        }
        return LayerCosts(
            forward_ms=ms["F"] + sums[0] + sent[0],
            input_gradient_ms=ms["I"] + (sums[1] + sent[1]) * layer.has_backward,
            weight_gradient_ms=ms["W"] + sent[2] * layer.trains,
            backward_ms=ms["B"] + (sums[1] + sent[1]) * layer.has_backward + sent[2] * layer.trains,
            update_ms=ms["U"],
            flops=sum(layer.sizes.flops.tasks(trains=layer.trains, has_backward=layer.has_backward)),
            **{**held, **({} if self.chunks.tells_memory else estimates)},
        )


def compiled_way(
    config: TrainConfig, setting: StageSetting, process: Process, *, progress: CompileProgress
) -> CompiledWay:
    """Compiles a few layers on the devices of the process. Raises ValueError where model, data and setting do not
    fit."""
    target = Target.of(process.own_device(process.units[0]))
    model = model_layers(config, **setting._asdict(), target=target)
    chunks = compile_chunks(config, setting, process, progress=progress)
    if not chunks.tells_work:
        _log.warning("the backend does not say what programs do: operations and bytes come from the layers' sizes")
    if not chunks.tells_memory:
        _log.warning("the backend does not say what memory programs need: temporaries are estimated from sizes")
    works = {}
    for kind, seen in fit_work(chunks.work).items():
        own = _own_work(model.types[type_of_kind(kind, model.types)], setting.tensor)
        works[kind] = {
            task: _checked(kind, task, seen[task], own[task], setting) if chunks.tells_work else own[task]
            for task in own
        }
    return CompiledWay(setting=setting, chunks=chunks, model=model, works=works)


def _own_work(layer: LayerType, tensor: int) -> dict[str, TaskWork]:
    """Returns the work by kind, on one device, from the layer's sizes."""
    flops = layer.sizes.tasks(trains=layer.trains, has_backward=layer.has_backward)
    runs = (True, layer.has_backward, layer.trains)
    moved = [each * does for each, does in zip(layer.sizes.moved_bytes, runs, strict=True)]
    own = {kind: TaskWork(f / tensor / layer.sizes.sharing, b) for kind, f, b in zip("FIW", flops, moved, strict=True)}
    own["B"] = TaskWork(own["I"].flops + own["W"].flops, own["I"].moved_bytes + own["W"].moved_bytes)
    return own | {"U": TaskWork(0.0, 2.0 * layer.fixed_bytes * layer.trains)}


def _checked(kind: str, task: str, seen: TaskWork, own: TaskWork, setting: StageSetting) -> TaskWork:
    if task in _TOLD and own.flops and abs(seen.flops / own.flops - 1) > _APART:
        _log.warning(
            "%s of a layer of type %s (%s): XLA counts %.3g operations, its sizes make %.3g; the larger counts",
            _TOLD[task],
            kind,
            setting.words,
            seen.flops,
            own.flops,
        )
    return TaskWork(max(seen.flops, own.flops), seen.moved_bytes)


_TOLD = {"F": "the forward", "B": "the backward"}
