"""Wishes of single processes for the whole run: to stop after the next step or the one after it, and to save the state.

A wish to stop is told once along the control tree, so every process soon knows of it. One clock decides when it is time
to save by the minute. Neither is acted upon before the process that works out a step's verdict has put it into the
verdict, which all processes read alike, at the same step.

**If the stage of that process spans several processes**, each of them works the verdict out, and all must find the
same. So the first of them decides the wishes in the *next* step's verdict, and tells the others. The message has
arrived when they need it: it is handed to the event loop before the first process has any part in choosing that step's
tasks, as are all notes by which it chooses; the loop sends in that order, and messages to a rank keep their order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from rrfp_jax.cluster.wire import field
from rrfp_jax.planning.layout import Layout
from rrfp_jax.runtime.gatherings import Network
from rrfp_jax.tree import neighbours

_STOP, _DECISION = "stop", "decision"

Decision = tuple[bool, bool]
"""Whether to stop, and whether to save."""


class Wishes:
    """The wishes that one process has or has heard of.

    Args:
        network: how to tell others; None where there are none.
    """

    def __init__(self, network: Network | None, layout: Layout) -> None:
        self._network, self._layout = network, layout
        self._decided: dict[int, Decision] = {}
        """By step, where the deciding stage spans several processes."""
        self._was_time_to_save = False
        self.stop = False
        """Whether any process has asked to stop, as far as is known here."""
        self.is_time_to_save: Callable[[], bool] = lambda: False
        """Whether enough time has passed since the last save; asked once per step, and must return at once."""
        if network is not None:
            self._neighbours = neighbours(network.rank, network.num_ranks)
            network.subscribe(_STOP, lambda *_: self._tell_all())
            network.subscribe(_DECISION, self._hear_decision)

    def ask_to_stop(self) -> None:
        """Ask all processes to stop; from any thread or signal handler."""
        if self._network is None:
            self.stop = True
        else:
            self._network.call_soon(self._tell_all)

    def decide(self, unit: int, step: int) -> Decision:
        """What the verdict of a step says, worked out once by each process of ``unit``."""
        leader, *followers = self._layout.ranks_of(unit)
        if not followers:
            return self._now()
        network = self._network
        assert network is not None
        if network.rank == leader:
            self._decided[step + 1] = stop, save = self._now()
            told = {"step": step + 1, "stop": stop, "save": save}
            for rank in followers:
                network.call_soon(partial(network.send, rank, _DECISION, told))
        return self._decided.pop(step, (False, False))

    def _now(self) -> Decision:
        is_time, was_time = self.is_time_to_save(), self._was_time_to_save
        self._was_time_to_save = is_time
        return self.stop, is_time and not was_time  # until it has been saved, it stays time

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _tell_all(self) -> None:
        if not self.stop:
            self.stop = True
            assert self._network is not None
            for rank in self._neighbours:
                self._network.send(rank, _STOP, {})

    def _hear_decision(self, _: int, header: dict[str, Any], __: list[memoryview]) -> None:
        self._decided[field(header, "step", int)] = field(header, "stop", bool), field(header, "save", bool)
