"""This process's part in a run: the units that it hosts, their devices, and the connections to other processes.

A run of one process needs nothing but devices. In a run of several, :class:`Process` takes the steps that must come in
this order: connect to the others and watch them, start JAX, start pipelines one by one.

**Start of JAX.** Where a program runs over devices of several processes, they all start JAX together, at its
coordination service. Where none does (:meth:`rrfp_jax.layout.Layout.needs_collectives`), each process has a JAX of its
own, to which it is process 0 of 1: there is no service, whose death would abort all. Its devices then stand for those
of the other processes, since of the shardings at the far ends of edges only the index maps are read.
"""

import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import jax

from rrfp_jax.cluster.config import TRANSPORTS, PeerAddress, Selection, host_of
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, pack_plain, unpack_plain
from rrfp_jax.core import Message, MessageKind, StageArbiter
from rrfp_jax.field_rules import typed
from rrfp_jax.layout import ControlTree, Layout, whole_tree
from rrfp_jax.programs.target import devices_for
from rrfp_jax.readable import format_bytes
from rrfp_jax.runtime.cluster import Cluster, StartFailed
from rrfp_jax.runtime.control_plane import Peers, StopRequests, control_neighbours
from rrfp_jax.runtime.driver import PipelineRuntime
from rrfp_jax.runtime.failure import RunFailed
from rrfp_jax.runtime.mailbox import SendArray
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.recovery import RecoveringRuntime
from rrfp_jax.runtime.stage_threads import StageExecutor
from rrfp_jax.runtime.start_jax import check_found_devices, check_same_platform
from rrfp_jax.runtime.transports import (
    ArrayEdge,
    Deliver,
    Failed,
    PipelineTransport,
    partners,
)
from rrfp_jax.runtime.transports.transfer import (
    LOCKED_BYTES,
    ServerProbe,
    TransferServer,
    describe_transfers,
    try_transfers,
    why_untried,
)
from rrfp_jax.schedules import PipelineGraph, Placement
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_FAREWELL_S = 1.0
_LATENCIES_FORESEEN = 4.0
"""Foresight needs tasks that usually take this many times as long as an announcement."""
_HOP_S = 60e-6
"""Seconds that an event takes into the loop, where all stages are in one process: 35 to 60 us in the median of 500
calls of ``call_soon_threadsafe``, from calling it to being called, on two busy cores."""
_TIMER_S = 1e-3
"""The loop's timers come in whole milliseconds."""
_MAX_BYTES, _MESSAGE_BYTES = 1 << 30, 1 << 10
"""Most bytes that are packed, and the part of a message that data leave to the rest."""
_CONTROL_ONLY = (MessageKind.REPORT, MessageKind.VERDICT, MessageKind.TAKEN)


class Process:
    """One process of a run.

    Args:
        layout: the degrees of parallelism and the number of processes.
        cluster: this process's place among several, joined and not yet connected; None: it is the only one.
        devices: the devices of the layout, see :meth:`use_devices`.
        num_devices: the number of devices that each process takes; None: one for each that the layout asks of it. Where
            they are fewer, stages share them.
        transport: the way of arrays between processes: ``auto``, ``sockets`` or ``transfer``.
        patience_s: seconds for which this process waits at the start for others, which may never come so far.
        on_failure: called on the event loop, beside the futures that fail, when a run is given up.

    Raises ValueError where the cluster is not of the layout's size, and for a transport or number of devices that
    cannot be.
    """

    @typed
    def __init__(
        self,
        layout: Layout,
        cluster: Cluster | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        num_devices: int | None = None,
        transport: Selection = "auto",
        patience_s: float = 3600.0,
        on_failure: Callable[[RunFailed], None] | None = None,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"the transport is '{transport}': choose one of {', '.join(TRANSPORTS)}")
        if not patience_s > 0:
            raise ValueError(f"patience_s is {patience_s}: give a positive number of seconds")
        num_ranks = 1 if cluster is None else cluster.num_ranks
        if layout.num_ranks != num_ranks:
            raise ValueError(f"the layout is for {layout.describe()}, but {num_ranks} have been started")
        self.layout, self.cluster = layout, cluster
        if num_devices is not None and num_devices < 1:
            raise ValueError(f"{num_devices} devices are asked of each process: give at least 1")
        if num_devices is not None and num_devices > layout.devices_per_rank:
            raise ValueError(
                f"{num_devices} devices are asked of each process, and {layout.describe()} multiply to "
                f"{layout.devices_per_rank} for each: give axes that multiply to {num_devices}, or devices "
                f"{layout.devices_per_rank}"
            )
        self.is_here = True
        """Whether the devices can run programs, and not only be compiled for."""
        self.num_devices = num_devices or layout.devices_per_rank
        """Number of devices that each process takes."""
        self.rank = 0 if cluster is None else cluster.rank
        self.units = layout.units_of(self.rank)
        """The units of which this process hosts devices."""
        self.peers = None if cluster is None else Peers(cluster.network, layout)
        self.stop_requests = StopRequests(None if cluster is None else cluster.network, layout)
        self._selection, self._patience_s, self._on_failure = transport, patience_s, on_failure
        self._devices: tuple[jax.Device, ...] | None = None
        self._runtime: PipelineRuntime | None = None
        self._server: TransferServer | None = None
        self._transport: PipelineTransport | None = None
        """Transport of the runtime that was started last."""
        self._num_gatherings = 0
        self.brought: dict[str, Any] = {}
        """Data that this rank has brought to gatherings before the first step, by name, for those that come back."""
        self._told: dict[int, dict[str, Any]] = {}
        """The data that all ranks brought, where this process comes back."""
        if cluster is not None and cluster.comes_back:
            assert self.peers is not None
            if len(cluster.told) < num_ranks:
                raise ValueError(f"rank {self.rank} cannot come back: the others told too much at the start to be kept")
            self._told = {rank: unpack_plain(data) for rank, data in cluster.told.items()}
            others = [rank for rank in range(num_ranks) if rank != self.rank]
            self.peers.tree = ControlTree(self.rank, (*others, self.rank))
            self.peers.gather = self.gather_alone  # type: ignore[method-assign, assignment]
        self._by_transfer = frozenset[int]()
        """Ranks to which arrays go by transfer."""
        self.may_recover = True
        """Whether replicas are copies of each other, so that the others of one that is lost have its state."""
        self.recovery: RecoveringRuntime | None = None
        """Goes on where ranks are lost; None: the run ends with the first of them."""
        if devices is not None:
            self.use_devices(devices)

    @classmethod
    @typed
    def alone(cls, num_stages: int) -> "Process":
        """The only process, with a device for each stage; stages share devices evenly where these are fewer."""
        known = jax.local_devices()
        layout = Layout(num_stages=num_stages)
        return cls(layout, devices=[known[index] for index in layout.shared_devices(0, len(known))])

    @classmethod
    @typed
    def compile_only(cls, layout: Layout, device: str) -> "Process":
        """A process that compiles a pipeline for an accelerator by name that is not here, and can run nothing.

        All stages have the same devices, so that programs which are alike are compiled once. Raises ValueError as
        :func:`rrfp_jax.programs.target.devices_for`.
        """
        numbers = layout.replicas or (layout.data,) * layout.num_stages
        sizes = [number * layout.unit_size for number in numbers]
        devices = devices_for(device, max(sizes))
        process = cls(layout, devices=[each for size in sizes for each in devices[:size]])
        process.is_here = False
        return process

    @property
    def recovers(self) -> bool:
        """Whether a pipeline goes on without ranks that are lost: each has a JAX of its own, and stages have equal
        replicas."""
        return self.may_recover and self.layout.data > 1 and self.cluster is not None and not self.cluster.together

    @property
    def comes_back(self) -> bool:
        """Whether this process takes the place of a lost one, in a run under way, and does not take part so far."""
        if self.cluster is None or not self.cluster.comes_back:
            return False
        return self.recovery is None or not self.recovery.takes_part

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that live, ascending."""
        return (0,) if self.peers is None else self.peers.living

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank that lives: the one that prints, and writes a run's files."""
        return self.rank == self.living[0]

    # -- start -------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connects to the other processes, and notices from now on when one dies. Raises StartFailed.

        A process that comes back connects later (:meth:`enter_run`).
        """
        if self.cluster is None or self.comes_back:
            return
        groups = {rank for unit in self.units for rank in self.layout.ranks_of(unit)}
        self.cluster.connect(groups.union(control_neighbours(self.rank, self.layout.num_ranks)))
        assert self.peers is not None
        with self._meeting():
            self.peers.clocks.synchronise(deadline_s=self._patience_s)

    def enter_run(self, living: Sequence[int], numbers: Mapping[int, int]) -> None:
        """Connects a process that comes back to the living ranks, whose processes have these numbers if not 0."""
        assert self.cluster is not None
        absent = {*range(self.layout.num_ranks)}.difference(living)
        self.cluster.connect(living, wait=False, absent=absent, numbers=numbers)
        self._watch()
        self.cluster.network.open_direct_connections(living)

    def take_up(self, rank: int, number: int, address: PeerAddress) -> None:
        """Exchanges messages with the new process of a rank that was lost; not on the event loop."""
        assert self.cluster is not None
        done = threading.Event()
        self._by_transfer -= {rank}  # Its server is gone; sockets work everywhere.
        self.cluster.network.take_up(rank, number, address, done.set)
        wait_for(done)

    def start_jax(self, platform: str | None, *, pinned: bool = False) -> None:
        """Starts JAX, in all processes together if the cluster was joined for that.

        Raises ValueError where devices are missing or of different kinds, or programs over several processes need a
        joint start, and StartFailed.
        """
        if self.cluster is None:
            return
        # Joined apart, the replicas of a stage add up by messages, which a pipeline checks.
        spans = self.layout.needs_collectives(sums_by_messages=not self.cluster.together)
        # Collectives of GPUs know no two processes on one device.
        if platform != "cpu" and self.cluster.config.processes_per_device > 1 and spans:
            raise ValueError(
                f"processes_per_device is {self.cluster.config.processes_per_device}, but a stage's devices "
                f"lie in several processes ({self.layout.describe()}), whose collectives need devices of their own: "
                "start fewer processes, or fewer devices for each stage"
            )
        if spans and not self.cluster.together:
            raise ValueError(
                f"a stage's devices lie in several processes ({self.layout.describe()}), so these compute together: "
                "join the cluster with together=True"
            )
        own = self.cluster.initialize_jax(platform, self.num_devices, pinned=pinned)
        if not self.cluster.together:
            found = self.gather("devices", [own[0].platform, len(own)])
            ranks = [rank for rank, (_, count) in found.items() for _ in range(count)]
            check_found_devices(self.rank, self.rank, ranks, self.layout.num_ranks, self.num_devices)
            check_same_platform({rank: name for rank, (name, _) in found.items()})

    @typed
    def use_devices(self, devices: Sequence[jax.Device]) -> None:
        """Sets the devices of the layout; by default they are each process's first ones.

        They come in the order in which the layout numbers them. Raises ValueError on another number.
        """
        if len(devices) != self.layout.num_devices:
            raise ValueError(
                f"{len(devices)} devices are given for {self.layout.describe()}: give {self.layout.num_devices}"
            )
        self._devices = tuple(devices)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Every device of the layout, also those of other processes, for which this one's stand if JAX is its own."""
        if self._devices is None:
            by_rank: dict[int, list[jax.Device]] = {}
            if self.cluster is not None and not self.cluster.together:
                by_rank = dict.fromkeys(range(self.layout.num_ranks), jax.local_devices())
            else:
                for device in sorted(jax.devices(), key=lambda device: (device.process_index, device.id)):
                    by_rank.setdefault(device.process_index, []).append(device)
            for rank in range(self.layout.num_ranks):
                found = by_rank.get(rank, [])
                if len(found) < self.num_devices:
                    platform = f" {found[0].platform}" if found else ""
                    raise ValueError(
                        f"{self.layout.describe()} need {self.num_devices} devices for each process, but rank {rank} "
                        f"has {len(found)}{platform} {'device' if len(found) == 1 else 'devices'}: lower the degrees "
                        f"of parallelism, let stages share devices (run.devices {max(1, len(found))}), or take "
                        "platform cpu for virtual ones"
                    )
            shared = {rank: self.layout.shared_devices(rank, self.num_devices) for rank in range(self.layout.num_ranks)}
            self._devices = tuple(by_rank[rank][index] for rank, indices in shared.items() for index in indices)
        return self._devices

    @property
    def device_kinds(self) -> list[str]:
        """The kind of every device of the run, once for each, however many stages or processes share it."""
        if self.cluster is None or self.cluster.together:
            return [device.device_kind for device in {*self.devices}]
        # Where each process has a JAX of its own, its devices stand for those of the others.
        of_rank = {*self.layout.shared_devices(0, self.num_devices)}
        kind = self.own_device(self.units[0]).device_kind
        return [kind] * max(1, len(of_rank) * self.layout.num_ranks // self.cluster.config.processes_per_device)

    def devices_of(self, unit: int) -> list[jax.Device]:
        """Returns a unit's devices, the first axis of its mesh innermost; those of replica 0 stand for an absent unit,
        which runs nothing."""
        numbers = self.layout.devices_of(unit) or self.layout.devices_of(self.layout.stage_of(unit))
        return [self.devices[index] for index in numbers]

    def replicas_here(self, stage: int) -> tuple[int, ...]:
        """Returns the replicas of a stage that this process hosts, ascending; the first stands for all where devices
        are only compiled for, which are alike."""
        own = [self.layout.replica_of(unit) for unit in self.units if self.layout.stage_of(unit) == stage]
        return tuple(own if self.is_here else own[:1])

    def own_device(self, unit: int) -> jax.Device:
        return next(device for device in self.devices_of(unit) if device.process_index == jax.process_index())

    def members(self) -> dict[int, tuple[int, int]]:
        """Returns, for every hosted unit, this process's number in the unit's group, and the size of the group."""
        groups = {unit: self.layout.ranks_of(unit) for unit in self.units}
        return {unit: (ranks.index(self.rank), len(ranks)) for unit, ranks in groups.items()}

    def shortest_foreseen_s(self) -> float:
        """Returns the seconds that a stage's tasks must usually take at least for announcements to be of use here.

        An announcement must be heard well before the task that it announces has ended, and a hold ends by a timer.
        Every rank decides by its own measurements: others do not wait for long for a stage that does not announce.
        """
        trip_s = None if self.peers is None else self.peers.clocks.round_trip_s
        return max(_LATENCIES_FORESEEN * (_HOP_S if trip_s is None else trip_s / 2), _TIMER_S)

    # -- running -----------------------------------------------------------------------------------------------------

    def start(
        self,
        arbiters: Sequence[StageArbiter],
        make_stage: Callable[[int, SendArray], StageExecutor],
        options: RuntimeOptions,
        *,
        edge: Callable[[Message, int], ArrayEdge | None],
        num_buckets: int = 1,
        just_in_time: bool = False,
        delay_s: Callable[[Message], float] | None = None,
        others_live: bool = True,
    ) -> PipelineRuntime:
        """Starts the hosted units' actors, and blocks until all processes have started theirs.

        Args:
            arbiters: one for each hosted unit.
            make_stage: builds a unit's executor.
            edge: returns the content of a message of a bucket and its shardings at both ends; None for plain data.
            num_buckets: the number of shapes that microbatches may have.
            just_in_time, delay_s: see :class:`PipelineRuntime`, for which the options are, too.
            others_live: False after a loss: nobody is waited for.

        Raises RunFailed where another process is lost meanwhile.
        """
        if self.cluster is not None and self._transport is not None:
            self._transport.close()  # One pipeline after another takes the messages of others.
        placement, messages = arbiters[0].placement, _messages(arbiters)
        if options.other_owners:
            messages = _between_replicas(messages, arbiters[0].graph, placement, {a.stage for a in arbiters})
        if others_live:
            self._by_transfer = self._connect_stages(placement, messages)

        def make_transport(deliver: Deliver, failed: Failed) -> PipelineTransport:
            self._transport = PipelineTransport(
                layout=self.layout,
                placement=placement,
                rank=self.rank,
                network=None if self.cluster is None else self.cluster.network,
                edge=lambda message, bucket: None if message.kind in _CONTROL_ONLY else edge(message, bucket),
                deliver=deliver,
                failed=failed,
                num_buckets=num_buckets,
                server=self._server,
                transfer_ranks=self._by_transfer,
            )
            self._transport.prepare(messages)
            return self._transport

        self._runtime = runtime = PipelineRuntime(
            arbiters,
            make_stage,
            make_transport,
            options,
            just_in_time=just_in_time,
            delay_s=delay_s,
            loop=None if self.cluster is None else self.cluster.loop,
            stages_of_replica=self.layout.stages_of_replica,
            peers=self.peers,
            on_failure=self._on_failure,
        )
        if self.cluster is not None and others_live:
            self._watch()
            self.gather("start")
        return runtime

    def _watch(self) -> None:
        assert self.cluster is not None
        loop = self.cluster.loop.loop

        def left(rank: int) -> None:
            # The last messages of a rank that has ended in good order may still be on the way.
            loop.call_later(_FAREWELL_S, self._has_left, rank)

        self.cluster.watch(self._lost, left, self._broken)

    def losses_first(self) -> AbstractContextManager[None]:
        """Encloses work of JAX with other processes before :meth:`start`: where one of them dies, that is the error."""
        if self.cluster is None or self._runtime is not None:
            return nullcontext()
        return self.cluster.losses_first()

    def bytes_in_transit(self) -> int:
        """Returns the bytes that this process holds of messages on their way to or from other processes."""
        return 0 if self._transport is None else self._transport.held.sent + self._transport.held.received

    @property
    def peak_transport_bytes(self) -> int:
        """Most bytes that this process has held of messages of its latest pipeline on their way between processes."""
        return 0 if self._transport is None else self._transport.held.peak

    def gather(self, name: str, data: Any = None, *, to_all: bool = True) -> dict[int, Any]:
        """Brings plain data and returns the data of all ranks, by rank; see :meth:`TreeAllGather.gather`.

        All processes call this in the same order, from one thread. Blocks as long as all of them live. Raises RunFailed
        where one is lost, and StartFailed before anything runs.
        """
        if self.peers is None:
            return {0: data}
        self._num_gatherings += 1
        if self.recovery is not None:
            return self.recovery.gather(name, data)
        if self.comes_back:
            return self.gather_alone(name, data)
        if self.recovers:
            self.brought[name] = data
        with self._meeting():
            return self.peers.gather(f"{name} {self._num_gatherings}", data, to_all=to_all)

    def packed_brought(self) -> bytes:
        """Returns ``brought``, packed; empty where it is too much, or this process comes back itself."""
        packed = b"" if self.comes_back else pack_plain(self.brought, _MAX_BYTES)
        return packed if len(packed) <= MAX_HEADER_BYTES - _MESSAGE_BYTES else b""

    def gather_alone(self, name: str, data: Any = None) -> dict[int, Any]:
        """Returns the data that all ranks brought to a gathering before the first step, while this process comes back.

        Where they brought none under this name, they are taken to agree with this process.
        """
        ranks = range(self.layout.num_ranks)
        return {rank: self._told.get(rank, {}).get(name, data) for rank in ranks} | {self.rank: data}

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Encloses work of all processes together: where one is lost, that is the error."""
        try:
            yield
        except ConnectionError as error:
            if self._runtime is None:
                raise StartFailed(f"rank {self.rank} cannot start: {error}") from error
            raise self._runtime.wait_for_failure(str(error)) from error

    def whole_timeline(self, own: Timeline) -> Timeline:
        """Returns the record of all units, on rank 0's clock, made of the records of all processes.

        All processes call this; only the first that lives gets all, the others their own back.
        """
        if self.peers is None:
            return own
        if self.recovery is None:  # Where ranks may be lost meanwhile, a minute's drift counts less.
            with self._meeting():
                self.peers.clocks.synchronise()
        whole = Timeline(own.num_stages)
        for unit in self.units:
            if self.layout.ranks_of(unit)[0] == self.rank:
                whole.extend(own.of_stage(unit))
        plain = whole.as_plain(later_s=self.peers.clocks.offset_s)
        everybody = self.gather("timelines", plain, to_all=False)
        if not self.is_first:
            return own
        for rank in everybody.keys() - {self.rank}:
            whole.extend(Timeline.from_plain(own.num_stages, everybody[rank]))
        return whole

    def finish(self) -> None:
        """Ends in good order: blocks until all processes have come so far, and leaves. Raises RunFailed as
        ``gather``."""
        self.gather("end")
        if self.recovery is not None:
            self.recovery.leave()
        self.close()

    def close(self) -> None:
        """Leaves the run; others that are not done yet take it for a failure."""
        if self.recovery is not None:
            self.recovery.end()
        if self.cluster is not None:
            self.cluster.watch(lambda rank, reason: None)
        if self._transport is not None:
            self._transport.close()
        if self.cluster is not None:
            self.cluster.close()

    def _connect_stages(self, placement: Placement, messages: Sequence[Message]) -> frozenset[int]:
        """Connects to the ranks with which such messages are exchanged; returns those to which arrays go by transfer.

        Raises StartFailed where transfer is asked for and does not work.
        """
        if self.cluster is None:
            return frozenset()
        network, stages = self.cluster.network, partners(self.layout, placement, self.rank, messages)
        if self.recovers:
            stages = {*range(self.layout.num_ranks)}  # any of them may come to need any other
        network.open_direct_connections(stages.union(whole_tree(self.rank, self.layout.num_ranks).neighbours))
        if self._selection == "sockets":
            return frozenset()
        arrays = [message for message in messages if message.kind not in _CONTROL_ONLY]
        others = partners(self.layout, placement, self.rank, arrays)
        device = self.own_device(self.units[0])

        def start() -> ServerProbe:
            self._server = self._server or TransferServer(host_of(network.address))
            return ServerProbe(self._server, self.rank, device)

        why_not = None
        if self._selection != "transfer":
            why_not = why_untried(device.platform, encrypts=self.cluster.config.encrypt_arrays)
        found = try_transfers(self.gather, self.rank, others, why_not or start)
        refused = {pair: why for pair, why in found.items() if why}
        working = {rank for pair in found.keys() - refused.keys() if self.rank in pair for rank in pair}
        if not working and self._server is not None:  # It may lock much memory.
            self._server.close()
            self._server = None
        if self._selection == "transfer" and refused:
            (one, other), why = next(iter(refused.items()))
            raise StartFailed(
                f"transport transfer does not work between rank {one} and rank {other}: {why}; give transport auto, "
                "which takes sockets there"
            )
        if not self.rank:
            locked = ""
            if len(refused) < len(found):
                locked = f"; each process that does so sets aside {format_bytes(LOCKED_BYTES)} of locked host memory"
            _LOG.info("%s%s", describe_transfers(found), locked)
        return frozenset(working - {self.rank})

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _lost(self, rank: int, reason: str) -> None:
        assert self.peers is not None
        if self.recovery is not None:
            self.recovery.suspect(rank, reason)
            return
        self.peers.lose(f"rank {rank} was lost: {reason}")
        if self._runtime is not None:
            self._runtime.failure.lost(rank, reason)

    def _broken(self, text: str) -> None:
        """Ends the run, since ranks that live no longer hear each other."""
        assert self.peers is not None
        self.peers.lose(text)
        if self._runtime is not None:
            self._runtime.failure.broken(text)

    def _has_left(self, rank: int) -> None:
        assert self.peers is not None
        if self.recovery is not None:
            return  # its process has ended, which the head knows
        if self._runtime is not None and self._runtime.steps:
            self._lost(rank, "it ended while a step was under way")
        else:
            self.peers.lose(f"rank {rank} has ended")


def _messages(arbiters: Iterable[StageArbiter]) -> list[Message]:
    """Returns one message for each way between chunks of different units, so that all is prepared before the first
    step."""
    ways: dict[tuple[MessageKind, int, int], Message] = {}
    for arbiter in arbiters:
        for evaluates in (False, True) if arbiter.evaluation_batches else (False,):
            plan = arbiter.plan_without((), evaluates=evaluates).plan
            sent = (message for sends in plan.sends for message, _ in sends)
            for message in (*sent, *plan.arrivals):
                ways.setdefault(message[:3], message)
    return list(ways.values())


def _between_replicas(
    messages: Sequence[Message], graph: PipelineGraph, placement: Placement, hosted: Container[int]
) -> list[Message]:
    """Returns these messages, and one for each way that they may go to and from other replicas of the same chunks."""
    ways, copies = {message[:3]: message for message in messages}, range(graph.num_replicas)
    for message in messages:
        if message.kind not in (MessageKind.ACTIVATION, MessageKind.GRADIENT, MessageKind.TAKEN):
            continue
        first, second = (chunk - chunk % len(copies) for chunk in (message.source, message.target))
        for source, target in product(copies, repeat=2):
            other = message._replace(source=first + source, target=second + target)
            if any(placement.stage_of_chunk[chunk] in hosted for chunk in (other.source, other.target)):
                ways.setdefault(other[:3], other)
    return list(ways.values())
