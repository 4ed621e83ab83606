"""A rank's and a supervisor's side of the rendezvous."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq

from rrfp_jax.runtime.network.keys import RunKey
from rrfp_jax.runtime.network.plain import MalformedMessage, field, pack, unpack
from rrfp_jax.runtime.network.rendezvous_server import (
    MAX_ANSWER_BYTES,
    MEMBER_ROLE,
    SERVER_ROLE,
    RendezvousFailed,
)
from rrfp_jax.runtime.network.roll_call import Hello, Member
from rrfp_jax.runtime.network.sockets import connect_as, connection_events, new_socket, watch

_REPEAT_S = 1.0
_MARGIN_S = 2.0
"""How much later than the rendezvous its guests give up, so that they hear its verdict."""
_MAX_REFUSALS = 3


def meet(address: str, hello: Hello, key: RunKey, *, deadline_s: float = 60.0) -> tuple[Member, ...]:
    """Go to the rendezvous at ``address`` (``tcp://host:port``) and return all members, ascending by rank.

    Blocks until the verdict, at most until the rendezvous' own deadline (once it has answered) or ``deadline_s``.

    Raises:
        RendezvousFailed: with the verdict, where ranks are missing or differ, this one is refused, the run key is not
            the rendezvous', or nobody answers.
        ValueError: where the hello is no plain data or larger than 1 MiB.
    """
    with _Guest(address, key) as guest:
        return guest.meet(pack({"kind": "hello", "hello": hello.as_dict()}), time.monotonic() + deadline_s)


def report_exit(address: str, rank: int, code: int, key: RunKey, *, deadline_s: float = 5.0) -> None:
    """Tell the rendezvous, from another host's supervisor, how a rank's process ended.

    Raises:
        RendezvousFailed: where it does not answer within ``deadline_s``.
    """
    with _Guest(address, key) as guest:
        until_s = time.monotonic() + deadline_s
        while (now_s := time.monotonic()) < until_s:
            guest.say(pack({"kind": "exited", "rank": rank, "code": code}))
            if (answer := guest.hear(min(now_s + _REPEAT_S, until_s))) and answer.get("kind") == "noted":
                return
    raise RendezvousFailed(f"the rendezvous at {address} did not take the exit of rank {rank} in {deadline_s:g} s")


class ExitWatch:
    """Learns from the rendezvous, in a thread of its own, how the ranks of all hosts end.

    Args:
        on_exit: called on that thread, once per rank, with the rank and its exit code.
    """

    def __init__(self, address: str, key: RunKey, on_exit: Callable[[int, int], None]) -> None:
        self._address, self._key, self._on_exit = address, key, on_exit
        self._closing = threading.Event()
        self._seen: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="rrfp-exits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        # Refused after it was accepted: another run has taken the place of the one that is watched.
        with suppress(RendezvousFailed), _Guest(self._address, self._key) as guest:
            next_s = 0.0
            while not self._closing.is_set():
                if time.monotonic() >= next_s:  # again and again: the connection may have been renewed meanwhile
                    guest.say(pack({"kind": "supervise"}))
                    next_s = time.monotonic() + _REPEAT_S
                answer = guest.hear(time.monotonic() + _REPEAT_S / 4)
                if answer and answer.get("kind") == "exited" and answer.get("rank") not in self._seen:
                    self._seen.add(answer["rank"])
                    self._on_exit(answer["rank"], answer["code"])


class _Guest:
    """A connection to the rendezvous."""

    def __init__(self, address: str, key: RunKey) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        self._socket.maxmsgsize = MAX_ANSWER_BYTES
        self._monitor = watch(self._socket)
        self._num_refused = 0
        connect_as(self._socket, key.pair(MEMBER_ROLE), key.pair(SERVER_ROLE).public)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"'{address}' is no address of a rendezvous: give tcp://host:port") from error

    def meet(self, hello: bytes, until_s: float) -> tuple[Member, ...]:
        next_s, has_answered = 0.0, False
        while time.monotonic() < until_s:
            if time.monotonic() >= next_s and not has_answered:
                self.say(hello)
                next_s = time.monotonic() + _REPEAT_S
            answer = self.hear(min(next_s, until_s) if not has_answered else until_s)
            match answer:
                case {"kind": "waiting", "remaining_s": float() as remaining_s}:
                    has_answered = True
                    until_s = time.monotonic() + remaining_s + _MARGIN_S
                case {"kind": "failed", "text": str() as text}:
                    raise RendezvousFailed(text)
                case {"kind": "complete"}:
                    return tuple(Member.from_dict(data) for data in field(answer, "members", list))
        state = "fell silent" if has_answered else "did not answer: is the launcher running, and the address right?"
        raise RendezvousFailed(f"the rendezvous at {self._address} {state}")

    def say(self, data: bytes) -> None:
        with suppress(zmq.Again):  # refused, and not yet connected again: said again later
            self._socket.send(data, zmq.NOBLOCK)

    def hear(self, until_s: float) -> dict[str, Any] | None:
        """The next answer before ``until_s``, if any."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(round(max(0.0, until_s - time.monotonic()) * 1000) + 1))
        if self._monitor in ready:
            self._check_handshakes()
        if self._socket not in ready:
            return None
        try:
            answer = unpack(self._socket.recv(zmq.NOBLOCK), MAX_ANSWER_BYTES)
        except MalformedMessage:
            return None
        return answer if isinstance(answer, dict) else None

    def _check_handshakes(self) -> None:
        self._num_refused += sum(event.failed is not None for event in connection_events(self._monitor))
        if self._num_refused >= _MAX_REFUSALS:
            raise RendezvousFailed(
                f"the rendezvous at {self._address} does not accept this process's run key: every process of a run "
                "needs the key that its launcher made"
            )

    def close(self) -> None:
        self._monitor.close()
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> "_Guest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
