"""What is checked: one small pipeline with its windows, hints and steps."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from rrfp_jax.arbitration import Consumption, Hint, StageArbiter, StepRules, check_windows, ready, strict
from rrfp_jax.tasks import PipelineGraph, Placement, Task

Policy = Hint | tuple[Task, ...]
"""How a stage picks its tasks: a hint, consumed by readiness, or a row of tasks, consumed strictly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One pipeline to check. Raises ValueError if the numbers of stages do not agree."""

    graph: PipelineGraph
    placement: Placement
    windows: tuple[int, ...]
    """Per stage, in microbatches; strict consumption ignores it."""
    policies: tuple[Policy, ...]
    """Per stage."""
    rules: StepRules = field(default_factory=StepRules)
    absences: tuple[frozenset[tuple[int, int]], ...] = (frozenset(),)
    """For each step that is run, the (chunk, microbatch) pairs that it lacks beyond the graph's."""
    dispatch_ahead: int = 0
    arbiter: type[StageArbiter] = StageArbiter
    """The class under test; tests of the checks put broken ones here."""

    def __post_init__(self) -> None:
        check_windows(self.windows, self.num_stages)
        if len(self.policies) != self.num_stages:
            raise ValueError(f"{len(self.policies)} policies for {self.num_stages} stages: give one for each stage")
        if not self.absences:
            raise ValueError("absences has no entry, so no step would run: give one set of pairs for each step")

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_steps(self) -> int:
        return len(self.absences)

    def graph_of_step(self, step: int) -> PipelineGraph:
        return self.graph.skipping_also(self.absences[step])

    def make_arbiter(self, stage: int) -> StageArbiter:
        """A fresh arbiter of one stage."""
        return self.arbiter(
            self.graph,
            self.placement,
            stage,
            consumption=_consumption(self.policies[stage]),
            window=self.windows[stage],
            rules=self.rules,
            dispatch_ahead=self.dispatch_ahead,
        )

    def wiring_key(self) -> Hashable:
        """Equal for settings whose stages exchange the same messages in the same steps."""
        return (self.graph, self.placement, self.rules, self.absences)

    def stage_key(self, stage: int) -> Hashable:
        """Equal for settings of equal wiring in which this stage's arbiter is the same."""
        return (stage, self.windows[stage], self.policies[stage], self.dispatch_ahead, self.arbiter)

    def __str__(self) -> str:
        policies = ["strict" if isinstance(policy, tuple) else policy.name for policy in self.policies]
        shown = policies[0] if len(set(policies)) == 1 else ", ".join(policies)
        edges = " ".join(f"{e.source}{'->' if e.carries_gradient else '=>'}{e.target}" for e in self.graph.edges)
        return (
            f"{self.num_stages} stages, chunks on stages {self.placement.stage_of_chunk}, "
            f"{self.graph.num_microbatches} microbatches, edges {edges or 'none'}, windows {self.windows}, "
            f"hint {shown}, {'ordered' if self.rules.ordered else 'free'} accumulation, "
            f"agreement {self.rules.agreement}, {self.num_steps} step{'s' if self.num_steps > 1 else ''}"
        )


def _consumption(policy: Policy) -> Consumption:
    return strict(policy) if isinstance(policy, tuple) else ready(policy)
