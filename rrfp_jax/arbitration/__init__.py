"""The pure core: what may run on a stage, and what runs next (RRFP paper, sections 4.2 and 5, appendices A and C)."""

from rrfp_jax.arbitration.arbiter import StageArbiter
from rrfp_jax.arbitration.consumption import Consumption, ready, strict
from rrfp_jax.arbitration.events import (
    Event,
    FinishStep,
    GroupHeard,
    InputArrived,
    Instruction,
    MemberReceived,
    MemberStarted,
    Message,
    MessageKind,
    Note,
    RunTask,
    Send,
    StepStarted,
    TaskChosen,
    TaskFinished,
    TaskProposed,
    TellGroup,
)
from rrfp_jax.arbitration.group import GroupProtocol, group_arbiter
from rrfp_jax.arbitration.group_overhead import Launch, agreement_overhead, launches
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
from rrfp_jax.arbitration.plan import Agreement, StagePlan, StepRules, stage_plan
from rrfp_jax.arbitration.step_plan import StepPlan
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
    "GroupHeard",
    "GroupProtocol",
    "Hint",
    "IllegalTransition",
    "InputArrived",
    "Instruction",
    "Launch",
    "MemberReceived",
    "MemberStarted",
    "Message",
    "MessageKind",
    "Note",
    "Order",
    "Ordering",
    "RunTask",
    "Send",
    "StageArbiter",
    "StagePlan",
    "StepPlan",
    "StepRules",
    "StepStarted",
    "TaskChosen",
    "TaskFinished",
    "TaskProposed",
    "TellGroup",
    "Waiting",
    "Window",
    "agreement_overhead",
    "check_windows",
    "check_words",
    "group_arbiter",
    "hint_by_name",
    "hint_names",
    "launches",
    "ready",
    "schedule_hint",
    "stage_plan",
    "strict",
]
