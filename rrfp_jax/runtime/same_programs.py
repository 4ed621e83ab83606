"""Before the first step: do the processes that share a stage run the same collectives in the same order?

Each tells a digest. Where two differ, all tell everything, and the first difference is the error, with its ranks.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rrfp_jax.programs.collectives import joint_work
from rrfp_jax.runtime.hosted import HostedModel, HostedPrograms
from rrfp_jax.runtime.process import Process

Work = Mapping[str, Mapping[str, str]]
"""By the name of a unit or stage, what its processes do together."""


def check_same_programs(model: HostedModel, programs: HostedPrograms) -> None:
    """Raise ValueError, in every process, where some would wait in different collectives. All processes call it."""
    process, layout = model.process, model.process.layout
    if all(len(layout.ranks_of_stage(stage)) == 1 for stage in range(layout.num_stages)):
        return
    own: Work = dict(_shared_work(model, programs))
    digests = {name: _digest(work) for name, work in own.items()}
    if _difference(process, {name: {"": digest} for name, digest in digests.items()}, "digests of programs") is None:
        return
    found = _difference(process, own, "programs")
    assert found is not None
    raise ValueError(found)


def _shared_work(model: HostedModel, programs: HostedPrograms) -> Iterator[tuple[str, dict[str, str]]]:
    """Of the units that several processes share, and of the replicas of a stage that lie in several."""
    layout, stage_of = model.process.layout, model.placement.stage_of_chunk
    for unit in model.process.units:
        if len(layout.ranks_of(unit)) > 1:
            work: dict[str, str] = {}
            for base in model.base_chunks:
                number = model.numbers(base).get(layout.replica_of(unit))
                if stage_of[base] == layout.stage_of(unit) and number is not None:
                    chunk = programs.chunks[number]
                    work |= joint_work(chunk.chunk.name, chunk.compiled, chunk.shardings.partition)
            yield f"stage {layout.stage_of(unit)}, replica {layout.replica_of(unit)}", work
    for stage in {layout.stage_of(unit) for unit in model.process.units}:
        if len(layout.ranks_of_stage(stage)) > 1 and programs.replicas:
            work = {}
            for base in model.base_chunks:
                if stage_of[base] == stage:
                    work |= joint_work(model.chunks[base].name, programs.replicas[base].compiled)
            yield f"the replicas of stage {stage}", work


def _digest(work: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:32]


def _difference(process: Process, own: Work, name: str) -> str | None:
    """The first difference between what two processes do together, in words; None where there is none."""
    first: dict[str, tuple[int, Mapping[str, str]]] = {}
    for rank, told in process.gather(name, own).items():
        for where, work in told.items():
            known_rank, known = first.setdefault(where, (rank, work))
            different = next((each for each in [*known, *work] if known.get(each) != work.get(each)), None)
            if different is not None:
                return (
                    f"rank {rank} and rank {known_rank} share {where}, and would wait for each other for ever: "
                    f"{different} is {_shown(work.get(different))} on rank {rank} and {_shown(known.get(different))} "
                    f"on rank {known_rank}; give all processes the same model, partition and packages"
                )
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    return value if value and len(value) <= 160 else f"{value[:160]}..." if value else "without collectives"
