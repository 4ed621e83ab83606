"""The state of a stage's arbiter: what it is made of, what a step begins with, copies, and what makes states equal."""

from collections.abc import Hashable, Sequence
from typing import Self

from rrfp_jax.core.certainty import Certainty
from rrfp_jax.core.consumption import Consumption
from rrfp_jax.core.engines import Engines
from rrfp_jax.core.estimates import Estimates
from rrfp_jax.core.evaluation import evaluation_setup
from rrfp_jax.core.events import InputArrived
from rrfp_jax.core.footprint import Footprint, RowMemory
from rrfp_jax.core.foresight import Foresight
from rrfp_jax.core.plan import StagePlan, StepRules
from rrfp_jax.core.promises import Promises
from rrfp_jax.core.read_ahead import AheadBound, ReadAhead
from rrfp_jax.core.ready_set import ReadySet
from rrfp_jax.core.regime import Regime
from rrfp_jax.core.reserve import Reserve
from rrfp_jax.core.stage_setup import StageSetup
from rrfp_jax.core.step_plan import StepPlan
from rrfp_jax.core.window import Window, check_weights
from rrfp_jax.schedules import Absences, PipelineGraph, Task


class StageState:
    """An arbiter as far as it only remembers; what changes it is in the classes that inherit from this one.

    Its attributes are slots: events ask for many of them, and so does each of its methods.
    """

    __slots__ = (
        "_ahead",
        "_arrived",
        "_capacity",
        "_certainty",
        "_due",
        "_early",
        "_engines",
        "_evaluation",
        "_follows_row",
        "_footprint",
        "_foresight",
        "_full",
        "_has_other_takers",
        "_hint_state",
        "_is_told",
        "_left",
        "_now_s",
        "_num_started",
        "_prepared",
        "_promises",
        "_ranked",
        "_ready",
        "_resting",
        "_row",
        "_row_tasks",
        "_running",
        "_tasks_left",
        "_training",
        "_waiting",
        "_weights",
        "_window",
        "capacity",
        "certain_ahead",
        "consumption",
        "evaluates",
        "evaluation_batches",
        "footprint",
        "graph",
        "is_active",
        "limit",
        "placement",
        "read_ahead",
        "rules",
        "stage",
        "step",
    )

    graph: PipelineGraph
    """Of training, but during a step that evaluates; so it is with the other rules of a step."""
    rules: StepRules
    consumption: Consumption
    footprint: int | None
    """How many activations the stage may hold; None: :attr:`limit` counts."""
    limit: int | None
    """How many microbatches the stage may hold; None: as many as come."""
    capacity: int | None
    """What the microbatches held may weigh together, in steps with weights."""
    read_ahead: tuple[AheadBound, ...]
    """How far chunks that run F only may run ahead."""
    _follows_row: bool
    _full: StepPlan
    _row_tasks: Sequence[Task]
    """The order in which memory is reserved: the table's, or else the canonical one."""
    _row: RowMemory | None
    _has_other_takers: bool

    def __init__(self, setup: StageSetup) -> None:
        self.placement, self.stage = setup.placement, setup.stage
        self.certain_ahead, self.evaluation_batches = setup.certain_ahead, setup.evaluation_batches
        self.step: int | None = None
        self.is_active = self.evaluates = False
        self._now_s = 0.0
        self._training = Regime(setup)
        self._evaluation = Regime(evaluation_setup(setup), evaluates=True) if setup.evaluation_batches else None
        self._go_by(self._training)
        self._prepared = self._full
        self._foresight = None if setup.foresight is None else setup.foresight.make(self._full.outlook)
        self._resting: Foresight | None = None
        """The foresight of training, during an evaluation."""
        self._early: dict[int, tuple[InputArrived, ...]] = {}
        self._promises = Promises()
        self._weights: tuple[int, ...] = ()
        self._begin(self._full)

    def copy(self) -> Self:
        """An independent arbiter in the same state; fixed tables are shared."""
        twin = object.__new__(type(self))
        for name in StageState.__slots__:
            setattr(twin, name, getattr(self, name))
        if hasattr(self, "__dict__"):  # what a class beside these adds
            twin.__dict__.update(self.__dict__)
        twin._waiting = self._waiting.copy()
        twin._arrived = self._arrived.copy()
        twin._ready = self._ready.copy()
        twin._certainty = self._certainty and self._certainty.copy()
        twin._window = self._window.copy()
        twin._running = self._running.copy()
        twin._early = self._early.copy()
        twin._promises = self._promises.copy()
        twin._engines = self._engines and self._engines.copy()
        twin._footprint = self._footprint and self._footprint.copy()
        twin._ahead = self._ahead and self._ahead.copy()
        twin._foresight = self._foresight and self._foresight.copy()
        twin._resting = self._resting and self._resting.copy()
        return twin

    def plan_without(self, absent: Absences, weights: tuple[int, ...] = (), *, evaluates: bool = False) -> StepPlan:
        """The plan of a step without these pairs, beyond those of the graph; from any thread, at any time.

        ``weights``: what each microbatch of the stage weighs, for a stage with a capacity. Raises ValueError for
        weights that do not fit it, and where the stage was not made for evaluations.
        """
        regime = self._regime(evaluates)
        plan = regime._full.without(absent, regime.graph, regime.rules, regime.consumption)
        if not weights:
            return plan
        check_weights(weights, len(plan.plan.tasks_per_microbatch), regime.capacity, self.stage)
        return plan.weighing(weights)

    def graph_of(self, *, evaluates: bool) -> PipelineGraph:
        """The graph of steps of one kind; raises ValueError where the stage was not made for evaluations."""
        return self._regime(evaluates).graph

    def _regime(self, evaluates: bool) -> Regime:
        if not evaluates:
            return self._training
        if self._evaluation is None:
            raise ValueError(f"stage {self.stage} was not made for steps that evaluate: prepare it for them")
        return self._evaluation

    def _go_by(self, regime: Regime) -> None:
        for name, value in vars(regime).items():
            setattr(self, name, value)

    def _change(self, *, evaluates: bool) -> None:
        """Go by the rules of the other kind of steps."""
        self._go_by(self._regime(evaluates))
        self.evaluates = evaluates
        self._foresight, self._resting = self._resting, self._foresight

    def prepare(self, plan: StepPlan) -> None:
        """Take what :meth:`plan_without` made for the next step, so that its start has nothing to make.

        It changes no answer: a step that starts with other pairs, or unprepared, has its plan made then.
        """
        self._prepared = plan

    def fresh(self, after: int | None, estimates: Estimates | None = None) -> Self:
        """An arbiter made alike that has ended step ``after``, or has not begun, and knows nothing of later steps.

        ``estimates`` is what :meth:`estimates` gave when that step had ended.
        """
        twin = self.copy()
        twin.step, twin.is_active = after, False
        if twin.evaluates:
            twin._change(evaluates=False)
        twin._early, twin._prepared, twin._weights = {}, twin._full, ()
        twin._promises = Promises()
        twin._foresight = twin._foresight and twin._foresight.fresh(estimates or Estimates())
        twin._begin(twin._full)
        return twin

    def estimates(self) -> Estimates | None:
        """What the stage has learnt for its foresight so far; None if it has none."""
        foresight = self._foresight or self._resting
        return None if foresight is None else foresight.estimates()

    def key(self) -> Hashable:
        """The state as a hashable value, without times and orders of arrival: equal keys mean equal futures."""
        early = frozenset(early._replace(time_s=0.0) for events in self._early.values() for early in events)
        seen = self._foresight and self._foresight.key(is_active=self.is_active)
        if not self.is_active:
            return (self.step, early, seen, self._promises.key())
        return (
            self.step,
            early,
            self._resting.key(is_active=False) if self._resting else seen,
            self._ranked.absent,
            self.evaluates,
            self._weights,
            tuple(self._waiting),
            frozenset(self._arrived),
            self._hint_state,
            tuple(self._running),
            self._is_told,
            self._promises.key(),
        )

    def _begin(self, ranked: StepPlan) -> None:
        self._ranked = ranked
        plan = ranked.plan
        self._waiting = list(plan.needs)
        self._arrived: set[int] = set()
        """The numbers of the messages that are here."""
        self._promises.begin(self.step, plan.arrivals)
        self._ready = ReadySet(len(self.read_ahead))
        self._ahead = ReadAhead(self.read_ahead, plan, self.graph) if self.read_ahead else None
        self._engines = Engines(len(plan.engines)) if plan.engines else None
        self._footprint = None if self._row is None else Footprint(self._row.ranked(ranked.at), self.footprint or 0)
        self._window = self._new_window(plan)
        self._running: list[int] = []
        self._due: int | None = None
        self._is_told = False
        """Whether the driver has said that the due task is about to end, and nothing waits behind it yet."""
        self._capacity = 1
        self._certainty = Certainty(ranked) if self.certain_ahead and not plan.engines else None
        self._hint_state = self.consumption.initial
        self._left = plan.num_nodes - len(plan.absent)
        self._tasks_left = sum(plan.tasks_per_microbatch)
        self._num_started = 0
        if self._foresight is not None:
            self._foresight.begin(-1 if self.step is None else self.step, ranked.outlook)

    def _new_window(self, plan: StagePlan) -> Window | Reserve:
        ends, first = plan.tasks_per_microbatch, plan.first_microbatch
        if not self._weights:
            return Window(self.limit, ends, first)
        assert self.capacity is not None
        return Reserve(self.capacity, ends, first, weights=self._weights)
