"""Do the processes that share a stage have the same programs?

They are compared twice. Before they are compiled (:func:`check_same_plans`): where a program spans several processes
with GPUs, these time its kernels together while they compile it, and wait for each other, under a key that is made of
the program. Of two that differ, each would wait for hours without a word. XLA could let each process time for itself
(``--xla_gpu_shard_autotuning=false``), but then they would choose different kernels: the same sum would differ in its
last bits from device to device, and collectives might be put in different orders.

Once they are compiled (:func:`check_same_programs`): do all run the same collectives in the same order?

Each tells a digest. Where two differ, the first difference is the error, with its ranks.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.programs.chunk import trained_specs
from rrfp_jax.programs.compiled import Variant
from rrfp_jax.programs.program_text import joint_work
from rrfp_jax.programs.reduction import update_function
from rrfp_jax.programs.shardings import all_passing, spread, unit_shardings
from rrfp_jax.programs.specs import accumulator_spec, pick, spec_of
from rrfp_jax.programs.state import layer_groups
from rrfp_jax.runtime.hosted import HostedModel, HostedPrograms, Plans
from rrfp_jax.runtime.process import Process

Work = Mapping[str, Mapping[str, str]]
"""By the name of a unit or stage, what its processes do together: texts by name."""


def check_same_plans(model: HostedModel, planned: Plans) -> None:
    """Raise ValueError, in every process, where some would compile other programs. All processes call it."""
    _check(model.process, lambda: dict(_planned_work(model, planned)), "plans")


def check_same_programs(model: HostedModel, programs: HostedPrograms) -> None:
    """Raise ValueError, in every process, where some would wait in different collectives. All processes call it."""
    _check(model.process, lambda: dict(_shared_work(model, programs)), "programs")


def _check(process: Process, work: Callable[[], Work], name: str) -> None:
    layout = process.layout
    if all(len(layout.ranks_of_stage(stage)) == 1 for stage in range(layout.num_stages)):
        return
    own = work()
    whole = {where: {"": _digest(json.dumps(texts, sort_keys=True))} for where, texts in own.items()}
    if _difference(process.gather(f"digests of {name}", whole)) is None:
        return
    titles = {where: {title: _digest(text) for title, text in texts.items()} for where, texts in own.items()}
    found = _difference(process.gather(f"digests of each of the {name}", titles))
    assert found is not None
    where, title, ranks = found
    # long texts differ in a line, which two ranks find without sending all of them
    lines = own[where].get(title, "").split("\n") if process.rank in ranks else []
    sums = process.gather(f"lines of {name}", [zlib.crc32(line.encode()) for line in lines])
    first, second = (sums[rank] for rank in ranks)
    most = max(len(first), len(second))
    number = next((n for n in range(most) if first[n : n + 1] != second[n : n + 1]), 0)
    line = lines[number].strip() if number < len(lines) and title in own[where] else None
    told = process.gather(f"a line of {name}", line)
    at = f"{title}, line {number + 1} of its text," if most > 1 else title
    raise ValueError(
        f"rank {ranks[1]} and rank {ranks[0]} share {where}, and would wait for each other for ever: {at} is "
        f"{_shown(told[ranks[1]])} on rank {ranks[1]} and {_shown(told[ranks[0]])} on rank {ranks[0]}; give all "
        "processes the same model, partition and packages"
    )


def _planned_work(model: HostedModel, planned: Plans) -> Iterator[tuple[str, dict[str, str]]]:
    layout = model.process.layout
    for unit in model.process.units:
        if len(layout.ranks_of(unit)) > 1:
            replica = layout.replica_of(unit)
            work = {"the kind of its devices": _kind_of_devices(model, unit)}
            seen: set[Hashable] = set()
            for base in _chunks_of(model, unit):
                work |= _lowered(model, base, replica, planned[base], seen)
            yield f"stage {layout.stage_of(unit)}, replica {replica}", work
    for stage in {layout.stage_of(unit) for unit in model.process.units}:
        if len(layout.ranks_of_stage(stage)) > 1:
            bases = [base for base in model.base_chunks if model.placement.stage_of_chunk[base] == stage]
            yield (
                f"stage {stage}",
                {"rules of updates": str(model.updates)}
                | {title: text for base in bases for title, text in _lowered_updates(model, base)},
            )


def _kind_of_devices(model: HostedModel, unit: int) -> str:
    device = model.process.own_device(unit)
    return f"{device.device_kind} ({' '.join(device.client.platform_version.split())})"


def _lowered(
    model: HostedModel, base: int, replica: int, variants: Sequence[Variant], seen: set[Hashable]
) -> dict[str, str]:
    """How the parameters of a chunk lie, and what is traced of it; nothing for what an earlier chunk has likewise."""
    chunk, boundary = model.chunks[base], model.grids[model.placement.stage_of_chunk[base]].unit_sharding(replica)
    shardings = unit_shardings(model.chunks, base, boundary)
    work = {
        f"{chunk.name}, parameter {jax.tree_util.keystr(path)}": str(spec)
        for path, spec in jax.tree.leaves_with_path(shardings.partition)
    }
    for number, variant in enumerate(variants):
        plan = variant.plan
        params = chunk.own.to_own(spread(variant.shapes.params, shardings.params))
        kind = (plan.kind, *(spec.sharding for spec in jax.tree.leaves(params)))
        if kind not in seen:
            seen.add(kind)
            passing = (plan.operands, plan.output_grads)
            specs = (params, *spread(passing, all_passing(boundary, passing)))
            title = f"{chunk.name}, forward and backward" + (f" ({number})" if number else "")
            work[title] = jax.jit(plan.forward_and_backward).lower(*specs).as_text()
    return work


def _lowered_updates(model: HostedModel, base: int) -> Iterator[tuple[str, str]]:
    chunk = model.chunks[base]
    params, update = spec_of(trained_specs(chunk)), jax.jit(update_function(model.optimizer))
    for group in layer_groups(chunk, params):
        own = pick(params, group)
        state = jax.eval_shape(model.optimizer.init, own)
        scalars = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.bool_)
        text = update.lower(own, state, accumulator_spec(own), *scalars).as_text()
        yield f"{chunk.name}, update {', '.join(group)}", text


def _chunks_of(model: HostedModel, unit: int) -> list[int]:
    """Base numbers of the chunks of a hosted unit."""
    layout, stage_of = model.process.layout, model.placement.stage_of_chunk
    replica = layout.replica_of(unit)
    return [
        base for base in model.base_chunks if stage_of[base] == layout.stage_of(unit) and replica in model.numbers(base)
    ]


def _shared_work(model: HostedModel, programs: HostedPrograms) -> Iterator[tuple[str, dict[str, str]]]:
    """Of the units that several processes share, and of the replicas of a stage that lie in several."""
    layout, stage_of = model.process.layout, model.placement.stage_of_chunk
    for unit in model.process.units:
        if len(layout.ranks_of(unit)) > 1:
            replica = layout.replica_of(unit)
            work: dict[str, str] = {}
            for base in _chunks_of(model, unit):
                chunk = programs.chunks[model.numbers(base)[replica]]
                work |= joint_work(chunk.chunk.name, chunk.compiled)
            yield f"stage {layout.stage_of(unit)}, replica {replica}", work
    for stage in {layout.stage_of(unit) for unit in model.process.units}:
        if len(layout.ranks_of_stage(stage)) > 1 and programs.replicas:
            work = {}
            for base in model.base_chunks:
                if stage_of[base] == stage:
                    work |= joint_work(model.chunks[base].name, programs.replicas[base].compiled)
            yield f"the replicas of stage {stage}", work


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _difference(told: Mapping[int, Work]) -> tuple[str, str, tuple[int, int]] | None:
    """Returns where two processes differ first, in which of their texts, and the two; None where none do."""
    first: dict[str, tuple[int, Mapping[str, str]]] = {}
    for rank, work_of_rank in told.items():
        for where, work in work_of_rank.items():
            known_rank, known = first.setdefault(where, (rank, work))
            different = next((each for each in [*known, *work] if known.get(each) != work.get(each)), None)
            if different is not None:
                return where, different, (known_rank, rank)
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    return value if value and len(value) <= 160 else f"{value[:160]}..." if value else "without collectives"
