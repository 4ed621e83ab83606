"""The end of a run that cannot go on: its errors, and the report that they carry, made by all ranks together.

The wait-for report has for each stage the task that it runs or waits for. An error in a task is shown by
:func:`error_text`: its message and the place where it was raised.

The first failure that a rank meets or hears of is the one it reports. It sends the state of its own stages to all ranks
to which it has a connection, and waits for a moment for theirs. A rank passes on news that is new to it, once, so the
news reaches every rank over any connections that are left, and in a small run every rank ends with the wait-for graph
of the whole. In a large run the number of stages is bounded, so no rank sends or keeps more than a constant.

Every rank learns of losses from its own network, which has asked the suspected ranks. Claims of another rank about
losses are only quoted, and only while the own network says nothing: if a connection broke, the other may mean ranks
that are well.
"""

import traceback
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.core import MessageKind, StageArbiter
from rrfp_jax.layout import Layout, name_unit
from rrfp_jax.waiting import wait_for

if TYPE_CHECKING:
    from rrfp_jax.runtime.control_plane import Peers

_MAX_TASKS_SHOWN = 3
_MAX_MESSAGES_SHOWN = 8
_FRAMES = '\n  File "'
"""Text with which each line of code begins in the text of an error."""
_MAX_TEXT = 4096
"""Characters of an error's text that a report keeps; the error itself stays whole on the rank that raised it."""
_TRACEBACK = "Traceback (most recent call last):"
_NUM_FRAMES = 3
_MAX_LETTERS = 2_000
_GATHERING_S = 1.0
"""Time for the reports of other ranks, unless half the silence deadline is less."""
_MAX_STATES = 64
"""Largest number of other ranks' stages in a report."""
_COLLECTING_S = 0.01
"""News that comes within this time is passed on together."""


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
    is_launching: bool = False
    """Whether the task that runs has not reached the devices yet."""

    @property
    def name(self) -> str:
        return name_unit(self.stage, self.stages_of_replica)

    def __str__(self) -> str:
        name = self.name
        if self.failed:
            text = f"{name} failed in {self.running}"
        elif self.running:
            doing = "launching" if self.is_launching else "running"
            text = f"{name} has been {doing} {self.running} for {self.since_s:.1f} s"
        elif not self.waits:
            text = f"{name} has nothing to do ({self.idle_reason}) for {self.since_s:.1f} s"
        else:
            text = f"{name} has been idle for {self.since_s:.1f} s ({self.idle_reason}): {'; '.join(self.waits)}"
        return text if self.rank is None else f"rank {self.rank}: {text}"


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
        lines = [summary, *(f"  {stage}" for stage in self.stages), *self._hanging_groups()]
        if culprits := self.culprits():
            each = self.stages[0].stages_of_replica
            names = " and ".join(name_unit(stage, each) for stage in culprits)
            lines.append(f"all stages that wait do so, directly or not, for {names}")
        return "\n".join(lines)

    def _hanging_groups(self) -> list[str]:
        """Returns for each stage whose ranks live and are in a task the ranks that have launched it, and the others."""
        by_stage: dict[int, list[StageState]] = {}
        for state in () if self.lost_ranks or any(state.failed for state in self.stages) else self.stages:
            by_stage.setdefault(state.stage, []).append(state)
        lines = []
        for members in by_stage.values():
            ranks: dict[str, list[int]] = {}
            for state in members:
                task = state.running.partition(",")[0] if state.running else "nothing"
                ranks.setdefault(f"still launching {task}" if state.is_launching else task, []).append(state.rank or 0)
            if len(members) > 1 and [*ranks] != ["nothing"]:
                launched = ", ".join(f"{task} on {name_ranks(where)}" for task, where in ranks.items())
                remedy = "at the links between their hosts" if len(ranks) == 1 else "for what keeps one from the task"
                lines.append(f"{members[0].name} has launched {launched}; all these live: look {remedy}")
        return lines

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


class TransportFailed(RuntimeError):
    """Data could not be fetched or put on a device; the text says which, and from whom."""


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
    waits = []
    for w in shown:
        messages = w.missing_messages
        texts = [f"the {m} ({name_unit(owing[m], stages_of_replica)})" for m in messages[:_MAX_MESSAGES_SHOWN]]
        if more := len(messages) - len(texts):
            texts.append(f"{more} more")
        waits.append(f"{w.what} waits for {' and '.join(texts)}")
    return StageState(
        stage=arbiter.stage,
        step=arbiter.step,
        running=", ".join(map(str, running)) or None,
        failed=failed,
        since_s=since_s,
        idle_reason=reason and str(reason),
        held=tuple(sorted(arbiter.held())),
        waits=tuple(waits),
        waits_for_stages=tuple(sorted(set(owing.values()))),
        rank=rank,
        stages_of_replica=stages_of_replica,
    )


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


@dataclass
class Failure:
    """A failure on its way to becoming the error that a run ends with."""

    kind: type[RunFailed]
    summary: str
    states: list[StageState]
    """The states of this rank's stages."""
    cause: BaseException | None = None
    origin: int | None = None
    """The rank that met it; None: this one."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that this rank's own network takes for lost, with the way in which that was noticed."""
    heard: dict[int, list[StageState]] = field(default_factory=dict)
    """The states that other ranks report of their stages."""
    claims: dict[int, str] = field(default_factory=dict)
    """Ranks that the origin takes for lost, if the summary is about them alone."""

    def __post_init__(self) -> None:
        if (left := len(self.summary) - _MAX_TEXT) > 0:
            half = _MAX_TEXT // 2
            self.summary = f"{self.summary[:half]} ... ({left} characters) ... {self.summary[-half:]}"

    def hear(self, news: FailureNews, rank: int) -> FailureNews | None:
        """Adds the news of others; returns the part that was new to this rank, if any."""
        if sum(map(len, self.heard.values())) >= _MAX_STATES:
            return None
        states = {r: told for r, told in news.states.items() if r not in self.heard and r != rank}
        self.heard |= states
        return self.news(states, {}, rank) if states else None

    def news(self, states: Mapping[int, list[StageState]], lost: Mapping[int, str], rank: int) -> FailureNews:
        """Returns the news for other ranks: why this rank ends, with these states and losses."""
        return FailureNews(
            kind=self.kind.__name__,
            origin=rank if self.origin is None else self.origin,
            summary=self.summary,
            states=dict(states),
            lost=dict(lost),
        )

    def is_complete(self, layout: Layout, rank: int) -> bool:
        """Returns whether every rank has reported or is lost, and this rank's own network has come to a conclusion on
        claims of losses."""
        # A rank that fell silent and was heard all the same is no conclusion: the network broke, and soon says where.
        is_judged = not self.claims or bool(self.lost.keys() - self.heard.keys())
        return is_judged and len({rank, *self.heard, *self.lost}) == layout.num_ranks

    def answer(self, rank: int) -> None:
        """Corrects a claim that this rank is lost: it lives, so the connection between the two has broken."""
        if rank in self.claims and not self.lost.keys() - self.heard.keys():
            assert self.origin is not None
            one, other = sorted((rank, self.origin))
            self.summary = f"rank {one} and rank {other} lost sight of each other"
            self.claims.clear()

    def error(self, layout: Layout | None) -> RunFailed:
        states = [*self.states, *(state for heard in self.heard.values() for state in heard)]
        died = sorted(self.lost.keys() - self.heard.keys())
        is_elsewhere = self.origin is not None and self.kind is TaskFailed
        summaries = [] if layout is None else [lost_summary(layout, rank, self.lost[rank]) for rank in died]
        if not (self.claims and died):
            is_quoted = is_elsewhere or self.claims
            summaries.append(f"rank {self.origin} gave up: {self.summary}" if is_quoted else self.summary)
        # A collective fails too where a rank of it died, and may be seen to fail first.
        kind = PeerLost if is_elsewhere or (died and self.kind is TaskFailed) else self.kind
        failure = kind(
            WaitForReport(
                summary="; ".join(dict.fromkeys(summaries)),
                stages=tuple(sorted(states, key=lambda state: (state.stage, state.rank or 0))),
                lost_ranks=tuple(died),
                origin=self.origin if is_elsewhere else None,
                lost_stages=() if layout is None else tuple(sorted({u for r in died for u in layout.units_of(r)})),
            )
        )
        failure.__cause__ = self.cause
        return failure


def lost_rank(layout: Layout, rank: int, reason: str, states: Sequence[StageState]) -> Failure:
    return Failure(PeerLost, lost_summary(layout, rank, reason), list(states), lost={rank: reason})


def failure_elsewhere(news: FailureNews, states: Sequence[StageState]) -> Failure:
    """Returns the failure of a run that another rank gave up, without the states in that rank's news."""
    kinds = {kind.__name__: kind for kind in (NoProgress, TaskFailed)}
    kind = kinds.get(news.kind, PeerLost)
    claims = dict(news.lost) if kind is PeerLost else {}
    return Failure(kind, news.summary, list(states), origin=news.origin, claims=claims)


def lost_summary(layout: Layout, rank: int, reason: str) -> str:
    units = layout.units_of(rank)
    if layout.data > 1 or len(units) == 1:
        hosted = " and ".join(name_unit(unit, layout.stages_of_replica) for unit in units)
    else:
        hosted = f"stages {', '.join(map(str, units))}"
    return f"rank {rank} ({hosted}) was lost: {reason}"


class FailureReport:
    """The end of a run that cannot go on; everything but ``wait`` happens on the event loop.

    Args:
        peers: the other processes; None if there are none.
        deadline_s: the silence deadline; half of it bounds the wait for other ranks.
        states: returns the states of this rank's stages.
        ended: called once with the error, when the report is complete.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        peers: "Peers | None",
        deadline_s: float,
        states: Callable[[], list[StageState]],
        ended: Callable[[RunFailed], None],
    ) -> None:
        self._loop, self._peers, self._states, self._ended = loop, peers, states, ended
        self._wait_s = min(_GATHERING_S, deadline_s / 2)
        self._complete = Event()
        self._untold: FailureNews | None = None
        self.failing: Failure | None = None
        """The failure for which the run is being given up; None while it goes on."""
        self.error: RunFailed | None = None
        """The error that ends the run, once it is known."""

    def begin(self, failure: Failure) -> None:
        """Announces a failure to the other ranks and waits for their reports; only the first failure counts."""
        if self.failing is not None:
            return
        self.failing = failure
        if self._peers is not None:
            # before all else, so that nothing can keep the end from coming
            self._loop.call_later(self._wait_s, self._end)
            own = {self._peers.rank: failure.states[:_MAX_STATES]}
            self._peers.announce(failure.news(own, failure.claims or failure.lost, self._peers.rank))
        self._end_when_complete()

    def heard(self, news: FailureNews) -> None:
        assert self._peers is not None
        self.begin(failure_elsewhere(news, [] if self.failing else self._states()))
        assert self.failing is not None
        if (new := self.failing.hear(news, self._peers.rank)) is not None:
            if self._untold is None:
                self._untold = new
                self._loop.call_later(_COLLECTING_S, self._tell)
            else:
                self._untold.states.update(new.states)
        self._end_when_complete()

    def lost(self, rank: int, reason: str) -> None:
        """Takes note that another rank died or fell silent; every rank notices by itself."""
        assert self._peers is not None
        if self.failing is None:
            self.begin(lost_rank(self._peers.layout, rank, reason, self._states()))
        else:
            self.failing.lost.setdefault(rank, reason)
            self._end_when_complete()

    def broken(self, text: str) -> None:
        """Takes note that the network broke between ranks that live, which outweighs claims of losses."""
        if self.failing is None:
            self.begin(Failure(PeerLost, text, self._states()))
        elif self.failing.kind is PeerLost or isinstance(self.failing.cause, TransportFailed):
            self.failing.kind, self.failing.summary = PeerLost, text
            self.failing.claims.clear()
            self._end_when_complete()

    def wait(self) -> RunFailed:
        """Blocks until the report is complete and returns the error. For other threads, after :meth:`begin`."""
        wait_for(self._complete)
        assert self.error is not None
        return self.error

    def _tell(self) -> None:
        if self._untold is not None:
            assert self._peers is not None
            untold, self._untold = self._untold, None
            self._peers.announce(untold)

    def _end_when_complete(self) -> None:
        assert self.failing is not None
        peers = self._peers
        if peers is None or peers.others_go_on or self.failing.is_complete(peers.layout, peers.rank):
            self._end()

    def _end(self) -> None:
        if self.error is None:
            assert self.failing is not None
            self._tell()
            if self._peers is not None:
                self.failing.answer(self._peers.rank)
            self.error = self.failing.error(None if self._peers is None else self._peers.layout)
            self._complete.set()
            self._ended(self.error)
