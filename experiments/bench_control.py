"""Cost of the control plane on the busiest rank of a run, by the number of ranks.

::

    python -m experiments.bench --only control

The control planes of N ranks, one stage each, in one process: the real arbiters, reports and verdicts, outcomes,
gatherings and news of a failure, over a network that only counts. Data are handed over and count for nothing. A step's
bytes are independent of N, but for one number per chunk on its way to rank 0 (the norm of its gradients, added up in
one order so that the bits never differ) and one per unit (its peak memory).

Processor time is given twice. A rank's caches are warm where few ranks share them with it, and cold where thousands
have run since its last turn, which is this bench's doing and no rank's. So the busiest rank's time is taken again with
its caches emptied before each of its turns, as computing leaves them: growth that remains then is the rank's own work.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rrfp_jax.cluster.wire import pack_plain, unpack_plain
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.core import (
    HINTS,
    Event,
    FinishStep,
    InputArrived,
    Message,
    MessageKind,
    RunTask,
    Send,
    StageArbiter,
    StageSetup,
    StepStarted,
    TaskFinished,
    ready,
)
from rrfp_jax.layout import CONTROL_DEGREE, Layout
from rrfp_jax.programs.agreement import StageReport, agree, merged
from rrfp_jax.runtime.control_plane import Peers, control_neighbours
from rrfp_jax.runtime.failure import Failure, FailureReport, StageState, TaskFailed
from rrfp_jax.runtime.transports.messages import MessageKey, pack_key, unpack_key
from rrfp_jax.runtime.tree_collectives import StepStatistics
from rrfp_jax.schedules import PipelineGraph, Placement, chain, linear
from rrfp_jax.schedules.timeline import StepSums
from rrfp_jax.testing.virtual_network import VirtualNetwork, VirtualRank

NUM_RANKS = (16, 64, 256, 1024, 4096)
NUM_STEPS = 5
MAX_RANKS_FAILING = 64
"""Largest number of ranks for a failure: their reports take long in one process, and none tells of more stages."""
_CONTROL = "control"
_CACHE_BYTES = 16 << 20
"""Bytes that empty a core's caches: more than a core has of its own."""


@dataclass(frozen=True)
class Busiest:
    """Largest work of any rank, per step or at once."""

    num_sent: int
    num_received: int
    sent_bytes: int
    received_bytes: int
    handlers_s: float
    """Processor seconds of the handlers of the rank that took most."""


@dataclass(frozen=True)
class ControlCost:
    """Work of the busiest of ``num_ranks`` ranks."""

    num_ranks: int
    step: Busiest
    cold_s: float
    """The same as ``step.handlers_s``, with caches emptied before each turn of the busiest rank."""
    gathering: Busiest
    failure: Busiest | None
    num_connections: int
    """Connections to the neighbours in the control tree, to the watched ranks, and along the chain of stages."""


class ControlPlane:
    """One rank: its arbiter and its messages to others. Tasks take no time, and data are handed over."""

    def __init__(
        self, network: VirtualRank, everybody: "list[ControlPlane]", graph: PipelineGraph, placement: Placement
    ) -> None:
        self.rank, self._network, self._everybody = network.rank, network, everybody
        self._num_ranks = network.num_ranks
        layout = Layout(num_stages=self._num_ranks, num_ranks=self._num_ranks)
        self.arbiter = StageArbiter(StageSetup(graph, placement, self.rank, consumption=ready(HINTS["bf"]), window=1))
        self.peers = Peers(network, layout)  # type: ignore[arg-type]  # all that it needs
        self.failure = FailureReport(
            network,  # type: ignore[arg-type]  # its loop, too
            self.peers,
            10.0,
            lambda: [_state(self.rank)],
            lambda error: None,
        )
        self.steps = self
        self.peers.attach(self)  # type: ignore[arg-type]  # all of a driver that it needs
        self._received: dict[Message, Mapping[str, Any]] = {}
        self.ended: list[StepStatistics] = []
        network.subscribe(_CONTROL, self._control)

    def start(self, step: int) -> None:
        """Begins a step."""
        self._received.clear()
        self._network.call_soon(lambda: self._handle(StepStarted(step, 0.0)))

    # -- what Peers tells its listener -------------------------------------------------------------------------------

    def observe(self, *_: object) -> None:
        raise AssertionError("no stage spans processes or looks ahead here")

    def ended_everywhere(self, step: int, statistics: StepStatistics) -> None:  # noqa: ARG002
        self.ended.append(statistics)

    # -- a stage -----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for instruction in self.arbiter.handle(event):
            match instruction:
                case RunTask(step, task):
                    self._network.call_soon(partial(self._handle, TaskFinished(step, 0.0, task)))
                case Send(step, message, stage):
                    self._send(step, message, self._everybody[stage])
                case FinishStep(step):
                    sums = StepSums(num_stages=self._num_ranks, start_s=0.0, end_s=1.0, cost_s=1.0, work_s=0.5)
                    self.peers.statistics.add(step, sums, {self.rank: (1 << 30, 0)})

    def _send(self, step: int, message: Message, other: "ControlPlane") -> None:
        if message.kind is MessageKind.REPORT:
            payload: Mapping[str, Any] = merged([self._own_report(), *self._reports()])
        elif message.kind is MessageKind.VERDICT:
            payload = self._verdict()
        else:
            other._network.call_soon(lambda: other._handle(InputArrived(step, 0.0, message)))
            return
        self._network.send(
            other.rank, _CONTROL, {"key": pack_key(MessageKey(step, message))}, [pack_plain(payload, 1 << 28)]
        )

    def _control(self, _: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        step, message, _ = unpack_key(header["key"])
        self._received[message] = unpack_plain(frames[0], 1 << 28)
        self._handle(InputArrived(step, 0.0, message))

    def _own_report(self) -> Mapping[str, bytes]:
        losses = ((0, self.rank, 2.5, 8.0),) if self.rank == self._num_ranks - 1 else ()
        return StageReport(squared_norms=((self.rank, 1.0),), losses=losses).as_plain()

    def _reports(self) -> list[Mapping[str, Any]]:
        return [told for message, told in self._received.items() if message.kind is MessageKind.REPORT]

    def _verdict(self) -> Mapping[str, Any]:
        told = (told for message, told in self._received.items() if message.kind is MessageKind.VERDICT)
        verdict = next(told, None)
        if verdict is None:
            verdict = agree([self._own_report(), *self._reports()]).as_plain()
            self._received[Message(MessageKind.VERDICT, 0, 0)] = verdict
        return verdict


def control_cost(num_ranks: int) -> ControlCost:
    """Runs some steps, an all-gather of every rank's sizes, and a failure of the last rank."""
    network = VirtualNetwork(num_ranks, lambda rank: control_neighbours(rank, num_ranks))
    everybody: list[ControlPlane] = []
    graph, placement = chain(num_ranks, 1), linear(num_ranks)
    everybody += [ControlPlane(rank, everybody, graph, placement) for rank in network.ranks]

    def busiest(act: Callable[[], object], times: int = 1) -> Busiest:
        """Returns the work of the busiest rank. Times are the least of several counts, as more is noise."""
        seconds = [inf] * num_ranks
        gc.collect()
        gc.disable()  # a collection would be blamed on whichever rank is at work just then
        for _ in range(times):
            network.reset_counts()
            act()
            network.run()
            seconds = [min(s, rank.counts.handlers_s) for s, rank in zip(seconds, network.ranks, strict=True)]
        gc.enable()
        counts = [rank.counts for rank in network.ranks]
        return Busiest(
            num_sent=max(c.num_sent for c in counts),
            num_received=max(c.num_received for c in counts),
            sent_bytes=max(c.sent_bytes for c in counts),
            received_bytes=max(c.received_bytes for c in counts),
            handlers_s=max(seconds),
        )

    numbers = iter(range(2 * NUM_STEPS + 1))

    def one_step() -> None:
        step = next(numbers)
        for plane in everybody:
            plane.start(step)

    busiest(one_step)  # which warms up
    step = busiest(one_step, NUM_STEPS)
    most_at_work = max(network.ranks, key=lambda rank: rank.counts.handlers_s)
    cached = np.ones(_CACHE_BYTES // 8)
    network.before = lambda rank: cached.sum() if rank is most_at_work else None
    cold_s = busiest(one_step, NUM_STEPS).handlers_s
    network.before = lambda rank: None
    assert len(everybody[0].ended) == 2 * NUM_STEPS + 1
    assert len(everybody[0].ended[-1].peak_memory_bytes()) == num_ranks
    num_connections = max(len(control_neighbours(r, num_ranks) | {r - 1, r + 1}) for r in range(num_ranks))
    sizes = [[0, 1 << 30, 1 << 30, 1 << 30]], [[0, 1 << 34]]
    gathering = busiest(lambda: [plane.peers.all_gather.bring("sizes", sizes) for plane in everybody])
    failure = None
    if num_ranks <= MAX_RANKS_FAILING:
        last = everybody[-1]
        failing = Failure(TaskFailed, "step 7: 1F2 failed: RuntimeError: out of memory", [_state(last.rank)])
        failure = busiest(lambda: last._network.call_soon(lambda: last.failure.begin(failing)))
        assert all(plane.failure.error is not None for plane in everybody)
    return ControlCost(num_ranks, step, cold_s, gathering, failure, num_connections)


def bench_control(console: Console | None = None) -> list[ControlCost]:
    """Prints and returns the work of the busiest rank, for every number of ranks."""
    console = console or make_console()
    table = Table(title=f"control plane, busiest rank (tree of degree {CONTROL_DEGREE})", title_justify="left")
    for heading in ("ranks", "of", "sent", "received", "bytes sent", "bytes received", "CPU ms", "cold", "connections"):
        table.add_column(heading, justify="left" if heading == "of" else "right")
    costs = []
    for num_ranks in NUM_RANKS:
        costs.append(cost := control_cost(num_ranks))
        for what, busiest in (("a step", cost.step), ("a gathering", cost.gathering), ("a failure", cost.failure)):
            if busiest is None:
                continue
            table.add_row(
                f"{num_ranks:,}",
                what,
                *(f"{n:,}" for n in (busiest.num_sent, busiest.num_received)),
                *(f"{n:,}" for n in (busiest.sent_bytes, busiest.received_bytes)),
                f"{busiest.handlers_s * 1e3:.2f}",
                f"{cost.cold_s * 1e3:.2f}" if what == "a step" else "",
                str(cost.num_connections) if what == "a step" else "",
            )
    console.print(table)
    return costs


def _state(stage: int) -> StageState:
    return StageState(
        stage=stage,
        step=7,
        running=None,
        failed=False,
        since_s=1.0,
        idle_reason="input",
        held=(0,),
        waits=(f"{stage}F0 waits for the activation of microbatch 0 (stage {stage - 1})",),
        waits_for_stages=(stage - 1,),
        rank=stage,
    )


if __name__ == "__main__":
    bench_control()
