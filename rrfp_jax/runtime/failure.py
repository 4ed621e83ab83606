"""Errors that end a run, and the wait-for report that they carry: the task that each stage runs or waits for.

An error in a task is shown by :func:`error_text`: its message and the place where it was raised.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rrfp_jax.core import Message, MessageKind, StageArbiter
from rrfp_jax.layout import name_unit

_MAX_TASKS_SHOWN = 3
_MAX_MESSAGES_SHOWN = 8
_FRAMES = '\n  File "'
"""Text with which each line of code begins in the text of an error."""
_MAX_TEXT = 4096
"""Characters of an error's text that a report keeps; the error itself stays whole on the rank that raised it."""
_TRACEBACK = "Traceback (most recent call last):"
_NUM_FRAMES = 3
_MAX_LETTERS = 2_000


@dataclass(frozen=True, kw_only=True)
class StageState:
    """One stage at the moment of the report; ``since_s`` counts seconds back from it."""

    stage: int
    step: int | None
    running: str | None
    failed: bool
    """Whether the task named by ``running`` raised the error that ended the run."""
    since_s: float
    idle_reason: str | None
    held: tuple[int, ...]
    waits: tuple[str, ...]
    """The tasks that lack only messages, with the stage that must send each, the oldest microbatch first."""
    waits_for_stages: tuple[int, ...]
    rank: int | None = None
    """The process that reports this; None if there is only one."""
    stages_of_replica: int | None = None
    """Number of stages of each replica, if there are several: ``stage`` then numbers the stages of all of them, replica
    by replica."""

    @property
    def name(self) -> str:
        """The name of the stage, with its replica where there are several."""
        return name_unit(self.stage, self.stages_of_replica)

    def __str__(self) -> str:
        if self.failed:
            text = f"{self.name} failed in {self.running}"
        elif self.running:
            text = f"{self.name} has been running {self.running} for {self.since_s:.1f} s"
        elif not self.waits:
            text = f"{self.name} has nothing to do ({self.idle_reason}) for {self.since_s:.1f} s"
        else:
            text = f"{self.name} has been idle for {self.since_s:.1f} s ({self.idle_reason}): {'; '.join(self.waits)}"
        return text if self.rank is None else f"rank {self.rank}: {text}"


@dataclass(frozen=True, kw_only=True)
class FailureNews:
    """News of a failure from one rank to others: the state of its own stages, or states that it has received."""

    kind: str
    """The name of the error's type."""
    origin: int
    """The rank that met it."""
    summary: str
    states: dict[int, list[StageState]]
    """The states of the stages of these ranks."""
    lost: dict[int, str]
    """Ranks that the origin takes for lost, with the way in which that was noticed."""


@dataclass(frozen=True, kw_only=True)
class WaitForReport:
    """The state of every stage when a run was given up."""

    summary: str
    stages: tuple[StageState, ...]
    lost_ranks: tuple[int, ...] = ()
    """Processes that died or fell silent."""
    lost_stages: tuple[int, ...] = ()
    """The stages that they hosted."""
    origin: int | None = None
    """The rank whose task failed, if that is another rank."""

    def __str__(self) -> str:
        summary = self.summary
        if self.origin is not None:  # that rank prints the lines of code itself: once is enough
            summary, *frames = summary.split(_FRAMES, maxsplit=1)
            summary += f" (rank {self.origin} tells where in the code)" if frames else ""
        lines = [summary, *(f"  {stage}" for stage in self.stages)]
        if culprits := self.culprits():
            each = self.stages[0].stages_of_replica
            names = " and ".join(name_unit(stage, each) for stage in culprits)
            lines.append(f"all stages that wait do so, directly or not, for {names}")
        return "\n".join(lines)

    def culprits(self) -> tuple[int, ...]:
        """Returns the stages for which all waiting ones wait in the end: they run a task or failed in one."""
        by_stage = {state.stage: state for state in self.stages}
        reached: set[int] = set()
        frontier = {stage for state in self.stages for stage in state.waits_for_stages}
        while frontier:
            reached |= frontier
            frontier = {
                s for stage in frontier if stage in by_stage for s in by_stage[stage].waits_for_stages
            } - reached
        return tuple(sorted(stage for stage in reached if stage not in by_stage or by_stage[stage].running))

    def as_dict(self) -> dict[str, object]:
        """Returns the report as plain data for JSON."""
        return asdict(self)


class RunFailed(RuntimeError):
    """A run that cannot go on; ``report`` has the state of every stage."""

    def __init__(self, report: WaitForReport) -> None:
        super().__init__(str(report))
        self.report = report


class NoProgress(RunFailed):
    """No task finished within the progress deadline."""


class TaskFailed(RunFailed):
    """A task raised an error, or its data could not be moved here though nobody is lost."""


class PeerLost(RunFailed):
    """Another process of the run died, fell silent or gave up."""


def stage_state(
    arbiter: StageArbiter,
    since_s: float,
    *,
    failed: bool = False,
    rank: int | None = None,
    stages_of_replica: int | None = None,
) -> StageState:
    """Returns the state of one stage from its arbiter; ``since_s`` is the time that it has lasted."""
    placement, reason = arbiter.placement, arbiter.idle_reason()
    running = [task for task in arbiter.running() if failed or not arbiter.awaits_input(task)]
    waiting = sorted(
        (w for w in arbiter.waiting() if w.missing_messages),
        key=lambda w: (bool(w.missing_local), w.microbatch < 0, w.microbatch),
    )
    shown = [w for w in waiting if not w.missing_local][:_MAX_TASKS_SHOWN] or waiting[:_MAX_TASKS_SHOWN]
    between_units = MessageKind.REPORT, MessageKind.VERDICT
    owing = {
        message: message.source if message.kind in between_units else placement.stage_of_chunk[message.source]
        for w in shown
        for message in w.missing_messages
    }
    names = {message: name_unit(stage, stages_of_replica) for message, stage in owing.items()}
    return StageState(
        stage=arbiter.stage,
        step=arbiter.step,
        running=", ".join(map(str, running)) or None,
        failed=failed,
        since_s=since_s,
        idle_reason=reason and str(reason),
        held=tuple(sorted(arbiter.held())),
        waits=tuple(f"{w.what} waits for {_awaited(w.missing_messages, names)}" for w in shown),
        waits_for_stages=tuple(sorted(set(owing.values()))),
        rank=rank,
        stages_of_replica=stages_of_replica,
    )


def shorten_for_report(text: str) -> str:
    """Returns a text, or its beginning and end if it is too long for a report."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def _awaited(messages: Sequence[Message], owing: Mapping[Message, str]) -> str:
    texts = [f"the {message} ({owing[message]})" for message in messages[:_MAX_MESSAGES_SHOWN]]
    if more := len(messages) - len(texts):
        texts.append(f"{more} more")
    return " and ".join(texts)


def error_text(error: BaseException) -> str:
    """Returns type and message of the exception and its last frames, one per line.

    JAX wraps the exception of a host function into a message of its own, with the whole traceback as text; the useful
    part stands at the end of that text, and is returned then.
    """
    try:
        _, wrapped, told = str(error).rpartition(_TRACEBACK)
    except Exception:  # a user's own exception may fail to make its text; the traceback module says so
        wrapped = told = ""
    message, frames = "", list[str]()
    if wrapped:
        lines = told.strip("\n").splitlines()
        for number, line in enumerate(lines):
            if line.startswith("  File "):
                frames.append(line)
            elif line.startswith("    ") and frames:
                frames[-1] += f"\n{line}"
            elif line.strip():
                message = "\n".join(lines[number:]).strip()
                break
    else:
        message = "".join(traceback.format_exception_only(error)).strip()
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    if len(message) > _MAX_LETTERS:
        message = f"{message[:_MAX_LETTERS]} ... ({len(message) - _MAX_LETTERS:,} more letters)"
    return "\n".join([message, *(line.rstrip() for frame in frames[-_NUM_FRAMES:] for line in frame.splitlines())])
