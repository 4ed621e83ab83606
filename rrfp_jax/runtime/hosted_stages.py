"""The executors of the units that this process hosts, made of their programs and their state."""

from collections.abc import Callable

from rrfp_jax.arbitration import Order, StepRules
from rrfp_jax.arbitration.replicas import Replication
from rrfp_jax.runtime.hosted import HostedModel, HostedPrograms, HostedState
from rrfp_jax.runtime.mailbox import Ship
from rrfp_jax.runtime.memory import MemoryMeter
from rrfp_jax.runtime.options import UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.runtime.program_stage import ProgramStage
from rrfp_jax.runtime.stage_replicas import StageReplicas


def stage_maker(
    model: HostedModel,
    process: Process,
    order: Order,
    state: HostedState,
    programs: HostedPrograms,
    *,
    copies: Replication,
    update_rules: UpdateRules,
    step_rules: StepRules,
) -> Callable[[int, Ship], ProgramStage]:
    """A function that builds the executor of a hosted unit; the executors take ``state`` over."""
    chunks_of_unit = order.placement.chunks_of_stage
    replicas = _stage_replicas(model, process, state, programs)

    def make_stage(unit: int, ship: Ship) -> ProgramStage:
        own = {chunk: programs.chunks[chunk] for chunk in chunks_of_unit[unit]}
        return ProgramStage(
            order.graph,
            order.placement,
            unit,
            programs=own,
            states={chunk: state.chunks[chunk] for chunk in own},
            update_rules=update_rules,
            step_rules=step_rules,
            copies=copies,
            replicas=replicas.get(process.layout.stage_of(unit)),
            meter=MemoryMeter(own, process.own_device(unit)),
            ship=ship,
            wishes=process.wishes,
            in_transit=process.bytes_in_transit,
        )

    return make_stage


def _stage_replicas(
    model: HostedModel, process: Process, state: HostedState, programs: HostedPrograms
) -> dict[int, StageReplicas]:
    """By stage, what its hosted replicas do together; empty without data parallelism."""
    stages = {process.layout.stage_of(unit) for unit in process.units} if programs.replicas else set()
    return {
        stage: StageReplicas(
            {chunk: programs.replicas[chunk] for chunk in model.placement.chunks_of_stage[stage]},
            state.shared,
            model.grids[stage].local_replicas,
        )
        for stage in stages
    }
