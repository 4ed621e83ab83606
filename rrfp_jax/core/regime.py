"""What is fixed for all steps of one kind on a stage: of those that train, and of those that evaluate."""

from collections.abc import Sequence

from rrfp_jax.core.footprint import RowMemory, canonical_row
from rrfp_jax.core.plan_builder import stage_plan
from rrfp_jax.core.stage_setup import StageSetup
from rrfp_jax.core.step_plan import StepPlan
from rrfp_jax.schedules import Task


class Regime:
    """What is fixed for all steps of one kind; an arbiter takes these attributes over."""

    def __init__(self, setup: StageSetup, *, evaluates: bool = False) -> None:
        self.graph, self.rules, self.consumption = setup.graph, setup.rules, setup.consumption
        self.footprint, self.capacity = setup.footprint, setup.capacity
        is_strict = self.consumption.is_strict
        self.limit = None if is_strict or setup.footprint is not None else setup.window
        self.read_ahead = () if is_strict else setup.read_ahead
        row = self.consumption.hint.row
        self._follows_row = row is not None
        plan = stage_plan(setup.graph, setup.placement, setup.stage, setup.rules, has_row=self._follows_row)
        self._full = StepPlan(plan, self.consumption, evaluates=evaluates)
        self._row_tasks: Sequence[Task] = row or ()
        self._row = None
        if setup.footprint is not None:
            if row is None:
                self._row_tasks = canonical_row(setup.graph, setup.placement.chunks_of_stage[setup.stage])
            self._row = RowMemory(self._full, setup.graph, self._row_tasks)
            self._row.check_limit(setup.footprint, setup.stage)
        self._has_other_takers = self._row is not None and self._row.has_other_takers
