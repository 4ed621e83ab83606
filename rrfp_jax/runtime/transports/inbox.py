"""Messages whose parts come from several ranks: collected on the event loop, assembled, and delivered once complete."""

from collections.abc import Sequence
from typing import Any

from rrfp_jax.runtime.transports.assembly import assemble, is_quick
from rrfp_jax.runtime.transports.edges import EdgePlan, num_bytes_of
from rrfp_jax.runtime.transports.interface import Deliver, HeldBytes
from rrfp_jax.runtime.transports.parts import Key
from rrfp_jax.runtime.transports.workers import Workers

_STEPS_REMEMBERED = 4
"""Stages are at most a step or two apart, so parts of older steps do not come any more."""


class Inbox:
    """Takes parts in any order; a part that comes again changes nothing."""

    def __init__(self, deliver: Deliver, workers: Workers, held: HeldBytes) -> None:
        self._deliver, self._workers, self._held = deliver, workers, held
        self._waiting: dict[Key, dict[int, Sequence[Any]]] = {}
        self._complete: dict[int, set[Key]] = {}

    def part(self, plan: EdgePlan, key: Key, sender: int, pieces: Sequence[Any]) -> None:
        """A part of a message has come from ``sender``."""
        num_parts = len(plan.incoming)
        if num_parts == 1:
            self._finish(plan, key, {sender: pieces})
            return
        if key in self._complete.get(key.step, ()):
            return
        parts = self._waiting.setdefault(key, {})
        if sender in parts:
            return
        parts[sender] = pieces
        self._held.add(received=num_bytes_of(plan.incoming[sender]))
        if len(parts) == num_parts:
            del self._waiting[key]
            self._remember(key)
            self._held.add(received=-plan.incoming_bytes)
            self._finish(plan, key, parts)

    def forget(self) -> None:
        """Steps are counted anew."""
        self._waiting.clear()
        self._complete.clear()

    def whole(self, plan: EdgePlan, key: Key, payload: Any) -> None:
        """A message has come that is assembled already."""
        self._deliver(plan.target_unit, key.step, key.message, payload)

    def _remember(self, key: Key) -> None:
        self._complete.setdefault(key.step, set()).add(key)
        for step in [step for step in self._complete if step <= key.step - _STEPS_REMEMBERED]:
            del self._complete[step]

    def _finish(self, plan: EdgePlan, key: Key, parts: dict[int, Sequence[Any]]) -> None:
        if is_quick(plan):
            self.whole(plan, key, assemble(plan, parts))
            return
        self._held.add(received=plan.incoming_bytes)
        self._workers.submit(lambda: assemble(plan, parts), lambda payload: self._assembled(plan, key, payload))

    def _assembled(self, plan: EdgePlan, key: Key, payload: Any) -> None:
        self._held.add(received=-plan.incoming_bytes)
        self.whole(plan, key, payload)
