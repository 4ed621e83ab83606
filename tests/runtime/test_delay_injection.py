"""Messages are handed over when they are due, in parts of a millisecond too, and not after the end."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rrfp_jax.cluster.loop_thread import LoopThread
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.runtime.sleeping import DelayInjection

DELAYS_S = {0: 0.0, 1: 0.0006, 2: 0.0014, 3: 0.3}


def message(chunk: int) -> Message:
    return Message(MessageKind.ACTIVATION, chunk, chunk + 1, 0)


class Links:
    """A loop, and what was handed over on it."""

    def __init__(self) -> None:
        self.thread = LoopThread()
        self.heard: list[tuple[float, str, Any]] = []
        self.count = threading.Semaphore(0)
        self.late = DelayInjection(self.thread.loop, self.deliver, lambda message: DELAYS_S[message.source])

    def deliver(self, unit: int, step: int, message: Message, payload: Any) -> None:
        self.heard.append((time.perf_counter(), threading.current_thread().name, (unit, step, message, payload)))
        self.count.release()

    def send(self, chunk: int) -> float:
        """And tell when it was sent."""
        sent_s = time.perf_counter()
        self.thread.call(self.late, 1, 2, message(chunk), "payload")
        return sent_s


@contextmanager
def links() -> Iterator[Links]:
    made = Links()
    try:
        yield made
    finally:
        made.thread.call(made.late.stop)
        made.late.close()
        made.thread.close()
    assert not any(thread.name == "rrfp-links" for thread in threading.enumerate())


def test_each_comes_when_it_is_due() -> None:
    with links() as made:
        for chunk in (0, 1, 2):
            lasted_s = []
            for _ in range(40):
                sent_s = made.send(chunk)
                assert made.count.acquire(timeout=10)
                lasted_s.append(made.heard[-1][0] - sent_s)
            assert min(lasted_s) >= DELAYS_S[chunk] - 3e-4
            assert min(abs(each - DELAYS_S[chunk]) for each in lasted_s) < 2e-4
    assert made.heard[0][1:] == ("rrfp-loop", (1, 2, message(0), "payload"))


def test_the_order_is_that_of_when_they_are_due_and_the_end_is_the_end() -> None:
    with links() as made:
        # In one call on the loop: nothing can be handed over between two sends, however slow this machine is.
        made.thread.call(lambda: [made.late(1, 2, message(chunk), "payload") for chunk in (3, 1, 1, 0)])
        for _ in range(4):
            assert made.count.acquire(timeout=10)
        made.send(3)
    assert [each[2][2].source for each in made.heard] == [0, 1, 1, 3]
    time.sleep(1.2 * DELAYS_S[3])
    assert len(made.heard) == 4
