"""A rank's way into its run: the rendezvous, connections, the watch over the others, and only then JAX.

The order keeps every failure visible. Before the rendezvous is complete nothing can hang for longer than its deadline;
from :meth:`Cluster.connect` on, a separate thread notices the death of another rank, also while this one waits inside
JAX or compiles.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rrfp_jax.cluster import (
    JoinRequest,
    Member,
    PeerAddress,
    PeerNetwork,
    RendezvousFailed,
    RunKey,
    meet,
)
from rrfp_jax.cluster.config import (
    ATTEMPT,
    COORDINATOR,
    DETECT,
    INTERFACE,
    NUM_RANKS,
    PROCESS_NUMBER,
    RANK,
    RENDEZVOUS,
    ClusterConfig,
    Membership,
    host_of,
)
from rrfp_jax.cluster.coordination_service import SERVICE_SECURITY, service_security, service_warning
from rrfp_jax.cluster.host import await_name, is_misleading, own_address
from rrfp_jax.cluster.loop_thread import LoopThread
from rrfp_jax.cluster.rendezvous import name_hosts
from rrfp_jax.exit_codes import PEER_LOST, print_fatal_message
from rrfp_jax.runtime.jax_environment import flags_agreed, settings_agreed

if TYPE_CHECKING:
    import jax

_LOG = logging.getLogger(__name__)
_PAUSE_S, _MOMENT_S = 0.1, 0.5
_MORE_LOSSES_S = 0.2
_FAREWELL_S = 1.0
_NOTICED_S = 2.0
"""Time within which a closed connection is noticed."""


class StartFailed(RuntimeError):
    """The processes of the run could not be brought together; the text says who is missing and what differs."""


def join(
    membership: Membership,
    configuration: Mapping[str, Any],
    config: ClusterConfig,
    *,
    key: RunKey | None = None,
    together: bool = True,
) -> "Cluster":
    """Meets all other ranks; returns when all have come with the same configuration.

    Args:
        configuration: plain data that must be the same on all ranks, beside JAX's version, flags and settings.
        key: the key of the run; by default from ``RRFP_RUN_KEY`` or ``RRFP_RUN_KEY_FILE``.
        together: whether the ranks will start JAX together, as programs over several of them need; else each has a
            JAX of its own.

    Raises:
        StartFailed: if ranks are missing or differ, or the rendezvous cannot be reached or refuses the key.
        ValueError: if no usable key is given, the interface is none of this host, or the name of the head leads to
            loopback here and nothing else is named to listen on.
    """
    key = RunKey.from_environment() if key is None else key
    host, port = membership.meeting_place()
    await_name(host, config.start_deadline_s, _LOG.warning)
    network = PeerNetwork(
        rank=membership.rank,
        num_ranks=membership.num_ranks,
        key=key,
        config=replace(config, interface=membership.interface or config.interface or own_address(host, port)),
        number=membership.number,
    )
    if is_misleading(host, port):  # the head is here, and listens on the interface that was named
        membership = membership.meeting_at(host_of(network.address).strip("[]"))
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # The system is not Linux.
        boot = ""
    member = Member(
        rank=membership.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        address=vars(network.address),
        boot=boot,
        number=membership.number,
    )
    # Ranks with other versions, flags or settings of JAX may compile different programs, and then wait for each other,
    # or begin with other parameters.
    about_jax = {"version of jax": version("jax"), **flags_agreed(os.environ), **settings_agreed(os.environ)}
    if together:
        about_jax[SERVICE_SECURITY] = service_security()
    request = JoinRequest.of(member, membership.num_ranks, {**configuration, **about_jax}, needs_service=together)
    brought: dict[int, bytes] = {}
    try:
        members = meet(membership.rendezvous, request, key, deadline_s=config.start_deadline_s, brought=brought)
        addresses = {other.rank: PeerAddress(**other.address) for other in members}
    except BaseException as error:
        network.close(linger_s=0)
        if isinstance(error, RendezvousFailed):
            raise StartFailed(str(error)) from error
        raise
    return Cluster(
        membership, config, network, addresses, name_hosts(members), key=key, together=together, told=brought
    )


class Cluster(AbstractContextManager["Cluster"]):
    """This process's place among all that have met. Made by :func:`join`; close it, or use it as a context manager.

    ``loop`` runs from the start, ``network`` from :meth:`connect` on, so that topics can be subscribed to before.
    ``addresses`` and ``hosts`` say where each rank is. ``config`` and ``key`` are those that all ranks have met with.
    ``together`` says whether they start JAX together. ``told`` has the data that each rank has brought to gatherings
    before the first step, packed, where this process comes back to a run under way.
    """

    def __init__(
        self,
        membership: Membership,
        config: ClusterConfig,
        network: PeerNetwork,
        addresses: Mapping[int, PeerAddress],
        hosts: tuple[str, ...],
        *,
        key: RunKey,
        together: bool = True,
        told: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        self.told = told
        self.rank, self.num_ranks = membership.rank, membership.num_ranks
        self.membership, self.network, self.addresses, self.hosts = membership, network, dict(addresses), hosts
        self.loop = LoopThread()
        self.config, self.key, self.together = config, key, together
        self._on_lost: Callable[[int, str], None] = self._give_up
        # A rank that has ended counts as lost, unless it has ended for one that was lost before.
        self._on_left: Callable[[int], None] = lambda rank: (
            None if self._losses else self._give_up(rank, "it has ended")
        )
        self._on_broken: Callable[[str], None] = partial(self._give_up, None)
        self._broken: str | None = None
        self._losses: dict[int, str] = {}
        self._has_lost = threading.Event()
        self._ending: asyncio.TimerHandle | None = None
        self._is_connected = False
        self._closing = threading.Lock()
        self._is_closed = False

    def watch(
        self,
        lost: Callable[[int, str], None],
        left: Callable[[int], None] | None = None,
        broken: Callable[[str], None] | None = None,
    ) -> None:
        """Sets the functions that are called, on the event loop, with a rank that died, with one that ended in good
        order, and with a sentence about ranks that live but no longer hear each other.

        Before the first call, each of these events ends this process with exit code 5 and one sentence. Losses that
        came before a call are passed on to the new functions.
        """
        self._on_lost, self._on_left = lost, left or (lambda rank: None)
        self._on_broken = broken or (lambda text: lost(self.rank, text))
        with suppress(RuntimeError):  # the loop is closed: nothing comes any more
            self.loop.loop.call_soon_threadsafe(self._hand_over)

    @property
    def comes_back(self) -> bool:
        """Whether this process takes the place of one that was lost, in a run under way."""
        return self.membership.number > 0

    def connect(self, ranks: Iterable[int] | None = None, *, wait: bool = True, **more: Any) -> None:
        """Starts the network on ``loop`` and blocks until every connection stands.

        Args:
            ranks: the ranks to exchange messages with, see :meth:`PeerNetwork.start`; more can be added later.
            wait: False returns at once.
            more: further arguments of :meth:`PeerNetwork.start`.

        Raises:
            StartFailed: if another rank cannot be reached, or ends meanwhile.
        """
        self.network.start(
            self.loop.loop,
            self.addresses,
            connections=ranks,
            hosts=self.hosts,
            lost=lambda rank, reason: self._on_lost(rank, reason),  # noqa: PLW0108 - may be handed over
            left=lambda rank: self._on_left(rank),  # noqa: PLW0108 - may be handed over
            broken=lambda text: self._on_broken(text),  # noqa: PLW0108 - may be handed over
            **more,
        )
        try:
            if wait:
                self.network.wait_connected(self.config.start_deadline_s)
        except ConnectionError as error:
            self.close()
            raise StartFailed(str(error)) from error
        self.loop.call(self._has_connected)

    def initialize_jax(
        self, platform: str | None, num_local_devices: int, *, pinned: bool = False
    ) -> tuple["jax.Device", ...]:
        """Starts JAX, where ``together`` in all processes at once; after :meth:`connect`, before anything else uses
        JAX's devices.

        Args:
            platform: ``cpu`` for virtual devices, else as JAX names it; None: any that JAX finds.
            num_local_devices: number of devices that every rank must have.
            pinned: fix the size of XLA's CPU thread pools unless ``NPROC`` does, so that sums do not depend on it.

        Returns:
            This rank's first ``num_local_devices`` devices; fewer where it has not so many and JAX is its own.

        Raises:
            ValueError: if a rank that starts JAX with others has too few devices, or JAX sees CPU devices only on a
                host with more.
            StartFailed: if the coordination service cannot be reached.
        """
        if not self._is_connected and not self.comes_back:
            raise RuntimeError("JAX would wait in vain for a rank that dies: call connect first")
        from rrfp_jax.runtime.start_jax import explaining_plugins, naming_neighbours, start_jax_on_rank

        own_host = host_of(self.network.address).strip("[]")
        if self.rank == 0:
            _LOG.info("%s", "all processes start JAX together" if self.together else "each process has its own JAX")
        if self.together:
            warning = service_warning(self.membership.coordinator, own_host)
            if warning is not None and self.rank == 0:
                _LOG.warning("%s", warning)
            self._await_coordinator()
        with naming_neighbours(self.rank, self.hosts, platform), explaining_plugins(), self.losses_first():
            return start_jax_on_rank(self, platform, num_local_devices, listen_on=own_host, pinned=pinned)

    @contextmanager
    def losses_first(self) -> Iterator[None]:
        """Wraps JAX's joint work with other ranks, until the first call of :meth:`watch`.

        If it fails because one of them has died, JAX's error is but a consequence, and may come first: this process
        then ends for the loss.
        """
        try:
            yield
        except RuntimeError:
            if self._has_lost.wait(_NOTICED_S):
                time.sleep(_NOTICED_S)  # the end is on its way
            raise

    def close(self) -> None:
        """Says farewell to the others and frees sockets and threads; JAX's backends stay until the process ends."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self.watch(lambda rank, reason: None)
        self.network.close()
        self.loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_coordinator(self) -> None:
        """Blocks until the coordination service answers. JAX by itself would go on trying without a word."""
        host, _, port = self.membership.coordinator.rpartition(":")
        until_s = time.monotonic() + self.config.start_deadline_s
        while True:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_MOMENT_S).close()
                return
            except OSError as error:
                if time.monotonic() > until_s:
                    raise StartFailed(
                        f"rank {self.rank} cannot reach the coordination service at {self.membership.coordinator}: "
                        f"{error.strerror or error}"
                    ) from error
            time.sleep(_PAUSE_S)

    def _give_up(self, rank: int | None, reason: str) -> None:
        """Ends this process for a rank that was lost, or for the network (None), before anything else listens."""
        if rank is None:
            self._broken = reason
        else:
            self._losses[rank] = reason
        self._has_lost.set()
        self._end_soon()

    def _has_connected(self) -> None:
        self._is_connected = True
        if self._losses or self._broken:
            self._end_soon()

    def _end_soon(self) -> None:
        # Other ranks end for the same reason, and may be noticed before the rank that was first, so more losses are
        # waited for. Before the ranks are connected, connect raises the error.
        if self._ending is None and self._is_connected:
            self._ending = self.loop.loop.call_later(_MORE_LOSSES_S, self._end)

    def _hand_over(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        losses, self._losses = self._losses, {}
        for rank, reason in losses.items():
            self._on_lost(rank, reason)
        if self._broken is not None:
            self._on_broken(self._broken)

    def _end(self) -> None:
        losses = ", ".join(f"rank {rank} ({reason})" for rank, reason in self._losses.items())
        reason = f"rank {self.rank} lost {losses}" if self._broken is None else self._broken
        print_fatal_message(f"error: {reason} before the run had begun")
        guard = threading.Timer(_FAREWELL_S, os._exit, [PEER_LOST])
        guard.daemon = True
        guard.start()
        self.network.close(linger_s=0)
        os._exit(PEER_LOST)


_YES, _NO = ("1", "true", "yes"), ("", "0", "false", "no")


def membership_from(environ: Mapping[str, str]) -> Membership | None:
    """Returns this process's place, or None if nothing says that it is one of several.

    With ``RRFP_DETECT=1`` JAX tells the rank and the number of ranks, if ``RRFP_RANK`` does not. Raises ValueError if
    the environment is incomplete or malformed, or JAX detects nothing.
    """
    text = environ.get(DETECT, "").lower()
    if text not in (*_YES, *_NO):
        raise ValueError(f"{DETECT} is '{text}': give 1 or 0")
    detect = text in _YES
    if RANK not in environ and not detect:
        if stray := [name for name in (NUM_RANKS, RENDEZVOUS, COORDINATOR) if name in environ]:
            raise ValueError(f"{' and '.join(stray)} set but not {RANK}: set it too, or {DETECT}=1")
        return None
    if RANK in environ:
        rank, num_ranks = _number(environ, RANK), _number(environ, NUM_RANKS)
    else:
        rank, num_ranks = _detect()
    return Membership(
        rank=rank,
        num_ranks=num_ranks,
        rendezvous=_text(environ, RENDEZVOUS),
        coordinator=_text(environ, COORDINATOR),
        attempt=_number(environ, ATTEMPT) if ATTEMPT in environ else 0,
        interface=environ.get(INTERFACE) or None,
        number=_number(environ, PROCESS_NUMBER) if PROCESS_NUMBER in environ else 0,
    )


def _detect() -> tuple[int, int]:
    """Returns rank and number of ranks as JAX detects them from SLURM, Kubernetes or Open MPI. Raises ValueError if it
    detects nothing."""
    # JAX's own jax.distributed.initialize, the only public user of this, would also start the service in rank 0
    from rrfp_jax.private.jax_names import ClusterEnv

    known = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    for kind in known:
        if kind.is_env_present():
            try:
                return int(kind.get_process_id()), int(kind.get_process_count())
            except Exception as error:  # Kubernetes' client has errors of its own
                raise ValueError(
                    f"{kind.name or kind.__name__} was detected, but does not tell the rank: {error}"
                ) from error
    names = ", ".join(kind.name or kind.__name__ for kind in known)
    raise ValueError(
        f"detection is on, but JAX finds no cluster environment around this process (it knows {names}): set RRFP_RANK "
        "and RRFP_NUM_RANKS, or turn detection off"
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(
            f"this process is one of several, but {name} is not set: start it with rrfp launch, or "
            "give it the value that the supervisor prints"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} is '{text}': give a number")
    return int(text)
