"""The pure core: what may run on a stage, and what runs next (RRFP paper, sections 4.2 and 5, appendices A and C)."""

from rrfp_jax.arbitration.arbiter import StageArbiter
from rrfp_jax.arbitration.consumption import Consumption, ready, strict
from rrfp_jax.arbitration.events import (
    Event,
    FinishStep,
    InputArrived,
    Instruction,
    Message,
    MessageKind,
    RunTask,
    Send,
    StepStarted,
    TaskFinished,
)
from rrfp_jax.arbitration.hints import HINTS, SCHEDULE, Hint, hint_by_name, schedule_hint
from rrfp_jax.arbitration.ordering import (
    DEFAULT_WINDOW,
    FUSED,
    READY,
    SPLIT,
    STRICT,
    Order,
    Ordering,
    check_words,
    hint_names,
)
from rrfp_jax.arbitration.plan import Agreement, StagePlan, StepRules, reporting_stages, stage_plan
from rrfp_jax.arbitration.story import IllegalTransition, Waiting
from rrfp_jax.arbitration.window import Window, check_windows

__all__ = [
    "DEFAULT_WINDOW",
    "FUSED",
    "HINTS",
    "READY",
    "SCHEDULE",
    "SPLIT",
    "STRICT",
    "Agreement",
    "Consumption",
    "Event",
    "FinishStep",
    "Hint",
    "IllegalTransition",
    "InputArrived",
    "Instruction",
    "Message",
    "MessageKind",
    "Order",
    "Ordering",
    "RunTask",
    "Send",
    "StageArbiter",
    "StagePlan",
    "StepRules",
    "StepStarted",
    "TaskFinished",
    "Waiting",
    "Window",
    "check_windows",
    "check_words",
    "hint_by_name",
    "hint_names",
    "ready",
    "reporting_stages",
    "schedule_hint",
    "stage_plan",
    "strict",
]
