"""How long each peer has been silent, in time during which this process was itself awake.

A process that was stopped, or whose machine slept, would otherwise wake up and find every peer silent. So the clock
here advances by at most ``2 * interval_s`` between two looks, however long the gap was.

A peer is given up an interval before its deadline: what follows takes a moment, and has to be over by then.
"""

from collections.abc import Iterable

_BEATS_PER_DEADLINE = 8
_MAX_INTERVAL_S = 5.0


class Pulse:
    """Hears the peers' heartbeats; time enters as data.

    Args:
        peers: the ranks to be heard.
        deadline_s: the silence, or the time that a peer's event loop does not run, by which it counts as lost.
        now_s: any monotonic clock's reading.
    """

    def __init__(self, peers: Iterable[int], deadline_s: float, now_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = min(deadline_s / _BEATS_PER_DEADLINE, _MAX_INTERVAL_S)
        self.awake_s = 0.0
        self._last_look_s = now_s
        self._heard_s = dict.fromkeys(peers, 0.0)
        self._blocked_s: dict[int, float] = {}

    def advance(self, now_s: float) -> None:
        """Take a look at the clock; to be called at least once per interval."""
        self.awake_s += min(now_s - self._last_look_s, 2 * self.interval_s)
        self._last_look_s = now_s

    def expect(self, rank: int) -> None:
        """One more peer is to be heard."""
        self._heard_s[rank] = self.awake_s

    def hear(self, rank: int, blocked_s: float) -> None:
        """A heartbeat came; ``blocked_s`` says for how long the peer's event loop has not run."""
        if rank in self._heard_s:
            self._heard_s[rank] = self.awake_s
            self._blocked_s[rank] = blocked_s

    def forget(self, rank: int) -> None:
        """The peer has left or is lost: nothing more is expected from it."""
        self._heard_s.pop(rank, None)
        self._blocked_s.pop(rank, None)

    def overdue(self) -> list[tuple[int, str, bool]]:
        """The peers beyond the deadline: each with the reason, and whether it is alive but its event loop hangs.

        Once one is silent for too long, so are those named that have been so for nearly as long: what breaks a
        connection breaks others too, and they are not heard at the same moment.
        """
        silent_s = {rank: self.awake_s - heard_s for rank, heard_s in self._heard_s.items()}
        limit_s = self.deadline_s - self.interval_s
        if any(seconds > limit_s for seconds in silent_s.values()):
            limit_s -= self.interval_s
        return [
            *((rank, f"silent for {seconds:.1f} s", False) for rank, seconds in silent_s.items() if seconds > limit_s),
            *(
                (rank, f"its event loop has not run for {seconds:.1f} s", True)
                for rank, seconds in self._blocked_s.items()
                if seconds > self.deadline_s and silent_s[rank] <= limit_s
            ),
        ]
