"""Compiles the chunk programs of a few layers, and tells what they do and hold; nothing is allocated or run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rrfp_jax.arbitration import FUSED, SPLIT, Ordering
from rrfp_jax.commands.planning.measuring import parts_of, plain_sizes
from rrfp_jax.commands.planning.microbatches import leaf_specs
from rrfp_jax.commands.planning.setting import Setting
from rrfp_jax.commands.planning.small_cut import SmallCut, small_cut
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.planning.costs.byte_fit import ChunkParts
from rrfp_jax.planning.costs.cost_fit import ChunkWork, Work
from rrfp_jax.programs.analysis import ProgramCost, cost_of, memory_of
from rrfp_jax.programs.buckets import Buckets
from rrfp_jax.programs.compiled import ChunkSizes, CompiledChunk
from rrfp_jax.programs.compiling import CompileProgress
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.runtime.hosted import HostedModel
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Placement
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer

_KIND_OF = {"forward": "F", "input_gradient": "I", "weight_gradient": "W", "backward": "B"}
_ONCE = ("reduce", "update", "prepare")
"""Programs that run once per step."""


@dataclass(frozen=True, kw_only=True)
class CompiledChunks:
    """What the programs of one way to run the stages do and hold, with split and with whole backwards."""

    parts: tuple[ChunkParts, ...]
    work: tuple[ChunkWork, ...]
    tells_work: bool
    """Whether the backend says what programs do."""
    tells_memory: bool
    """Whether it says what memory they need."""


def compile_chunks(
    config: TrainConfig, setting: Setting, process: Process, *, progress: CompileProgress
) -> CompiledChunks:
    """On the devices of the process's first stage. Raises ValueError where model, data and setting do not fit."""
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
    buckets = Buckets(cut.chunks, leaf_specs(config, setting.microbatch_size))
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
    return parts_of(cut, rows), work


def _shared(config: TrainConfig, sizes: ChunkSizes) -> ChunkSizes:
    """With the optimizer's state shared out to replicas where the run does so."""
    if not config.pipeline.shard_optimizer:
        return sizes
    return replace(sizes, optimizer_bytes=-(-sizes.optimizer_bytes // config.pipeline.data))


def _work(chunk: CompiledChunk, costs: Mapping[int, ProgramCost | None]) -> dict[str, Work]:
    """By kind of task; of several buckets the most."""
    found: dict[str, Work] = {}
    once = Work()
    for name, program in chunk.compiled.items():
        cost, first = costs[id(program)], name.partition(" ")[0]
        if cost is None:
            continue
        if first in _ONCE:
            once = Work(once.flops + cost.flops, once.moved_bytes + cost.bytes_accessed)
        elif kind := _KIND_OF.get(first):
            known = found.get(kind, Work())
            found[kind] = Work(max(known.flops, cost.flops), max(known.moved_bytes, cost.bytes_accessed))
    return found | {"U": once}
